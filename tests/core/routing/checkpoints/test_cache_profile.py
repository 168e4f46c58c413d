"""R1: an engine's cache profile, by what it shows of itself."""

from __future__ import annotations

from itertools import product

import pytest

from ranvier_py.core.routing.checkpoints.cache_profile import (
    CACHE_PROFILES,
    CheckpointKind,
    CheckpointProfile,
    Signs,
    aligned,
    profile_named,
    recognised,
)

VLLM, SGLANG = Signs(engine="vllm"), Signs(engine="sglang")


@pytest.mark.parametrize(
    ("signs", "label"),
    [
        (VLLM, "attention"),
        (Signs(engine="vllm", has_states=False, models=("Qwen/Qwen3-Next-80B-A3B",)), "attention"),
        (Signs(engine="vllm", has_states=True, state_mode="align", block_tokens=672), "vllm-align:672"),
        (Signs(engine="vllm", has_states=True, state_mode="all", block_tokens=528), "vllm-all:528"),
        (Signs(engine="vllm", has_states=True, state_mode="all", retention="None", block_tokens=528), "vllm-all:528"),
        (Signs(engine="vllm", has_states=True, state_mode="all", retention="0", block_tokens=528), "vllm-align:528"),
        (Signs(engine="vllm", has_states=True, state_mode="align", retention="0"), "vllm-align:528"),
        (Signs(engine="vllm", has_states=True, state_mode="align", retention="None"), "vllm-dense:528"),
        (Signs(engine="vllm", has_states=True, state_mode="none", block_tokens=528), "vllm-none"),
        (Signs(engine="vllm", state_groups=True, block_tokens=1056), "vllm-align:1056"),
        (Signs(engine="vllm", models=("ai21labs/AI21-Jamba-1.5-Mini",)), "vllm-align:528"),
        (Signs(engine="sglang", has_states=True), "sglang-no-buffer"),
        (Signs(engine="sglang", has_states=True, step_tokens=64), "sglang-extra-buffer"),
        (Signs(engine="sglang", has_states=True, step_tokens=3), "sglang-no-buffer"),
        (Signs(engine="vllm", has_states=True, block_tokens=528, step_tokens=1584), "vllm-align:528"),
        (Signs(engine="vllm", has_states=True, block_tokens=16, step_tokens=528), "vllm-align:528"),
        (Signs(engine="", step_tokens=528), "vllm-align:528"),
        (Signs(configured="sglang-extra-buffer", engine="vllm", has_states=False), "sglang-extra-buffer"),
        (Signs(configured="attention", engine="vllm", has_states=True), "attention"),
    ],
)
def test_an_engine_is_recognised_by_the_best_of_its_signs(signs: Signs, label: str) -> None:
    assert recognised(signs).label == label


@pytest.mark.parametrize(
    ("model", "keeps_states"),
    [
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", True),
        ("nvidia/Llama-3.1-Nemotron-Nano-8B-v1", False),
        ("ibm-granite/granite-4.0-h-small", True),
        ("ibm-granite/granite-4.0-micro", False),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", True),
        ("Qwen/Qwen3-32B", False),
        ("tiiuae/Falcon-H1-34B-Instruct", True),
    ],
)
def test_a_model_card_names_the_families_with_recurrent_layers(model: str, keeps_states: bool) -> None:
    assert (recognised(Signs(engine="vllm", models=(model,))).checkpoints is not None) is keeps_states


def test_every_profile_is_named_as_its_label_is_written() -> None:
    for profile in CACHE_PROFILES.values():
        assert profile_named(profile.label) == profile


@pytest.mark.parametrize("text", ["", "vllm", "attention:16", "vllm-align:", "vllm-align:0", "vllm-align:-1", "sglang"])
def test_a_profile_of_no_engine_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be|number"):
        profile_named(text)


def test_every_kept_position_lies_on_its_grid_and_is_named_by_its_rule() -> None:
    profiles = [aligned(8), CheckpointProfile(8, every=True), CheckpointProfile(4, junction=True, decode_grid=8)]
    for profile, prompt, output, common in product(profiles, range(1, 40), range(1, 20), range(0, 40, 3)):
        if common >= prompt:
            continue
        total = prompt + output
        for position, kind in profile.marked(prompt, total, common, 0):
            grid = profile.decode_grid if kind is CheckpointKind.DECODE_END else profile.grid
            assert position % grid == 0
            assert 0 < position < total or position == prompt
