"""What an engine's events have in common is checked once; that must never show."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.sources import event_frames as module
from ranvier_py.core.engine_cache.sources.event_values import BlocksStored
from ranvier_py.core.engine_cache.sources.events import EventDecoder
from tests.examples import examples

scalars = st.sampled_from([None, 0, 1, 1.0, True, "GPU", "CPU", "french", b"x", -1, [1], {}])
hashes = st.sampled_from([[1], [-1, 2], [b"h"], [], None, ["text"], [1.5]])
tags = st.sampled_from(["BlockStored", "BlockStored", "BlockRemoved", "BlockRemoved", "AllBlocksCleared", "New", 7])
messages = st.fixed_dictionaries(
    {"type": tags, "block_hashes": hashes},
    optional={
        "parent_block_hash": st.sampled_from([None, 3, "text"]),
        "token_ids": st.sampled_from([None, [1, 2], [-1], "text"]),
        "extra_keys": st.sampled_from([None, [None], [["salt"]], [[1.5]], [None, None], "text"]),
        "block_size": st.sampled_from([16, 32, "text"]),
        "medium": scalars,
        "lora_name": scalars,
        "group_idx": st.sampled_from([None, 0, 1, "text"]),
        "cache_salt": scalars,
        "foreign": scalars,
    },
)


@settings(max_examples=examples(200))
@given(st.lists(messages, min_size=1, max_size=12))
def test_a_decoder_that_has_read_much_reads_as_a_new_one_does(several: list[dict[str, object]]) -> None:
    """A block without salt must not inherit the salt of the one before it, nor a bad field pass as a good one did."""
    old = EventDecoder()
    for message in several:
        payload = msgpack.packb([1.5, [message], 0])
        new = EventDecoder()
        assert old.decode(payload) == new.decode(payload)
    total = EventDecoder()
    together = total.decode(msgpack.packb([1.5, several, 0]))
    apart = [event for each in several for event in EventDecoder().decode(msgpack.packb([1.5, [each], 0])).events]
    assert list(together.events) == apart
    old.counters.batches = total.counters.batches
    assert old.counters == total.counters


@settings(max_examples=examples(60))
@given(st.lists(messages, min_size=1, max_size=6))
def test_short_messages_and_long_ones_are_read_alike(several: list[dict[str, object]]) -> None:
    payload = msgpack.packb([1.5, several, 0])
    at_once, one_by_one = EventDecoder(), EventDecoder()
    found = at_once.decode(payload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "AT_ONCE_BYTES_MAX", 0)
        assert one_by_one.decode(payload) == found
    assert at_once.counters == one_by_one.counters


@pytest.mark.parametrize("bad", [b"\x81\x01\x02", b"\x82\xa4type\xacBlockRemoved\xa6medium\xa2\xff\xfe"])
def test_an_event_with_a_number_as_its_key_or_a_text_that_is_not_utf8_does_not_spoil_the_others(bad: bytes) -> None:
    good = msgpack.packb({"type": "BlockStored", "block_hashes": [1], "token_ids": [1] * 16, "block_size": 16})
    decoder = EventDecoder()
    batch = decoder.decode(b"\x93\x01\x93" + good + bad + good + b"\x00")
    assert [type(event) for event in batch.events] == [BlocksStored] * 2
    assert batch.unread == decoder.counters.unread == 1
