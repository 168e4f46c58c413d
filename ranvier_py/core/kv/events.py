"""One message of vLLM's or SGLang's KV event stream (msgpack) -> a Batch of values. Read without trust.

A batch is `[timestamp, events, rank]`. An event is an array `[tag, field, …]` whose last fields may be missing (vLLM up
to 0.23, SGLang) or a map with its tag under `type` (vLLM from 0.24); both may stand in one batch. `[LoadStat, …]` is
SGLang's report of its load. Shapes are those of vLLM 0.32 and SGLang 0.5.23 and their older releases.

Rules: unknown tags and fields are skipped one by one and counted. An event of known tag whose fields cannot be read is
skipped whole and counted as unread: a block whose salt is unknown must not pass for one without salt. What is no batch
at all raises BadBatch, and nothing else is ever raised.
Bounds: a short message is built at once. One that is long, or no msgpack throughout, is walked before anything of it is
built, so a length that lies costs nothing, nor does nesting; then one event is built at a time. Memory is a small
multiple of the largest event, and of what the values keep.
Cost: about 3 us for a stored block alone, 0.6 us for each where many are stored at once, 1.2 us for a removal. What the
events of an engine have in common is checked once.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]
from msgpack.exceptions import UnpackException  # type: ignore[import-untyped]

from ranvier_py.core.errors import RanvierError
from ranvier_py.core.kv.values import (
    Batch,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineHash,
    EngineLoad,
    Event,
    ExtraKey,
)

PAYLOAD_BYTES_MAX = 8 << 20
"""A step of 100,000 removals is 4 MB."""

EVENT_BYTES_MAX = 2 << 20
"""A prompt of 128k tokens stored at once is 1 MB; its objects, while they are read, take some ten times that."""

AT_ONCE_BYTES_MAX = 128 << 10
"""A step of 8,192 tokens is 50 kB. At worst each byte is an empty map: 10 MB."""

FIELDS_MAX = 16  # of a batch, which has three, or of a LoadStat
EVENTS_MAX = 65_536  # of one batch: a step touches some thousand blocks
HASH_BYTES_MAX = 64  # SHA-512; vLLM's own are 32
TEXT_CHARACTERS_MAX = 1024  # names of adapters, salts, media
EXTRA_KEYS_MAX = 64  # of one block: media items that reach into it
BLOCK_TOKENS_MAX = 65_536
TAGS_KEPT_MAX = 16  # unknown tags that are remembered by name, to be shown
U32_MAX, U64 = 0xFFFFFFFF, 1 << 64

OWN_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "extra_keys")
"""What is another with each event of an engine. The rest rarely is."""

EXTRA_KEYS = BlocksStored._fields.index("extra_keys")

UNPACK_ERRORS = (ValueError, UnpackException)
"""All that msgpack raises for bytes; a text that is not UTF-8 is a ValueError."""


class BadBatch(RanvierError):
    """These bytes are no batch of events. The message has nothing of what they say."""

    code = "bad_kv_batch"


class _Unreadable(Exception):
    """A field of a known event is not what it has to be."""


@dataclass(slots=True)
class DecodeCounts:
    """Counters since start."""

    batches: int = 0
    events: int = 0
    refused: int = 0  # messages that were no batch
    tags_skipped: int = 0
    fields_skipped: int = 0
    unread: int = 0  # events of a known tag


class _Last(NamedTuple):
    """What the last event of a kind had beside `OWN_FIELDS`, as it came and as a value."""

    rest: Mapping[object, object]
    value: tuple[Any, ...] = ()


class EventDecoder:
    """Decodes the messages of one stream and counts what it skipped. `unknown_tags` has the first few, by count."""

    def __init__(self) -> None:
        self.counts = DecodeCounts()
        self.unknown_tags: Counter[str] = Counter()
        self._last_stored = self._last_removed = _Last({"": None})  # like no event

    def decode(self, payload: bytes) -> Batch:
        """Raises BadBatch, and only that."""
        try:
            batch = self._batch(payload)
        except BadBatch:
            self.counts.refused += 1
            raise
        self.counts.batches += 1
        self.counts.events += len(batch.events)
        return batch

    def _batch(self, payload: bytes) -> Batch:
        built = _build(payload)
        head, events, tail = built or _walk(payload)
        if head == "LoadStat":
            return Batch(0.0, (), load=self._load(tail))
        if not isinstance(head, int | float):
            raise BadBatch("no timestamp")
        unread_before = self.counts.unread
        read: Callable[[Any], Event | None] = self._event if built else partial(self._event_at, payload)
        found = tuple([event for each in events if (event := read(each)) is not None])
        rank = tail[0] if tail else None
        if type(rank) is not int or rank < 0:
            self.counts.fields_skipped += rank is not None
            rank = None
        self.counts.fields_skipped += len(tail[1:])
        timestamp_s = float(head) if math.isfinite(head) else 0.0
        return Batch(timestamp_s, found, rank, self.counts.unread - unread_before)

    def _load(self, numbers: Sequence[object]) -> EngineLoad:
        """Fields in SGLang's order; those that are no number stay unknown."""
        known = [value if type(value) is int and value >= 0 else None for value in numbers[:6]]
        self.counts.fields_skipped += len(numbers[6:])
        return EngineLoad(*known, *[None] * (6 - len(known)))

    def _event_at(self, payload: bytes, span: tuple[int, int]) -> Event | None:
        start, end = span
        if end - start > EVENT_BYTES_MAX:
            self.counts.unread += 1
            return None
        try:
            return self._event(msgpack.unpackb(payload[start:end], use_list=False))
        except UNPACK_ERRORS:
            self.counts.unread += 1
            return None

    def _event(self, event: object) -> Event | None:
        try:
            alike = self._alike(event) if type(event) is dict else None
            return alike or self._anew(event)
        except _Unreadable:
            self.counts.unread += 1
            return None

    def _alike(self, event: dict[object, Any]) -> Event | None:
        """An event that differs from the last of its kind in blocks alone, or None. Nearly all do."""
        take = event.pop
        hashes, parent, tokens = take("block_hashes", None), take("parent_block_hash", None), take("token_ids", None)
        keys = take("extra_keys", None)
        if event == self._last_removed.rest and parent is None and tokens is None and keys is None:
            return BlocksRemoved(_hashes(hashes), *self._last_removed.value[1:])
        if event == self._last_stored.rest:
            common = self._last_stored.value
            above = None if parent is None else _hash(parent)
            before, behind = common[3:EXTRA_KEYS], common[EXTRA_KEYS + 1 :]
            return BlocksStored._make((_hashes(hashes), above, _tokens(tokens), *before, _extra_keys(keys), *behind))
        taken = zip(OWN_FIELDS, (hashes, parent, tokens, keys), strict=True)
        event.update({name: value for name, value in taken if value is not None})
        return None

    def _anew(self, event: object) -> Event | None:
        skipped = self.counts.fields_skipped
        tag, values = self._named(event)
        reader = READERS.get(tag)
        if reader is None:
            self._skip_tag(tag)
            return None
        value = reader(self._known(tag, values))
        if type(event) is dict and self.counts.fields_skipped == skipped:
            rest = {"type": tag, **{name: value for name, value in event.items() if name not in OWN_FIELDS}}
            if isinstance(value, BlocksStored):
                self._last_stored = _Last(rest, value._replace(hashes=(), token_bytes=b"", extra_keys=()))
            elif isinstance(value, BlocksRemoved):
                self._last_removed = _Last(rest, value._replace(hashes=()))
        return value

    def _named(self, event: object) -> tuple[str, dict[str, Any]]:
        """Tag and fields by name, from either encoding."""
        if type(event) is dict:
            tag = event.pop("type", None)
            values = event
        elif type(event) is tuple and event:
            tag, values = event[0], {}
            names = ARRAY_FIELDS.get(tag) if type(tag) is str else None
            if names is not None:
                values = dict(zip(names, event[1:], strict=False))
                self.counts.fields_skipped += len(event[1 + len(names) :])
            if type(values.get("lora_name")) is dict:  # SGLang ends with its metadata where vLLM has the name
                values["cache_salt"] = values.pop("lora_name").get("cache_salt")
        else:
            raise _Unreadable
        if type(tag) is not str:
            raise _Unreadable
        return tag, values

    def _known(self, tag: str, values: dict[str, Any]) -> dict[str, Any]:
        known = MAP_FIELDS[tag]
        if known.issuperset(values):
            return values
        found = {name: value for name, value in values.items() if name in known}
        self.counts.fields_skipped += len(values) - len(found)
        return found

    def _skip_tag(self, tag: str) -> None:
        self.counts.tags_skipped += 1
        name = tag[:64]
        if name in self.unknown_tags or len(self.unknown_tags) < TAGS_KEPT_MAX:
            self.unknown_tags[name] += 1


def _build(payload: bytes) -> tuple[object, tuple[object, ...], tuple[object, ...]] | None:
    """First field of a short message, its events and the fields behind them. None: `_walk` shall see."""
    if len(payload) > AT_ONCE_BYTES_MAX:
        return None
    try:
        parts = msgpack.unpackb(payload, use_list=False)
    except UNPACK_ERRORS:
        return None
    if type(parts) is not tuple or not 2 <= len(parts) <= FIELDS_MAX:
        return None
    if parts[0] == "LoadStat":
        return parts[0], (), parts[1:]
    events = parts[1]
    return (parts[0], events, parts[2:]) if type(events) is tuple and len(events) <= EVENTS_MAX else None


def _walk(payload: bytes) -> tuple[object, list[tuple[int, int]], tuple[object, ...]]:
    """First field of the message, where its events lie, and the fields behind them. Raises BadBatch."""
    if not payload or len(payload) > PAYLOAD_BYTES_MAX:
        raise BadBatch("empty or too long")
    walker = msgpack.Unpacker(None, max_buffer_size=len(payload), use_list=False)
    walker.feed(payload)
    try:
        count = walker.read_array_header()
        if not 1 <= count <= FIELDS_MAX:
            raise BadBatch("not the fields of a batch")
        head = _scalar(payload, walker)
        spans: list[tuple[int, int]] = []
        if count > 1 and head != "LoadStat":
            events = walker.read_array_header()
            if events > EVENTS_MAX:
                raise BadBatch("too many events")
            spans = [_span(walker) for _ in range(events)]
        tail = tuple(_scalar(payload, walker) for _ in range(count - 1 - (head != "LoadStat")))
    except UNPACK_ERRORS as error:
        raise BadBatch("no msgpack, or not of this shape") from error
    if (head != "LoadStat" and count < 2) or walker.tell() != len(payload):
        raise BadBatch("not the length of a batch")
    return head, spans, tail


def _span(walker: Any) -> tuple[int, int]:
    start = walker.tell()
    walker.skip()
    return start, walker.tell()


def _scalar(payload: bytes, walker: Any) -> object:
    """The next value if it is a short one; else it stays unbuilt and is an empty tuple, which nothing takes."""
    start, end = _span(walker)
    return msgpack.unpackb(payload[start:end], use_list=False) if end - start <= 64 else ()


def _hash(value: object) -> EngineHash:
    if type(value) is bytes and 0 < len(value) <= HASH_BYTES_MAX:
        return value
    if type(value) is int:
        return value % U64
    raise _Unreadable


def _hashes(value: object) -> tuple[EngineHash, ...]:
    if type(value) is not tuple:
        raise _Unreadable
    return tuple([each if type(each) is bytes and 0 < len(each) <= HASH_BYTES_MAX else _hash(each) for each in value])


def _tokens(value: object) -> bytes:
    """Token ids, or pairs of one and the next (SGLang's EAGLE), of which the first count."""
    if value is None:
        return b""
    if type(value) is not tuple:
        raise _Unreadable
    if value and type(value[0]) is tuple:
        if not all(type(pair) is tuple and len(pair) == 2 for pair in value):
            raise _Unreadable
        value = tuple([pair[0] for pair in value])
    try:
        return array("I", value).tobytes()
    except (TypeError, OverflowError) as error:
        raise _Unreadable from error


def _extra_keys(value: object) -> tuple[tuple[ExtraKey, ...], ...]:
    if value is None:
        return ()
    if type(value) is not tuple:
        raise _Unreadable
    if value.count(None) == len(value):
        return ()
    return tuple([() if keys is None else _keys_of_block(keys) for keys in value])


def _keys_of_block(keys: object) -> tuple[ExtraKey, ...]:
    if type(keys) is not tuple or len(keys) > EXTRA_KEYS_MAX:
        raise _Unreadable
    for key in keys:
        parts = key if type(key) is tuple else (key,)
        if len(parts) > EXTRA_KEYS_MAX or not all(type(part) in (str, bytes, int) for part in parts):
            raise _Unreadable
        if any(len(part) > TEXT_CHARACTERS_MAX for part in parts if type(part) in (str, bytes)):
            raise _Unreadable
    return keys


def _text(value: object) -> str | None:
    if value is None or (type(value) is str and len(value) <= TEXT_CHARACTERS_MAX):
        return value
    raise _Unreadable


def _note(value: object) -> str | None:
    """A text that nothing depends on."""
    return value if type(value) is str and len(value) <= TEXT_CHARACTERS_MAX else None


def _number(value: object, highest: int = U32_MAX) -> int | None:
    if value is None or (type(value) is int and 0 <= value <= highest):
        return value
    raise _Unreadable


def _stored(values: Mapping[str, Any]) -> BlocksStored:
    hashes, parent, get = _hashes(values.get("block_hashes")), values.get("parent_block_hash"), values.get
    return BlocksStored(
        hashes=hashes,
        parent=None if parent is None else _hash(parent),
        token_bytes=_tokens(get("token_ids")),
        block_tokens=_number(get("block_size"), BLOCK_TOKENS_MAX) or 0,
        lora_id=_number(get("lora_id")),
        medium=_text(get("medium")),
        lora_name=_text(get("lora_name")),
        extra_keys=_extra_keys(get("extra_keys")),
        group=_number(get("group_idx")) or 0,
        kind=_text(get("kv_cache_spec_kind")),
        window_tokens=_number(get("kv_cache_spec_sliding_window")),
        locality=_text(get("locality")),
        ownership=_note(get("ownership")),
        session=_note(get("session_id")),
        salt=_text(get("cache_salt")),
        media=bool(get("mm_keys")),
    )


def _removed(values: Mapping[str, Any]) -> BlocksRemoved:
    return BlocksRemoved(
        hashes=_hashes(values.get("block_hashes")),
        medium=_text(values.get("medium")),
        group=_number(values.get("group_idx")) or 0,
        locality=_text(values.get("locality")),
        ownership=_note(values.get("ownership")),
    )


def _cleared(_values: Mapping[str, Any]) -> CacheCleared:
    return CacheCleared()


READERS: dict[str, Callable[[Mapping[str, Any]], Event]] = {
    "BlockStored": _stored,
    "BlockRemoved": _removed,
    "AllBlocksCleared": _cleared,
}

ARRAY_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""Fields of the array encoding, in their order behind the tag."""

MAP_FIELDS: dict[str, frozenset[str]] = {
    "BlockStored": frozenset(
        (*ARRAY_FIELDS["BlockStored"], "locality", "ownership", "session_id", "cache_salt", "mm_keys")
    ),
    "BlockRemoved": frozenset((*ARRAY_FIELDS["BlockRemoved"], "locality", "ownership")),
    "AllBlocksCleared": frozenset(),
}
