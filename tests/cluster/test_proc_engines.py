"""Odd engines in a chaos run: which hits and queues count, what poison may cost, engines that move or have ranks."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from cluster.engine.engine_faults import POISON, UNKNOWN_ERROR, FailureForm, Fault
from cluster.engine.occupancy import CHANGES_MAX, Occupancy
from cluster.expectations import judge
from cluster.processes.chaos_clients import all_conversations
from cluster.processes.chaos_plan import make_plan
from cluster.processes.commands import Engines, engine_command
from cluster.processes.engine_watch import BACK_S, EngineWatch, Track
from cluster.processes.link_control import LinkMode
from cluster.processes.request_log import RequestLog, points_lost
from cluster.scenario import Cluster, Expect, Load, Step, load_scenario, settled, without_faults
from tests.cluster.test_proc_parts import entered

STEP_S = 0.1


class Clock:
    """A run's clock that stands where a test sets it."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def watched(*tracks: Track) -> tuple[EngineWatch, Clock]:
    clock = Clock()
    watch = EngineWatch(clock, STEP_S)
    watch.tracks.extend(tracks)
    return watch, clock


QUEUE = Track("full", ((-3.0, 0, 0), (1.0, 1, 0), (2.0, 1, 1), (6.0, 1, 0), (7.0, 0, 0)))
IDLE = Track("free", ((-3.0, 0, 0), (4.0, 1, 0), (8.0, 0, 0)))


def test_an_engine_without_work_counts_while_another_has_a_queue_and_only_then() -> None:
    watch, _ = watched(QUEUE, IDLE)
    share, text = watch.unevenness(10.0)
    assert share == pytest.approx((2.0 - STEP_S) / 10.0)
    assert text == "free idle for 1.90 s while full had a queue"


def test_of_ranks_each_counts_as_an_engine() -> None:
    watch, _ = watched(QUEUE, Track("free", ((0.0, 1, 0),)), Track("free", ((0.0, 0, 0), (5.0, 1, 0))))
    assert watch.unevenness(10.0).share == pytest.approx((3.0 - STEP_S) / 10.0)


def test_a_queue_that_lasts_to_the_end_counts_to_the_end_and_no_further() -> None:
    watch, _ = watched(Track("full", ((0.0, 1, 1),)), Track("free", ((0.0, 0, 0), (99.0, 1, 0))))
    assert watch.unevenness(10.0).share == pytest.approx(1.0 - STEP_S / 10.0)


def test_who_waits_for_the_end_of_a_step_is_no_queue() -> None:
    often = [(number * STEP_S, 1, number % 2) for number in range(100)]
    watch, _ = watched(Track("busy", often), Track("free", ((0.0, 0, 0),)))
    assert watch.unevenness(10.0).share == pytest.approx(0.0)


@pytest.mark.parametrize("engine", ["full", "free"])
def test_what_does_not_serve_counts_neither_as_idle_nor_by_its_queue_until_nodes_may_know(engine: str) -> None:
    watch, clock = watched(Track("full", ((-1.0, 1, 1),)), Track("free", ((-1.0, 0, 0),)))
    clock.now_s = 2.0
    well = watch.odd(engine)
    assert watch.unevenness(10.0).share == pytest.approx(0.2)
    clock.now_s = 4.0
    well()
    assert watch.unevenness(20.0).share == pytest.approx((2.0 + 20.0 - 4.0 - BACK_S) / 20.0)


def test_what_serves_is_no_less_wanted_for_being_odd() -> None:
    watch, _ = watched(Track("full", ((-1.0, 1, 1),)), Track("free", ((-1.0, 0, 0),)))
    watch.odd("free", serves=True, caches=False)
    assert watch.unevenness(10.0).share == 1.0


def test_without_any_record_nothing_was_measured() -> None:
    watch, _ = watched()
    (verdict,) = judge(Expect(uneven_share_max=0.5), {"uneven_share_max": watch.unevenness(10.0).share})
    assert verdict.holds is None


@pytest.mark.parametrize(
    ("fields", "serves", "caches"),
    [
        ({"kind": "status", "status": 401}, False, True),
        ({"kind": "hang"}, False, True),
        ({"kind": "stall"}, False, True),
        ({"kind": "latency", "seconds": 8, "health": "only"}, True, True),
        ({"kind": "uncached"}, True, False),
    ],
)
def test_of_a_fault_it_is_known_whether_the_engine_serves_and_caches(
    fields: dict[str, Any], serves: bool, caches: bool
) -> None:
    fault = Fault.read(fields)
    assert fault is not None
    assert (fault.serves, fault.caches) == (serves, caches)


def test_hits_are_those_of_engines_that_cache() -> None:
    watch, clock = watched()
    log = RequestLog(watch.caches)
    clock.now_s = 5.0
    well = watch.odd("engine-1", serves=True, caches=False)
    clock.now_s = 8.0
    well()
    for began_s, engine, cached in ((1, "engine-1", 80), (6, "engine-1", 0), (6, "engine-2", 60), (9, "engine-1", 70)):
        entered(log, began_s, began_s + 0.5, engine=engine, prompt_tokens=100, cached_tokens=cached)
    assert log.hit_rate(0.0, 10.0) == 0.7
    entered(log, 4.8, 5.1, engine="engine-1", prompt_tokens=100, cached_tokens=0)
    assert log.hit_rate(0.0, 10.0) == 0.7, "it was answered while the engine cached nothing"


def test_hits_are_compared_in_points_with_those_of_the_same_load_without_faults() -> None:
    assert points_lost(0.78, 0.81) == pytest.approx(3.0)
    assert points_lost(0.9, 0.8) == 0.0
    assert points_lost(0.9, None) is None


def test_the_same_load_without_faults_has_the_same_chats_on_the_same_engines() -> None:
    odd = settled("odd_engines", "processes", 1, None, None, None)
    calm = without_faults(odd)
    assert odd.load is not None
    assert calm.load == odd.load
    assert (calm.for_s, calm.cluster.engines, calm.steps) == (odd.for_s, odd.cluster.engines, ())
    talks, alike = (
        [talk for talk in all_conversations(odd.load, one.steps, one.for_s, 1) if not talk.name.startswith("poison")]
        for one in (odd, calm)
    )
    assert talks == alike


@pytest.mark.parametrize(
    ("poisonous", "reason", "detail", "failed"),
    [
        (True, "HTTP 500 500", UNKNOWN_ERROR[1], 0),
        (True, "HTTP 500 internal_error", "the router's own", 1),
        (True, "HTTP 503 no_backend", "none is healthy", 1),
        (False, "HTTP 500 500", UNKNOWN_ERROR[1], 1),
    ],
)
def test_a_poisonous_request_may_fail_as_engines_let_it_and_no_other_may(
    poisonous: bool, reason: str, detail: str, failed: int
) -> None:
    log = RequestLog()
    entered(log, 0, 1, poisonous=poisonous, reason=reason, detail=detail)
    assert (len(log.failed), log.counts()["refused_as_poisonous"]) == (failed, 1 - failed)


def test_poison_comes_during_its_step_streamed_and_not() -> None:
    steps = (Step(2.0, "poison", chats_per_s=20.0, for_s=5.0), Step(4.0, "poison", chats_per_s=20.0, for_s=5.0))
    talks = list(all_conversations(Load(chats_per_s=3.0, unstreamed=0.5), steps, 20.0, 1))
    starts = [talk.start_s or 0.0 for talk in talks]
    assert starts == sorted(starts)
    poison = [talk for talk in talks if POISON.decode() in talk.turns[0].messages[-1]["content"]]
    assert 150 < len(poison) < 250
    assert all(2.0 <= (talk.start_s or 0.0) < 9.0 for talk in poison)
    assert {talk.turns[0].stream for talk in poison} == {True, False}
    assert len({str(talk.turns[0].messages) for talk in poison}) == len(poison), "each is another prompt"


def test_nodes_know_an_engine_that_moves_by_name_and_each_rank_by_its_number(tmp_path: Path) -> None:
    cluster = Cluster(nodes=1, engines=3, ranked=(2,), max_running=4)
    plan = make_plan(LinkMode("direct", "a test"), cluster, tmp_path, Random(1), moving={1})
    address, name, ranked = plan.engines
    assert address.backends == [f"http://127.0.0.1:{address.port}"]
    assert name.backends == [f"http://engine-1.lab:{name.port}"]
    assert ranked.backends == [f"http://127.0.0.1:{ranked.port}#rank={rank}" for rank in (0, 1)]
    argv = engine_command(Engines(), ranked).argv
    assert argv[argv.index("--ranks") + 1] == "2"
    assert argv[argv.index("--max-running") + 1] == "4"
    assert "--ranks" not in engine_command(Engines(), name).argv


def test_odd_engines_has_all_that_strangers_reported() -> None:
    scenario = load_scenario("odd_engines")
    assert {step.do for step in scenario.steps} == {"engine_fault", "engine_slow", "engine_moves", "poison"}
    assert scenario.cluster.ranked != "none"
    assert scenario.load is not None
    assert 0 < scenario.load.unstreamed < 1
    words = " ".join(step.fault for step in scenario.steps)
    assert all(word in words for word in ("401", "503", '"only"', '"uncached"'))
    early = [form.value for form in FailureForm if form is not FailureForm.LATE]  # behind output a client must see it
    assert all(f'"form": "{form}"' in words for form in early)


def test_a_record_of_loads_is_in_order_of_time_and_drops_the_oldest_visibly() -> None:
    record = Occupancy()
    for change in ((1.0, 0, 0), (2.0, 0, 1), (4.0, 0, 1), (3.0, 1, -1), (5.0, -1, 0)):
        record.note(*change)
    assert record.record(10.0)["changes"] == [(11.0, 0, 0), (12.0, 0, 1), (13.0, 1, 0), (14.0, 1, 1), (15.0, 0, 1)]
    for number in range(CHANGES_MAX):
        record.note(6.0 + number, 0, 0)
    assert (len(record.changes), record.record(0.0)["dropped"]) == (CHANGES_MAX, 5)
