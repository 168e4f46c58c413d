"""Defects that simulated clusters have found, each as small as it could be made."""

from collections.abc import Sequence

import pytest

from cluster.scenario import Cluster as Size
from cluster.scenario import Expect, Scenario
from cluster.sim_mind import Minds
from cluster.sim_run import simulate
from ranvier_py.core.gossip.membership.profile import LAN
from ranvier_py.core.gossip.membership.suspicion import Suspicions
from ranvier_py.core.gossip.routes.route_gossip import RouteGossip
from ranvier_py.core.gossip.values import Peer
from tests.core.gossip.contact.contact_world import acquainted
from tests.core.gossip.membership.small_cluster import Cluster
from tests.core.gossip.routes.route_net import Net


@pytest.mark.parametrize("seed", range(6))
def test_a_member_that_is_replaced_while_it_is_probed_is_not_suspected_any_more(seed: int) -> None:
    """The failed probe put a suspicion on a session that no table knew, and the node fell over it when it ended."""
    cluster = Cluster(seed)
    first, second, third = cluster.grow(3)
    for epoch in range(2, 12):
        cluster.crash(third)
        cluster.run(0.3)
        third = cluster.restart(third, epoch=epoch, join=[first, second])
        cluster.run(1.7)
    cluster.run(10.0)
    assert cluster.agree([first, second, third])


def test_a_suspicion_whose_end_is_set_twice_to_one_moment_ends_once() -> None:
    """It was returned twice, and the second burial met a member without a suspicion."""
    suspicions = Suspicions()
    suspicions.begin(7, 1, LAN, members=2, now=0.0)
    assert suspicions.confirm(7, 2, LAN, members=5)
    assert suspicions.expired(10.0) == [7]


def test_a_node_that_waits_for_its_first_table_sleeps_meanwhile() -> None:
    """`wake_at` named the repair, which `tick` leaves alone until then: the loop of such a node never slept."""
    net = Net(2)
    net.link.drop = lambda *_: True
    woken = 0
    gossip = net.nodes[1].gossip
    until = net.now + 5.0
    while net.now < until:
        net.now = max(gossip.wake_at, net.now + 1e-4)
        gossip.tick(net.now)
        net.nodes[1].outbox.clear()
        woken += 1
    assert not gossip.synced
    assert woken < 200


def test_a_session_that_has_raised_its_epoch_can_prove_itself_again() -> None:
    """A node without its state file came back with an epoch below its last one: its first proof counted for nothing.

    When it had raised its epoch others knew it by hearsay, and its further proofs were ignored: alive, never a peer.
    """
    one, two, world = acquainted()
    two.record = two.sessions.me = two.record._replace(epoch=two.record.epoch + 5)
    one.sessions.greet(two.address, world.now)
    world.run()
    assert one.proofs() == [two.session]


def test_nodes_that_join_at_once_are_told_to_the_routes_in_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each proof made a list of all members: a node that joined N peers took N² steps, a cluster N³."""
    told: list[int] = []
    peers = RouteGossip.peers

    def counted(self: RouteGossip, live: Sequence[Peer], now: float, members: Sequence[int]) -> None:
        told.append(len(live))
        peers(self, live, now, members)

    monkeypatch.setattr(RouteGossip, "peers", counted)
    scenario = Scenario(
        "join", "30 nodes start at once", 5.0, cluster=Size(nodes=30, engines=2), expect=Expect(agree_s=5.0)
    )
    assert simulate(scenario, 1, Minds()).violation is None
    assert max(told) == 29
    assert len(told) < 30 * 6
