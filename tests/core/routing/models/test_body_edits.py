"""What of a body is changed for the model that serves: caps and defaults, of each API, wherever members stand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.prompts.body_json import spliced
from ranvier_py.core.prompts.outer_values import OuterValues, finished
from ranvier_py.core.routing.models.body_edits import LENGTHS, body_splices
from ranvier_py.core.routing.models.model_rules import ModelRule, Served
from ranvier_py.core.routing.request_paths import CHAT_PATH, COMPLETION_PATH, MESSAGES_PATH, RESPONSES_PATH

LONG = "word " * 60_000


def edited(path: bytes, body: bytes, to: str = "m", **settings: Any) -> bytes:
    rule = ModelRule("a", {to: 1}, **settings)
    values = OuterValues(body)
    model = finished(values.find("model"))
    assert model is not None
    return spliced(body, finished(body_splices(path, values, model, Served(to, (rule,), (rule,)))))


def members(path: bytes, fields: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return dict(json.loads(edited(path, json.dumps({"model": "a", **fields}).encode(), **settings)))


@pytest.mark.parametrize("path", LENGTHS)
def test_a_cap_holds_for_each_spelling_and_for_what_names_none(path: bytes) -> None:
    for name in LENGTHS[path]:
        for sent, left in ((5, 5), (50, 9), (9, 9), (1e9, 9), ("100", 9), (True, 9), (-1, -1)):
            assert members(path, {name: sent}, max_tokens=9)[name] == left
    usual = LENGTHS[path][0]
    for fields in ({}, {usual: None}):
        assert members(path, fields, max_tokens=9)[usual] == 9
        assert members(path, fields, max_tokens=9, defaults={"max_tokens": 4})[usual] == 4
        assert members(path, fields, max_tokens=9, defaults={"max_output_tokens": 40})[usual] == 9
        assert members(path, fields, defaults={"max_completion_tokens": 4}).get(usual, 4) == 4


def test_both_spellings_of_a_chat_are_capped() -> None:
    fields = {"max_completion_tokens": 100, "max_tokens": 200, "x": {"max_tokens": 300}}
    assert members(CHAT_PATH, fields, max_tokens=9) == {
        "model": "m", "max_completion_tokens": 9, "max_tokens": 9, "x": {"max_tokens": 300}
    }  # fmt: skip


def test_a_completion_that_names_no_length_stays_at_its_sixteen_tokens() -> None:
    assert "max_tokens" not in members(COMPLETION_PATH, {}, max_tokens=16)
    assert members(COMPLETION_PATH, {}, max_tokens=15)["max_tokens"] == 15


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("spelled", ['"max_tokens":%d', '"max_token\\u0073" : %d'])
def test_a_cap_finds_a_member_before_between_and_behind_long_ones(place: int, spelled: str) -> None:
    long = LONG if "\\u" not in spelled else LONG[:50_000]
    parts = [json.dumps({"model": "a", "user": long})[1:-1], json.dumps({"messages": [{"content": long}]})[1:-1]]
    parts.insert(place, spelled % 5000)
    body = f"{{{','.join(parts)}}}".encode()
    assert json.loads(edited(CHAT_PATH, body, max_tokens=9)) == {**json.loads(body), "model": "m", "max_tokens": 9}


def test_defaults_are_put_where_a_body_has_none_and_change_nothing_else() -> None:
    body = b' {"model" : "a", "top_p": null ,"tools":[{"temperature":1}]} '
    found = edited(CHAT_PATH, body, to="a", defaults={"temperature": 0.5, "top_p": 1, "stop": ["x"]})
    assert found == b' {"temperature":0.5,"stop":["x"],"model" : "a", "top_p": null ,"tools":[{"temperature":1}]} '
    assert edited(CHAT_PATH, found, to="a", defaults={"temperature": 0.5, "stop": ["x"]}) == found


def test_apis_that_do_not_generate_get_no_defaults_and_no_caps() -> None:
    for path in (b"/v1/embeddings", b"/v1/messages/count_tokens", b"/tokenize", b"/v1/rerank"):
        assert members(path, {"max_tokens": 50}, max_tokens=9, defaults={"seed": 1}) == {"model": "m", "max_tokens": 50}


@pytest.mark.parametrize("path", [MESSAGES_PATH, RESPONSES_PATH])
def test_a_body_too_large_to_be_parsed_is_capped_near_its_ends(path: bytes) -> None:
    (name,) = LENGTHS[path]
    for fields in ({"model": "a", name: 50, "input": LONG * 20}, {"input": LONG * 20, name: 50, "model": "a"}):
        assert members(path, fields, max_tokens=9) == {**fields, "model": "m", name: 9}


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-10, 10**6), st.text(max_size=20), st.floats(0, 1e9))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
NAMES = st.sampled_from(["model", "max_tokens", "max_completion_tokens", "seed", "messages", "x", "é"])


@given(st.dictionaries(NAMES, VALUES, max_size=6), st.integers(0, 3), st.booleans())
def test_whatever_a_body_has_only_what_is_wanted_of_it_changes(
    fields: dict[str, Any], indent: int, ascii_only: bool
) -> None:
    fields = {**fields, "model": "a"}
    body = json.dumps(fields, indent=indent or None, ensure_ascii=ascii_only).encode()
    found = json.loads(edited(CHAT_PATH, body, max_tokens=9, defaults={"seed": 3}))
    lengths = LENGTHS[CHAT_PATH]
    assert {name: value for name, value in found.items() if name not in ("model", "seed", *lengths)} == {
        name: value for name, value in fields.items() if name not in ("model", "seed", *lengths)
    }
    assert found["model"] == "m"
    assert found["seed"] == fields.get("seed", 3)
    assert any(found.get(name) is not None for name in lengths)
    assert all(type(found[name]) is not int or found[name] <= 9 for name in lengths if name in found)
