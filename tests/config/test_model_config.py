"""Tables of models in a configuration: how they are written, shown and kept secret, and all that is wrong with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ranvier_py.config.config_loader import PATTERNS, config_of, load
from ranvier_py.config.config_reference import as_toml, toml_value
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.config.model_tables import table_of
from ranvier_py.core.access.limit_values import ModelCost
from ranvier_py.core.errors import ConfigError

FILE = """
[[model]]
name = "gpt-4o"
to = {"org/llama 3" = 95, "base:adapter" = 5}
fallback = ["my-qwen"]
tenants = ["gold"]
api_key = "sk-of-the-table"
max_tokens = 4096
defaults = {temperature = 0.5, stop = ["x"]}
cost = {input = 3, cached_input = 0.3, output = 15, cached_answers = 0.1}
[[model]]
name = "claude-*"
to = "my-qwen"
api_key_file = "key"
first_event_timeout_s = 5
total_retries_max = 0
retry_statuses = [503]
"""


def loaded(folder: Path, text: str) -> Any:
    file = folder / "ranvier.toml"
    file.write_text(text)
    return load({}, file)


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, text)
    return [re.sub(r" \(from .*:(\d+)\)$", r" @\1", problem) for problem in caught.value.problems]


def test_a_file_has_tables_with_all_that_a_model_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("sk-of-a-file\n")
    found = loaded(tmp_path, FILE)
    table = table_of(found.config.model)
    assert table is not None
    first, second = table.rules
    assert (first.to, first.fallback, first.tenants) == (
        {"org/llama 3": 95, "base:adapter": 5},
        ("my-qwen",),
        ("gold",),
    )
    assert (first.api_key, first.max_tokens, first.defaults) == (
        "sk-of-the-table",
        4096,
        {"temperature": 0.5, "stop": ["x"]},
    )
    assert first.cost == ModelCost(3, 0.3, 3, 15, 15, 0.1)
    assert (second.api_key, second.first_event_s, second.total_retries_max) == ("sk-of-a-file", 5.0, 0)
    assert second.retry_statuses == (503,)
    assert {"sk-of-the-table", "sk-of-a-file"} <= set(found.config.secret_values())
    shown = repr(found.config) + toml_value(found.config.masked()) + toml_value(found.config.shown()) + as_toml(*found)
    assert "sk-of" not in shown + repr(table.rules)


def test_what_is_shown_loads_to_the_same(tmp_path: Path) -> None:
    found = loaded(tmp_path, re.sub("(?m)^api_key.*$", "", FILE))
    again = loaded(tmp_path, as_toml(*found))
    assert again.config.model == found.config.model


def test_flags_and_the_environment_have_names_and_models(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(spec.name, spec.to) for spec in load({"model": ["a=b", "c-*=d"]}).config.model] == [
        ("a", {"b": 1}),
        ("c-*", {"d": 1}),
    ]
    monkeypatch.setenv("RANVIER_MODEL", "claude-*=my-qwen gpt-4o=my-llama")
    assert [spec.name for spec in load({}).config.model] == ["claude-*", "gpt-4o"]
    assert config_of(model=[{"name": "a", "to": ["x", "y"]}]).model[0].to == {"x": 1, "y": 1}


def test_all_that_is_wrong_is_named_at_once_with_its_line(tmp_path: Path) -> None:
    text = """
[[model]]
name = "a"
to = "b"
[[model]]
name = "b"
to = {a = 1}
[[model]]
name = "c"
too = "x"
max_tokens = "9"
[[model]]
name = "d"
to = {x = 0}
[[model]]
name = "d"
to = "x*"
[[model]]
to = "x"
[[model]]
name = "e"
to = {x = -1}
fallback_on = ["never"]
first_event_timeout_s = 0
defaults = {model = "x"}
api_key = "k"
api_key_file = "nowhere"
"""
    assert problems(tmp_path, text) == [
        "model[2].max_tokens: must be a valid integer @8",
        "model[2].too: no such key; did you mean to? @8",
        "model[3]: to: one of the weights must be above 0 @12",
        "model[4].to.x*: must be one model, not a glob @15",
        "model[5].name: is missing @18",
        "model[6].to.x: must be greater than or equal to 0 @20",
        "model[6].fallback_on[0]: must be 'empty', 'overloaded', 'error', 'timeout' or 'too_long' @20",
        "model[6].first_event_timeout_s: must be greater than 0 @20",
        "model[0]: to: it leads back to itself: a -> b -> a @2",
        "model[1]: to: it leads back to itself: b -> a -> b @5",
    ]
    assert problems(tmp_path, '[[model]]\nname = "a"\napi_key = "k"\napi_key_file = "nowhere"\n') == [
        "model[0].api_key_file: api_key is set as well; set one of them @1"
    ]
    assert "can't be read" in problems(tmp_path, '[[model]]\nname = "a"\napi_key_file = "nowhere"\n')[0]
    assert (
        "too far" in problems(tmp_path, "".join(f'[[model]]\nname = "m{n}"\nto = "m{n + 1}"\n' for n in range(40)))[0]
    )


def test_no_problem_shows_a_key(tmp_path: Path) -> None:
    for wrong in ('api_key = ["sk-secret"]', 'api_key = "sk-secret\\nmore"', 'api_key = "sk-secret"\nnope = 1'):
        assert "sk-secret" not in "".join(problems(tmp_path, f'[[model]]\nname = "a"\n{wrong}\n'))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (name, PATTERNS[found.pattern])
        for name, field in BackendSpec.model_fields.items()
        for found in field.metadata
        if getattr(found, "pattern", None)
    ],
)
def test_a_value_of_other_characters_is_refused_in_words(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"backend[0].{name}: must consist of {words}")):
        config_of(backend=[{"url": "http://a:1", name: "a b"}])


@pytest.mark.parametrize("values", [{"model": 5}, {"model": [{"name": "a", "fallback": "b"}]}])
def test_a_value_that_is_no_list_is_refused_in_words(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be a list"):
        config_of(**values)


@pytest.mark.parametrize("text", ["tenants = []", "to = {}", "to = []"])
def test_an_empty_list_is_not_taken_for_all(tmp_path: Path, text: str) -> None:
    name = text.partition(" ")[0]
    assert problems(tmp_path, f'[[model]]\nname = "a"\n{text}\n') == [
        f"model[0]: {name}: is empty: leave it out, or name one @1"
    ]
