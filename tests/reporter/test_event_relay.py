"""Event batches from a reporter's log to a router's route table, over a wire that loses what a test wants."""

from __future__ import annotations

from random import Random
from typing import Any

import msgpack
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.gap_values import Apply, Level, StreamReset
from ranvier_py.core.engine_cache.sources.event_frames import PAYLOAD_BYTES_MAX
from ranvier_py.core.engine_cache.sources.push_messages import read_events
from ranvier_py.core.errors import Unavailable
from ranvier_py.core.ids import BackendId
from ranvier_py.node.engine_cache.pushed_events import SILENT_S
from ranvier_py.reporter.event_relay import BATCH_S, BEAT_S, CHUNK_BYTES, EventLog, EventRelay, RouterPost
from tests.examples import examples
from tests.node.test_purdue_reports import World

W0 = BackendId(0)
BLOCK = 16


def block(number: int, parent: int | None = None, *, first: int | None = None) -> dict[str, Any]:
    start = BLOCK * number if first is None else first
    tokens = list(range(start, start + BLOCK))
    return {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
    }


def message(*events: dict[str, Any]) -> bytes:
    return bytes(msgpack.packb([0.0, list(events), 0]))


REMOVED = [{"type": "BlockRemoved", "block_hashes": [number]} for number in range(64)]
CLEARED = {"type": "AllBlocksCleared"}


class Wire:
    """One reporter with a log for each rank, and a router, by the router's clock."""

    def __init__(self, ranks: int = 1, **log: Any) -> None:
        self.world = World()
        self.logs = [EventLog(**log) for _ in range(ranks)]
        self.connected = True
        self.seq = [0] * ranks
        self.sent: list[RouterPost] = []
        self.begin()

    def begin(self) -> None:
        """The reporter's process begins, or begins again."""
        heads: list[dict[str, Any]] = [
            {"worker_id": "w0", "rank": rank, "ranks": list(range(len(self.logs)))} for rank in range(len(self.logs))
        ]
        self.relays = [
            EventRelay(head, log, lambda: self.connected) for head, log in zip(heads, self.logs, strict=True)
        ]

    def publish(self, *events: dict[str, Any], rank: int = 0, lost: bool = False) -> None:
        """The engine's next message."""
        if not lost:
            self.logs[rank].take(Apply(self.seq[rank], message(*events)))
        self.seq[rank] += 1

    def restart_engine(self, rank: int = 0) -> None:
        self.logs[rank].take(StreamReset())
        self.seq[rank] = 0

    async def post(self, relay: EventRelay, *, answered: bool = True) -> bool:
        posting = relay.next(self.world.now)
        if posting is None:
            return False
        self.sent.append(posting)
        reply = await self.world.reports.batched(read_events(orjson.loads(orjson.dumps(posting.body))))
        if answered:
            relay.answered(reply, self.world.now)
        return True

    async def run(self, seconds: float = 0.3) -> None:
        """All that is due, for a while."""
        until = self.world.now + seconds
        while self.world.now < until:
            for relay in self.relays:
                for _ in range(100):
                    if not await self.post(relay):
                        break
                else:
                    pytest.fail("it never ends")
            self.world.now += 0.02
            self.world.reports.events.tick(self.world.now)

    @property
    def level(self) -> Level:
        return self.world.engine_caches.level(W0)

    @property
    def held(self) -> int:
        """Prefixes that the router knows to be held, of all ranks."""
        return sum(view["hashes"] for view in self.world.reports.views())

    @property
    def confirmed(self) -> int:
        return self.world.router.routes.counters.claims["confirmed"]


async def running(**log: Any) -> Wire:
    wire = Wire(**log)
    await wire.run()
    return wire


async def test_px14_what_an_engine_stores_is_known_exactly_and_every_anchor_is_a_claim() -> None:
    wire = await running()
    wire.publish(*[block(number, number - 1 if number else None) for number in range(5)])
    await wire.run()
    assert (wire.level, wire.held) == (Level.EXACT, 5)
    assert wire.confirmed == 3, "at 16, 32 and 64 tokens"
    wire.publish(REMOVED[2])
    await wire.run()
    assert wire.held == 2
    assert wire.confirmed == 2


async def test_pu5_reports_leave_every_100_ms_and_else_one_in_5_s() -> None:
    wire = await running()
    before = len(wire.sent)
    for number in range(40):
        wire.publish(block(number))
        await wire.run(0.01)
    assert len(wire.sent) - before <= 40 * 0.02 / BATCH_S + 1
    await wire.run()
    before = len(wire.sent)
    await wire.run(2 * BEAT_S)
    assert len(wire.sent) - before == 2
    assert max(len(orjson.dumps(each.body)) for each in wire.sent[before:]) < 300, "however much is held"
    assert wire.held == 40


async def test_pu10_a_report_that_was_lost_on_the_path_is_asked_for_with_the_next_one() -> None:
    wire = await running()
    wire.publish(block(1))
    wire.world.now += 1.0
    assert wire.relays[0].next(wire.world.now) is not None
    wire.relays[0].answered({"status": "ok"}, wire.world.now)  # by somebody between
    await wire.run(BEAT_S + 1.0)
    assert (wire.level, wire.held) == (Level.EXACT, 1)


async def test_pu10_a_router_that_was_restarted_has_it_all_with_the_next_reports() -> None:
    wire = await running()
    for number in range(50):
        wire.publish(block(number))
    await wire.run()
    wire.world.restart()
    wire.publish(block(50))
    await wire.run(BEAT_S)
    assert (wire.level, wire.held) == (Level.EXACT, 51)


async def test_pu10_a_reporter_that_was_restarted_goes_on_where_the_router_stands() -> None:
    wire = Wire()
    for number in range(5):
        wire.publish(block(number))
    await wire.run()
    wire.begin()
    wire.publish(block(5))
    await wire.run()
    assert (wire.level, wire.held) == (Level.EXACT, 6)
    replayed = [seq for each in wire.sent if each.body.get("ask") for seq, _ in each.body["replayed"]]
    assert replayed == [*range(5), 4, 5], "from the last message that the router knew"


async def test_what_the_log_can_not_replay_is_lived_with() -> None:
    wire = await running(messages_max=10)
    for number in range(50):
        wire.publish(block(number))
    await wire.run()
    assert 0 < wire.logs[0].dropped < 50
    wire.world.restart()
    await wire.run(2 * BEAT_S)
    assert wire.level is not Level.EXACT
    assert 0 < wire.held <= 10
    wire.publish(CLEARED, block(3))
    await wire.run()
    assert (wire.level, wire.held) == (Level.EXACT, 1), "who holds nothing hides nothing"


async def test_a_message_that_the_reporter_lost_is_a_gap_for_the_router() -> None:
    wire = await running()
    wire.publish(block(1))
    wire.publish(block(2), lost=True)
    wire.publish(block(3))
    await wire.run(20.0)
    assert (wire.level, wire.held) == (Level.DEGRADED, 2)


async def test_a_message_that_no_router_takes_is_left_out_and_the_rest_is_reported() -> None:
    wire = await running()
    wire.publish(block(1))
    wire.publish(block(2), {"type": "Padding", "x": b"\0" * PAYLOAD_BYTES_MAX})
    wire.publish(block(3))
    await wire.run(20.0)
    assert (wire.level, wire.held) == (Level.DEGRADED, 2)
    assert wire.logs[0].dropped == 1


async def test_what_one_of_an_engines_ranks_holds_the_engine_holds_and_all_must_be_known() -> None:
    wire = Wire(ranks=2)
    wire.publish(block(1, first=0))
    assert await wire.post(wire.relays[0])
    assert wire.level is Level.ESTIMATED, "the other rank may hold anything"
    wire.publish(block(1, first=0), rank=1)
    await wire.run()
    assert (wire.level, wire.confirmed) == (Level.EXACT, 1)
    wire.publish(REMOVED[1])
    await wire.run()
    assert wire.confirmed == 1
    wire.publish(REMOVED[1], rank=1)
    await wire.run()
    assert wire.confirmed == 0


async def test_px7_a_reporter_that_is_silent_or_does_not_receive_its_engine_is_not_believed_for_exact() -> None:
    wire = Wire()
    wire.publish(block(1))
    await wire.run()
    wire.connected = False
    await wire.run()
    assert wire.level is Level.DEGRADED
    wire.connected = True
    await wire.run()
    assert wire.level is Level.EXACT
    wire.world.now += SILENT_S
    wire.world.reports.events.tick(wire.world.now)
    assert wire.level is Level.DEGRADED
    await wire.run()
    assert wire.level is Level.EXACT


async def test_a_large_log_is_replayed_in_several_reports() -> None:
    wire = await running()
    for number in range(4):
        wire.publish(*[block(100 * number + each) for each in range(100)], {"type": "Padding", "x": b"\0" * 200_000})
    await wire.run()
    wire.world.restart()
    await wire.run(BEAT_S + 1)
    assert wire.held == 400
    largest = max(sum(len(text) for _, text in each.body.get("replayed", ())) for each in wire.sent)
    assert largest < 2 * CHUNK_BYTES * 4 / 3


async def test_a_worker_whose_model_is_not_known_is_asked_to_wait() -> None:
    wire = Wire()
    backend = wire.world.router.registry.ids.by_name["w0"]
    backend.catalog.models = ("m", "another")
    with pytest.raises(Unavailable, match="model"):
        await wire.post(wire.relays[0])
    backend.catalog.models = ("m",)
    await wire.run()
    assert wire.level is Level.EXACT


async def test_a_worker_that_is_removed_takes_its_streams_with_it() -> None:
    wire = await running()
    wire.world.router.registry.remove("w0")
    wire.world.reports.events.tick(wire.world.now)
    assert wire.world.reports.views() == []


STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "unanswered", "restart", "begin", "engine"]), st.integers(0, 30)),
    max_size=40,
)


@given(STEPS, st.integers(0, 9))
@settings(max_examples=examples(40))
async def test_pu10_whatever_is_lost_both_sides_agree_in_the_end(steps: list[tuple[str, int]], seed: int) -> None:
    wire, held, rng = Wire(), set[int](), Random(seed)
    for verb, number in steps:
        if verb == "store" and number not in held:
            wire.publish(block(number))
            held.add(number)
        elif verb == "remove" and number in held:
            wire.publish(REMOVED[number])
            held.discard(number)
        elif verb == "unanswered":
            await wire.post(wire.relays[0], answered=False)
        elif verb == "restart":
            wire.world.restart()
        elif verb == "begin":
            wire.begin()
        elif verb == "engine":
            wire.restart_engine()
            held.clear()
            wire.publish(CLEARED)
        await wire.run(rng.choice([0.02, 0.3]))
    wire.publish(block(63))
    await wire.run(15.0)
    assert (wire.level, wire.held) == (Level.EXACT, len(held) + 1)
