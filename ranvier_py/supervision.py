"""Confines bugs of ours: all code that serves one backend, peer, engine, subscriber or socket runs under it.

Rules: an unexpected exception is a bug. It is counted by place, logged with its traceback at most once in
`LOG_INTERVAL_S` for each place, and ends only the work under way. A loop starts again after a pause, which doubles from
PAUSE_S to PAUSE_S_MAX and is reset once the loop has run for STEADY_S. A cancellation passes, even in one group with a
fault; so does anything that is no Exception, such as KeyboardInterrupt. A place is the name of a part, never of a
backend or a peer, because each place is a time series.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from ranvier_py.core.log_events import event
from ranvier_py.core.log_limit import LogLimit
from ranvier_py.core.metrics import counter
from ranvier_py.core.pauses import doubled

log = logging.getLogger(__name__)

PAUSE_S, PAUSE_S_MAX = 0.1, 30.0
STEADY_S = 60.0
"""After running for so long, a loop counts as healthy: its next fault starts with the first pause."""


@dataclass(slots=True)
class FaultCounters:
    unexpected_errors: dict[str, int] = counter(
        "Exceptions that nobody expected, each a bug; the log has them.", label="place"
    )


class Faults:
    """The unexpected errors of one node."""

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self.counters = FaultCounters()
        self._latest: dict[str, tuple[float, str]] = {}  # by place: when, and the kind of error
        self._clock = clock
        self._log_limit = LogLimit()

    def note(self, place: str, error: BaseException) -> None:
        """Count an error, and log it unless one of the same place was logged within LOG_INTERVAL_S."""
        self.counters.unexpected_errors[place] += 1
        self._latest[place] = self._clock(), type(error).__name__
        more = self._log_limit.more(place, self._clock())
        if more is not None:
            log.error(event("unexpected.error", place=place, more=more), exc_info=error)

    def lately(self, within_s: float) -> Iterator[tuple[str, str]]:
        """Yield where something went wrong so lately, with the kind of error."""
        now = self._clock()
        return ((place, kind) for place, (at, kind) in self._latest.items() if now - at < within_s)

    @contextmanager
    def caught(self, place: str) -> Iterator[None]:
        """Catch and note a fault of the block, so that what follows goes on."""
        try:
            yield
        except* Exception as group:
            self.note(place, inner(group))

    async def once(self, place: str, run: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run it once; a fault ends only this run."""
        with self.caught(place):
            await run(*arguments)

    async def keep(self, place: str, run: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run it, and again after each fault, until it returns or is cancelled."""
        failures = 0
        while True:
            began, has_failed = trio.current_time(), False
            try:
                await run(*arguments)
            except* Exception as group:
                self.note(place, inner(group))
                has_failed = True
            if not has_failed:
                return
            if trio.current_time() - began >= STEADY_S:
                failures = 0
            await trio.sleep(doubled(PAUSE_S, failures, PAUSE_S_MAX))
            failures += 1


def inner(group: ExceptionGroup[Exception]) -> Exception:
    """Unwrap a group that `except*` made of one exception."""
    return group.exceptions[0] if len(group.exceptions) == 1 and not group.message else group
