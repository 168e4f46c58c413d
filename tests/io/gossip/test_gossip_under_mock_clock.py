"""The shell of gossip around real routers, three to fifty of them, in virtual time on a network that a seed decides.

What the simulator of the lab can't see is held here: the timer, the streams and their back-off, and discovery's loop,
as trio schedules them. Times are virtual seconds.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import pytest
import trio
import trio._core._run as trio_run
import trio.testing

from ranvier_py.core.gossip.gossip_values import Address, Plane
from tests.io.gossip.mock_nodes import MockCluster, MockNode, agree, seed_trio, simulate, until
from tests.io.gossip.mock_sockets import Conditions

LOSSY = Conditions(loss=0.1)
ROOT = Path(__file__).parents[2]


# --- what the cluster promises --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", ["a", "b"])
def test_twenty_nodes_find_each_other_from_one_address(seed: str) -> None:
    async def scenario(cluster: MockCluster) -> None:
        nodes = cluster.start(20)
        await until(lambda: agree(nodes), 2.0)
        await trio.sleep(5)
        assert agree(nodes)
        assert all(node.changes and not node.deaths() for node in nodes)

    simulate(seed, scenario)


def test_twenty_nodes_find_each_other_though_a_fifth_of_all_is_lost() -> None:
    async def scenario(cluster: MockCluster) -> None:
        await cluster.met(20, 30.0)

    simulate("a fifth", scenario, Conditions(loss=0.2))


@pytest.mark.parametrize("seed", ["a", "b", "c"])
def test_a_route_learned_on_one_is_at_all_others_within_200_ms(seed: str) -> None:
    async def scenario(cluster: MockCluster) -> None:
        nodes, took_s = await cluster.met(10), []
        for number in range(20):
            await trio.sleep(cluster.chats.random())
            end = cluster.chat()
            nodes[number % 10].learn(end)
            took_s.append(await until(lambda end=end: all(node.holds(end) for node in nodes), 0.2))  # type: ignore[misc]
        assert median(took_s) < 0.05, "after a quiet time it leaves at once"

    simulate(seed, scenario)


def test_routes_arrive_though_streams_are_reset_all_the_time() -> None:
    """Each reset loses what was under way; repair brings it."""

    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(10)
        for number in range(30):
            await trio.sleep(0.3)
            end = cluster.chat()
            nodes[number % 10].learn(end)
            await until(lambda end=end: all(node.holds(end) for node in nodes), 10.0)  # type: ignore[misc]
        assert cluster.network.resets > 50
        assert not any(node.deaths() for node in nodes)
        for node in nodes:
            statistics = node.net.statistics()
            assert statistics.faults == 0
            assert statistics.streams_out <= 2 * 9
            assert statistics.connects - statistics.broken <= 2 * 9

    simulate("resets", scenario, Conditions(reset=0.1))


BLOCKED: dict[str, Callable[[int, int], bool]] = {
    "everywhere": lambda source, to: True,
    "into one node": lambda source, to: to == 3,
    "out of one node": lambda source, to: source == 3,
    "between two nodes": lambda source, to: {source, to} == {2, 3},
    "between two halves, one way": lambda source, to: source < 4 <= to,
    "between hosts of two": lambda source, to: source // 2 != to // 2,
}
"""Where datagrams are dropped in silence, by numbers of nodes."""


@pytest.mark.parametrize("seed", ["a", "b"])
@pytest.mark.parametrize("where", BLOCKED)
def test_where_datagrams_are_blocked_nobody_is_called_dead_and_a_crash_is_known_in_time(where: str, seed: str) -> None:
    """consul#19965: 50 seeds each, no death of a healthy node, and the crash known in 2.2 s at most."""

    async def scenario(cluster: MockCluster) -> None:
        number = {f"10.0.0.{at + 1}": at for at in range(8)}
        cluster.network.blocked = lambda source, to: BLOCKED[where](number[source], number[to])
        nodes = await cluster.met(8, 20.0)
        await trio.sleep(5)
        await shared_and_crash_known(cluster, nodes)

    simulate(seed, scenario)


async def shared_and_crash_known(cluster: MockCluster, nodes: list[MockNode]) -> None:
    """A route to all, nobody dead, then the first node crashes."""
    end = cluster.chat()
    nodes[1].learn(end)
    await until(lambda: all(node.holds(end) for node in nodes), 0.2)
    assert not any(node.deaths() for node in nodes)
    nodes[0].crash()
    await until(lambda: agree(nodes[1:]), 5.0)
    assert [node.deaths() for node in nodes[1:]] == [[nodes[0].name]] * (len(nodes) - 1)


def test_a_host_that_vanishes_without_a_word_is_missed_in_time_where_datagrams_are_blocked() -> None:
    """No reset of its streams tells of it, and those that connect to it wait."""

    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(8, 20.0)
        await trio.sleep(5)
        cluster.network.cut = lambda source, to: nodes[0].address[0] in (source, to)
        await until(lambda: agree(nodes[1:]), 5.0)
        assert [node.deaths() for node in nodes[1:]] == [[nodes[0].name]] * 7

    simulate("vanished", scenario, Conditions(datagrams=False))


def test_datagrams_that_are_blocked_and_let_through_again_in_mid_run_cost_nobody() -> None:
    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(8)
        await trio.sleep(10)
        cluster.network.blocked = lambda source, to: True
        await trio.sleep(40)
        assert not any(member.datagrams for node in nodes for member in view(node))
        cluster.network.blocked = lambda source, to: False
        await until(lambda: all(member.datagrams for node in nodes for member in view(node)), 90.0, 1.0)
        assert agree(nodes)
        assert not any(node.deaths() for node in nodes)

    simulate("mid-run", scenario)


@pytest.mark.parametrize("seed", ["a", "b"])
def test_without_any_datagram_socket_routes_are_shared_and_a_crash_is_known(seed: str) -> None:
    """`--no-gossip-udp`: not one is even tried."""

    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(8, 20.0)
        await trio.sleep(5)
        await shared_and_crash_known(cluster, nodes)
        for node in nodes:
            statistics = node.net.statistics()
            assert (statistics.packets_sent["datagram"], statistics.drops["no_udp"]) == (0, 0)
            assert statistics.packets_sent["probe"] > 0

    simulate(seed, scenario, udp=False)


def test_a_node_that_joins_late_is_given_all_that_was_learned_before() -> None:
    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(3)
        ends = [cluster.chat() for _ in range(3000)]
        for number, end in enumerate(ends):
            nodes[number % 3].learn(end)
        await trio.sleep(5)
        newcomer = cluster.start(1)[3]
        await until(lambda: newcomer.sim.peer.synced and agree(nodes), 2.0, 0.1)
        assert [end for end in ends if not newcomer.holds(end)] == []

    simulate("late", scenario)


@pytest.mark.parametrize("seed", ["a", "b"])
def test_a_crash_is_known_to_all_within_five_seconds_and_nobody_else_is_called_dead(seed: str) -> None:
    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(10)
        await trio.sleep(20)
        assert [node.deaths() for node in nodes] == [[]] * 10
        gone, others = nodes[3], nodes[:3] + nodes[4:]
        gone.crash()
        await until(lambda: all(node.deaths() for node in others), 5.0)
        await trio.sleep(20)
        assert [node.deaths() for node in others] == [[gone.name]] * 9
        assert agree(others)

    simulate(seed, scenario, LOSSY)


def test_a_partition_of_30_seconds_heals() -> None:
    """Both halves call each other dead; a route that one learned meanwhile is at the other soon after."""

    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(10)
        left, right = nodes[:5], nodes[5:]
        side = {node.address[0]: node.number < 5 for node in nodes}
        cluster.network.cut = lambda source, to: side[source] != side[to]
        await trio.sleep(15)
        ends = [cluster.chat(), cluster.chat()]
        left[1].learn(ends[0])
        right[1].learn(ends[1])
        await trio.sleep(15)
        assert agree(left)
        assert agree(right)
        assert [left[4].holds(end) for end in ends] == [True, False]
        assert [right[4].holds(end) for end in ends] == [False, True]
        cluster.network.cut = lambda source, to: False
        await until(lambda: agree(nodes), 15.0)
        await until(lambda: all(node.holds(end) for node in nodes for end in ends), 5.0)

    simulate("partition", scenario)


@pytest.mark.parametrize("seed", ["a", "b"])
def test_a_node_that_stands_still_comes_back_and_has_killed_nobody(seed: str) -> None:
    """It wakes in the middle of a probe that timed out 5 s ago, whose answer waits behind other packets."""

    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(10)
        await trio.sleep(5)
        still, others = nodes[4], [node for node in nodes if node.number != 4]
        await until(lambda: still.sim.gossip.members._prober._probe is not None, 2.0, 0.0001)
        began = still.net.traffic.ticks, still.net.traffic.packets_received[Plane.DATAGRAM]
        still.stop()
        await trio.sleep(5)
        assert (still.net.traffic.ticks, still.net.traffic.packets_received[Plane.DATAGRAM]) == began
        still.go()
        went_at = trio.current_time()
        back_s = await until(lambda: agree(nodes), 5.0)
        await trio.sleep(20)
        assert agree(nodes)
        assert still.deaths() == []
        assert [what for at, what, _ in still.changes if at >= went_at and what == "suspected"] == []
        assert {name for node in others for name in node.deaths()} <= {still.name}
        assert back_s < 5

    simulate(seed, scenario)


def test_a_node_that_is_started_again_at_once_is_known_as_the_new_one() -> None:
    """Faster than it is missed (weaveworks/weave#2085): its old streams are dead, and it has no route."""

    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(5)
        end = cluster.chat()
        nodes[0].learn(end)
        await trio.sleep(1)
        nodes[2].crash()
        nodes[2].start(cluster.nursery)
        await until(lambda: agree(nodes) and nodes[2].holds(end), 3.0)
        sessions = {
            member.session for node in nodes if node is not nodes[2] for member in view(node) if member.name == "n2"
        }
        assert sessions == {nodes[2].sim.session}

    simulate("again", scenario)


def view(node: MockNode) -> list[Any]:
    return node.sim.gossip.view(trio.current_time())


def test_one_node_whose_core_raises_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(10)
        sick, others = nodes[5], [node for node in nodes if node.number != 5]

        def receive(data: bytes, source: Address, plane: Plane, now: float) -> None:
            raise RuntimeError("a bug")

        sick.sim.peer.receive = receive  # type: ignore[method-assign]
        for _ in range(10):
            await trio.sleep(2)
            end = cluster.chat()
            others[0].learn(end)
            await until(lambda end=end: all(node.holds(end) for node in others), 0.2)  # type: ignore[misc]
        assert sick.net.statistics().faults > 20
        assert [node.net.statistics().faults for node in others] == [0] * 9
        assert {name for node in others for name in node.deaths()} <= {sick.name}
        assert all(set(node.live()) >= {other.name for other in others if other is not node} for node in others)

    simulate("sick", scenario)
    assert "a bug" in caplog.text


# --- the shell ------------------------------------------------------------------------------------------------------


def test_timers_neither_drift_nor_spin() -> None:
    """As many probes as there are intervals, no wake-up too late, and few for nothing."""

    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(3)
        await trio.sleep(5)
        began = [(node.net.traffic.ticks, pings(node)) for node in nodes]
        await trio.sleep(200)
        for node, (ticks, pinged) in zip(nodes, began, strict=True):
            assert pings(node) - pinged == pytest.approx(200 / 0.5, abs=2)
            assert node.net.lateness_s.count > 1000
            assert node.net.lateness_s.count < 200 * 1.5 * TICKS_PER_S  # a wake-up may be a rounding error early
            assert node.net.lateness_s.sum < 1e-6 * node.net.lateness_s.count
            assert node.net.traffic.ticks - ticks < 200 * TICKS_PER_S

    simulate("timers", scenario)


TICKS_PER_S = 10
"""Of a node without work: four looks at the registry, two probes and two digests."""


def pings(node: MockNode) -> int:
    return node.sim.gossip.statistics().members.counts.probes


def test_fifty_nodes_find_each_other_and_share_what_they_learn() -> None:
    """120 s of this are 18 s of one slow core: here it is a tenth of that."""

    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(50)
        for number in range(3):
            await trio.sleep(3)
            end = cluster.chat()
            nodes[5 * number].learn(end)
            await until(lambda end=end: all(node.holds(end) for node in nodes), 2.0, 0.05)  # type: ignore[misc]
        assert agree(nodes)
        assert not any(node.deaths() for node in nodes)
        assert sum(node.net.statistics().faults for node in nodes) == 0

    simulate("fifty", scenario)


# --- determinism ----------------------------------------------------------------------------------------------------


async def eventful(cluster: MockCluster) -> None:
    """Something of everything."""
    nodes = await cluster.met(6)
    side = {node.address[0]: node.number < 3 for node in nodes}
    cluster.network.cut = lambda source, to: side[source] != side[to]
    nodes[0].learn(cluster.chat())
    await trio.sleep(3)
    cluster.network.cut = lambda source, to: False
    nodes[4].stop()
    await trio.sleep(2)
    nodes[4].go()
    nodes[1].crash()
    await trio.sleep(1)
    nodes[1].start(cluster.nursery)
    await trio.sleep(3)


def digest_of(seed: str) -> str:
    trace = simulate(seed, eventful, Conditions(loss=0.05, reset=0.05)).network.trace
    return f"{len(trace)} {blake2b(repr(trace).encode(), digest_size=16).hexdigest()}"


def test_the_same_seed_gives_the_same_trace_whatever_the_heap_looks_like() -> None:
    """trio breaks ties of deadlines by address: without its flag the order depends on what was freed before."""
    first = digest_of("same")
    holes = [object() for _ in range(100_000)]
    for number in sorted(Random(1).sample(range(len(holes)), 50_000), reverse=True):
        holes[number] = object()
    gc.collect()
    assert digest_of("same") == first
    assert digest_of("other") != first


def test_the_same_seed_gives_the_same_trace_in_another_process() -> None:
    """There hashes of strings differ, and what was imported before."""
    code = "from tests.io.gossip.test_gossip_under_mock_clock import digest_of; print(digest_of('same'))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert other.stdout.strip() == digest_of("same")


def test_the_private_names_of_trio_that_make_it_deterministic_are_still_there() -> None:
    """If this fails after an upgrade: find where trio shuffles its runnable tasks now, and mend `seed_trio`."""
    assert isinstance(trio_run._ALLOW_DETERMINISTIC_SCHEDULING, bool)
    assert isinstance(trio_run._r, Random)
    assert order("1") == order("1")
    assert len({tuple(order(str(seed))) for seed in range(5)}) > 1


def order(seed: str) -> Sequence[int]:
    """In which tasks with equal deadlines run."""
    found: list[int] = []

    async def one(number: int) -> None:
        for _ in range(3):
            await trio.sleep(1)
            found.append(number)

    async def all_of_them() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(one, number)

    seed_trio(seed)
    trio.run(all_of_them, clock=trio.testing.MockClock(autojump_threshold=0))
    assert Counter(found) == dict.fromkeys(range(50), 3)
    return found
