"""What whoever reads event streams must know of the other nodes: which streams are its own, and where copies go.

`Sharing` is that, whether there is a cluster (core/gossip/peer/reader_sync.py) or not (`Unshared`). The reader asks
`owns` now and then and begins or ends its subscriptions by it, says how well it knows what it reads, and carries the
two effects of a gap machine that need others: AskPeer -> `ask`, and what comes of it from `copies`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.snapshot import Copy, Original, Place
from ranvier_py.core.engine_cache.standby import StandbyCopy
from ranvier_py.core.ids import BackendId

Giver = Callable[[BackendId, int, Place | None], Original | None]
"""Begins a copy of what a backend's rank holds; None when it is not known exactly here. With a place it is for a node
that stands by, and has a copy as of then: `EventStream.original`."""


class CopyCame(NamedTuple):
    """The answer to a question. `copy` None: there is none to be had."""

    backend: BackendId
    rank: int
    ask: int
    copy: Copy | None


class Sharing(Protocol):
    """Ranks of a data-parallel engine are read together, by one node."""

    give: Giver

    def streams(self, backends: Mapping[BackendId, Sequence[int]], now: float) -> None:
        """These backends have event streams, of these ranks; say it as often as you like."""
        ...

    def owns(self, backend: BackendId) -> bool:
        """Whether this node is to read the stream of a backend now."""
        ...

    def said(self, backend: BackendId, level: Level, now: float) -> None:
        """How well this node knows the stream that it reads: the worst of its ranks."""
        ...

    def unable(self, backend: BackendId, is_unable: bool, now: float) -> None:
        """This node can't read that stream, or could again. Others take it."""
        ...

    def ask(self, backend: BackendId, rank: int, ask: int, now: float) -> None:
        """Get an exact copy from a peer."""
        ...

    def copies(self) -> list[CopyCame]:
        """What has come of questions since the last call."""
        ...

    def standby_copy(self, backend: BackendId, rank: int, now: float) -> StandbyCopy | None:
        """What this node kept of a stream while it stood by for its reader; it is handed over. None: nothing."""
        ...

    def level(self, backend: BackendId) -> Level | None:
        """How well the stream is known by whoever reads it; None: nobody does."""
        ...


def gives_none(backend: BackendId, rank: int, since: Place | None = None) -> Original | None:  # noqa: ARG001
    """A Giver."""
    return None


class Unshared:
    """Alone: all streams are ours, and nobody has a copy."""

    def __init__(self) -> None:
        self.give: Giver = gives_none
        self._levels: dict[BackendId, Level] = {}
        self._came: list[CopyCame] = []

    def streams(self, backends: Mapping[BackendId, Sequence[int]], now: float) -> None:  # noqa: ARG002
        self._levels = {backend: level for backend, level in self._levels.items() if backend in backends}

    def owns(self, backend: BackendId) -> bool:  # noqa: ARG002
        return True

    def said(self, backend: BackendId, level: Level, now: float) -> None:  # noqa: ARG002
        self._levels[backend] = level

    def unable(self, backend: BackendId, is_unable: bool, now: float) -> None:  # noqa: ARG002
        self._levels.pop(backend, None)

    def ask(self, backend: BackendId, rank: int, ask: int, now: float) -> None:  # noqa: ARG002
        self._came.append(CopyCame(backend, rank, ask, None))

    def copies(self) -> list[CopyCame]:
        came, self._came = self._came, []
        return came

    def standby_copy(self, backend: BackendId, rank: int, now: float) -> StandbyCopy | None:  # noqa: ARG002
        return None

    def level(self, backend: BackendId) -> Level | None:
        return self._levels.get(backend)
