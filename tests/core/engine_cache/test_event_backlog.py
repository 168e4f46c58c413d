"""What a gap held back is applied after it was filled, without holding up the event loop."""

from __future__ import annotations

import pytest

from ranvier_py.core.engine_cache import event_stream
from ranvier_py.core.engine_cache.gap_values import AskReplay, Level
from tests.core.engine_cache.test_event_streams import CLEARED, World, known, payload, removed, stored


@pytest.fixture
def backlog(monkeypatch: pytest.MonkeyPatch) -> World:
    """A stream whose gap has just been filled, with messages 2 to 6 behind it yet to apply, one in each call."""
    monkeypatch.setattr(event_stream, "CARRIED_BYTES", 1)
    world = known()
    world.publish(stored(0, 1))
    lost, world.seq = world.seq, world.seq + 1
    effects = [
        effect
        for event in (stored(1, 1), stored(2, 1), removed(3), stored(2, 1), stored(3, 1))
        for effect in world.receive(event)
    ]
    [ask] = [effect for effect in effects if isinstance(effect, AskReplay)]
    world.stream.replayed(ask.ask, 0, payload(stored(0, 1)), world.now)
    world.stream.replayed(ask.ask, lost, payload(), world.now)
    assert world.stream.residency.view().blocks == 1
    return world


def test_what_a_gap_held_back_is_applied_little_by_little_and_nothing_is_exact_meanwhile(backlog: World) -> None:
    stream, blocks = backlog.stream, []
    while stream.wake_at() is not None:
        blocks.append((stream.residency.view().blocks, backlog.level is Level.EXACT, stream.snapshot() is not None))
        stream.tick(backlog.now)
    assert blocks == [(count, False, False) for count in (1, 2, 3, 2, 3)]
    assert (backlog.depth(), backlog.level) == (64, Level.EXACT)
    assert stream.snapshot() is not None


def test_messages_that_wait_behind_those_of_a_gap_are_applied_after_them(backlog: World) -> None:
    backlog.receive(removed(4))
    backlog.settle()
    assert (backlog.depth(), backlog.level) == (32, Level.EXACT)


def test_what_waits_to_be_applied_when_the_engine_restarts_is_void(backlog: World) -> None:
    for bad in (CLEARED, {"type": "BlockStored", "block_hashes": 7}):
        backlog.receive(bad)
    backlog.seq = 0
    backlog.receive(stored(0, 2))
    backlog.settle()
    assert (backlog.depth(), backlog.level, backlog.generations) == (32, Level.EXACT, [2])
    assert backlog.stream.counts()["decoder_unread"] == 0
