"""Engine presets: the numbers that were derived from are met, and names are told."""

from __future__ import annotations

import pytest

from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.engine.presets import H100, L4, LLAMA_8B, LLAMA_70B, PRESETS, derived, preset


def test_the_lab_is_the_fake_engine_without_options() -> None:
    assert preset("lab") == EngineLimits()


def test_a_derived_engine_meets_the_measurements_its_shares_come_from() -> None:
    alone = preset("h100-llama-8b")
    assert alone.decode_s + alone.decode_s_per_running == pytest.approx(0.00648, rel=0.02)
    qwen_32b = LLAMA_8B.__class__(32.8e9, layers=64, heads=8)
    assert derived(H100, qwen_32b, modes=2).prefill_tokens_per_s == pytest.approx(15_928, rel=0.01)


def test_the_arithmetic_of_one_preset_by_hand() -> None:
    limits = preset("l4-llama-8b")
    assert limits.cache_tokens == int((0.9 * 24e9 - 2 * 8.03e9) / 131_072) == 42_266
    assert limits.prefill_tokens_per_s == pytest.approx(0.53 * 121e12 / (2 * 8.03e9))
    assert limits.decode_s == pytest.approx(2 * 8.03e9 / (0.75 * 0.3e12))
    assert limits.decode_s_per_context_token == pytest.approx(131_072 / (0.75 * 0.3e12))


def test_every_preset_serves_a_long_prompt_with_any_block_size() -> None:
    for name in PRESETS:
        limits = preset(name, block_size=512)
        assert limits.block_size == 512
        assert limits.cache_tokens > 40_000


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        derived(L4, LLAMA_70B)


def test_an_unknown_name_is_reported_the_known_ones() -> None:
    with pytest.raises(ValueError, match="h100-llama-8b"):
        preset("h100")
