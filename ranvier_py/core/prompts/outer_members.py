"""Finds the outermost members of a body in its raw text, each with its place, and removes some of them.

Nothing is guessed: the standard library's scanner walks the JSON, so a place is where engines in Python find it, too.
Members of one name are all found. All other bytes stay as they came.
Bounds: only bodies that were parsed before are walked (`body_json`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import NamedTuple

BLANKS = re.compile(r"[ \t\r\n]*")
MARK = "\ufeff"  # engines in Python skip it at the beginning

value_at = json.JSONDecoder(strict=False).raw_decode


class OuterMember(NamedTuple):
    """A member of an object: its name, and where name, value and end are in the text."""

    name: str
    start: int
    value: int
    end: int


def text_of(body: bytes) -> str:
    """Return the text of a body in UTF-8. Raises ValueError for other encodings."""
    return body.decode("utf-8", "surrogatepass")


def members_of(text: str, at: int = 0) -> list[OuterMember]:
    """Return the members of the object that begins at `at`, or behind blanks. Raises ValueError, RecursionError."""
    found: list[OuterMember] = []
    at = skipped(text, at + (not at and text.startswith(MARK)))
    if text[at : at + 1] != "{":
        raise ValueError("no object")
    at = skipped(text, at + 1)
    while text[at : at + 1] == '"':
        start = at
        name, at = value_at(text, at)
        at = skipped(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("no value")
        value = skipped(text, at + 1)
        _, end = value_at(text, value)
        found.append(OuterMember(name, start, value, end))
        at = skipped(text, end)
        if text[at : at + 1] != ",":
            break
        at = skipped(text, at + 1)
    if text[at : at + 1] != "}":
        raise ValueError("no end")
    return found


def is_doubled(body: bytes, names: Collection[str]) -> bool:
    """Whether one of these names stands more than once; engines differ in which one counts. Raises as `members_of`."""
    if sum(body.count(b'"%b"' % name.encode()) for name in names) < 2 and b"\\u" not in body:
        return False
    found = [member.name for member in members_of(text_of(body)) if member.name in names]
    return len(found) > len(set(found))


def skipped(text: str, at: int) -> int:
    match = BLANKS.match(text, at)
    return match.end() if match is not None else at
