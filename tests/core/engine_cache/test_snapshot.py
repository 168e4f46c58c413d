"""A copy of what an engine holds: equal to it, hashed on from as it would be, and without a token id."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.blocks import Block
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.residency_values import Lack, Scope, SnapshotState
from ranvier_py.core.engine_cache.snapshot import CHUNK_BLOCKS, BadSnapshot, BlockRows, SnapshotReader, SnapshotWriter
from ranvier_py.core.engine_cache.sources.event_values import (
    HELD_TIERS,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineHash,
    Tier,
)
from tests.core.engine_cache.model import SIZE, Listener, Model, fingerprint, hasher
from tests.core.engine_cache.test_residency import TEXT, depths, removed, residency, stored
from tests.core.engine_cache.test_residency_properties import actions, event_of, family
from tests.examples import examples


def chunks_of(held: Residency) -> list[BlockRows]:
    writer = SnapshotWriter(held, hasher(), 7, 77)
    while not writer.done:
        assert not writer.broken
        writer.step()
    return writer.chunks


def read(chunks: list[BlockRows], **bounds: int) -> SnapshotState:
    reader = SnapshotReader(hasher(), **bounds)
    for rows in chunks:
        reader.add(rows)
    return reader.finish()


def copied(held: Residency) -> Residency:
    other = residency()
    other.install(read(chunks_of(held)))
    return other


@settings(max_examples=examples(40))
@given(st.integers(0, 999), st.sampled_from([1, 5, 16, 24, 32]), actions, actions)
def test_a_copy_is_equal_and_goes_on_as_the_original_does(
    seed: int, width: int, before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    """Whatever the engine's block size: also where its blocks end inside ours, and no token of them is there."""
    blocks, model, original = family(seed, width, 8), Model(), residency()

    def happen(todo: list[tuple[str, int]], *held: Residency) -> None:
        for action, number in todo:
            event = event_of(action, number, blocks, model, width)
            known = original._index.blocks
            if event is None or (isinstance(event, BlocksStored) and not is_whole(event, known)):
                continue
            model.apply(event)
            for each in held:
                each.apply(event)
                each.catch_up()

    happen(before, original)
    copy = copied(original)
    listener = Listener(copy)
    happen(after, original, copy)
    Listener(original).receive_all()
    listener.receive_all(steps_max=3)
    for tier in HELD_TIERS:
        assert copy.copies(tier) == original.copies(tier)
    assert copy.tiers() == original.tiers() == model.tiers() == listener.tiers


def is_whole(event: BlocksStored, known: dict[EngineHash, Block]) -> bool:
    """A copy is of an engine at EXACT: all its blocks have their parents and their tokens."""
    parent = event.parent is None or event.parent in known
    return parent and (bool(event.token_bytes) or all(key in known for key in event.hashes))


def test_what_is_stored_below_a_copy_has_its_fingerprint() -> None:
    """In the middle of a block of ours, too."""
    held = residency()
    held.apply(stored([1, 2, 3], TEXT[:72], width=24, salt="s"))
    copy = copied(held)
    held.settle()
    copy.settle()
    for each in (held, copy):
        each.apply(stored([4, 5], TEXT[72:120], width=24, parent=3))
    changes = held.settle().changes
    assert copy.settle().changes == changes, "with the same shorter prefixes"
    assert len(changes) == 3
    assert len(copy.tiers()) == 7
    assert copy.tiers() == held.tiers()


def test_an_adapter_and_a_salt_find_their_root_again() -> None:
    held = residency()
    held.apply(stored([1], TEXT[:16], salt="s"))
    copy = copied(held)
    copy.apply(stored([1], TEXT[:16], salt="s"))
    copy.apply(stored([2], TEXT[16:32], parent=1))
    assert depths(copy, TEXT, scope=Scope(None, None, "s")) == [16, 32]
    assert copy.counters.contradicted == 0


def test_taking_a_copy_reports_what_is_otherwise_and_nothing_else() -> None:
    full, partial = residency(), residency()
    full.apply(stored([1, 2, 3], TEXT[:48]))
    partial.apply(stored([2], TEXT[16:32], parent=1))
    partial.apply(stored([7], TEXT[100:116]))
    partial.apply(stored([1], TEXT[:16]))
    partial.settle()
    partial.install(read(chunks_of(full)))
    changes = {change.fingerprint: change.tier for change in partial.settle().changes}
    assert changes == {fingerprint(TEXT[100:116]): Tier.ABSENT, fingerprint(TEXT[:48]): Tier.GPU}
    assert partial.tiers() == full.tiers() or full.settle().complete
    partial.apply(removed(3))
    assert [change.tier for change in partial.settle().changes] == [Tier.ABSENT]


def test_a_copy_that_is_taken_before_the_last_changes_were_reported_reports_the_sum() -> None:
    full, partial = residency(), residency()
    full.apply(stored([1], TEXT[:16]))
    partial.apply(stored([1], TEXT[:16]))
    partial.apply(stored([9], TEXT[16:32]))
    partial.settle()
    partial.apply(removed(9))
    partial.apply(stored([8], TEXT[32:48]))
    partial._go_on(100)
    partial.install(read(chunks_of(full)))
    assert [change.tier for change in partial.settle().changes] == [Tier.ABSENT]


@pytest.mark.parametrize(("bound", "value"), [("WAITING_MAX", 10), ("WAITING_BYTES_MAX", 10 * 64)])
def test_what_waits_after_a_copy_was_written_has_a_bound_too(
    bound: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may publish faster than what waited is settled, for as long as it likes."""
    monkeypatch.setattr(f"ranvier_py.core.engine_cache.residency.{bound}", value)
    held = residency()
    writer = SnapshotWriter(held, hasher(), 7, 77)
    for key in range(5):
        held.apply(stored([key], [key] * 16))
    writer.step()
    assert writer.done
    for key in range(5, 100):
        held.apply(stored([key], [key] * 16))
        assert len(held.copies(Tier.GPU)) == max(0, key + 1 - 10)
    held.settle()
    assert len(held.copies(Tier.GPU)) == 100


def test_what_is_applied_while_a_copy_is_read_waits_and_is_not_in_it() -> None:
    held = residency()
    held.apply(stored([1], TEXT[:16]))
    writer = SnapshotWriter(held, hasher(), 7, 77)
    held.apply(stored([2], TEXT[16:32], parent=1))
    held.apply(removed(1))
    assert held.settle().complete, "nobody has to ask again while it is frozen"
    writer.step()
    assert writer.done
    assert read(writer.chunks).index.blocks.keys() == {1}
    while not held.settle().complete:
        pass
    assert held.copies(Tier.GPU) == {2: 1}


def test_a_cache_that_is_cleared_meanwhile_breaks_the_copy() -> None:
    held = residency()
    held.apply(stored([1], TEXT[:16]))
    writer = SnapshotWriter(held, hasher(), 7, 77)
    held.apply(CacheCleared())
    writer.step()
    assert writer.broken
    held.apply(stored([2], TEXT[:16]))
    assert depths(held) == [16]


def test_many_blocks_go_in_chunks_and_those_without_a_place_are_left_out() -> None:
    held = residency()
    count = CHUNK_BLOCKS + 100
    for number in range(count):
        held.apply(stored([b"%032d" % number], [number] * 16))
    held.apply(stored([5], TEXT[:16], parent=b"nobody knows"))
    writer = SnapshotWriter(held, hasher(), 7, 77)
    while not writer.done:
        writer.step()
    assert (len(writer.chunks), writer.written, writer.left_out) == (2, count, 2)
    copy = residency()
    copy.install(read(writer.chunks))
    assert copy.view().blocks == count
    assert len(copy.tiers()) == count


def test_no_token_id_is_in_a_copy() -> None:
    """Token ids are searched for in every alignment, in blocks that are multiples of ours and in others."""
    marks = [0x7A000001 + 0x10101 * number for number in range(96)]
    for width in (1, 16, 24):
        held = residency()
        held.apply(stored(list(range(1, 96 // width + 1)), marks, width=width))
        wire = b"".join(b"".join(field for field in rows if isinstance(field, bytes)) for rows in chunks_of(held))
        assert len(wire) > 96 // width * 20
        for mark in marks:
            assert mark.to_bytes(4, "little") not in wire
            assert mark.to_bytes(4, "big") not in wire


def test_equal_tokens_inside_different_blocks_do_not_show() -> None:
    """One token over, of two prompts that differ: their sums are the same, what travels is not."""
    held = residency()
    held.apply(stored([1], [*TEXT[:16], 77], width=17))
    held.apply(stored([2], [*TEXT[100:116], 77], width=17))
    (rows,) = chunks_of(held)
    extras = array("Q", rows.extras)
    assert len(extras) == len(set(extras)) == 2


def bent(rows: BlockRows, seed: int) -> BlockRows:
    name = ("names", "kinds", "above", "widths", "totals", "copies", "extras")[seed % 7]
    column = bytearray(getattr(rows, name))
    if not column or seed % 5 == 0:
        column += b"\x00" * (1 + seed % 9)
    else:
        column[seed // 7 % len(column)] ^= 1 << seed % 8
    return rows._replace(**{name: bytes(column)})


@settings(max_examples=examples(150))
@given(st.integers(0, 2**20))
def test_bent_columns_are_refused_or_make_another_valid_copy(seed: int) -> None:
    held = residency()
    held.apply(stored([1, b"two", 3], TEXT[:51], width=17))
    held.apply(BlocksStored((1, 1, 1), block_tokens=17, medium="CPU"))
    (rows,) = chunks_of(held)
    other = residency()
    try:
        other.install(read([bent(rows, seed)]))
    except BadSnapshot:
        return
    other.apply(BlocksRemoved((1, b"two", 3)))
    Listener(other).receive_all()


def test_more_than_there_is_room_for_is_refused() -> None:
    held = residency()
    held.apply(stored([1, 2, 3], TEXT[:48]))
    with pytest.raises(BadSnapshot):
        read(chunks_of(held), entries_max=4)
    assert len(read(chunks_of(held), entries_max=6).index.blocks) == 3
    assert SIZE == 16


def test_what_a_copy_has_below_the_gpu_makes_room_at_once() -> None:
    """From the ends of prompts on: a block that others continue frees no room."""
    held = residency()
    for first in range(1, 1000, 100):
        keys = tuple(range(first, first + 20))
        held.apply(stored(keys, range(1000 * first, 1000 * first + 320)))
        held.apply(BlocksStored(hashes=keys, parent=9999, medium="CPU"))
        held.apply(removed(*reversed(keys)))
    held.settle()
    other = residency(entries_max=400)
    other.install(read(chunks_of(held)))
    other.settle()
    assert other.view().entries == 400
    other.apply(stored([5000], TEXT[:16]))
    assert depths(other, TEXT[:16]) == [16]
    assert (other.lack, other.counters.refused) == (Lack.NOTHING, 0)
