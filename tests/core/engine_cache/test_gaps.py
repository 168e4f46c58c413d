from __future__ import annotations

from typing import Any

import pytest
import xxhash

from ranvier_py.core.engine_cache.blocks import BlockIndex, root
from ranvier_py.core.engine_cache.gap_values import (
    Apply,
    AskPeer,
    AskReplay,
    Effect,
    GapSettings,
    Install,
    Level,
    LevelChanged,
    StreamReset,
)
from ranvier_py.core.engine_cache.gaps import GapMachine
from ranvier_py.core.engine_cache.prefixes import HeldPrefixes
from ranvier_py.core.engine_cache.residency_values import SnapshotState
from ranvier_py.core.engine_cache.snapshot import Snapshot


def message(seq: int, run: str = "a") -> bytes:
    return f"{run}{seq}".encode()


def digest(seq: int, run: str = "a") -> int:
    return xxhash.xxh3_64_intdigest(message(seq, run))


def snapshot(last: int, digest: int) -> Snapshot:
    """One taken after message `last`, of nothing."""
    return Snapshot(last, digest, SnapshotState(BlockIndex(), HeldPrefixes(), root(None), {}))


class Stream:
    """A machine, the numbers it applied since the last Reset, and what it asked for last."""

    def __init__(self, **settings: Any) -> None:
        self.machine = GapMachine(GapSettings(**settings))
        self.applied: list[str] = []
        self.replay: AskReplay | None = None
        self.peer: AskPeer | None = None
        self.levels: list[Level] = []
        self.copy: list[str] = []

    def receive(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Apply):
                self.applied.append(effect.payload.decode())
            elif isinstance(effect, StreamReset):
                self.applied.clear()
            elif isinstance(effect, AskReplay):
                self.replay = effect
            elif isinstance(effect, AskPeer):
                self.peer = effect
            elif isinstance(effect, Install):
                self.applied = list(self.copy)
            elif isinstance(effect, LevelChanged):
                self.levels.append(effect.level)

    def live(self, *seqs: int, run: str = "a", now: float = 0.0) -> None:
        for seq in seqs:
            self.receive(self.machine.live(seq, message(seq, run), now))

    def answer(self, *seqs: int, run: str = "a", end: bool = True, now: float = 0.0) -> None:
        """Answers of the replay socket to the question that was last asked when this began."""
        assert self.replay is not None
        ask = self.replay.ask
        for seq in seqs:
            self.receive(self.machine.replayed(ask, seq, message(seq, run), now))
        if end:
            self.receive(self.machine.replay_ended(ask, now))

    def offer(self, last: int, run: str = "a") -> None:
        assert self.peer is not None
        self.copy = names(last, run)
        self.receive(self.machine.snapshot_offered(self.peer.ask, snapshot(last, digest(last, run)), 0.0))

    @property
    def level(self) -> Level:
        return self.machine.level


def names(last: int, run: str = "a", first: int = 0) -> list[str]:
    return [f"{run}{seq}" for seq in range(first, last + 1)]


def at(last: int, **settings: Any) -> Stream:
    """A stream that is known from its beginning."""
    stream = Stream(**settings)
    stream.live(*range(last + 1))
    assert stream.level is Level.EXACT
    return stream


def test_nothing_is_known_until_something_is_received_and_nobody_waits() -> None:
    stream = Stream()
    assert (stream.level, stream.machine.wake_at()) == (Level.ESTIMATED, None)


def test_a_stream_received_from_its_beginning_is_exact() -> None:
    stream = at(5)
    assert (stream.applied, stream.replay, stream.levels) == (names(5), None, [Level.EXACT])


def test_who_comes_late_asks_for_all_that_was() -> None:
    stream = Stream()
    stream.receive(stream.machine.connected(0.0))
    assert (stream.level, stream.replay) == (Level.REPAIRING, AskReplay(1, 0))
    stream.live(7, 8)
    assert stream.applied == []
    stream.answer(*range(9))
    assert (stream.level, stream.applied) == (Level.EXACT, names(8))
    stream.live(9)
    assert stream.applied == names(9)


def test_an_engine_that_never_published_anything_is_known_exactly() -> None:
    stream = Stream()
    stream.receive(stream.machine.connected(0.0))
    stream.answer()
    assert stream.level is Level.EXACT


def test_a_gap_is_asked_for_from_one_before_it_while_live_messages_go_on() -> None:
    stream = at(5)
    stream.live(8, 9)
    assert (stream.level, stream.replay) == (Level.REPAIRING, AskReplay(1, 5))
    stream.answer(5, 6, 7, end=False)
    assert (stream.level, stream.applied) == (Level.EXACT, names(9))
    stream.answer(8, 9, 10)
    assert (stream.machine.counters.repaired, stream.machine.counters.late) == (1, 4)


def test_answers_in_any_order_and_twice_are_applied_in_order_and_once() -> None:
    stream = at(5)
    stream.live(8)
    stream.answer(7, 8, 6, 7, 5, 6)
    assert (stream.level, stream.applied) == (Level.EXACT, names(8))


def test_a_replay_that_was_cut_short_is_asked_for_again() -> None:
    stream = at(5)
    stream.live(12)
    stream.answer(5, 6, 7)
    assert (stream.level, stream.replay) == (Level.REPAIRING, AskReplay(2, 7))
    stream.answer(7, 8, 9, 10, 11)
    assert (stream.level, stream.applied) == (Level.EXACT, names(12))


def test_a_suffix_is_better_than_nothing() -> None:
    stream = at(5, peers=False)
    stream.live(12)
    stream.answer(9, 10, 11, 12)
    assert (stream.level, stream.applied) == (Level.DEGRADED, names(5) + names(12, first=9))
    stream.live(13)
    assert (stream.applied[-1], stream.machine.counters.jumped) == ("a13", 1)


def test_a_gap_that_nobody_fills_is_an_estimate_until_enough_follows() -> None:
    stream = at(5, peers=False, recover_messages=3)
    stream.live(12)
    stream.answer()
    assert (stream.level, stream.applied) == (Level.ESTIMATED, [*names(5), "a12"])
    stream.live(13, 14)
    assert stream.level is Level.DEGRADED


def test_a_peers_copy_makes_up_for_what_replay_lacks() -> None:
    stream = at(5)
    stream.live(12)
    stream.answer()
    assert (stream.level, stream.applied[-1]) == (Level.REPAIRING, "a12")
    stream.live(13, 14)
    stream.offer(13)
    assert (stream.level, stream.applied) == (Level.EXACT, names(14))


def test_a_copy_that_is_ahead_is_taken_when_its_last_message_came_here_too() -> None:
    stream = at(5)
    stream.live(12)
    stream.answer()
    stream.offer(14)
    assert Level.EXACT not in stream.levels[1:]
    stream.live(13, 14, 15)
    assert (stream.level, stream.applied) == (Level.EXACT, names(15))


@pytest.mark.parametrize(("last", "run"), [(3, "a"), (11, "a"), (13, "b")])
def test_a_copy_that_cannot_be_known_to_be_of_this_run_is_refused(last: int, run: str) -> None:
    stream = at(5)
    stream.live(12)
    stream.answer()
    stream.live(13)
    before = list(stream.applied)
    stream.offer(last, run)
    assert (stream.applied, stream.machine.counters.snapshots_refused) == (before, 1)


def test_a_copy_is_not_taken_on_what_was_known_before_we_were_cut_off() -> None:
    """The engine may have been restarted meanwhile, and the peer not know it either."""
    stream = cut_off(5, until=1.0, peers=True)
    stream.live(6, now=1.0)
    stream.offer(5)
    assert stream.level is Level.DEGRADED
    assert stream.machine.counters.snapshots_refused == 1


def test_peers_are_asked_again_while_something_is_missing() -> None:
    stream = at(5, peer_timeout_s=5.0, peer_interval_s=30.0)
    stream.live(12)
    stream.answer()
    first = stream.peer
    assert stream.machine.wake_at() == 5.0
    stream.receive(stream.machine.tick(5.0))
    assert (stream.level, stream.machine.wake_at()) == (Level.ESTIMATED, 35.0)
    stream.receive(stream.machine.tick(35.0))
    assert (stream.peer != first, stream.level) == (True, Level.ESTIMATED)


def test_a_replay_without_an_answer_ends_by_itself() -> None:
    stream = at(5, peers=False, replay_timeout_s=5.0)
    stream.live(8)
    assert stream.machine.wake_at() == 5.0
    stream.receive(stream.machine.tick(5.0))
    assert (stream.level, stream.machine.wake_at()) == (Level.ESTIMATED, None)


def test_an_engine_without_replay_leaves_a_hole_at_once() -> None:
    stream = at(5, replay=False, peers=False)
    stream.live(8)
    assert (stream.level, stream.applied) == (Level.ESTIMATED, [*names(5), "a8"])
    late = Stream(replay=False, peers=False)
    late.receive(late.machine.connected(0.0))
    assert late.level is Level.ESTIMATED
    late.live(0, 1)
    assert late.level is Level.EXACT


def cut_off(last: int, until: float, *, peers: bool = False) -> Stream:
    """A stream of an engine without replay, known from its beginning, that was cut off until now."""
    stream = at(last, replay=False, peers=peers)
    stream.receive(stream.machine.disconnected(0.0))
    stream.receive(stream.machine.connected(until))
    assert stream.level is Level.DEGRADED
    return stream


def test_after_a_cut_without_replay_the_next_number_shows_that_nothing_was_missed() -> None:
    stream = cut_off(500, until=0.2)
    stream.live(500, now=0.3)
    assert stream.level is Level.DEGRADED, "there may have been another one since"
    stream.live(501, now=0.4)
    assert (stream.level, stream.applied) == (Level.EXACT, names(501))
    missed = cut_off(500, until=0.2)
    missed.live(502, now=0.4)
    assert (missed.level, missed.applied[-1]) == (Level.ESTIMATED, "a502")


def test_after_a_cut_in_which_another_process_could_have_counted_as_far_the_next_number_shows_nothing() -> None:
    stream = cut_off(500, until=0.2)
    stream.live(501, now=0.6)
    assert (stream.level, stream.applied) == (Level.DEGRADED, names(501))


def test_answers_that_contradict_cost_an_engine_nothing_that_cannot_be_asked() -> None:
    stream = at(5, replay=False, peers=False)
    stream.receive(stream.machine.contradicted(0.0))
    assert (stream.level, stream.levels) == (Level.EXACT, [Level.EXACT])


def test_numbers_that_go_back_are_a_restart() -> None:
    stream = at(5)
    stream.live(0, 1, run="b")
    assert (stream.level, stream.applied, stream.machine.counters.restarts) == (Level.EXACT, names(1, "b"), 1)


def test_a_restart_whose_beginning_was_missed_is_replayed_from_zero() -> None:
    stream = at(5)
    stream.live(3, run="b")
    assert (stream.level, stream.replay, stream.applied) == (Level.REPAIRING, AskReplay(1, 0), [])
    stream.answer(0, 1, 2, 3, run="b")
    assert (stream.level, stream.applied) == (Level.EXACT, names(3, "b"))


def test_a_message_that_comes_again_is_no_restart() -> None:
    stream = at(5)
    stream.live(5, 4, 5, 6)
    assert (stream.applied, stream.machine.counters.restarts, stream.machine.counters.repeated) == (names(6), 0, 3)


def test_an_answer_that_contradicts_is_a_restart() -> None:
    """The engine was restarted and has counted beyond where it was: numbers alone look like a gap."""
    stream = at(5)
    stream.live(8, run="b")
    stream.answer(5, run="b", end=False)
    assert (stream.applied, stream.replay) == ([], AskReplay(2, 0))
    stream.answer(*range(9), run="b")
    assert (stream.level, stream.applied) == (Level.EXACT, names(8, "b"))


def test_a_reconnection_is_exact_again_only_when_the_engine_is_known_to_be_the_same() -> None:
    stream = at(5)
    stream.receive(stream.machine.disconnected(0.0))
    assert stream.level is Level.DEGRADED
    stream.live(6)
    assert (stream.level, stream.applied) == (Level.REPAIRING, names(5))
    stream.answer(5, 6)
    assert (stream.level, stream.applied) == (Level.EXACT, names(6))
    stream.receive(stream.machine.disconnected(0.0))
    stream.receive(stream.machine.connected(0.0))
    stream.answer(6, run="b", end=False)
    assert stream.applied == []


def test_who_is_cut_off_for_long_estimates() -> None:
    stream = at(5, estimated_after_s=30.0)
    stream.receive(stream.machine.disconnected(1.0))
    assert stream.machine.wake_at() == 31.0
    stream.receive(stream.machine.tick(31.0))
    assert stream.level is Level.ESTIMATED


def test_an_engine_that_lost_its_history_was_restarted() -> None:
    stream = at(5)
    stream.receive(stream.machine.contradicted(0.0))
    assert stream.replay == AskReplay(1, 5)
    stream.answer()
    assert (stream.level, stream.applied, stream.machine.counters.restarts) == (Level.REPAIRING, [], 1)
    assert stream.replay == AskReplay(2, 0), "it may have published something since"
    stream.answer()
    assert stream.level is Level.EXACT


def test_an_engine_whose_answers_contradict_is_not_asked_all_the_time() -> None:
    stream = at(5, verify_interval_s=10.0)
    stream.receive(stream.machine.contradicted(0.0))
    stream.answer(5)
    assert (stream.level, stream.applied) == (Level.EXACT, names(5))
    first = stream.replay
    stream.receive(stream.machine.contradicted(9.0))
    assert stream.replay == first
    stream.receive(stream.machine.contradicted(10.0))
    assert stream.replay != first


def test_a_cleared_cache_makes_up_for_all_that_was_lost_before_it() -> None:
    stream = at(5, peers=False)
    stream.live(8)
    stream.answer()
    stream.receive(stream.machine.cleared(5))
    assert stream.level is Level.ESTIMATED, "what was lost came after it"
    stream.live(9)
    stream.receive(stream.machine.cleared(9))
    assert stream.level is Level.EXACT


def test_what_cannot_be_read_is_lost() -> None:
    stream = at(5, peers=False)
    stream.receive(stream.machine.unreadable(5, 0.0))
    assert stream.level is Level.DEGRADED


def test_what_is_held_has_a_bound_and_then_the_gap_is_jumped_over() -> None:
    stream = at(5, peers=False, held_messages_max=10)
    stream.live(*range(8, 18))
    assert stream.applied == names(5)
    stream.live(18)
    assert (stream.applied, stream.machine.counters.held_full) == (names(5) + names(18, first=8), 1)
    big = at(5, peers=False, held_bytes_max=100)
    big.receive(big.machine.live(8, bytes(101), 0.0))
    assert big.machine.next_seq == 9


def test_a_copy_for_which_too_much_came_is_not_waited_for() -> None:
    stream = at(5, held_messages_max=10)
    stream.live(8)
    stream.answer()
    stream.live(*range(9, 25))
    assert stream.machine.counters.snapshots_given_up == 1
    stream.offer(24)
    assert stream.machine.counters.late == 1


def test_an_answer_whose_end_was_lost_is_not_waited_for() -> None:
    """libzmq drops what a pipe has no room for, the mark of the end among it."""
    stream = Stream(replay_timeout_s=5.0, replay_pause_s=1.0)
    stream.receive(stream.machine.connected(0.0))
    assert stream.machine.wake_at() == 5.0
    stream.answer(*range(4), end=False, now=2.0)
    assert stream.machine.wake_at() == 3.0
    stream.receive(stream.machine.tick(3.0))
    assert (stream.applied, stream.replay) == (names(3), AskReplay(2, 3)), "what there may be beyond is asked for"
    stream.answer(3, now=3.0)
    assert stream.level is Level.EXACT


def test_a_hole_in_the_connection_before_does_not_end_the_replay_of_the_next() -> None:
    stream = Stream()
    stream.live(1)
    stream.receive(stream.machine.disconnected(0.0))
    stream.receive(stream.machine.connected(0.0))
    stream.answer(*range(12))
    assert (stream.level, stream.applied) == (Level.EXACT, names(11))
