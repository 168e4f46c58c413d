"""What goes into an engine model and what comes out of it: limits, events, refusals, statistics.

Times are seconds in the caller's clock, sizes are tokens where a name says nothing else.
A step that computes P prompt tokens, with Q tokens before them (before each, summed up), while D requests with C tokens
of context decode takes P / prefill_tokens_per_s + Q * prefill_s_per_depth
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
"""What an engine's prefix cache keeps: `replay/hybrid/cache_models.py` says what each is."""

CACHES: tuple[CacheName, ...] = get_args(CacheName)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can do. Speeds may be `inf` (instant); the times of a step may be 0."""

    cache_tokens: int = 200_000
    block_size: int = 16
    prefill_tokens_per_s: float = 20_000.0  # an 8B model on one large accelerator: 10,000 to 40,000
    prefill_s_per_depth: float = 0.0  # added for each prompt token and each token before it, which attention reads
    decode_s: float = 0.010  # one step that samples tokens: reading the weights
    decode_s_per_running: float = 0.0  # added to that step for each decoding request
    decode_s_per_context_token: float = 0.0  # and for each token whose keys and values these requests read
    running_max: int = 32  # vLLM's max_num_seqs
    waiting_max: int = 10_000  # beyond it a request is refused; a real queue of that length is minutes long
    step_tokens_max: int = 2048  # vLLM's max_num_batched_tokens: how long a prefill may hold up the others' decoding
    cache_events_max: int = 0  # undrained cache events; 0 records none
    cache: CacheName = "attention"
    hybrid_model: str = "paper-7b"  # whose checkpoints such a cache keeps

    def __post_init__(self) -> None:
        sizes = (self.cache_tokens // max(self.block_size, 1), self.running_max, self.step_tokens_max, self.waiting_max)
        times = (
            *(self.prefill_s_per_depth, self.decode_s),
            *(self.decode_s_per_running, self.decode_s_per_context_token),
        )
        if min(sizes) < 1 or not self.prefill_tokens_per_s > 0 or not all(0 <= each < inf for each in times):  # nor nan
            raise ValueError("engine sizes and speeds must be positive, times not negative")
        if self.running_max > self.step_tokens_max:  # vLLM refuses that too: somebody would never get a turn
            raise ValueError("a step must have a token for each running request: step_tokens_max >= running_max")


class EngineEventKind(Enum):
    STARTED = "started"  # left the queue; `cached_tokens` is known from here on
    TOKEN = "token"  # noqa: S105 - one answer token is out; the first one when `tokens` == 1
    FINISHED = "finished"  # after its last token
    ABORTED = "aborted"  # by a restart


class EngineEvent(NamedTuple):
    """`tokens`: answer tokens out so far. `cached_tokens`: prompt tokens that were not computed."""

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
    """Gauges of this moment, and totals since the last restart."""

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
    cached_tokens: int  # of these, found: its hits
    generated_tokens: int
