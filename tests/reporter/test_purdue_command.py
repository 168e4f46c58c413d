"""`ranvier reporter`: its flags, and the ranks of an engine that it relays."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from ranvier_py.cli import main
from ranvier_py.commands.exit_codes import EXIT_CONFIG
from ranvier_py.core.engine_cache.gaps import GapMachine
from ranvier_py.core.engine_cache.sources.publishers import Publisher, of_operator
from ranvier_py.core.engine_cache.sources.push_credentials import worker_of
from ranvier_py.core.ids import BackendId
from ranvier_py.io.engine_events.zmq_source import SubscriberState
from ranvier_py.reporter import KEY_VARIABLE
from ranvier_py.reporter import reporter_command as command
from ranvier_py.reporter.event_relay import EventRelay


def test_every_problem_of_the_flags_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reporter", "--events", "nonsense", "--ranks", "0"]) == EXIT_CONFIG
    words = capsys.readouterr().err
    for part in ("--worker-id", "--router", "tcp://", "--ranks"):
        assert part in words
    asked = ["--worker-id", "w0", "--router", "http://a:1", "--engine", "http://e:1"]
    assert main(["reporter", *asked, "--replay", "tcp://e:2", "--ranks", "2"]) == EXIT_CONFIG
    words = capsys.readouterr().err
    assert "--replay: needs --events" in words
    assert "--ranks: needs --events" in words


def test_a_host_that_no_resolver_can_be_asked_for_is_refused_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--worker-id",
        "w0",
        "--router",
        "http://a..b:1",
        "--engine",
        "http://10.0.0.256",
        "--replay",
        "tcp://-a:1",
    ]
    assert main(["reporter", *flags]) == EXIT_CONFIG
    words = capsys.readouterr().err
    for part in (
        "--router: the host must have no empty label",
        "--engine: the host must be a name",
        "--replay: a label",
    ):
        assert part in words


def test_pu12_the_operator_makes_a_worker_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert main(["reporter", "--make-key", "w0"]) == EXIT_CONFIG
    (tmp_path / "key").write_text("the control key\n")
    assert main(["reporter", "--make-key", "w0", "--key-file", str(tmp_path / "key")]) == 0
    assert worker_of(capsys.readouterr().out.strip(), "the control key") == "w0"
    (tmp_path / "key").write_bytes(b"\xff")
    assert main(["reporter", "--make-key", "w0", "--key-file", str(tmp_path / "key")]) == EXIT_CONFIG
    assert "is not text" in capsys.readouterr().err
    monkeypatch.setenv(KEY_VARIABLE, "the control key\n")
    assert main(["reporter", "--make-key", "w0"]) == 0
    assert worker_of(capsys.readouterr().out.strip(), "the control key") == "w0"
    monkeypatch.setenv(KEY_VARIABLE, "two\nlines")
    assert main(["reporter", "--make-key", "w0"]) == EXIT_CONFIG
    assert "one line of text" in capsys.readouterr().err


class Relays:
    """What would be read and relayed, without a socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[int] = []
        self.heads: list[tuple[str, Any]] = []
        read = self.read

        class Subscriber:
            def __init__(
                self, _sockets: object, publisher: Publisher, machine: GapMachine, *_: object, faults: object
            ) -> None:
                self.publisher, self.state = publisher, SubscriberState()

            async def run(self) -> None:
                read.append(self.publisher.rank)
                try:
                    await trio.sleep_forever()
                finally:
                    read.remove(self.publisher.rank)

        async def run(link: command.RouterLink, relay: EventRelay) -> None:
            posting = relay.next(0.0)
            assert posting is not None
            self.heads.append((link.url, posting.body))
            await trio.sleep_forever()

        monkeypatch.setattr(command, "KvSubscriber", Subscriber)
        monkeypatch.setattr(command.RouterLink, "run", run)


async def test_each_rank_is_read_once_and_relayed_to_each_router(monkeypatch: pytest.MonkeyPatch) -> None:
    relays = Relays(monkeypatch)
    options = Namespace(worker_id="w0", model="", router=["http://a:1", "http://b:1"], engine="")
    two = of_operator("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", 2, "127.0.0.1")
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            reporter = command.Reporter(options, "", None, nursery)  # type: ignore[arg-type]
            reporter.found(BackendId(0), two)
            await trio.testing.wait_all_tasks_blocked()
            assert sorted(relays.read) == [0, 1]
            assert sorted((url, body["rank"]) for url, body in relays.heads) == [
                ("http://a:1", 0), ("http://a:1", 1), ("http://b:1", 0), ("http://b:1", 1),
            ]  # fmt: skip
            assert all(body["ranks"] == [0, 1] and not body["connected"] for _, body in relays.heads)
            reporter.found(BackendId(0), two[:1])
            await trio.testing.wait_all_tasks_blocked()
            assert relays.read == [0], "what was read before is not any more"
            nursery.cancel_scope.cancel()


async def test_an_engine_that_publishes_nothing_is_logged(
    caplog: pytest.LogCaptureFixture, autojump_clock: object
) -> None:
    """Else a reporter would run beside it for ever, and nobody would know why nothing comes."""
    caplog.set_level(logging.WARNING)
    async with trio.open_nursery() as nursery:
        options = Namespace(worker_id="w0", model="", router=["http://a:1"], engine="http://e:1")
        await command.Reporter(options, "", None, nursery).warn()  # type: ignore[arg-type]
    assert "http://e:1" in caplog.text
