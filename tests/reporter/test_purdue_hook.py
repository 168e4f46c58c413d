"""PU4 and PU5 in the engine's process: what the hook costs, what it sends, and that the engine never notices."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from ranvier_py.core.engine_cache.sources import push_messages
from ranvier_py.core.engine_cache.sources.event_frames import PAYLOAD_BYTES_MAX
from ranvier_py.core.engine_cache.sources.event_values import BLOCK_TOKENS_MAX
from ranvier_py.reporter import hook
from ranvier_py.reporter.event_relay import CHUNK_BYTES
from ranvier_py.reporter.hook import EVICTION_PATH, SYNC_PATH, EvictionReporter, PrefixSender
from tests.control.test_worker_reports import CONTROL_KEY, Served, start
from tests.io.engine_events.kv_fakes import until

CALLS = 20_000
SOON_S = 0.5


def hexed(number: int) -> str:
    return f"{number << 200 | number:064x}"


@asynccontextmanager
async def reporting(*routers: Served, **options: Any) -> AsyncIterator[EvictionReporter]:
    """A started reporter for worker w0 of these routers."""
    reporter = EvictionReporter("w0", [router.url for router in routers], **{"sync_s": SOON_S, **options})
    reporter.start()
    try:
        yield reporter
    finally:
        await trio.to_thread.run_sync(reporter.stop)


@pytest.fixture
async def router(nursery: trio.Nursery) -> AsyncIterator[Served]:
    yield await start(nursery)
    nursery.cancel_scope.cancel()


def seconds_each(call: Callable[[int], object]) -> float:
    """Processor time of one call, the best of several runs: others use this machine, too."""
    found = []
    for _ in range(5):
        began = time.thread_time()
        for number in range(CALLS // 5):
            call(number)
        found.append((time.thread_time() - began) / (CALLS // 5))
    return min(found)


def test_pu5_the_engines_thread_pays_less_than_ten_microseconds() -> None:
    reporter = EvictionReporter("w0", ["http://127.0.0.1:1"], hashes="blocks")
    ids = list(range(16))
    assert seconds_each(reporter.free_block) < 10e-6
    assert seconds_each(lambda number: reporter.store_block(number, ids, number - 1)) < 10e-6


async def test_pu5_ten_thousand_evictions_in_a_moment_are_one_report(router: Served) -> None:
    async with reporting(router) as reporter:
        for number in range(1, 10_001):
            reporter.store_block(hexed(number))
        await until(lambda: len(router.world.reports.map) == 10_000)
        counters = router.world.reports.map.counters
        before = counters.messages - counters.syncs
        for number in range(1, 10_001):
            reporter.free_block(hexed(number))
        await until(lambda: len(router.world.reports.map) == 0)
        assert counters.messages - counters.syncs - before <= 2, "two where the last batch fell into the middle"


async def test_pu4_a_router_that_is_not_there_costs_the_engine_nothing_and_receives_all_when_it_comes() -> None:
    async with trio.open_nursery() as nursery:
        first = await start(nursery)
        port = int(first.url.rpartition(":")[2])
        nursery.cancel_scope.cancel()
    reporter = EvictionReporter("w0", [first.url], sync_s=SOON_S)
    reporter.start()
    for number in range(1, 100):
        reporter.store_block(hexed(number))
    reporter.free_block(hexed(1))
    await until(lambda: reporter.links[0].failures > 1)
    async with trio.open_nursery() as nursery:
        again = await start(nursery, at=port)
        await until(lambda: len(again.world.reports.map) == 98)
        await trio.to_thread.run_sync(reporter.stop)
        nursery.cancel_scope.cancel()


async def test_several_routers_are_each_reported_and_one_that_is_gone_holds_up_nobody(nursery: trio.Nursery) -> None:
    one, other = await start(nursery), await start(nursery)
    gone = Served(one.world, "http://127.0.0.1:1")
    async with reporting(one, gone, other) as reporter:
        reporter.store_block(hexed(7))
        await until(lambda: all(len(each.world.reports.map) == 1 for each in (one, other)))
        reporter.free_block(hexed(7))
        await until(lambda: all(len(each.world.reports.map) == 0 for each in (one, other)))
    nursery.cancel_scope.cancel()


async def test_blocks_with_their_tokens_leave_as_events_and_are_known_exactly(nursery: trio.Nursery) -> None:
    router = await start(nursery, key=CONTROL_KEY)
    reports = router.world.reports

    async def tick() -> None:
        while True:
            router.world.now += 0.01
            reports.events.tick(router.world.now)
            await trio.sleep(0.01)

    async with trio.open_nursery() as ticking:
        ticking.start_soon(tick)
        async with reporting(router, hashes="blocks", key=CONTROL_KEY) as reporter:
            for block in range(5):
                reporter.store_block(100 + block, range(16 * block, 16 * block + 16), 99 + block if block else None)
            reporter.store_block("odd", range(16))
            await until(lambda: [(each["level"], each["hashes"]) for each in reports.views()] == [("exact", 5)])
            assert router.world.router.routes.counters.claims["confirmed"] == 3, "at 16, 32 and 64 tokens"
            reporter.free_block(102)
            await until(lambda: reports.views()[0]["hashes"] == 2)
            reporter.clear()
            reporter.store_block(7, range(16))
            await until(lambda: [(each["level"], each["hashes"]) for each in reports.views()] == [("exact", 1)])
            assert reporter.odd == 1
        ticking.cancel_scope.cancel()
    nursery.cancel_scope.cancel()


async def test_pu10_what_the_hook_missed_a_scan_of_the_engine_finds(router: Served) -> None:
    held = {hexed(1), hexed(2)}

    def reported() -> set[int]:
        return {key for worker in router.world.reports.map.workers.values() for key in worker.hashes}

    async with reporting(router, scan=lambda: list(held)) as reporter:
        reporter.store_block(hexed(9))  # and its eviction is never reported
        await until(lambda: reported() == {int(name, 16) for name in held})
        held.discard(hexed(2))
        await until(lambda: len(router.world.reports.map) == 1)


async def test_a_scan_of_more_than_a_router_takes_is_reported_as_far_as_it_does(
    router: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each router refuses every sync, and gets no eviction either."""
    monkeypatch.setattr(hook, "ACTIVE_MAX", 3)
    monkeypatch.setattr(push_messages, "ACTIVE_MAX", 3)
    async with reporting(router, scan=lambda: map(hexed, range(1, 10))):
        await until(lambda: len(router.world.reports.map) == 3)


async def test_what_makes_no_sense_is_counted_and_the_rest_is_reported(router: Served) -> None:
    def scan() -> list[str]:
        raise RuntimeError("the engine's own trouble")

    async with reporting(router, scan=scan) as reporter:
        for odd in ("short", "g" * 64, 5, b"\x00", None, object()):
            reporter.store_block(odd)  # type: ignore[arg-type]
            reporter.free_block(odd)  # type: ignore[arg-type]
        reporter.store_block(hexed(1))
        await until(lambda: len(router.world.reports.map) == 1)


async def test_blocks_that_no_event_can_carry_are_counted_and_cost_no_other(router: Served) -> None:
    """A client chooses the salt: one that is no Unicode made the reporter give up all that it knew."""
    async with reporting(router, hashes="blocks") as reporter:
        reporter.store_block(1, range(16))
        reporter.store_block(2, range(16), salt="\ud800")
        reporter.store_block(3, [1 << 70] * 16)
        reporter.store_block(4, [-1] * 16)
        reporter.store_block(5, range(16), parent=object())  # type: ignore[arg-type]
        await until(lambda: reporter.events.next > 0)
        assert (reporter.odd, reporter.events.runs) == (4, 0)
        assert not reporter.faults.counters.unexpected_errors


async def test_what_an_engine_stores_in_a_moment_leaves_in_batches_that_routers_take(router: Served) -> None:
    reporter = EvictionReporter("w0", [router.url], hashes="blocks")
    reporter.store_block(1, [0] * (BLOCK_TOKENS_MAX + 1))
    reporter.store_block(1, [0] * 16, salt="s" * PAYLOAD_BYTES_MAX)
    for number in range(10_000):
        reporter.store_block(number, [70_000 + number] * 64)
    reporter.start()
    await until(lambda: reporter.events.next > 0)
    await trio.to_thread.run_sync(reporter.stop)
    sizes, first = [], 0
    while found := reporter.events.since(first):
        sizes += [len(payload) for _, payload in found]
        first = found[-1][0] + 1
    assert sum(sizes) > 3_000_000
    assert max(sizes) < 2 * CHUNK_BYTES
    assert reporter.odd == 2


async def test_calls_beyond_the_bound_are_dropped_and_nothing_is_believed_any_more(
    router: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reporting(router) as reporter:
        reporter.store_block(hexed(1))
        await until(lambda: len(router.world.reports.map) == 1)
        monkeypatch.setattr(hook, "WAITING_MAX", 0)
        reporter.free_block(hexed(5))
        assert reporter.dropped == 1
        await until(lambda: len(router.world.reports.map) == 0)


async def test_a_block_whose_eviction_was_dropped_is_not_believed_though_its_store_waits(
    router: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = EvictionReporter("w0", [router.url])
    monkeypatch.setattr(hook, "WAITING_MAX", 1)
    reporter.store_block(hexed(1))
    reporter.free_block(hexed(1))
    monkeypatch.setattr(hook, "WAITING_MAX", 1_000)
    reporter.start()
    await until(lambda: reporter.store_block(hexed(2)) or reporter.held)
    assert (list(reporter.held), reporter.dropped) == ([hexed(2)], 1)
    await trio.to_thread.run_sync(reporter.stop)


async def test_a_block_that_is_stored_while_waiting_calls_are_forgotten_is_held(
    router: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Calls(deque[Any]):
        def clear(self) -> None:
            super().clear()
            reporter.store_block(hexed(2))

    monkeypatch.setattr(hook, "deque", Calls)
    reporter = EvictionReporter("w0", [router.url])
    monkeypatch.setattr(hook, "WAITING_MAX", 1)
    reporter.store_block(hexed(1))
    reporter.free_block(hexed(1))
    reporter.start()
    await until(lambda: reporter.held)
    assert list(reporter.held) == [hexed(2)]
    await trio.to_thread.run_sync(reporter.stop)


async def test_what_is_left_is_sent_before_it_ends(router: Served) -> None:
    async with reporting(router, sync_s=5.0) as reporter:
        reporter.store_block(hexed(1))
    assert len(router.world.reports.map) == 1


async def test_all_calls_that_wait_when_it_ends_are_sent(router: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "TURN_CALLS", 10)
    async with reporting(router, sync_s=5.0) as reporter:
        for number in range(1, 201):
            reporter.store_block(hexed(number))
    assert len(router.world.reports.map) == 200


@pytest.mark.parametrize(
    "options",
    [{"hashes": "nonsense"}, {"hashes": "blocks", "scan": list}, {"worker_id": ""}, {"routers": []}, {"key": "a\nb"}],
)
def test_what_can_not_work_is_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"hashes|worker_id|key"):
        EvictionReporter(**{"worker_id": "w0", "routers": ["http://127.0.0.1:1"], **options})


def sent(sender: PrefixSender, now: float) -> tuple[str, Any] | None:
    """What leaves at this moment, and is answered."""
    posting = sender.next(now)
    if posting is not None:
        sender.answered({}, now)
    return posting


def test_pu4_pu6_the_messages_have_the_members_of_the_listing_and_their_times() -> None:
    held: dict[str, None] = {"a": None, "b": None}
    sender = PrefixSender("w1", "", held)
    assert sent(sender, 0.0) == (SYNC_PATH, {"worker_id": "w1", "active_hashes": ["a", "b"]})
    assert sent(sender, 0.1) is None, "nothing is sent when there is nothing to say"
    del held["a"]
    sender.evicted(["a"])
    assert sent(sender, 0.2) == (EVICTION_PATH, {"worker_id": "w1", "evicted_hashes": ["a"]})
    sender.evicted(["c"])
    assert sent(sender, 0.25) is None, "every 100 ms"
    syncs = [tenth / 10 for tenth in range(3, 200) if (posting := sent(sender, tenth / 10)) and posting[0] == SYNC_PATH]
    assert syncs == [5.0, 10.0, 15.0]


def test_px6_what_was_not_answered_is_sent_again_as_it_is_by_then() -> None:
    held: dict[str, None] = {}
    sender = PrefixSender("w1", "m", held)
    sent(sender, 0.0)
    sender.evicted(["a", "b"])
    assert sender.next(1.0) is not None
    held["a"] = None  # cached again
    sender.evicted(["c"])
    again = sender.next(2.0)
    assert again == (EVICTION_PATH, {"worker_id": "w1", "model": "m", "evicted_hashes": ["b", "c"]})
    sender.answered({}, 2.0)
    assert sender.is_idle


def test_px6_what_waits_is_bounded_and_a_sync_is_sent_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "PENDING_MAX", 100)
    sender = PrefixSender("w1", "", {})
    sent(sender, 0.0)
    sender.evicted([str(number) for number in range(150)])
    assert sender.overflowed == 150
    posting = sender.next(0.1)
    assert posting is not None
    assert posting.path == SYNC_PATH
