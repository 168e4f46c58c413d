"""Names of models, and globs of them, in a file of keys that match nothing: no engine lists such a model, and no table
of models has such a name.

Rule: an engine names its models only once it runs, so a file may name what is not there yet. Two globs count as a match
if some name may fit both, so that nothing is said of what may be right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from ranvier_py.core.access.identity import globs

PATTERNS_MAX = 256  # of a file that are looked at
NO_MODEL = "none"
"""Of a key that may use no model at all."""

WILD = re.compile(r"[*?]")


def is_watched(pattern: str) -> bool:
    """Whether it is worth a look what a pattern matches."""
    return pattern != NO_MODEL and bool(pattern.strip("*"))


def unmatched(
    patterns: Mapping[str, str], listed: Iterable[str], tables: Iterable[str], lacks: Callable[[str], bool]
) -> Mapping[str, str]:
    """Return those of the patterns that match nothing. `tables`: names of tables, and what they lead to; `lacks`:
    whether the lists of all engines are known, and none may serve a model."""
    names, found = dict.fromkeys(chain(listed, tables)), {}
    wild = [name for name in names if WILD.search(name)]
    for pattern, place in patterns.items():
        if pattern in names or not lacks(pattern):
            continue
        matches = globs([pattern]).match
        if not any(map(matches, names)) and not any(may_overlap(pattern, name) for name in wild):
            found[pattern] = place
    return found


def may_overlap(pattern: str, glob: str) -> bool:
    """Whether a name may fit a pattern and a glob; True also where that is not sure."""
    if not WILD.search(pattern):
        return globs([glob]).match(pattern) is not None
    one, other = WILD.split(pattern)[0], WILD.split(glob)[0]
    return one.startswith(other) or other.startswith(one)
