"""Decodes messages of vLLM's or SGLang's KV event stream (msgpack) into Batches of values, without trusting them.

Rule: unknown tags and fields are skipped one by one and counted. An event of known tag whose fields cannot be read is
skipped whole and counted as unread: a block whose salt is unknown must not pass for one without salt. What is no batch
at all raises BadBatch, and nothing else is ever raised. Source: vLLM 0.32, SGLang 0.5.23 and their older releases.
Bounds: those of `event_frames`; the events of a long message are built one at a time, and read in `portions`, between
which the caller lets others have their turn. Memory is a small multiple of the largest event, plus what values keep.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from ranvier_py.core.engine_cache.sources.event_frames import LOAD_STAT, BadBatch, event_in, frame_of
from ranvier_py.core.engine_cache.sources.event_values import (
    ARRAY_FIELDS,
    MAP_FIELDS,
    READERS,
    Batch,
    BlocksRemoved,
    BlocksStored,
    EngineLoad,
    Event,
    Unreadable,
    extra_keys_of,
    hash_of,
    hashes_of,
    salt_in,
    tokens_of,
)
from ranvier_py.core.metrics import counter

EVENT_BYTES_MAX = 2 << 20
"""A prompt of 128k tokens stored at once is 1 MB; while it is read, its objects take some ten times that."""

PORTION_BYTES = 64 << 10
"""Of events that are read at once, in about 10 ms."""

EVENT_BYTES = 128
"""What an event counts beside its length, which is about what reading the shortest one takes."""

TAGS_KEPT_MAX = 16  # unknown tags that are remembered by name, for display

TAKES_AWAY = re.compile("clear|remov|evict|drop|reset|flush|purg|delet|free|invalid", re.IGNORECASE)
"""Unknown tags that count as unread. If all did, one new kind would lower the level of a release's engines for ever."""

OWN_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "extra_keys")
"""Fields that differ between an engine's events. The others rarely do."""

make = tuple.__new__  # makes named tuples in half the time of their own `__new__`

EXTRA_KEYS = BlocksStored._fields.index("extra_keys")


@dataclass(slots=True)
class DecoderCounters:
    batches: int = counter("Messages with KV events that were read.")
    events: int = counter("KV events read from messages of engines.")
    refused: int = counter("Messages of engines that were no batch of KV events.")
    tags_skipped: int = counter("KV events of kinds that this node does not know.")
    fields_skipped: int = counter("Fields of KV events that this node does not know.")
    unread: int = counter("KV events of a known kind that could not be read.")
    dropped: int = counter("Messages with KV events dropped because too many waited to be applied.")


class _Last(NamedTuple):
    """The last event of a kind without `OWN_FIELDS`: as it came, and as a value."""

    rest: Mapping[object, object]
    value: tuple[Any, ...] = ()


class EventDecoder:
    """Decodes the messages of one stream and counts what it skips; `unknown_tags` counts the first few by name."""

    def __init__(self) -> None:
        self.counters = DecoderCounters()
        self.unknown_tags: Counter[str] = Counter()
        self._last_stored = self._last_removed = _Last({"": None})  # equals no event

    def decode(self, payload: bytes) -> Batch:
        """Decode one message at once. Raises only BadBatch."""
        first, *rest = self.portions(payload)
        if not rest:
            return first
        parts = (first, *rest)
        events = tuple([event for part in parts for event in part.events])
        return Batch(events, sum(part.unread for part in parts))

    def portions(self, payload: bytes) -> Iterator[Batch]:
        """Decode one message in portions, one at least. Raises only BadBatch, and only before the first one."""
        try:
            head, events, tail, is_built = frame_of(payload)
            if head != LOAD_STAT and not isinstance(head, int | float):
                raise BadBatch("no timestamp")
        except BadBatch:
            self.counters.refused += 1
            raise
        self.counters.batches += 1
        if head == LOAD_STAT:
            yield Batch((), load=self._load(tail))
            return
        self.counters.fields_skipped += len(tail[1:])  # after the rank, which is not read: each stream has one rank
        read: Callable[[Any], Event | None] = self._event if is_built else partial(self._event_at, payload)
        places = portions_of(events, is_built=is_built)
        for first, end in pairwise(places):
            unread_before = self.counters.unread
            found = tuple([event for each in events[first:end] if (event := read(each)) is not None])
            self.counters.events += len(found)
            yield Batch(found, self.counters.unread - unread_before, more=end < len(events))

    def _load(self, numbers: Sequence[object]) -> EngineLoad:
        """Read the numbers in SGLang's order; fields that are no number stay None."""
        known = [value if type(value) is int and value >= 0 else None for value in numbers[:6]]
        self.counters.fields_skipped += len(numbers[6:])
        return EngineLoad(*known, *[None] * (6 - len(known)))

    def _event_at(self, payload: bytes, span: tuple[int, int]) -> Event | None:
        start, end = span
        if end - start > EVENT_BYTES_MAX:
            self.counters.unread += 1
            return None
        try:
            return self._event(event_in(payload, span))
        except BadBatch:
            self.counters.unread += 1
            return None

    def _event(self, event: object) -> Event | None:
        try:
            alike = self._alike(event) if type(event) is dict else None
            return alike or self._anew(event)
        except Unreadable:
            self.counters.unread += 1
            return None

    def _alike(self, event: dict[object, Any]) -> Event | None:
        """Read an event that differs from the last of its kind only in `OWN_FIELDS`, as nearly all do; else None."""
        take = event.pop
        hashes = take("block_hashes", None)
        if event == self._last_removed.rest:
            return make(BlocksRemoved, (hashes_of(hashes), *self._last_removed.value))
        parent, tokens, keys = take("parent_block_hash", None), take("token_ids", None), take("extra_keys", None)
        if event == self._last_stored.rest:
            common = self._last_stored.value
            above = None if parent is None else hash_of(parent)
            before, behind = common[3:EXTRA_KEYS], common[EXTRA_KEYS + 1 :]
            own = (hashes_of(hashes), above, tokens_of(tokens))
            return make(BlocksStored, (*own, *before, extra_keys_of(keys), *behind))
        taken = zip(OWN_FIELDS, (hashes, parent, tokens, keys), strict=True)
        event.update({name: value for name, value in taken if value is not None})
        return None

    def _anew(self, event: object) -> Event | None:
        skipped = self.counters.fields_skipped
        tag, values = self._named(event)
        reader = READERS.get(tag)
        if reader is None:
            self._skip_tag(tag)
            return None
        value = reader(self._known(tag, values))
        if type(event) is dict and self.counters.fields_skipped == skipped:
            rest = {"type": tag, **{name: value for name, value in event.items() if name not in OWN_FIELDS}}
            if isinstance(value, BlocksStored):
                self._last_stored = _Last(rest, value._replace(hashes=(), token_bytes=b"", extra_keys=()))
            elif isinstance(value, BlocksRemoved):
                self._last_removed = _Last(rest, value[1:])
        return value

    def _named(self, event: object) -> tuple[str, dict[str, Any]]:
        """Return an event's tag, and its fields by name, from either encoding, which one batch may mix: an array `[tag,
        field, …]` whose last fields may be missing (vLLM up to 0.23, SGLang), a map with its tag under `type`
        (0.24)."""
        if type(event) is dict:
            tag = event.pop("type", None)
            values = event
            if "metadata" in event:  # where SGLang's #37271 has the salt
                event.setdefault("cache_salt", salt_in(event.pop("metadata")))
        elif type(event) is tuple and event:
            tag, values = event[0], {}
            names = ARRAY_FIELDS.get(tag) if type(tag) is str else None
            if names is not None:
                values = dict(zip(names, event[1:], strict=False))
                self.counters.fields_skipped += len(event[1 + len(names) :])
            if type(values.get("lora_name")) is dict:  # SGLang ends with its metadata where vLLM has the name
                values["cache_salt"] = salt_in(values.pop("lora_name"))
        else:
            raise Unreadable
        if type(tag) is not str:
            raise Unreadable
        return tag, values

    def _known(self, tag: str, values: dict[str, Any]) -> dict[str, Any]:
        known = MAP_FIELDS[tag]
        if known.issuperset(values):
            return values
        found = {name: value for name, value in values.items() if name in known}
        self.counters.fields_skipped += len(values) - len(found)
        return found

    def _skip_tag(self, tag: str) -> None:
        self.counters.tags_skipped += 1
        name = tag[:64]
        self.counters.unread += TAKES_AWAY.search(name) is not None
        if name in self.unknown_tags or len(self.unknown_tags) < TAGS_KEPT_MAX:
            self.unknown_tags[name] += 1


def portions_of(events: Sequence[Any], *, is_built: bool) -> list[int]:
    """Return where portions of a message's events begin, and their end. `events`: built, or their places."""
    places, room = [0], PORTION_BYTES
    for index, event in enumerate(events):
        length = EVENT_BYTES if is_built else EVENT_BYTES + event[1] - event[0]
        if length > room and index > places[-1]:
            places.append(index)
            room = PORTION_BYTES
        room -= length
    return [*places, len(events)]
