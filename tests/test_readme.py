"""README.md as a new user takes it: every command, flag, path and figure in it is one that there is."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import trio

from cluster.demo.demo_view import Column, rows
from cluster.load.load_report import LoadLog, Report
from ranvier_py import cli
from ranvier_py.config.config_model import KEYS
from ranvier_py.control.control_port import Handlers
from ranvier_py.control.worker_reports import ReportHandlers
from ranvier_py.core.routing.placement.policies import POLICIES
from ranvier_py.replay.oracles import ORACLES
from tests.node.node_lab import MODEL, lab

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
HEADINGS = re.split(r"(?m)^## ", TEXT)


def section(title: str) -> str:
    (found,) = [part for part in HEADINGS if part.startswith(title)]
    return found


def commands(name: str) -> list[list[str]]:
    """What is typed in the README after `name`, as words: from its indented blocks and from `such` marks."""
    joined = re.sub("(?s)```.*?```", "", TEXT).replace("\\\n", " ")
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
    known = {flag for name in ("serve", "replay", "status", "reporter") for flag in flags(reported(cli.main, name))}
    named = set(re.findall(r"`(--[a-z][a-z-]+)", section("In front") + section("How it") + section("What would")))
    assert len(named) > 5
    assert named <= known


def test_every_path_of_the_control_port_is_served() -> None:
    nobody: Any = MagicMock()  # whose methods are named and never called
    routes = [*Handlers(nobody).table(), *ReportHandlers(nobody, nobody).table()]
    served = {re.sub("<.*>", "", route.partition(" ")[2]) for route in routes}
    named = set(re.findall(r"`[A-Z ]*(/(?:admin|explain|healthz|readyz|metrics|list_|add_|remove_)[a-z_/-]*)", TEXT))
    named |= set(re.findall(r"`(/admin/[a-z/-]+)", TEXT))
    assert len(named) >= 12
    assert {path for path in named if path not in served} == set()


def test_every_key_of_the_configuration_that_is_named_there_is_one() -> None:
    named = set(re.findall(r"`([a-z]+_(?:key_)?file)`", TEXT))
    assert named
    assert named <= set(KEYS)


def test_every_policy_has_its_rule() -> None:
    table = section("How it decides").partition("\n### Hybrid models")[0]
    named = [name for row in re.findall(r"(?m)^\| (`.*?) \|", table) for name in re.findall(r"`([a-z_]+)`", row)]
    assert sorted(named) == sorted(POLICIES)
    for words in commands("ranvier replay"):
        if "--policy" in words:
            assert set(words[words.index("--policy") + 1].split(",")) <= {*POLICIES, *ORACLES}


async def test_the_example_of_a_client_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall("(?s)```python\n(.*?)```", TEXT)
    async with lab(engines=2) as node:
        code = example.replace("http://127.0.0.1:8080", node.url).replace("Qwen/Qwen2.5-7B-Instruct", MODEL)
        assert code.count(MODEL) == code.count(node.url) == 1
        names: dict[str, Any] = {}
        await trio.to_thread.run_sync(exec, code, names)
        await trio.to_thread.run_sync(names["client"].close)
    assert capsys.readouterr().out.splitlines()[-1], "the answer"


def test_the_picture_of_the_live_table_has_the_rows_that_are_shown() -> None:
    picture = re.search(r"(?s)```\n(┏.*?)```", TEXT)
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


def test_the_sections_are_in_the_order_of_a_first_reading() -> None:
    titles = (
        "Two commands",
        "In front",
        "How it decides",
        "Operating",
        "Answers that",
        "What would",
        "Which client",
        "Several nodes",
        "Coming from",
        "Measured",
        "More",
    )
    assert [part.split("\n")[0] for part in HEADINGS[1:] if not part.startswith(titles)] == []
    assert [next(title for title in titles if part.startswith(title)) for part in HEADINGS[1:]] == list(titles)


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
    assert re.findall(r"(?m)^\| `[a-z-]+`, .*", section("Which client")) == expected


def named(row: Any) -> dict[str, Any]:
    """What tells a measured breaker from others."""
    return {key: row[key] for key in ("shape", "breaker", "rule")}


def test_every_file_that_the_documents_name_is_there() -> None:
    for document in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text()
        for name in re.findall(r"`((?:tests|cluster|benchmarks|deploy|ranvier_py)/[\w./*-]*)`", text):
            assert list(ROOT.glob(name.rstrip("/"))), f"{document}: {name}"
        for name in re.findall(r"\]\((?!http)([^)]+)\)", text):
            assert (ROOT / name).exists(), f"{document}: {name}"
