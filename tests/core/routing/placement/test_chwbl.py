"""`chwbl`: Continuum's tier 1, by its golden keys, its labels and its cap."""

from __future__ import annotations

from collections import Counter
from math import ceil
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import UNKNOWN, BackendId
from ranvier_py.core.prompts.namespaces import opening_key
from ranvier_py.core.routing.placement import Choice, Match
from ranvier_py.core.routing.placement.chwbl import Chwbl, ChwblOptions
from tests.core.routing.placement.engines import Engine, engines, match_of
from tests.examples import examples

HELPFUL = "You are a helpful assistant."
MODEL = "llama-3"


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


GOLDEN = {
    "system": "542e8d8551bb38da2f00b1ff6716b42cfc811b892fafb8d353ba167bc6ce4784",
    "message": "9bc41fce027072873e1c57116d3b2ded58a200ca0e77e188ef40990a27176196",
    "euro": "ff1b9238d262832dd12d9284197a250901c6207635ebdc877824998563fe20ec",
    "accent": "e211a3b172d8a7e90b1f6a312e5e47786829799aac7e8fa0b7e61fc7ca9e6419",
    "long": "06e38af03e554d2ddc604153e9b8d6eab5f43cb95c29533095a5c9477e3967d3",
}
"""Worked from the document's formula."""


@pytest.mark.parametrize(
    ("messages", "key"),
    [
        ([system(HELPFUL), user("Hi")], "system"),
        ([user("Hi"), system(HELPFUL)], "system"),  # wherever it stands
        ([user(HELPFUL), user("Hi")], "message"),
        ([system("€" * 400)], "euro"),  # 1,024 bytes would split a character: 1,023
        ([system("é" * 600)], "accent"),
        ([system("a" * 1024)], "long"),
        ([system("a" * 2000)], "long"),
    ],
)
def test_the_key_is_that_of_the_documents_formula(messages: list[dict[str, Any]], key: str) -> None:
    assert opening_key(MODEL, messages).hex() == GOLDEN[key]


@pytest.mark.parametrize(
    "prompt",
    [
        HELPFUL,
        [{"type": "text", "text": HELPFUL}],
        [{"type": "text", "text": HELPFUL[:5]}, {"type": "text", "text": HELPFUL[5:], "cache_control": {}}],
    ],
)
def test_a_system_prompt_beside_the_messages_is_one_too_as_text_or_as_blocks(prompt: Any) -> None:
    """As Anthropic's requests have it."""
    assert opening_key(MODEL, [user("Hi")], prompt).hex() == GOLDEN["system"]
    assert opening_key(MODEL, [system(prompt), user("Hi")]).hex() == GOLDEN["system"]


def test_the_first_message_is_the_opening_where_an_operator_wants_that() -> None:
    """So chats behind one system prompt are spread (CX9), and the key is the one that they have without it."""
    for messages, lead in (([system("One"), user(HELPFUL)], None), ([user(HELPFUL)], "Two")):
        assert opening_key(MODEL, messages, lead, source="first_message").hex() == GOLDEN["message"]


def test_an_empty_system_prompt_is_none() -> None:
    assert opening_key(MODEL, [system(""), user(HELPFUL)], "").hex() == GOLDEN["message"]


def test_parts_without_text_do_not_count() -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": HELPFUL}]
    assert opening_key(MODEL, [user(content)]).hex() == GOLDEN["message"]


def test_models_share_no_key() -> None:
    assert opening_key("llama-3", [user("Hi")]) != opening_key("llama-4", [user("Hi")])


@pytest.mark.parametrize(
    ("model", "messages"),
    [
        (MODEL, []),
        (MODEL, [user("")]),
        (MODEL, [user(None)]),
        (MODEL, [user([{"type": "image_url"}])]),
        (MODEL, [{"role": "user"}]),
        ("a\0Sb", [user("Hi")]),  # it would read as another model's key
    ],
)
def test_where_nothing_opens_a_conversation_there_is_no_key(model: str, messages: list[dict[str, Any]]) -> None:
    assert opening_key(model, messages) == b""


@settings(max_examples=examples(60))
@given(text=st.text(st.characters(codec=None), min_size=1, max_size=40), bytes_max=st.integers(1, 30))
def test_whatever_the_text_its_key_is_that_of_its_beginning_and_never_splits_a_character(
    text: str, bytes_max: int
) -> None:
    key = opening_key(MODEL, [system(text)], bytes_max=bytes_max)
    kept = ""
    for character in text:
        if len((kept + character).encode("utf-8", "surrogatepass")) > bytes_max:
            break
        kept += character
    assert len(key) == 32
    if kept:
        assert key == opening_key(MODEL, [system(kept)])


def choose(policy: Chwbl, match: Match, candidates: tuple[Engine, ...]) -> Choice:
    return policy.choose(match, candidates, Random(1))


def test_requests_of_one_opening_go_to_its_owner_on_the_ring() -> None:
    policy, candidates = Chwbl(), engines(*[0] * 8)
    keys = [opening_key(MODEL, [system(f"You are helper {number}.")]) for number in range(200)]
    for key in keys:
        match = match_of(home=99, opening=key)
        owner = policy.ring.owner(int.from_bytes(key[:8], "big"), candidates)
        assert choose(policy, match, candidates) == Choice(BackendId(owner), "prefix_hash", 0)
    assert len({choose(policy, match_of(home=99, opening=key), candidates).backend for key in keys}) == 8


def test_without_an_opening_the_first_boundary_is_the_key() -> None:
    policy, candidates = Chwbl(), engines(*[0] * 8)
    chosen = [choose(policy, match_of(home=home), candidates).backend for home in range(1, 200)]
    assert chosen == [choose(policy, match_of(home=home, prompt=5), candidates).backend for home in range(1, 200)]
    assert set(chosen) == set(range(8))


def test_without_any_key_the_least_loaded_serves() -> None:
    rng, candidates = Random(1), engines(4, 1, 1)
    chosen = Counter(Chwbl().choose(match_of(home=UNKNOWN), candidates, rng) for _ in range(100))
    assert {(choice.backend, choice.reason) for choice in chosen} == {(1, "fallback"), (2, "fallback")}


KEY = opening_key(MODEL, [system(HELPFUL)])
WALK = list(Chwbl().ring.walk(int.from_bytes(KEY[:8], "big"), engines(0, 0, 0, 0)))


def loaded(*loads: int) -> tuple[Engine, ...]:
    """Four engines with these loads in the order of KEY's walk."""
    candidates = engines(0, 0, 0, 0)
    for position, load in zip(WALK, loads, strict=True):
        candidates[position].load = load
    return candidates


@pytest.mark.parametrize(
    ("loads", "step"),
    [
        ((0, 0, 0, 0), 0),
        ((1, 0, 0, 0), 1),  # ceil(1.25 x 2 / 4) = 1, and the owner has it
        ((1, 1, 1, 0), 0),  # ceil(1.25 x 4 / 4) = 2
        ((2, 1, 1, 0), 1),  # ceil(1.25 x 5 / 4) = 2
        ((2, 2, 1, 0), 2),  # ceil(1.25 x 6 / 4) = 2
        ((12, 12, 12, 3), 0),  # ceil(1.25 x 40 / 4) = 13
        ((13, 12, 12, 2), 1),
        ((13, 13, 13, 0), 3),
    ],
)
def test_at_its_cap_a_backend_overflows_to_the_next_clockwise(loads: tuple[int, ...], step: int) -> None:
    candidates = loaded(*loads)
    assert choose(Chwbl(), match_of(opening=KEY), candidates) == Choice(
        BackendId(WALK[step]), "overflow" if step else "prefix_hash", 0
    )


def test_an_idle_cluster_serves() -> None:
    """The document's own cap is 0 then."""
    assert choose(Chwbl(ChwblOptions(load_factor_epsilon=0.01)), match_of(opening=KEY), loaded(0, 0, 0, 0)).reason


def test_a_wide_epsilon_keeps_more_at_the_owner() -> None:
    assert choose(Chwbl(ChwblOptions(load_factor_epsilon=10.0)), match_of(opening=KEY), loaded(2, 0, 0, 0)).reason == (
        "prefix_hash"  # ceil(11 x 3 / 4) = 9
    )


@settings(max_examples=examples(60))
@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=9), key=st.binary(min_size=32, max_size=32))
def test_nobody_ever_exceeds_the_cap_and_only_an_owner_at_its_cap_is_left(loads: list[int], key: bytes) -> None:
    policy, candidates = Chwbl(), engines(*loads)
    choice = choose(policy, match_of(opening=key), candidates)
    cap = max(1, ceil(round(1.25 * (sum(loads) + 1) / len(loads), 9)))
    assert loads[choice.backend] < cap
    owner = policy.ring.owner(int.from_bytes(key[:8], "big"), candidates)
    assert choice.reason == ("prefix_hash" if choice.backend == owner else "overflow")
    assert (choice.backend == owner) == (loads[owner] < cap)


def test_a_heavier_backend_has_a_higher_cap() -> None:
    candidates = loaded(5, 2, 1, 0)
    assert choose(Chwbl(), match_of(opening=KEY), candidates).reason == "overflow"  # ceil(1.25 x 9 / 4) = 3
    candidates[WALK[0]].weight = 3.0  # ceil(1.25 x 9 x 3 / 6) = 6
    assert choose(Chwbl(), match_of(opening=KEY), candidates).reason == "prefix_hash"


def test_a_conversation_that_overflowed_stays_where_it_is_while_there_is_room() -> None:
    policy, there = Chwbl(), BackendId(WALK[2])
    turn = match_of((there, 600), home_tokens=100, opening=KEY)
    assert choose(policy, turn, loaded(0, 0, 0, 0)) == Choice(there, "overflow", 600)
    assert choose(policy, turn, loaded(0, 0, 1, 0)).backend == WALK[0]  # at its cap of 1


def test_what_all_conversations_share_keeps_none_of_them_away_from_the_owner() -> None:
    policy, other = Chwbl(), BackendId(WALK[2])
    opening = match_of((other, 128), home_tokens=100, opening=KEY)
    assert choose(policy, opening, loaded(0, 0, 0, 0)) == Choice(BackendId(WALK[0]), "prefix_hash", 0)


def test_as_the_document_has_it_every_turn_starts_anew_and_no_match_is_asked_for() -> None:
    policy = Chwbl(ChwblOptions(sticky_overflow=False))
    turn = match_of((WALK[2], 600), home_tokens=100, opening=KEY)
    assert choose(policy, turn, loaded(0, 0, 0, 0)).backend == WALK[0]
    assert (policy.depths_wanted, Chwbl().depths_wanted) == (0, 1)


@pytest.mark.parametrize("epsilon", [0.009, 10.1, -1.0])
def test_an_epsilon_out_of_the_documents_range_is_refused(epsilon: float) -> None:
    with pytest.raises(ConfigError, match=r"load_factor_epsilon: must be 0.01 to 10"):
        ChwblOptions(load_factor_epsilon=epsilon)
