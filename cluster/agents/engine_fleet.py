"""Engines in one process that evict nothing, and how much of each prompt each of them held when it came.

So one run shows what a client's prompts allow: the engine that holds most of a prompt is the best that a router could
choose. Counts are the engines' own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trio
from orjson import loads

from cluster.agents.agent_shapes import AgentRequest
from cluster.engine.engine_process import serve
from cluster.engine.engine_routes import GENERATE, Engine, EngineConfig
from cluster.engine.engine_text import TextTokenizer, load_tokenizer
from cluster.engine.live_engine import Mailbox
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.engine_values import EngineLimits

MODEL = "lab-model"
SUB_AGENT_FIELDS = frozenset({"x-openai-subagent", "x-parent-session-id", "x-claude-code-agent-id"})
SPAWN_TOOLS = frozenset({"multi_agent_v1", "task", "list_agents", "Task", "Agent"})
"""Tools for starting sub-agents. Agents have them, sub-agents do not."""
BLOCK_TOKENS = 16
CACHE_TOKENS = 1 << 24  # more than any agent sends here


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """One prompt as an engine got it. `held`: tokens of it that each engine could have reused at that moment."""

    task: str
    engine: int
    job: Job
    held: Sequence[int]
    mailbox: Mailbox

    @property
    def tokens(self) -> int:
        return self.job.prompt_tokens

    @property
    def reused(self) -> int:
        return self.mailbox.cached_tokens

    @property
    def possible(self) -> int:
        """Return the tokens that the best engine could have reused, or those that were reused, if more."""
        return max(*self.held, self.reused)

    @property
    def reached_a_holder(self) -> bool:
        """Whether no engine held a block more than the engine that got the prompt."""
        return self.held[self.engine] >= max(self.held)

    def continues(self, other: AskedPrompt) -> bool:
        """Whether it repeats at least half of that prompt: as its next turn, or a branch of it."""
        half = other.tokens // BLOCK_TOKENS // 2
        return 0 < half <= self.tokens // BLOCK_TOKENS and self.job.keys[half - 1] == other.job.keys[half - 1]


class WatchedEngine(Engine):
    """An engine that notes each prompt in its fleet."""

    def __init__(self, config: EngineConfig, tokenizer: TextTokenizer, fleet: EngineFleet, number: int) -> None:
        super().__init__(config, tokenizer)
        self._fleet = fleet
        self._number = number

    async def handle(self, request: HttpRequest, client: Client) -> None:
        if request.path in GENERATE:
            self._fleet.requested(request)
        await super().handle(request, client)

    def submit(self, request_id: str, job: Job) -> Mailbox:
        held = [engine.held_tokens(job) for engine in self._fleet.engines]  # before this engine computes the prompt
        mailbox = super().submit(request_id, job)
        self._fleet.note(self._number, held, mailbox)
        return mailbox

    def held_tokens(self, job: Job) -> int:
        """Return how many tokens of its prompt this engine could reuse now."""
        return self.live.model.cache.hit_blocks(job) * BLOCK_TOKENS


class EngineFleet:
    """Some engines, and all prompts that they got since `forget`."""

    def __init__(self, count: int, *, tokenizer: str = "bytes", prefill_tokens_per_s: float = math.inf) -> None:
        """`tokenizer`: as `load_tokenizer` takes it."""
        limits = EngineLimits(
            cache_tokens=CACHE_TOKENS,
            block_size=BLOCK_TOKENS,
            prefill_tokens_per_s=prefill_tokens_per_s,
            decode_s=0.005,
        )
        words = load_tokenizer(tokenizer)
        self.task = ""  # of requests from now on; prompts in `tasks` have theirs from there
        self.tasks: Mapping[int, str] = {}  # by `prompt_key`, of prompts that are known in advance
        self.asked: list[AskedPrompt] = []
        self.requests: list[AgentRequest] = []  # as engines got them, from which to make a shape
        self.urls: list[str] = []
        self._began = trio.current_time()
        self.engines: list[WatchedEngine] = []
        for number in range(count):
            config = EngineConfig(f"engine-{number}", (MODEL,), limits, tokens_max=CACHE_TOKENS, answer_tokens=(8, 24))
            self.engines.append(WatchedEngine(config, words, self, number))

    async def start(self, nursery: trio.Nursery, ports: Sequence[int] = ()) -> None:
        """`ports`: one for each engine; any free ones by default."""
        for engine, wanted in zip(self.engines, ports or [0] * len(self.engines), strict=True):
            host, port = await nursery.start(serve, engine, "127.0.0.1", wanted)
            self.urls.append(f"http://{host}:{port}")

    def forget(self) -> None:
        """Empty the caches, and forget all prompts."""
        self.asked.clear()
        self.requests.clear()
        for engine in self.engines:
            engine.live.clear_cache()

    def prompt_key(self, path: str, body: bytes) -> int:
        """Return the key by which engines recognise the prompt of a request, however a router changes its body."""
        return last_key(self.engines[0].job_of(path, body))

    def requested(self, request: HttpRequest) -> None:
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers]
        at = trio.current_time() - self._began
        path = request.path.decode()
        self.requests.append(AgentRequest(at, self.task, kind_of(headers, request.body), path, headers, request.body))

    def note(self, number: int, held: Sequence[int], mailbox: Mailbox) -> None:
        task = self.tasks.get(last_key(mailbox.job), self.task)
        self.asked.append(AskedPrompt(task, number, mailbox.job, held, mailbox))


def kind_of(headers: Sequence[tuple[str, str]], body: bytes) -> str:
    """Return the kind of a request, by the headers that agents add for sub-agents, and by its tools."""
    names = {name.lower() for name, _ in headers}
    tools = {
        str(tool.get("name") or (tool.get("function") or {}).get("name")) for tool in loads(body).get("tools") or ()
    }
    if names & SUB_AGENT_FIELDS or (tools and not tools & SPAWN_TOOLS):
        return "sub"
    return "main" if tools else "bg"


def last_key(job: Job) -> int:
    """Return the key of the deepest whole block of a prompt, which identifies the whole prompt."""
    whole = job.prompt_tokens // BLOCK_TOKENS
    return job.keys[whole - 1] if whole else 0


@dataclass(frozen=True, slots=True)
class Reuse:
    """The result for an agent's prompts. `turns`: those that repeat half of an earlier prompt of their task."""

    prompts: int
    tokens: int
    reused: int
    possible: int
    turns: int
    at_holder: int

    @property
    def reached(self) -> float:
        """Share of the turns that reached a holder."""
        return self.at_holder / self.turns if self.turns else 1.0

    @property
    def lost(self) -> float:
        """Share of all prompt tokens that were computed though an engine held them."""
        return (self.possible - self.reused) / self.tokens if self.tokens else 0.0


def reuse_of(asked: Sequence[AskedPrompt]) -> Reuse:
    turns = [
        each
        for number, each in enumerate(asked)
        if any(each.task == other.task and each.continues(other) for other in asked[:number])
    ]
    return Reuse(
        prompts=len(asked),
        tokens=sum(each.tokens for each in asked),
        reused=sum(each.reused for each in asked),
        possible=sum(each.possible for each in asked),
        turns=len(turns),
        at_holder=sum(each.reached_a_holder for each in turns),
    )
