"""`ranvier reporter`: its flags, and the stream of events that it follows."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ranvier_py.cli import EXIT_CONFIG, main
from ranvier_py.core.kv.gap_values import AskReplay, Level
from ranvier_py.core.kv.push_credentials import worker_of
from ranvier_py.core.kv.values import BlocksStored
from ranvier_py.reporter.flags import KEY_VARIABLE
from ranvier_py.reporter.intake import Call, Cleared, Heard
from ranvier_py.reporter.stream import ReportedStream


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
