"""The report of a replay, and the charts in it."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.routing.placement.policies import POLICIES
from ranvier_py.replay.html_report import page
from ranvier_py.replay.oracles import ORACLES
from ranvier_py.replay.results import ReplayResults, RunResult, TraceSummary
from ranvier_py.replay.svg import (
    BOTTOM,
    CHARACTER_WIDTH,
    HEIGHT,
    Axis,
    Bar,
    ChartLine,
    bar_chart,
    line_chart,
    linear_ticks,
    log_ticks,
)

TRACE = TraceSummary("chats & <more>", 1000, 5_000_000, 90_000, 16, 600.0, timed=True)


def run(
    policy: str, p90: float, *, rate: float = 1.0, nodes: int = 1, hit_rate: float = 0.5, failed: int = 0
) -> RunResult:
    times = {"p50": p90 / 3, "p90": p90, "p95": p90, "p99": 2 * p90, "mean": p90 / 2}
    return RunResult(
        trace=TRACE.name,
        policy=policy,
        nodes=0 if policy.startswith("oracle") else nodes,
        engines=2,
        rate=rate,
        seed=1,
        requests=1000,
        failed=failed,
        failures={"queue_full": failed} if failed else {},
        prompt_tokens=5_000_000,
        cached_tokens=int(hit_rate * 5_000_000),
        hit_rate=hit_rate,
        predicted_hit_rate=hit_rate + 0.1,
        ttft_s=times,
        ttft_quantiles=[p90 * index / 90 for index in range(101)],
        e2e_s=times,
        offered_per_s=2.0 * rate,
        requests_per_s=2.0 * rate,
        load_over_time=[[0.0, 1, 2], [1.0, 3, 2]],
        requests_by_engine=[500, 500],
        computed_by_engine=[1, 2],
        load_cv=0.1,
        max_over_mean=1.1,
        regret_s={"sum": 3.0, "mean": 0.003, "p90": 0.01, "share_of_ttft": 0.1},
        reasons={"warm": 900, "cold": 100},
        virtual_s=500.0,
    )


def report(*runs: RunResult) -> str:
    return page(ReplayResults({"seed": 1, "plan": {"engines": 2}}, [TRACE], runs))


class Balance(HTMLParser):
    """Fails on a tag that is closed and was not open, and knows which are left open."""

    VOID = ("meta", "line", "rect", "circle", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opened and closed at once."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_nobody_for_anything() -> None:
    parser = Balance()
    text = report(run("ttft", 1.0), run("least_loaded", 2.0), run("oracle_ttft", 0.9))
    parser.feed(text)
    assert (parser.open, parser.links) == ([], [])
    assert "<script" not in text
    assert "url(" not in text


def test_it_states_in_words_what_came_out() -> None:
    text = report(run("ttft", 1.0, hit_rate=0.6), run("least_loaded", 2.0, hit_rate=0.1), run("oracle_ttft", 0.8))
    assert "Least p90 to the first token: ttft, 1.00 s." in text
    assert "50% less at p90" in text
    assert "60.0% of the prompt tokens found instead of 10.0%" in text
    assert "would reach 800 ms: ttft has 25% more." in text
    assert "believed 10.0% of the prompt tokens more to be cached than were" in text


def test_it_states_where_the_best_changes_and_what_to_do() -> None:
    runs = [run("affinity", 1.0), run("ttft", 1.2), run("affinity", 9.0, rate=2.0), run("ttft", 3.0, rate=2.0)]
    stuck = [replace(run(policy, 50.0, rate=4.0), requests_per_s=2.0) for policy in ("affinity", "ttft")]
    text = report(*runs, *stuck, run("affinity", 1.1, nodes=4))
    assert "The best changes with the rate: affinity at 1; ttft at 2; affinity at 4." in text
    assert "From rate 4 on no policy serves requests as fast as they come" in text
    assert "affinity on 4 nodes instead of 1: 1.10 s instead of 1.00 s" in text
    assert "What to do at rate 1 (as recorded) with 1 node: ranvier serve --policy affinity." in text


def test_a_short_trace_that_ends_before_its_last_answer_was_served_all_the_same() -> None:
    """Its requests take longer to be answered than to come: that is no saturation."""
    short = [
        replace(run(policy, 0.1, rate=rate), requests=10, offered_per_s=10.0 * rate, requests_per_s=served_per_s)
        for policy in ("ttft", "affinity")
        for rate, served_per_s in ((2.0, 8.0), (10.0, 9.5))
    ]
    short = [replace(each, e2e_s=dict.fromkeys(each.e2e_s, 1.0)) for each in short]
    assert "no policy serves requests as fast" not in report(*short)
    assert "first token at rate 10" in report(*short)
    slow = [replace(each, requests_per_s=8.5) if each.rate == 10 else each for each in short]
    assert "From rate 10 on no policy serves" in report(*slow)


def test_requests_that_come_all_at_once_have_no_rate() -> None:
    once = [replace(run("ttft", 1.0, rate=rate), offered_per_s=0.0) for rate in (2.0, 4.0)]
    assert "Least p90 to the first token at rate 4: ttft, 1.00 s." in report(*once)


def test_a_few_requests_are_stated_to_be_few() -> None:
    few = [replace(run(policy, p90), requests=60) for policy, p90 in (("ttft", 1.0), ("affinity", 2.0))]
    assert "Only 60 requests: the p90 hangs on 6 requests. Replay more traffic" in report(*few)
    assert "Replay more traffic" not in report(run("ttft", 1.0), run("affinity", 2.0))


def test_two_that_are_as_good_are_both_named() -> None:
    text = report(run("ttft", 1.0), run("affinity", 1.02), run("random", 1.2))
    assert "What to do: ttft or affinity, they are as good" in text
    assert "What to do" not in report(run("ttft", 1.0), run("oracle_ttft", 0.5))


def test_it_states_what_was_asked_for_with_units() -> None:
    settings = {"seed": 3, "engines": [{"count": 4, "cache_tokens": 20_000, "decode_s": 0.01}], "gossip_delay_s": None}
    text = page(ReplayResults(settings, [TRACE], [run("ttft", 1.0)]))
    assert "seed 3; engines count=4 cache_tokens=20000 decode_s=0.01</p>" in text


def test_names_of_files_and_policies_cannot_become_markup() -> None:
    text = report(run("<b>odd</b>", 1.0))
    assert "<b>odd" not in text
    assert "chats &amp; &lt;more&gt;" in text


def test_a_long_name_of_a_file_breaks_instead_of_the_page() -> None:
    assert re.search(r"h2\{[^}]*overflow-wrap:anywhere", report(run("a", 1.0)))


def test_the_best_router_of_each_rate_is_marked_and_never_an_oracle() -> None:
    text = report(*(run(name, p90, rate=rate) for rate in (1.0, 2.0) for name, p90 in (("a", 2.0), ("b", 1.0))))
    assert re.findall(r'<tr class="best"><td>(\w+)', text) == ["b", "b"]
    assert "Saturation" in text


def test_failures_are_reported() -> None:
    text = report(run("a", 1.0, failed=7))
    assert "Failed, in all runs: 7 by a full queue (queue_full); most with a at rate 1: 7." in text


def test_oracles_alone_are_called_what_they_are() -> None:
    text = report(run("oracle_greedy", 1.0), run("oracle_ttft", 0.8))
    assert "Only oracles were run" in text
    assert "No policy served" not in text
    assert "Lost against" not in text  # a picture without a bar


def test_who_served_nobody_or_refused_the_slow_ones_is_never_the_best() -> None:
    """The times of such a run are 0, or those of the requests that were easy."""
    none = replace(run("refuses", 0.0), failed=1000, failures={"prompt_too_long": 1000})
    few = run("picks", 0.1, failed=300)
    text = report(none, few, run("serves", 1.0))
    assert "Least p90 to the first token: serves, 1.00 s." in text
    assert re.findall(r'<tr class="best"><td>(\w+)', text) == ["serves"]
    cells = re.findall(r"<td>([^<]*)</td>", text)
    assert cells[cells.index("refuses") :][:11] == ["refuses", *"-" * 9, "1,000"]
    assert "(queue_full); most with refuses at rate 1: 1,000." in text


def test_there_are_no_pictures_of_nothing() -> None:
    none = replace(run("refuses", 0.0), failed=1000, failures={"prompt_too_long": 1000})
    assert "<svg" not in report(none)
    assert "<title>refuses" not in report(none, run("serves", 1.0))


def test_where_all_are_equal_nobody_is_called_the_best() -> None:
    text = report(run("a", 1.0), run("b", 1.0))
    assert "All policies have the same p90 to the first token: 1.00 s." in text
    assert 'class="best"' not in text


def test_the_words_name_the_rate_and_the_nodes_that_they_are_of() -> None:
    text = report(*(run("a", 1.0, rate=rate, nodes=nodes) for rate in (1.0, 2.0) for nodes in (1, 4)))
    assert "Least p90 to the first token at rate 1 (as recorded) with 1 node: a, 1.00 s." in text


def test_each_dot_states_its_own_point_where_others_are_left_out() -> None:
    line = ChartLine("a", [(1.0, 0.0), (2.0, 20.0), (3.0, 30.0)])
    chart = line_chart("a chart", [line], Axis("x"), Axis("y", log=True))
    assert re.findall(r"<title>a: ([^<]*)</title>", chart) == ["2, 20", "3, 30"]


def test_every_policy_has_a_colour_of_its_own() -> None:
    names = [*POLICIES, *ORACLES]
    text = report(*(run(name, 1.0) for name in names))
    used = set(re.findall(r'<i class="(c\d+)"></i>(?!busiest|mean|idlest)', text))
    assert len(used) == len(names)
    assert all(f".{colour}{{color:#" in text for colour in used)


def test_a_sweep_of_many_policies_shows_one_line_for_each() -> None:
    few, many = (
        report(*(run(f"p{number}", 1.0, rate=rate) for number in range(count) for rate in (1.0, 2.0)))
        for count in (6, 7)
    )
    assert ("p0 p50</title>" in few, "p0 p90</title>" in few) == (True, True)
    assert ("p0 p50</title>" in many, "p0 p90</title>" in many) == (False, True)


def test_nothing_to_show_is_shown_without_an_error() -> None:
    assert "<h2>" in page(ReplayResults({}, [TRACE], []))
    empty = replace(run("a", 0.0), requests=0, load_over_time=[], regret_s={}, reasons={})
    assert "No policy served a request." in report(empty)


def test_words_and_pictures_are_of_the_traffic_as_recorded_or_of_the_highest_rate_that_was_served() -> None:
    queue = replace(run("ttft", 9.0, rate=8.0), requests_per_s=5.0)
    faster = [run("ttft", 1.5, rate=2.0), run("ttft", 2.5, rate=4.0), queue]
    assert "Prompt tokens found in the cache at rate 4" in report(*faster)
    text = report(run("ttft", 1.0), *faster)
    assert "Prompt tokens found in the cache at rate 1 (as recorded)" in text
    assert "Least p90 to the first token at rate 1 (as recorded): ttft, 1.00 s." in text


@pytest.mark.parametrize(("high", "ticks"), [(1.0, [0, 0.5, 1.0]), (7.0, [0, 2, 4, 6, 8]), (0.0, None)])
def test_linear_ticks_are_round_and_reach_the_highest_value(high: float, ticks: list[float] | None) -> None:
    found = linear_ticks(0.0, high)
    assert found[-1] >= high
    if ticks is not None:
        assert found == pytest.approx(ticks)


@given(st.floats(1e-6, 1e6), st.floats(1.0, 1e6))
def test_logarithmic_ticks_ascend_and_are_few(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert ticks == sorted(ticks)
    assert 2 <= len(ticks) <= 14


@pytest.mark.parametrize(("low", "high", "log"), [(1.0, 200.0, True), (0.00012, 0.03, True), (0.0, 1e5, False)])
def test_labels_of_an_axis_do_not_touch(low: float, high: float, log: bool) -> None:
    x = Axis("x", log=log, written=lambda value: f"{value:.6g} ms")
    chart = line_chart("t", [ChartLine("s", [(low, 1.0), (high, 2.0)])], x, Axis("y"))
    labels = re.findall(rf'x="([\d.]+)" y="{HEIGHT - BOTTOM + 16:.1f}" text-anchor="middle">([^<]+)<', chart)
    places = [(float(at), len(words) * CHARACTER_WIDTH / 2) for at, words in labels]
    assert len(places) >= 2
    assert all(at + half < after - other for (at, half), (after, other) in pairwise(places))


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=20), st.booleans())
def test_no_values_break_a_chart(points: list[tuple[float, float]], log: bool) -> None:
    """Infinities, not-a-numbers and negative values come out of runs that served nothing."""
    text = line_chart("t", [ChartLine("s", points)], Axis("x", log=log), Axis("y", log=log))
    Balance().feed(text)
    assert not re.search(r'[=" ](nan|inf|-inf)["\s]', text)
    text = bar_chart("t", [Bar("b", value) for _, value in points], Axis("x", log=log))
    assert "NaN" not in text
