"""Generates traffic like that of published benchmarks, as traces for a replay.

A prompt is a list of *passages*: a number of tokens of one content, in whole blocks of 16. Equal contents in equal
places make equal prefixes. Message ends and anchors are prefix keys, as in a node. Answers enter the cache, and the
next turn of a thread contains them.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import anchors_between
from ranvier_py.replay.traces.trace import Depth, Trace, TraceRequest
from ranvier_py.replay.traces.trace_chains import linked

BLOCK_TOKENS = 16
MODEL = "generated"
BLOCKS_PER_PASSAGE_MAX = 1 << 20


class Passage(NamedTuple):
    """A number of blocks of one content."""

    content: int
    blocks: int


class Stage(NamedTuple):
    """Poisson arrivals at one rate, for some seconds."""

    per_s: float
    seconds: float


class Writer:
    """Makes requests from passages. Each new content gets its own number, above `contents`."""

    def __init__(self, contents: int = 0) -> None:
        self._contents = contents
        self._known: dict[tuple[int, Passage], tuple[int, ...]] = {}

    def passage(self, tokens: float) -> Passage:
        """Return a passage of new content, rounded to whole blocks, at least one."""
        self._contents += 1
        return Passage(self._contents, max(1, round(tokens / BLOCK_TOKENS)))

    def request(
        self, at: float, session: str, prompt: Sequence[Passage], answer: Passage, *, openings: int = 1
    ) -> TraceRequest:
        """Make a request whose messages are `prompt`. The first `openings` of them identify the conversation."""
        names: tuple[int, ...] = ()
        depths = [0]
        for passage in (*prompt, answer):
            names += self._names(names[-1] if names else 0, passage)
            depths.append(len(names))
        wanted = sorted({*depths[1:], *anchors_between(0, len(names))})
        places = {blocks: index for index, blocks in enumerate(wanted)}
        return TraceRequest(
            at=at,
            session=session,
            model=MODEL,
            prompt_tokens=depths[-2] * BLOCK_TOKENS,
            answer_tokens=answer.blocks * BLOCK_TOKENS,
            chain=tuple(Depth(blocks * BLOCK_TOKENS, Fingerprint(names[blocks - 1])) for blocks in wanted),
            ends=tuple(places[blocks] for blocks in depths[1:]),
            blocks=names,
            opening=names[depths[openings] - 1].to_bytes(8, "little"),
        )

    def _names(self, above: int, passage: Passage) -> tuple[int, ...]:
        """Return the names of the blocks of `passage` if it follows the block `above`."""
        found = self._known.get((above, passage))
        if found is None:
            names, name = [], above
            for index in range(passage.blocks):
                name = linked(name, passage.content * BLOCKS_PER_PASSAGE_MAX + index)
                names.append(name)
            found = self._known[(above, passage)] = tuple(names)
        return found


def poisson(rng: Random, stages: Sequence[Stage]) -> list[float]:
    """Draw Poisson arrivals in these stages: seconds from 0, ascending."""
    found: list[float] = []
    start = 0.0
    for stage in stages:
        at = start + rng.expovariate(stage.per_s)
        while at < start + stage.seconds:
            found.append(at)
            at += rng.expovariate(stage.per_s)
        start += stage.seconds
    return found


def evenly(rng: Random, count: int, per_s: float) -> list[float]:
    """Draw `count` Poisson arrivals."""
    found, at = [], 0.0
    for _ in range(count):
        at += rng.expovariate(per_s)
        found.append(at)
    return found


def shared_prefix_groups(
    seed: int, *, groups: int = 300, each: int = 5, shared: int = 2048, question: int = 128, answer: int = 128
) -> Trace:
    """SGLang's traffic: many long prefixes, each requested equally often, in random order; 40 requests/s.

    Group size and lengths were not published with the figures. 2,048 + 128 tokens are the defaults of SGLang's
    `bench_serving --dataset-name generated-shared-prefix`. With 5 requests a group, requests that are spread over
    8 engines find 20 % of their tokens in infinite caches, which is what was published for round robin.
    """
    rng, writer = Random(f"{seed}/groups"), Writer()
    prefixes = [writer.passage(shared) for _ in range(groups)]
    order = [group for group in range(groups) for _ in range(each)]
    rng.shuffle(order)
    requests = [
        writer.request(at, f"group {group}", [prefixes[group], writer.passage(question)], writer.passage(answer))
        for at, group in zip(evenly(rng, len(order), 40.0), order, strict=True)
    ]
    return Trace("shared_prefix_groups", requests, BLOCK_TOKENS, timed=True)


def one_hot_prefix(
    seed: int, *, requests: int = 1500, hot: float = 0.8, others: int = 20, shared: int = 4000, per_s: float = 20.0
) -> Trace:
    """Ranvier's traffic: one system prompt has 80 % of it, others share the rest; questions of 100 to 500 tokens."""
    rng, writer = Random(f"{seed}/hot"), Writer()
    prefixes = [writer.passage(shared) for _ in range(1 + others)]
    found = []
    for at in evenly(rng, requests, per_s):
        chosen = 0 if rng.random() < hot else rng.randrange(1, 1 + others)
        prompt = [prefixes[chosen], writer.passage(rng.uniform(100, 500))]
        found.append(writer.request(at, f"application {chosen}", prompt, writer.passage(rng.uniform(50, 150))))
    return Trace("one_hot_prefix", found, BLOCK_TOKENS, timed=True)


LLMD_RATES = (3, 10, 15, 20, 22, 25, 30, 35, 40, 46, 52, 60)
"""Requests/s of llm-d's stages, which go from 3 to 60."""


def grouped_users(
    seed: int, *, groups: int = 150, users: int = 5, stage_s: float = 4.5, slower: float = 2.5, answer: int = 1000
) -> Trace:
    """llm-d's traffic: 150 groups of 5 users; each repeatedly sends 6,000 tokens of the group and 1,200 of its own.

    The user is drawn for each request. Arrivals are Poisson in stages of LLMD_RATES / `slower` requests/s, each
    `stage_s` x `slower` long: 1,600 requests, while llm-d sends some thousands.
    """
    rng, writer = Random(f"{seed}/users"), Writer()
    prompts = []
    for group in range(groups):
        shared = writer.passage(6000)
        prompts += [(f"{group}/{user}", [shared, writer.passage(1200)]) for user in range(users)]
    stages = [Stage(rate / slower, stage_s * slower) for rate in LLMD_RATES]
    requests = []
    for at in poisson(rng, stages):
        session, prompt = rng.choice(prompts)
        requests.append(writer.request(at, session, prompt, writer.passage(answer)))
    return Trace("grouped_users", requests, BLOCK_TOKENS, timed=True)


def chat_threads(
    seed: int, *, threads: int = 300, within_s: float = 60.0, think_s: float = 10.0, turns_mean: float = 5.0
) -> Trace:
    """KubeAI's traffic: threads as in ShareGPT, no system prompt, each turn with the whole history.

    The number of turns is geometric with a mean of 5; questions and answers are exponential with means of 160 and 240
    tokens (about those of ShareGPT), cut at ten times the mean. A turn comes about think_s after the previous one,
    which is longer than an answer takes without a queue.
    """
    rng, writer = Random(f"{seed}/threads"), Writer()
    requests = []
    for thread in range(threads):
        at, history = rng.uniform(0.0, within_s), list[Passage]()
        while True:
            history.append(writer.passage(min(1600.0, rng.expovariate(1 / 160))))
            answer = writer.passage(min(2400.0, rng.expovariate(1 / 240)))
            requests.append(writer.request(at, f"thread {thread}", history, answer))
            history.append(answer)
            at += rng.uniform(0.5 * think_s, 1.5 * think_s)
            if rng.random() < 1.0 / turns_mean:
                break
    requests.sort(key=lambda request: request.at)
    return Trace("chat_threads", requests, BLOCK_TOKENS, timed=True)


def shared_share(trace: Trace) -> float:
    """Return the share of prompt tokens in leading blocks of earlier requests: the most that one cache could find."""
    seen: set[int] = set()
    found = 0
    for request in trace.requests:
        found += leading(seen, request.blocks[: request.prompt_tokens // trace.block_tokens]) * trace.block_tokens
        seen.update(request.blocks)
    return found / max(1, sum(request.prompt_tokens for request in trace.requests))


def leading(cache: set[int], keys: Sequence[int]) -> int:
    """Return how many leading keys are in the cache."""
    return next((depth for depth, key in enumerate(keys) if key not in cache), len(keys))
