"""Each way to misunderstand an engine shows by its own evidence, and by no other's."""

from random import Random

import pytest

from ranvier_py.core.engine_cache.calibration.biases import Bias, Evidence, present

BLOCK = 16


def named(evidence: Evidence) -> list[Bias]:
    return [bias for bias, strength in evidence.strengths(BLOCK).items() if present(False, strength)]


def healthy(evidence: Evidence, answers: int, rng: Random, step: int = BLOCK) -> None:
    for _ in range(answers):
        predicted = BLOCK * rng.randint(1, 400)
        cached = predicted // step * step
        evidence.counted(cached)
        evidence.measured(5)
        if cached:
            evidence.found(cached, predicted)
        evidence.used_again(cached, max(1, predicted // step * step))


def test_an_engine_that_is_understood_has_no_bias() -> None:
    evidence = Evidence()
    healthy(evidence, 200, Random(1))
    assert named(evidence) == []


@pytest.mark.parametrize(("step", "bias"), [(32, Bias.BLOCK_SIZE), (128, Bias.BLOCK_SIZE), (1056, Bias.HYBRID)])
def test_hits_in_larger_steps_are_a_larger_block_or_a_hybrid_model(step: int, bias: Bias) -> None:
    evidence = Evidence()
    healthy(evidence, 200, Random(1), step)
    assert named(evidence) == [bias]
    assert evidence.step_tokens == step


def test_prompts_of_one_shape_are_no_larger_block() -> None:
    """Every prompt of a load test may be a multiple of 512 tokens."""
    evidence = Evidence()
    for number in range(100):
        evidence.found(512 * (1 + number % 9), 512 * (1 + number % 9))
    assert evidence.step_tokens == 0


def test_one_prompt_that_comes_again_and_again_shows_no_step() -> None:
    """Its count is a multiple of the engine's blocks, and short of what blocks of ours could be cached."""
    evidence = Evidence()
    for _ in range(100):
        evidence.found(4992, 5008)
    assert evidence.step_tokens == 0


def test_another_template_shows_in_the_counts_and_goes_with_it() -> None:
    evidence, rng = Evidence(), Random(1)
    for _ in range(60):
        evidence.measured(rng.choice((5, 17, 29, 41, 53)))
    assert named(evidence) == [Bias.TEMPLATE]
    for _ in range(600):
        evidence.measured(5)
    assert not present(True, evidence.strengths(BLOCK)[Bias.TEMPLATE])


def test_a_template_with_several_generation_prompts_is_understood() -> None:
    evidence, rng = Evidence(), Random(1)
    for _ in range(60):
        evidence.measured(rng.choice((5, 5, 9, 12)))
    assert named(evidence) == []


def test_a_large_or_a_negative_constant_is_another_template_too() -> None:
    for offset in (300, -4):
        evidence = Evidence()
        for _ in range(60):
            evidence.measured(offset)
        assert named(evidence) == [Bias.TEMPLATE]


def test_a_cache_kept_apart_answers_cold_now_and_then_to_what_was_just_there() -> None:
    evidence = Evidence()
    for number in range(100):
        evidence.used_again(0 if number % 4 == 0 else 640, 640)
    assert named(evidence) == [Bias.SALT]


def test_an_engine_without_prefix_caching_has_nothing_of_anybody() -> None:
    evidence = Evidence()
    for _ in range(40):
        evidence.used_again(0, 640)
    assert named(evidence) == [Bias.NO_REUSE]


def test_an_engine_that_does_not_count_is_named_and_one_that_begins_to_is_not() -> None:
    evidence = Evidence()
    for _ in range(30):
        evidence.counted(None)
    assert named(evidence) == [Bias.NO_COUNTS]
    for _ in range(200):
        evidence.counted(0)
    assert named(evidence) == []


def test_little_evidence_names_nothing() -> None:
    evidence = Evidence()
    for _ in range(15):
        evidence.counted(None)
        evidence.measured(Random(1).randint(-50, 50))
        evidence.used_again(0, 640)
    assert named(evidence) == []


def test_a_bias_at_its_threshold_does_not_come_and_go() -> None:
    assert present(False, 1.0)
    assert present(True, 0.6)
    assert not present(False, 0.6)
    assert not present(True, 0.4)


def test_clients_may_send_what_they_like_and_little_is_kept() -> None:
    evidence, rng = Evidence(), Random(1)
    for _ in range(20_000):
        evidence.measured(rng.randint(-(10**6), 10**6))
    assert len(evidence.differences) <= 64
    assert named(evidence) == [Bias.TEMPLATE]
