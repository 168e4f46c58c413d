"""What a reporter knows of its engine: given hashes, and blocks as prefix hashes or as fingerprints."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.sources.event_values import BlocksRemoved, BlocksStored, CacheCleared
from ranvier_py.core.engine_cache.sources.push_book import BlockScheme, BlockSource, Book
from ranvier_py.core.engine_cache.sources.push_keys import key_of
from ranvier_py.core.engine_cache.sources.push_messages import UnknownScheme, read_eviction, read_sync
from ranvier_py.core.engine_cache.sources.push_table import Entry
from ranvier_py.core.errors import BadRequest
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher
from ranvier_py.core.prompts.namespaces import TokenNamespaces

KEY = b"k" * 32
PREFIXES = BlockScheme("m", 64)
FINGERPRINTS = BlockScheme("m", 0, KEY, "t", "mark", 16)


def stored(first: int, ids: list[int], parent: int | None = None, **more: Any) -> BlocksStored:
    blocks = len(ids) // 16
    names = tuple(range(first, first + blocks))
    return BlocksStored(names, parent, array("I", ids[: 16 * blocks]).tobytes(), 16, **more)


def source_of(scheme: BlockScheme, *events: BlocksStored | BlocksRemoved | CacheCleared) -> tuple[Book, BlockSource]:
    book = Book()
    source = BlockSource(book, scheme)
    for event in events:
        source.apply(event)
    while not source.settle():
        pass
    return book, source


def apply(source: BlockSource, *events: BlocksStored | BlocksRemoved | CacheCleared) -> None:
    for event in events:
        source.apply(event)
    while not source.settle():
        pass


IDS = list(range(200))


def test_px2_a_worker_finds_the_routers_key_from_the_tokens_of_its_blocks() -> None:
    """From the hashes of its blocks, as the report has it, it could not."""
    book, _ = source_of(PREFIXES, stored(1, IDS))
    assert list(book.table) == [key_of(IDS, 64)]


def test_px3_a_prefix_is_held_while_all_blocks_of_its_64_tokens_are_and_others_may_go() -> None:
    book, source = source_of(PREFIXES, stored(1, IDS))
    apply(source, BlocksRemoved((12, 11, 5)))
    assert key_of(IDS, 64) in book.table
    apply(source, BlocksRemoved((2,)))
    assert len(book.table) == 0
    assert book.take_changed() == [key_of(IDS, 64)]
    apply(source, stored(2, IDS[16:32], parent=1))
    assert key_of(IDS, 64) in book.table


def test_a_block_that_was_stored_twice_is_there_until_it_was_removed_twice() -> None:
    book, source = source_of(PREFIXES, stored(1, IDS), stored(1, IDS))
    apply(source, BlocksRemoved((1,)))
    assert len(book.table) == 1
    apply(source, BlocksRemoved((1,)))
    assert len(book.table) == 0


def test_two_prompts_behind_one_prefix_are_one_hash() -> None:
    """PX10: what the default length of 64 makes of everything behind one system prompt."""
    other = [*IDS[:64], *range(900, 1036)]
    book, _ = source_of(PREFIXES, stored(1, IDS), stored(50, other[64:], parent=4))
    assert len(book.table) == 1


@pytest.mark.parametrize("more", [{"salt": "tenant"}, {"lora_name": "adapter"}])
def test_what_has_a_salt_or_an_adapter_has_no_prefix_hash(more: dict[str, str]) -> None:
    """PX11: the report's key would say that everybody's prompts may share it."""
    book, _ = source_of(PREFIXES, stored(1, IDS, **more))
    assert len(book.table) == 0
    book, _ = source_of(FINGERPRINTS, stored(1, IDS, **more))
    assert len(book.table) == 12


def test_fingerprints_are_those_that_the_router_makes_of_a_prompt() -> None:
    book, _ = source_of(FINGERPRINTS, stored(1, IDS))
    hasher, namespaces = TokenHasher(KEY), TokenNamespaces(TextHasher(KEY), "t")
    [segment] = hasher.extend(hasher.start(namespaces.of("m")), np.array(IDS, dtype=np.uint32), [192])
    for tokens, fingerprint in (*segment.anchors, segment.end):
        entry = book.entry(fingerprint)
        assert entry is not None
        assert entry.tokens == tokens


def test_after_a_change_of_key_all_that_is_held_is_hashed_again() -> None:
    """A router without a cluster secret has another key after each restart."""
    book, source = source_of(FINGERPRINTS, stored(1, IDS), stored(30, IDS[:16], medium="CPU"))
    apply(source, BlocksRemoved((12,)))
    before = sorted(book.table)
    other = FINGERPRINTS._replace(key=b"x" * 32, mark="other")
    source.use(other)
    apply(source)
    fresh, _ = source_of(other, stored(1, IDS[:176]), stored(30, IDS[:16], medium="CPU"))
    assert sorted(book.table) == sorted(fresh.table)
    assert book.table.total == fresh.table.total
    assert not set(before) & set(book.table)
    source.use(FINGERPRINTS)
    apply(source)
    assert sorted(book.table) == before


def test_a_cleared_cache_holds_nothing_and_says_so() -> None:
    book, source = source_of(FINGERPRINTS, stored(1, IDS))
    held = list(book.table)
    book.take_changed()
    apply(source, CacheCleared())
    assert len(book.table) == 0
    assert sorted(book.take_changed()) == sorted(held)
    source.use(FINGERPRINTS._replace(key=b"x" * 32))
    apply(source)
    assert len(book.table) == 0


def test_blocks_beyond_the_bound_are_told_of_and_not_kept() -> None:
    book = Book()
    source = BlockSource(book, FINGERPRINTS, kept_max=5)
    apply(source, stored(1, IDS))
    assert len(book.table) == 12
    assert source.not_kept == 7
    source.use(FINGERPRINTS._replace(key=b"x" * 32))
    apply(source)
    assert len(book.table) == 5


def test_a_scan_leaves_exactly_what_it_saw() -> None:
    book = Book()
    for number in (1, 2, 3):
        book.hold(Entry(number))
    book.take_changed()
    book.only([Entry(2), Entry(4)])
    assert sorted(book.table) == [2, 4]
    assert sorted(book.take_changed()) == [1, 3, 4]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
MEMBERS = ("evicted_hashes", "stored", "active_hashes", "sums", "buckets", "count", "digest")
HEAD = ("worker_id", "hash_scheme", "incarnation", "seq", "model")
NAMES = st.sampled_from([*MEMBERS, *HEAD])
HASHES: list[Any] = ["0" * 16, "a" * 64, [], ["a" * 64], {"7": ["a" * 64]}]
LIKELY = st.sampled_from(["w0", "prefix_hash", "fingerprint:m", 3, *HASHES])


@given(st.dictionaries(NAMES, LIKELY | JSON, max_size=9))
@settings(max_examples=300, deadline=None)
def test_whatever_a_message_holds_it_is_read_or_refused_with_a_4xx(body: Mapping[str, Any]) -> None:
    for read in (read_eviction, read_sync):
        with suppress(BadRequest, UnknownScheme):
            read({"worker_id": "w0", **body}, "m")


def test_blocks_that_an_engine_tells_of_again_because_they_were_reused_go_with_one_removal() -> None:
    """vLLM's kv_cache_report_mode=full. A hook's words are taken as they are."""
    for tells_again, left in ((True, 0), (False, 2)):
        book = Book()
        source = BlockSource(book, FINGERPRINTS, tells_again=tells_again)
        apply(source, stored(1, IDS[:32]), stored(1, IDS[:32]), BlocksRemoved((1, 2)))
        assert len(book.table) == left
        source.use(FINGERPRINTS._replace(key=b"x" * 32))
        apply(source)
        assert len(book.table) == left
