from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.sources import event_frames
from ranvier_py.core.engine_cache.sources.event_frames import EVENTS_MAX, PAYLOAD_BYTES_MAX
from ranvier_py.core.engine_cache.sources.event_values import (
    Batch,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineLoad,
    Tier,
    TierCleared,
)
from ranvier_py.core.engine_cache.sources.events import TAGS_KEPT_MAX, BadBatch, EventDecoder
from tests.examples import examples

STORED = {
    "type": "BlockStored",
    "block_hashes": [5, -2],
    "parent_block_hash": b"\x01" * 32,
    "token_ids": list(range(32)),
    "block_size": 16,
    "lora_id": 3,
    "medium": "CPU",
    "lora_name": "french",
    "extra_keys": [["french", ["image", 7], "salt"], None],
    "group_idx": 1,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": 4096,
    "locality": "LOCAL",
    "ownership": "mine",
    "session_id": "s1",
}
"""Every field that vLLM 0.32 writes."""


def packed(*events: Any) -> bytes:
    return bytes(msgpack.packb([1.5, events, 0]))


def only(decoder: EventDecoder, event: Any) -> Any:
    batch = decoder.decode(packed(event))
    assert len(batch.events) == 1, decoder.counters
    return batch.events[0]


def test_every_field_of_a_stored_event_is_read_from_a_map() -> None:
    decoder = EventDecoder()
    found = only(decoder, STORED)
    assert isinstance(found, BlocksStored)
    assert found.ids.tolist() == list(range(32))
    assert found == BlocksStored(
        hashes=(5, 2**64 - 2),
        parent=b"\x01" * 32,
        token_bytes=found.token_bytes,
        block_tokens=16,
        lora_id=3,
        medium="CPU",
        lora_name="french",
        extra_keys=(("french", ("image", 7), "salt"), ()),
        group=1,
        kind="full_attention",
        locality="LOCAL",
    )
    assert (decoder.counters.fields_skipped, decoder.counters.unread) == (0, 0)


def test_an_array_means_the_same_as_a_map() -> None:
    """Engines up to vLLM 0.23 would be read into other fields."""
    names = list(STORED)[:12]
    mapped = {name: STORED[name] for name in names}
    arrayed = ["BlockStored", *(STORED[name] for name in names[1:])]
    assert only(EventDecoder(), arrayed) == only(EventDecoder(), mapped)
    assert only(EventDecoder(), arrayed[:5]) == only(EventDecoder(), {name: STORED[name] for name in names[:5]})
    removed = BlocksRemoved(hashes=(9, b"x"), medium="GPU", group=2)
    assert only(EventDecoder(), ["BlockRemoved", [9, b"x"], "GPU", 2]) == removed
    spelled = {"type": "BlockRemoved", "block_hashes": [9, b"x"], "medium": "GPU", "group_idx": 2}
    assert only(EventDecoder(), spelled) == removed
    assert only(EventDecoder(), ["AllBlocksCleared"]) == only(EventDecoder(), {"type": "AllBlocksCleared"})
    assert only(EventDecoder(), ["AllBlocksCleared"]) == CacheCleared()


def test_both_encodings_may_stand_in_one_batch() -> None:
    batch = EventDecoder().decode(packed(STORED, ["BlockRemoved", [1]]))
    assert [type(event) for event in batch.events] == [BlocksStored, BlocksRemoved]
    assert batch.unread == 0


def test_signed_and_unsigned_hashes_are_one_name() -> None:
    """SGLang writes signed ones: a removal spelled otherwise would miss its block."""
    decoder = EventDecoder()
    assert only(decoder, ["BlockRemoved", [-1]]) == only(decoder, ["BlockRemoved", [2**64 - 1]])


def test_sglang_may_pair_tokens_and_end_with_metadata() -> None:
    decoder = EventDecoder()
    event = only(decoder, ["BlockStored", [-7], None, [[1, 2], [2, 3]], 2, None, "CPU_PINNED", {"cache_salt": "s"}])
    assert (event.ids.tolist(), event.salt, event.lora_name, event.tier) == ([1, 2], "s", None, Tier.CPU)


def test_the_load_of_an_engine_is_no_event() -> None:
    decoder = EventDecoder()
    batch = decoder.decode(msgpack.packb(["LoadStat", 1, 2, 300, 4000, 0, "many"]))
    assert batch == Batch((), load=EngineLoad(1, 2, 300, 4000, 0, None))
    assert decoder.decode(msgpack.packb(["LoadStat"])).load == EngineLoad(*[None] * 6)


@pytest.mark.parametrize(
    ("medium", "locality", "tier"),
    [
        (None, None, Tier.GPU),
        ("GPU", None, Tier.GPU),
        ("cpu", None, Tier.CPU),
        ("CPU_PINNED", None, Tier.CPU),
        ("FS", "LOCAL", Tier.DISK),
        ("DISK", None, Tier.DISK),
        ("OBJ", None, Tier.EXTERNAL),
        ("tape", None, Tier.EXTERNAL),
        ("GPU", "REMOTE", Tier.EXTERNAL),
    ],
)
def test_a_medium_names_a_tier(medium: str | None, locality: str | None, tier: Tier) -> None:
    assert BlocksRemoved(hashes=(), medium=medium, locality=locality).tier is tier


def test_what_is_unknown_is_skipped_one_by_one_and_counted() -> None:
    """One new field or tag of a newer engine would cost the whole stream."""
    decoder = EventDecoder()
    batch = decoder.decode(
        packed(
            {**STORED, "novelty": {"deep": [1]}},
            {"type": "BlockInactive", "block_hashes": [1]},
            ["BlockInactive", 1],
            ["BlockRemoved", [1], None, 0, "more", "and more"],
            ["AllBlocksCleared", 1],
        )
    )
    assert [type(event) for event in batch.events] == [BlocksStored, BlocksRemoved, CacheCleared]
    assert (decoder.counters.tags_skipped, decoder.counters.fields_skipped) == (2, 4)
    assert (batch.unread, dict(decoder.unknown_tags)) == (0, {"BlockInactive": 2})


def test_an_unknown_tag_that_takes_blocks_away_is_unread() -> None:
    decoder = EventDecoder()
    batch = decoder.decode(packed({"type": "GroupBlocksCleared"}, ["BlockEvicted", 1], ["BlockActive", 1]))
    assert (batch.unread, decoder.counters.tags_skipped) == (2, 3)


@pytest.mark.parametrize(
    ("event", "tier"),
    [
        ({"type": "TierBlocksCleared", "medium": "GPU"}, Tier.GPU),
        ({"type": "TierBlocksCleared", "medium": "CPU", "ownership": "x"}, Tier.CPU),
        (["TierBlocksCleared", "STORAGE"], Tier.DISK),
    ],
)
def test_a_tier_that_is_cleared_is_read(event: Any, tier: Tier) -> None:
    assert only(EventDecoder(), event) == TierCleared(tier)


def test_unknown_tags_are_remembered_up_to_a_bound() -> None:
    decoder = EventDecoder()
    decoder.decode(packed(*([f"Tag{number}"] for number in range(100)), ["x" * 5000]))
    assert (len(decoder.unknown_tags), decoder.counters.tags_skipped) == (TAGS_KEPT_MAX, 101)


@pytest.mark.parametrize(
    "change",
    [
        {"block_hashes": 5},
        {"block_hashes": [None]},
        {"block_hashes": [b""]},
        {"block_hashes": [b"x" * 65]},
        {"parent_block_hash": "text"},
        {"token_ids": [-1]},
        {"token_ids": [2**32]},
        {"token_ids": [1.5]},
        {"token_ids": [1, [1, 2]]},
        {"token_ids": [[1, 2], [1]]},
        {"token_ids": "text"},
        {"block_size": -1},
        {"block_size": 1e9},
        {"extra_keys": "salt"},
        {"extra_keys": [["salt", None]]},
        {"extra_keys": [[{"a": 1}]]},
        {"extra_keys": [["s" * 2000]]},
        {"lora_name": 5},
        {"medium": b"GPU"},
        {"group_idx": "one"},
        {"cache_salt": 5},
        {"type": 5},
        {"type": None},
    ],
)
def test_an_event_with_a_field_that_cannot_be_read_is_skipped_alone(change: dict[str, Any]) -> None:
    """Without its salt or its parent a block would pass for another."""
    decoder = EventDecoder()
    batch = decoder.decode(packed({**STORED, **change}, ["BlockRemoved", [1]]))
    assert (batch.events, batch.unread) == ((BlocksRemoved(hashes=(1,)),), 1)


@pytest.mark.parametrize(
    "event",
    [None, 7, [], [[]], [{"a": 1}], {}, {1: 2}, "BlockStored", [b"BlockRemoved", [1]], msgpack.ExtType(5, b"")],
)
def test_what_is_no_event_is_skipped_alone(event: Any) -> None:
    decoder = EventDecoder()
    batch = decoder.decode(packed(event, ["BlockRemoved", [1]]))
    assert (len(batch.events), batch.unread) == (1, 1)


BOMBS = [
    b"",
    b"\xc1",
    b"\x90",
    b"\x91\x01",
    b"\x80",
    msgpack.packb([1.0, 5]),
    msgpack.packb([1.0, {}]),
    msgpack.packb([None, []]),
    msgpack.packb([[1.0], []]),
    msgpack.packb([1.0, [], 0]) + b"\x00",
    msgpack.packb([1.0, [["BlockRemoved", [1]]], 0])[:-3],
    b"\x92\x01\xdd\xff\xff\xff\xff",
    b"\x92\x01\xdd\x00\x01\x00\x00" + b"\xdd\x00\x00\xff\xff" * 10_000,
    b"\x92\x01\xdd\x00\x02\x00\x00" + b"\xc0" * 0x20000,
    b"\x92\x01\x91" + b"\x91" * 100_000,
    b"\x92\x01\x91" + b"\xdf\x00\x00\xff\xff" * 20_000,
    b"\x92\x01\x91\xc6\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff\x01",
    *(b"\x82" + key + b"\x01\xa6events\x90" for key in (b"\x05", b"\xc0", b"\x90", b"\x91\x80", b"\x80")),
]


@contextmanager
def takes_at_most(size_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("payload", BOMBS)
def test_what_is_no_batch_is_refused_and_builds_nothing(payload: bytes) -> None:
    """A few bytes that lie about their length, or nest, would take gigabytes."""
    decoder = EventDecoder()
    with takes_at_most(200_000 + 3 * len(payload)), pytest.raises(BadBatch):
        decoder.decode(payload)
    assert (decoder.counters.refused, decoder.counters.batches) == (1, 0)


def test_a_message_beyond_the_bound_is_refused() -> None:
    with pytest.raises(BadBatch):
        EventDecoder().decode(b"\x93\x01\x90\xc6" + PAYLOAD_BYTES_MAX.to_bytes(4, "big") + bytes(PAYLOAD_BYTES_MAX))


def test_an_event_that_is_too_large_is_skipped_unbuilt() -> None:
    """Empty maps take 70 times their bytes."""
    decoder = EventDecoder()
    many = 3 << 20
    payload = b"\x92\x01\x92\xdd" + many.to_bytes(4, "big") + b"\x80" * many + msgpack.packb(["AllBlocksCleared"])
    with takes_at_most(4 * len(payload)):
        batch = decoder.decode(payload)
    assert (batch.events, batch.unread) == ((CacheCleared(),), 1)


def test_a_batch_of_the_most_events_is_read() -> None:
    batch = EventDecoder().decode(packed(*[["BlockRemoved", [7]]] * EVENTS_MAX))
    assert len(batch.events) == EVENTS_MAX


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=8) | st.text()
tags = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Else", "LoadStat"])
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
field_values = st.lists(anything, max_size=3) | anything
events_like = st.one_of(
    st.tuples(tags, field_values, field_values, field_values, anything, anything, anything, anything).map(list),
    st.fixed_dictionaries({"type": tags}, optional={name: field_values for name in STORED if name != "type"}),
    anything,
)


@settings(max_examples=examples(150))
@given(st.binary(max_size=200))
def test_bytes_raise_nothing_but_bad_batch(payload: bytes) -> None:
    decoder = EventDecoder()
    for each in (payload, b"\x93\x01" + payload, b"\x92\x01\x91" + payload):
        try:
            decoder.decode(each)
        except BadBatch:
            continue


@settings(max_examples=examples(80))
@given(st.lists(events_like, max_size=4), anything, st.data())
def test_whatever_stands_in_a_batch_its_other_events_are_read(
    events: list[Any], rank: Any, data: st.DataObject
) -> None:
    decoder = EventDecoder()
    payload = msgpack.packb([1.0, [*events, ["BlockRemoved", [77]]], rank])
    batch = decoder.decode(payload)
    assert batch.events[-1] == BlocksRemoved(hashes=(77,))
    skipped = decoder.counters.tags_skipped + batch.unread
    assert len(batch.events) + skipped == len(events) + 1
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(BadBatch):
        decoder.decode(payload[:cut])
    flipped = bytearray(payload)
    flipped[cut] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decoder.decode(bytes(flipped))
    except BadBatch:
        assert decoder.counters.refused == 2


MAP_BATCH = bytes.fromhex(
    "83a27473cb41dab04f4d800000a66576656e747393"  # {"ts": …, "events": [
    "88a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfdab7b4f0b1d5a4c0"
    "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647392cd0102cd0304"
    "aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0"
    "83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739105a66d656469756da3475055"
    "81a474797065b0416c6c426c6f636b73436c6561726564"
    "b2646174615f706172616c6c656c5f72616e6b01"  # ], "data_parallel_rank": 1}
)
"""As msgspec writes the structs of vLLM's revision 0181ea3173, where the batch, too, has no `array_like`."""


def test_a_batch_that_is_a_map_is_read_as_one_that_is_an_array() -> None:
    decoder = EventDecoder()
    batch = decoder.decode(MAP_BATCH)
    stored = BlocksStored((0xDAB7B4F0B1D5A4C0,), None, batch.events[0].token_bytes, 2, medium="GPU")  # type: ignore[union-attr]
    assert batch == Batch((stored, BlocksRemoved((5,), "GPU"), CacheCleared()))
    assert stored.ids.tolist() == [0x0102, 0x0304]
    assert decoder.counters.fields_skipped == 0
    fields = msgpack.unpackb(MAP_BATCH)
    assert EventDecoder().decode(msgpack.packb([fields["ts"], fields["events"], 1])) == batch


@pytest.mark.parametrize("at_once", [True, False])
def test_fields_of_a_map_may_come_in_any_order_be_missing_or_unknown(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_frames, "AT_ONCE_BYTES_MAX", 1 << 17 if at_once else 0)
    decoder = EventDecoder()
    event = {"type": "BlockRemoved", "block_hashes": [7]}
    more = {"new": {}, "ts": 2, "events": [event], "data_parallel_rank": 3, "x": "y" * 99}
    for fields in ({"events": [event], "ts": 2.0}, more):
        assert decoder.decode(msgpack.packb(fields)) == Batch((BlocksRemoved((7,)),))
    assert decoder.counters.fields_skipped == 2


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    "wrong",
    [
        {"ts": 1.0, "data_parallel_rank": 0},
        {"events": [], "data_parallel_rank": 0},
        {"ts": 1.0},
        {"ts": 1.0, "events": 5},
        {"ts": 1.0, "events": {"a": 1}},
        {"ts": [], "events": []},
        {**dict.fromkeys(map(str, range(20))), "ts": 1.0, "events": []},
    ],
)
def test_a_map_that_is_no_batch_is_refused(
    wrong: dict[str, object], at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_frames, "AT_ONCE_BYTES_MAX", 1 << 17 if at_once else 0)
    with pytest.raises(BadBatch):
        EventDecoder().decode(msgpack.packb(wrong))


def test_the_salt_in_an_events_metadata_is_its_salt() -> None:
    """SGLang's #37271: a salted block must not pass for one without."""
    decoder = EventDecoder()
    plain = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2}
    for _ in range(2):
        assert only(decoder, {**plain, "metadata": {"cache_salt": "tenant-a"}}).salt == "tenant-a"
        assert only(decoder, plain).salt is None
        assert only(decoder, {**plain, "metadata": None}).salt is None
    assert decoder.decode(packed({**plain, "metadata": "tenant-a"})).unread == 1


def test_what_an_engine_marks_as_reused_is_reported_apart() -> None:
    decoder = EventDecoder()
    plain = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2}
    reported = [only(decoder, {**plain, "origin": origin}).reused for origin in ("NEW", "REUSED", None, "REUSED", 5)]
    assert reported == [False, True, False, True, False]
    assert not only(decoder, plain).reused
