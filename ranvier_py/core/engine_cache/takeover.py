"""Reading on where another node stopped: what was kept while standing by becomes what the reader begins with.

Whoever is to read a stream asks `ready` until it is so, and `take`s what there is: a whole residency, made a few chunks
at a time, or None where nothing was kept. Bound: one building for each stream that is about to be read. Cost: 4 ms a
call of `ready` at most, in all 15 us for each block that the engine holds.
"""

from __future__ import annotations

from ranvier_py.core.engine_cache.peer_access import Sharing
from ranvier_py.core.engine_cache.snapshot import Copy
from ranvier_py.core.engine_cache.standby import Building
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.fingerprint import TokenHasher


class Takeovers:
    """`sharing` may be set anew before the first call."""

    def __init__(self, sharing: Sharing, hasher: TokenHasher) -> None:
        self.sharing = sharing
        self._hasher = hasher
        self._buildings: dict[tuple[BackendId, int], Building] = {}

    def ready(self, backend: BackendId, rank: int, now: float) -> bool:
        """False: it is being made; ask again at once."""
        place = (backend, rank)
        building = self._buildings.get(place)
        if building is None:
            kept = self.sharing.standby_copy(backend, rank, now)
            if kept is None:
                return True
            building = self._buildings[place] = Building(kept, self._hasher)
        building.step()
        return building.done

    def take(self, backend: BackendId, rank: int) -> Copy | None:
        """What the reader begins with, after `ready`."""
        building = self._buildings.pop((backend, rank), None)
        return building.copy if building is not None else None

    def forget(self, backend: BackendId) -> None:
        """It is not to be read here after all."""
        for place in [place for place in self._buildings if place[0] == backend]:
            del self._buildings[place]
