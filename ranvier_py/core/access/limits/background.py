"""Finds out whether a body of /v1/responses asks for a response in the background, whose tokens nobody counts.

Rule: the last member `background` of the outermost object counts, by whatever spelling. What is no plain false counts
as true, since engines take texts and numbers for booleans, too; so does what cannot be ruled out: in another encoding,
or in a body that is too large to be walked. Pauses after each portion (test_background.py).
Bounds: those of `outer_values` and `reserved_members`.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from ranvier_py.core.prompts.outer_values import OuterValues
from ranvier_py.core.prompts.reserved_members import SLICE_BYTES, BodySearch, any_slice, escaped_name_in

BACKGROUND = "background"
NAMED = {BACKGROUND.encode(): BACKGROUND}
MAY_BE_TRUE = re.compile(rb'"background"[ \t\r\n]*+(?::[ \t\r\n]*+(?!false|null|[{\[])|\Z)')
"""Schemas of tools have objects there. What is cut off may be anything."""


def in_background(body: bytes) -> Generator[None, None, bool]:
    if not (yield from any_slice(body, BodySearch((BACKGROUND,), form=False).find)):
        return False
    values = OuterValues(body)
    if b"\0" in body:  # UTF-16 or UTF-32, which Python's parser takes as well
        return True
    if values.is_walked:
        found = yield from values.last(BACKGROUND)
        return found is not None and bool(found.value)
    return (yield from any_slice(body, may_be_true))


def may_be_true(piece: bytes) -> bool:
    named = MAY_BE_TRUE.search(piece)
    return (named is not None and named.start() < SLICE_BYTES) or bool(escaped_name_in(piece, NAMED))
