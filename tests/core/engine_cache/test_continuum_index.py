"""Continuum's tier 4: events, index and scores. Names begin with the criterion (CR) or the resolution (CX)."""

from __future__ import annotations

import time
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.prefix_index.prefix_index import IndexEvent, IndexSettings, KvIndex, Verb
from ranvier_py.core.engine_cache.sources.server_events import EVENT_BYTES_MAX, EventReader, TooLong
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.routing.placement import Holder, Match
from ranvier_py.core.routing.placement.kv_score import KvScore
from tests.core.routing.hostile_bodies import filled
from tests.core.routing.placement.engines import Engine
from tests.examples import examples
from tests.node.turns import OCCUPIED_S_MAX, least_s

A, B = BackendId(0), BackendId(1)
OFFLOADING = IndexSettings(offloading=True)


def created(prefix: str, tokens: int | None = 64) -> IndexEvent:
    return IndexEvent(Verb.CREATED, prefix, tokens)


def read(data: bytes, piece: int = 1 << 20) -> list[IndexEvent]:
    reader = EventReader()
    found = [event for at in range(0, len(data), piece) for event in reader.feed(data[at : at + piece])]
    return [event for event in found if event is not None]


# --- CR15: the stream -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(Verb))
def test_cr15_each_of_the_five_kinds_is_read(kind: Verb) -> None:
    data = b'event: %b\ndata: {"prefix_hash":"ab01","token_count":2048}\n\n' % kind.value.encode()
    assert read(data) == [IndexEvent(kind, "ab01", 2048)]


def test_cr15_the_event_field_beats_the_member_of_the_json() -> None:
    data = b'event: cache_created\ndata: {"event":"cache_purged","prefix_hash":"ab"}\n\n'
    assert read(data) == [IndexEvent(Verb.CREATED, "ab", None)]


def test_cr15_the_member_of_the_json_counts_where_there_is_no_event_field() -> None:
    assert read(b'data: {"event":"cache_evicted","prefix_hash":"0xAB"}\n\n') == [IndexEvent(Verb.EVICTED, "ab", None)]


SLOW = {
    "lists": filled(b'data: {"prefix_hash":"ab","x":[', b"[],", b"[]]}", EVENT_BYTES_MAX - 100),
    "objects": filled(b'data: {"prefix_hash":"ab","x":[', b"{},", b"{}]}", EVENT_BYTES_MAX - 100),
    "lines of data": filled(b"", b"data:\n", b"", EVENT_BYTES_MAX - 100),
    "unknown lines": filled(b"", b"x\n", b"", EVENT_BYTES_MAX - 100),
    "carriage returns": filled(b"", b"data: x\r", b"", EVENT_BYTES_MAX - 100),
    "comments": filled(b"x\n", b":\n", b"", EVENT_BYTES_MAX - 100),
}


@pytest.mark.parametrize("name", SLOW)
def test_an_event_that_is_made_to_take_long_is_dropped_at_once(name: str) -> None:
    def took_s() -> float:
        reader = EventReader()
        assert not list(reader.feed(SLOW[name]))
        began = time.thread_time()
        assert list(reader.feed(b"\n\n")) == [None]
        return time.thread_time() - began

    assert least_s(took_s) <= OCCUPIED_S_MAX


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("piece", [1, 2, 3, 7, 4096])
def test_cr15_a_stream_is_the_same_in_whatever_pieces_it_comes(end: bytes, piece: int) -> None:
    lines = [
        b"\xef\xbb\xbf: welcome",
        b"",
        b"id: 7",
        b"event: cache_created",
        b'data: {"prefix_hash":"a1",',
        b'data:"token_count":3}',
        b"",
        b"data: not json",
        b"",
        b'data: {"event":"cache_purged","prefix_hash":"a1"}',
        b"",
        b"retry: 1",
        b"",
    ]
    assert read(end.join(lines) + end, piece) == [IndexEvent(Verb.CREATED, "a1", 3), IndexEvent(Verb.PURGED, "a1")]


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"{",
        b'{"event":"cache_created"}',
        b'{"event":"cache_created","prefix_hash":7}',
        b'{"event":"cache_created","prefix_hash":"no hex"}',
        b'{"event":"cache_created","prefix_hash":"ab","token_count":-1}',
        b'{"event":"cache_created","prefix_hash":"ab","token_count":1.5}',
        b'{"event":"cache_painted","prefix_hash":"ab"}',
        b'{"event":["cache_created"],"prefix_hash":"ab"}',
    ],
)
def test_cr33_an_event_that_cannot_be_read_is_none_and_the_next_one_is_read(data: bytes) -> None:
    reader = EventReader()
    events = list(reader.feed(b"data: %b\n\n" % data + b'data: {"event":"cache_created","prefix_hash":"ab"}\n\n'))
    assert events == [None, IndexEvent(Verb.CREATED, "ab", None)]


@pytest.mark.slow
@pytest.mark.parametrize("head", [b"data: ", b"", b": "])
def test_cr15_an_event_of_more_than_a_mebibyte_ends_the_stream(head: bytes) -> None:
    line = head + b"x" * 1000 + (b"\n" if head == b"data: " else b"")
    with pytest.raises(TooLong):
        read(line * (EVENT_BYTES_MAX // 1000 + 2), piece=len(line))


@settings(max_examples=examples(100))
@given(st.lists(st.binary(max_size=60), max_size=20))
def test_cr33_no_bytes_harm_the_reader(pieces: list[bytes]) -> None:
    reader = EventReader()
    for piece in pieces:
        list(reader.feed(piece))
    assert list(reader.feed(b'\n\ndata: {"event":"cache_created","prefix_hash":"ab"}\n\n'))[-1:] == [
        IndexEvent(Verb.CREATED, "ab", None)
    ]


# --- CR16: the index ------------------------------------------------------------------------------------------------


def test_cr16_a_prefix_has_each_backend_with_its_own_count() -> None:
    index = KvIndex()
    index.apply(A, created("aa", 2048), 0.0)
    index.apply(B, created("aa", 512), 0.0)
    assert {backend: entry.tokens for backend, entry in index.holders("aa", 1.0).items()} == {A: 2048, B: 512}
    assert (len(index), index.prefixes, index.counters.hits) == (2, 1, 1)
    assert index.holders("bb", 1.0) == {}


def test_cr16_the_defaults_and_ranges_are_the_documents() -> None:
    assert IndexSettings().entries_max == 100_000
    assert IndexSettings().ttl_s == 600.0  # CX1
    for bad in ({"entries_max": 99}, {"entries_max": 10_000_001}, {"ttl_s": 0.5}, {"ttl_s": 86_401.0}):
        with pytest.raises(ConfigError, match="must be"):
            IndexSettings(**bad)  # type: ignore[arg-type]


def test_cr16_at_the_bound_the_oldest_tenth_goes() -> None:
    index = KvIndex(IndexSettings(entries_max=100))
    for number in range(100):  # of pairs of prefix and backend (CX24)
        index.apply((A, B)[number % 2], created(f"{number // 2:02x}"), float(number))
    index.apply(A, created("00"), 100.0)  # the oldest is young again
    index.apply(A, created("ff"), 101.0)
    assert len(index) == 91
    assert set(index.holders("00", 101.0)) == {A}
    assert not index.holders("04", 101.0)
    assert set(index.holders("05", 101.0)) == {B}
    assert index.counters.evictions == 10


def test_cr16_an_entry_expires_when_asked_for_and_by_and_by() -> None:
    index = KvIndex(IndexSettings(ttl_s=10.0))
    index.apply(A, created("aa"), 0.0)
    index.apply(A, created("bb"), 5.0)
    assert index.holders("aa", 9.9)
    assert not index.holders("aa", 10.0)
    assert len(index) == 1
    assert index.expire(14.9) == 0
    assert index.expire(15.0) == 1
    assert (len(index), index.prefixes) == (0, 0)


def test_cx23_an_event_without_a_count_keeps_the_one_that_is_known_and_else_is_worth_nothing() -> None:
    index = KvIndex()
    index.apply(A, created("aa", 128), 0.0)
    index.apply(A, IndexEvent(Verb.RELOADED, "aa"), 1.0)
    index.apply(A, created("bb", None), 1.0)
    assert index.holders("aa", 1.0)[A].tokens == 128
    assert index.holders("bb", 1.0)[A].tokens == 0


def test_cr28_clearing_returns_how_many_entries_there_were() -> None:
    index = KvIndex()
    for number in range(5):
        index.apply(A, created(f"{number:02x}"), 0.0)
        index.apply(B, created(f"{number:02x}"), 0.0)
    assert index.clear() == 10  # CX15: not the number of backends
    assert len(index) == 0


def test_cx18_what_a_backend_held_is_forgotten_alone() -> None:
    index = KvIndex()
    index.apply(A, created("aa"), 0.0)
    index.apply(B, created("aa"), 0.0)
    assert index.forget((A,)) == 1
    assert set(index.holders("aa", 0.0)) == {B}


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(list(Verb)), st.integers(0, 150), st.integers(1, 9)), max_size=300
    )
)
def test_cr16_both_directions_of_the_index_agree_whatever_comes(events: list[tuple[int, Verb, int, int]]) -> None:
    index = KvIndex(IndexSettings(entries_max=100, offloading=True))
    model: dict[tuple[str, int], bool] = {}
    for at, (backend, kind, number, tokens) in enumerate(events):
        name = f"{number:02x}"
        index.apply(BackendId(backend), IndexEvent(kind, name, tokens), float(at) / 1000)
        if kind is Verb.PURGED:
            model.pop((name, backend), None)
        elif kind is not Verb.EVICTED:
            model[name, backend] = True
        assert len(index) <= 100
    held = {(f"{n:02x}", int(b)) for n in range(151) for b in index.holders(f"{n:02x}", 1.0)}
    assert len(held) == len(index)
    assert held <= set(model)
    if len(model) <= 100 and index.counters.evictions == 0:
        assert held == set(model)


# --- CR17: tiers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings_", "kind", "reload"),
    [
        (OFFLOADING, Verb.CREATED, False),
        (OFFLOADING, Verb.OFFLOADED, True),
        (OFFLOADING, Verb.RELOADED, False),
        (OFFLOADING, Verb.EVICTED, True),
        (IndexSettings(offloading=True, eviction_is_offload=False), Verb.EVICTED, None),
        (IndexSettings(), Verb.EVICTED, None),  # CX22: no credit for what nobody offloads
        (OFFLOADING, Verb.PURGED, None),
    ],
)
def test_cr17_an_event_moves_a_prefix_to_its_tier(settings_: IndexSettings, kind: Verb, reload: bool | None) -> None:
    index = KvIndex(settings_)
    index.apply(A, created("aa", 32), 0.0)
    index.apply(A, IndexEvent(kind, "aa"), 1.0)
    found = index.holders("aa", 1.0).get(A)
    assert (found.reload if found else None) is reload
    if found:
        assert found.tokens == 32


# --- CR18: scores ---------------------------------------------------------------------------------------------------


def filled(*entries: tuple[BackendId, IndexEvent], settings_: IndexSettings = OFFLOADING) -> KvIndex:
    index = KvIndex(settings_)
    for backend, event in entries:
        index.apply(backend, event, 0.0)
    return index


def asked(policy: KvScore, engines: tuple[Engine, ...], opening: bytes = b"\xaa", tokens: int = 1000) -> object:
    match = Match((), tokens, Fingerprint(7), opening=opening, at=1.0)
    return policy.choose(match, engines, Random(1))


def engines(*loads: int) -> tuple[Engine, ...]:
    return tuple(Engine(BackendId(number), f"e{number}", load=load) for number, load in enumerate(loads))


def test_cr18_the_backend_with_the_warmer_prefix_is_chosen_with_the_tokens_that_it_holds() -> None:
    policy = KvScore()
    policy.index = filled((A, created("aa", 400)), (B, created("aa", 900)))
    choice = asked(policy, engines(1, 1))
    assert (choice.backend, choice.reason, choice.tokens) == (B, "kv_aware", 900)  # type: ignore[attr-defined]


def test_cr21_routes_and_index_add_to_each_other() -> None:
    """The index knows openings; the route table knows this very conversation."""
    policy = KvScore()
    policy.index = filled((A, created("aa", 400)), (A, IndexEvent(Verb.OFFLOADED, "aa")))
    match = Match((Holder(B, 800, 2),), 1000, Fingerprint(7), opening=b"\xaa", at=1.0)
    assert policy.overlaps(match, policy.warm(match)) == {A: pytest.approx(0.6 * 0.4), B: 0.8}


def test_cx28_an_eviction_is_seen_at_once() -> None:
    index = filled((A, created("aa")))
    assert index.holders("aa", 1.0)
    index.apply(A, IndexEvent(Verb.PURGED, "aa"), 1.0)
    assert not index.holders("aa", 1.0)
