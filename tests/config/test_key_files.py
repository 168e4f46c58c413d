"""Files of keys: what they give, and everything that is wrong with one, each with its line."""

from __future__ import annotations

import tomllib
from datetime import UTC, date, datetime
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.cli import main
from ranvier_py.commands.exit_codes import EXIT_CONFIG, EXIT_OK
from ranvier_py.config.key_files import TOML_BYTES_MAX, read_key_file
from ranvier_py.core.access.key_table import KeyTable, unpacked
from ranvier_py.core.access.limit_values import Budget, CalendarWindow, Limits, Mode, Unit
from ranvier_py.core.errors import ConfigError
from tests.examples import examples

A, B, C = (sha256(key).hexdigest() for key in (b"a", b"b", b"c"))

GOOD = f"""\
[[key]]
id = "ann"
sha256 = "{A.upper()}"
tenant = "red"
models = ["llama-*", "qwen"]
priority = 5
not_before = 2026-01-01
expires = 2027-01-01T01:00:00+01:00
requests_per_minute = 60

[[tenant]]
name = "red"
concurrent = 4
mode = "shadow"
budget = [{{amount = 1000, window = "day"}}, {{amount = 2.5, window = "month", unit = "cost"}}]
model_limits = [{{models = "big-*", tokens_per_minute = 10}}]

[[key]]
id = "bob"
sha256 = "{B}"
disabled = true
"""

GOOD_YAML = f"""\
key:
  - id: ann
    sha256: {A}
    tenant: red
    models: [llama-*, qwen]
    priority: 5
    not_before: 2026-01-01
    expires: 2027-01-01T01:00:00+01:00
    requests_per_minute: 60
  - {{id: bob, sha256: {B}, disabled: true}}
tenant:
  - name: red
    concurrent: 4
    mode: shadow
    budget:
      - {{amount: 1000, window: day}}
      - {{amount: 2.5, window: month, unit: cost}}
    model_limits: [{{models: big-*, tokens_per_minute: 10}}]
"""


def problems(path: Path, text: str, kind: str = "keys_file") -> list[str]:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_key_file(path, kind)
    return [problem.removeprefix(f"{kind}: {path}:") for problem in caught.value.problems]


@pytest.mark.parametrize(("name", "text"), [("keys.toml", GOOD), ("keys.yaml", GOOD_YAML)])
def test_a_file_in_toml_and_in_yaml_gives_the_same_keys_and_tenants(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    for table in (read_key_file(path, "keys_file"), travelled(read_key_file(path, "keys_file"))):
        ann, bob = table.find(bytes.fromhex(A)), table.find(bytes.fromhex(B))
        assert ann is not None
        assert bob is not None
        assert table.find(bytes.fromhex(C)) is None
        assert (ann.key_id, ann.priority, ann.may_use("llama-3"), ann.may_use("gpt")) == ("ann", 5, True, False)
        assert ann.key is not None
        assert (ann.key.not_before, ann.key.expires) == tuple(
            datetime(year, 1, 1, tzinfo=UTC).timestamp() for year in (2026, 2027)
        )
        assert ann.key.limits == Limits(requests_per_minute=60)
        budget = [Budget(1000, CalendarWindow.DAY), Budget(2.5, CalendarWindow.MONTH, Unit.COST)]
        assert ann.tenant.limits == Limits(concurrent=4, mode=Mode.SHADOW, budget=budget)
        assert ann.tenant.model_limits == [("big-*", Limits(tokens_per_minute=10))]
        assert (bob.tenant.name, bob.may_use("gpt")) == ("bob", True), "without a tenant a key is its own"
        assert bob.key is not None
        assert (bob.key.refusal(0.0), bob.key.expires) == ("disabled", inf)
        assert [each.key_id for each in table.identities(0, 9)] == ["ann", "bob"]
        assert [each.key_id for each in table.identities(1, 1)] == ["bob"]


def travelled(table: KeyTable) -> KeyTable:
    """As a child process hands it over."""
    *_, found = unpacked(b"\n".join(table.packed()).split(b"\n"))
    assert found is not None
    return found


def test_a_key_of_its_own_does_not_become_one_of_a_tenant_by_its_id(tmp_path: Path) -> None:
    """It would share the caches and the limits of whoever has that name."""
    tenant, keys = '[[tenant]]\nname = "red"\n\n', f'[[key]]\nid = "red"\nsha256 = "{A}"\n'
    (found,) = problems(tmp_path / "keys.toml", tenant + keys)
    assert found.startswith("5: key[0].id: is the name of a [[tenant]] as well")
    (tmp_path / "keys.toml").write_text(f'{tenant}{keys}tenant = "red"\n')
    assert len(read_key_file(tmp_path / "keys.toml", "keys_file")) == 1


TWICE = {
    'budget = [{amount = 5, window = "day"}, {amount = 7, window = "day", unit = "tokens"}]': "window and unit",
    '[[tenant.model_limits]]\nmodels = "a*"\n[[tenant.model_limits]]\nmodels = "a*"\nconcurrent = 2': "models",
}


@pytest.mark.parametrize("lines", TWICE)
def test_two_limits_that_would_count_in_one_place_are_an_error(tmp_path: Path, lines: str) -> None:
    """Each request would count twice in it."""
    (found,) = problems(tmp_path / "keys.toml", f'[[tenant]]\nname = "red"\n{lines}\n')
    assert found.endswith(f"has two tables with the same {TWICE[lines]}")


def test_all_that_is_wrong_is_in_one_error_with_the_line_of_each_member(tmp_path: Path) -> None:
    text = f"""\
[[key]]
id = "ann"
sha256 = "{A}"
tenant = "rde"

[[key]]
id = "ann"
sha256 = "{A.upper()}"
expires = "soon"
requests_per_minute = -1
modles = ["a"]

[[tenant]]
name = "red"
budget = [{{amount = 1, window = "year"}}]
tokens_per_minute = true

[[tenants]]
name = "x"

[[key]]
sha256 = "abc"
models = []
"""
    lines = sorted(problems(tmp_path / "keys.toml", text), key=lambda line: int(line.partition(":")[0]))
    starts = [
        *("4: key[0].tenant: there is no [[tenant]] with the name rde", "7: key[1].id: stands twice, first in "),
        *("8: key[1].sha256: stands twice, first in ", "9: key[1].expires: must be a time such as 2027"),
        *("10: key[1].requests_per_minute: must be a whole number, at least 1", "11: key[1].modles: there is no"),
        *(
            "15: tenant[0].budget: window must be one of hour, day, ",
            "16: tenant[0].tokens_per_minute: must be a whole",
        ),
        *("18: tenants: there is no such table, expected [[key]], [[tenant]]", "21: key[2]: id is missing"),
        *("22: key[2].sha256: must be the SHA-256", "23: key[2].models: must be a list of 1 to"),
    ]
    assert len(lines) == len(starts), lines
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)


def test_of_a_file_that_is_no_toml_or_no_yaml_the_rest_is_checked_all_the_same(tmp_path: Path) -> None:
    found = problems(tmp_path / "keys.toml", '[[key]]\nid = "a\n[[key]]\nid = "b"\nsha256 = 7\n')
    assert [line.partition(":")[0] for line in found] == ["2", "1", "5"]
    found = problems(tmp_path / "keys.yaml", "key:\n  - id: 'a\n  - id: b\n    sha256: 7\n    unknown: 1\n")
    assert [line.partition(":")[0] for line in found] == ["6", "4", "5"]
    found = problems(tmp_path / "keys.yml", "key:\n  - id: b\n    sha256: 7\n    unknown: 1\n")
    assert [line.partition(":")[0] for line in found] == ["3", "4"]


def test_keys_of_the_control_port_have_roles_and_neither_tenants_nor_models(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[key]]\nid = "ops"\nsha256 = "{A}"\nrole = "operate"\n')
    found = read_key_file(path, "control_keys_file").find(bytes.fromhex(A))
    assert found is not None
    assert found.key is not None
    assert (found.key.role, found.key_id) == ("operate", "ops")
    text = f'[[key]]\nid = "ops"\nsha256 = "{A}"\nrole = "root"\nmodels = ["a"]\n[[tenant]]\nname = "red"\n'
    lines = problems(path, text, "control_keys_file")
    assert [line.partition(": must")[0].partition(": there")[0] for line in lines] == [
        "6: tenant",
        "4: key[0].role",
        "5: key[0].models",
    ]


def test_what_is_no_file_or_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_key_file(path, "keys_file")
    with path.open("wb") as file:
        file.truncate(TOML_BYTES_MAX + 1)
    with pytest.raises(ConfigError, match="is larger than"):
        read_key_file(path, "keys_file")


def test_a_key_that_would_never_be_valid_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = f'[[key]]\nid = "a"\nsha256 = "{A}"\n'
    (line,) = problems(tmp_path / "keys.toml", f"{key}expires = 2030-01-01\nnot_before = 2030-01-01\n")
    assert line.startswith("4: key[0].expires: must be later than not_before")
    assert main(["keys", "make", "old", "--expires", "2020-01-01"]) == EXIT_CONFIG
    assert "that time is over" in capsys.readouterr().err
    assert main(["keys", "make", "ann", "--tenant", ""]) == EXIT_CONFIG, "an empty name is none"
    (tmp_path / "keys.toml").write_text(key)
    capsys.readouterr()
    assert main(["keys", "check", str(tmp_path / "keys.toml")]) == EXIT_OK
    assert capsys.readouterr().out == "good: 1 key, 0 tenants\n"


def test_a_key_that_is_in_the_file_itself_is_not_repeated_in_an_error(tmp_path: Path) -> None:
    (line,) = problems(tmp_path / "keys.toml", '[[key]]\nid = "a"\nsha256 = "rk-secret"\n')
    assert "rk-secret" not in line


MEMBERS = ("id", "sha256", "tenant", "models", "priority", "expires", "disabled", "budget", "mode", "name", "x\n")
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates(), st.datetimes()),
        *(st.sampled_from([A, B, "a", "red", "day", "shadow", date(2027, 1, 1)]),),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(MEMBERS), inner, max_size=4),
    max_leaves=8,
)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{name.strip()}" = {toml(inner)}' for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, date | datetime):
        return value.isoformat()
    return str(value) if isinstance(value, int | float) else '"' + "".join(filter(str.isalnum, str(value))) + '"'


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["key", "tenant"]), st.dictionaries(st.sampled_from(MEMBERS), VALUES))))
def test_whatever_a_file_has_it_gives_a_table_or_lines_of_errors(
    tmp_path_factory: pytest.TempPathFactory, tables: list[tuple[str, dict[str, Any]]]
) -> None:
    lines = [
        line
        for kind, members in tables
        for line in (f"[[{kind}]]", *(f'"{name.strip()}" = {toml(value)}' for name, value in members.items()))
    ]
    check_whole_or_not_at_all(tmp_path_factory.mktemp("fuzz") / "keys.toml", "\n".join(lines))


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_a_good_file_with_some_bytes_changed_is_taken_whole_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    suffix, text = data.draw(st.sampled_from([("toml", GOOD), ("yaml", GOOD_YAML)]))
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 12))
    text = text[:at] + data.draw(st.text("[]{}\"'=:-#\n 0a\x00é", max_size=4)) + text[at + cut :]
    check_whole_or_not_at_all(tmp_path_factory.mktemp("fuzz") / f"keys.{suffix}", text)


def check_whole_or_not_at_all(path: Path, text: str) -> None:
    path.write_text(text)
    try:
        table = read_key_file(path, "keys_file")
    except ConfigError:
        with pytest.raises(ConfigError) as caught:
            read_key_file(path, "keys_file")
        assert all(problem.startswith(f"keys_file: {path}") for problem in caught.value.problems)
        return
    assert [each.key_id for each in travelled(table).identities(0, 99)] == [
        each.key_id for each in table.identities(0, 99)
    ]
    if path.suffix == ".toml":
        assert len(table) == len(tomllib.loads(text).get("key", []))
