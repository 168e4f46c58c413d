"""What a replay shows: samples of load, quantiles, the table, the curves of a sweep."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from ranvier_py.replay.engine.engine_values import CacheName
from ranvier_py.replay.result_table import BOLD, PLAIN, table
from ranvier_py.replay.results import SAMPLES_MAX, LoadSamples, ReplayResults, RunResult, Tally, TraceSummary, curves
from ranvier_py.replay.sentences import duration

TIMES = {"p50": 0.1, "p90": 0.5, "p95": 0.6, "p99": 1.0, "mean": 0.2}


def result(
    policy: str = "affinity", nodes: int = 1, rate: float = 1.0, p90_s: float = 0.5, hits: float = 0.5
) -> RunResult:
    tally = Tally(2, 0.0)
    tally.times.ttft_s, tally.requests = [0.1], 1
    measures = {**tally.measures(10.0), "hit_rate": hits, "ttft_s": {**TIMES, "p90": p90_s}}
    return RunResult(trace="t", policy=policy, nodes=nodes, engines=2, rate=rate, seed=1, **measures)


def results(*runs: RunResult) -> ReplayResults:
    return ReplayResults({}, [TraceSummary("t", 1200, 34_567, 10, 16, 90.0, timed=False)], runs)


# --- samples and quantiles ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length_s", [10.0, 1000.0, 100_000.0])
def test_samples_of_load_stay_few_and_even_however_long_a_run_is(length_s: float) -> None:
    samples = LoadSamples(5.0)
    for event in range(1001):
        samples.take(5.0 + event * length_s / 1000, [event])
    rows = samples.rows()
    assert len(rows) <= SAMPLES_MAX
    assert len(rows) >= min(SAMPLES_MAX // 2, int(length_s / 0.25))
    steps = {round(after[0] - before[0], 6) for before, after in pairwise(rows)}
    assert len(steps) == 1


def test_a_sample_shows_what_was_in_flight_before_the_next_event() -> None:
    samples = LoadSamples(0.0)
    samples.take(0.0, [1])
    samples.take(0.6, [7])
    assert samples.rows() == [[0.0, 1], [0.25, 7], [0.5, 7]]


def test_quantiles_are_of_all_times_and_empty_runs_have_zeros() -> None:
    tally = Tally(1, 0.0)
    assert tally.measures(0.0)["ttft_s"]["p99"] == 0.0
    tally.times.ttft_s = [float(each) for each in range(101)]
    measures = tally.measures(0.0)
    assert measures["ttft_quantiles"] == [float(each) for each in range(101)]
    assert measures["ttft_s"] == {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "mean": 50.0}


def test_spread_reports_equal_shares_from_unequal_ones() -> None:
    tally = Tally(2, 0.0)
    assert (tally.measures(0.0)["load_cv"], tally.measures(0.0)["max_over_mean"]) == (0.0, 1.0)
    tally.requests_by_engine = [1, 3]
    assert (tally.measures(0.0)["load_cv"], tally.measures(0.0)["max_over_mean"]) == (0.5, 1.5)


# --- the table ------------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_run_under_what_was_replayed() -> None:
    lines = table(results(result("affinity"), result("ttft", nodes=4)), bold=False).partition("\n\n")[0].splitlines()
    assert lines[0] == "t: 1,200 requests in 90.0 s (the times are ours), 34,567 prompt tokens, 2 engines"
    assert lines[1].split()[:3] == ["policy", "nodes", "rate"]
    assert [line.split()[:2] for line in lines[2:]] == [["affinity", "1"], ["ttft", "4"]]
    assert BOLD not in "".join(lines)


def test_the_best_of_those_that_compete_is_bold_and_no_oracle_ever_is() -> None:
    runs = (
        result("affinity", p90_s=0.4),
        result("round_robin", p90_s=0.6),
        result("affinity", nodes=4, p90_s=0.9),
        result("round_robin", nodes=4, p90_s=0.8),
        result("oracle_ttft", nodes=0, p90_s=0.1),
    )
    lines = table(results(*runs), bold=True).partition("\n\n")[0].splitlines()[2:]
    assert [BOLD in line for line in lines] == [True, False, False, True, False]
    assert f"{BOLD}400 ms{PLAIN}" in lines[0]
    assert lines[4].split()[1] == "-"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123, "12 ms"),
        (1.5, "1.50 s"),
        (12.34, "12.3 s"),
        (119.0, "119.0 s"),
        (600.0, "10 min"),
        (0.0, "0 ms"),
        (0.00045, "0.45 ms"),
        (0.0001, "0.1 ms"),
        (36_000.0, "10 h"),
        (864_000.0, "10 days"),
    ],
)
def test_times_are_written_with_their_unit(value: float, text: str) -> None:
    assert duration(value) == text


def test_who_served_nobody_has_no_figures_and_wins_nothing() -> None:
    """Its times would be 0 ms: the best of all."""
    refused = replace(result("ttft", p90_s=0.0, hits=0.0), requests=9, failed=9, failures={"prompt_too_long": 9})
    lines = table(results(result("affinity"), result("random", p90_s=0.7), refused), bold=True).splitlines()
    assert f"{BOLD}500 ms{PLAIN}" in lines[2]
    assert BOLD not in lines[4]
    assert lines[4].split() == ["ttft", "1", "1", *"-" * 9, "9", "0.0", "s"]
    assert (
        "- Failed, in all runs: 9 because prompt and answer are longer than an engine's cache (prompt_too_long); most"
        in " ".join(lines)
    )


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_row_fits_the_terminal_and_the_most_important_columns_stay(width: int) -> None:
    """A folded table of twenty rows can't be read."""
    runs = [result("sticky_least_loaded"), result("affinity", p90_s=0.3), result("oracle_ttft", nodes=0)]
    text = table(results(*runs), bold=False, width=width)
    assert max(map(len, text.splitlines())) <= width
    titles = next(line for line in text.splitlines() if line.startswith("policy"))
    assert all(title in titles for title in ("policy", "hits", "TTFT p50", "p90", "failed"))
    assert ("wall" in titles) == (width == 200)
    assert ("Left out, for want of width" in " ".join(text.split())) == (width < 200)


def test_what_is_equal_in_all_rows_is_left_out_first() -> None:
    alone, several = [table(results(result(), result(nodes=nodes)), bold=False, width=112) for nodes in (1, 4)]
    assert "nodes" not in alone.splitlines()[1]
    assert "nodes" in several.splitlines()[1]
    assert "rate" not in several.splitlines()[1]


def test_below_the_table_stands_what_came_out_and_what_the_columns_mean() -> None:
    text = table(results(result("affinity", p90_s=0.4), result("random", p90_s=0.9)), bold=False)
    assert "- Least p90 to the first token: affinity, 400 ms.\n" in text
    assert "- What to do: ranvier serve --policy affinity.\n" in text
    assert "hits: prompt tokens that engines had in the cache;" in " ".join(text.split())


def test_one_of_a_kind_is_not_many() -> None:
    alone = ReplayResults({}, [TraceSummary("t", 1, 5, 1, 16, 0.0, timed=True)], [replace(result(), engines=1)])
    assert table(alone, bold=False).startswith("t: 1 request in 0 ms, 5 prompt tokens, 1 engine\n")


# --- sweeps ---------------------------------------------------------------------------------------------------------


def test_a_curve_is_one_policy_over_all_rates() -> None:
    runs = [result(policy, rate=rate) for rate in (2.0, 1.0) for policy in ("affinity", "random")]
    found = curves([*runs, result("ttft"), replace(result("affinity", nodes=4), rate=3.0)])
    assert [(curve["policy"], [point["rate"] for point in curve["points"]]) for curve in found] == [
        ("affinity", [1.0, 2.0]),
        ("random", [1.0, 2.0]),
    ]
    assert found[0]["points"][0]["ttft_p90_s"] == 0.5


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        (("attention",), "the caches are smaller than the traffic"),
        (("attention", "sglang_no_buffer"), "they reuse a prefix only where they kept a checkpoint of it"),
    ],
)
def test_why_more_was_believed_to_be_cached_than_was_depends_on_the_caches(
    caches: tuple[CacheName, ...], reason: str
) -> None:
    run = replace(result(hits=0.5), predicted_hit_rate=0.8, caches=caches)
    assert reason in " ".join(table(results(run, result("random")), bold=False).split())
