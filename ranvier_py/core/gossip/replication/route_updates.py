"""Lessons: what one node tells of one served path, as bytes.

One lesson says: the process `boot` of backend `backend_key` holds these prefixes. Its stops are a piece of one path,
deepest first; `parent` names the row above the shallowest one, so that the piece finds its place where that row is
known. Fingerprints are keyed: a lesson tells nobody what a prompt said.

    backend key u64 | boot u8 | has parent << 7 | count u7 | parent u64, if it has one | count stops, deepest first
    stop: number (steps << 2 | has text << 1 | has token) | token u64, if it has one | text u64, if it has one
    or, of two texts that end in one block: number 0 | text u64    depth and token are those of the stop before

Steps are the depth of the first stop in tokens, and of each other one twice as much as it is less deep than the one
before, or, where depths were but estimated and it is deeper, twice as much as that, less one. A number has 7 bits in
each byte, low ones first, and the top bit where more follow. The rest is little-endian.
Rules: 1 … STOPS_MAX stops, each with a depth and one fingerprint or two that differ; everything in its shortest
spelling; nothing is left over. What breaks a rule raises BadLesson. A turn of a chat is 55 bytes with two stops, 10
more for an anchor. Cost: about 3 us for two stops, either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct, error
from typing import NamedTuple

from ranvier_py.core.prompts.prompt import Stop

STOPS_MAX = 64
"""Stops of one lesson. A longer path goes as several, top first, so that none is larger than a datagram would be."""

NUMBER_BYTES_MAX = 5
LESSON_BYTES_MAX = 18 + STOPS_MAX * (NUMBER_BYTES_MAX + 16)
TOKENS_MAX = 2**30 - 1
"""Deepest stop that can be told: two bits of a number are taken, and one more of later ones."""

HEAD = Struct("<QBB")
ONE = Struct("<Q")
BOTH = Struct("<QQ")
HAS_TOKEN, HAS_TEXT = 1, 2
HAS_PARENT = 0x80


class BadLesson(ValueError):
    """These bytes, or these values, are no lesson."""


class Lesson(NamedTuple):
    backend_key: int  # u64, not 0
    boot: int  # low 8 bits of the backend's boot
    parent: int  # fingerprint of the row above the shallowest stop; 0 = none, or not known
    stops: tuple[Stop, ...]  # deepest first


def encode(lesson: Lesson) -> bytes:
    """Raises BadLesson for values that a lesson has no place for."""
    backend_key, boot, parent, stops = lesson
    if not 0 < len(stops) <= STOPS_MAX or not backend_key:
        raise BadLesson(f"a lesson names a backend and 1 … {STOPS_MAX} stops, not {len(stops)}")
    try:
        parts = [HEAD.pack(backend_key, boot, len(stops) | (HAS_PARENT if parent else 0))]
        if parent:
            parts.append(ONE.pack(parent))
        above, before = 0, 0  # depth and token of the stop before
        for tokens, token, text in stops:
            if not 0 < tokens <= TOKENS_MAX or token == text:
                raise BadLesson(f"not a stop: {(tokens, token, text)}")
            steps = folded(above - tokens) if above else tokens
            if token and text:
                if token == before and not steps:
                    parts.append(b"\0" + ONE.pack(text))
                else:
                    parts.append(number_bytes(steps << 2 | HAS_TOKEN | HAS_TEXT) + BOTH.pack(token, text))
            else:
                parts.append(number_bytes(steps << 2 | (HAS_TOKEN if token else HAS_TEXT)) + ONE.pack(token or text))
            above, before = tokens, token
    except error as problem:
        raise BadLesson(str(problem)) from problem
    return b"".join(parts)


def decode(data: bytes) -> Lesson:
    """Raises BadLesson for bytes that `encode` does not make."""
    size = len(data)
    if size > LESSON_BYTES_MAX:
        raise BadLesson(f"{size} bytes are no lesson")
    parent, at = 0, HEAD.size
    try:
        backend_key, boot, count = HEAD.unpack_from(data)
        if count & HAS_PARENT:
            (parent,) = ONE.unpack_from(data, at)
            at += ONE.size
            if not parent:
                raise BadLesson("a parent without a name")
            count ^= HAS_PARENT
        stops, at = _stops(data, at, count)
    except (error, IndexError) as problem:
        raise BadLesson("it ends too early") from problem
    if at != size or not 0 < count <= STOPS_MAX or not backend_key:
        raise BadLesson(f"{size - at} bytes left over, {count} stops, backend {backend_key}")
    return Lesson(backend_key, boot, parent, stops)


def _stops(data: bytes, at: int, count: int) -> tuple[tuple[Stop, ...], int]:
    """So many stops from there on, and where they end."""
    stops: list[Stop] = []
    depth = before = 0  # of the stop before
    for _ in range(count):
        number = data[at]
        at += 1
        if number & 0x80:
            number, at = _long_number(data, at)
        steps, kinds = number >> 2, number & 3
        token, text = before if not kinds else 0, 0
        if kinds == HAS_TOKEN | HAS_TEXT:
            token, text = BOTH.unpack_from(data, at)
            at += BOTH.size
            named = token and text and token != text and (steps or token != before)
        else:
            (named,) = ONE.unpack_from(data, at)
            at += ONE.size
            if kinds == HAS_TOKEN:
                token = named
            else:
                text = named
                if not kinds:
                    named = named and token and token != text and not steps
        depth = depth - unfolded(steps) if stops else steps
        if not named or not 0 < depth <= TOKENS_MAX:
            raise BadLesson("a stop has a depth and a fingerprint")
        stops.append((depth, token, text))
        before = token
    return tuple(stops), at


def folded(difference: int) -> int:
    """A difference as a number that is not negative: 0, -1, 1, -2, 2 … are 0, 1, 2, 3, 4 …."""
    return 2 * difference if difference >= 0 else -2 * difference - 1


def unfolded(number: int) -> int:
    return -(number + 1 >> 1) if number & 1 else number >> 1


def number_bytes(number: int) -> bytes:
    """A number below 2**35 in its shortest spelling."""
    if number < 0x80:
        return bytes((number,))
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _long_number(data: bytes, at: int) -> tuple[int, int]:
    """The number whose second byte is there, and where it ends."""
    number, shift = data[at - 1] & 0x7F, 7
    for end in range(at, at + NUMBER_BYTES_MAX - 1):
        byte = data[end]
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if not byte:
                break
            return number, end + 1
    raise BadLesson("a number that is too long")


def pieces(lesson: Lesson) -> Iterator[Lesson]:
    """The same as lessons of at most STOPS_MAX stops, top first: each names the row above it as its parent."""
    stops: Sequence[Stop] = lesson.stops
    parent = lesson.parent
    if len(stops) <= STOPS_MAX:
        yield lesson
        return
    for end in range(len(stops), 0, -STOPS_MAX):
        piece = tuple(stops[max(0, end - STOPS_MAX) : end])
        yield lesson._replace(parent=parent, stops=piece)
        parent = piece[0][1] or piece[0][2]
