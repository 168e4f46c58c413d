"""What route gossip needs of the route table: the calls by which route updates, sums and rows go in and out.

Whoever binds gossip to a table implements `RouteMemory` (core/gossip/peer/route_sync.py does; `table_copy` is a ready
part). Long work comes in steps of at most 2 ms: the owner calls for the next step when it is ticked, and serves
requests in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ranvier_py.core.gossip.wire.messages import Rows
from ranvier_py.core.routing.route_table.scan import CHUNKS_KEPT

WINDOW_CHUNKS = CHUNKS_KEPT
"""Chunks that may be under way at once. At 17 kB each: 250 MB/s over a millisecond, 5 MB/s over 50 ms."""


class RowsWalk(Protocol):
    """One way through a table, a chunk at a time, parents before children."""

    def take(self, now: float) -> Rows | None:
        """One step. The next chunk, with request and chunk number 0; the one with `last` ends it. None: none yet."""
        ...

    def back(self, chunks: int) -> None:
        """The last so many chunks were lost: take them again. At most WINDOW_CHUNKS."""
        ...


class RouteMemory(Protocol):
    """The route table, as gossip sees it."""

    def hear(self, route_update: bytes, age_s: float, now: float) -> bool:
        """Learn what a peer knows. Returns whether it was news. Never raises: what is no route update is counted."""
        ...

    def sums(self, now: float) -> Iterator[bytes | None]:
        """The bucket sums (`routes.scan`), the last item; None for each step before it."""
        ...

    def rows(self, buckets: bytes) -> RowsWalk:
        """The rows of these buckets (u16 each), or the whole table when empty."""
        ...

    def merge(self, rows: Rows, since: float, now: float) -> int:
        """Learn a chunk. Ages count from `since`: when it was asked for, so that no delay makes rows younger.

        Returns the number of rows that were new.
        """
        ...
