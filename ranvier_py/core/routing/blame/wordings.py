"""What backends say again and again when they refuse: by that those are known who serve requests like any others, but
none with some trait, such as tools, that no kind of requests shows (`refusals.kind_of`).

Rule: what a backend says for the first time is believed. What it says again is tried elsewhere, once; if another one
refuses that as well, the requests are to blame, and twice as many refusals in these words are believed from then on,
until one is contradicted (test_wordings.py, test_partial_refusals.py). Bounds: ROWS_MAX, PATIENCE_MAX.
"""

from __future__ import annotations

import re

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.ids import BackendId

ROWS_MAX = 4096
"""Of a table of what backends refuse, of which the oldest goes: half a megabyte."""

PATIENCE_MAX = 1024  # refusals in a row that are believed, after every other one was shared

NUMBERS = re.compile(r"\d+")


def wording_of(status: int, words: str) -> int:
    """Return what is equal for refusals in the same words, but for their numbers."""
    return hash((status, NUMBERS.sub("", words))) or 1


class Wordings:
    """How often each backend said what since another one did. A `wording` is that of `wording_of`."""

    __slots__ = ("_patience", "rows")

    def __init__(self) -> None:
        self.rows: BoundedDict[tuple[int, BackendId], int] = BoundedDict(ROWS_MAX)
        self._patience: BoundedDict[int, int] = BoundedDict(ROWS_MAX)

    def refused(self, backend: BackendId, wording: int, *, is_doubtful: bool = False) -> bool:
        """Take in a refusal. Returns whether it should be tried elsewhere, once; the first one, too, of a backend that
        `is_doubtful`, unless others have shared such refusals."""
        times = self.rows.get((wording, backend), 0)
        self.rows[wording, backend] = times + 1
        return times >= self._patience.get(wording, 0 if is_doubtful else 1)

    def shared(self, backend: BackendId, wording: int) -> None:
        """Believe its next refusals in these words, since a second backend refuses such a request as well."""
        self.rows[wording, backend] = 0
        self._patience[wording] = min(PATIENCE_MAX, 2 * self._patience.get(wording, 1))

    def contradicted(self, wording: int) -> None:
        """Take in that another backend served what was refused in these words."""
        self._patience.pop(wording, None)

    def forget(self, backend: BackendId) -> None:
        """Forget what it said: another process is behind it, or another backend has its id."""
        for key in [key for key in self.rows if key[1] == backend]:
            del self.rows[key]
