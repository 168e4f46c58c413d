"""Nodes of two versions in one cluster: a rolling upgrade, its way back, and another major that can't be spoken to.

Version 1 is the one before this one: it knows no message by which tables are compared by one sum first.

A later minor version may append fields to any message, say more of itself in its record, and send messages of kinds
that this one has not (`wire`). The later one here is this one with all of that added to everything it sends.
"""

from __future__ import annotations

import msgpack  # type: ignore[import-untyped]
import pytest
import trio

from cluster.simulation.sim_node import SimNode
from cluster.simulation.sim_versions import make_first_version, speak
from ranvier_py.core.gossip.gossip import VERSION
from ranvier_py.core.gossip.gossip_values import Plane, Send
from ranvier_py.core.gossip.wire.codec import Kind
from ranvier_py.core.gossip.wire.fields import FIELDS_MAX
from ranvier_py.core.gossip.wire.frame import BadFrame, Reason
from ranvier_py.core.gossip.wire.seal import BODY_BYTES_MAX, Opened
from tests.io.gossip.mock_nodes import MockCluster, MockNode, agree, simulate, until

LATER_KIND = 77
LATER = VERSION + 1
assert LATER_KIND not in list(Kind)


def later_minor(sim: SimNode) -> None:
    """The next version."""
    gossip = sim.gossip
    speak(gossip, LATER)
    seal, take = gossip.sealer.seal, gossip.take

    def longer(plane: Plane, receiver: int, kind: int, body: bytes) -> bytes:
        more = bytes((body[0] + 1,)) + body[1:] + msgpack.packb(b"of a later version")
        fits = len(more) <= BODY_BYTES_MAX[plane] and body[0] & 0x0F < FIELDS_MAX
        return seal(plane, receiver, kind, more if fits else body)

    def and_more() -> list[Send]:
        effects = take()
        kind_of_news = msgpack.packb([1, b"news that nobody else understands"])
        peers = {send.to: gossip.sessions.session_at(send.to) for send in effects}
        for to, session in peers.items():
            if session:
                effects.append(Send(to, Plane.DATAGRAM, seal(Plane.DATAGRAM, session, LATER_KIND, kind_of_news)))
        return effects

    gossip.sealer.seal = longer  # type: ignore[method-assign]
    gossip.take = and_more  # type: ignore[method-assign]


def first_minor(sim: SimNode) -> None:
    make_first_version(sim.peer)


def later_major(sim: SimNode) -> None:
    """Version 2: its packets say so, and it refuses all others."""
    sealer = sim.gossip.sealer
    seal = sealer.seal

    def other(plane: Plane, receiver: int, kind: int, body: bytes) -> bytes:
        packet = seal(plane, receiver, kind, body)
        return packet[:2] + b"\x02" + packet[3:]

    def refuse(packet: bytes, plane: Plane) -> Opened:
        raise BadFrame(Reason.VERSION)

    sealer.seal = other  # type: ignore[method-assign]
    sealer.open = refuse  # type: ignore[method-assign]


def restart(cluster: MockCluster, node: MockNode) -> None:
    node.crash()
    node.start(cluster.nursery)


async def all_share(cluster: MockCluster, nodes: list[MockNode]) -> None:
    """Everybody knows everybody, and what any of them learns reaches the others."""
    await until(lambda: agree(nodes), 5.0, 0.05)
    await until(lambda: all(node.sim.peer.synced for node in nodes), 5.0, 0.05)
    ends = [cluster.chat() for _ in nodes]
    for node, end in zip(nodes, ends, strict=True):
        node.learn(end)
    await until(lambda: all(node.holds(end) for node in nodes for end in ends), 0.5)


def check(node: MockNode, kinds_skipped: bool) -> None:
    """Nothing was broken for it, and what it could not know was counted."""
    statistics = node.sim.gossip.statistics()
    assert not any(statistics.refused.values())
    assert statistics.sessions["body"] == 0
    assert (statistics.sessions["kind"] > 0) is kinds_skipped
    assert node.net.statistics().faults == 0


@pytest.mark.parametrize("seed", ["a", "b"])
def test_a_rolling_upgrade_and_its_way_back_cost_nothing(seed: str) -> None:
    """One node after the other; at each step all are peers, share what they learn, and nobody is taken for dead."""

    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(5)
        for node in nodes:
            node.release = later_minor
            restart(cluster, node)
            await all_share(cluster, nodes)
        for node in nodes:
            check(node, kinds_skipped=True)
            told = {member.record.version_max for member in node.sim.gossip.members.alive()}
            assert told == {LATER}, "what a later version says of itself is passed on"
        for node in nodes[:2]:
            node.release = lambda sim: None
            restart(cluster, node)
            await all_share(cluster, nodes)
            check(node, kinds_skipped=True)
        assert not any(node.deaths() for node in nodes)

    simulate(seed, scenario)


def test_a_crash_among_two_versions_is_known_in_time() -> None:
    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(6)
        for node in nodes[:3]:
            node.release = later_minor
            restart(cluster, node)
        await all_share(cluster, nodes)
        await trio.sleep(5)
        for gone in (nodes[0], nodes[5]):
            gone.crash()
            rest = [node for node in nodes[:5] if node is not nodes[0]]
            await until(lambda gone=gone, rest=rest: all(gone.name in node.deaths() for node in rest), 5.0)  # type: ignore[misc]
        assert [sorted(node.deaths()) for node in nodes[1:5]] == [["n0", "n5"]] * 4

    simulate("crash", scenario)


def test_tables_are_compared_by_what_both_versions_know() -> None:
    """1.12: the least of both, per pair. A message that one of two does not know would end no comparison."""

    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(5)
        for node in nodes[:3]:
            node.release = first_minor
            restart(cluster, node)
        await all_share(cluster, nodes)
        await trio.sleep(10)
        for node in nodes:
            statistics = node.sim.gossip.routes.statistics()
            assert statistics.audits > 3
            assert statistics.given_up == 0
            assert node.sim.gossip.statistics().sessions["kind"] == 0
        assert nodes[0].sim.gossip.statistics().sent["rows"].bytes > 6 * 32_768

    simulate("first", scenario)


def test_what_one_member_would_not_understand_is_told_when_it_is_gone() -> None:
    """Update batches are in the logs, which go to all. A node alone, too, says what it can."""

    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(3)
        await until(lambda: {node.sim.gossip.version for node in nodes} == {VERSION}, 1.0)
        nodes[0].release = first_minor
        restart(cluster, nodes[0])
        await all_share(cluster, nodes)
        assert {node.sim.gossip.version for node in nodes} == {1}
        assert not any(node.sim.peer.routes.understood for node in nodes)
        nodes[0].release = lambda sim: None
        restart(cluster, nodes[0])
        await all_share(cluster, nodes)
        assert {node.sim.gossip.version for node in nodes} == {VERSION}
        assert all(node.sim.peer.routes.understood for node in nodes)
        for gone in nodes[:2]:
            gone.crash()
        await until(lambda: nodes[2].sim.peer.alone, 20.0)
        await trio.sleep(1)
        assert nodes[2].sim.gossip.version == VERSION

    simulate("batches", scenario)


def test_another_major_is_refused_counted_and_told_once_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """consul#19965: not a line for each packet, for years."""

    async def scenario(cluster: MockCluster) -> None:
        nodes = await cluster.met(5)
        odd, others = nodes[4], nodes[:4]
        odd.release = later_major
        restart(cluster, odd)
        for _ in range(100):
            await trio.sleep(0.2)
            cluster.network.send_datagram(odd.address, others[0].address, b"RG\x02" + b"2" * 100)
        assert agree(others)
        for node in others:
            assert {change[2] for change in node.changes if change[1] == "died"} == {odd.name}
            assert node.net.statistics().faults == 0
        refused = [node.sim.gossip.statistics().refused for node in others]
        assert refused[0]["version"] >= 100
        assert not any(number for each in refused for why, number in each.items() if why != "version")
        assert odd.live() == []
        lines = [record.getMessage() for record in caplog.records if "gossip.version" in record.getMessage()]
        assert len(lines) == 1, "within half a minute"
        assert "packets of protocol 2 from 10.0.0.5:" in lines[0]
        await all_share(cluster, others)

    with caplog.at_level("WARNING"):
        simulate("major", scenario)
