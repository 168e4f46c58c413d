"""Who may serve one model just now, as the registry hands it out.

Cost: made once for each change of eligibility and model; reading is attribute access.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from ranvier_py.core.errors import NoBackend, NotFound
from ranvier_py.core.routing.backend import Backend


class Empty(Enum):
    """Why a pool has nobody in it."""

    UNKNOWN_MODEL = "unknown_model"
    NOBODY = "nobody"


class Pool:
    """Who may serve one model just now. A snapshot: the tuple and the lists are never changed, a new Pool is made.

    `generations` is indexed by BackendId and holds -1 for who is not eligible, so that the route table filters claims
    by one comparison. `why` is None unless the pool is empty. `last_resort`: the circuits were overruled.
    """

    __slots__ = ("backends", "generations", "ids", "last_resort", "why")

    def __init__(self, backends: Sequence[Backend], slots: int, *, last_resort: bool, why: Empty | None) -> None:
        self.backends = tuple(backends)
        self.ids = tuple(backend.id for backend in backends)
        self.generations = [-1] * slots
        for backend in backends:
            self.generations[backend.id] = backend.generation
        self.last_resort = last_resort
        self.why = None if backends else why

    def __len__(self) -> int:
        return len(self.backends)

    def error(self, model: str) -> NotFound | NoBackend:
        """What to tell the client of an empty pool; the words of the 404 are OpenAI's."""
        if self.why is Empty.UNKNOWN_MODEL:
            return NotFound(f"The model `{model}` does not exist")
        return NoBackend("No backend is available to serve this request")
