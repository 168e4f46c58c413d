"""Finds where messages end in the raw bytes of a chat.

Nothing is guessed: a search of the bytes proposes places, and a parse of the bytes behind a place proves it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from ranvier_py.core.prompts.body_json import object_of
from ranvier_py.core.prompts.request_apis import Api

CUTS_MAX = 8
"""Proposed cuts that are tried. A turn rarely adds more messages (one answer, its tool results, one question)."""

SOUGHT_MAX = 4  # names that are searched for in a whole body

ENDS_MAX = 16
"""Places tried as the end of the last message: text that looks like the end of an array is rare even in code."""

ARRAY_END = re.compile(rb"}[ \t\r\n]*]")
GAP_BYTES_MAX = 256  # between two messages: a comma and, in indented JSON, a line end and blanks
NEAR_BYTES = 1 << 20
OBJECT_END = b"},"
CACHE_MARK = b'"cache_control"'


def load_rest(body: bytes, cut: int, api: Api) -> tuple[list[Any], dict[str, Any]] | None:
    """Return (items after `cut`, members behind the history); None if the bytes from `cut` on do not close a body.

    They are parsed as if all items before `cut` were one null.
    """
    found = object_of(api.opening + body[cut:])
    if found is None:
        return None
    items = found.pop(api.history)  # a second one after the cut would replace ours
    if type(items) is not list or not items or items[0] is not None:
        return None
    del items[0]
    return items, found


def is_cut(body: bytes, cut: int, following: int, after: Sequence[str], api: Api) -> bool:
    """Whether a message ends at `cut`, `following` messages come after it, and then exactly the members `after`."""
    found = load_rest(body, cut, api)
    return found is not None and len(found[0]) == following and list(found[1]) == list(after)


def are_in_history(body: bytes, known: int, cuts: Sequence[tuple[int, int]], api: Api) -> bool:
    """Whether each (cut, number of items behind it) is an item's end in the history, and not in another member.

    `is_cut` can't tell if a name stands both before and behind the history. So this parses all bytes behind `known`, a
    proved end, or the whole body if that is 0, with a null inserted at each cut; the history must contain these.
    """
    data, start = api.opening if known else b"", known
    for cut, _ in sorted(cuts):
        data += body[start:cut] + b",null"
        start = cut
    items = (object_of(data + body[start:]) or {}).get(api.history)
    if type(items) is not list:
        return False
    for number, following in enumerate(sorted([following for _, following in cuts]), 1):
        if following + number >= len(items) or items[-number - following] is not None:
            return False
    return True


def stands_twice(body: bytes, names: Sequence[str]) -> bool:
    """Whether one of these members may stand twice in a body; only then `are_in_history` can say more than `is_cut`."""
    return len(names) > SOUGHT_MAX or any(body.count(b'"%b"' % name.encode("utf-8", "replace")) > 1 for name in names)


def unmarked(body: bytes, cuts: Sequence[int], room: int) -> int:
    """Return the last proposed cut before the first `cache_control` near the end, which moves on with the next turn.

    Only cuts at most `room` bytes from the end count. 0 if there is none, or it is the last cut anyway. `cuts` descend.
    """
    start = next((cut for cut in reversed(cuts) if len(body) - cut <= room), 0)
    mark = body.find(CACHE_MARK, start) if start else -1
    found = next((cut for cut in cuts if start <= cut < mark), 0)
    return found if found != cuts[0] else 0


def last_end(body: bytes, start: int, room: int, after: Sequence[str], api: Api) -> int:
    """Return where the last message ends, which is behind `start`; the members `after` come behind the history.

    0 if that is not found by parsing at most `room` bytes in all.
    """
    if not after:
        return bare_end(body)
    for match in islice(ARRAY_END.finditer(body, max(start, len(body) - room)), ENDS_MAX):
        cut = match.start() + 1
        if len(body) - cut <= room:
            room -= len(body) - cut
            if is_cut(body, cut, 0, after, api):
                return cut
    return 0


def bare_end(body: bytes) -> int:
    """Return where the last message ends in a valid body that ends with its history: before the last `]` and `}`."""
    return len(body.rstrip()[:-1].rstrip()[:-1].rstrip()) if body[-2:] != b"]}" else len(body) - 2


def message_cuts(body: bytes, marks: tuple[bytes, ...]) -> Iterator[int]:
    """Yield offsets that look like message ends, last first: just after the `}` before a `,` and an object with a mark.

    The first mark is searched for in the whole body. The other marks are searched for behind the place found, within
    the last NEAR_BYTES, and only if an object ends there.
    """
    stop = len(body)
    near = max(0, stop - NEAR_BYTES)
    first, others = marks[0], marks[1:]
    for _ in range(CUTS_MAX):
        role = body.rfind(first, 0, stop)
        if others:
            start = max(role, near)
            if body.rfind(OBJECT_END, start, stop) >= 0:
                role = max(role, *[body.rfind(mark, start, stop) for mark in others])
        opening = body.rfind(b"{", 0, role) if role > 0 else -1
        closing = body.rfind(b"}", 0, opening) if opening > 0 else -1
        if closing < 0:
            return
        if opening - closing <= GAP_BYTES_MAX and body[closing + 1 : opening].strip() == b",":
            stop = closing + 1
            yield stop
        else:
            stop = role
