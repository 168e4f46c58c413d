"""The engine_caches and stale benchmarks from traffic to the page, with streams and with whole answers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks import engine_caches, stale
from benchmarks.harness import report_replays
from benchmarks.workloads.traffic import chat_threads
from benchmarks.workloads.workloads import WORKLOADS

THREADS = replace(WORKLOADS["chat_threads"], load=lambda: chat_threads(1, threads=4))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_caches, stale):
        monkeypatch.setattr(module, "WORKLOADS", {"chat_threads": THREADS})


def test_one_node_is_also_run_with_whole_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_caches, "DRAWS_OF_NODES", {1: 2, 4: 1})
    monkeypatch.setattr(engine_caches, "SHARES", (0.25,))
    monkeypatch.setattr(engine_caches, "CAPACITY", {"chat_threads": (10.0,)})
    monkeypatch.setattr(engine_caches, "POLICIES", {1: ("ttft",), 4: ("ttft",)})
    assert engine_caches.main(["--dry", "--jobs", "1", "--workload", "chat_threads"]) == 0
    result = json.loads(capsys.readouterr().out)
    counted = Counter((row["streamed"], row["nodes"]) for row in result["rows"])
    assert counted == {(True, 0): 2, (True, 1): 3, (True, 4): 3, (False, 0): 2, (False, 1): 3}
    assert len(list(report_replays.engine_caches(result))) <= 6
    for goal in result["goals"].values():
        goal.update(mean=0.7, cells=1)
    rows = list(report_replays.engine_caches(result))
    assert [row.question.partition(" that calibration")[0] for row in rows[:4]] == [
        *("wasted prefill", "hits", "wasted prefill of whole answers", "hits of whole answers")
    ]


def test_stale_routes_are_measured_with_streams_and_with_whole_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stale, "SHARES", (1.0, 0.25))
    monkeypatch.setattr(stale, "RESTARTS", (4,))
    assert stale.main(["--dry", "--jobs", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert Counter(row["streamed"] for row in result["rows"]) == {True: 9, False: 9}
    rows = list(report_replays.stale(result))
    assert ["whole answers" in row.question for row in rows] == [False, False, True, True]
    old = [{key: value for key, value in row.items() if key != "streamed"} for row in result["rows"][:9]]
    assert list(report_replays.stale({"rows": old})) == rows[:2]
