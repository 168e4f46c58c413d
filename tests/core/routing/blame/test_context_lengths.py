"""How long a prompt engines take, by what they list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import BackendLimits, ProbeResult, Registry
from ranvier_py.core.routing.blame.context_lengths import NO_END, lengths_of, not_longer, too_short
from ranvier_py.core.routing.blame.judgements import judgement_of

A, B, C = BackendId(0), BackendId(1), BackendId(2)


def listed(*lengths: int | None) -> Registry:
    registry = Registry(BackendLimits())
    for number, length in enumerate(lengths):
        backend = registry.add(f"http://10.0.0.{number + 1}:8000", name=f"e{number}")
        card = {"id": "m", "max_model_len": length}
        registry.changes.probed(backend.id, ProbeResult(True, models=("m",), cards=(card,)), 0.0)
    return registry


@pytest.mark.parametrize(
    ("cards", "lengths"),
    [
        ([{"id": "m", "max_model_len": 8192}], {"m": 8192}),
        (
            [{"id": "m", "max_model_len": 8192}, {"id": "a", "parent": "m", "max_model_len": None}],
            {"m": 8192, "a": 8192},
        ),
        ([{"id": "m"}], {}),
        *(([{"id": "m", "max_model_len": value}], {}) for value in ("8192", 0, -1, True, 1.5, None, [], {})),
        ([{"id": "m", "parent": ["x"]}, {"id": "n", "parent": "gone"}], {}),
    ],
)
def test_lengths_are_those_of_model_cards_and_an_adapters_that_of_its_model(
    cards: list[Mapping[str, Any]], lengths: Mapping[str, int]
) -> None:
    assert lengths_of(cards) == lengths


def test_a_prompt_is_too_long_for_those_that_list_less() -> None:
    registry = listed(100, 1000, None)
    assert too_short(registry, "m", 100) == []
    assert too_short(registry, "m", 101) == [A]
    assert too_short(registry, "", 1001) == [A, B]
    assert too_short(registry, "other", 5000) == []


def test_longer_ones_are_those_that_list_more_or_may_have_more() -> None:
    registry = listed(100, 1000, None)
    assert not_longer(registry, registry[A], "m") == [A]
    assert not_longer(registry, registry[B], "m") == [A, B]
    assert not_longer(registry, registry[C], "m") == [C]
    assert not_longer(listed(None, None), registry[C], "m") == [A, B]


def test_the_shortest_length_is_known_as_lists_come_and_backends_go() -> None:
    registry = listed(100, 1000, None)
    assert registry.pools.shortest == 100
    registry.changes.probed(A, ProbeResult(True, models=("m",), cards=({"id": "m", "max_model_len": 300},)), 1.0)
    assert registry.pools.shortest == 300
    registry.remove("e0")
    assert registry.pools.shortest == 1000
    registry.remove("e1")
    assert registry.pools.shortest == NO_END


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens.",
        "The decoder prompt (length 9000) is longer than the maximum model length of 8192.",
        "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
        "Requested token count exceeds the model's maximum context length of 8192 tokens.",
        "Input length (9000 tokens) exceeds the maximum allowed length (8191 tokens).",
        "the request exceeds the available context size, try increasing it",
        "prompt is too long: 250000 tokens > 200000 maximum",
        "Prompt length (9000) exceeds max_seq_len (8192)",
        "Input validation error: `inputs` must have less than 1024 tokens. Given: 2000",
        "context_length_exceeded",
    ],
)
@pytest.mark.parametrize("status", [400, 413, 422])
def test_refusals_for_the_length_of_a_prompt_are_known_by_their_words(message: str, status: int) -> None:
    for body in (b'{"error":{"message":"%b"}}', b'{"object":"error","message":"%b"}', b'{"detail":"%b"}', b"%b"):
        assert judgement_of(status, body.replace(b"%b", message.encode()), wall_s=0.0).is_too_long


@pytest.mark.parametrize(
    "message", ["max_tokens must be at least 1", "stop sequence is too long", "no tools here", "temperature too high"]
)
def test_other_refusals_are_not_for_the_length(message: str) -> None:
    assert not judgement_of(400, message.encode(), wall_s=0.0).is_too_long
    assert not judgement_of(502, b"context length", wall_s=0.0).is_too_long
