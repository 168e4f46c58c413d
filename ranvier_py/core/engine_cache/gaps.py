"""Tracks how well one event stream is known: sequence numbers in, effects out. One machine for each publisher.

Rule: messages are applied in order, each once. One that does not follow the last opens a gap: those after it are held
back, and replay is asked from the number just before it, where another message shows a restart; routing goes on. What
replay cannot bring back is skipped, and a peer is asked for a snapshot. Each question has a deadline.
Invariant: while EXACT, what was applied since the last StreamReset or Install has no hole (test_gaps_properties.py).
Bounds: bytes and number of messages held back or kept for a snapshot; beyond, the gap is skipped or the snapshot given
up, and counted.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from ranvier_py.core.engine_cache.gap_values import (
    DIGESTS_MAX,
    Apply,
    AskPeer,
    AskReplay,
    Effect,
    EventLoss,
    GapCounters,
    GapSettings,
    Install,
    Level,
    LevelChanged,
    Messages,
    Replay,
    SnapshotAsked,
    StreamReset,
)
from ranvier_py.core.engine_cache.snapshot import Snapshot

NOTHING_MISSED = "nothing missed"


class GapMachine:
    """Every method returns the effects to carry out, in order. Call `tick` at `wake_at`."""

    def __init__(self, settings: GapSettings | None = None) -> None:
        self._settings = settings or GapSettings()
        self._outbox: list[Effect] = []
        self._next = 0
        self._held = Messages(self._settings)  # behind a gap
        self._kept = Messages(self._settings)  # applied since a snapshot was asked for, to be applied on top of it
        self._digests: dict[int, tuple[int, int]] = {}  # (number, digest) of the last messages, by place
        self._live_last = -1
        self._loss = EventLoss.ALL
        self._loss_end = 0  # the first number after the lost messages
        self._run = 0  # messages applied in a row since that loss
        self._asks = 0
        self._replay: Replay | None = None
        self._snapshot: SnapshotAsked | None = None
        self._snapshot_tried = True
        self._snapshot_at: float | None = None
        self._cut_at: float | None = None
        self._cut_long = False
        self._received_at = 0.0  # of the last live message
        self._proved = True  # False after a cut without replay, until the next message shows whether one was lost
        self._verified_at: float | None = None
        self._why = "nothing received yet"
        self.level = Level.ESTIMATED
        self.counters = GapCounters()

    @property
    def next_seq(self) -> int:
        """Number of the next message to apply."""
        return self._next

    @property
    def waiting(self) -> tuple[int, int]:
        """How many messages are held back behind a gap, and how many are kept for a snapshot."""
        return len(self._held), len(self._kept)

    def digest_of(self, seq: int) -> int | None:
        """The digest of message `seq`, which goes with a snapshot taken just after it; None if it is not remembered."""
        known = self._digests.get(seq % DIGESTS_MAX)
        return known[1] if known is not None and known[0] == seq else None

    def wake_at(self) -> float | None:
        """The time in seconds at which `tick` has something to do."""
        times = [question.deadline for question in (self._replay, self._snapshot) if question is not None]
        if self._snapshot_at is not None and self._snapshot is None and self._loss is not EventLoss.NOTHING:
            times.append(self._snapshot_at)
        if self._cut_at is not None and not self._cut_long:
            times.append(self._cut_at + self._settings.estimated_after_s)
        return min(times, default=None)

    # The stream

    def connected(self, now: float) -> list[Effect]:
        """The stream is connected, for the first time or again: ask for what was published meanwhile."""
        self._connect(now)
        return self._done()

    def disconnected(self, now: float) -> list[Effect]:
        self._cut_at = now
        self._replay = None
        self._live_last = self._next - 1  # messages behind a gap are asked for with the rest
        self._held.clear()  # the next messages may be of another run; replay brings these again
        self._why = "cut off"
        return self._done()

    def live(self, seq: int, payload: bytes, now: float) -> list[Effect]:
        """Take a live message of the stream."""
        if self._cut_at is not None:
            self._connect(now)
        if self._contradicts(seq, payload) or (
            seq <= self._live_last and self.digest_of(seq) is None and seq not in self._held.by_seq
        ):
            self._restart("numbers went back")
        self._live_last = max(self._live_last, seq)
        if not self._proved and seq >= self._next:
            self._proved = True
            if seq <= self._settings.messages_per_s_max * (now - self._received_at):
                self._lose(EventLoss.PART, seq, now, "no replay")
        self._take(seq, payload, now)
        self._received_at = now
        return self._done()

    def cleared(self, seq: int) -> list[Effect]:
        """Message `seq` reported that the engine holds nothing, so what was lost before it no longer matters."""
        if seq >= self._loss_end:
            self._loss = EventLoss.NOTHING
        return self._done()

    def unreadable(self, seq: int, now: float) -> list[Effect]:
        """Message `seq` could not be read, at least in part."""
        self._lose(EventLoss.PART, seq + 1, now, "unreadable")
        return self._done()

    def contradicted(self, now: float) -> list[Effect]:
        """The engine's answers do not fit what its events report: ask replay whether it is the same process."""
        last, settings = self._verified_at, self._settings
        if settings.replay and self._replay is None and (last is None or now >= last + settings.verify_interval_s):
            self._verified_at = now
            self._ask_replay(now, "answers contradict")
        return self._done()

    # Replay

    def replayed(self, ask: int, seq: int, payload: bytes, now: float) -> list[Effect]:
        """Take one message from the replay socket. They may come in any order, and twice."""
        replay = self._replay
        if replay is None or replay.ask != ask:
            self.counters.late += 1
            return self._done()
        replay.came = True
        replay.deadline = now + min(self._settings.replay_pause_s, self._settings.replay_timeout_s)
        if self._contradicts(seq, payload):
            self._restart("replay contradicts")
            self._ask_replay(now, "restarted")
            return self._done()
        replay.checked = replay.checked or self.digest_of(seq) is not None
        self._take(seq, payload, now)
        return self._done()

    def replay_ended(self, ask: int, now: float) -> list[Effect]:
        """The engine has replayed all that it has."""
        if self._replay is not None and self._replay.ask == ask:
            self._end_replay(now, in_time=True)
        else:
            self.counters.late += 1
        return self._done()

    def replay_failed(self, ask: int, now: float) -> list[Effect]:
        """The replay socket does not answer, or answers nonsense."""
        if self._replay is not None and self._replay.ask == ask:
            self._give_up(now, "no replay")
        else:
            self.counters.late += 1
        return self._done()

    # A peer's snapshot

    def snapshot_offered(self, ask: int, snapshot: Snapshot | None, now: float) -> list[Effect]:
        """A peer offers an exact snapshot in answer to AskPeer; None: nobody has one. An Install means: take it."""
        asked = self._snapshot
        if asked is None or asked.ask != ask:
            self.counters.late += snapshot is not None
        elif snapshot is None:
            self._give_snapshot_up(now)
        elif snapshot.seq >= self._next:
            asked.offer = snapshot
        else:
            self._judge(snapshot, now)
        return self._done()

    def tick(self, now: float) -> list[Effect]:
        settings = self._settings
        if self._replay is not None and now >= self._replay.deadline:
            self._end_replay(now, in_time=False)
        if self._snapshot is not None and now >= self._snapshot.deadline:
            self._give_snapshot_up(now)
        if self._snapshot_at is not None and now >= self._snapshot_at and self._loss is not EventLoss.NOTHING:
            self._ask_snapshot(now)
        if self._cut_at is not None and now >= self._cut_at + settings.estimated_after_s:
            self._cut_long = True
        return self._done()

    # Inside

    def _connect(self, now: float) -> None:
        self._cut_at, self._cut_long = None, False
        if not self._settings.replay and self._next and self._loss is EventLoss.NOTHING:
            self._proved = False
        elif self._replay is None:
            self._ask_replay(now, "connected")

    def _contradicts(self, seq: int, payload: bytes) -> bool:
        """Whether a different message is known under this number."""
        known = self.digest_of(seq)
        return (known is not None and known != xxh3_64_intdigest(payload)) or self._held.by_seq.get(
            seq, payload
        ) != payload

    def _take(self, seq: int, payload: bytes, now: float) -> None:
        if seq < self._next or seq in self._held.by_seq:
            self.counters.repeated += 1
            return
        if seq == self._next and self._replay is None and not self._held.by_seq:  # as a rule
            self._apply(seq, payload, now)
            return
        self._held.add(seq, payload)
        self._drain(now)
        if not self._held:
            return
        if self._replay is None:
            self.counters.gaps += 1
            self._ask_replay(now, "gap")
        if self._held.is_full:
            self.counters.held_full += 1
            replay = self._replay
            self._jump(EventLoss.PART, now, "too much held", is_checked=replay is None or replay.checked)
            if replay is not None:
                replay.checked = True  # what it replays from here on comes after a loss anyway

    def _drain(self, now: float) -> None:
        """Apply the held messages that follow the last one, unless replay must first verify the engine."""
        replay = self._replay
        if replay is not None and not replay.checked:
            return
        while (payload := self._held.pop(self._next)) is not None:
            self._apply(self._next, payload, now)
        if replay is not None and not self._held and self._next > self._live_last >= replay.next_then:
            self.counters.repaired += 1
            self._replay = None

    def _apply(self, seq: int, payload: bytes, now: float) -> None:
        self._outbox.append(Apply(seq, payload))
        self._next = seq + 1
        self._digests[seq % DIGESTS_MAX] = seq, xxh3_64_intdigest(payload)
        self.counters.applied += 1
        self._run += 1
        if seq == 0:
            self._loss = EventLoss.NOTHING  # with message 0 all that the engine ever published is here
        elif self._loss is EventLoss.ALL and self._run >= self._settings.recover_messages:
            self._loss = EventLoss.PART
        if self._snapshot is not None:
            self._keep(self._snapshot, seq, payload, now)

    def _keep(self, asked: SnapshotAsked, seq: int, payload: bytes, now: float) -> None:
        """Keep a message that the snapshot under way may lack; judge an offer whose last message has now come."""
        self._kept.add(seq, payload)
        if asked.offer is not None and seq >= asked.offer.seq:
            self._judge(asked.offer, now)
        elif self._kept.is_full:
            self._give_snapshot_up(now)

    def _ask_replay(self, now: float, why: str, attempt: int = 1) -> None:
        self._why = why
        self._asks += 1
        first = max(0, self._next - 1)
        deadline = now + self._settings.replay_timeout_s
        self._replay = Replay(self._asks, first, self._next, deadline, attempt, checked=self._next == 0)
        if self._settings.replay:
            self._outbox.append(AskReplay(self._asks, first))
        else:
            self._give_up(now, "no replay")

    def _end_replay(self, now: float, *, in_time: bool) -> None:
        """End a replay that brings no more: all is there, or it is worth another question, or it is given up."""
        replay = self._replay
        assert replay is not None
        if not self._held and in_time:
            if not replay.came and replay.next_then > 0 and self._next == replay.next_then:
                self._restart("replay is empty")  # it lacks a message that it published before
                self._ask_replay(now, "restarted")  # it may have published something since
                return
            if self._next == 0:
                self._loss = EventLoss.NOTHING  # it never published anything
            elif not replay.checked:
                self._lose(EventLoss.PART, self._next, now, "replay says too little")
            self._replay = None
        elif self._next > replay.next_then and replay.attempt < self._settings.replay_attempts_max:
            self._ask_replay(now, "replay was cut short", replay.attempt + 1)
        else:
            self._give_up(now, "replay says too little")

    def _give_up(self, now: float, why: str) -> None:
        """Go on with the messages that came: a suffix is worth more than nothing."""
        replay = self._replay
        assert replay is not None
        loss = EventLoss.PART if replay.came or (replay.next_then and not self._held) else EventLoss.ALL
        self._replay = None
        if self._held:
            self._jump(loss, now, why, is_checked=replay.checked)
        else:
            self._lose(loss, self._next, now, why)

    def _jump(self, loss: EventLoss, now: float, why: str, *, is_checked: bool) -> None:
        """Apply all held messages in order, and note what is missing between them."""
        for seq, payload in sorted(self._held.clear().items()):
            if seq != self._next or not is_checked:
                self.counters.jumped += 1
                self._lose(loss, seq, now, why)
                is_checked = True
            self._apply(seq, payload, now)

    def _lose(self, loss: EventLoss, end: int, now: float, why: str) -> None:
        if loss.value > self._loss.value:
            self._loss = loss
        self._loss_end, self._run, self._why = max(end, self._loss_end), 0, why
        if self._snapshot_at is None or now >= self._snapshot_at:
            self._snapshot_tried = False
            self._ask_snapshot(now)

    def _restart(self, why: str) -> None:
        self._outbox.append(StreamReset())
        self.counters.restarts += 1
        self._next = self._run = self._loss_end = 0
        self._live_last, self._proved = -1, True
        self._held.clear()
        self._digests.clear()
        self._kept.clear()
        self._replay = self._snapshot = None
        self._loss, self._why = EventLoss.ALL, why

    def _ask_snapshot(self, now: float) -> None:
        if not self._settings.peers or self._snapshot is not None:
            return
        self._asks += 1
        self._snapshot = SnapshotAsked(self._asks, now + self._settings.peer_timeout_s)
        self._snapshot_at = None
        self._outbox.append(AskPeer(self._asks))

    def _give_snapshot_up(self, now: float) -> None:
        self.counters.snapshots_given_up += 1
        self._drop_snapshot(now)

    def _drop_snapshot(self, now: float) -> None:
        self._snapshot = None
        self._snapshot_tried = True
        self._snapshot_at = now + self._settings.peer_interval_s
        self._kept.clear()

    def _judge(self, snapshot: Snapshot, now: float) -> None:
        """Take a snapshot if its last message was applied here, with the same digest and after all that was lost, and
        all messages since are kept. Refuse any other: it might be of a run of the engine that is over."""
        seq = snapshot.seq
        again = [Apply(*message) for message in self._kept.by_seq.items() if message[0] > seq]
        is_whole = seq >= self._loss_end and len(again) == self._next - seq - 1
        if self.digest_of(seq) == snapshot.digest and is_whole:
            self.counters.snapshots_taken += 1
            self._outbox.append(Install(snapshot))
            self._outbox.extend(again)
            self._loss, self._loss_end = EventLoss.NOTHING, 0
        else:
            self.counters.snapshots_refused += 1
        self._drop_snapshot(now)

    def _done(self) -> list[Effect]:
        level = self._level_now()
        if level is not self.level:
            self.level = level
            self._outbox.append(LevelChanged(level, NOTHING_MISSED if level is Level.EXACT else self._why))
        effects, self._outbox = self._outbox, []
        return effects

    def _level_now(self) -> Level:
        if self._cut_long:
            return Level.ESTIMATED
        if self._replay is not None:
            return Level.REPAIRING
        if self._loss is EventLoss.ALL:
            return Level.REPAIRING if self._snapshot is not None and not self._snapshot_tried else Level.ESTIMATED
        is_whole = self._loss is EventLoss.NOTHING and self._cut_at is None and self._proved
        return Level.EXACT if is_whole else Level.DEGRADED
