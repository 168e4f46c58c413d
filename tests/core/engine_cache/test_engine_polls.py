"""When engines are asked, and what their pages say."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from math import inf

import orjson
import pytest

from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics, read_start_time
from ranvier_py.core.engine_cache.sources.engine_polls import (
    MODELS_BYTES_MAX,
    MODELS_MAX,
    STARTS_AFTER_CHANGE,
    HealthSchedule,
    MetricsSchedule,
    Page,
    PollOptions,
    read_models,
)
from ranvier_py.core.engine_cache.sources.event_values import EngineLoad
from ranvier_py.core.errors import ConfigError
from tests.node.turns import OCCUPIED_S_MAX, least_s

OPTIONS = PollOptions(probe_interval_s=10.0)
PAGE = EngineMetrics(running=1, capacity_tokens=900)


def load(running: int | None, waiting: int | None, rank: int = 0) -> EngineLoad:
    return EngineLoad(running, waiting, 100, 4096, rank, 0)


# --- health ---------------------------------------------------------------------------------------------------------


def test_changes_are_followed_up_at_the_short_interval_until_it_is_settled() -> None:
    schedule = HealthSchedule(OPTIONS)
    intervals = []
    for ok in [True, True, False, False, False, False, True, True, True, True]:
        schedule.judged(ok)
        intervals.append(schedule.interval_s(1))
    assert intervals == [10, 10, 1, 1, 1, 10, 1, 1, 1, 10]


def test_many_healthy_backends_are_probed_less_often_each_and_ill_ones_are_not() -> None:
    schedule = HealthSchedule(OPTIONS)
    schedule.judged(True)
    assert [schedule.interval_s(backends) for backends in (20, 200)] == [10, 40]
    for _ in range(5):
        schedule.judged(False)
    assert schedule.interval_s(200) == 10


def test_models_and_start_time_are_asked_for_now_and_then_and_again_after_a_failure() -> None:
    schedule = HealthSchedule(OPTIONS)
    assert schedule.wants_models(0.0)
    assert all(schedule.wants_start_time(0.0) for _ in range(STARTS_AFTER_CHANGE))
    schedule.judged(True)
    schedule.models_known(0.0)
    assert [schedule.wants_models(now) for now in (59.0, 60.0)] == [False, True]
    assert [schedule.wants_start_time(now) for now in (29.0, 30.0, 31.0)] == [False, True, False]
    for start, due in ((5.0, False), (5.0, False), (7.0, True)):  # where it changed, does it change back?
        schedule.start_read(start)
        assert schedule.wants_start_time(31.0) is due
    schedule.has_health = schedule.has_metrics = False
    assert not schedule.wants_start_time(1000.0)
    schedule.judged(False)
    assert (schedule.has_health, schedule.wants_models(31.0), schedule.wants_start_time(31.0)) == (True, True, True)


# --- metrics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metrics", "took_s", "looks", "interval_s"),
    [
        (PAGE, 0.001, 1, 5.0),
        (PAGE, 0.5, 1, 25.0),  # at most a fiftieth of the engine's time
        (None, 0.001, 1, 10.0),
        (None, 0.001, 9, 60.0),
        (EngineMetrics(), 0.001, 1, 600.0),
    ],
)
def test_a_page_is_looked_at_less_often_where_it_is_slow_fails_or_states_nothing(
    metrics: EngineMetrics | None, took_s: float, looks: int, interval_s: float
) -> None:
    schedule = MetricsSchedule(PollOptions())
    for _ in range(looks):
        assert schedule.looked(metrics, took_s, 0.0) == (metrics == PAGE)
    assert schedule.interval_s() == interval_s


@pytest.mark.parametrize(("metrics", "interval_s"), [(PAGE, 300.0), (None, 300.0), (EngineMetrics(), 600.0)])
def test_an_interval_that_the_operator_made_long_is_kept(metrics: EngineMetrics | None, interval_s: float) -> None:
    schedule = MetricsSchedule(PollOptions(metrics_interval_s=300.0))
    schedule.looked(metrics, 0.001, 0.0)
    assert schedule.interval_s() == interval_s
    seldom = MetricsSchedule(PollOptions(metrics_interval_s=3600.0))
    seldom.looked(metrics, 0.001, 0.0)
    assert seldom.interval_s() == 3600.0


def test_an_engine_that_reports_its_queue_in_its_events_needs_no_page() -> None:
    """SGLang has a page only if it is started so; its LoadStat comes many times a second, and counts like a look."""
    schedule = MetricsSchedule(PollOptions())
    found = [schedule.load_reported(load(3, 2), 0.1 * tick) for tick in range(50)]
    assert found == [EngineMetrics(running=3, waiting=2, capacity_tokens=4096), *[None] * 49]
    assert schedule.load_reported(load(None, 2), 100.0) is None
    assert schedule.load_reported(load(1, 2, rank=10_000), 100.0) is None


def test_the_ranks_of_an_engine_add_up_and_its_page_states_the_rest() -> None:
    schedule = MetricsSchedule(PollOptions())
    schedule.looked(PAGE, 0.001, 0.0)
    assert schedule.load_reported(load(3, 2), 1.0) is None, "the page is not old yet"
    assert schedule.load_reported(load(1, None, rank=1), 5.0) == replace(PAGE, running=4, waiting=2)


def test_a_rank_that_an_engine_lost_when_it_was_restarted_has_no_load_any_more() -> None:
    schedule = MetricsSchedule(PollOptions())
    schedule.load_reported(load(3, 2, rank=1), 0.0)
    for second in range(1, 20):
        found = schedule.load_reported(load(1, 0), float(second))
        assert found is None or found.running == (4 if second < 10 else 1)


# --- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b'{"data": [{"id": "a"}, {"id": "b", "parent": "a"}]}', ("a", "b")),
        (b'{"data": [{"id": "a"}, {"id": 3}, {}, null, "x"]}', ("a",)),
        (b'{"data": []}', None),
        (b'{"data": {"id": "a"}}', None),
        (b'[{"id": "a"}]', None),
        (b"not json", None),
        (b"\xff\xfe", None),
        (b"[" * 100_000, None),
    ],
)
def test_odd_model_lists_are_read_as_far_as_they_make_sense(body: bytes, names: tuple[str, ...] | None) -> None:
    assert read_models(Page(200, body, is_cut=False))[0] == names
    assert read_models(Page(500, body, is_cut=False)) == read_models(Page(200, body, is_cut=True)) == (None, ())


@pytest.mark.parametrize(
    ("odd", "kept"),
    [
        (b"18446744073709551616", 2.0**64),
        (b"-9223372036854775809", -(2.0**63)),
        (b"1" * 5000, inf),
        (b"1e999", inf),
        (b"NaN", None),
        (b'"\\ud800"', "left out"),
        (b'{"\\ud800": 1}', "left out"),
        (b"[" * 400 + b"]" * 400, "left out"),
        (b'[{"a": null}]', [{"a": None}]),
    ],
)
def test_whatever_else_an_entry_has_it_can_be_listed_again_by_its_name(odd: bytes, kept: object) -> None:
    body = b'{"data": [{"id": "a", "odd": ' + odd + b', "even": 2}, {"id": "b"}, {"id": "\\udfff"}]}'
    names, cards = read_models(Page(200, body, is_cut=False))
    assert names == ("a", "b")
    assert cards[0]["even"] == 2
    if kept is not None:  # NaN is not even itself
        assert cards[0].get("odd", "left out") == kept
    orjson.dumps(cards)


def test_a_model_list_is_bounded() -> None:
    body = json.dumps({"data": [{"id": str(number)} for number in range(MODELS_MAX + 5)]}).encode()
    names, cards = read_models(Page(200, body, is_cut=False))
    assert names is not None
    assert len(names) == len(cards) == MODELS_MAX


@pytest.mark.parametrize(
    ("metrics", "value"),
    [
        (b"process_start_time_seconds 12.5\n", 12.5),
        (b"a 1\nprocess_start_time_seconds 1.7e9\nb 2\n", 1.7e9),
        (b'a 1\nprocess_start_time_seconds{pid="4"} 7 1700000000000\n', 7.0),
        (b"# HELP process_start_time_seconds Start time\nprocess_start_time_seconds 3\n", 3.0),
        (b"# HELP process_start_time_seconds Start time\n", None),
        (b"process_start_time_seconds 12", None),  # cut in the middle of the line
        (b"process_start_time_seconds NaN\n", None),
        (b"process_start_time_seconds many\n", None),
        (b"process_start_time_seconds\n", None),
        (b"", None),
    ],
)
def test_the_start_time_is_read_from_a_metrics_page(metrics: bytes, value: float | None) -> None:
    assert read_start_time(metrics) == value


def test_options_that_make_no_sense_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        PollOptions(probe_interval_s=0, jitter=1.0, probes_at_once_max=0, publishers_gap_s=-1)
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("card", [b"{}", b"[]", b"1", b'{"id":"m"}'])
def test_a_list_of_a_million_models_is_not_parsed(card: bytes) -> None:
    page = b'{"data":[%b]}' % b",".join([card] * (MODELS_BYTES_MAX // (len(card) + 1) - 10))

    def took_s() -> float:
        began = time.thread_time()
        assert read_models(Page(200, page)) == (None, ())
        return time.thread_time() - began

    assert least_s(took_s) <= OCCUPIED_S_MAX
