"""Finds out that several processes answer behind one backend's URL: a Service, a name with several addresses.

Each has a cache of its own, so that what one holds says nothing of what another one will be asked for, and the start
times that probes read alternate without any restart. Proofs: a start time that comes back after another one was read,
since its process was there all the while; or several addresses of one family behind the name.
Bound: STARTS_MAX start times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

START_TOLERANCE_S = 0.5
"""Start times that differ by less are equal: an exporter may compute them anew, and no engine starts twice so soon."""

STARTS_MAX = 8  # to see which come back; with more processes some of these still do

LIFE_S = 600.0
"""A proof counts so long: twenty reads of the start time, which would all have to find one of several processes."""


def same_process(started_at: float, other: float) -> bool:
    """Whether two start times from an engine's own metrics are of one process."""
    return abs(started_at - other) <= START_TOLERANCE_S


@dataclass(slots=True)
class SeveralProcesses:
    """What is known of how many processes one backend is."""

    hosts: int = 0  # that its name surely stands for
    starts: dict[float, float] = field(default_factory=dict)  # start times, each with when it was last read
    latest: float | None = None
    proved_at: float = -inf  # when a start time last came back

    def take(self, started_at: float, now: float) -> None:
        """Take a start time that a probe read."""
        known = next((each for each in self.starts if same_process(each, started_at)), None)
        if known is not None and self.latest is not None and not same_process(self.latest, started_at):
            self.proved_at = now
        self.latest = known if known is not None else started_at
        self.starts[self.latest] = now
        while len(self.starts) > STARTS_MAX:
            del self.starts[min(self.starts, key=self.starts.__getitem__)]

    def moved(self) -> None:
        """Forget start times: the name leads elsewhere."""
        self.starts.clear()
        self.latest, self.proved_at = None, -inf

    def count(self, now: float) -> int:
        """Return how many processes there surely are; 1 unless several are proved."""
        lately = sum(now - at < LIFE_S for at in self.starts.values()) if now - self.proved_at < LIFE_S else 1
        return max(lately, self.hosts, 1)


def advice(processes: int, ranks: int, url: str) -> str:
    """Return what an operator should do about several caches behind one backend; "" if there is one."""
    if processes > 1:
        return (
            f"at least {processes} processes answer behind this one address, each with a cache of its own, and it is "
            "chance which of them gets a request: list each process as a backend of its own, by its own address"
        )
    if ranks > 1:
        first, last = f"{url}#rank=0", f"{url}#rank={ranks - 1}"
        return (
            f"the engine has {ranks} data-parallel ranks, each with a cache of its own, and chooses one by itself: "
            f"list each rank as a backend of its own, {first} to {last}"
        )
    return ""
