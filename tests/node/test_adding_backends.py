"""Backends that are added at run time: all of one, or nothing."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.peer_access import StreamSharer
from ranvier_py.core.engine_cache.sources.publishers import of_operator
from ranvier_py.core.engine_cache.sources.push_messages import read_events, read_sync
from ranvier_py.core.routing import backends as registry
from ranvier_py.core.routing.backend_state.signed_commands import Command
from ranvier_py.core.routing.backends import ProbeResult
from ranvier_py.core.routing.placement import Service
from ranvier_py.core.routing.placement.affinity import Affinity
from ranvier_py.core.routing.placement.baselines import RoundRobin
from ranvier_py.core.routing.placement.ttft import Ttft
from ranvier_py.io import engine_poller
from ranvier_py.io.engine_poller import EnginePoller
from ranvier_py.node.engine_cache import event_reader
from ranvier_py.node.engine_cache.engine_event_parts import EngineEvents
from ranvier_py.node.engine_cache.push_parts import WorkerReports
from ranvier_py.node.part import Node, Part
from ranvier_py.node.parts import backend_orders, upkeep
from ranvier_py.node.parts.backend_orders import BackendOrders
from ranvier_py.node.parts.request_parts import RequestPath
from ranvier_py.node.parts.router_parts import ShadowPolicies
from ranvier_py.node.parts.upkeep import PeerFollower, Polls
from ranvier_py.node.shared_orders import WantedBackend
from ranvier_py.proxy.connection_pool import BackendAddress
from tests.builders.built_nodes import built

FIRST = "http://127.0.0.1:9"
FIELDS = {"url": "http://127.0.0.1:10", "name": "second", "kv_events": "tcp://*:11"}


class Bug(Exception):
    """What nobody expected."""


def fail(*_: object, **__: object) -> Any:
    raise Bug


class Clustering(Part):
    """Peers, as far as commands go."""

    def __init__(self, *commands: Command, is_shared: bool = True) -> None:
        self.is_shared = is_shared
        self.ordered: list[object] = []
        self.failed: list[Command] = []
        signed_commands = SimpleNamespace(followed=self._followed, take_new=self._take)
        keys = SimpleNamespace(key_of=lambda _: None)
        features = SimpleNamespace(
            signed_commands=signed_commands,
            worker_commands=SimpleNamespace(take_new=list),
            streams=StreamSharer(),
            verdicts=SimpleNamespace(),
            backend_lists=SimpleNamespace(),
            backend_sets=SimpleNamespace(),
            backends=keys,
        )
        self.peer = SimpleNamespace(transitions=list, doubted=list, features=features)
        self._commands, self.orders = commands, self

    def _take(self) -> tuple[Command, ...]:
        commands, self._commands = self._commands, ()
        return commands

    def _followed(self, command: Command, why_not: str = "") -> None:
        self.failed += [command] if why_not and command.options is not None else []

    def order(self, wanted: WantedBackend, _: str, *, cluster: bool) -> list[str]:
        self.ordered.append((wanted.verb, wanted.url))
        return ["all"] if cluster and self.is_shared else []

    def ordered_by(self, _: Command) -> str:
        return "an operator of another node"

    def is_over(self, _: Command) -> bool:
        return False

    def done(self, url: str, clock: int) -> None: ...

    def look(self) -> None: ...


@asynccontextmanager
async def polling(clustering: Clustering | None = None, **settings: Any) -> AsyncIterator[Node]:
    """A node whose poller runs, and nothing else."""
    node = built(clustering, backend=[FIRST], **settings)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(node.part(Polls).run)
        yield node
        nursery.cancel_scope.cancel()


def leaving(node: Node) -> int:
    """How many removed backends still have requests in flight."""
    return sum(backend is not None for backend in node.registry.ids.slots) - len(node.registry)


def known(node: Node) -> tuple[list[str], list[str], int]:
    return [backend.url for backend in node.registry], list(node.part(RequestPath).addresses), leaving(node)


STEPS = [
    (registry, "Vitals"),
    (BackendAddress, "parse"),
    (upkeep, "of_operator"),
    (engine_poller, "Engine"),
    (EngineEvents, "found"),
    (EnginePoller, "watch"),
    (backend_orders, "shown_backend"),
    (Clustering, "order"),
]


@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
async def test_a_step_that_fails_leaves_nothing_of_a_backend(
    owner: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as planted:
        async with polling(clustering := Clustering()) as node:
            probes, admin = node.part(Polls).poller.counters.probes, node.part(BackendOrders)
            planted.setattr(owner, step, fail)
            with pytest.raises(Bug):
                admin.add(FIELDS)
            assert known(node) == ([FIRST], [FIRST], 0)
            assert clustering.ordered == []
            assert node.registry.ids.find("second") is None
            assert probes == 0
            planted.undo()
            assert admin.add(FIELDS).view["name"] == "second"
            assert known(node) == ([FIRST, FIELDS["url"]], [FIRST, FIELDS["url"]], 0)
            assert clustering.ordered == [("add", FIELDS["url"])]


async def test_a_node_with_backends_is_not_ready_before_its_public_port_is_open() -> None:
    async with polling() as node:
        assert node.unready() == "the public port is not open yet"


@pytest.mark.parametrize("is_shared", [True, False])
async def test_whoever_adds_or_removes_a_backend_learns_whether_the_peers_are_sent_it(is_shared: bool) -> None:
    async with polling(Clustering(is_shared=is_shared)) as node:
        assert bool(node.part(BackendOrders).add(FIELDS).asks) is is_shared
        assert bool(node.part(BackendOrders).remove("second").asks) is is_shared
    async with polling() as node:
        assert node.part(BackendOrders).add(FIELDS).asks is None


@pytest.mark.parametrize(
    "url", ["http://10.0.0..1:8000", "http://10.0.0.256:8000", "http://[fe80::1%25eth0]", "ftp://a"]
)
async def test_a_command_of_a_peer_is_checked_like_any_other_input(
    url: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    commands = (
        Command(1, 1, "add", url, 1.0, "", b""),
        Command(2, 1, "add", "http://127.0.0.1:9", 1.0, "", b"", None),  # type: ignore[arg-type]
        Command(3, 1, "add", "http://127.0.0.1:10", 1.0, "", b""),
    )
    async with polling(clustering := Clustering(*commands)) as node:
        with trio.move_on_after(1):
            await node.part(PeerFollower).loop()
        assert known(node)[0] == [FIRST, "http://127.0.0.1:10"]
        assert f"backend.command_refused add {url}: " in caplog.text
        assert clustering.failed == [commands[0]]
        assert node.faults.counters.unexpected_errors == {"commands": 1}, "of the one that is none, and cost itself"


async def test_an_exception_while_the_readers_of_an_engine_are_replaced_loses_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with polling() as node, trio.open_nursery() as nursery:
        events, (backend,) = node.part(EngineEvents), list(node.registry)
        await nursery.start(events.run)
        node.registry.changes.probed(backend.id, ProbeResult(True, models=("m",)), 0.0)
        first, second = of_operator("tcp://127.0.0.1:9", "", 2, "127.0.0.1")
        events.found(backend.id, (first,))
        events.look(time.monotonic())
        reader = events.streams[backend.id][0]
        with monkeypatch.context() as planted:
            planted.setattr(event_reader, "EventStream", fail)
            events.found(backend.id, (first, second))
            events.look(time.monotonic())
            assert events.streams[backend.id] == {0: reader}
        assert node.faults.counters.unexpected_errors == {"engine_events": 1}
        events.look(time.monotonic() + 60)
        assert sorted(events.streams[backend.id]) == [0, 1]
        assert events.streams[backend.id][0] is reader
        nursery.cancel_scope.cancel()


async def test_an_engine_with_the_id_of_a_removed_one_is_not_taken_for_as_slow() -> None:
    async with polling(policy="ttft", shadow=["affinity", "round_robin"]) as node:
        slow, first = node.add_backend("http://127.0.0.1:10", 1.0, "slow"), node.registry.ids.by_url[FIRST].id
        shadows = node.part(ShadowPolicies).shadows
        assert shadows is not None
        policies = (node.router.policy, *(each.router.policy for each in shadows.shadows), shadows.judge)
        for gap_s in (0.1, 10.0) * 100:
            service = Service(first if gap_s < 1 else slow, 1000, gap_s, False, 0, 0)
            for learner in policies:
                learner.learner.served(service)
        ttft, affinity, robin, judge = policies
        assert isinstance(ttft, Ttft)
        assert isinstance(affinity, Affinity)
        assert isinstance(robin, RoundRobin)
        robin.credit[slow] = -1.0
        rates = (ttft.learner.service_rates, affinity.by_time.learner.service_rates, judge.learner.service_rates)
        assert min(each[slow].factor for each in rates) > 1.5
        node.remove_backend("slow")
        assert node.add_backend("http://127.0.0.1:11", 1.0, "fast") == slow
        assert [each[slow].factor for each in rates] == [1.0, 1.0, 1.0]
        assert robin.credit == {}


async def test_what_a_removed_worker_reported_is_not_believed_of_the_engine_that_has_its_id() -> None:
    async with polling() as node:
        worker, reports = node.add_backend("http://127.0.0.1:10", 1.0, "w"), node.part(WorkerReports)
        node.registry.changes.probed(worker, ProbeResult(True, models=("m",)), 0.0)
        answer = await reports.batched(read_events({"worker_id": "w", "begins": True}))
        await reports.batched(read_events({"worker_id": "w", "ask": answer["replay"]["ask"], "ended": True}))
        await reports.synced(read_sync({"worker_id": "w", "active_hashes": ["5f" * 32]}))
        assert node.part(EngineEvents).level(worker) is Level.EXACT
        node.remove_backend("w")
        assert node.add_backend("http://127.0.0.1:11", 1.0, "other") == worker
        assert (node.part(EngineEvents).level(worker), reports.views()) == (Level.ESTIMATED, [])
