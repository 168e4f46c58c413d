"""Who asks, which models they may use, and when their keys are valid."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.access.identity import AccessKey, Identity, Tenant, identity_of
from tests.examples import examples

RED = Tenant("red")
NAMES = st.text("ab/-:.*?[]é\n", max_size=6)


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=3), NAMES)
def test_a_key_may_use_the_models_that_one_of_its_globs_matches(globs: list[str], model: str) -> None:
    allowed = identity_of(RED, AccessKey("a", models=globs)).may_use(model)
    assert allowed == any(fnmatchcase(model, glob.replace("[", "[[]")) for glob in globs)


def test_brackets_are_part_of_a_models_name_as_in_the_tables_of_models() -> None:
    identity = identity_of(RED, AccessKey("a", models=["org/llama[awq]", "qwen[4*"]))
    names = ["org/llama[awq]", "org/llamaa", "qwen[4bit]", "qwen4"]
    assert [name for name in names if identity.may_use(name)] == ["org/llama[awq]", "qwen[4bit]"]


def test_without_globs_a_key_may_use_every_model_and_so_may_whom_a_proxy_names() -> None:
    for identity in (identity_of(RED, AccessKey("a")), Identity(RED)):
        assert identity.may_use("anything")
        assert not identity.is_limited_to_models
    assert identity_of(RED, AccessKey("a", models=["*"])).may_use("")
    assert Identity(RED).key_id == ""


@pytest.mark.parametrize(("now", "why"), [(9.0, "early"), (10.0, ""), (19.9, ""), (20.0, "expired")])
def test_a_key_is_valid_from_its_first_moment_until_it_expires(now: float, why: str) -> None:
    assert AccessKey("a", not_before=10.0, expires=20.0).refusal(now) == why
    assert AccessKey("a", not_before=10.0, expires=20.0, disabled=True).refusal(now) == "disabled"
