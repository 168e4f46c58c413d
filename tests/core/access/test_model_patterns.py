"""Names of models in a file of keys that match nothing are found, and no others are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.access.identity import globs
from ranvier_py.core.access.model_patterns import may_overlap, unmatched
from tests.examples import examples

LISTED = ["org/qwen", "llama[awq]"]
TABLES = ["gpt-4o", "claude-*"]


@pytest.mark.parametrize("pattern", ["org/qwen", "org/*", "llama[awq]", "*4o", "claude-opus", "claude-opus-*", "c*s"])
def test_what_an_engine_lists_or_a_table_may_be_for_is_known(pattern: str) -> None:
    assert unmatched({pattern: "f:1"}, LISTED, TABLES, lambda _: True) == {}


@pytest.mark.parametrize("pattern", ["org/qwne", "og/*", "llama[a]", "claud", "gpt-4", "clade-*"])
def test_a_name_that_nothing_has_is_found_with_its_place_once_all_lists_are_known(pattern: str) -> None:
    assert unmatched({pattern: "f:1"}, LISTED, TABLES, lambda _: True) == {pattern: "f:1"}
    assert unmatched({pattern: "f:1"}, LISTED, TABLES, lambda _: False) == {}


GLOBS = st.text("ab*?", max_size=4)


@settings(max_examples=examples(400), deadline=None)
@given(GLOBS, GLOBS, st.text("ab", max_size=4))
def test_two_globs_that_one_name_fits_may_overlap(one: str, other: str, name: str) -> None:
    if "*" in other or "?" in other:
        fits = all(globs([each]).match(name) for each in (one, other))
        assert may_overlap(one, other) or not fits
