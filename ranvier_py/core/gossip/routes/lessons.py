"""Lessons: what one node tells of one served path, as bytes.

One lesson says: the process `boot` of backend `backend_key` holds these prefixes. Its stops are a piece of one path,
deepest first; `parent` names the row above the shallowest one, so that the piece finds its place where that row is
known. Fingerprints are keyed: a lesson tells nobody what a prompt said.

    backend key u64 | boot u8 | count u8 | parent u64 | count stops, deepest first
    stop: u32 (tokens << 2 | has text << 1 | has token) | token u64, if it has one | text u64, if it has one

All little-endian. Rules: 1 … STOPS_MAX stops, each with a depth and one fingerprint or two that differ; nothing is left
over. What breaks a rule raises BadLesson. A turn of a chat is 58 bytes with two stops, 12 more for an anchor.
Cost: about 1 us for two stops, either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct, error
from typing import NamedTuple

from ranvier_py.core.prompt import Stop

STOPS_MAX = 64
"""Stops of one lesson. A longer path goes as several, top first, so that none is larger than a datagram would be."""

LESSON_BYTES_MAX = 18 + STOPS_MAX * 20
TOKENS_MAX = 2**30 - 1
"""Deepest stop that can be told: two bits of its 32 are taken."""

HEAD = Struct("<QBBQ")
BARE = Struct("<IQ")  # a stop with one fingerprint
FULL = Struct("<IQQ")  # and with both
HAS_TOKEN, HAS_TEXT = 1, 2


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
        parts = [HEAD.pack(backend_key, boot, len(stops), parent)]
        for tokens, token, text in stops:
            if not 0 < tokens <= TOKENS_MAX or token == text:
                raise BadLesson(f"not a stop: {(tokens, token, text)}")
            if token and text:
                parts.append(FULL.pack(tokens << 2 | HAS_TOKEN | HAS_TEXT, token, text))
            else:
                parts.append(BARE.pack(tokens << 2 | (HAS_TOKEN if token else HAS_TEXT), token or text))
    except error as problem:
        raise BadLesson(str(problem)) from problem
    return b"".join(parts)


def decode(data: bytes) -> Lesson:
    """Raises BadLesson for bytes that `encode` does not make."""
    size = len(data)
    if size > LESSON_BYTES_MAX:
        raise BadLesson(f"{size} bytes are no lesson")
    stops: list[Stop] = []
    try:
        backend_key, boot, count, parent = HEAD.unpack_from(data)
        at = HEAD.size
        for _ in range(count):
            kinds = data[at] & 3
            if kinds == HAS_TOKEN | HAS_TEXT:
                depth, token, text = FULL.unpack_from(data, at)
                at += FULL.size
                named = token and text and token != text
            else:
                depth, named = BARE.unpack_from(data, at)
                token, text = (named, 0) if kinds == HAS_TOKEN else (0, named)
                at += BARE.size
            if not kinds or not named or not depth >> 2:
                raise BadLesson("a stop has a depth and a fingerprint")
            stops.append((depth >> 2, token, text))
    except (error, IndexError) as problem:
        raise BadLesson("it ends too early") from problem
    if at != size or not 0 < count <= STOPS_MAX or not backend_key:
        raise BadLesson(f"{size - at} bytes left over, {count} stops, backend {backend_key}")
    return Lesson(backend_key, boot, parent, tuple(stops))


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
