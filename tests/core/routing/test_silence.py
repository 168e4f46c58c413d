"""Probes that time out against other signs of life: busy is not dead, and a time-out is no refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import BackendLimits, Health, Outcome, ProbeResult, Registry

ENGINE = BackendId(0)
UP = ProbeResult(True, status=200)
TIMED_OUT = ProbeResult(False, latency_s=3.0, detail="no answer within 3 s", timed_out=True)
REFUSED = ProbeResult(False, refused=True, detail="refused")
ILL = ProbeResult(False, status=503, detail="status 503")


def registry_of(count: int = 1, resorted: Callable[[str], object] = lambda _: None) -> Registry:
    registry = Registry(BackendLimits(), resorted=resorted)
    for number in range(count):
        registry.add(f"http://10.0.0.{number + 1}:8000", name=f"e{number}")
    return registry


def probed(registry: Registry, *results: ProbeResult, engine: BackendId = ENGINE, begin: float = 100.0) -> Health:
    for number, result in enumerate(results):
        registry.changes.probed(engine, result, begin + 4 * number)
    return registry[engine].health


def test_time_outs_of_probes_do_not_count_while_the_engine_sends_something() -> None:
    registry = registry_of()
    for at in range(100, 200, 4):
        registry[ENGINE].seen.received_at = at - 1
        registry.changes.probed(ENGINE, TIMED_OUT, at)
        assert registry[ENGINE].health is Health.HEALTHY
    assert registry.counters.probes_overruled == 25
    assert probed(registry, TIMED_OUT, TIMED_OUT, TIMED_OUT, begin=204) is Health.UNHEALTHY


def test_something_that_comes_between_two_probes_ends_the_row_of_time_outs() -> None:
    registry = registry_of()
    for at in range(100, 200, 8):
        assert probed(registry, TIMED_OUT, TIMED_OUT, begin=at) is Health.UNKNOWN
        registry.changes.received(ENGINE, at + 4.5)


@pytest.mark.parametrize("failure", [REFUSED, ILL])
def test_what_refuses_is_unhealthy_whatever_it_sent(failure: ProbeResult) -> None:
    registry = registry_of()
    for at in range(100, 112, 4):
        registry[ENGINE].seen.received_at = at - 0.1
        registry.changes.probed(ENGINE, failure, at)
    assert registry[ENGINE].vitals.dead
    assert not registry.pools.pool("", 120).ids


def test_where_all_that_serve_a_model_are_silent_they_are_asked_all_the_same() -> None:
    resorted = list[str]()
    registry = registry_of(3, resorted.append)
    registry.changes.probed(BackendId(2), ProbeResult(True, models=("other",)), 90)
    for engine in (0, 1):
        registry.changes.probed(BackendId(engine), ProbeResult(True, models=("one",)), 90)
        probed(registry, *[TIMED_OUT] * 3, engine=BackendId(engine))
    pool = registry.pools.pool("one", 120)
    assert (pool.ids, pool.silent) == ((0, 1), True)
    assert registry.pools.pool("one", 120) is pool
    assert (registry.counters.silent_resorts, resorted) == (1, ["one"])
    assert registry.pools.pool("one", 120, (BackendId(0),)).ids == (1,)
    probed(registry, *[REFUSED] * 3, engine=BackendId(1))
    assert registry.pools.pool("one", 130).ids == (0,), "nothing listens at the other one"
    probed(registry, UP, begin=130)
    assert not registry.pools.pool("one", 130).silent


def test_silent_backends_are_left_alone_while_another_serves_the_model() -> None:
    registry = registry_of(2)
    probed(registry, *[TIMED_OUT] * 3)
    pool = registry.pools.pool("", 120)
    assert (pool.ids, pool.silent, pool.last_resort) == ((1,), False, False)


@pytest.mark.parametrize("sign", ["page", "answer", "probe"])
def test_a_silent_backend_is_healthy_again_as_soon_as_it_sends_anything(sign: str) -> None:
    registry = registry_of()
    assert probed(registry, *[TIMED_OUT] * 3) is Health.UNHEALTHY
    if sign == "page":
        (change,) = registry.changes.received(ENGINE, 120)
    elif sign == "answer":
        registry.dispatched(registry[ENGINE], 119)
        registry[ENGINE].seen.received_at = 120
        (change,) = registry.finished(registry[ENGINE], Outcome.SUCCESS, 120)
    else:
        (change,) = registry.changes.probed(ENGINE, UP, 120)
    assert (change.what, change.after) == ("health", "healthy")
    assert probed(registry, TIMED_OUT, begin=124) is Health.HEALTHY


def test_an_engine_that_was_refused_and_times_out_since_is_only_silent() -> None:
    registry = registry_of()
    assert probed(registry, *[REFUSED] * 3, TIMED_OUT) is Health.UNHEALTHY
    assert registry[ENGINE].vitals.dead
    probed(registry, *[TIMED_OUT] * 2, begin=116)
    assert registry[ENGINE].vitals.silent
    probed(registry, REFUSED, begin=130)
    assert registry[ENGINE].vitals.dead


def test_peers_doubts_of_an_engine_of_which_something_came_just_now_wait_for_our_own_probe() -> None:
    for failure, dead in ((TIMED_OUT, False), (REFUSED, True)):
        registry = registry_of()
        registry.changes.received(ENGINE, 99.5)
        assert not registry.changes.doubted(ENGINE, 2, 100.0)
        assert registry[ENGINE].health is Health.UNKNOWN
        assert probed(registry, failure, begin=104) is Health.UNHEALTHY
        assert registry[ENGINE].vitals.dead is dead
