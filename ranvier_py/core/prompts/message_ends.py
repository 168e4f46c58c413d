"""Where messages end in the raw bytes of a chat.

Nothing is guessed: places are proposed by a search of the bytes, and proved by a parse of what is behind them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from ranvier_py.core.prompts.body_json import object_of

CUTS_MAX = 8
"""Proposed cuts that are tried: a turn rarely brings more messages (one answer, its tool results, one question)."""

ENDS_MAX = 16
"""Places tried for the end of the last message: text that looks like the end of an array is rare even in code."""

ARRAY_END = re.compile(rb"}[ \t\r\n]*]")
GAP_BYTES_MAX = 256  # between two messages: a comma and, where somebody reads it, a line end and blanks
KNOWN_HISTORY = b'{"messages":[null'


def load_rest(body: bytes, cut: int) -> dict[str, Any] | None:
    """The body parsed as if all messages before `cut` were one null, or None when that is no JSON object."""
    found = object_of(KNOWN_HISTORY + body[cut:])
    messages = found.get("messages") if found is not None else None  # a second one after the cut would replace ours
    return found if isinstance(messages, list) and messages and messages[0] is None else None


def is_cut(body: bytes, cut: int, following: int, after: Sequence[str]) -> bool:
    """Whether `cut` is the message end before the last `following` ones, with the members `after` behind `messages`."""
    found = load_rest(body, cut)
    return found is not None and len(found.pop("messages")) == 1 + following and list(found) == list(after)


def last_end(body: bytes, start: int, room: int, after: Sequence[str]) -> int:
    """Where the last message ends, which does so behind `start`, with the members `after` behind `messages`.

    0 where that is not found with a parse of no more than `room` bytes in all.
    """
    if not after:
        return bare_end(body)
    for match in islice(ARRAY_END.finditer(body, max(start, len(body) - room)), ENDS_MAX):
        cut = match.start() + 1
        if len(body) - cut <= room:
            room -= len(body) - cut
            if is_cut(body, cut, 0, after):
                return cut
    return 0


def bare_end(body: bytes) -> int:
    """Where the last message ends in a valid body whose last member is `messages`: before the last `]` and `}`."""
    return len(body.rstrip()[:-1].rstrip()[:-1].rstrip()) if body[-2:] != b"]}" else len(body) - 2


def message_cuts(body: bytes) -> Iterator[int]:
    """Offsets that look like message ends, last first: just after the `}` before a `,` and `{"role"`."""
    stop = len(body)
    for _ in range(CUTS_MAX):
        role = body.rfind(b'"role"', 0, stop)
        opening = body.rfind(b"{", 0, role) if role > 0 else -1
        closing = body.rfind(b"}", 0, opening) if opening > 0 else -1
        if closing < 0:
            return
        if opening - closing <= GAP_BYTES_MAX and body[closing + 1 : opening].strip() == b",":
            yield closing + 1
        stop = role
