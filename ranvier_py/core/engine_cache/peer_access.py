"""What whoever receives event streams must know of the other nodes: which are its own, and where snapshots come from.

A node asks `subscribes` and `reads` now and then and acts by it, reports how well it knows what it receives, and
carries the two effects of a gap machine that need others: AskPeer -> `ask`, and what comes of it from `snapshots`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.snapshot import Snapshot, SnapshotWriter
from ranvier_py.core.ids import BackendId

SnapshotGiver = Callable[[BackendId, int], SnapshotWriter | None]
"""Begins a snapshot of what a backend's rank holds; None when it is not known exactly here: `EventStream.snapshot`."""


class SnapshotAnswer(NamedTuple):
    """The answer to a question. `snapshot` None: there is none to be had."""

    backend: BackendId
    rank: int
    ask: int
    snapshot: Snapshot | None


class StreamSharing:
    """Of a node that is alone: all streams are its own, and nobody has a snapshot.

    Among peers it is core/gossip/readers/shared_streams.py. Ranks of a data-parallel engine are read together.
    """

    def __init__(self) -> None:
        self.give: SnapshotGiver = lambda _backend, _rank: None
        self._levels: dict[BackendId, Level] = {}
        self._answers: list[SnapshotAnswer] = []

    def streams(self, backends: Mapping[BackendId, Sequence[int]], now: float) -> None:  # noqa: ARG002
        """These backends have event streams, of these ranks; may be called as often as you like."""
        self._levels = {backend: level for backend, level in self._levels.items() if backend in backends}

    def subscribes(self, backend: BackendId) -> bool:  # noqa: ARG002
        """Whether this node is to receive the stream of a backend now, as its reader or as its standby."""
        return True

    def reads(self, backend: BackendId) -> bool:  # noqa: ARG002
        """Whether it is the reader, which applies the stream for all."""
        return True

    def report(self, backend: BackendId, level: Level, now: float) -> None:  # noqa: ARG002
        """How well this node knows the stream that it receives: the worst of its ranks."""
        self._levels[backend] = level

    def unable(self, backend: BackendId, is_unable: bool, now: float) -> None:  # noqa: ARG002
        """This node can't receive that stream, or could again. Others take it."""
        self._levels.pop(backend, None)

    def ask(self, backend: BackendId, rank: int, ask: int, now: float) -> None:  # noqa: ARG002
        """Get an exact snapshot from a peer."""
        self._answers.append(SnapshotAnswer(backend, rank, ask, None))

    def snapshots(self) -> list[SnapshotAnswer]:
        """What has come of questions since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def level(self, backend: BackendId) -> Level | None:
        """How well the stream is known by whoever reads it; None: nobody does."""
        return self._levels.get(backend)
