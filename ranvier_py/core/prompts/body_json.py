"""Reads the JSON of bodies within bounds, so that nothing a client sends can block the event loop.

Rule: a body's size does not show what parsing costs: 4 MiB of prose are one value, 4 MiB of `[],` more than a million.
So `excess` first counts the marks of a large body, and only a body with few enough is parsed. Of any other, both ends
can still be parsed (`members_at`): model and options stand there.
Invariant: no body holds the loop for 50 ms, or takes 4 times its size and a constant (test_hostile_bodies.py).
Bounds: PARSED_BYTES_MAX, MARKS_MAX, ENDS_BYTES_MAX.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import orjson

from ranvier_py.core.errors import BadRequest

UNCOUNTED_BYTES_MAX = 128 * 1024
"""Parsed whatever it holds: `[],`, the worst case, take 10 ms (tests/core/routing/test_hostile_bodies.py)."""

PARSED_BYTES_MAX = 4 * 1024 * 1024
# 1 M tokens of prose. Parsing and hashing them takes 12 ms and allocates five times the size, which takes 20 ms more
# where the kernel of a virtual machine clears each page.

MARKS_MAX = 200_000
# Brackets, commas and quotes of one parse, at 50 to 100 ns each. 2 MiB of dense code in 500 messages have 130,000: a
# quote within a text has a backslash before it and does not count.

COUNTED_BYTES = 128 * 1024  # counted at once, so that counting needs little memory

ENDS_BYTES_MAX = 64 * 1024
"""Bytes of each end of a body that are parsed in search of a member, in all tries together. An agent's tools have 10 to
50 kB; 64 KiB of `[],` take 5 ms."""

PLACES_MAX = 4  # tried at each end, because schemas of tools have members of the same name

NAME_CHARACTERS_MAX = 512
"""A longer model name is not read, and longer salts and templates are kept as a digest, so memory stays bounded."""

ROUNDED_FROM, ROUNDED_TO = float(1 << 63), 1e40
"""orjson reads smaller integers exactly, and writes numbers from 1e16 on with "e+". Larger numbers are limits that
clients spell as floats, such as JavaScript's MAX_VALUE: no integer of that length is meant to the last digit."""


Splice = tuple[int, int, bytes]
"""A change of a body: from where to where, and the bytes that stand there then."""


def spliced(body: bytes, splices: Iterable[Splice]) -> bytes:
    """Return the body with these changes, which lie apart, all made at once; those at one place in their order."""
    pieces, at = list[bytes](), 0
    for start, end, text in sorted(splices, key=itemgetter(0, 1)):
        pieces += (body[at:start], text)
        at = end
    return b"".join((*pieces, body[at:]))


def excess(data: bytes) -> str:
    """Return why these bytes must not be parsed: "size" or "structure"; empty if they may be."""
    if len(data) <= UNCOUNTED_BYTES_MAX:
        return ""
    if len(data) > PARSED_BYTES_MAX:
        return "size"
    return "structure" if marks_in(data, MARKS_MAX) > MARKS_MAX else ""


def marks_in(data: bytes, most: int) -> int:
    """Count the marks (`marks_of`) of `data`, or some of them if there are more than `most`."""
    found = 0
    for piece in pieces_of(data):
        found += marks_of(piece)
        if found > most:
            break
    return found


def bytes_in(data: bytes, wanted: bytes) -> int:
    """Count the bytes of `data` that are one of these: a quarter of the time of `data.count` where there are many."""
    return sum([int(np.count_nonzero(piece == each)) for piece in pieces_of(data) for each in wanted])


def pieces_of(data: bytes) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    for start in range(0, len(data), COUNTED_BYTES):
        yield np.frombuffer(data, np.uint8, min(COUNTED_BYTES, len(data) - start), start)


def marks_of(data: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """Count opening brackets and commas that have no backslash behind them, and quotes that have none before them.

    Outside of texts a mark never has a backslash there, so all such marks are counted, except the closing quote of a
    text that ends in a backslash; its opening quote counts.
    """
    plain = data != ord("\\")
    opens = (data | 0x20) == ord("{")  # `[` differs from `{` only in this bit
    opens |= data == ord(",")
    opens[:-1] &= plain[1:]
    quotes = data == ord('"')
    quotes[1:] &= plain[:-1]
    return int(np.count_nonzero(opens)) + int(np.count_nonzero(quotes))


def load_object(body: bytes) -> dict[str, Any]:
    """Return the members of a body; none if it is not read, or no object. Raises BadRequest as `read_object` does."""
    return read_object(body) or {}


def read_object(body: bytes) -> dict[str, Any] | None:
    """Return the body's members; none if the JSON is not an object. Raises BadRequest if no JSON library accepts it.

    None: only an engine can read it, because of a number, or because orjson refuses it and it is too long for
    `load_leniently`.
    """
    found: Any
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as refused:
        if len(body) > UNCOUNTED_BYTES_MAX or (found := load_leniently(body, str(refused))) is None:
            return None
    return found if isinstance(found, dict) else {}


def load_leniently(body: bytes, reason: str) -> Any:
    """Parse as the standard library does, and so engines in Python: NaN and lone surrogates pass. Raises BadRequest."""
    try:
        return json.loads(body)
    except RecursionError as error:
        raise BadRequest("the JSON body is nested too deeply") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {reason}") from error
    except ValueError:  # a number with more digits than this library reads: an engine's may read it
        return None


def engine_json(data: bytes) -> Any:
    """Parse what an engine answers, also NaN and lone surrogates as Python writes them; None if it has too many parts
    (`excess`) or cannot be read. Raises nothing."""
    if excess(data):
        return None
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        if len(data) > UNCOUNTED_BYTES_MAX:
            return None
    try:
        return json.loads(data, parse_int=number_of)
    except (ValueError, RecursionError):
        return None


def number_of(digits: str) -> float:
    """Return a whole number, as a float beyond 64 bits, as in JavaScript."""
    return int(digits) if len(digits) < 20 else float(digits)


def object_of(data: bytes) -> dict[str, Any] | None:
    """Parse `data` and return the object; None if it is not JSON or not an object."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def exact_json(value: Any, option: int = 0) -> bytes:
    """Return the JSON of a value. Raises TypeError for an integer beyond 64 bits: orjson rounded it when it was read,
    so different ones could look equal, while engines in Python keep all digits."""
    data = orjson.dumps(value, option=option)
    if b"+" in data and b"e+" in data and has_rounded(value):  # one byte is found ten times as fast as two
        raise TypeError("a number beyond 64 bits")
    return data


def has_rounded(value: Any) -> bool:
    """Whether a number in `value` may have been an integer beyond 64 bits."""
    values = [value]
    while values:
        one = values.pop()
        kind = type(one)
        if kind is dict:
            values += one.values()
        elif kind is list or kind is tuple:
            values += one
        elif kind is float and ROUNDED_FROM <= abs(one) < ROUNDED_TO:
            return True
    return False


def members_at(body: bytes, name: bytes) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield places near both ends of the body where a member `name` of the outermost object begins, the last one first.

    Each place comes with the members that were parsed to prove it: near the end of the body those from the place on,
    near its start those before the place. `name` includes its quotes.

    Exact: if the bytes before a place, closed with `"":0}`, are an object, a member of the outermost object begins
    there. So it does if the whole body is JSON and `{` plus the bytes from a place on are an object: a place inside a
    text has an odd number of quotes before it, and behind a place inside another value there are more brackets to
    close.
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


def members_at_ends(body: bytes, name: str = "model") -> dict[str, Any]:
    """Return member `name`, a text without escapes, and `stream` of a body that is not parsed as a whole, if they are
    near its ends."""
    quoted = b'"%b"' % name.encode()
    spelled = re.compile(rb'%b[ \t\r\n]*:[ \t\r\n]*("[^"\\]{1,%d}")' % (quoted, NAME_CHARACTERS_MAX))
    for place, members in members_at(body, quoted):
        text = spelled.match(body, place)
        if text is not None and (found := object_of(b"{%b:%b}" % (quoted, text[1]))) is not None:
            return {"stream": members.get("stream"), **found}
    return {}
