"""Reads the frame of one message of KV events: bytes -> a timestamp, unread events, and the fields after them.

Rule: a batch is `[timestamp, events, rank]`, of which the rank may be missing, or a map of the same fields by name
(vLLM's revision 0181ea3173). What is no batch raises BadBatch, and nothing else is ever raised. A message that is
long, or not valid msgpack throughout, is walked before anything of it is built, so neither false lengths nor nesting
cost memory; the caller gets the places of its events, and builds them one at a time.
Bound: what is built at once has at most CONTAINERS_MAX lists and maps; no engine sends msgpack's extension types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]
from msgpack.exceptions import UnpackException  # type: ignore[import-untyped]

from ranvier_py.core.errors import RanvierError

PAYLOAD_BYTES_MAX = 4 << 20
"""Longest message that is read, at worst walked in 30 ms. A step of 32,000 removals is 1.7 MB."""

AT_ONCE_BYTES_MAX = 128 << 10
"""Longest message unpacked at once. A step of 8,192 tokens is 50 kB. At worst each byte is an empty map: 10 MB."""

CONTAINERS_MAX, ELEMENTS_MAX = 32_768, 1 << 19
"""Lists and maps that are built at once, and elements of one list: 10 to 30 ms. A prompt of 500k tokens has 32,000
lists of extra keys, if an adapter is in each; a short message of 128 kB has 3,000 events."""

UNCOUNTED_BYTES_MAX = 4096
"""Built whatever they are: nearly all events are shorter, and counting takes as long as building one."""

FIELDS_MAX = 16  # of a batch, which has three, or of a LoadStat
MAP_MEMBERS_MAX = 256  # of an event, which has some twenty, or of its metadata
EVENTS_MAX = 32_768  # of one batch: a step touches some thousand blocks
SCALAR_BYTES_MAX = 64

LOAD_STAT = "LoadStat"  # SGLang's report of its load: `[LoadStat, …]`
TIMESTAMP, EVENTS, RANK = "ts", "events", "data_parallel_rank"
"""Names of the fields of a batch that is a map."""

MAP_BYTES = (*range(0x80, 0x90), 0xDE, 0xDF)
"""First bytes of a map in msgpack."""

UNPACK_ERRORS = (ValueError, UnpackException)
"""All that msgpack raises for invalid bytes; invalid UTF-8 is a ValueError."""


class BadBatch(RanvierError):
    """These bytes are no batch of events. The error's message quotes nothing of them."""

    code = "bad_kv_batch"


class Frame(NamedTuple):
    """`events` are built, or places (start, end) of events in the message. `tail`: the rank and further fields."""

    head: object
    events: tuple[Any, ...]
    tail: tuple[object, ...]
    is_built: bool


def frame_of(payload: bytes) -> Frame:
    """Read the frame of a message. Raises BadBatch."""
    return _build(payload) or _walk(payload)


def event_in(payload: bytes, place: tuple[int, int]) -> object:
    """Build one event of a message that was walked. Raises BadBatch if that event cannot be read."""
    try:
        found = _unpacked(payload[place[0] : place[1]])
    except UNPACK_ERRORS as error:
        raise BadBatch("an event that can't be read") from error
    return found


def _unpacked(data: bytes) -> object:
    """Build what these bytes are. Raises UNPACK_ERRORS, also if they are too many lists and maps."""
    if len(data) <= UNCOUNTED_BYTES_MAX:
        few: object = msgpack.unpackb(data, use_list=False, max_ext_len=0)
        return few
    count = repeat(None, CONTAINERS_MAX)

    def counted(container: object) -> object:
        for _ in count:
            return container
        raise ValueError("too many lists and maps")

    elements_max, members_max = min(len(data), ELEMENTS_MAX), min(len(data), MAP_MEMBERS_MAX)
    limits = {"max_ext_len": 0, "max_map_len": members_max, "max_array_len": elements_max}
    found: object = msgpack.unpackb(data, use_list=False, list_hook=counted, object_hook=counted, **limits)
    return found


def packed_batch(timestamp_s: float, events: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a message of these events, in the map encoding."""
    packed: bytes = msgpack.packb([timestamp_s, events])
    return packed


def _build(payload: bytes) -> Frame | None:
    """Unpack a short message at once; None if it has to be walked."""
    if len(payload) > AT_ONCE_BYTES_MAX:
        return None
    try:
        if len(payload) > UNCOUNTED_BYTES_MAX:
            _walk_one(payload)
        parts: Any = _unpacked(payload)
    except UNPACK_ERRORS:
        return None
    if type(parts) is dict and 2 <= len(parts) <= FIELDS_MAX:
        parts = _in_order(parts)
    if type(parts) is not tuple or not 2 <= len(parts) <= FIELDS_MAX:
        return None
    if parts[0] == LOAD_STAT:
        return Frame(parts[0], (), parts[1:], is_built=True)
    events = parts[1]
    if type(events) is not tuple or len(events) > EVENTS_MAX:
        return None
    return Frame(parts[0], events, parts[2:], is_built=True)


def _in_order(fields: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields of a map in the order of the array encoding, unknown ones last."""
    known = [fields.pop(name, None) for name in (TIMESTAMP, EVENTS, RANK)]
    return (*known, *fields.values())


def _walk_one(payload: bytes) -> None:
    """Raise UNPACK_ERRORS unless a whole value is there: room for lists of false lengths would be made in advance."""
    walker = msgpack.Unpacker(None, max_buffer_size=len(payload), use_list=False)
    walker.feed(payload)
    walker.skip()


def _walk(payload: bytes) -> Frame:
    """Find the places of a message's events. Raises BadBatch."""
    if not payload or len(payload) > PAYLOAD_BYTES_MAX:
        raise BadBatch("empty or too long")
    walker = msgpack.Unpacker(None, max_buffer_size=len(payload), use_list=False)
    walker.feed(payload)
    try:
        found = _walk_map(payload, walker) if payload[0] in MAP_BYTES else _walk_array(payload, walker)
    except UNPACK_ERRORS as error:
        raise BadBatch("no msgpack, or not of this shape") from error
    if walker.tell() != len(payload):
        raise BadBatch("not the length of a batch")
    return found


def _walk_array(payload: bytes, walker: Any) -> Frame:
    count = walker.read_array_header()
    if not 1 <= count <= FIELDS_MAX:
        raise BadBatch("not the fields of a batch")
    head = _scalar(payload, walker)
    if head == LOAD_STAT:
        return Frame(head, (), tuple([_scalar(payload, walker) for _ in range(count - 1)]), is_built=False)
    if count < 2:
        raise BadBatch("no events")
    spans = _spans(walker)
    return Frame(head, spans, tuple([_scalar(payload, walker) for _ in range(count - 2)]), is_built=False)


def _walk_map(payload: bytes, walker: Any) -> Frame:
    count = walker.read_map_header()
    if not 2 <= count <= FIELDS_MAX:
        raise BadBatch("not the fields of a batch")
    fields: dict[str, Any] = {}
    for _ in range(count):
        name = _scalar(payload, walker)
        if type(name) is not str:
            raise BadBatch("a field without a name")
        fields[name] = _spans(walker) if name == EVENTS else _scalar(payload, walker)
    if EVENTS not in fields:
        raise BadBatch("no events")
    head, spans, *tail = _in_order(fields)
    return Frame(head, spans, tuple(tail), is_built=False)


def _spans(walker: Any) -> tuple[tuple[int, int], ...]:
    events = walker.read_array_header()
    if events > EVENTS_MAX:
        raise BadBatch("too many events")
    skip, tell, start = walker.skip, walker.tell, walker.tell()
    ends = [tell() for _ in range(events) if skip() is None]  # it always is
    return tuple(pairwise([start, *ends]))


def _span(walker: Any) -> tuple[int, int]:
    start = walker.tell()
    walker.skip()
    return start, walker.tell()


def _scalar(payload: bytes, walker: Any) -> object:
    """Return the next value if it is short; a longer one is not built and becomes (), which no reader accepts."""
    start, end = _span(walker)
    if end - start > SCALAR_BYTES_MAX:
        return ()
    return _unpacked(payload[start:end])
