"""Engines that reuse no prefixes: requests go there by load alone, until they show the contrary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

import pytest

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.engine_cache.calibration.calibration import Calibration
from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics, read_metrics
from ranvier_py.core.engine_cache.sources.publishers import reuse_of_server_info
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backend import ProbeResult
from ranvier_py.core.routing.backends import Backend, Outcome, Registry
from ranvier_py.core.routing.checkpoints.cache_profile import EXTRA_BUFFER, CacheProfile
from ranvier_py.core.routing.processes.reuse import COLD_ANSWERS
from ranvier_py.core.routing.request_paths import CHAT_PATH
from tests.core.routing.test_router import make_router

SYSTEM = "You are the help desk of a small library. Name the shelf, and never guess. " * 10
ANSWER_TOKENS = 8
OFF_PAGE = b'vllm:cache_config_info{block_size="16",enable_prefix_caching="False",num_gpu_blocks="10000"} 1.0\n'
NO_HITS = b"vllm:prefix_cache_queries_total 0.0\nvllm:prefix_cache_hits_total 0.0\n"


class Fleet:
    """A router before engines that do what a test says; each holds what it was sent. Users ask in a closed loop."""

    def __init__(self, engines: int = 4, *, caching: Mapping[int, int] | None = None, counts: bool = True) -> None:
        self.router = make_router(engines)
        self.registry = self.router.registry
        self.calibration = Calibration(
            self.router.routes, checkpoints=self.router.checkpoints, judged=self.registry.changes.reconsider
        )
        self.router.observers += (self.calibration,)
        self.caching = caching or {}  # engine -> cached tokens of its answers to what it holds
        self.counts = counts
        self.seen: set[tuple[int, int]] = set()
        self.now = 0.0
        self.served: Counter[int] = Counter()

    def send(self, user: int, turn: int, *, stream: bool) -> Attempt:
        question = f"user {user} asks for the {turn}th time where the maps are. "
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question * 5}]
        body = json.dumps({"model": "m", "stream": stream, "messages": messages}).encode()
        prompt = self.router.read(CHAT_PATH, body)
        found = self.router.find(prompt, self.now)
        return self.router.start_attempt(prompt, self.router.place(prompt, found), self.now, found=found)

    def first_token(self, attempt: Attempt) -> None:
        self.router.first_token(attempt, self.now)

    def end(self, attempt: Attempt) -> None:
        router, backend = self.router, int(attempt.target.id)
        router.first_token(attempt, self.now)
        held = (backend, attempt.generation) in self.seen
        self.seen.add((backend, attempt.generation))
        cached = self.caching.get(backend, 0) if held else 0
        counted = cached if self.counts else None
        router.finish_attempt(attempt, Outcome.SUCCESS, self.now)
        end = attempt.prompt.end
        router.answered(attempt, end, Answer(None, "", attempt.prompt.tokens, counted, ANSWER_TOKENS), self.now)
        self.served[backend] += 1

    def ask(self, requests: int, *, users: int = 8, stream: bool = True, pages: bytes | None = None) -> Counter[int]:
        """Let users ask so many requests, each its next when the last is answered, and count who serves them."""
        before = Counter(self.served)
        running: list[Attempt] = []
        for number in range(requests):
            if len(running) == users:
                self.end(running.pop(0))
            running.append(self.send(number % users, number, stream=stream))
            self.now += 0.1 if stream else 0.3
            if stream:
                self.first_token(running[-1])
                self.now += 0.2
            if number % 16 == 15:
                self.calibration.tick(self.now)
                if pages is not None:
                    self.read_pages(pages)
        for attempt in running:
            self.end(attempt)
        return self.served - before

    def read_pages(self, page: bytes) -> None:
        for backend in list(self.registry):
            metrics = read_metrics(page)
            self.calibration.report(backend.id, backend.url, backend.generation, metrics)
            page_read(self.registry, backend, metrics.caches, metrics.hit_tokens)


def page_read(registry: Registry, backend: Backend, caches: bool | None, hit_tokens: int | None) -> None:
    backend.reuse.page_read(caches, hit_tokens)
    registry.changes.reconsider(backend)


def even(served: Mapping[int, int]) -> bool:
    """Whether each of the engines served its share: which one a user leaves, and the next one gets, is chance."""
    share = sum(served.values()) / 4
    return all(0.7 * share <= served[each] <= 1.3 * share for each in range(4))


@pytest.mark.parametrize("stream", [True, False])
def test_engines_whose_answers_count_nothing_cached_share_the_load(stream: bool) -> None:
    fleet = Fleet()
    fleet.ask(40 * COLD_ANSWERS, stream=stream)
    assert even(fleet.ask(200, stream=stream))
    assert all("10 prompts" in each.reuse.why_not for each in fleet.registry)


@pytest.mark.parametrize("stream", [True, False])
def test_engines_whose_pages_show_caching_off_share_the_load_from_the_start(stream: bool) -> None:
    fleet = Fleet()
    metrics = read_metrics(OFF_PAGE)
    for backend in fleet.registry:
        fleet.registry.changes.probed(backend.id, ProbeResult(True, caches=metrics.caches), 0.0)
    assert even(fleet.ask(80, stream=stream))


def test_a_server_info_counts_like_a_page() -> None:
    assert reuse_of_server_info(b'{"disable_radix_cache": true, "page_size": 1}') is False
    assert reuse_of_server_info(b'{"disable_radix_cache": false}') is True
    assert [reuse_of_server_info(each) for each in (b"{}", b"[]", b'{"disable_radix_cache": 1}', b"")] == [None] * 4
    fleet = Fleet()
    for backend in fleet.registry:
        backend.reuse.server_info_read(False)
        fleet.registry.changes.reconsider(backend)
    assert even(fleet.ask(80))


@pytest.mark.parametrize("stream", [True, False])
def test_answers_without_counts_show_it_where_the_engines_own_page_counts_no_hit(stream: bool) -> None:
    fleet = Fleet(counts=False)
    fleet.ask(40 * COLD_ANSWERS, stream=stream, pages=NO_HITS)
    assert even(fleet.ask(200, stream=stream, pages=NO_HITS))


def test_answers_without_counts_alone_show_nothing() -> None:
    """vLLM caches, and counts nothing in its answers, without --enable-prompt-tokens-details."""
    fleet = Fleet(counts=False)
    fleet.ask(40 * COLD_ANSWERS)
    assert all(each.reuse.believed for each in fleet.registry)
    fleet.ask(40 * COLD_ANSWERS, pages=b"vllm:prefix_cache_hits_total 4096.0\n")
    assert all(each.reuse.believed for each in fleet.registry)


def test_an_engine_that_always_counts_zero_but_has_hits_on_its_page_keeps_its_affinity() -> None:
    fleet = Fleet()
    fleet.ask(40 * COLD_ANSWERS, pages=b"vllm:prefix_cache_hits_total 4096.0\n")
    assert all(each.reuse.believed for each in fleet.registry)


def test_in_a_mixed_fleet_the_engines_that_cache_keep_their_affinity() -> None:
    fleet = Fleet(caching={2: 160, 3: 160})
    for backend in list(fleet.registry)[:2]:
        page_read(fleet.registry, backend, False, None)
    fleet.ask(40)
    prompt = fleet.send(1, 1000, stream=True)
    assert int(prompt.target.id) in (2, 3)
    assert {int(holder.backend) for holder in prompt.decision.holders} <= {2, 3}
    assert [each.reuse.believed for each in fleet.registry] == [False, False, True, True]


def test_a_hit_brings_affinity_back_in_spite_of_every_setting() -> None:
    fleet = Fleet()
    fleet.ask(40 * COLD_ANSWERS)
    assert not any(each.reuse.believed for each in fleet.registry)
    fleet.caching = dict.fromkeys(range(4), 160)
    fleet.ask(40)
    assert all(each.reuse.believed for each in fleet.registry)
    assert fleet.send(1, 1000, stream=True).decision.matched_tokens > 0


def test_another_process_is_judged_anew() -> None:
    fleet = Fleet(1)
    fleet.ask(3 * COLD_ANSWERS)
    (backend,) = fleet.registry
    assert not backend.reuse.believed
    fleet.registry.changes.restart(backend, "a test says so", fleet.now)
    assert backend.reuse.believed
    fleet.caching = {0: 160}
    fleet.ask(3)
    assert backend.reuse.hit
    assert fleet.send(1, 1000, stream=True).decision.matched_tokens > 0


def test_a_setting_that_changes_on_the_page_voids_what_was_shown_before() -> None:
    fleet = Fleet(1, caching={0: 160})
    (backend,) = fleet.registry
    page_read(fleet.registry, backend, True, None)
    fleet.ask(5)
    assert backend.reuse.hit
    page_read(fleet.registry, backend, False, None)
    assert not backend.reuse.believed
    page_read(fleet.registry, backend, True, None)
    assert backend.reuse.believed


def test_engines_of_hybrid_models_are_not_judged_by_cold_answers() -> None:
    fleet = Fleet()
    for backend in fleet.registry:
        fleet.router.checkpoints.set_profile(backend.id, CacheProfile("sglang", EXTRA_BUFFER))
    fleet.ask(40 * COLD_ANSWERS)
    assert all(each.reuse.believed and each.reuse.cold == 0 for each in fleet.registry)


def test_explain_names_candidates_that_reuse_nothing() -> None:
    fleet = Fleet(2, caching={1: 160})
    page_read(fleet.registry, fleet.registry[BackendId(0)], False, None)
    fleet.ask(10)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "And now?"}]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    shown = fleet.router.explain(fleet.router.read(CHAT_PATH, body, dry=True), fleet.now)["candidates"]
    assert [each["reuses_prefixes"] for each in shown] == [False, True]
    assert shown[0]["matched_tokens"] == 0 < shown[1]["matched_tokens"]


def test_a_cache_that_proved_to_keep_nothing_hides_the_routes_of_this_second_too() -> None:
    fleet = Fleet(1, caching={0: 160})
    fleet.ask(3)
    fleet.caching = {}
    fleet.ask(60)
    known = fleet.calibration.backends()[BackendId(0)]
    assert known.estimate.limit == 0
    fleet.calibration.tick(fleet.now)
    attempt = fleet.send(1, 2000, stream=True)
    fleet.end(attempt)
    assert fleet.calibration.lifetime_s(BackendId(0), fleet.now) == 0.0
    assert fleet.send(1, 2001, stream=True).decision.matched_tokens == 0


def test_a_page_without_any_word_on_caching_leaves_the_verdict_to_answers() -> None:
    fleet = Fleet(1)
    (backend,) = fleet.registry
    metrics = EngineMetrics(running=1)
    page_read(fleet.registry, backend, metrics.caches, metrics.hit_tokens)
    assert backend.reuse.believed
