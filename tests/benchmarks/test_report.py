"""benchmarks/README.md says what the result files say."""

from __future__ import annotations

import json
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.harness.bench import RESULTS, finish
from benchmarks.harness.report import PAGE, READERS, page
from benchmarks.harness.report_replays import stale


def test_the_page_is_the_one_that_the_results_make() -> None:
    """`python -m benchmarks.harness.report` writes it anew."""
    assert PAGE.read_text() == page()


def test_every_result_has_its_reader_and_every_reader_its_benchmark() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} <= READERS.keys()
    benchmarks = {name.removesuffix("_anew") for name in READERS}  # one writes a second file
    assert {name for name in benchmarks if find_spec(f"benchmarks.{name}") is None} == set()


def test_what_misses_its_goal_is_listed_first() -> None:
    text = page()
    missed = text.partition("## What misses")[2].partition("\n## ")[0].count("\n- ")
    assert missed == text.count(": **missed** |") > 0


def test_a_result_is_printed_where_no_file_shall_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.harness.bench.RESULTS", tmp_path)
    asked = Namespace(seed=1, dry=False, tokenizer=Path("somewhere/qwen"))
    assert finish("one", asked, {}, whole=False, rows=[[1, 2]]) == 0
    assert '"rows": [\n    [1, 2]\n  ]\n}\n' in capsys.readouterr().out
    assert finish("one", Namespace(dry=True), {}) == finish("one", Namespace(dry=False, quick=True), {}) == 0
    assert list(tmp_path.iterdir()) == []
    assert finish("one", asked, {"cases": []}) == 0
    written = json.loads((tmp_path / "one.json").read_text())
    assert written | {"seed": 1, "tokenizer": "qwen", "cases": []} == written
    assert "commit" in written


def test_the_figures_of_stale_routes_stand_in_one_row_for_each_pressure() -> None:
    """What is evicted differs with what a router knows, so it is no name of a cell."""
    result = json.loads((RESULTS / "stale.json").read_text())
    rows = list(stale(result))
    assert len(rows) == 4
    assert all(row.figure.count("%") == 3 for row in rows)
