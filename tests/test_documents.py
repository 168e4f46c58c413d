"""The pages as a new user takes them: every command, flag, key, path, link and figure in them is one that there is."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from importlib.util import find_spec
from typing import Any

import pytest
import trio

from cluster.demo.demo_view import Column, rows
from cluster.load.load_report import LoadLog, Report
from ranvier_py import cli
from ranvier_py.config.config_model import KEYS
from ranvier_py.control.control_port import ControlPort
from ranvier_py.core.routing.placement.policies import POLICIES
from ranvier_py.node.reload import Reloads
from ranvier_py.replay.oracles import ORACLES
from tests import documents, house
from tests.builders.built_nodes import built
from tests.documents import DOCS, LINK, OPERATORS, PAGES, README, ROOT, anchors, prose, tables
from tests.node.node_lab import MODEL, lab

HEADINGS = re.split(r"(?m)^## ", README)
README_LINES_MAX = 160


def section(title: str) -> str:
    (found,) = [part for part in HEADINGS if part.startswith(title)]
    return found


def commands(name: str) -> list[list[str]]:
    """What is typed after `name`, as words: from indented blocks and from `such` marks of all pages."""
    joined = prose(OPERATORS).replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines() if line.startswith("    ")]
    lines += [text.replace("\n", " ") for text in re.findall(r"`([^`]+)`", joined)]
    typed = [shlex.split(line, comments=True) for line in lines if line.startswith(name)]
    return [words[len(name.split()) :] for words in typed]


def reported(main: Any, *words: str) -> str:
    """The help of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        main([*words, "--help"])
    return out.getvalue()


def flags(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]+", text))


def test_every_flag_of_every_command_is_known() -> None:
    typed = commands("ranvier ")
    assert {words[0] for words in typed} >= {"serve", "config", "explain", "status", "replay", "reporter"}
    for words in typed:
        assert flags(" ".join(words)) <= flags(reported(cli.main, words[0])), words
    for words in commands("python -m cluster load"):
        from cluster.load.load_command import main  # noqa: PLC0415  # only here

        assert flags(" ".join(words)) <= flags(reported(main)), words


def test_every_flag_that_the_text_names_is_one_of_some_command() -> None:
    commands_with_flags = ("serve", "config", "keys", "access", "backend", "replay", "status", "reporter", "check")
    known = {flag for name in commands_with_flags for flag in flags(reported(cli.main, name))}
    named = set(re.findall(r"`(--[a-z][a-z-]+)", OPERATORS))
    assert len(named) > 15
    assert named <= known


def test_every_path_of_the_control_port_is_served() -> None:
    node = built(more=lambda node: [ControlPort(node), Reloads(node, node.config, None, 0)])
    routes = [route for part in node.parts for route in part.routes()]
    served = {re.sub("<.*>", "", route.partition(" ")[2]) for route in routes}
    named = set(
        re.findall(r"`[A-Z ]*(/(?:admin|explain|healthz|readyz|metrics|list_|add_|remove_)[a-z_/-]*)", OPERATORS)
    )
    named |= set(re.findall(r"`(/admin/[a-z/-]+)", OPERATORS))
    assert len(named) >= 12
    assert {path for path in named if path not in served} == set()


NO_KEYS = frozenset({"older_than_s", "api_key_file", "model_in_answer", "since_s", "silent_s", "tokens_per_s"})
"""Of a request to the control port, of a table of a model."""


def test_every_key_of_the_configuration_that_is_named_there_is_one() -> None:
    named = set(re.findall(r"`([a-z_]+_(?:file|max|s))`", OPERATORS)) | set(re.findall(r"`([a-z_]+) = ", OPERATORS))
    assert len(named) > 12
    assert named <= {*KEYS, *NO_KEYS}


def test_every_policy_has_its_rule() -> None:
    rows = re.findall(r"(?m)^\| (`.*?) \|", DOCS["policies.md"])
    named = [name for row in rows for name in re.findall(r"`([a-z_]+)`", row)]
    assert sorted(named) == sorted(POLICIES)
    for words in commands("ranvier replay"):
        if "--policy" in words:
            assert set(words[words.index("--policy") + 1].split(",")) <= {*POLICIES, *ORACLES}


async def test_the_example_of_a_client_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall("(?s)```python\n(.*?)```", OPERATORS)
    async with lab(engines=2) as node:
        code = example.replace("http://127.0.0.1:8080", node.url).replace("Qwen/Qwen2.5-7B-Instruct", MODEL)
        assert code.count(MODEL) == code.count(node.url) == 1
        names: dict[str, Any] = {}
        await trio.to_thread.run_sync(exec, code, names)
        await trio.to_thread.run_sync(names["client"].close)
    assert capsys.readouterr().out.splitlines()[-1], "the answer"


def test_the_picture_of_the_live_table_has_the_rows_that_are_shown() -> None:
    picture = re.search(r"(?s)```\n(┏.*?)```", README)
    assert picture is not None
    titles = [line.split("│")[1].rstrip()[1:] for line in picture[1].splitlines() if line.startswith("│")]
    column = Column("affinity", 1)
    shown = [title for title, _ in rows([column], [Report(LoadLog(), 0.0)])]
    assert titles[: len(shown)] == shown
    assert titles[len(shown) :] == [f"engine-{number}" for number in range(1, 5)]


MEASURED = re.findall(r"(?m)^\| `([a-z_]+)`", section("Measured"))


def test_eight_rows_are_measured_and_the_page_of_all_has_the_rest() -> None:
    assert len(MEASURED) == 8
    every = (ROOT / "benchmarks" / "README.md").read_text()
    assert {name for name in MEASURED if f"\n## {name}\n" not in every} == set()


def test_the_readme_is_a_first_reading() -> None:
    titles = ["Two commands", "In front of your engines", "Several nodes, one memory", "Which policy"]
    titles += ["What you can ask it", "Measured", "Documentation"]
    assert [part.partition("\n")[0] for part in HEADINGS[1:]] == titles
    assert len(README.splitlines()) <= README_LINES_MAX


def test_the_two_commands_are_the_first_that_can_be_typed() -> None:
    typed = re.findall(r"(?m)^    ([a-z].*?)(?:  +#.*)?$", README)
    assert typed[:2] == ["make up", "make test"]


@pytest.mark.parametrize("name", sorted(set(MEASURED)))
def test_every_figure_has_its_benchmark_and_its_result(name: str) -> None:
    assert find_spec(f"benchmarks.{name}") is not None
    result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    assert {"commit", "machine"} <= result.keys()


def test_an_agent_before_and_after_is_shown_with_the_figures_that_were_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "clients.json").read_text())["mended"]["rows"]
    expected = []
    for row in (each for each in measured if each["nodes"] == 1):
        both = [row, *(each for each in measured if each["nodes"] == 4 and each.items() >= named(row).items())]
        shares = [" / ".join(f"{100 * each[key]:.1f}" for each in both) for key in ("without", "broken", "mended")]
        expected.append(f"| `{row['shape']}`, {row['breaker']} | `{row['rule']}` | {' % | '.join(shares)} % |")
    assert re.findall(r"(?m)^\| `[a-z-]+`, .*", DOCS["client-rules.md"]) == expected


def named(row: Any) -> dict[str, Any]:
    """What tells a measured breaker from others."""
    return {key: row[key] for key in ("shape", "breaker", "rule")}


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    for name in re.findall(r"`((?:tests|cluster|benchmarks|deploy|docs|ranvier_py)/[\w./*-]*)`", text):
        assert list(ROOT.glob(name.rstrip("/"))), name
    for name in re.findall(r"`((?:core|proxy|io|node|config|control|mesh|routing)/[\w./]*)`", text):
        assert list((ROOT / "ranvier_py").glob(f"**/{name.rstrip('/')}")), name


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page: str) -> None:
    for name, anchor in LINK.findall((ROOT / page).read_text()):
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), name
        assert not anchor or anchor in anchors(target.read_text()), f"{name}#{anchor}"


def test_the_map_shows_what_is_there() -> None:
    """A name below another one lies in it."""
    above, fenced = [ROOT], (ROOT / "ARCHITECTURE.md").read_text().split("```")[1]
    for indent, name in re.findall(r"(?m)^( *)([\w./]+)(?: {2,}\S|$)", fenced):
        depth = len(indent) // 2
        above[depth + 1 :] = [above[depth] / name]
        assert above[-1].exists(), name
    assert above[-1] == ROOT / "tests"


def test_every_page_of_docs_is_linked_from_the_index_that_the_readme_begins_with() -> None:
    assert LINK.findall(section("Documentation"))[0] == ("docs/README.md", "")
    assert {*DOCS} - {"README.md"} <= {name for name, _ in LINK.findall(DOCS["README.md"])}


@pytest.mark.parametrize("page", PAGES)
def test_every_row_of_a_table_has_the_cells_of_its_header(page: str) -> None:
    for rows_of_table in tables((ROOT / page).read_text()):
        cells = {len(re.findall(r"(?<!\\)\|", row)) for row in rows_of_table}
        assert len(cells) == 1, rows_of_table[0]
        assert re.fullmatch(r"\|(?::?-+:?\|)+", rows_of_table[1]), rows_of_table[0]


RULES = re.findall(r"(?m)^\| ([A-Z]+\d+) \|.*\| (.*) \|$", DOCS["sources.md"])


def test_every_rule_that_is_cited_stands_once_on_the_page_of_sources() -> None:
    defined = [rule for rule, _ in RULES]
    assert len(defined) == len(set(defined)) > 100
    texts = {str(house.short(path)): path.read_text() for path in house.everything()}
    texts |= {page: (ROOT / page).read_text() for page in PAGES}
    assert {name: rules for name, text in texts.items() if (rules := documents.cited(text) - set(defined))} == {}


def test_every_rule_and_every_promise_of_the_sources_has_its_test() -> None:
    rows = [row for table in tables(DOCS["sources.md"])[1:] for row in table[2:]]
    assert len(rows) > len(RULES)
    shown = re.compile(r"\| (`[^`]+::\w+`(, `[^`]+::\w+`)*|not built: .{10,}) \|$")
    assert [row for row in rows if shown.search(row) is None] == []
    assert documents.missing_tests(DOCS["sources.md"]) == []


def test_a_rule_or_a_test_that_is_none_is_found() -> None:
    unknown = "PU" + "99"
    assert documents.cited(f"Sync ({unknown}), R7a, PX4 to CX5; def test_pu6_both():") == {
        unknown,
        "R7",
        "PX4",
        "CX5",
        "PU6",
    }
    assert documents.missing_tests("test_tidy.py::test_there_is_no_lock") == []
    for wrong in ("test_tidy::test_there_is_no_clock", "test_untidy::test_there_is_no_lock"):
        assert documents.missing_tests(f"`{wrong}`") == [wrong]


def test_every_kind_of_finding_has_its_row() -> None:
    """So that who meets one can look it up, and no row is of a kind that is gone."""
    text = next(part for part in re.split(r"(?m)^## ", DOCS["operating.md"]) if part.startswith("Findings"))
    listed = [kind for row in tables(text)[0][2:] for kind in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(documents.kinds_of_findings())
