"""What happens to routes on their way between a table and its peers, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SharedRouteCounters:
    told: int = 0  # route updates
    bound: int = 0  # stops that were told in update batches
    spared: int = 0  # stops that were told with their tokens meanwhile
    outdated: int = 0  # news of a process or a backend that is gone, not told
    heard: int = 0  # route updates
    bad: int = 0  # bytes that are no route update
    void: int = 0  # route updates of an earlier boot, or of a backend that this node does not have
    rows: int = 0  # new rows by route updates of peers
    keys_spared: int = 0  # that an engine told us of and a peer told first
    keys_gone: int = 0  # withdrawn before they were told
