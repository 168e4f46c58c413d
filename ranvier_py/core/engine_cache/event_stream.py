"""Carries one rank's event stream from raw payloads to the route table: decoder, gap machine and residency.

Rule: a shell keeps the connection and does what the methods return. While the stream is `open`, changes go from here to
EngineCaches; a standby's is closed, and knows as much all the same. The level reported is EXACT only when all that was
applied is settled, and everything that the events name could be used (`Lack`); otherwise the engine may hold more than
is known. Invariant: what a stream sends damages no routes but its own (test_hostile_events.py, test_lying_engines.py).
Bounds: those of its parts. A call settles SETTLE_STEPS blocks and applies CARRIED_BYTES of messages, or one portion
more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ranvier_py.core.engine_cache.block_namespaces import Names
from ranvier_py.core.engine_cache.engine_caches import LEVELS, EngineCaches, Source
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
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.residency_values import Lack
from ranvier_py.core.engine_cache.snapshot import SnapshotWriter
from ranvier_py.core.engine_cache.sources.event_frames import BadBatch
from ranvier_py.core.engine_cache.sources.event_values import Batch, BlocksStored, CacheCleared, Tier
from ranvier_py.core.engine_cache.sources.events import PORTION_BYTES, EventDecoder
from ranvier_py.core.prompts.fingerprint import TokenHasher

SETTLE_S = 0.01
"""A route may come this late, so that a burst is hashed together: the engine itself sends the message only after its
step."""

SETTLE_STEPS = 1000
CARRIED_BYTES = 64 << 10
"""Of messages, in about 10 ms."""

WAITING_BYTES_MAX = 128 << 20
"""Of messages to be applied: more than a gap holds back, or than an engine sends while they are applied."""

FROZEN_S = 0.1  # between two settles while a snapshot is written

StreamEffect = AskReplay | AskPeer | LevelChanged
"""What the shell has to do."""


@dataclass(slots=True)
class MessageProgress:
    """A message that is being applied, portion by portion, and what was in it so far."""

    seq: int
    size_bytes: int
    portions: Iterator[Batch]
    cleared: bool = False
    unread: bool = False


class EventBacklog:
    """What is to be applied to the residency, in order. Of more than WAITING_BYTES_MAX the newest message is dropped,
    as if it were unreadable, and counted."""

    def __init__(self, decoder: EventDecoder) -> None:
        self.waiting: deque[MessageProgress | StreamReset | Install] = deque()
        self.bytes = 0  # of messages, until they are applied
        self._decoder = decoder

    def add(self, effect: Apply | StreamReset | Install) -> None:
        if isinstance(effect, Apply):
            self.bytes += len(effect.payload)
            self.waiting.append(MessageProgress(effect.seq, len(effect.payload), self._portions(effect.payload)))
        else:  # what came before is void
            self.waiting.clear()
            self.bytes = 0
            self.waiting.append(effect)

    def _portions(self, payload: bytes) -> Iterator[Batch]:
        if self.bytes <= WAITING_BYTES_MAX:
            return self._decoder.portions(payload)
        self._decoder.counters.dropped += 1
        return iter((Batch((), unread=1),))


class StreamKnowledge:
    """How exactly a stream knows what its engine holds: the gap machine's level, lowered by what the residency lacks.
    If anything lacks, the engine holds more than is known, and nothing may be taken for not held."""

    def __init__(self, machine: GapMachine, decoder: EventDecoder, residency: Residency) -> None:
        self._machine, self._decoder, self._residency = machine, decoder, residency
        self.reason = ""  # of the machine's last change
        self.stores = False  # a stored event was readable, since the engine's restart
        self.is_hybrid = False  # by its metrics page
        self._skipped_before = 0  # unknown tags skipped before that restart

    def restarted(self) -> None:
        self.stores, self._skipped_before = False, self._decoder.counters.tags_skipped

    def lack(self) -> Lack:
        if not self.stores and self._decoder.counters.tags_skipped > self._skipped_before:
            return Lack.SCHEMA
        residency = self._residency
        is_hybrid = residency.mixed or (self.is_hybrid and not residency.has_states)
        if is_hybrid and residency.lack is not Lack.GROUP:
            return Lack.MIXED
        return residency.lack

    def level(self) -> Level:
        level, lack = self._machine.level, self.lack()
        if lack is not Lack.NOTHING:
            is_partial = lack is not Lack.MIXED and self._residency.view().prefixes > 0
            level = max(level, Level.DEGRADED if is_partial else Level.ESTIMATED, key=LEVELS.index)
        return level

    def now(self) -> LevelChanged:
        """Return the level, and why it is so."""
        level = self.level()
        return LevelChanged(level, self.reason if level is self._machine.level else self.lack().value)


class EventStream:
    """The stream of one source. It is followed while its shell calls, whether it is `open` or not. What others tell
    its `machine` has effects for `carry`."""

    def __init__(
        self,
        source: Source,
        engine_caches: EngineCaches,
        hasher: TokenHasher,
        names: Names,
        *,
        settings: GapSettings | None = None,
        entries_max: int = 2_000_000,
    ) -> None:
        self.source = source
        self.names = names
        self.machine = GapMachine(settings)
        self.decoder = EventDecoder()
        self.residency = Residency(hasher, names.namespace, entries_max=entries_max, repeats=True)
        self._engine_caches = engine_caches
        self._hasher = hasher
        self._backlog = EventBacklog(self.decoder)
        self._knowledge = StreamKnowledge(self.machine, self.decoder, self.residency)
        self._settle_at: float | None = None
        self._level: LevelChanged | None = None  # to be reported; EXACT waits until all is settled
        self._now_at = LevelChanged(self.machine.level, "")
        self.is_open = False

    def open(self, now: float) -> None:
        """Begin to report to EngineCaches. The next sweeps find what is held already."""
        if not self.is_open:
            self.is_open = True
            self._engine_caches.open(self.source, self.names.held(self.residency), now)
            self._level = self._knowledge.now()
            self._report_level(now)

    def close(self, now: float) -> None:
        """Report to EngineCaches no more, even if the shell goes on calling."""
        if self.is_open:
            self.is_open = False
            self._engine_caches.close(self.source, now)

    # What the shell reports

    def connected(self, now: float) -> list[StreamEffect]:
        return self.carry(self.machine.connected(now), now)

    def disconnected(self, now: float) -> list[StreamEffect]:
        return self.carry(self.machine.disconnected(now), now)

    def live(self, seq: int, payload: bytes, now: float) -> list[StreamEffect]:
        """Take a live message of the stream."""
        return self.carry(self.machine.live(seq, payload, now), now)

    def replayed(self, ask: int, seq: int, payload: bytes, now: float) -> list[StreamEffect]:
        return self.carry(self.machine.replayed(ask, seq, payload, now), now)

    def replay_ended(self, ask: int, now: float) -> list[StreamEffect]:
        return self.carry(self.machine.replay_ended(ask, now), now)

    def replay_failed(self, ask: int, now: float) -> list[StreamEffect]:
        return self.carry(self.machine.replay_failed(ask, now), now)

    def measured(self, now: float, *, is_hybrid: bool) -> list[StreamEffect]:
        """Take from the engine's metrics page whether it is a hybrid."""
        self._knowledge.is_hybrid = is_hybrid
        return self.carry((), now)

    def tick(self, now: float) -> list[StreamEffect]:
        """Do what is due. To be called at `wake_at`."""
        effects = self.carry(self.machine.tick(now), now)
        if self._settle_at is not None and now >= self._settle_at:
            self._settle(now)
        return effects

    def wake_at(self) -> float | None:
        """When `tick` has something to do, in seconds."""
        times = [at for at in (self.machine.wake_at(), self._settle_at) if at is not None]
        return min(times, default=None)

    # What it shows

    @property
    def level(self) -> Level:
        return self._knowledge.level()

    def snapshot(self) -> SnapshotWriter | None:
        """Begin a snapshot for a peer; None if this stream is not EXACT, has states or messages yet to apply, or is
        already writing one."""
        if self.level is not Level.EXACT or self.residency.has_states or self._backlog.waiting:
            return None
        self.residency.catch_up()
        seq = self.machine.next_seq - 1
        digest = self.machine.digest_of(seq)
        if digest is None or self.residency.frozen:
            return None
        return SnapshotWriter(self.residency, self._hasher, seq, digest)

    def counts(self) -> dict[str, int]:
        """Counters of all parts, by name."""
        decoder = {f"decoder_{name}": count for name, count in asdict(self.decoder.counters).items()}
        machine = {f"messages_{name}": count for name, count in asdict(self.machine.counters).items()}
        blocks, states = asdict(self.residency.counters), asdict(self.residency.state_counters)
        held = {f"blocks_{name}": count for name, count in blocks.items()}
        return {**decoder, **machine, **held, **{f"states_{name}": count for name, count in states.items()}}

    def view(self) -> dict[str, Any]:
        """What the stream knows, as JSON."""
        return {
            "level": self.level.value,
            "lacks": self._knowledge.lack().value,
            "next": self.machine.next_seq,
            **asdict(self.residency.view()),
            "unknown_tags": dict(self.decoder.unknown_tags),
            "counts": self.counts(),
        }

    # What it does

    def carry(self, effects: Iterable[Effect], now: float) -> list[StreamEffect]:
        """Carry out the effects that concern this stream, as many as there is time for, and return the others."""
        outside = self._queue(effects)
        cleared, room = False, CARRIED_BYTES
        while self._backlog.waiting and room > 0:
            effect = self._backlog.waiting.popleft()
            if isinstance(effect, MessageProgress):
                room -= min(effect.size_bytes, PORTION_BYTES)
                cleared |= self._apply(effect, outside, now)
            elif isinstance(effect, StreamReset):
                self._clear()
                self._knowledge.restarted()
                self.residency.mixed = self.residency.has_states = False
                cleared = True
            else:
                self.residency.install(effect.snapshot.state)
                self._knowledge.stores = self._knowledge.stores or self.residency.view().blocks > 0
                self._settle_soon(now, 0.0)
        if self._backlog.waiting:
            self._settle_soon(now, 0.0)
        now_at = self._knowledge.now()
        if now_at != self._now_at:
            self._now_at = self._level = now_at
            outside.append(now_at)
        if cleared:
            self._settle(now)
        self._report_level(now)
        return outside

    # Inside

    def _queue(self, effects: Iterable[Effect]) -> list[StreamEffect]:
        """Queue what changes the residency; return what the shell has to do, which need not wait for that."""
        outside: list[StreamEffect] = []
        for effect in effects:
            if isinstance(effect, LevelChanged):
                self._knowledge.reason = effect.reason
            elif isinstance(effect, AskReplay | AskPeer):
                outside.append(effect)
            else:
                self._backlog.add(effect)
        return outside

    def _apply(self, message: MessageProgress, outside: list[StreamEffect], now: float) -> bool:
        """Apply a portion of a message; what the shell has to do goes to `outside`. Returns at the message's end
        whether it cleared the cache: only there the machine learns what was in it.
        """
        try:
            batch = next(message.portions)
        except BadBatch:
            message.unread = True
        else:
            self._apply_portion(message, batch, now)
            if batch.more:
                self._backlog.waiting.appendleft(message)
                return False
        self._backlog.bytes -= message.size_bytes
        if message.cleared:
            outside += self._queue(self.machine.cleared(message.seq))
        if message.unread:
            outside += self._queue(self.machine.unreadable(message.seq, now))
        return message.cleared

    def _apply_portion(self, message: MessageProgress, batch: Batch, now: float) -> None:
        message.unread |= batch.unread > 0
        for event in batch.events:
            if isinstance(event, CacheCleared):
                self._clear()
                message.cleared = True
                continue
            self.residency.apply(event)
        if batch.events:
            self._knowledge.stores = self._knowledge.stores or any(
                isinstance(event, BlocksStored) for event in batch.events
            )
            self._settle_soon(now, SETTLE_S)

    def _clear(self) -> None:
        """This rank holds nothing. A single rank begins a generation; of several, its own prefixes are withdrawn."""
        self.residency.clear(singly=self._engine_caches.ranks(self.source) > 1)

    def _settle_soon(self, now: float, wait_s: float) -> None:
        if self._settle_at is None or now + wait_s < self._settle_at:
            self._settle_at = now + wait_s

    def _settle(self, now: float) -> None:
        changes = self.residency.settle(SETTLE_STEPS)
        if self._knowledge.lack() is Lack.MIXED:
            gone = tuple([change for change in changes.changes if change.tier is Tier.ABSENT])
            changes = changes._replace(changes=gone)
        frozen = bool(self.residency.frozen)
        complete = changes.complete and not frozen and not self._backlog.waiting
        self._settle_at = None if complete else now + FROZEN_S * frozen
        if self.is_open:
            found = changes._replace(complete=complete)
            self._engine_caches.changed(self.source, self.names.reported(found) if self.names.several else found, now)
        self._report_level(now)

    def _report_level(self, now: float) -> None:
        """Report EXACT only once all that was applied is settled, and any lower level at once."""
        if self._level is not None and (self._level.level is not Level.EXACT or self._settle_at is None):
            if self.is_open:
                mixed = self._knowledge.lack() is Lack.MIXED
                self._engine_caches.set_level(self.source, self._level.level, self._level.reason, now, mixed=mixed)
            self._level = None
