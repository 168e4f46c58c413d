"""Operations and bytes that a hybrid model needs for a prefix, as whole numbers. Pure.

A prefix of L tokens has keys and values that grow with L, and one recurrent state of fixed size (a *checkpoint*) that
is useless at any other length. The formulas are from Marconi (Pan et al., appendix A, table 1), generalised to grouped
keys, other widths and other precisions; `PAPER_7B` gives the paper's own numbers. In its table the recurrent layer's
last term reads 10 L; 10 L D is meant, and is computed here.

Left out, as in the paper: norms, embeddings, and the head that samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

BLOCK_STEP_TOKENS = 16
"""vLLM lengthens the blocks of hybrid models in steps of so many tokens."""


@dataclass(frozen=True, slots=True)
class HybridModel:
    """A model's layers by kind, and the widths that determine its operations and bytes. Precisions: bytes per number.

    `inner`: channels of a recurrent layer. `state_rows` * `state_columns`: how many numbers its state has.
    `conv_channels` * `conv_taps`: how many its convolution keeps. `mlp_parameters`: of all MLP layers together, with
    only the experts that one token uses.
    """

    name: str
    width: int
    attention_layers: int
    recurrent_layers: int
    mlp_layers: int
    attention_width: int  # query heads times their size
    kv_width: int  # key heads times their size
    inner: int
    state_rows: int
    state_columns: int
    conv_channels: int
    conv_taps: int
    mlp_parameters: int
    precision: int = 2
    state_precision: int = 2

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_width * self.precision

    @property
    def token_bytes(self) -> int:
        return self.attention_layers * self.layer_token_bytes

    @property
    def layer_state_bytes(self) -> int:
        """Bytes of one recurrent layer's state and convolution."""
        state = self.state_rows * self.state_columns * self.state_precision
        return state + self.conv_channels * self.conv_taps * self.precision

    @property
    def state_bytes(self) -> int:
        """Bytes of one checkpoint, of all recurrent layers."""
        return self.recurrent_layers * self.layer_state_bytes

    @property
    def block_tokens(self) -> int:
        """vLLM's block: the least multiple of 16 tokens whose keys and values in a layer take no less than a state."""
        return BLOCK_STEP_TOKENS * -(-self.layer_state_bytes // (BLOCK_STEP_TOKENS * self.layer_token_bytes))

    @property
    def state_groups(self) -> int:
        """Groups of recurrent layers with a block table each: vLLM makes them as large as the attention group."""
        return -(-self.recurrent_layers // self.attention_layers)

    def recurrent_flops(self, tokens: int) -> int:
        """Return the operations of all recurrent layers for so many tokens, at any depth."""
        each = 6 * self.width * self.inner + 8 * self.inner * self.state_columns + 5 * self.inner
        return self.recurrent_layers * tokens * each

    def attention_flops(self, tokens: int) -> int:
        """Return the operations of all attention layers for the first so many tokens of a prompt."""
        linear = 4 * self.width * (self.attention_width + self.kv_width)
        return self.attention_layers * (linear * tokens + 4 * tokens * tokens * self.attention_width)

    def mlp_flops(self, tokens: int) -> int:
        return 2 * self.mlp_parameters * tokens

    def prefix_flops(self, tokens: int) -> int:
        """Return the operations that reusing a prefix of so many tokens saves."""
        return self.recurrent_flops(tokens) + self.attention_flops(tokens) + self.mlp_flops(tokens)

    def prefix_bytes(self, tokens: int) -> int:
        """Return the bytes that keeping such a prefix takes: a checkpoint, and keys and values."""
        return self.state_bytes + tokens * self.token_bytes


def paper_model(
    recurrent_layers: int = 24, attention_layers: int = 4, mlp_layers: int = 28, width: int = 4096, columns: int = 128
) -> HybridModel:
    """Make a model as in the paper: keys as wide as the model, all numbers of 16 bits, channels twice the width.

    The state has `width` rows, half of what such layers really have, and the convolution keeps four taps.
    """
    return HybridModel(
        name=f"{recurrent_layers}:{attention_layers}:{mlp_layers}",
        width=width,
        attention_layers=attention_layers,
        recurrent_layers=recurrent_layers,
        mlp_layers=mlp_layers,
        attention_width=width,
        kv_width=width,
        inner=2 * width,
        state_rows=width,
        state_columns=columns,
        conv_channels=2 * width + 2 * columns,
        conv_taps=4,
        mlp_parameters=mlp_layers * 8 * width * width,
    )


PAPER_7B = paper_model()  # D 4096, N 128: a checkpoint of 26,787,840 bytes, 65,536 bytes a token

# From their config.json (hub: ai21labs/AI21-Jamba-1.5-Mini, nvidia/NVIDIA-Nemotron-Nano-9B-v2,
# Qwen/Qwen3-Next-80B-A3B-Instruct, Qwen/Qwen3.5-9B, ibm-granite/granite-4.0-h-small); a convolution over k tokens keeps
# k - 1 of them. `block_tokens` of Nemotron (672) and Qwen3.5 (528) equal the block sizes that vLLM logs.
JAMBA_MINI = HybridModel(
    "jamba-1.5-mini",
    width=4096,
    attention_layers=4,
    recurrent_layers=28,
    mlp_layers=32,
    attention_width=32 * 128,
    kv_width=8 * 128,
    inner=2 * 4096,
    state_rows=2 * 4096,  # Mamba 1: each channel has a state
    state_columns=16,
    conv_channels=2 * 4096,
    conv_taps=3,
    mlp_parameters=(16 + 2 * 16) * 3 * 4096 * 14336,  # every second layer has experts; a token uses two
)
NEMOTRON_NANO = HybridModel(
    "nemotron-nano-9b-v2",
    width=4480,
    attention_layers=4,
    recurrent_layers=27,
    mlp_layers=25,
    attention_width=40 * 128,
    kv_width=8 * 128,
    inner=128 * 80,
    state_rows=128 * 80,
    state_columns=128,
    conv_channels=128 * 80 + 2 * 8 * 128,
    conv_taps=3,
    mlp_parameters=25 * 2 * 4480 * 15680,
)
QWEN_NEXT = HybridModel(
    "qwen3-next-80b-a3b",
    width=2048,
    attention_layers=12,
    recurrent_layers=36,
    mlp_layers=48,
    attention_width=16 * 256,
    kv_width=2 * 256,
    inner=32 * 128,
    state_rows=32 * 128,
    state_columns=128,
    conv_channels=(2 * 16 + 32) * 128,
    conv_taps=3,
    mlp_parameters=48 * (10 + 1) * 3 * 2048 * 512,
    state_precision=4,
)
QWEN_9B = HybridModel(
    "qwen3.5-9b",
    width=4096,
    attention_layers=8,
    recurrent_layers=24,
    mlp_layers=32,
    attention_width=16 * 256,
    kv_width=4 * 256,
    inner=32 * 128,
    state_rows=32 * 128,
    state_columns=128,
    conv_channels=(2 * 16 + 32) * 128,
    conv_taps=3,
    mlp_parameters=32 * 3 * 4096 * 12288,
    state_precision=4,
)
GRANITE_SMALL = HybridModel(
    "granite-4.0-h-small",
    width=4096,
    attention_layers=4,
    recurrent_layers=36,
    mlp_layers=40,
    attention_width=32 * 128,
    kv_width=8 * 128,
    inner=128 * 64,
    state_rows=128 * 64,
    state_columns=128,
    conv_channels=128 * 64 + 2 * 128,
    conv_taps=3,
    mlp_parameters=40 * 3 * 4096 * (10 * 768 + 1536),
)

HYBRID_MODELS = MappingProxyType(
    {
        "paper-7b": PAPER_7B,
        **{each.name: each for each in (JAMBA_MINI, NEMOTRON_NANO, QWEN_NEXT, QWEN_9B, GRANITE_SMALL)},
    }
)


def hybrid_model(name: str) -> HybridModel:
    """Return the model of this name. Raises ValueError that lists the names."""
    if name not in HYBRID_MODELS:
        raise ValueError(f"no hybrid model {name!r}: there are {', '.join(HYBRID_MODELS)}")
    return HYBRID_MODELS[name]
