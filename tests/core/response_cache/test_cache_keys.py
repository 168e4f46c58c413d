"""Who may be answered from the cache, and which requests are the same."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.response_cache.cache_keys import CacheKeyOptions, Question, forbids_sharing, question_of

CHAT = b"/v1/chat/completions"
FIELDS: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}


def ask(path: bytes = CHAT, tenant: bytes = b"t", control: bytes = b"", **fields: Any) -> Question | None:
    options = {name: fields.pop(name) for name in ("assume_greedy", "streams", "key") if name in fields}
    body = {name: value for name, value in {**FIELDS, **fields}.items() if value is not ...}
    return question_of(path, json.dumps(body).encode(), tenant, control, CacheKeyOptions(**options))


def key(**fields: Any) -> bytes:
    question = ask(**fields)
    assert question is not None
    return question.key


@pytest.mark.parametrize("kind", ["canonical", "continuum"])
@pytest.mark.parametrize("temperature", [0, 0.0, -0.0])
def test_temperature_0_is_eligible_however_it_is_written(temperature: float, kind: str) -> None:
    assert key(temperature=temperature, key=kind) == key(key=kind)


@pytest.mark.parametrize("temperature", [1, 0.7, 1e-9, "0", False, [0], {}])
def test_any_other_temperature_is_not(temperature: object) -> None:
    assert ask(temperature=temperature, assume_greedy=True) is None


def test_an_absent_temperature_is_what_the_operator_takes_it_for() -> None:
    for absent in (..., None):
        assert ask(temperature=absent) is None
        assert ask(temperature=absent, assume_greedy=True) is not None


@pytest.mark.parametrize(
    ("fields", "is_eligible"),
    [
        ({"model": ...}, False),
        ({"model": "a\0b"}, False),
        ({"model": 7}, False),
        ({"stream": True}, True),
        ({"stream": True, "streams": False}, False),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True, "include_usage": True}}, False),
        ({"stream": True, "stream_options": "all"}, False),
        ({"path": b"/v1/embeddings", "temperature": ...}, True),
        ({"path": b"/v1/responses"}, False),
        ({"path": b"/v1/responses", "store": False}, True),
        ({"path": b"/v1/responses", "store": False, "previous_response_id": "r"}, False),
        ({"path": b"/v1/responses", "store": False, "background": True}, False),
        ({"path": b"/v1/files"}, False),
    ],
)
def test_only_what_an_engine_would_answer_equally_again_is_eligible(fields: dict[str, Any], is_eligible: bool) -> None:
    assert (ask(**fields) is not None) == is_eligible


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"null", b'{"model":"m","temperature":NaN}', b"\xff"])
def test_what_is_no_json_object_is_for_the_engine(body: bytes) -> None:
    assert question_of(CHAT, body, b"", b"", CacheKeyOptions()) is None


def test_a_body_that_is_too_large_to_be_read_is_for_the_engine() -> None:
    assert ask(messages=[{"role": "user", "content": "x" * (5 << 20)}]) is None


@pytest.mark.parametrize(
    ("control", "max_age_s"),
    [(b"", inf), (b"no-cache", 0), (b"max-age=60", 60), (b'Max-Age = "5", private', 5), (b"max-age=0,", 0)],
)
def test_what_a_client_wishes_of_caches_is_obeyed(control: bytes, max_age_s: float) -> None:
    question = ask(control=control)
    assert question is not None
    assert question.max_age_s == max_age_s
    assert ask(control=control + b", no-store") is None


CHANGES: list[dict[str, Any]] = [
    {"model": "n"},
    {"messages": [{"role": "user", "content": "hello "}]},
    {"max_tokens": 0},
    {"max_tokens": 1},
    {"max_tokens": None},
    {"top_p": 0},
    {"top_p": 1.0},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tool_choice": "none"},
    {"response_format": {"type": "json_object"}},
    {"seed": 1},
    {"n": 2},
    {"stop": ["a"]},
    {"logprobs": True},
    {"cache_salt": "a"},
    {"lora_path": "a"},
    {"system": "a"},
    {"tenant": b"u"},
    {"path": b"/v1/completions"},
]


def test_all_that_changes_an_answer_changes_the_key_none_and_0_included() -> None:
    assert len({key(), *(key(**change) for change in CHANGES)}) == len(CHANGES) + 1


@pytest.mark.parametrize("kind", ["canonical", "continuum"])
def test_the_target_is_part_of_every_key(kind: str) -> None:
    targets = (CHAT, CHAT + b"?beta=true", b"/v1/completions", b"/v1/messages", b"/v1/embeddings")
    assert len({key(path=target, key=kind) for target in targets}) == len(targets)


@pytest.mark.parametrize("kind", ["canonical", "continuum"])
def test_what_changes_no_answer_changes_no_key(kind: str) -> None:
    same = [{"user": "u"}, {"metadata": {"a": 1}}, {"stream": True}, {"stream_options": {"include_usage": True}}]
    assert {key(key=kind, **each) for each in same} == {key(key=kind)}


def test_an_answer_that_repeats_what_its_client_calls_the_request_is_no_other_clients() -> None:
    responses = {"path": b"/v1/responses", "store": False}
    repeated = [{}, {"user": "u"}, {"user": "v"}, {"metadata": {"job": "a"}}, {"metadata": {"job": "b"}}]
    assert len({key(**responses, **each) for each in repeated}) == len(repeated)
    assert key(**responses, stream=True) == key(**responses)


@given(st.permutations(list({**FIELDS, "tools": [{"b": 1, "a": 2}], "seed": 3}.items())))
def test_the_order_of_members_does_not_count(items: list[tuple[str, Any]]) -> None:
    body = json.dumps(dict(items), indent=1).encode()
    found = question_of(CHAT, body, b"t", b"", CacheKeyOptions())
    assert found is not None
    assert found.key == key(tools=[{"b": 1, "a": 2}], seed=3)
    assert found.key != key(tools=[{"a": 2, "b": 1}], seed=3), "a template prints a tool as it is written"


@pytest.mark.parametrize("kind", ["canonical", "continuum"])
def test_numbers_that_are_rounded_when_read_are_not_eligible(kind: str) -> None:
    """Else questions about two of them had one answer."""
    for number, is_eligible in ((2**64 - 1, True), (2**64 + 1, False)):
        messages = [{"role": "user", "content": "1e+20", "n": number}]
        assert (ask(messages=messages, key=kind) is not None) == is_eligible


@given(st.binary(max_size=4), st.text(max_size=4), st.binary(max_size=4), st.text(max_size=4))
def test_no_two_questions_have_one_key_by_being_cut_elsewhere(one: bytes, a: str, other: bytes, b: str) -> None:
    equal = (one, a.encode("utf-8", "replace")) == (other, b.encode("utf-8", "replace"))
    a, b = (text.encode("utf-8", "replace").decode().replace("\0", "") for text in (a, b))
    if (one, a) != (other, b):
        assert key(tenant=one, model=a) != key(tenant=other, model=b)
    elif equal:
        assert key(tenant=one, model=a) == key(tenant=other, model=b)


@pytest.mark.parametrize(
    ("control", "forbids"),
    [
        *((each, True) for each in (b"no-store", b"Private", b"no-cache", b"max-age=0", b"public, s-maxage=0")),
        *((each, True) for each in (b'private="set-cookie"', b"max-age=60,no-store", b"max-age = 0, x", b"max-age=-1")),
        *((each, False) for each in (b"", b"public", b"max-age=60", b"max-age=05", b"x-private", b"no-storey")),
    ],
)
def test_an_engines_cache_control_forbids_sharing(control: bytes, *, forbids: bool) -> None:
    assert forbids_sharing(control) is forbids


# Computed apart from this code: SHA-256 of model, SHA-256 of compact JSON, and 8 bytes little endian for each number.
GOLDEN = {
    "plain": ({}, "f3c63a45bb7e3c7e877fe681eac7f70f7b565187805d9850f13bbbd7c7ba66e4"),
    "limits": ({"max_tokens": 0, "top_p": 0.0}, "852642ed1dbed38521b4441250a171703cad38393740ef00fca022405cec44f2"),
    "more limits": (
        {"max_tokens": 256, "top_p": 0.9},
        "2a6de47c7aba59cf391b25b9ed61b5f3bf07987a6afcdf6aee5d6e72b36e44b3",
    ),
    "tenant": ({"tenant": b"acme"}, "0180398f2496536afe4e829cc57fe97a97f00b66739770beab7110ec210dc566"),
}


@pytest.mark.parametrize(("fields", "golden"), GOLDEN.values(), ids=GOLDEN.keys())
def test_the_documents_own_key_has_its_golden_values(fields: dict[str, Any], golden: str) -> None:
    found = key(key="continuum", **{"model": "llama-3", "tenant": b"", **fields})
    print(found.hex())
    assert found.hex() == golden


@pytest.mark.parametrize("fields", [{"tools": []}, {"seed": 1}, {"top_p": "1"}, {"max_tokens": 1.5}, {"n": 1}])
def test_under_the_documents_key_nobody_is_answered_whose_body_has_more_than_it_names(fields: dict[str, Any]) -> None:
    assert ask(key="continuum", **fields) is None
