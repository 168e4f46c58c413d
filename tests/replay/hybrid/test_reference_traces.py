"""Marconi's simulator on our traces, to the integer. `make bench NAME=marconi` has the whole tables."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.harness.marconi_reference import CASES, CURVES, REPAIRED_CASES, SINGLE_REPAIRS, SIZE_GB
from benchmarks.harness.trace_caches import TreeOfTrace, run
from benchmarks.marconi import (
    Requests,
    case_rows,
    marconi,
    profile_rows,
    repair_rows,
    requests_of,
    retuned_rows,
    tree_of,
)
from benchmarks.workloads.hybrid_traces import DIGESTS, TRACES, digest, trace
from ranvier_py.replay.hybrid.alpha_search import ALPHAS, Retuned, saved_flops
from ranvier_py.replay.hybrid.cache_models import RETUNED_EVERY
from ranvier_py.replay.hybrid.state_tree import COMPAT, REPAIRED


@cache
def requests(name: str) -> Requests:
    return requests_of(TRACES[name])


@pytest.mark.parametrize("name", ["sharegpt", "rag"])
def test_a_synthetic_trace_is_drawn_as_it_was(name: str) -> None:
    """Writing the two long ones takes longer than all else here; what they give is checked below."""
    assert digest(trace(TRACES[name])) == DIGESTS[name]


@pytest.mark.parametrize("name", ["sharegpt", "rag"])
def test_every_published_cache_reuses_the_reference_tokens_and_ends_in_the_reference_state(name: str) -> None:
    (case,) = [case for case in CASES if (case.trace, case.capacity_gb) == (name, SIZE_GB[name])]
    rows = list(case_rows(case, requests(name), inside=True))
    assert len(rows) == 7
    assert [row for row in rows if not row["equal"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lmsys", "swebench"])
def test_marconi_and_its_repair_reuse_the_reference_tokens_of_long_traces(name: str) -> None:
    (case,) = [case for case in CASES if (case.trace, case.capacity_gb) == (name, SIZE_GB[name])]
    asked = requests(name)
    for defects, expected in ((COMPAT, case.marconi), (REPAIRED, REPAIRED_CASES[name])):
        tree, _, ran = marconi(name, SIZE_GB[name], defects, asked)
        assert (ran.reused_tokens, tree.alpha) == expected[:2]
    assert run(TreeOfTrace(tree_of("lru", SIZE_GB[name])), asked).reused_tokens == case.sglang_plus


def test_each_defect_repaired_alone_reuses_the_reference_tokens() -> None:
    rows = list(repair_rows("sharegpt", requests("sharegpt")))
    assert len(rows) == 1 + len(SINGLE_REPAIRS["sharegpt"])
    assert [row for row in rows if not row["equal"]] == []


@pytest.mark.parametrize("step", range(0, 21, 4))
def test_a_static_alpha_reuses_the_reference_tokens(step: int) -> None:
    ran = run(TreeOfTrace(tree_of("utility", SIZE_GB["sharegpt"], alpha=ALPHAS[step])), requests("sharegpt"))
    assert ran.reused_tokens == CURVES["sharegpt"][step]


def test_alpha_that_is_tuned_again_and_again_finds_more_than_alpha_tuned_once() -> None:
    rows = list(retuned_rows("rag", requests("rag")))
    assert [row for row in rows if not row["equal"]] == []
    _, _, once = marconi("rag", SIZE_GB["rag"], COMPAT, requests("rag"))
    assert min(row["found"] for row in rows) > once.hit_rate


@pytest.mark.parametrize(
    "name", ["sharegpt", "rag", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lmsys", "swebench"))]
)
def test_damped_retuning_never_reuses_a_point_less_than_recency_alone(name: str) -> None:
    """Tuned once, Marconi does on two of these traces."""
    recent = run(TreeOfTrace(tree_of("lru", SIZE_GB[name])), requests(name)).hit_rate
    tree = tree_of("utility", SIZE_GB[name], defects=REPAIRED)
    tuner = Retuned(RETUNED_EVERY, damped=True)
    assert run(TreeOfTrace(tree, tuner), requests(name)).hit_rate > recent - 0.01
    assert len(set(tuner.alphas)) > 2


@pytest.mark.parametrize("name", ["sharegpt", "rag"])
def test_what_engines_reuse_by_where_they_keep_checkpoints_is_the_reference(name: str) -> None:
    rows = {row["kind"].removeprefix("profile "): row for row in profile_rows(name, requests(name))}
    assert [row for row in rows.values() if not row["equal"]] == []
    assert rows["sglang_no_buffer"]["hit_rate"] < rows["marconi"]["hit_rate"]


def test_operations_saved_grow_faster_than_the_tokens_reused() -> None:
    model = tree_of("lru", 1).model
    assert saved_flops(model, [2_000]) > saved_flops(model, [1_000, 1_000])


def test_two_runs_of_one_trace_are_equal() -> None:
    """Each replay of the tuning begins anew, so what it did to a tree must not show in the tree itself."""
    asked = requests("rag")[:200]
    first, again = (marconi("rag", 0.5, replace(COMPAT, match=False), asked) for _ in range(2))
    assert first[2] == again[2]
    assert first[0].alpha == again[0].alpha
