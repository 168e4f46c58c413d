"""Continuum's figures of speed and size, as far as they are for Python: CR29 and CR30.

Its lookups below 1 us are of Rust; ours are some microseconds, and the docstrings of the modules say how many. Times
are the best of several rounds, since other work runs beside tests. Its gains ("20-40 % TTFT") are called illustrative
there and are no criterion. The bound of an answer of Redis is in tests/io/test_redis_index.py.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from random import Random
from time import perf_counter

from ranvier_py.core.engine_cache.prefix_index.prefix_index import IndexEvent, IndexSettings, KvIndex, Verb
from ranvier_py.core.engine_cache.prefix_index.prepared import PreparedIndex
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.namespaces import opening_key
from ranvier_py.core.routing.placement import Match
from ranvier_py.core.routing.placement.chwbl import Chwbl
from ranvier_py.core.routing.placement.kv_score import KvScore
from tests.core.routing.placement.engines import Engine

MESSAGES = [{"role": "system", "content": "You are a librarian. " * 60}, {"role": "user", "content": "Hello"}]
ENTRY_BYTES_MAX = 450  # Continuum sizes with 200 B; ours are Python's objects


def best_s(work: Callable[[], object], calls: int, rounds: int = 15) -> float:
    """Seconds for one call, in the best round."""
    best = float("inf")
    for _ in range(rounds):
        began = perf_counter()
        for _ in range(calls):
            work()
        best = min(best, perf_counter() - began)
    return best / calls


def filled(prefixes: int, backends: int, entries_max: int = 100_000) -> KvIndex:
    index = KvIndex(IndexSettings(entries_max=entries_max))
    for prefix in range(prefixes):
        name = f"{prefix:064x}"
        for backend in range(backends):
            index.apply(BackendId(backend), IndexEvent(Verb.CREATED, name, 64 + backend), 0.0)
    return index


def test_cr29_the_key_of_a_prompt_takes_less_than_ten_microseconds() -> None:
    assert best_s(lambda: opening_key("llama", MESSAGES), 200) < 10e-6


def test_cr29_the_ring_names_a_backend_in_microseconds() -> None:
    """Continuum: below 5 us, in Rust. A placement of ours, bounded loads of eight backends included, is below 50."""
    ring, rng = Chwbl(), Random(1)
    engines = tuple(Engine(BackendId(number), f"e{number}") for number in range(8))
    match = Match((), 1000, Fingerprint(7), opening=b"\xaa" * 32, at=1.0)
    assert best_s(lambda: ring.choose(match, engines, rng), 200) < 50e-6


def test_cr29_a_question_to_a_full_index_takes_less_than_a_hundred_microseconds() -> None:
    index = filled(prefixes=1000, backends=10)
    prepared = PreparedIndex(index, perf_counter)
    names = iter([f"{number % 1000:064x}" for number in range(100_000)])
    assert best_s(lambda: index.query(next(names), 1.0), 200) < 100e-6
    assert best_s(lambda: prepared.holders(next(names), 1.0), 200) < 100e-6


def test_cr29_a_thousand_scores_take_less_than_a_hundred_milliseconds() -> None:
    index = KvIndex()
    for number in range(1000):
        index.apply(BackendId(number), IndexEvent(Verb.CREATED, "aa", number), 0.0)
    policy, rng = KvScore(), Random(1)
    policy.index = PreparedIndex(index, perf_counter)
    engines = tuple(Engine(BackendId(number), f"e{number}", load=number % 7) for number in range(1000))
    match = Match((), 1000, Fingerprint(7), opening=b"\xaa", at=1.0)
    assert policy.choose(match, engines, rng).reason == "kv_aware"
    assert best_s(lambda: policy.choose(match, engines, rng), 1) < 0.1


def test_cr30_an_entry_costs_no_more_memory_than_the_module_states() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        index = filled(prefixes=2000, backends=5)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(index) == 10_000
    assert used / len(index) < ENTRY_BYTES_MAX


def test_cr30_an_index_of_twice_the_prefixes_times_the_backends_evicts_nothing() -> None:
    """The document's sizing. It counts pairs (CX24), so that half as many would do; with fewer, entries go."""
    prefixes, backends = 500, 10
    roomy = filled(prefixes, backends, entries_max=2 * prefixes * backends)
    assert (len(roomy), roomy.evictions) == (prefixes * backends, 0)
    exact = filled(prefixes, backends, entries_max=prefixes * backends)
    assert exact.evictions == 0
    small = filled(prefixes, backends, entries_max=prefixes * backends - 1)
    assert small.evictions > 0
