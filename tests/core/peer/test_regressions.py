"""Defects that simulated clusters have found, each as small as it could be made."""

import pytest

from cluster.scenario import Cluster as Size
from cluster.scenario import Expect, Load, Scenario, Step
from cluster.simulation.invariants import HELD_BACK_MAX_S
from cluster.simulation.sim_node import SimNode, sim_nodes
from cluster.simulation.sim_run import Run, simulate
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Address, Plane
from ranvier_py.core.routing.peers.route_gossip import RouteGossip
from tests.core.mesh.contact.contact_world import acquainted
from tests.core.mesh.membership.small_cluster import Cluster
from tests.core.routing.peers.route_net import Net


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


def test_a_node_that_waits_for_its_first_table_sleeps_meanwhile() -> None:
    """`wake_at` named the repair, which `tick` leaves alone until then: the loop of such a node never slept."""
    net = Net(2)
    net.drop = lambda *_: True
    woken = 0
    gossip, now = net.nodes[1].gossip, net.now
    while now < net.now + 5.0:
        now = max(gossip.wake_at, now + 1e-4)
        gossip.tick(now)
        woken += 1
    assert not gossip.synced
    assert woken < 200


def test_a_session_that_has_raised_its_epoch_can_prove_itself_again() -> None:
    """A node without its state file came back with an epoch below its last one: its first proof counted for nothing.

    When it had raised its epoch others knew it by reports of others, and its further proofs were ignored: alive, never
    a peer.
    """
    one, two, world = acquainted()
    two.record = two.sessions.me = two.record._replace(epoch=two.record.epoch + 5)
    one.sessions.greet(two.address, world.now)
    world.run()
    assert one.proofs() == [two.session]


def test_nodes_that_join_at_once_are_reported_to_the_routes_in_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each proof made a list of all members: a node that joined N peers took N² steps, a cluster N³."""
    reported: list[int] = []
    met = RouteGossip.met

    def counted(self: RouteGossip, peers: LivePeers, now: float) -> None:
        reported.append(len(peers.sharing))
        met(self, peers, now)

    monkeypatch.setattr(RouteGossip, "met", counted)
    scenario = Scenario(
        "join", "30 nodes start at once", 5.0, cluster=Size(nodes=30, engines=2), expect=Expect(agree_s=5.0)
    )
    assert simulate(scenario, 1, sim_nodes()).violation is None
    assert max(reported) == 29
    assert len(reported) < 30 * 10  # 30 x 29 proofs: each once would be 870


def test_in_flight_counts_reach_peers_where_datagrams_do_not() -> None:
    """They went by datagram wherever this node could send any, whoever these reached."""
    size, cut = Size(nodes=3, engines=2), Step(0.1, "cut", nodes=(0, 1, 2), planes=("udp",))
    run = Run(Scenario("no udp", "ever", 60.0, cluster=size, load=Load(chats_per_s=0.0), steps=(cut,)), 1, sim_nodes())
    run.steps.plan()
    run.world.time.run(40.0)
    nodes = [host.node for host in run.world.hosts]
    routers = [node.router for node in nodes if isinstance(node, SimNode)]
    registry = routers[0].registry
    busy = next(iter(registry))
    for _ in range(5):
        registry.dispatched(busy, run.world.time.now)
    run.world.time.run(run.world.time.now + 1.0)
    assert [router.registry.ids.known(busy.url).work.peers.requests for router in routers] == [0, 5, 5]


class Keeper:
    """Somebody on the wire who keeps one stream packet with route updates that never arrives, and delivers it when
    reported."""

    def __init__(self, run: Run, sender: int, target: int) -> None:
        self.run = run
        self.sender = sender
        self.target = target
        self.kept: list[bytes] = []
        self.addresses = run.world.addresses
        run.world.net.tap = self.keep

    def keep(self, source: Address, target: Address, plane: Plane, data: bytes) -> None:
        ours = (source, target) == (self.addresses[self.sender], self.addresses[self.target])
        if ours and plane is Plane.BULK and self.run.world.net.links.link(source, target, plane).cut:
            self.kept.append(data)

    def received_of(self) -> int:
        """What the target has of the sender's route updates."""
        hosts = self.run.world.hosts
        sender, target = hosts[self.sender].node, hosts[self.target].node
        assert isinstance(sender, SimNode)
        assert isinstance(target, SimNode)
        return target.peer.features.routes.vector().get(sender.session, 0)

    def deliver(self) -> None:
        for data in self.kept:
            self.run.world.net.inject(self.addresses[self.target], self.addresses[self.sender], Plane.BULK, data)


@pytest.mark.parametrize(("delay_s", "taken"), [(1.0, True), (HELD_BACK_MAX_S, False)])
def test_a_packet_that_is_held_back_counts_as_long_as_its_sender_passes_for_alive(delay_s: float, taken: bool) -> None:
    """Its route updates were as much too young as it was late, and S5 knew of no bound for that."""
    cut = Step(10.0, "cut", nodes=(0,))
    size = Size(nodes=3, engines=2)
    run = Run(Scenario("late", "kept", 60.0, cluster=size, load=Load(chats_per_s=5.0), steps=(cut,)), 1, sim_nodes())
    keeper = Keeper(run, 0, 1)
    run.steps.plan()
    run.world.clients.start()
    time = run.world.time
    time.run(11.0)
    assert keeper.kept
    time.run(10.0 + delay_s)
    before = keeper.received_of()
    keeper.deliver()
    time.run(time.now + 0.5)
    assert (keeper.received_of() > before) is taken
