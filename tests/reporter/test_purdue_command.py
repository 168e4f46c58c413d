"""`ranvier reporter`: its flags, and the stream of events that it follows."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
import trio.testing

from ranvier_py.cli import EXIT_CONFIG, main
from ranvier_py.core.engine_cache.gap_values import AskReplay, Level
from ranvier_py.core.engine_cache.sources.event_values import BlocksStored, CacheCleared
from ranvier_py.core.engine_cache.sources.publishers import Publisher, of_operator
from ranvier_py.core.engine_cache.sources.push_book import BlockScheme, BlockSource, Book
from ranvier_py.core.engine_cache.sources.push_credentials import worker_of
from ranvier_py.core.ids import BackendId
from ranvier_py.reporter import reporter_command as command
from ranvier_py.reporter.event_input import ReportedStream
from ranvier_py.reporter.intake import Call, Cleared, Heard, Intake
from ranvier_py.reporter.ranks import is_of, named
from ranvier_py.reporter.reporter_flags import KEY_VARIABLE


def message(number: int) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [number], "token_ids": list(range(16)), "block_size": 16}
    return bytes(msgpack.packb([0.0, [event], 0]))


def told(calls: deque[Call]) -> list[Any]:
    """Names of the blocks that were told of; "cleared" where all went."""
    found: list[Any] = []
    for call in calls:
        if isinstance(call, Heard):
            found += [event.hashes[0] for event in call.events if isinstance(event, BlocksStored)]
        elif isinstance(call, Cleared):
            found.append("cleared")
    return found


def connected(stream: ReportedStream) -> None:
    [ask] = [effect for effect in stream.connected(0.0) if isinstance(effect, AskReplay)]
    stream.replay_ended(ask.ask, 0.0)


def test_a_gap_is_asked_for_and_filled_in_order() -> None:
    calls: deque[Call] = deque()
    stream = ReportedStream(calls, replay=True)
    connected(stream)
    stream.live(0, message(10), 1.0)
    [ask] = [effect for effect in stream.live(2, message(12), 1.0) if isinstance(effect, AskReplay)]
    assert told(calls) == [10]
    for number in (0, 1, 2):
        stream.replayed(ask.ask, number, message(10 + number), 1.0)
    stream.replay_ended(ask.ask, 1.0)
    assert told(calls) == [10, 11, 12]
    assert stream.level is Level.EXACT


def test_a_restarted_engine_holds_nothing_of_before() -> None:
    calls: deque[Call] = deque()
    stream = ReportedStream(calls, replay=True)
    connected(stream)
    for number in (0, 1, 2):
        stream.live(number, message(10 + number), 1.0)
    effects = stream.live(0, message(99), 2.0)
    for effect in effects:
        if isinstance(effect, AskReplay):
            stream.replayed(effect.ask, 0, message(99), 2.0)
            stream.replay_ended(effect.ask, 2.0)
    assert told(calls)[3:] == ["cleared", 99]


def test_without_replay_a_gap_is_lived_with_and_said() -> None:
    stream = ReportedStream(deque(), replay=False)
    stream.connected(0.0)
    stream.live(0, message(10), 1.0)
    assert stream.level is Level.EXACT
    stream.live(5, message(15), 1.0)
    assert stream.level is not Level.EXACT


def test_what_is_no_batch_costs_its_message_alone() -> None:
    calls: deque[Call] = deque()
    stream = ReportedStream(calls, replay=False)
    stream.connected(0.0)
    stream.live(0, b"\xc1 nonsense", 1.0)
    stream.live(1, message(11), 1.0)
    assert told(calls) == [11]


def test_every_problem_of_the_flags_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reporter", "--events", "nonsense", "--plain"]) == EXIT_CONFIG
    words = capsys.readouterr().err
    for part in ("--worker-id", "--router", "tcp://", "name of the model", "--plain"):
        assert part in words


def test_pu12_the_operator_makes_a_worker_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert main(["reporter", "--make-key", "w0"]) == EXIT_CONFIG
    (tmp_path / "key").write_text("the control key\n")
    assert main(["reporter", "--make-key", "w0", "--key-file", str(tmp_path / "key")]) == 0
    assert worker_of(capsys.readouterr().out.strip(), "the control key") == "w0"


def message_of(*events: dict[str, Any]) -> bytes:
    return bytes(msgpack.packb([0.0, list(events), 0]))


def block(number: int, parent: int | None = None, tokens: range = range(16)) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": 16,
    }


class Ranks:
    """Two ranks of one engine, and the book that they fill."""

    def __init__(self) -> None:
        self.calls: deque[Call] = deque()
        self.streams = [ReportedStream(self.calls, replay=True, rank=rank) for rank in (0, 1)]
        self.book = Book()
        self.source = BlockSource(self.book, BlockScheme("m", key=b"k" * 32))
        self.intake = Intake(self.calls)
        for stream in self.streams:
            connected(stream)

    def count(self) -> int:
        while not self.intake.take(self.book, self.source):
            pass
        return len(self.book.table)


def test_what_one_of_an_engines_ranks_holds_the_engine_holds() -> None:
    ranks = Ranks()
    first, second = ranks.streams
    first.live(0, message_of(block(1), block(2, 1, range(16, 32))), 1.0)
    second.live(0, message_of(block(1)), 1.0)
    assert ranks.count() == 2
    first.live(1, message_of({"type": "BlockRemoved", "block_hashes": [2, 1]}), 1.0)
    assert ranks.count() == 1, "the other rank has the first block still"
    second.live(1, message_of({"type": "BlockRemoved", "block_hashes": [1]}), 1.0)
    assert ranks.count() == 0


@pytest.mark.parametrize("how", ["restarted", "cleared"])
def test_a_rank_that_holds_nothing_any_more_takes_its_own_blocks_only(how: str) -> None:
    ranks = Ranks()
    first, second = ranks.streams
    first.live(0, message_of(block(1), block(2, 1, range(16, 32))), 1.0)
    second.live(0, message_of(block(1)), 1.0)
    if how == "cleared":
        first.live(1, message_of(block(3), {"type": "AllBlocksCleared"}, block(5, None, range(64, 80))), 1.0)
        assert ranks.count() == 2
    else:
        first.live(0, message_of(block(7, None, range(64, 80))), 1.0)
        assert ranks.count() == 2
        assert first.machine.counters.restarts == 1
    second.live(1, message_of({"type": "BlockRemoved", "block_hashes": [1]}), 1.0)
    assert ranks.count() == 1


def test_names_of_ranks_never_meet() -> None:
    for rank in (0, 1, 63):
        for key in (0, 5, (1 << 64) - 1, b"\0\1five", b"5"):
            assert [other for other in (0, 1, 63) if is_of(named(key, other), rank)] == [rank]


def test_where_not_all_blocks_were_kept_a_rank_takes_everything_with_it() -> None:
    """Better nothing than phantoms: the next comparison tells routers what is really there."""
    ranks = Ranks()
    ranks.source = BlockSource(ranks.book, BlockScheme("m", key=b"k" * 32), kept_max=1)
    first, second = ranks.streams
    first.live(0, message_of(block(1)), 1.0)
    second.live(0, message_of(block(2, None, range(16, 32))), 1.0)
    assert ranks.count() == 2
    second.live(0, message_of(block(9, None, range(32, 48))), 1.0)
    assert ranks.count() == 1


def test_a_stream_that_was_closed_hands_nothing_on() -> None:
    calls: deque[Call] = deque()
    stream = ReportedStream(calls, replay=True)
    connected(stream)
    stream.close()
    stream.live(0, message(1), 1.0)
    assert not calls


def test_an_engine_that_is_not_understood_is_not_certain() -> None:
    """Routers would take what is not told for not held."""
    stream = ReportedStream(deque(), replay=True)
    connected(stream)
    stream.live(0, bytes(msgpack.packb([0.0, [{"type": "BlockKept", "block_hashes": [1]}], 0])), 1.0)
    assert stream.level is Level.EXACT
    assert not stream.is_understood
    stream.live(1, message(10), 1.0)
    assert stream.is_understood
    source = BlockSource(Book(), BlockScheme("m", key=b"k" * 32))
    source.apply(BlocksStored((1,), None, b"\0" * 64, 16))
    assert not source.lacks
    source.apply(BlocksStored((2,), None, b"\0" * 64, 16, kind="sliding_window"))
    assert source.lacks
    source.apply(CacheCleared())
    assert not source.lacks


async def test_all_ranks_are_heard_and_the_engine_is_certain_when_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []

    class Subscriber:
        def __init__(self, _sockets: object, publisher: Publisher, stream: ReportedStream, *_: object) -> None:
            self.publisher, self.stream = publisher, stream

        async def run(self) -> None:
            heard.append(self.publisher.rank)
            connected(self.stream)
            await trio.sleep_forever()

    monkeypatch.setattr(command, "KvSubscriber", Subscriber)
    calls: deque[Call] = deque()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            listening = command.Listening(nursery, None, calls)  # type: ignore[arg-type]
            assert not listening.certain()
            two = of_operator("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", 2, "127.0.0.1")
            listening.found(BackendId(0), two)
            assert not listening.certain()
            await trio.testing.wait_all_tasks_blocked()
            assert sorted(heard) == [0, 1]
            assert listening.certain()
            assert not calls
            listening.found(BackendId(0), two[:1])
            assert calls == deque([Cleared()])
            await trio.testing.wait_all_tasks_blocked()
            assert sorted(heard) == [0, 0, 1]
            nursery.cancel_scope.cancel()


async def test_an_engine_that_says_nothing_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, autojump_clock: object
) -> None:
    """Else a reporter would run beside it for ever, and nobody would know why nothing comes."""
    answers: list[dict[str, Any]] = [{}, {}, {"data": [{"id": "m", "root": "m"}]}]

    async def models_of(_: str) -> dict[str, Any]:
        return answers.pop(0)

    monkeypatch.setattr(command, "models_of", models_of)
    assert await command.first_model("http://e:1") == "m"
    async with trio.open_nursery() as nursery:
        listening = command.Listening(nursery, None, deque())  # type: ignore[arg-type]
        await listening.tell_deaf("http://e:1")
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "reporter.waiting for http://e:1 to say which base model it serves (or --model)",
        "reporter.deaf http://e:1 publishes no KV events, or does not answer; looking on",
    ]
