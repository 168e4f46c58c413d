"""The text traces of the hit_rate benchmark: chats with arrival times, tokenized once, and what caching could give.

The traces carry no clock. As in the figures they are compared with, tau-bench dialogues start at random within 600 s
and take a turn every 5 s; QMSum questions are shuffled and arrive evenly. Request k of a dialogue is what stands before
its k-th assistant message, whose text is the answer. Tokens are those of the whole rendered prompt, by the engine's own
tokenizer code, at every request.

`reference` gives the three figures that a router is measured against (infinite caches, prompt blocks only): `ideal`,
one cache that everybody shares; `random`, requests drawn to engines; `greedy`, the engine with the longest prefix,
known perfectly, of those with at most 1.5 x their share of the requests + 4 (ties: the one with the fewest).
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import orjson

from cluster.engine.engine_text import ModelTokenizer
from ranvier_py.replay.engine.block_cache import Job

BLOCK_TOKENS = 16
DIALOGUE_STARTS_WITHIN_S = 600.0
TURN_EVERY_S = 5.0
QUESTIONS_PER_S = 2.0  # 26,000 prompt tokens/s: an eighth of what 8 engines prefill without any cache
DRAWS = 8  # of random routing: one draw of QMSum is off by 1.7 points (standard deviation)
QUESTION_SYSTEM = "Answer the question about the meeting transcript."

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request of a trace: when it comes, what it says, and what the engine will answer."""

    at: float  # seconds
    session: str
    messages: Sequence[Message]
    answer: Message


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace and what goes with it. `ideal`, `random`, `greedy` are the published figures for 8 engines."""

    name: str
    file: str
    tokenizer: str
    load: Callable[[Path, int], list[ChatRequest]]
    ideal: float
    random: float
    greedy: float


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A request with its body for the router and its job for an engine."""

    request: ChatRequest
    body: bytes
    job: Job


@dataclass(frozen=True, slots=True)
class Reference:
    """Shares of prompt tokens, 0 to 1."""

    ideal: float
    random: float
    greedy: float


def data_folder() -> Path:
    """Where traces and tokenizers lie: SHARED_DATA, or `shared/data` beside the repository."""
    given = os.environ.get("SHARED_DATA")
    return Path(given) if given else Path(__file__).parents[2] / "shared" / "data"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a gzipped file with one JSON object per line."""
    with gzip.open(path, "rb") as lines:
        for line in lines:
            if line.strip():
                yield orjson.loads(line)


def load_taubench(path: Path, seed: int) -> list[ChatRequest]:
    """Requests of all dialogues in order of time."""
    rng = Random(seed)
    found = []
    for record in read_lines(path):
        start = rng.uniform(0.0, DIALOGUE_STARTS_WITHIN_S)
        messages = record["messages"]
        turns = [index for index, message in enumerate(messages) if index > 0 and message["role"] == "assistant"]
        for number, index in enumerate(turns):
            at = start + TURN_EVERY_S * number
            found.append(ChatRequest(at, record["session_id"], messages[:index], messages[index]))
    return sorted(found, key=lambda request: request.at)


def load_qmsum(path: Path, seed: int) -> list[ChatRequest]:
    """All questions, shuffled."""
    asked = [
        (record["doc_id"], record["transcript"], query["q"], query["a"])
        for record in read_lines(path)
        for query in record["queries"]
    ]
    Random(seed).shuffle(asked)
    found = []
    for number, (document, transcript, question, answer) in enumerate(asked):
        content = f"{transcript}\n\nQuestion: {question}"
        messages = [{"role": "system", "content": QUESTION_SYSTEM}, {"role": "user", "content": content}]
        reply = {"role": "assistant", "content": answer}
        found.append(ChatRequest(number / QUESTIONS_PER_S, document, messages, reply))
    return found


TRACES = (
    Trace("taubench", "taubench_gpt4o_airline.jsonl.gz", "qwen2.5", load_taubench, 0.926, 0.671, 0.920),
    Trace("qmsum", "qmsum_doc_qa.jsonl.gz", "llama3", load_qmsum, 0.874, 0.370, 0.789),
)


def prepare(requests: Sequence[ChatRequest], tokenizer: ModelTokenizer, model: str) -> list[Prepared]:
    """Render and tokenize everything, each distinct prompt in full."""
    prompts = [tokenizer.render(request.messages, None, {}, generation=True) for request in requests]
    answers = [answer_text(tokenizer, request, prompt) for request, prompt in zip(requests, prompts, strict=True)]
    prompt_ids, answer_ids = tokenizer.encode_all(prompts), tokenizer.encode_all(answers)
    found = []
    for request, prompt, answer in zip(requests, prompt_ids, answer_ids, strict=True):
        body = orjson.dumps({"model": model, "messages": request.messages, "stream": True})
        found.append(Prepared(request, body, Job.of(prompt, answer, BLOCK_TOKENS)))
    return found


def answer_text(tokenizer: ModelTokenizer, request: ChatRequest, prompt: str) -> str:
    """What the engine generates: what the template adds to the prompt when the answer is history, and its end mark."""
    whole = tokenizer.render([*request.messages, request.answer], None, {}, generation=False)
    added = whole[len(prompt) :] if whole.startswith(prompt) else str(request.answer.get("content") or "")
    return added.rstrip("\n") or "."


def reference(jobs: Sequence[Job], engines: int, seed: int) -> Reference:
    """The three figures for these requests in this order; `random` is the mean of `DRAWS` runs."""
    total = sum(job.prompt_tokens for job in jobs)
    prompts = [job.keys[: job.prompt_tokens // BLOCK_TOKENS] for job in jobs]
    draws = [random_hits(prompts, engines, Random(f"{seed}/{draw}")) for draw in range(DRAWS)]
    ideal = random_hits(prompts, 1, Random(seed))
    return Reference(ideal / total, sum(draws) / DRAWS / total, greedy_hits(prompts, engines) / total)


def random_hits(prompts: Sequence[Sequence[int]], engines: int, rng: Random) -> int:
    """Tokens found with infinite caches when each request goes anywhere."""
    caches: list[set[int]] = [set() for _ in range(engines)]
    found = 0
    for keys in prompts:
        cache = rng.choice(caches)
        found += hit_tokens(cache, keys)
        cache.update(keys)
    return found


def greedy_hits(prompts: Sequence[Sequence[int]], engines: int) -> int:
    """Tokens found with infinite caches when each request goes where its longest prefix is, under the cap."""
    caches: list[set[int]] = [set() for _ in range(engines)]
    counts = [0] * engines
    found = 0
    for number, keys in enumerate(prompts):
        cap = 1.5 * number / engines + 4
        open_now = [index for index in range(engines) if counts[index] <= cap]
        depth, _, best = max((hit_tokens(caches[index], keys), -counts[index], index) for index in open_now)
        found += depth
        counts[best] += 1
        caches[best].update(keys)
    return found


def hit_tokens(cache: set[int], keys: Sequence[int]) -> int:
    for depth, key in enumerate(keys):
        if key not in cache:
            return depth * BLOCK_TOKENS
    return len(keys) * BLOCK_TOKENS
