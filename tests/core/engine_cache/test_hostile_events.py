"""No message of an engine's events holds up the event loop, whatever it is made of. What counts is processor time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import msgpack
import pytest

from ranvier_py.core.engine_cache import event_stream
from ranvier_py.core.engine_cache.gap_values import Level
from tests.core.engine_cache.test_event_streams import known, payload, stored
from tests.node.turns import OCCUPIED_S_MAX, least_s

CALLS_MAX = 2000
EVENT_BYTES = 2_000_000


def many(count: int, item: bytes) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + item * count


def event(field: str, value: bytes) -> bytes:
    """A stored event with this field, packed already."""
    fields = {"type": "BlockStored", "parent_block_hash": None, "block_size": 16, "block_hashes": [], "token_ids": []}
    return bytes(msgpack.packb({**{k: v for k, v in fields.items() if k != field}, field: 0}))[:-1] + value


def message(*events: bytes) -> bytes:
    return b"\x93" + msgpack.packb(1.5) + many(1, b"")[:1] + len(events).to_bytes(4, "big") + b"".join(events) + b"\0"


def removal(number: int) -> bytes:
    return bytes(msgpack.packb({"type": "BlockRemoved", "block_hashes": [2**63 + number], "medium": "GPU"}))


ITEMS = {
    "empty maps": b"\x80",
    "empty lists": b"\x90",
    "lists of a text": b"\x91\xa1a",
    "nothings": b"\xc0",
    "numbers": b"\x01",
    "texts": b"\xa1a",
    "bytes": b"\xc4\x00",
    "times": b"\xd6\xff\0\0\0\1",
}


def long_event(field: str, item: bytes) -> bytes:
    return message(event(field, many(EVENT_BYTES // len(item), item)))


SHAPES: Mapping[str, Callable[[], bytes]] = {
    **{
        f"{name} as {field}": partial(long_event, field, item)
        for name, item in ITEMS.items()
        for field in ("block_hashes", "token_ids", "extra_keys", "unknown")
    },
    **{f"events that are {name}": partial(message, *[item] * 32_000) for name, item in ITEMS.items()},
    "eight long events": lambda: message(*[event("token_ids", many(500_000, b"\x01"))] * 8),
    "many lists of empty maps": lambda: message(*[many(120, b"\x80")] * 32_000),
    "removals, as an engine sends them": lambda: message(*map(removal, range(32_000))),
    "members of one name": lambda: message(b"\xdf" + (600_000).to_bytes(4, "big") + b"\xa1a\0" * 600_000),
    "lists of false lengths": lambda: b"\x92\x01\x91" + b"\xdd\x00\x01\x00\x00" * 25_000,
}


def longest_s(data: bytes) -> float:
    """Return the longest turn until a stream has applied this message."""
    world, turns = known(), []
    calls = [lambda: world.stream.live(world.seq, data, world.now)]
    for _ in range(CALLS_MAX):
        began = time.thread_time()
        calls.pop()() if calls else world.stream.tick(world.now)
        turns.append(time.thread_time() - began)
        wake_at = world.stream.wake_at()
        if wake_at is None or wake_at > world.now + 1.0:
            return max(turns)
        world.now = max(world.now, wake_at)
    raise AssertionError("not applied in so many calls")


@pytest.mark.parametrize("shape", SHAPES)
def test_no_message_of_events_holds_up_the_event_loop(shape: str) -> None:
    data = SHAPES[shape]()
    assert least_s(partial(longest_s, data)) <= OCCUPIED_S_MAX


def test_a_long_message_is_applied_whole_in_many_turns() -> None:
    world = known()
    world.publish(stored(0, 2))
    world.stream.live(world.seq, message(*[msgpack.packb(stored(0, 2)) for _ in range(2000)]), world.now)
    assert world.stream.snapshot() is None, "not all of it is applied"
    world.settle()
    assert (world.level, world.depth()) == (Level.EXACT, 32)
    assert world.stream.counts()["decoder_batches"] > 0


def test_what_waits_beyond_its_bound_is_dropped_and_lowers_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    world = known()
    monkeypatch.setattr(event_stream, "CARRIED_BYTES", 0)
    monkeypatch.setattr(event_stream, "WAITING_BYTES_MAX", 100)
    for number in range(3):
        world.stream.live(world.seq + number, payload(stored(0, 2)), world.now)
    monkeypatch.undo()
    world.settle()
    assert world.stream.counts()["decoder_dropped"] > 0
    assert world.stream.level is not Level.EXACT
