"""Two real vLLM engines on a CPU behind two nodes of a cluster: what the nodes predict against what the engines found.

The model has random weights; its tokenizer, its cache, its events and its times are real. The tests go on from each
other: the engines stay, and their caches fill.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.engines.real import BLOCK_TOKENS, MODEL
from tests.engines.talks import CHAT, MESSAGES, RESPONSES, SpokenApi, Talks, engines_of_each
from tests.engines.two_engines import Site

pytestmark = pytest.mark.engines("vllm")

BLOCKS = 260  # 8,320 tokens of each engine
GOAL = 0.98
CROWDED = 0.95  # where three prompts at once need more than one engine has, what was there goes before its turn comes
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
SETTLED_S = 3.0  # more than an event and a route update of a peer take


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    place = Site(tmp_path_factory.mktemp("site"), BLOCKS)
    try:
        place.put_before("affinity")
        place.until_exact()
        warm = Talks(1, 3)
        place.run(warm, 1, users=1)
        yield place
    finally:
        print(*("", *place.rows), sep="\n")
        place.end()


@pytest.fixture(scope="module")
def talks() -> Talks:
    """They have the system prompts of the talks that warmed the engines up."""
    return Talks(1, 12)


def test_two_nodes_predict_what_two_engines_hold(site: Site, talks: Talks) -> None:
    """Each turn of a talk comes by the other node; one node reads each engine's events and tells its peer."""
    hits, queries = site.counters(HITS), site.counters(QUERIES)
    served = site.run(talks, 4)
    share = site.send("talks of four turns", served)
    assert site.counters(HITS) - hits == share.cached, "the engines' own counters say otherwise"
    assert site.counters(QUERIES) - queries == share.prompt_tokens
    assert {each.backend for each in served} == {"a", "b"}
    assert share.cached > share.prompt_tokens // 2
    assert share.precision >= GOAL, "\n".join(share.wrong)
    assert share.recall >= GOAL, "\n".join(share.wrong)
    assert [source["level"] for source in site.streams()] == ["exact", "exact"], "one reader for each engine"


@pytest.mark.parametrize(
    "apis",
    [(CHAT,), (MESSAGES,), (RESPONSES,), (CHAT, MESSAGES, RESPONSES)],
    ids=["chat", "messages", "responses", "the next API each turn"],
)
def test_a_talk_with_tools_stays_on_one_engine_that_reuses_what_was_predicted(
    site: Site, apis: Sequence[SpokenApi]
) -> None:
    """Each turn by the other node, with calls and their results: to the token, but for what two prompts share of a
    message. Nodes know prefixes by messages, so not the answer in the one to which a call was added, nor the words with
    which two questions begin. Both are shorter than a block, and the engine finds one more where they fill it. A talk's
    first turn may come before anything with its tools was tokenized: then the node's estimate lacks the tools."""
    hits, queries = site.counters(HITS), site.counters(QUERIES)
    served = site.run(Talks(sum(map(ord, apis[-1].path)) + len(apis), 6, apis=apis), 4, users=2, calls=True)
    share = site.send(" ".join(api.path for api in apis), served)
    assert site.counters(HITS) - hits == share.cached, "the engines' own counters say otherwise"
    assert site.counters(QUERIES) - queries == share.prompt_tokens
    assert [len(engines) for engines in engines_of_each(served).values()] == [1] * 6
    assert share.cached > share.prompt_tokens // 2
    more = [each.cached_tokens - each.usable_tokens(BLOCK_TOKENS) for each in served]
    begun: set[int] = set()
    later = [tokens for each, tokens in zip(served, more, strict=True) if each.talk in begun or begun.add(each.talk)]
    assert set(later) <= {0, BLOCK_TOKENS}, more
    assert min(more) >= 0, more


def test_a_turn_that_names_a_stored_response_goes_to_the_engine_that_keeps_it(site: Site) -> None:
    """Which the nodes learn of each other; neither knows what was said before it."""
    first, second = (node.url for node in site.nodes)
    words = Talks(31, 3, systems=3)
    for talk in range(3):
        backends, cached, before = set(), 0, None
        for turn, url in enumerate((first, second, second, first)):
            body = {
                "model": MODEL,
                "input": words.announce(200),
                "max_output_tokens": 8,
                "previous_response_id": before,
            }
            answer = httpx.post(f"{url}/v1/responses", json=body, timeout=120.0, trust_env=False)
            assert answer.status_code == 200, (talk, turn, answer.text[:500])
            before, usage = answer.json()["id"], answer.json()["usage"]
            backends.add(answer.headers["x-ranvier-backend"])
            if turn:
                assert usage["input_tokens_details"]["cached_tokens"] > cached
            cached = usage["input_tokens_details"]["cached_tokens"]
            other = second if url == first else first
            kept = httpx.get(f"{other}/v1/responses/{before}", timeout=120.0, trust_env=False)
            assert (kept.status_code, kept.json()["id"]) == (200, before)
        assert len(backends) == 1


def test_evictions_are_noticed(site: Site, talks: Talks) -> None:
    """The talks are more than fits by now: what is gone must not be promised, and what is left must."""
    more = Talks(2, 18)
    removed = sum(source["stream"]["counts"]["blocks_removed"] for source in site.streams())
    share = site.send("more than fits", [*site.run(more, 4), *site.run(talks, 2)])
    assert sum(source["stream"]["counts"]["blocks_removed"] for source in site.streams()) > removed + BLOCKS // 2
    assert share.cached > share.prompt_tokens // 3
    assert share.precision >= GOAL, "\n".join(share.wrong)
    assert share.recall >= GOAL, "\n".join(share.wrong)


def test_a_killed_engine_is_believed_to_be_empty_and_learned_anew(site: Site, talks: Talks) -> None:
    engine = site.engines[0]
    engine.process.end(signal.SIGKILL)
    without = site.run(talks, 1)
    assert {each.backend for each in without} == {"b"}
    engine.start()
    engine.ready()
    for node in site.nodes:
        node.until("/admin/backends", lambda view: all(is_healthy(each) for each in view["backends"]))
        node.until(
            "/admin/engine-cache", lambda view: [each["level"] for each in view["engines"]] == ["exact", "exact"]
        )
    time.sleep(SETTLED_S)
    assert {source["backend"]: source["stream"]["blocks"] for source in site.streams()}["a"] == 0
    served = [*site.run(talks, 1), *site.run(Talks(3, 8), 4)]
    site.send("one engine for all of it", without)
    everywhere = site.send("after a restart", served)
    there = site.send("... by the engine that came back", [each for each in served if each.backend == engine.name])
    assert there.cached > 0, "it was never asked for what it holds"
    assert there.precision >= GOAL, there.wrong
    assert everywhere.precision >= CROWDED, everywhere.wrong
    assert everywhere.recall >= CROWDED, everywhere.wrong


def is_healthy(backend: dict[str, Any]) -> bool:
    return backend["health"] == "healthy" and backend["circuit"] == "closed"


def test_the_first_token_comes_sooner_than_by_turns(site: Site) -> None:
    """The same kind of talks, never seen before, through nodes that place by what is held, and that place by turns."""
    found = {}
    for policy in ("affinity", "round_robin"):
        site.put_before(policy)
        site.until_exact()
        runs = [site.run(Talks(seed, 10, systems=5), 4) for seed in seeds_of(policy)]
        found[policy] = site.send(policy, [each for served in runs for each in served])
    ours, by_turns = found["affinity"], found["round_robin"]
    assert ours.cached / ours.prompt_tokens > by_turns.cached / by_turns.prompt_tokens
    assert ours.first_p50_ms < by_turns.first_p50_ms


def seeds_of(policy: str) -> tuple[int, ...]:
    return (11, 12) if policy == "affinity" else (13, 14)
