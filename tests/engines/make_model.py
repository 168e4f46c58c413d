"""Makes a model of random weights with a tokenizer and a chat template, as a model directory that engines can serve.

    .venv-vllm/bin/python tests/engines/make_model.py DIRECTORY [--kind hybrid] [--layers 8] [--width 512]
What it says is noise, of tokens of one word each, so that a text is cut into the same tokens again, as with a trained
model; token counts, prefix caching and the time that a prompt takes are real. 8 layers of width 512 (25 million
weights, of a fixed seed) are the fewest of which a prompt of 1,000 tokens takes visibly longer when it is not cached.
The tokenizer is byte-level BPE trained on the standard library. The template renders tools first, then messages between
two markers, with reasoning and calls: a chat is a prefix of its own next turn.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

ATTENTION, HYBRID = "attention", "hybrid"
VOCABULARY = 4096
PLAIN_TOKENS = 256
LOGIT_DEVIATION = 8.0  # of a plain token's; all others have 0, which is e^-20 beside the best of so many
HEAD_WIDTH = 64
CONTEXT_TOKENS = 8192
BEGIN, END, OPEN, CLOSE, PAD = MARKERS = ("<|begin|>", "<|end|>", "<|open|>", "<|close|>", "<|pad|>")
TEMPLATE = (
    "{{ bos_token }}"
    f"{{% if tools %}}{OPEN}tools\n{{{{ tools | tojson }}}}{CLOSE}\n{{% endif %}}"
    "{% for message in messages %}"
    f"{OPEN}{{{{ message['role'] }}}}\n"
    "{% if message.reasoning_content %}{{ message.reasoning_content }}\n{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }} {{ call.function.arguments | tojson }}\n"
    "{% endfor %}"
    f"{CLOSE}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{OPEN}assistant\n{{% endif %}}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))], trainer)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, pad_token=PAD, model_max_length=CONTEXT_TOKENS
    )
    whole.chat_template = TEMPLATE
    return whole


def plain_tokens(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Tokens that are a word each, and stay one wherever they stand."""
    words = [(name[1:], number) for name, number in sorted(tokenizer.get_vocab().items()) if name[:1] == "\u0120"]
    plain = [number for word, number in words if word.isalpha() and tokenizer.encode(f" {word}") == [number]]
    return plain[:PLAIN_TOKENS]


def config_of(kind: str, layers: int, width: int, vocabulary: int) -> PretrainedConfig:
    """One of ATTENTION, or of HYBRID: the first layer of three is of attention, the others are of Mamba 2."""
    both = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // HEAD_WIDTH,
        "num_key_value_heads": max(1, width // HEAD_WIDTH // 2),
        "max_position_embeddings": CONTEXT_TOKENS,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 4,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    if kind == ATTENTION:
        return LlamaConfig(intermediate_size=width * 11 // 4, head_dim=HEAD_WIDTH, **both)
    return GraniteMoeHybridConfig(
        layer_types=["mamba" if layer % 3 else "attention" for layer in range(layers)],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=width * 2,
        intermediate_size=width * 2,
        mamba_n_heads=width * 2 // HEAD_WIDTH,
        mamba_d_head=HEAD_WIDTH,
        mamba_d_state=64,
        mamba_expand=2,
        position_embedding_type="rope",
        **both,
    )


def make_weights(config: PretrainedConfig, spoken: list[int]) -> PreTrainedModel:
    """A model that nearly never says another token than these."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    head = torch.zeros_like(model.lm_head.weight)
    head[spoken] = torch.randn(len(spoken), config.hidden_size) * LOGIT_DEVIATION / config.hidden_size**0.5
    model.lm_head.weight = torch.nn.Parameter(head)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", choices=(ATTENTION, HYBRID), default=ATTENTION)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(options.directory)
    config = config_of(options.kind, options.layers, options.width, len(tokenizer))
    make_weights(config, plain_tokens(tokenizer)).save_pretrained(options.directory)


if __name__ == "__main__":
    main()
