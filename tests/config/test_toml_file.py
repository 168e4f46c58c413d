"""TOML files with errors: each is named with its line, and what is good is read all the same."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.config.config_loader import load
from ranvier_py.config.rule_files import rule_book
from ranvier_py.config.toml_file import DEPTH_MAX, FILE_BYTES_MAX, PROBLEMS_MAX, TomlFile, parse_toml, read_toml
from ranvier_py.core.errors import ConfigError
from tests.examples import whole

GOOD = """\
# a comment, with [ and " in it
policy = "ttft"  # [[
backend = [
    "http://a:1",
    # "http://b:1
    {url = "http://c:1", weight = 2},
]
text = '''
workers = [[[
'''
"quoted" = 1
a.b = 2

[table]
inner = 1

[[row]]
inner = 2
[[row]]  # again
    indented = 3
"""


def bad_lines(found: TomlFile) -> list[int]:
    return [int(problem.split(":")[1]) for problem in found.problems]


def test_the_line_of_each_key_is_known() -> None:
    found = parse_toml(GOOD, "file")
    assert (found.problems, found.values) == ([], tomllib.loads(GOOD))
    assert found.lines == {
        "policy": 2,
        "backend": 3,
        "text": 8,
        "quoted": 11,
        "a": 12,
        "table": 14,
        "row": 17,
        "row[0]": 17,
        "row[0].inner": 18,
        "row[1]": 19,
        "row[1].indented": 20,
    }


def test_tables_within_one_of_several_are_counted_as_its_own() -> None:
    found = parse_toml("[[row]]\na = 1\n[[row.inner]]\nb = 2\n[[row.inner]]\nb = 3\n[[row]]\na = 4\n", "file")
    first, second = {"row[0]": 1, "row[0].a": 2, "row[0].inner": 3, "row[0].b": 4}, {"row[1]": 7, "row[1].a": 8}
    assert found.lines == {"row": 1, **first, **second}


@pytest.mark.parametrize(
    "broken",
    [
        *("listen", 'listen "0.0.0.0:80"', "listen = 0.0.0.0:80", "listen = 'a", 'listen = ["a",', "listen = {a = 1"),
        *("listen = " + "[" * 50 + "]" * 50, "listen.a. = 1"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_statement_that_can_not_be_read_costs_no_other(broken: str, place: int) -> None:
    lines = ['a = "1"', "b = [\n2]", "[c]\nd = 4"]
    found = parse_toml("\n".join([*lines[:place], broken, *lines[place:]]), "file")
    assert found.values == tomllib.loads("\n".join(lines))
    assert bad_lines(found) == [(1, 2, 4)[place]]
    assert list(found.bad) == ["listen"]


def test_the_keys_of_a_table_whose_head_can_not_be_read_are_no_others() -> None:
    found = parse_toml("a = 1\n[[backend]\nurl = 1\nname = 2\n[[row]]\nb = 2\n", "file")
    assert (bad_lines(found), list(found.bad)) == ([2], ["backend"])
    assert found.values == {"a": 1, "row": [{"b": 2}]}
    assert found.lines == {"a": 1, "row": 5, "row[0]": 5, "row[0].b": 6}


def test_every_error_is_named_with_its_line() -> None:
    text = "a = \nb = 1\nc = 'x\nb = 2\n[[t]]\nd = 1\nd = 2\n[t]\n"
    assert bad_lines(parse_toml(text, "file")) == [1, 3, 4, 7, 8]
    many = parse_toml("".join(f"a{number} =\n" for number in range(100)), "file")
    assert len(many.problems) == PROBLEMS_MAX


@pytest.mark.parametrize("again", ["b = 2", "b = [\n2,\n]", "a.x = 1", "[c]", "[[c]]"])
@pytest.mark.parametrize("end", ["", "\n", "  # a comment", "\n# a comment"])
def test_what_is_written_twice_is_named_once_however_the_file_ends(again: str, end: str) -> None:
    text = "a = 1\n\nb = 1\n[c]\nd = 1\n"
    if again.startswith("["):
        line_of_it, text = 6, f"{text}{again}{end}"
    else:
        line_of_it, text = 3, f"a = 1\nb = 1\n{again}{end}"
    found = parse_toml(text, "file")
    (line,) = bad_lines(found)
    assert 0 <= line - line_of_it <= again.count("\n"), found.problems
    assert found.values["a"] == 1


@pytest.mark.parametrize("opening", ["[", "{a=", "[{a=[{b=", '["]",['])
@pytest.mark.parametrize("depth", [DEPTH_MAX + 1, 300, 5000, 100_000])
def test_what_is_nested_too_deep_is_an_error_with_its_line(opening: str, depth: int, tmp_path: Path) -> None:
    file = tmp_path / "deep.toml"
    file.write_text(f'policy = "ttft"\n\nbackend = [\n  {opening * depth}\n]\nworkers = 0\n')
    with pytest.raises(ConfigError) as caught:
        load({}, file)
    assert caught.value.problems == [
        f"{file}:4: not TOML: more than 12 levels deep",
        f"workers: must be a whole number, 1 to 256 (from {file}:6)",
    ]
    with pytest.raises(ConfigError, match=r"client_rules_file: .*deep.toml:4: more than 12 levels deep"):
        rule_book(file)


@pytest.mark.parametrize("number", ["9" * 5000, "-" + "9" * 5000, "[1, " + "9" * 5000 + "]"])
def test_a_number_that_the_library_cannot_convert_is_an_error_with_its_line(number: str, tmp_path: Path) -> None:
    file = tmp_path / "huge.toml"
    file.write_text(f'policy = "ttft"\n\nroute_capacity = {number}\nworkers = 0\n')
    with pytest.raises(ConfigError) as caught:
        load({}, file)
    first, second = caught.value.problems
    assert first.startswith(f"{file}:3: not TOML: exceeds the limit (4300 digits)")
    assert second == f"workers: must be a whole number, 1 to 256 (from {file}:4)"
    with pytest.raises(ConfigError, match=r"client_rules_file: .*huge.toml: .*4300 digits"):
        rule_book(file)


def test_names_of_very_many_parts_are_only_unknown(tmp_path: Path) -> None:
    file, parts = tmp_path / "deep.toml", ".a" * whole(11_000, 5_000)  # the library takes quadratic time
    for key in ("a", "backend", "workers", "policy_option", "control_key", "record_file"):
        for text in (f"{key}{parts} = 1", f"[{key}{parts}]", f"[[{key}{parts}]]"):
            file.write_text(text)
            with pytest.raises(ConfigError) as caught:
                load({}, file)
            assert len(caught.value.problems) == 1


def test_a_problem_of_one_table_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[[backend]]\nurl = "http://a:1"\n\n[[backend]]\nurl = "ftp://b"\n')
    with pytest.raises(ConfigError) as caught:
        load({}, file)
    assert caught.value.problems == [
        f"backend[1].url: must be a URL that begins with http:// or https:// (from {file}:4)"
    ]


def test_files_that_are_no_text_or_too_large_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(b"a = 1\nb = '\xff'\n")
    assert read_toml(file).problems == [f"{file}:2: not TOML: it is not UTF-8"]
    file.write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    assert "is larger than" in read_toml(file).problems[0]


@given(st.text(st.sampled_from("ab=[]{}\"'#\n.,1 \\")))
def test_any_text_is_read_as_tomllib_reads_it_or_has_problems(text: str) -> None:
    found = parse_toml(text, "file")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        assert found.problems
        assert all(1 <= line <= text.count("\n") + 1 for line in bad_lines(found))
    else:
        assert found.values == values or "levels deep" in found.problems[0]
