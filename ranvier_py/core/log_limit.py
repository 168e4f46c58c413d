"""Limits how often a kind of trouble is logged: once in LOG_INTERVAL_S, with the number of times it was not logged.

Source: consul#19965, a line every 3 s for years.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LOG_INTERVAL_S = 30.0
PATH_CHARACTERS_MAX = 300  # of a request that was refused


class LogLimit:
    """Remembers which kinds of trouble were logged lately. Kinds are few: parts of the program and errors."""

    def __init__(self) -> None:
        self._logged: dict[str, tuple[float, int]] = {}  # kind -> (when it was last logged, times not logged since)

    def more(self, kind: str, now: float) -> int | None:
        """Return how many of this kind were not logged since the last line, for the one to log now; None if that was
        within LOG_INTERVAL_S."""
        logged_at, more = self._logged.get(kind, (-LOG_INTERVAL_S, 0))
        if now - logged_at < LOG_INTERVAL_S:
            self._logged[kind] = (logged_at, more + 1)
            return None
        self._logged[kind] = (now, 0)
        return more

    def refused(self, kind: str, method: str, path: str, now: float) -> Mapping[str, Any] | None:
        """Return what a line shows of a request that was refused: whoever has no key may ask at will. None as above."""
        if (more := self.more(kind, now)) is None:
            return None
        return {"method": method[:PATH_CHARACTERS_MAX], "path": path[:PATH_CHARACTERS_MAX], "more": more}
