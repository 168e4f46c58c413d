"""A residency against brute force, and against the block table of a cache that evicts as vLLM does."""

from __future__ import annotations

import random
from array import array

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.sources.event_values import (
    ARRAY_FIELDS,
    HELD_TIERS,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineHash,
    Event,
    Tier,
    TierCleared,
)
from ranvier_py.core.engine_cache.sources.events import EventDecoder
from ranvier_py.replay.engine import block_cache
from ranvier_py.replay.engine.block_cache import BlockCache, Job
from tests.core.engine_cache.model import SIZE, Listener, Model, fingerprint, hasher, namespace_of
from tests.examples import examples

MEDIUM = {Tier.GPU: None, Tier.CPU: "CPU", Tier.DISK: "DISK", Tier.EXTERNAL: "OBJ"}


def family(seed: int, width: int, count: int) -> list[tuple[EngineHash, EngineHash | None, list[int], str | None]]:
    """Blocks of prompts that share beginnings: key, parent, tokens, salt."""
    rng = random.Random(seed)
    blocks: list[tuple[EngineHash, EngineHash | None, list[int], str | None]] = []
    for number in range(count):
        parent = rng.choice([None, *(block for block in blocks)]) if blocks else None
        tokens = [rng.randrange(2) for _ in range(width)]
        if width > SIZE:
            tokens[:SIZE] = [0] * SIZE  # so that blocks share prefixes of ours
        key: EngineHash = number + 1 if number % 2 else b"%d" % number
        blocks.append((key, parent[0] if parent else None, tokens, parent[3] if parent else rng.choice([None, "s"])))
    return blocks


ACTIONS = ["store", "store", "run", "remove", "tier", "empty", "clear", "settle"]

actions = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2**16)), min_size=20, max_size=80)


@settings(max_examples=examples(60))
@given(st.integers(0, 999), st.sampled_from([1, 5, 15, 16, 17, 24, 32, 64]), actions)
def test_what_is_reported_is_what_a_walk_over_all_blocks_finds(
    seed: int, width: int, todo: list[tuple[str, int]]
) -> None:
    """Any order of events: children before parents, beginnings removed before ends, copies on several tiers."""
    blocks = family(seed, width, 8)
    model, residency = Model(), Residency(hasher(), namespace_of)
    listener = Listener(residency)
    for action, number in todo:
        event = event_of(action, number, blocks, model, width)
        if event is None:
            listener.receive(steps_max=1 + number % 4)
            continue
        model.apply(event)
        residency.apply(event)
    listener.receive_all(steps_max=3)
    assert listener.tiers == model.tiers() == residency.tiers()
    for tier in HELD_TIERS:
        assert residency.copies(tier) == model.block_table(tier)
    assert listener.tokens.keys() >= listener.tiers.keys()
    assert all(listener.parents[name] in (0, *listener.tiers) for name in listener.tiers), (
        "a prefix without its shorter"
    )
    forget_all(model, residency)
    listener.receive_all()
    assert (residency.view().entries, residency.view().orphaned, listener.tiers) == (0, 0, {})


def event_of(action: str, number: int, blocks: list, model: Model, width: int) -> Event | None:  # type: ignore[type-arg]
    key, parent, tokens, salt = blocks[number % len(blocks)]
    tier = HELD_TIERS[number // 16 % 4]
    if action == "store":
        data = array("I", tokens).tobytes()
        return BlocksStored(hashes=(key,), parent=parent, token_bytes=data, block_tokens=width, salt=salt)
    if action == "run":  # the block and the one before it
        above = next((block for block in blocks if block[0] == parent), None)
        if above is None:
            return None
        data = array("I", above[2] + tokens).tobytes()
        event = BlocksStored((parent, key), above[1], data, width, salt=salt, medium=MEDIUM[tier])
        return event._replace(extra_keys=((), ()))  # its start is told, on whichever tier
    if action == "tier":  # copied to another tier: without tokens, while the block is there
        if not any(model.copies.get((key, each)) for each in HELD_TIERS):
            return None
        return BlocksStored(hashes=(key,), parent=parent, salt=salt, medium=MEDIUM[tier])
    if action == "remove":
        at = [each for each in HELD_TIERS if model.copies.get((key, each))] or [tier]
        return BlocksRemoved(hashes=(key,), medium=MEDIUM[at[number // 16 % len(at)]])
    if action == "empty":
        return TierCleared(tier)
    return CacheCleared() if action == "clear" and number % 8 == 0 else None


def forget_all(model: Model, residency: Residency) -> None:
    for (key, tier), count in model.copies.items():
        for _ in range(count):
            residency.apply(BlocksRemoved(hashes=(key,), medium=MEDIUM[tier]))


hostile_events = st.one_of(
    st.builds(
        BlocksStored,
        hashes=st.lists(st.integers(0, 6), max_size=4).map(tuple),
        parent=st.none() | st.integers(0, 6),
        token_bytes=st.sampled_from([0, 16, 32, 48, 64]).map(lambda count: bytes(4 * count)),
        block_tokens=st.sampled_from([0, 8, 16, 32]),
        media=st.booleans(),
        group=st.integers(0, 1),
        medium=st.sampled_from([None, "CPU"]),
        salt=st.sampled_from([None, "s"]),
    ),
    st.builds(BlocksRemoved, hashes=st.lists(st.integers(0, 6), max_size=5).map(tuple)),
    st.builds(BlocksRemoved, hashes=st.lists(st.integers(0, 6), max_size=5).map(tuple), medium=st.just("CPU")),
)


@settings(max_examples=examples(40))
@given(st.lists(hostile_events, max_size=40), st.integers(1, 30), st.integers(0, 12))
def test_contradictions_and_rings_keep_the_bounds(events: list[Event], entries_max: int, orphaned_max: int) -> None:
    residency = Residency(hasher(), namespace_of, entries_max=entries_max, orphaned_max=orphaned_max)
    listener = Listener(residency)
    for event in events:
        residency.apply(event)
        listener.receive(steps_max=2)
        view = residency.view()
        assert view.entries <= entries_max
        assert view.prefixes <= entries_max
    listener.receive_all()
    assert listener.tiers == residency.tiers()
    for key in range(7):
        for medium in (None, "CPU"):
            residency.apply(BlocksRemoved(hashes=(key,) * 160, medium=medium))
    listener.receive_all()
    assert listener.tiers == {}


def over_the_wire(events: list[block_cache.CacheEvent], width: int, rng: random.Random) -> list[Event]:
    """One message of an engine, each event in either encoding."""
    written: list[object] = []
    for event in events:
        if isinstance(event, block_cache.KeysStored):
            fields = [event.keys, event.parent or None, event.ids.tolist(), width]
            names = ARRAY_FIELDS["BlockStored"][:4]
            tag = "BlockStored"
        elif isinstance(event, block_cache.KeyRemoved):
            fields, names, tag = [[event.key]], ("block_hashes",), "BlockRemoved"
        else:
            fields, names, tag = [], (), "AllBlocksCleared"
        is_map = rng.random() < 0.5
        written.append({"type": tag, **dict(zip(names, fields, strict=True))} if is_map else [tag, *fields])
    decoder = EventDecoder()
    batch = decoder.decode(msgpack.packb([0.0, written, 0]))
    assert decoder.counters.unread == decoder.counters.tags_skipped == decoder.counters.fields_skipped == 0
    return list(batch.events)


def translated(event: block_cache.CacheEvent, width: int) -> Event:
    if isinstance(event, block_cache.KeysStored):
        data = event.ids.astype(np.uint32).tobytes()
        return BlocksStored(hashes=event.keys, parent=event.parent or None, token_bytes=data, block_tokens=width)
    if isinstance(event, block_cache.KeyRemoved):
        return BlocksRemoved(hashes=(event.key,))
    return CacheCleared()


@pytest.mark.parametrize(("width", "capacity", "seed"), [(16, 60, 1), (16, 200, 2), (32, 40, 3), (24, 50, 4)])
def test_the_block_table_of_a_cache_that_evicts_is_known_exactly(width: int, capacity: int, seed: int) -> None:
    """Chats that grow, run at once, compute the same block twice, and are evicted by others; at times a clearance."""
    rng = random.Random(seed)
    cache = BlockCache(capacity, width, events_max=100_000)
    residency = Residency(hasher(), namespace_of)
    listener = Listener(residency)
    chats = [[rng.randrange(9) for _ in range(rng.randrange(20, 90))] for _ in range(12)]
    running: list[tuple[block_cache.Lease, int]] = []
    evicted = doubled = 0
    for step in range(300):
        chat = chats[rng.randrange(len(chats))]
        if len(chat) > width * capacity // 4:
            del chat[rng.randrange(10, len(chat)) :]
        chat.extend(rng.randrange(9) for _ in range(rng.randrange(30)))
        lease = cache.lease(Job.of(chat, [1] * rng.randrange(1, 40), width))
        if lease is not None:
            running.append((lease, lease.hits * width))
        running = [advance(cache, lease, done, rng) for lease, done in running]
        for lease, done in running:
            if done == lease.job.tokens_computed:
                cache.release(lease)
        running = [(lease, done) for lease, done in running if done < lease.job.tokens_computed]
        if rng.random() < 0.005:
            cache.clear()
        events = cache.drain_events()
        received = over_the_wire(events, width, rng) if step % 2 else [translated(event, width) for event in events]
        for event in received:
            residency.apply(event)
        doubled = max(doubled, *residency.copies(Tier.GPU).values(), 0)
        listener.receive(steps_max=10)
        if step % 20 == 0:
            listener.receive_all()
            compare(cache, residency, listener, chats, width)
        evicted = cache.evicted_blocks
    assert evicted > 2 * capacity, "nothing was tested"
    assert doubled > 1, "no block was computed twice"
    assert residency.counters.removed_unknown == residency.counters.contradicted == cache.events_lost == 0


def advance(
    cache: BlockCache, lease: block_cache.Lease, done: int, rng: random.Random
) -> tuple[block_cache.Lease, int]:
    done = min(lease.job.tokens_computed, done + rng.randrange(1, 100))
    cache.grow(lease, done)
    return lease, done


def compare(cache: BlockCache, residency: Residency, listener: Listener, chats: list[list[int]], width: int) -> None:
    table = {key: 1 + len(cache._copies.get(key, ())) for key in cache._by_key}
    assert residency.copies(Tier.GPU) == table
    assert listener.tiers == residency.tiers()
    for chat in chats:
        blocks = cache.hit_blocks(Job.of([*chat, 0], [0], width))
        whole = blocks * width // SIZE * SIZE
        assert not whole or listener.tiers[fingerprint(chat[:whole])] is Tier.GPU
        names = [fingerprint(chat[:depth]) for depth in range(SIZE, len(chat) + 1, SIZE)]
        held = [listener.tiers.get(name) is Tier.GPU for name in names]
        assert held == sorted(held, reverse=True), "a longer prefix is held and a shorter one is not"
        if width == SIZE:
            assert sum(held) == blocks
