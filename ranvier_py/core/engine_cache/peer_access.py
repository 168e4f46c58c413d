"""Answers what receivers of event streams ask about other nodes: which streams are theirs, who has snapshots.

A node asks `subscribes` and `reads` regularly and acts on the answers. It reports how well it knows its streams, and
carries out the effects of a gap machine that need peers: AskPeer leads to `ask`, and `snapshots` returns the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.snapshot import Snapshot, SnapshotWriter
from ranvier_py.core.ids import BackendId

SnapshotGiver = Callable[[BackendId, int], SnapshotWriter | None]
"""Begins a snapshot of what a backend's rank holds (`EventStream.snapshot`); None if not known exactly here."""


class SnapshotAnswer(NamedTuple):
    """The answer to one question; a `snapshot` of None means that there is none."""

    backend: BackendId
    rank: int
    ask: int
    snapshot: Snapshot | None


class StreamSharer:
    """Stream sharing for a node without peers: it reads all streams, and nobody has a snapshot."""

    def __init__(self) -> None:
        self.give: SnapshotGiver = lambda _backend, _rank: None
        self._levels: dict[BackendId, Level] = {}
        self._answers: list[SnapshotAnswer] = []

    def streams(self, backends: Mapping[BackendId, Sequence[int]], now: float) -> None:  # noqa: ARG002
        """Set which backends have event streams, and of which ranks. It may be called at any time."""
        self._levels = {backend: level for backend, level in self._levels.items() if backend in backends}

    def subscribes(self, backend: BackendId) -> bool:  # noqa: ARG002
        """Whether this node receives the backend's stream now, as its reader or as its standby."""
        return True

    def reads(self, backend: BackendId) -> bool:  # noqa: ARG002
        """Whether this node is the reader, which applies the stream for all."""
        return True

    def report(self, backend: BackendId, level: Level, now: float) -> None:  # noqa: ARG002
        """Report how well this node knows a stream that it receives: the level of its worst rank."""
        self._levels[backend] = level

    def unable(self, backend: BackendId, is_unable: bool, now: float) -> None:  # noqa: ARG002
        """Report that this node cannot receive that stream, or can again. Others take it over."""
        self._levels.pop(backend, None)

    def ask(self, backend: BackendId, rank: int, ask: int, now: float) -> None:  # noqa: ARG002
        """Ask peers for an exact snapshot."""
        self._answers.append(SnapshotAnswer(backend, rank, ask, None))

    def snapshots(self) -> list[SnapshotAnswer]:
        """Return the answers that came since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def level(self, backend: BackendId) -> Level | None:
        """The level at which its reader knows the stream; None if nobody reads it."""
        return self._levels.get(backend)
