"""How exactly an event stream knows what its engine holds: the gap machine's level, lowered by what residency lacks.

Rule: if anything lacks, the engine holds more than is known, and nothing may be taken for not held.
"""

from __future__ import annotations

from ranvier_py.core.engine_cache.engine_caches import LEVELS
from ranvier_py.core.engine_cache.gap_values import Level, LevelChanged
from ranvier_py.core.engine_cache.gaps import GapMachine
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.residency_values import Lack
from ranvier_py.core.engine_cache.sources.events import EventDecoder


class StreamKnowledge:
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
