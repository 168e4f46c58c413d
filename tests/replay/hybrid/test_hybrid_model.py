"""Operations and bytes of a prefix: the numbers of Marconi's appendix, and the pages that engines log."""

from __future__ import annotations

import pytest

from ranvier_py.replay.hybrid.hybrid_model import HYBRID_MODELS, PAPER_7B, hybrid_model, paper_model


def test_a_checkpoint_of_the_papers_model_weighs_what_the_paper_computes() -> None:
    assert PAPER_7B.layer_state_bytes == 1_048_576 + 67_584
    assert PAPER_7B.state_bytes == 26_787_840
    assert PAPER_7B.token_bytes == 65_536
    assert PAPER_7B.state_bytes / PAPER_7B.token_bytes == 408.75
    assert 67_584 / PAPER_7B.layer_state_bytes == pytest.approx(0.06055, abs=5e-6)


def test_checkpoints_at_every_block_of_ten_thousand_tokens_take_what_the_paper_draws() -> None:
    fine = 625 * PAPER_7B.state_bytes + 10_000 * PAPER_7B.token_bytes
    transformer = 10_000 * 32 * PAPER_7B.layer_token_bytes
    assert fine == pytest.approx(17.398e9, rel=1e-4)
    assert fine / transformer == pytest.approx(3.318, abs=5e-4)


@pytest.mark.parametrize("tokens", [1, 100, 10_000])
def test_operations_for_each_byte_are_those_of_the_papers_table(tokens: int) -> None:
    width, columns = 4096, 128
    attention = 8 * tokens * width**2 + 4 * tokens**2 * width
    recurrent = 12 * tokens * width**2 + 16 * tokens * width * columns + 10 * tokens * width
    assert PAPER_7B.attention_flops(tokens) == 4 * attention
    assert PAPER_7B.recurrent_flops(tokens) == 24 * recurrent
    assert PAPER_7B.mlp_flops(tokens) == 28 * 16 * tokens * width**2
    assert attention / (4 * tokens * width) == tokens + 2 * width
    assert recurrent / (2 * width * columns) == pytest.approx(200.04 * tokens, rel=1e-4)


@pytest.mark.parametrize(
    ("tokens", "efficiency"), [(100, 39_272), (1_000, 142_463), (4_096, 185_300), (10_000, 201_460), (32_768, 229_599)]
)
def test_the_worth_of_a_byte_is_steep_below_four_thousand_tokens_and_flat_above(tokens: int, efficiency: int) -> None:
    assert round(PAPER_7B.prefix_flops(tokens) / PAPER_7B.prefix_bytes(tokens)) == efficiency


@pytest.mark.parametrize(
    ("name", "block_tokens", "state_tokens"),
    [
        ("qwen3.5-9b", 528, 1_572),
        ("nemotron-nano-9b-v2", 672, 4_441.5),
        ("qwen3-next-80b-a3b", 1_056, 3_144),
        ("granite-4.0-h-small", 528, 4_719.375),
        ("jamba-1.5-mini", 80, 532),
    ],
)
def test_blocks_are_as_long_as_vllm_makes_them(name: str, block_tokens: int, state_tokens: float) -> None:
    model = HYBRID_MODELS[name]
    assert model.block_tokens == block_tokens
    assert model.state_bytes / model.token_bytes == state_tokens
    assert (model.block_tokens - 16) * model.layer_token_bytes < model.layer_state_bytes


def test_vllm_logs_the_page_that_qwens_state_takes() -> None:
    model = HYBRID_MODELS["qwen3.5-9b"]
    assert model.layer_state_bytes == 2_146_304
    assert model.block_tokens * model.layer_token_bytes / model.layer_state_bytes == pytest.approx(1.0076, abs=5e-5)


def test_grouped_keys_take_less_and_leave_the_state_as_it_is() -> None:
    wide, grouped = paper_model(), HYBRID_MODELS["jamba-1.5-mini"]
    assert wide.layer_token_bytes == 4 * grouped.layer_token_bytes
    assert paper_model(columns=16).layer_state_bytes < wide.layer_state_bytes
    assert paper_model(32, 4, 36).state_bytes == 32 * wide.layer_state_bytes


def test_a_model_that_nobody_knows_is_refused_with_the_names_of_those_that_are() -> None:
    assert hybrid_model("paper-7b") is PAPER_7B
    with pytest.raises(ValueError, match="no hybrid model 'gpt': there are paper-7b, jamba"):
        hybrid_model("gpt")
