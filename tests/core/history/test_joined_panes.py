"""Panes of several workers make one, of the same shape: counts are the sums, and shares are of all."""

from __future__ import annotations

from copy import deepcopy
from math import nan
from typing import Any

import pytest

from ranvier_py.core.history import joined_panes as joins

ROW: dict[str, Any] = {
    "client": "claude", "sessions": 3, "turns": 4, "prompt_tokens": 400, "counted_tokens": 300, "compared_tokens": 200,
    "reused_share": 0.5, "reusable_share": 1.0, "break_tokens": 30, "break_prefill_s": 0.25,
    "breaks": [{"cause": "date", "path": "system", "scope": "turn", "count": 1, "tokens": 30, "prefill_s": 0.25,
                "rules": {"dates": 1}}],
}  # fmt: skip
HITS: dict[str, Any] = {
    "name": "a", "profile": "dense", "answers": 2, "predicted_tokens": 100, "cached_tokens": 50, "precision": 0.5,
    "recall": 1.0, "engine_hit_share": None, "capacity_tokens": None, "cache_usage": None, "biases": ["low"],
}  # fmt: skip
SHADOW = {"policy": "ttft", "placed": 10, "elsewhere_share": 0.5, "saved_tokens": 7, "saved_s": 1.0}


def test_the_newest_of_all_workers_come_first_and_are_as_many_as_one_shows() -> None:
    first, second = [{"at": 5, "id": 1}, {"at": 2, "id": 2}], [{"at": 4, "id": 3}]
    assert [row["id"] for row in joins.newest([first, second], 2)] == [1, 3]
    assert [row["id"] for row in joins.newest([first, second], 9)] == [1, 3, 2]


def test_requests_and_tenants_are_added_up_and_words_stay() -> None:
    one = {"policy": "ttft", "outcomes": {"served": 2}, "prompt_tokens": 10, "routes": 7}
    two = {"policy": "ttft", "outcomes": {"served": 1, "failed": 1}, "prompt_tokens": 5, "routes": 7}
    added = {"policy": "ttft", "outcomes": {"served": 3, "failed": 1}, "prompt_tokens": 15, "routes": 7}
    assert joins.of_requests([one, two]) == added
    assert joins.summed([{"red": [1, 0]}, {"red": [2, 1], "blue": [3, 0]}]) == {"red": [3, 1], "blue": [3, 0]}


def test_limits_are_the_own_ones_and_refusals_are_of_all() -> None:
    def pane(used: int, refused: int, last: str | None) -> dict[str, Any]:
        row = {"limits": [{"used": used}], "refused": refused, "last_refusal": last}
        return {"needs_key": True, "limited": 1, "limits": {"red": row} if refused >= 0 else {}}

    found = joins.limited([pane(5, 1, None), pane(6, 2, "too many"), pane(0, -1, None)])
    assert found["limits"]["red"] == {"limits": [{"used": 5}], "refused": 3, "last_refusal": "too many"}
    assert (found["needs_key"], found["limited"]) == (True, 1)


def test_a_client_of_two_workers_is_one_row_with_shares_of_all_that_it_sent() -> None:
    other = {**deepcopy(ROW), "prompt_tokens": 100, "counted_tokens": 100, "reused_share": 0.9, "reusable_share": None}
    alone = {**deepcopy(ROW), "client": "codex", "prompt_tokens": 900}
    own = {"clients": [ROW], "rules": ["r"], "trials": []}
    before = deepcopy(own)
    found = joins.of_clients([own, {"clients": [other, alone], "rules": [], "trials": []}])
    assert own == before  # nothing that was given has changed
    assert [row["client"] for row in found["clients"]] == ["codex", "claude"]
    row = found["clients"][1]
    assert (row["turns"], row["prompt_tokens"], row["break_tokens"], row["sessions"]) == (8, 500, 60, 3)
    assert row["reused_share"] == pytest.approx(0.6)
    assert row["reusable_share"] == 1.0
    (made,) = row["breaks"]
    assert (made["count"], made["tokens"], made["rules"], made["cause"]) == (2, 60, {"dates": 2}, "date")
    assert found["rules"] == ["r"]


def test_hits_are_counted_over_all_workers_and_an_engine_s_own_figures_are_of_whoever_reads_them() -> None:
    other = {**HITS, "predicted_tokens": 300, "precision": 1.0, "engine_hit_share": 0.3, "biases": ["low", "late"]}
    pane = {"route_precision": 0.5, "route_recall": 1.0, "engines": [HITS]}
    found = joins.of_hits([pane, {**pane, "engines": [other]}])
    (row,) = found["engines"]
    assert (row["answers"], row["predicted_tokens"], row["cached_tokens"]) == (4, 400, 100)
    assert row["precision"] == pytest.approx(0.875) == found["route_precision"]
    assert (row["engine_hit_share"], row["capacity_tokens"], row["biases"]) == (0.3, None, ["low", "late"])
    assert joins.of_hits([{**pane, "engines": []}])["route_recall"] is None


def test_what_shadows_would_have_saved_is_added_up() -> None:
    pane = {"live": "affinity", "shadows": [SHADOW]}
    (row,) = joins.of_shadows([pane, {**pane, "shadows": [{**SHADOW, "placed": 30, "elsewhere_share": 0.1}]}])[
        "shadows"
    ]
    assert (row["placed"], row["saved_s"], row["saved_tokens"]) == (40, 2.0, 14)
    assert row["elsewhere_share"] == pytest.approx(0.2)
    assert row["saved_ms_per_request"] == 50.0


def test_histories_are_added_by_second_as_far_as_each_is_known() -> None:
    assert joins.added_up([[1.0, 2.0, nan], [5.0, None], [9.0, 9.0, 9.0, 9.0, 1.0]], 4) == [9.0, 10.0, 16.0, 1.0]
    assert joins.added_up([[1.0]], 2) == [None, 1.0]
