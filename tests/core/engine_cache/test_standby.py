"""A standby's copy: kept up with changes it equals what the reader holds, at every message at which it stands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache import journal as journals
from ranvier_py.core.engine_cache import standby
from ranvier_py.core.engine_cache.journal import CHANGES, ChangesWriter, Journal
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.snapshot import (
    CHUNK_BLOCKS,
    NO_PLACE,
    BadSnapshot,
    BlockRows,
    Original,
    Place,
    Writer,
)
from ranvier_py.core.engine_cache.sources.event_values import (
    HELD_TIERS,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    Event,
    Tier,
)
from ranvier_py.core.engine_cache.standby import Building, Incoming, StandbyCopy
from tests.core.engine_cache.model import SIZE, Model, hasher
from tests.core.engine_cache.test_residency import TEXT, removed, residency, stored
from tests.core.engine_cache.test_residency_properties import actions, event_of, family
from tests.core.engine_cache.test_snapshot import is_whole


class Read:
    """A residency that somebody reads, with the journal that a standby makes it keep."""

    def __init__(self) -> None:
        self.held = residency()
        self.seq = -1
        self.journal = Journal(-1, 0)

    def apply(self, *events: Event) -> None:
        """One message."""
        self.seq += 1
        for event in events:
            self.held.apply(event)
            if isinstance(event, CacheCleared):
                self.journal = Journal(self.seq, self.held.counts.resolved_late)
            else:
                self.journal.add(self.seq, event.hashes)

    def place(self) -> Place:
        return Place(self.seq, self.seq + 1000)

    def original(self, since: Place | None) -> Original:
        """As EventStream has it."""
        names = self.journal.since(since.seq) if since not in (None, NO_PLACE) else None  # type: ignore[union-attr]
        writer = ChangesWriter(self.held, hasher(), names) if names is not None else Writer(self.held, hasher())
        return Original(*self.place(), writer)

    def told(self, copy: StandbyCopy) -> StandbyCopy:
        """The copy after one more transfer: of what changed, if that is known."""
        incoming = Incoming(copy)
        writer = self.original(copy.place).writer
        while not writer.done:
            assert not writer.broken
            writer.step()
        for rows in writer.chunks:
            incoming.add(rows)
        copy = incoming.finish(self.place())
        while copy.is_behind:
            copy.step()
        return copy


def built(copy: StandbyCopy) -> Residency:
    building = Building(copy, hasher())
    while not building.done:
        building.step()
    assert building.copy is not None
    held = residency()
    held.install(building.copy.state)
    return held


def assert_equal(one: Residency, other: Residency) -> None:
    for held in (one, other):
        while not held.settle().complete:
            pass
    for tier in HELD_TIERS:
        assert one.copies(tier) == other.copies(tier)
    assert one.tiers() == other.tiers()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.sampled_from([5, 16, 24, 32]), st.lists(actions, min_size=2, max_size=4))
def test_a_copy_kept_up_with_changes_is_what_the_reader_holds(
    seed: int, width: int, rounds: list[list[tuple[str, int]]]
) -> None:
    """Whatever came, went and came again between two transfers, under whatever parents."""
    blocks, model, read = family(seed, width, 8), Model(), Read()
    copy = StandbyCopy(SIZE)
    for todo in rounds:
        for action, number in todo:
            event = event_of(action, number, blocks, model, width)
            if event is None or (isinstance(event, BlocksStored) and not is_whole(event, read.held._index.blocks)):
                continue
            model.apply(event)
            read.apply(event)
        copy = read.told(copy)
        assert copy.place == read.place()
        assert_equal(built(copy), read.held)


def test_changes_travel_and_not_all_that_is_held() -> None:
    read = Read()
    for number in range(0, 4 * CHUNK_BLOCKS, 64):
        read.apply(stored(range(number + 1, number + 65), [number] * 1024))
    copy = read.told(StandbyCopy(SIZE))
    assert len(copy) == 4 * CHUNK_BLOCKS
    read.apply(stored([5001], TEXT[:16], parent=64), removed(1))
    writer = ChangesWriter(read.held, hasher(), read.journal.since(copy.place.seq) or {})  # type: ignore[union-attr]
    (rows,) = writer.chunks
    assert writer.done
    assert len(rows.kinds) == 4, "the new block, its parent's name, the stem, the block that lost its copy"
    assert read.held.frozen == 0


def test_many_changes_are_written_by_and_by_while_the_residency_stays_as_it_is() -> None:
    read = Read()
    copy = read.told(StandbyCopy(SIZE))
    for number in range(0, 6 * CHUNK_BLOCKS, 64):
        read.apply(stored(range(number + 1, number + 65), [number] * 1024))
    writer = ChangesWriter(read.held, hasher(), read.journal.since(copy.place.seq) or {})  # type: ignore[union-attr]
    assert not writer.done
    assert read.held.frozen
    place = read.place()
    read.apply(removed(1))
    incoming = Incoming(copy)
    while not writer.done:
        writer.step()
    for rows in writer.chunks:
        incoming.add(rows)
    copy = incoming.finish(place)
    while copy.is_behind:
        copy.step()
    assert built(copy).copies(Tier.GPU)[1] == 1
    read.held.catch_up()
    assert_equal(built(read.told(copy)), read.held)


def test_a_journal_that_was_too_long_makes_the_next_transfer_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "NAMES_MAX", 10)
    read = Read()
    read.apply(stored([1], TEXT[:16]))
    copy = read.told(StandbyCopy(SIZE))
    for number in range(12):
        read.apply(stored([number + 2], TEXT[16 * number + 16 : 16 * number + 32], parent=number + 1))
    assert read.journal.since(0) is None
    assert read.journal.since(11) is not None
    other = read.told(copy)
    assert other is not copy
    assert_equal(built(other), read.held)


def test_rows_without_copies_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that went before its child is forgotten with it at the reader, who does not say so."""
    monkeypatch.setattr(standby, "EMPTY_ROWS", 4)
    read, copy = Read(), StandbyCopy(SIZE)
    for number in range(40):
        first = 10 * number + 1
        read.apply(stored([first, first + 1], [number] * 32))
        copy = read.told(copy)
        read.apply(removed(first))
        copy = read.told(copy)
        read.apply(removed(first + 1))
        copy = read.told(copy)
    assert len(copy) <= 8
    assert_equal(built(copy), read.held)


def changed(rows: BlockRows, **columns: bytes) -> BlockRows:
    return rows._replace(**columns)


def test_rows_that_contradict_what_is_known_break_the_copy() -> None:
    read = Read()
    read.apply(stored([1, 2], TEXT[:32]))
    copy = read.told(StandbyCopy(SIZE))
    read.apply(stored([3], TEXT[32:48], parent=2))
    (rows,) = ChangesWriter(read.held, hasher(), {3: None}).chunks
    stranger = StandbyCopy(SIZE)
    stranger.stand(Place(0, 0))
    stranger.come([rows], Place(1, 1))
    with pytest.raises(BadSnapshot):
        stranger.step()
    for wrong in (changed(rows, kinds=b"\x07\x01"), changed(rows, names=b""), changed(rows, above=b"\xff" * 8)):
        copy.come([wrong], Place(1, 1))
        with pytest.raises(BadSnapshot):
            copy.step()
        copy = Read.told(read, StandbyCopy(SIZE))


def test_changes_are_no_use_to_who_has_no_copy() -> None:
    read = Read()
    read.apply(stored([1], TEXT[:16]))
    (rows,) = ChangesWriter(read.held, hasher(), {1: None}).chunks
    assert rows.group & CHANGES
    with pytest.raises(BadSnapshot):
        Incoming(StandbyCopy(SIZE)).add(rows)


def test_a_copy_has_a_bound() -> None:
    read = Read()
    read.apply(stored(range(1, 9), TEXT[:128]))
    writer = Writer(read.held, hasher())
    writer.step()
    with pytest.raises(BadSnapshot, match="room"):
        Incoming(StandbyCopy(SIZE, rows_max=7)).add(writer.chunks[0])


def test_what_came_is_completed_before_it_is_built() -> None:
    """The reader may die while what it said last is still being applied."""
    read = Read()
    copy = read.told(StandbyCopy(SIZE))
    read.apply(stored(range(1, 2 * CHUNK_BLOCKS + 1), [7] * (SIZE * 2 * CHUNK_BLOCKS)))
    incoming = Incoming(copy)
    for rows in ChangesWriter(read.held, hasher(), read.journal.since(-1) or {}).chunks:
        incoming.add(rows)
    copy = incoming.finish(read.place())
    assert copy.is_behind
    assert_equal(built(copy), read.held)


def test_what_the_reader_forgets_without_a_word_is_not_built() -> None:
    """A block without copies goes with the last one below it, and then the one above it: only that is said."""
    read = Read()
    read.apply(stored([1, 2, 3], TEXT[:48]), removed(2))
    read.held.settle()
    copy = read.told(StandbyCopy(SIZE))
    read.apply(removed(3), removed(1))
    read.held.settle()
    copy = read.told(copy)
    assert list(copy.rows) == [2]
    assert_equal(built(copy), read.held)
    read.apply(stored([1], TEXT[:16]))
    assert_equal(built(read.told(copy)), read.held)


def test_nothing_of_a_removal_that_nobody_stored() -> None:
    read = Read()
    copy = read.told(StandbyCopy(SIZE))
    read.apply(BlocksRemoved(hashes=(9,)), stored([1, 2], TEXT[:32]), removed(2), stored([2], TEXT[16:32], parent=1))
    assert_equal(built(read.told(copy)), read.held)
