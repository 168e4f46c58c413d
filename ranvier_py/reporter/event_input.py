"""An engine's KV events as a reporter takes them: decoder and gap machine, whose events go to the intake.

The same machine as a node's, without peers to ask for copies. What replay can't bring back stays unknown: a block whose
removal was lost is a phantom until the engine is restarted or clears its cache. Routers are told that it is so, and
believe the rest (level DEGRADED). A restart clears what was held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ranvier_py.core.engine_cache.gap_values import Apply, AskReplay, Effect, GapSettings, Level, LevelChanged, Reset
from ranvier_py.core.engine_cache.gaps import GapMachine
from ranvier_py.core.engine_cache.sources.event_frames import BadBatch
from ranvier_py.core.engine_cache.sources.event_values import BlocksStored, CacheCleared, Event
from ranvier_py.core.engine_cache.sources.events import EventDecoder
from ranvier_py.reporter.intake import Call, Cleared, Heard
from ranvier_py.reporter.ranks import renamed


class ReportedStream:
    """What io/engine_events/zmq_source.py's KvSubscriber calls. `level` is how well the engine is known."""

    def __init__(self, waiting: deque[Call], *, replay: bool, rank: int | None = None) -> None:
        """`rank`: which one of several this is; None of an engine that has one."""
        self.rank = rank
        self.machine = GapMachine(GapSettings(replay=replay, peers=False))
        self.decoder = EventDecoder()
        self._stores = False  # something that was stored could be read
        self._waiting = waiting

    def close(self) -> None:
        """Whatever its connection still has to say is not handed on."""
        self._waiting = deque()

    @property
    def level(self) -> Level:
        return self.machine.level

    @property
    def is_understood(self) -> bool:
        """False: nothing that it stored could be read, and there were events of names that we do not know."""
        return self._stores or not self.decoder.counters.tags_skipped

    def connected(self, now: float) -> list[AskReplay | LevelChanged]:
        return self._carry(self.machine.connected(now), now)

    def disconnected(self, now: float) -> list[AskReplay | LevelChanged]:
        return self._carry(self.machine.disconnected(now), now)

    def live(self, seq: int, payload: bytes, now: float) -> list[AskReplay | LevelChanged]:
        return self._carry(self.machine.live(seq, payload, now), now)

    def replayed(self, ask: int, seq: int, payload: bytes, now: float) -> list[AskReplay | LevelChanged]:
        return self._carry(self.machine.replayed(ask, seq, payload, now), now)

    def replay_ended(self, ask: int, now: float) -> list[AskReplay | LevelChanged]:
        return self._carry(self.machine.replay_ended(ask, now), now)

    def replay_failed(self, ask: int, now: float) -> list[AskReplay | LevelChanged]:
        return self._carry(self.machine.replay_failed(ask, now), now)

    def tick(self, now: float) -> list[AskReplay | LevelChanged]:
        return self._carry(self.machine.tick(now), now)

    def wake_at(self) -> float | None:
        return self.machine.wake_at()

    def _carry(self, effects: list[Effect], now: float) -> list[AskReplay | LevelChanged]:
        waiting, outside = deque(effects), []
        while waiting:
            effect = waiting.popleft()
            if isinstance(effect, Apply):
                waiting.extend(self._apply(effect, now))
            elif isinstance(effect, Reset):
                self._waiting.append(Cleared(self.rank))
            elif isinstance(effect, AskReplay | LevelChanged):
                outside.append(effect)
        return outside

    def _apply(self, message: Apply, now: float) -> list[Effect]:
        """Hand on what a message says. Returns what the machine makes of it."""
        try:
            batch = self.decoder.decode(message.payload)
        except BadBatch:
            return self.machine.unreadable(message.seq, now)
        self._stores = self._stores or any(isinstance(event, BlocksStored) for event in batch.events)
        self._hand_on(batch.events)
        effects: list[Effect] = []
        if any(isinstance(event, CacheCleared) for event in batch.events):
            effects += self.machine.cleared(message.seq)
        if batch.unread:
            effects += self.machine.unreadable(message.seq, now)
        return effects

    def _hand_on(self, events: Sequence[Event]) -> None:
        if self.rank is None:
            if events:
                self._waiting.append(Heard(events))
            return
        own: list[Event] = []
        for event in events:
            if isinstance(event, CacheCleared):
                own.clear()
                self._waiting.append(Cleared(self.rank))
            else:
                own.append(renamed(event, self.rank))
        if own:
            self._waiting.append(Heard(own))
