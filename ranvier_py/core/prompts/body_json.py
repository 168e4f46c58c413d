"""The JSON of bodies, read within bounds: nothing that a client sends may hold up the event loop.

What a parse costs does not show in the size: 4 MiB of prose are one value, 4 MiB of `[],` are more than a million. So
what is large is counted first, and parsed only if that is bearable (`excess`). Of what is not parsed as a whole, both
ends still may be (`members_at`): model and options stand there, before and behind the messages.

Why that is exact: take a body, and a place in it. If the bytes before it, closed with `"":0}`, are an object, the place
is one where a member of the outermost object begins. If the body is JSON, and `{` with the bytes from the place on are
an object, it is one, too: whoever is inside a text has an odd number of quotes before him, and whoever is inside
another value has more to close.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import orjson

from ranvier_py.core.errors import BadRequest

UNCOUNTED_BYTES_MAX = 128 * 1024
"""Parsed whatever is in it: 10 ms of `[],`, the dearest there is (tests/core/routing/test_hostile_bodies.py)."""

PARSED_BYTES_MAX = 4 * 1024 * 1024
# 1 M tokens of prose. To parse and to hash them takes 12 ms, and new memory of five times the size: 20 ms more where
# each page is cleared by a kernel in a virtual machine.

MARKS_MAX = 200_000
# Brackets, commas and quotes of one parse, of 50 to 100 ns each. 2 MiB of dense code in 500 messages have 130,000: a
# quote within a text has a backslash beside it and does not count.

COUNTED_BYTES = 128 * 1024  # at once, so that the counting needs no memory to speak of

ENDS_BYTES_MAX = 64 * 1024
"""Of each end of a body, what is parsed in search of a member, in all tries together: tools of an agent have 10 to
50 kB. 5 ms of `[],`."""

PLACES_MAX = 4  # tried at each end: other members of the same name are in schemas of tools

NAME_CHARACTERS_MAX = 512
"""A longer model name is none, and longer salts and templates are kept as a digest: no request decides our size."""

ROUNDED_FROM = float(1 << 63)  # below it orjson reads integers as they are; its JSON has all from 1e16 on with "e+"

MODEL = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*("[^"\\]{1,%d}")' % NAME_CHARACTERS_MAX)


def excess(data: bytes) -> str:
    """Why these bytes are not to be parsed: "size" or "structure"; empty where they may be."""
    if len(data) <= UNCOUNTED_BYTES_MAX:
        return ""
    if len(data) > PARSED_BYTES_MAX:
        return "size"
    found = 0
    for start in range(0, len(data), COUNTED_BYTES):
        found += marks_of(np.frombuffer(data, np.uint8, min(COUNTED_BYTES, len(data) - start), start))
        if found > MARKS_MAX:
            return "structure"
    return ""


def marks_in(data: bytes) -> int:
    """Marks of all of it, see `marks_of`."""
    starts = range(0, len(data), COUNTED_BYTES)
    return sum([marks_of(np.frombuffer(data, np.uint8, min(COUNTED_BYTES, len(data) - at), at)) for at in starts])


def marks_of(data: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """Brackets that open and commas with no backslash behind them, quotes with none before them.

    Outside of texts no mark has one there, so none of those is missed but the quote behind a text that ends in a
    backslash, whose other quote counts.
    """
    plain = data != ord("\\")
    opens = (data | 0x20) == ord("{")  # `[` but for this bit
    opens |= data == ord(",")
    opens[:-1] &= plain[1:]
    quotes = data == ord('"')
    quotes[1:] &= plain[:-1]
    return int(np.count_nonzero(opens)) + int(np.count_nonzero(quotes))


def load_object(body: bytes) -> dict[str, Any]:
    """The body's members; none for JSON that is no object. Raises BadRequest for what no JSON library accepts.

    What is too long for the lenient reading is the engine's to refuse.
    """
    found: Any
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as refused:
        found = load_leniently(body, str(refused)) if len(body) <= UNCOUNTED_BYTES_MAX else members_at_ends(body)
    return found if isinstance(found, dict) else {}


def load_leniently(body: bytes, reason: str) -> Any:
    """What the standard library makes of it, as engines in Python do: NaN and lone surrogates pass."""
    try:
        return json.loads(body)
    except RecursionError as error:
        raise BadRequest("the JSON body is nested too deeply") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {reason}") from error
    except ValueError:  # a number of more digits than this library reads: an engine's may
        return None


def object_of(data: bytes) -> dict[str, Any] | None:
    """The object that these bytes are, if they are one."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def exact_json(value: Any, option: int = 0) -> bytes:
    """The JSON of a value. Raises TypeError for what it would not tell apart: an integer beyond 64 bits was rounded
    when it was read, while engines in Python have all of its digits."""
    data = orjson.dumps(value, option=option)
    if b"e+" in data and has_rounded(value):
        raise TypeError("a number beyond 64 bits")
    return data


def has_rounded(value: Any) -> bool:
    """Whether a number in there may have been an integer beyond 64 bits."""
    values = [value]
    while values:
        one = values.pop()
        kind = type(one)
        if kind is dict:
            values += one.values()
        elif kind is list or kind is tuple:
            values += one
        elif kind is float and abs(one) >= ROUNDED_FROM:
            return True
    return False


def members_at(body: bytes, name: bytes) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Places near both ends where a member of the outermost object begins that has this name, the last one first.

    With each the members that were read for the proof: those from there on near the end of the body, those before near
    its start. `name` has its quotes.
    """
    place, room = len(body), ENDS_BYTES_MAX
    for _ in range(PLACES_MAX):
        place = body.rfind(name, max(0, len(body) - room), place)
        room -= len(body) - place
        if place < 0 or room < 0:
            break
        behind = object_of(b"{" + body[place:])
        if behind is not None:
            yield place, behind
    place, room = -1, ENDS_BYTES_MAX
    for _ in range(PLACES_MAX):
        place = body.find(name, place + 1, room)
        room -= place
        if place < 0 or room < 0:
            break
        before = object_of(body[:place] + b'"":0}')
        if before is not None:
            yield place, before


FORM_MODEL = re.compile(
    rb'name="?model"?[ \t]*\r\n(?:[^\r\n]{1,200}\r\n){0,4}\r\n([!-~]{1,%d})\r\n' % NAME_CHARACTERS_MAX
)
"""A field of a form (RFC 7578), whatever else its head has."""


def form_model(body: bytes) -> str:
    """The model that a form names, before or behind its file; empty where it is not near the ends."""
    found = FORM_MODEL.search(body[:ENDS_BYTES_MAX]) or FORM_MODEL.search(body[-ENDS_BYTES_MAX:])
    return found[1].decode() if found is not None else ""


def text_at_ends(body: bytes, name: str) -> str:
    """The text of this member of a body that is not parsed as a whole; empty where none is near its ends."""
    spelled = re.compile(rb'"%b"[ \t\r\n]*:[ \t\r\n]*"([!#-\[\]-~]{1,%d})"' % (name.encode(), NAME_CHARACTERS_MAX))
    for place, _ in members_at(body, b'"%b"' % name.encode()):
        found = spelled.match(body, place)
        if found is not None:
            return found[1].decode()
    return ""


def members_at_ends(body: bytes) -> dict[str, Any]:
    """Model and `stream` of a body that is not parsed as a whole, as far as they are near its ends."""
    for place, members in members_at(body, b'"model"'):
        spelled = MODEL.match(body, place)
        if spelled is not None and (found := object_of(b'{"model":%b}' % spelled[1])) is not None:
            return {"stream": members.get("stream"), **found}
    return {}
