"""Which process is behind a backend: what probes and peers say of it, and when that means another one.

A claim is worth what the process that served it holds: the next one holds nothing. Evidence, the best first:

- the start time that the engine's own metrics tell: another one is another process, the same one is the same;
- a refused connection: nobody listened, so what answers next is another. A mere time-out proves nothing, since a busy
  engine keeps its cache.

The first word of a start time is special: what was claimed until then may be of any process since we began to ask. If a
probe failed in between, in whatever way, those claims are void; they are few, since we begin with a probe.
A peer's word of a start counts as our own until we look ourselves. Soon after peers told of a restart of an engine that
tells no start time, ours is taken for the same one.
"""

from __future__ import annotations

START_TOLERANCE_S = (
    0.5  # an exporter may compute its start time anew each time; no engine starts twice in half a second
)
NEVER_REPORTED = float("-inf")
SAME_RESTART_S = 30.0
"""A restart that we see so soon after a peer told of one is the same: three probe intervals of 10 s."""


def same_process(started_at: float, other: float) -> bool:
    """Whether two start times of an engine's own telling are of one process."""
    return abs(started_at - other) <= START_TOLERANCE_S


class Process:
    """What is known of the process behind one backend. Written by the Registry."""

    __slots__ = ("has_remote_routes", "refused", "reported_at", "started_at")

    def __init__(self) -> None:
        self.started_at: float | None = None  # in the engine's clock; only ever compared with itself
        self.reported_at = NEVER_REPORTED  # when a peer told of a restart
        self.refused = False  # a connection, since the last good probe
        self.has_remote_routes = False  # peers' claims were taken since the last restart

    def answered(self, started_at: float | None, *, used: bool, failing: bool, now: float) -> str:
        """A good probe found this start time, or none. Why that is another process than before; "" if it is not.

        `used`: it may have claims, or was seen alive before. `failing`: the probe before this one failed.
        """
        why = self._judge(started_at, used=used, failing=failing, now=now)
        self.refused = False
        return why

    def reported(self, started_at: float, *, used: bool, failing: bool, now: float) -> str:
        """The same of a peer's word, of the process that it counts as we do. It says nothing once we know ourselves."""
        return "" if self.started_at is not None else self._judge(started_at, used=used, failing=failing, now=now)

    def _judge(self, reported: float | None, *, used: bool, failing: bool, now: float) -> str:
        known = self.started_at
        if known is not None and reported is not None:
            self.started_at = reported
            return "" if same_process(known, reported) else "start time changed"
        doubtful = self.refused or (failing and reported is not None)
        another = doubtful and (used or self.has_remote_routes) and now - self.reported_at >= SAME_RESTART_S
        self.started_at = reported if reported is not None else None if another else known
        return "back after refused connections" if another else ""

    def replaced(self, started_at: float, now: float) -> bool:
        """A peer saw it restart, at 0 if it knows no start time. Whether that is another process than we know."""
        if started_at and self.started_at is not None and same_process(self.started_at, started_at):
            return False
        self.started_at = started_at or None
        self.reported_at = now
        self.refused = False
        return True
