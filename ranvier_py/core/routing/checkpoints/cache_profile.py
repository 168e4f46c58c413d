"""The rules by which engines keep checkpoints of hybrid models, and how an engine's rule is recognised. Pure.

Rule: a `CacheProfile` is a `CheckpointProfile` with the name by which operators know it, or `attention`: every block
can be reused. `recognised` finds an engine's by what it shows of itself (`Signs`).
Sources: vLLM's positions are those of its own cache manager (0.32, `tests/engines`). Those of SGLang were read from
the source of its MambaRadixCache and model one prefill chunk: the tree itself reuses what `no_buffer` says, and a
little less than `extra_buffer` says (`tests/engines`). Marconi's are exact.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from math import gcd
from types import MappingProxyType
from typing import NamedTuple

AUTO = "auto"

VLLM_GRID = 528
"""Tokens of a vLLM block of a hybrid model until its events or metrics name them: those of Qwen3.5."""

EXTRA_BUFFER_GRID = 64
"""SGLang's `mamba_cache_chunk_size`. Sixteen cached depths that all are multiples of it are no coincidence."""

LONGEST_BLOCK = 256
"""No block of an attention engine is longer: an engine whose cached depths have longer steps keeps checkpoints."""

GRID_MAX = 1 << 20

STEPS_SEEN, DIFFERENT_MIN = 16, 4
"""So many counts of cached tokens must share a step before it is believed, and so many of them must differ. That 16
multiples of 16 are all multiples of 32 by chance has a probability of 1 in 65,536; chats behind one system prompt, or
one prompt that comes again and again, have one count, which is no step."""


class CheckpointKind(IntEnum):
    """How a router knows of a checkpoint: by which rule or report. Three bits of a mark (`checkpoint_index`)."""

    PROMPT_END = 0
    DECODE_END = 1
    JUNCTION = 2
    EVERY = 3
    ANSWERED = 4  # the engine's count of cached tokens ended there
    AHEAD = 5  # the engine's events report one behind this prefix, for prompts that left one there; peers get none
    EVENT = 6  # the engine's events report it


@dataclass(frozen=True, slots=True)
class CheckpointProfile:
    """Which positions are kept, on a grid of g. The prompt has P tokens, and T with its answer; K of them were computed
    before (never the prompt's last one), of which the engine reuses R, up to the deepest checkpoint at or before K.

    every         all multiples of g that were computed
    prompt_end    the last multiple of g in the prompt, or in all of it but its last token (`last_left`)
    junction      the last multiple of g in K, where R is at least g before it
    decode_grid   the last multiple of it before T, where that is behind the prompt; 0: none of answers
    decode_last   after the last token, off the grid"""

    grid: int
    every: bool = False
    prompt_end: bool = False
    junction: bool = False
    decode_grid: int = 0
    decode_last: bool = False
    last_left: bool = False  # a prompt's last token is left out

    def kept(self, prompt: int, total: int, common: int, reused: int) -> Iterator[int]:
        """Yield the positions that a request keeps, by P, T, K and R; some may be kept already."""
        return (position for position, _ in self.marked(prompt, total, common, reused))

    def marked(self, prompt: int, total: int, common: int, reused: int) -> Iterator[tuple[int, CheckpointKind]]:
        """Yield the positions that a request keeps, each with the rule that keeps it."""
        grid = self.grid
        if self.every:
            yield from ((at, CheckpointKind.EVERY) for at in range(grid, (total - 1) // grid * grid + 1, grid))
        if self.prompt_end and (at := self.end_of(prompt)):
            yield at, CheckpointKind.PROMPT_END
        if self.junction and self.leaves_junction(common, reused):
            yield common // grid * grid, CheckpointKind.JUNCTION
        if self.decode_last:
            yield total, CheckpointKind.DECODE_END
        elif self.decode_grid and (at := (total - 1) // self.decode_grid * self.decode_grid) > prompt:
            yield at, CheckpointKind.DECODE_END

    def end_of(self, prompt: int) -> int:
        """Return the position that is kept at the end of a prompt; 0 for one shorter than a step."""
        return (prompt - self.last_left) // self.grid * self.grid

    def leaves_junction(self, common: int, reused: int) -> bool:
        """Whether the common prefix, cut to the grid, exceeds what is reused by one step or more."""
        return common // self.grid * self.grid - reused >= self.grid

    @property
    def invests(self) -> bool:
        """Whether a request leaves a new checkpoint where it parts from what was computed before (R4). Where every
        block gets one it does not: what was computed before has it already, or gave it up."""
        return self.junction


def aligned(grid: int, *, junction: bool = True) -> CheckpointProfile:
    """Return the rule of vLLM's `mamba_cache_mode` align where it retains all states of steps that end on its grid."""
    return CheckpointProfile(grid, prompt_end=True, junction=junction, decode_grid=grid)


def retained(grid: int) -> CheckpointProfile:
    """Return the rule by which vLLM keeps checkpoints by default (`prefix_cache_retention_interval` 0): what another
    prompt can go on from, and nothing of the answer, whatever `mamba_cache_mode` is."""
    return CheckpointProfile(grid, prompt_end=True, junction=True, last_left=True)


NO_BUFFER = CheckpointProfile(1, prompt_end=True, decode_grid=1)
EXTRA_BUFFER = CheckpointProfile(EXTRA_BUFFER_GRID, prompt_end=True, junction=True, decode_grid=256)
MARCONI = CheckpointProfile(1, junction=True, decode_last=True)
NOTHING = CheckpointProfile(1)


def on_grid(profile: CheckpointProfile, block_tokens: int) -> CheckpointProfile:
    """Return the rule where only ends of blocks are known: its grids are rounded up to multiples of `block_tokens`."""
    blocks = -(-profile.grid // block_tokens)
    decode = -(-profile.decode_grid // block_tokens) if profile.decode_grid else 0
    return replace(profile, grid=blocks * block_tokens, decode_grid=decode * block_tokens)


def step_of(counts: Collection[int]) -> int:
    """Return the step of which the latest counts of cached tokens, above 0, are multiples; 0 while they show none."""
    return gcd(*counts) if len(counts) >= STEPS_SEEN and len(set(counts)) >= DIFFERENT_MIN else 0


class CacheProfile(NamedTuple):
    """What kind of prefix cache an engine has. `checkpoints` None: attention's, which reuses every block."""

    name: str
    checkpoints: CheckpointProfile | None = None

    @property
    def label(self) -> str:
        """The profile as an operator may write it."""
        rule = self.checkpoints
        return f"{self.name}:{rule.grid}" if rule is not None and self.name in GRIDDED else self.name


ATTENTION = CacheProfile("attention")
GRIDDED = ("vllm-align", "vllm-dense", "vllm-all")

CACHE_PROFILES = MappingProxyType(
    {
        each.name: each
        for each in (
            ATTENTION,
            CacheProfile("vllm-align", retained(VLLM_GRID)),
            CacheProfile("vllm-dense", aligned(VLLM_GRID)),
            CacheProfile("vllm-all", CheckpointProfile(VLLM_GRID, every=True)),
            CacheProfile("vllm-none", NOTHING),
            CacheProfile("sglang-no-buffer", NO_BUFFER),
            CacheProfile("sglang-extra-buffer", EXTRA_BUFFER),
            CacheProfile("marconi", MARCONI),
        )
    }
)
"""By name. After a name of GRIDDED an operator may write `:` and the tokens of a block."""


def profile_named(text: str) -> CacheProfile:
    """Return the profile of vllm-align, vllm-align:528, sglang-no-buffer … Raises ValueError that lists the names."""
    name, colon, grid = text.partition(":")
    profile = CACHE_PROFILES.get(name)
    if profile is None or (colon and name not in GRIDDED):
        raise ValueError(f"must be {AUTO} or one of {', '.join(CACHE_PROFILES)}; vllm-align:528 names its blocks")
    if not colon:
        return profile
    if not (grid.isascii() and grid.isdigit() and 0 < int(grid) <= GRID_MAX):
        raise ValueError(f"the tokens of a block must be a number from 1 to {GRID_MAX}")
    return with_grid(profile, int(grid))


def with_grid(profile: CacheProfile, grid: int) -> CacheProfile:
    """Return the profile with blocks of so many tokens; unchanged for 0 or attention."""
    rule = profile.checkpoints
    if rule is None or not grid:
        return profile
    return profile._replace(checkpoints=replace(rule, grid=grid, decode_grid=grid if rule.decode_grid else 0))


HYBRID_MODELS_NAMED = re.compile(
    r"jamba|bamba|zamba|nemotron-?h|nemotron-(nano-\d+b-v2|3-)|qwen-?3[-_.]?next|qwen-?3\.5|granite-?4[\d.]*-h|"
    r"falcon-?h1|kimi-linear|lfm2|plamo-?2|minimax-text|mamba|rwkv",
    re.IGNORECASE,
)
"""Matches names of models with recurrent layers. Llama's Nemotron Nano and Granite 4 Micro have none."""


@dataclass(frozen=True, slots=True)
class Signs:
    """What an engine shows of its cache. Empty, 0 or None: nothing yet."""

    configured: str = AUTO  # by the operator
    engine: str = ""  # vllm or sglang: its model cards' owner, or the names on its metrics page
    models: tuple[str, ...] = ()  # names on its model cards
    has_states: bool | None = None  # its metrics page: whether it keeps recurrent states
    state_mode: str = ""  # vLLM's `mamba_cache_mode`: align, all, none
    retention: str = ""  # vLLM's `prefix_cache_retention_interval`: None where it keeps all states that it makes
    block_tokens: int = 0  # tokens of a block, by events or metrics
    state_groups: bool = False  # its events name groups of recurrent states
    step_tokens: int = 0  # the step that all of its latest counts of cached tokens are multiples of


def recognised(signs: Signs) -> CacheProfile:
    """Return the profile that fits the signs best: what the operator wrote, groups in its events, its metrics page, the
    name on its model card or the depths of its cached counts."""
    if signs.configured != AUTO:
        return profile_named(signs.configured)
    if not keeps_states(signs):
        return ATTENTION
    if signs.engine == "sglang":
        is_gridded = signs.step_tokens >= EXTRA_BUFFER_GRID and not signs.step_tokens % EXTRA_BUFFER_GRID
        return CACHE_PROFILES["sglang-extra-buffer" if is_gridded else "sglang-no-buffer"]
    name = vllm_name(signs.state_mode, signs.retention)
    grid = signs.block_tokens
    if (
        grid < LONGEST_BLOCK <= signs.step_tokens
    ):  # else counts of a few prompts would make multiples of a known block one
        grid = signs.step_tokens
    return with_grid(CACHE_PROFILES[name], grid)


def vllm_name(mode: str, retention: str) -> str:
    """Return the name of a vLLM profile by the engine's options, as its metrics page names them."""
    if mode == "none":
        return "vllm-none"
    if retention not in ("", "None"):  # 0, or so many tokens between states that are kept beside the default ones
        return "vllm-align"
    if mode == "all":
        return "vllm-all"
    return "vllm-dense" if retention else "vllm-align"


def keeps_states(signs: Signs) -> bool:
    """Whether the engine has recurrent layers. What it does counts for more than the name of its model."""
    if signs.state_groups or signs.has_states is not None:
        return signs.state_groups or bool(signs.has_states)
    return signs.step_tokens >= LONGEST_BLOCK or any(HYBRID_MODELS_NAMED.search(model) for model in signs.models)
