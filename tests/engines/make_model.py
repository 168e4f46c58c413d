"""Makes a Llama of random weights with a tokenizer and a chat template, as a model directory that engines can serve.

    .venv-vllm/bin/python tests/engines/make_model.py DIRECTORY [--layers 8] [--width 512]

What it says is noise; token counts, prefix caching and the time that a prompt takes are real. 8 layers of width 512 are
25 million weights: the smallest of which a prompt of 1,000 tokens takes visibly longer when it is not cached.
Weights come from a fixed seed. The tokenizer is byte-level BPE trained on the standard library's own sources, so it is
the same wherever Python's version is. The template renders one message after the other between two markers, so a chat
is a prefix of its own next turn.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
HEAD_WIDTH = 64
CONTEXT_TOKENS = 8192
BEGIN, END, OPEN, CLOSE, PAD = MARKERS = ("<|begin|>", "<|end|>", "<|open|>", "<|close|>", "<|pad|>")
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    f"{OPEN}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{CLOSE}\n"
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


def make_weights(layers: int, width: int, vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_WIDTH,
        num_key_value_heads=max(1, width // HEAD_WIDTH // 2),
        head_dim=HEAD_WIDTH,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=4,
        tie_word_embeddings=True,
        dtype="float32",
    )
    return LlamaForCausalLM(config).to(torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(options.directory)
    make_weights(options.layers, options.width, len(tokenizer)).save_pretrained(options.directory)


if __name__ == "__main__":
    main()
