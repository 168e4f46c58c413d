"""Finds the outermost members of a body in its raw text, each with its place, and removes some of them.

Nothing is guessed: the standard library's scanner walks the JSON, so a place is where engines in Python find it, too.
Members of one name are all found. All other bytes stay as they came.
Bounds: only bodies that were parsed before are walked (`body_json`), and at most MEMBERS_MAX members of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from ranvier_py.core.prompts.reserved_members import CONTAINERS, ID_MEMBERS, LEVELS_MAX, has_address

MEMBERS_MAX = 4096  # in one body, with those in containers: requests have some twenty

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


def members_of(text: str, at: int = 0, most: int = MEMBERS_MAX) -> list[OuterMember]:
    """Return the members of the object that begins at `at`, or behind blanks. Raises ValueError, also for more than
    `most` members, and RecursionError."""
    if most < 0:
        raise ValueError("too many members")
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
        if len(found) > most:
            raise ValueError("too many members")
        at = skipped(text, end)
        if text[at : at + 1] != ",":
            break
        at = skipped(text, at + 1)
    if text[at : at + 1] != "}":
        raise ValueError("no end")
    return found


def without(body: bytes, names: Collection[str]) -> bytes:
    """Return the body without members of routers of these names, where `reserved_in` finds them.

    Raises ValueError for a body in another encoding, RecursionError.
    """
    text, pieces, at = text_of(body), list[str](), 0
    found: list[tuple[int, int]] = []
    add_gaps(text, 0, names, found)
    for start, end in sorted(found):
        pieces.append(text[at:start])
        at = end
    return "".join([*pieces, text[at:]]).encode("utf-8", "surrogatepass")


def add_gaps(
    text: str, at: int, names: Collection[str], found: list[tuple[int, int]], most: int = MEMBERS_MAX, level: int = 0
) -> int:
    """Add the places of members to remove, each with one of its commas. Return how many more members may be walked."""
    members = members_of(text, at, most)
    most -= len(members) + 1
    kept = [not is_reserved(text, member, names) for member in members]
    last = max([place for place, stays in enumerate(kept) if stays], default=-1)
    for place, member in enumerate(members[: last + 1]):
        if not kept[place]:
            found.append((member.start, members[place + 1].start))
        elif member.name in CONTAINERS and level < LEVELS_MAX:
            for inner in objects_at(text, member.value):
                most = add_gaps(text, inner, names, found, most, level + 1)
    if last + 1 < len(members):
        found.append((members[last].end if last >= 0 else members[0].start, members[-1].end))
    return most


def is_reserved(text: str, member: OuterMember, names: Collection[str]) -> bool:
    """Whether a member is one of these; of ids only those with an engine's address."""
    is_id = member.name in ID_MEMBERS
    return member.name in names and (not is_id or has_address(value_at(text, member.value)[0]))


def objects_at(text: str, at: int) -> Iterator[int]:
    """Yield where the value at this place has objects: itself, or its elements."""
    if text[at] == "{":
        yield at
    if text[at] != "[":
        return
    at = skipped(text, at + 1)
    while text[at] != "]":
        if text[at] == "{":
            yield at
        at = skipped(text, value_at(text, at)[1])
        if text[at] == ",":
            at = skipped(text, at + 1)


def is_doubled(body: bytes, names: Collection[str]) -> bool:
    """Whether one of these names stands more than once; engines differ in which one counts. Raises as `members_of`."""
    if sum(body.count(b'"%b"' % name.encode()) for name in names) < 2 and b"\\u" not in body:
        return False
    found = [member.name for member in members_of(text_of(body)) if member.name in names]
    return len(found) > len(set(found))


def skipped(text: str, at: int) -> int:
    """Return where the next token begins."""
    match = BLANKS.match(text, at)
    return match.end() if match is not None else at
