"""The engine's model: its cache against a brute-force one, its clock against arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ranvier_py.replay.engine.block_cache import BlockCache, Job, KeyRemoved, KeysCleared, KeysStored, Lease, chain_keys
from ranvier_py.replay.engine.engine_values import (
    EngineEvent,
    EngineEventKind,
    EngineLimits,
    PromptTooLongError,
    QueueFullError,
)
from ranvier_py.replay.engine.model import EngineModel
from tests.examples import examples
from tests.replay.engine.naive import served, to_the_end

BLOCK = 4


def job(prompt: Sequence[int], answer: int = 1, block_size: int = BLOCK, salt: bytes = b"") -> Job:
    return Job.of(prompt, [900 + i for i in range(answer)], block_size, salt)


def numbers(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def leased(cache: BlockCache, work: Job) -> Lease:
    lease = cache.lease(work)
    assert lease is not None
    return lease


def times(events: list[EngineEvent], request_id: str, kind: EngineEventKind) -> list[float]:
    return [event.at for event in events if event.request_id == request_id and event.kind is kind]


LIMITS = EngineLimits(
    cache_tokens=400, block_size=BLOCK, prefill_tokens_per_s=100.0, decode_s=0.5, running_max=2, step_tokens_max=50
)


# ---- the cache


def test_a_salt_and_another_parent_keep_equal_tokens_apart() -> None:
    ids = np.arange(8, dtype=np.uint32)
    plain, salted, twice = chain_keys(ids, 4), chain_keys(ids, 4, b"tenant"), chain_keys(np.tile(ids[:4], 2), 4)
    assert not set(plain) & set(salted)
    assert twice[0] == plain[0]
    assert twice[1] != twice[0]
    assert chain_keys(ids[:7], 4) == plain[:1]  # a partial block has no name


def test_a_block_in_use_is_not_evicted_and_a_request_without_room_gets_nothing() -> None:
    cache = BlockCache(6, BLOCK)
    held = leased(cache, job(numbers(16)))
    before = cache.free_blocks
    assert cache.lease(job(numbers(12, 100))) is None
    assert cache.free_blocks == before
    cache.grow(held, 16)
    served(cache, job(numbers(8, 100)))
    assert cache.hit_blocks(job(numbers(17))) == 4
    cache.release(held)
    cache.check()


def test_events_name_parents_and_tokens_and_a_block_computed_twice_is_stored_and_removed_twice() -> None:
    cache = BlockCache(4, BLOCK, events_max=100)
    work = job(numbers(8))
    served(cache, work)
    served(cache, work)  # computes its last block again
    stored = [event for event in cache.drain_events() if isinstance(event, KeysStored)]
    assert [(event.keys, event.parent) for event in stored] == [(work.keys, 0), (work.keys[1:], work.keys[0])]
    assert stored[1].ids.tolist() == [4, 5, 6, 7]
    served(cache, job(numbers(16, 100)))
    removed = [event.key for event in cache.drain_events() if isinstance(event, KeyRemoved)]
    assert sorted(removed) == sorted([work.keys[0], work.keys[1], work.keys[1]])


def test_events_nobody_fetches_are_bounded_and_counted() -> None:
    cache = BlockCache(100, BLOCK, events_max=3)
    for i in range(5):
        served(cache, job(numbers(8, 10 * i)))
    assert len(cache.drain_events()) == 3
    assert cache.events_lost == 2


def test_a_cleared_cache_finds_nothing_and_keeps_the_blocks_of_running_requests() -> None:
    cache = BlockCache(10, BLOCK, events_max=10)
    lease = leased(cache, job(numbers(12)))
    cache.grow(lease, 8)
    cache.clear()
    cache.check()
    assert isinstance(cache.drain_events()[-1], KeysCleared)
    assert cache.hit_blocks(job(numbers(12))) == 0
    cache.grow(lease, 12)
    cache.release(lease)
    cache.check()
    assert cache.free_blocks == 10


def test_who_was_refused_is_let_in_once_the_cache_finds_its_prefix_in_a_copy_that_is_held() -> None:
    """Nothing was released meanwhile: a held block just costs less than a free one."""
    cache = BlockCache(8, BLOCK)
    first, second = leased(cache, job(numbers(8))), leased(cache, job(numbers(8)))
    other = leased(cache, job(numbers(16, 100)))
    for lease, tokens in ((first, 8), (second, 8), (other, 16)):  # two copies of two blocks
        cache.grow(lease, tokens)
    cache.release(first)
    cache.release(other)
    growing = leased(cache, job(numbers(16, 200)))
    wanted = job(numbers(13), answer=3)
    assert cache.lease(wanted) is None
    cache.grow(growing, 8)  # evicts the copies that nobody holds
    lease = leased(cache, wanted)
    assert lease.hits == 2
    cache.check()


def test_how_many_blocks_may_be_taken_before_a_prefix_is_evicted_is_known_beforehand() -> None:
    cache = BlockCache(12, BLOCK)
    old, young = job(numbers(16)), job(numbers(16, 100))
    served(cache, old)
    served(cache, young)
    assert cache.outlives(old, 4, 4)  # four were never used
    assert not cache.outlives(old, 4, 5)
    assert cache.outlives(young, 4, 8)
    assert not cache.outlives(young, 4, 9)
    assert cache.outlives(young, 0, 99)
    leased(cache, job([*numbers(16), 7]))
    assert cache.outlives(old, 4, 7)  # held
    assert cache.outlives(young, 4, 4)
    assert not cache.outlives(young, 4, 5)  # what is held now is passed over
    assert cache.hit_blocks(old) == 3


def test_places_in_the_queue_of_free_blocks_do_not_pile_up() -> None:
    """A prefix that is used again and again leaves a stale place each time."""
    cache = BlockCache(10, BLOCK)
    for _ in range(200):
        served(cache, job(numbers(20)))  # checks the bound
    served(cache, job(numbers(40, 100)))
    assert cache.hit_blocks(job(numbers(20))) == 0


def test_a_prefix_with_a_gap_is_found_up_to_the_gap() -> None:
    """A cache that was cleared under a request holds the deep blocks of a prompt without the first ones."""
    cache = BlockCache(100, BLOCK)
    work = job(numbers(200))
    lease = leased(cache, work)
    cache.grow(lease, 40)
    cache.clear()
    cache.grow(lease, 200)
    assert cache.hit_blocks(work) == 0
    cache.release(lease)
    assert cache.hit_blocks(work) == 0


def test_a_job_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Job.of([], [1])
    with pytest.raises(ValueError, match="at least one"):
        Job.of([1], [])
    with pytest.raises(ValueError, match="at least one"):
        Job.named(0, 1, ())


class NaiveCache:
    """vLLM's queue written down without any cleverness: a list of blocks, the next victim first."""

    def __init__(self, capacity: int) -> None:
        self.queue: list[tuple[int, int]] = [(-1 - i, 0) for i in range(capacity)]  # (block, key)

    def serve(self, work: Job, block_size: int) -> int:
        keys = work.keys[: (work.prompt_tokens - 1) // block_size]
        hits: list[tuple[int, int]] = []
        for key in keys:
            copies = [entry for entry in self.queue if entry[1] == key]
            if not copies:
                break
            # of several copies the one stored first is used
            hits.append(min(copies, key=lambda entry: self.stored_at[entry[0]]))
        for entry in hits:
            self.queue.remove(entry)
        fresh = [self.queue.pop(0)[0] for _ in range(-(-work.tokens_computed // block_size) - len(hits))]
        blocks = [*hits, *((block, 0) for block in fresh)]
        for depth in range(len(hits), work.tokens_computed // block_size):
            blocks[depth] = (blocks[depth][0], work.keys[depth])
            self.clock += 1
            self.stored_at[blocks[depth][0]] = self.clock
        self.queue.extend(reversed(blocks))
        return len(hits)

    clock = 0

    @property
    def stored_at(self) -> dict[int, int]:
        return self.__dict__.setdefault("stamps", {})


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(st.integers(5, 9), st.lists(st.tuples(PROMPTS, st.integers(1, 6)), min_size=1, max_size=25))
@settings(max_examples=examples(150))
def test_hits_of_sequential_requests_equal_a_brute_force_cache(
    capacity: int, asked: list[tuple[list[int], int]]
) -> None:
    cache, naive = BlockCache(capacity, BLOCK), NaiveCache(capacity)
    for prompt, answer in asked:
        work = Job.of(prompt, [i % 2 for i in range(answer)], BLOCK)
        assert served(cache, work) == naive.serve(work, BLOCK)


LONG_PROMPTS = st.builds(
    lambda common, branch, rest: [*numbers(common), *numbers(rest, 1000 * branch)],
    st.integers(0, 150),
    st.integers(1, 3),
    st.integers(1, 40),
)
"""More blocks than are asked for one after the other."""


class CacheUnderConcurrency(RuleBasedStateMachine):
    """Requests that overlap: blocks are conserved, and what was evicted is not found."""

    @initialize(capacity=st.sampled_from([8, 30, 60]))
    def start(self, capacity: int) -> None:
        self.cache = BlockCache(capacity, BLOCK, events_max=10_000)
        self.leases: list[tuple[object, int]] = []
        self.copies: dict[int, int] = {}

    @rule(prompt=PROMPTS | LONG_PROMPTS, answer=st.integers(1, 6))
    def begin(self, prompt: list[int], answer: int) -> None:
        work = job(prompt, answer)
        predicted = self.cache.hit_blocks(work)
        reusable = work.keys[: (len(prompt) - 1) // BLOCK]
        assert predicted == sum(1 for _ in takewhile(self.copies.get, reusable)), "fewer or more than a walk finds"
        has_room = self.cache.copy().has_room(work)
        lease = self.cache.lease(work)
        assert has_room == (lease is not None)
        if lease is not None:
            assert lease.hits == predicted
            assert all(self.copies.get(key) for key in work.keys[:predicted]), "hit on a block that was evicted"
            self.leases.append((lease, lease.hits * BLOCK))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 100), tokens=st.integers(1, 9) | st.integers(20, 100))
    def compute(self, which: int, tokens: int) -> None:
        index = which % len(self.leases)
        lease, computed = self.leases[index]
        computed = min(computed + tokens, lease.job.tokens_computed)
        self.cache.grow(lease, computed)
        self.leases[index] = (lease, computed)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        lease, _ = self.leases.pop(which % len(self.leases))
        self.cache.release(lease)

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def blocks_are_conserved_and_events_report_what_can_be_found(self) -> None:
        self.cache.check()
        for event in self.cache.drain_events():
            if isinstance(event, KeysStored):
                for key in event.keys:
                    self.copies[key] = self.copies.get(key, 0) + 1
            elif isinstance(event, KeyRemoved):
                self.copies[event.key] -= 1
            else:
                self.copies.clear()
        assert sum(1 for count in self.copies.values() if count) == self.cache.found_blocks


TestCacheUnderConcurrency = CacheUnderConcurrency.TestCase
TestCacheUnderConcurrency.settings = settings(max_examples=examples(60), stateful_step_count=40)


# ---- the clock


def test_first_token_comes_after_the_prefill_and_the_others_one_step_apart() -> None:
    model = EngineModel(LIMITS, every_token=True)
    model.submit("a", job(numbers(30), answer=3), now=1.0)
    events = to_the_end(model)
    assert [(event.kind.value, event.tokens) for event in events] == [
        ("started", 0), ("token", 1), ("token", 2), ("token", 3), ("finished", 3),
    ]  # fmt: skip
    assert [event.at for event in events] == pytest.approx([1.0, 1.3, 1.8, 2.3, 2.3])


def test_a_prompt_that_can_never_fit_and_a_full_queue_are_refused_without_a_trace() -> None:
    model = EngineModel(EngineLimits(cache_tokens=80, block_size=BLOCK, running_max=1, waiting_max=1))
    with pytest.raises(PromptTooLongError):
        model.submit("a", job(numbers(81)), now=0.0)
    model.submit("b", job(numbers(10), answer=50), now=0.0)
    model.submit("c", job(numbers(10)), now=0.0)
    with pytest.raises(QueueFullError):
        model.submit("d", job(numbers(10)), now=0.0)
    with pytest.raises(ValueError, match="in work already"):
        model.submit("b", job(numbers(10)), now=0.0)
    assert [event.request_id for event in to_the_end(model) if event.kind is EngineEventKind.FINISHED] == ["b", "c"]


def test_cancel_frees_blocks_and_the_place_at_once_and_keeps_what_was_computed() -> None:
    model = EngineModel(LIMITS, every_token=True)
    for name in "abc":
        model.submit(name, job(numbers(40, ord(name) * 100), answer=9), now=0.0)
    model.advance(1.0)
    assert model.cancel("c", now=1.0)  # waits
    assert model.cancel("a", now=1.0)  # decodes
    assert not model.cancel("a", now=1.0)
    statistics = model.statistics()
    assert (statistics.running, statistics.waiting, statistics.cancelled) == (1, 0, 2)
    assert model.cache.hit_blocks(job([*numbers(40, 9700), 1])) == 10
    events = to_the_end(model)
    assert {event.request_id for event in events} == {"b"}
    assert model.statistics().used_blocks == 0


def test_a_restart_aborts_everything_and_forgets_the_cache() -> None:
    model = EngineModel(EngineLimits(cache_tokens=400, block_size=BLOCK, running_max=1, cache_events_max=10))
    model.submit("a", job(numbers(40), answer=9), now=0.0)
    model.submit("b", job(numbers(40, 100)), now=0.0)
    model.advance(0.005)
    model.restart(now=0.005)
    events = model.advance(0.005)
    assert [(event.request_id, event.kind) for event in events] == [
        ("a", EngineEventKind.ABORTED),
        ("b", EngineEventKind.ABORTED),
    ]
    statistics = model.statistics()
    assert (statistics.running, statistics.waiting, statistics.used_blocks, statistics.found_blocks) == (0, 0, 0, 0)
    assert (statistics.generation, statistics.prompt_tokens) == (2, 0)
    assert model.cache.drain_events() == [KeysCleared()]
    assert model.next_event_at() is None


def test_limits_that_make_no_sense_are_refused() -> None:
    refused = ({"cache_tokens": 3}, {"running_max": 0}, {"prefill_tokens_per_s": 0.0}, {"decode_s": -1.0})
    endless = ({"prefill_tokens_per_s": nan}, {"decode_s": nan}, {"decode_s_per_running": inf})
    for wrong in (*refused, *endless):
        with pytest.raises(ValueError, match="positive"):
            EngineLimits(**wrong)
    with pytest.raises(ValueError, match="step_tokens_max"):
        EngineLimits(running_max=33, step_tokens_max=32)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "submit", "cancel", "advance", "clear", "restart"]),
        st.lists(st.integers(0, 1), min_size=1, max_size=40),
        st.integers(1, 12),
        st.sampled_from([0.0, 0.01, 0.3, 2.0]),
    ),
    max_size=40,
)


@given(ACTIONS, st.booleans())
@settings(max_examples=examples(150))
def test_whatever_happens_time_is_monotone_blocks_are_conserved_and_every_request_ends_once(
    actions: list, every_token: bool
) -> None:
    limits = EngineLimits(cache_tokens=64, block_size=BLOCK, prefill_tokens_per_s=100.0, decode_s=0.1,
                          running_max=3, step_tokens_max=16, waiting_max=5)  # fmt: skip
    model = EngineModel(limits, every_token=every_token)
    now, names, cancelled, events = 0.0, [], [], []
    for number, (what, prompt, answer, wait) in enumerate(actions):
        now += wait
        if what == "submit":
            try:
                model.submit(f"r{number}", job(prompt, answer), now)
                names.append(f"r{number}")
            except QueueFullError:
                assert model.statistics().waiting == 5
        elif what == "cancel" and names:
            name = names[number % len(names)]
            if model.cancel(name, now):
                cancelled.append(name)
        elif what == "clear":
            model.clear_cache(now)
        elif what == "restart":
            model.restart(now)
        else:
            events.extend(model.advance(now))
        model.cache.check()
    events.extend(to_the_end(model))
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert model.statistics().used_blocks == model.statistics().running == model.statistics().waiting == 0
    ends = [event.request_id for event in events if event.kind in (EngineEventKind.FINISHED, EngineEventKind.ABORTED)]
    assert sorted(ends + cancelled) == sorted(names)
    started = [event.request_id for event in events if event.kind is EngineEventKind.STARTED]
    assert started == sorted(started, key=names.index)  # nobody overtakes
    whole = ["started", "token", "finished"]
    for name in names:
        of_it = [event for event in events if event.request_id == name]
        reported = [event.kind.value for event in of_it if event.kind is not EngineEventKind.TOKEN or event.tokens == 1]
        cut = name in cancelled or reported[-1:] == ["aborted"]
        assert (
            reported == whole
            if not cut
            else [kind for kind in reported if kind != "aborted"] in (whole[:2], whole[:1], [])
        )
