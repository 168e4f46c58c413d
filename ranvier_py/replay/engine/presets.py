"""Limits of engines by preset name, derived from public figures.

Rule: an engine is a model on one or more accelerators, with 16-bit weights and cache and vLLM's defaults. Cache tokens
are derived from memory, prefill from arithmetic, the decode step and its cost for context from memory bandwidth. Left
out: attention's cost in long prefills, communication between accelerators, and the engine's own time on the host. So
absolute times are optimistic; a replay is for ratios between engines and between policies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from ranvier_py.replay.engine.engine_values import CacheName, EngineLimits

ARITHMETIC_SHARE = 0.53
"""15,928 prompt tokens/s of Qwen3-32B on two H100 (the constant in llm-d-router's prefix-cache filter):
2 operations x 32.8e9 parameters x 15,928 / (2 x 989e12) = 0.53."""
BANDWIDTH_SHARE = 0.75
"""75 tokens/s of one request, Llama-3.1-8B on one A100 40 GB (vLLM 0.23.0, johnmusgrave.com, "vLLM throughput-latency
sweep"): 16.06e9 bytes x 75 / 1.555e12 = 0.77; 6.48 ms a token on one H100 (vLLM 0.21.0, the concurrency sweep of
yobitelcomm's InferenceBench): 16.06e9 / 0.00648 / 3.35e12 = 0.74."""

MEMORY_SHARE = 0.9
"""vLLM's gpu_memory_utilization. Data sheets count in 1e9 bytes; the difference to 2**30 is left to activations."""

BYTES = 2  # of a weight, of a key and of a value: 16 bits


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Dense 16-bit operations/s, bytes/s, bytes from NVIDIA's data sheets; then vLLM's defaults for its API server."""

    operations_per_s: float
    bytes_per_s: float
    memory_bytes: float
    step_tokens_max: int  # max_num_batched_tokens
    running_max: int  # max_num_seqs


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A model's parameters, layers, heads of keys and values, and head size, from its config.json."""

    parameters: float
    layers: int
    heads: int
    head_size: int = 128

    @property
    def weight_bytes(self) -> float:
        return BYTES * self.parameters

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * BYTES * self.layers * self.heads * self.head_size


# vLLM (engine/arg_utils.py) gives 8192 and 1024 to accelerators from 70 GiB on that are no A100, else 2048 and 256.
H100 = Accelerator(989e12, 3.35e12, 80e9, 8192, 1024)  # SXM5 80 GB
A100 = Accelerator(312e12, 2.039e12, 80e9, 2048, 256)  # SXM4 80 GB
L4 = Accelerator(121e12, 0.3e12, 24e9, 2048, 256)  # the sheet's 242e12 are with sparsity

LLAMA_8B = LanguageModel(8.03e9, layers=32, heads=8)  # Llama 3.1 8B: 16.06 GB, 131,072 bytes a token
LLAMA_70B = LanguageModel(70.6e9, layers=80, heads=8)  # Llama 3.1 70B: 141.2 GB, 327,680 bytes a token


def derived(accelerator: Accelerator, model: LanguageModel, modes: int = 1) -> EngineLimits:
    """Return the limits of `model` on `modes` tensor-parallel accelerators. Raises ValueError if it does not fit."""
    left_bytes = MEMORY_SHARE * accelerator.memory_bytes * modes - model.weight_bytes
    bytes_per_s = BANDWIDTH_SHARE * accelerator.bytes_per_s * modes
    prefill_tokens_per_s = ARITHMETIC_SHARE * accelerator.operations_per_s * modes / (2 * model.parameters)
    return EngineLimits(
        cache_tokens=int(left_bytes / model.token_bytes),
        prefill_tokens_per_s=prefill_tokens_per_s,
        decode_s=model.weight_bytes / bytes_per_s,
        decode_s_per_running=1 / prefill_tokens_per_s,  # a decoded token costs as much arithmetic as a prompt token
        decode_s_per_context_token=model.token_bytes / bytes_per_s,
        running_max=accelerator.running_max,
        step_tokens_max=accelerator.step_tokens_max,
    )


PROFILES: tuple[CacheName, ...] = (
    "attention",
    "vllm_align",
    "vllm_all",
    "sglang_no_buffer",
    "sglang_extra_buffer",
    "marconi",
    "marconi_retuned",
)
"""Caches that are presets as well, so that one router can have engines of several kinds."""

PRESETS = MappingProxyType(
    {
        "lab": EngineLimits(),  # the lab's fake engine as it is started without options
        "h100-llama-8b": derived(H100, LLAMA_8B),  # 427k tokens, 32,600/s, 6.4 ms
        "h100-llama-70b-tp4": derived(H100, LLAMA_70B, modes=4),  # 448k tokens, 14,800/s, 14.1 ms
        "a100-llama-8b": derived(A100, LLAMA_8B),  # 427k tokens, 10,300/s, 10.5 ms
        "a100-llama-70b-tp4": derived(A100, LLAMA_70B, modes=4),  # 448k tokens, 4,700/s, 23 ms
        "l4-llama-8b": derived(L4, LLAMA_8B),  # 42k tokens, 4,000/s, 71 ms
        **{name.replace("_", "-"): EngineLimits(cache=name) for name in PROFILES},  # as lab, with another cache
    }
)


def preset(name: str, block_size: int = 16) -> EngineLimits:
    """Return the preset of this name, with this block size. Raises ValueError that lists the names."""
    if name not in PRESETS:
        raise ValueError(f"no engine preset {name!r}: there are {', '.join(PRESETS)}")
    return replace(PRESETS[name], block_size=block_size)
