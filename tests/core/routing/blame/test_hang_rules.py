"""When an engine hangs, by the clock alone, and where there is room for its requests."""

from __future__ import annotations

import pytest

from ranvier_py.core.routing.backends import Backend, BackendLimits, ProbeResult, Registry
from ranvier_py.core.routing.blame.hangs import Hangs, Silence
from ranvier_py.core.routing.placement import Service
from ranvier_py.core.routing.placement.affinity import Affinity
from ranvier_py.core.routing.rates.work import InFlight

TIMED_OUT = ProbeResult(False, latency_s=3.0, timed_out=True)
UP = ProbeResult(True, status=200)


def busy(requests: int = 1, at: float = 100.0) -> tuple[Hangs, Registry, Backend]:
    """An engine with requests in flight since `at`."""
    registry = Registry(BackendLimits())
    backend = registry.add("http://10.0.0.1:8000")
    for _ in range(requests):
        registry.dispatched(backend, at)
    return Hangs(8.0), registry, backend


def judged(hangs: Hangs, backend: Backend, now: float, predicted_s: float = 0.0) -> Silence:
    return hangs.judge(backend, 100.0, lambda: predicted_s, now)


def test_two_silent_seconds_call_for_a_probe_and_eight_with_a_failed_one_are_a_hang() -> None:
    hangs, registry, backend = busy()
    registry.changes.received(backend.id, 99.0)
    assert hangs.quiet(registry, 100.5) == []
    assert judged(hangs, backend, 101.9) is Silence.FINE
    assert hangs.quiet(registry, 102.0) == [backend]
    assert judged(hangs, backend, 102.0) is Silence.SUSPECTED
    registry.changes.probed(backend.id, TIMED_OUT, 105.0)
    assert judged(hangs, backend, 107.9) is Silence.SUSPECTED
    assert judged(hangs, backend, 108.0) is Silence.HANGS


@pytest.mark.parametrize("sign", ["answer", "page", "probe"])
def test_any_byte_ends_the_silence(sign: str) -> None:
    hangs, registry, backend = busy()
    registry.changes.probed(backend.id, TIMED_OUT, 105.0)
    if sign == "answer":
        backend.seen.received_at = 106.0
    elif sign == "page":
        registry.changes.received(backend.id, 106.0)
    else:
        registry.changes.probed(backend.id, UP, 106.0)
    assert judged(hangs, backend, 113.9) is Silence.SUSPECTED
    assert judged(hangs, backend, 114.1) is Silence.SUSPECTED, "no probe has failed since"


def test_a_probe_that_was_asked_for_before_the_silence_proves_nothing() -> None:
    hangs, registry, backend = busy()
    registry.changes.probed(backend.id, TIMED_OUT, 102.0)
    assert judged(hangs, backend, 120.0) is Silence.SUSPECTED
    registry.changes.probed(backend.id, TIMED_OUT, 121.0)
    assert judged(hangs, backend, 121.0) is Silence.HANGS


def test_work_that_takes_long_by_prediction_is_waited_for_twice_as_long() -> None:
    hangs, registry, backend = busy()
    registry.changes.probed(backend.id, TIMED_OUT, 110.0)
    assert judged(hangs, backend, 159.0, predicted_s=30.0) is Silence.SUSPECTED
    assert judged(hangs, backend, 160.0, predicted_s=30.0) is Silence.HANGS


def test_a_policy_that_learns_rates_predicts_the_work_at_an_engine() -> None:
    policy, (_, registry, backend) = Affinity(), busy(requests=0)
    for _ in range(100):
        policy.learner.served(Service(backend.id, 1000, 1.0, False, 0, 0, 1000))
    before_s = policy.learner.predicted_s(backend, 0, 100.0)
    registry.dispatched(backend, 100.0, InFlight(20_000))
    assert policy.learner.predicted_s(backend, 0, 100.0) > before_s + 10.0
    assert policy.learner.predicted_s(backend, 0, 160.0) > before_s + 10.0, "what waits has not been done by waiting"


def test_engines_that_hang_get_nothing_until_they_send_something() -> None:
    hangs, registry, backend = busy()
    (change,) = registry.changes.hangs(backend, "hangs", 108.0)
    assert (change.what, change.after, change.why) == ("health", "unhealthy", "hangs")
    other = registry.add("http://10.0.0.2:8000")
    assert registry.pools.pool("", 108.0).ids == (other.id,)
    assert judged(hangs, backend, 109.0) is Silence.SUSPECTED
    registry.changes.received(backend.id, 110.0)
    assert registry.pools.pool("", 110.0).ids == (backend.id, other.id)


def test_room_is_where_nothing_queues_and_little_that_moved_there_waits() -> None:
    hangs, registry, backend = busy(requests=0)
    assert hangs.has_room(backend, 3, 0, 0.0, 100.0)
    assert not hangs.has_room(backend, 4, 0, 0.0, 100.0), "until they are served"
    assert not hangs.has_room(backend, 0, 1, 0.0, 100.0), "it says that requests wait in its queue"
    assert not hangs.has_room(backend, 0, 0, 9.0, 100.0), "its work takes longer than a hang"
    for _ in range(40):
        registry.dispatched(backend, 100.0, InFlight(seen=False), 100.0)
    assert hangs.has_room(backend, 6, 0, 0.0, 100.0)
    registry.dispatched(backend, 100.0)
    assert not hangs.has_room(backend, 0, 0, 0.0, 102.1), "a stream waits there for its first token"
    registry.drain(backend.url)
    assert not hangs.has_room(backend, 0, 0, 0.0, 100.0)
