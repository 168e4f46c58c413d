"""All 200 engines of a fleet in Kubernetes are replaced one by one while requests run, and none of these fails."""

from __future__ import annotations

import heapq
from random import Random
from typing import Any

import pytest

from ranvier_py.config.config_values import BackendSpec
from ranvier_py.config.source_targets import Common
from ranvier_py.core.routing.backends import Backend, BackendLimits, Outcome, Registry
from ranvier_py.core.routing.rates.work import InFlight
from ranvier_py.core.routing.wanted.found_backend import FoundBackend, SourceName
from ranvier_py.core.routing.wanted.kubernetes_objects import EngineEndpoint, endpoints_of_slices
from ranvier_py.node.discovery import backend_sources
from ranvier_py.node.discovery.backend_sources import BackendSources

ENGINES, SLICE = 200, 100
STEP_S, READY_S, GRACE_S = 3.0, 1.0, 30.0  # a pod a step; the new one is ready first; the old one ends after the grace
REQUESTS_PER_S, REQUEST_S_MAX = 20, 25.0
SERVICE = SourceName("kubernetes", "service/vllm")


class Fleet:
    """A Service with its pods, a node's registry, and requests, in virtual time."""

    def __init__(self, rng: Random) -> None:
        self.now, self._rng, self.swept_at = 0.0, rng, 0.0
        self.registry = Registry(BackendLimits())
        self.sources = BackendSources(
            self.registry,
            lambda url, weight, name, _, by: self.registry.add(url, weight=weight, name=name).id,
            lambda url, **_: self.registry.remove(url),
        )
        self.pods: dict[int, dict[str, Any]] = {number: {} for number in range(ENGINES)}
        self.running: list[tuple[float, int, Backend, InFlight]] = []  # a heap by their ends
        self.sent = self.failed = 0
        self.found: dict[EngineEndpoint, FoundBackend[BackendSpec]] = {}
        self.least = ENGINES

    def change(self, number: int, **conditions: bool) -> None:
        """Have the API server show another state of a pod's endpoint; none: it is gone."""
        if conditions:
            self.pods[number] = conditions
        else:
            del self.pods[number]
        self.look()

    def look(self) -> None:
        numbers = sorted(self.pods)
        slices = [
            slice_of(part, self.pods) for part in (numbers[at : at + SLICE] for at in range(0, len(numbers), SLICE))
        ]
        found = endpoints_of_slices(slices).found
        self.found = {each: self.found.get(each) or found_of(each) for each in found}
        self.sources.take(SERVICE, self.found.values())

    def pass_until(self, end: float) -> None:
        """Send requests, and end those that are over."""
        while self.now < end:
            self.now = min(end, self.now + self._rng.expovariate(REQUESTS_PER_S))
            while self.running and self.running[0][0] <= self.now:
                _, _, backend, request = heapq.heappop(self.running)
                gone = number_of(backend) not in self.pods
                self.failed += gone
                self.registry.finished(backend, Outcome.BROKEN if gone else Outcome.SUCCESS, self.now, request)
            if self.now >= self.swept_at + 1.0:
                self.swept_at = self.now
                self.sources.settle()
            self._send()

    def _send(self) -> None:
        pool = self.registry.pools.pool("", self.now).backends
        self.least = min(self.least, len(pool))
        backend, request = self._rng.choice(pool), InFlight(tokens=1)
        self.failed += number_of(backend) not in self.pods
        self.sent += 1
        self.registry.dispatched(backend, self.now, request)
        ends = self.now + self._rng.uniform(0.1, REQUEST_S_MAX)
        heapq.heappush(self.running, (ends, self.sent, backend, request))


def found_of(each: EngineEndpoint) -> FoundBackend[BackendSpec]:
    return FoundBackend(Common().spec(each.host, each.port, name=each.pod), each.draining, each.process)


def number_of(backend: Backend) -> int:
    high, low = backend.url.split("//")[1].partition(":")[0].split(".")[2:]
    return 256 * int(high) + int(low)


def slice_of(numbers: list[int], pods: dict[int, dict[str, Any]]) -> dict[str, Any]:
    endpoints = [
        {
            "addresses": [f"10.0.{number // 256}.{number % 256}"],
            "conditions": pods[number],
            "targetRef": {"kind": "Pod", "name": f"vllm-{number}", "uid": f"uid-{number}"},
        }
        for number in numbers
    ]
    return {
        "metadata": {"name": f"vllm-{numbers[0]}"},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000}],
        "endpoints": endpoints,
    }


@pytest.mark.slow
def test_a_fleet_is_replaced_and_no_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(Random(7))
    monkeypatch.setattr(backend_sources.time, "monotonic", lambda: fleet.now)
    fleet.look()
    while len(fleet.registry) < ENGINES:  # they come in portions
        fleet.sources.settle()
    ends: list[tuple[float, int]] = []
    for old in range(ENGINES):
        fleet.change(ENGINES + old, ready=False)
        fleet.pass_until(fleet.now + READY_S)
        fleet.change(ENGINES + old, ready=True)
        fleet.change(old, ready=False, serving=True, terminating=True)
        ends.append((fleet.now + GRACE_S, old))
        fleet.pass_until(fleet.now + STEP_S - READY_S)
        while ends and ends[0][0] <= fleet.now:
            fleet.change(ends.pop(0)[1])
    for at, old in ends:
        fleet.pass_until(max(at, fleet.now))
        fleet.change(old)
    fleet.pass_until(fleet.now + GRACE_S)
    assert fleet.failed == 0
    assert fleet.sent > 10_000
    assert fleet.least == ENGINES
    assert sorted(map(number_of, fleet.registry)) == list(range(ENGINES, 2 * ENGINES))
