"""A bug in any loop of a reporter is noted and costs what that loop was doing: the reporter goes on."""

from __future__ import annotations

from argparse import Namespace
from contextlib import closing

import pytest
import trio

from ranvier_py.core.engine_cache.sources.publishers import of_operator
from ranvier_py.core.ids import BackendId
from ranvier_py.io.engine_events.zmq_sockets import KvSockets
from ranvier_py.reporter import reporter_command as command
from ranvier_py.reporter.hook import EvictionReporter
from tests.control.test_worker_reports import start
from tests.house import loops
from tests.io.engine_events.kv_fakes import until
from tests.planted_bugs import Bug, plant

FOLLOW = ("ranvier_py.reporter.hook", "EvictionReporter._follow")
LINK = ("ranvier_py.reporter.router_link", "RouterLink.run")
SUBSCRIBE = ("ranvier_py.io.engine_events.zmq_source", "KvSubscriber._subscribe")
SOON_S = 0.2
ELSEWHERE = {
    ("ranvier_py.reporter.hook", "EvictionReporter._report"): "its end, after `stop`",
    ("ranvier_py.reporter.reporter_command", "run"): "ends the command, at a signal",
    ("ranvier_py.reporter.router_link", "ask"): "one exchange, of which whatever is raised is an answer",
}


def test_these_are_all_the_loops_of_a_reporter() -> None:
    assert set(loops("reporter")) == {FOLLOW, LINK, *ELSEWHERE}


@pytest.mark.parametrize(("module", "name"), [FOLLOW, LINK], ids=["follow", "link"])
async def test_a_bug_in_the_hook_does_not_end_it(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    bug = Bug(2)
    plant(monkeypatch, module, name, bug)
    router = await start(nursery)
    reporter = EvictionReporter("w0", [router.url], sync_s=SOON_S)
    reporter.start()
    try:
        await until(lambda: bug.left == 0)
        reporter.store_block("1f" * 32)
        await until(lambda: len(router.world.reports.map) == 1)
        assert sum(reporter.faults.counters.unexpected_errors.values()) == 2
    finally:
        await trio.to_thread.run_sync(reporter.stop)
    nursery.cancel_scope.cancel()


async def test_what_a_bug_lost_in_the_hook_is_not_taken_as_held(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    router = await start(nursery)
    reporter = EvictionReporter("w0", [router.url], sync_s=SOON_S)
    hold, calls = reporter._hold, 0

    def fail_at_the_second(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("a bug of ours")
        hold(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(reporter, "_hold", fail_at_the_second)
    reporter.store_block("1f" * 32)
    reporter.free_block("1f" * 32)
    reporter.start()
    await until(lambda: reporter.faults.counters.unexpected_errors and not reporter.held)
    await until(lambda: len(router.world.reports.map) == 0)
    await trio.to_thread.run_sync(reporter.stop)
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("module", "name"), [LINK, SUBSCRIBE], ids=["link", "subscribe"])
async def test_a_bug_in_the_command_does_not_end_it(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    bug = Bug(2)
    plant(monkeypatch, module, name, bug)
    options = Namespace(worker_id="w0", model="", router=["http://127.0.0.1:1"], engine="")
    with closing(KvSockets()) as sockets:
        reporter = command.Reporter(options, "", sockets, nursery)
        reporter.found(BackendId(0), of_operator("tcp://127.0.0.1:1", "", 1, "127.0.0.1"))
        await until(lambda: bug.rounds > 2)
        assert sum(reporter.faults.counters.unexpected_errors.values()) == 2
        nursery.cancel_scope.cancel()
