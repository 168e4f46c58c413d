"""The inputs and outputs of an engine model: limits, events, refusals, statistics.

Times are seconds of the caller's clock; sizes are tokens unless a name says otherwise.
If a step computes P prompt tokens (Q: the number of tokens before each, summed) while D requests with C tokens of
context decode, it takes P / prefill_tokens_per_s + Q * prefill_s_per_depth
+ (decode_s + D * decode_s_per_running + C * decode_s_per_context_token if D else 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Literal, NamedTuple, get_args

CacheName = Literal[
    "attention",
    "vanilla",
    "vllm_plus",
    "sglang_plus",
    "marconi",
    "marconi_retuned",
    "vllm_align",
    "vllm_all",
    "sglang_no_buffer",
    "sglang_extra_buffer",
]
"""The kinds of prefix cache; `replay/hybrid/cache_models.py` describes them."""

CACHES: tuple[CacheName, ...] = get_args(CacheName)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Sizes and speeds of an engine. Speeds may be `inf` (instant); the times of a step may be 0."""

    cache_tokens: int = 200_000
    block_size: int = 16
    prefill_tokens_per_s: float = 20_000.0  # an 8B model on one large accelerator: 10,000 to 40,000
    prefill_s_per_depth: float = 0.0  # added for each pair of a prompt token and a token before it (attention)
    decode_s: float = 0.010  # one step that samples tokens: reading the weights
    decode_s_per_running: float = 0.0  # added to that step for each decoding request
    decode_s_per_context_token: float = 0.0  # and for each token of their contexts, whose keys and values they read
    running_max: int = 32  # vLLM's max_num_seqs
    waiting_max: int = 10_000  # requests beyond it are refused; a real queue of that length takes minutes
    step_tokens_max: int = 2048  # vLLM's max_num_batched_tokens: bounds how long a prefill delays the others' decoding
    cache_events_max: int = 0  # undrained cache events; 0 records none
    cache: CacheName = "attention"
    hybrid_model: str = "paper-7b"  # the model whose states a cache of hybrid models keeps

    def __post_init__(self) -> None:
        sizes = (self.cache_tokens // max(self.block_size, 1), self.running_max, self.step_tokens_max, self.waiting_max)
        times = (
            *(self.prefill_s_per_depth, self.decode_s),
            *(self.decode_s_per_running, self.decode_s_per_context_token),
        )
        if min(sizes) < 1 or not self.prefill_tokens_per_s > 0 or not all(0 <= each < inf for each in times):  # nor nan
            raise ValueError("engine sizes and speeds must be positive, times not negative")
        if self.running_max > self.step_tokens_max:  # refused by vLLM, too: some requests would never get a token
            raise ValueError("a step must have a token for each running request: step_tokens_max >= running_max")


class EngineEventKind(Enum):
    STARTED = "started"  # left the queue; `cached_tokens` is known from here on
    TOKEN = "token"  # noqa: S105 - one answer token is out; the first one when `tokens` == 1
    FINISHED = "finished"  # after its last token
    ABORTED = "aborted"  # by a restart


class EngineEvent(NamedTuple):
    """`tokens`: answer tokens generated so far. `cached_tokens`: prompt tokens that were not computed."""

    kind: EngineEventKind
    request_id: str
    at: float
    tokens: int
    cached_tokens: int


class EngineError(Exception):
    """The engine refuses a request. Nothing changed."""


class PromptTooLongError(EngineError):
    """The request needs more blocks than the engine has."""


class QueueFullError(EngineError):
    """The queue is at `waiting_max`."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Gauges of the last `now`, and totals since the last restart."""

    running: int
    waiting: int
    used_blocks: int
    capacity_blocks: int
    found_blocks: int
    evicted_blocks: int
    generation: int  # 1 at first, one more with each restart
    started: int
    finished: int
    cancelled: int
    prompt_tokens: int  # of started requests: queries of the prefix cache
    cached_tokens: int  # those of them that were found: the cache's hits
    generated_tokens: int
