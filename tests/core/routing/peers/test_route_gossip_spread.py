"""How routes spread among several nodes, over good networks and bad ones: latency, completeness, bytes, life."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranvier_py.core.mesh.transfer import TransferPart
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.peers.route_messages import Digest, Reset, RouteUpdates, Vector
from ranvier_py.core.routing.peers.route_settings import MIN_BYTES_PER_S
from ranvier_py.core.routing.peers.update_log import FORGOTTEN_S
from tests.core.routing.peers.route_net import BACKENDS, URLS, Net, RouteNode, turn
from tests.examples import examples


def busy(net: Net, seconds: float, turns_per_s: float, *, seed: int = 3) -> list[tuple[float, int, int]]:
    """Every node serves turns at random times. Returns (time, node, token fingerprint) of each."""
    rng = Random(seed)
    sessions = list(net.nodes)
    learned: list[tuple[float, int, int]] = []
    end = net.now + seconds
    while True:
        wait_s = rng.expovariate(turns_per_s * len(sessions))
        if net.now + wait_s > end:
            net.run(max(0.0, end - net.now))
            return learned
        net.run(wait_s)
        chain = turn(rng)
        if rng.random() < 0.5:
            chain.insert(1, (48, rng.getrandbits(64) | 1, 0))  # a message long enough for an anchor
        session = rng.choice(sessions)
        net.learn(session, chain, rng.randrange(BACKENDS))
        learned.append((net.now, session, chain[0][1]))


def knows(net: Net, session: int, fingerprint: int) -> bool:
    return net.nodes[session].knows(fingerprint)


def ready(count: int, **given_settings: float) -> Net:
    net = Net(count, 1, 1000.0, **given_settings)
    net.run_until(lambda: all(node.gossip.synced for node in net.nodes.values()))
    net.sent.clear()
    return net


# --- latency and bytes ------------------------------------------------------------------------------------------------


def test_ten_nodes_receive_everything_within_a_tick() -> None:
    net = ready(10)
    tick_s, hop_s = 0.05, net.network.links.base.delay_s
    rng = Random(1)
    for number in range(200):
        chain = turn(rng)
        net.learn(1 + number % 10, chain)
        learned = net.now
        net.run_until(lambda chain=chain: all(knows(net, s, chain[0][1]) for s in net.nodes), step_s=0.001)  # type: ignore[misc]
        assert net.now - learned <= tick_s + hop_s + 0.003
    lag = net.nodes[2].gossip.lag
    assert lag.count == 180
    assert lag.quantile(0.99) <= tick_s


def test_a_turn_costs_a_peer_less_than_200_bytes() -> None:
    net = ready(10)
    learned = busy(net, 4.0, 50.0)
    reported = sum(size for _, _, _, message, size in net.sent if isinstance(message, RouteUpdates))
    assert len(learned) > 1800
    assert reported / len(learned) / 9 <= 200.0
    rest = sum(size for _, _, _, message, size in net.sent if not isinstance(message, RouteUpdates))
    assert rest / 10 / 4.0 < 2000, "digests and vectors, per node and second"
    assert sum(node.gossip.counters.duplicates for node in net.nodes.values()) < 0.02 * 9 * len(learned)


def test_an_idle_node_states_little() -> None:
    net = ready(10)
    busy(net, 2.0, 5.0)
    net.run(1.0)
    net.sent.clear()
    net.run(20.0)
    assert {type(message) for _, _, _, message, _ in net.sent} == {Digest}
    assert sum(size for *_, size in net.sent) / 10 / 20.0 < 200


def test_many_nodes_pass_on_what_is_new() -> None:
    """Here 24 nodes behave as 24 of a hundred would: nobody sends to everybody."""
    net = ready(24, mesh_nodes_max=8)
    learned = busy(net, 1.0, 2.0)
    net.run(0.6)
    assert all(knows(net, session, name) for _, _, name in learned for session in net.nodes)
    statistics = [node.gossip.counters for node in net.nodes.values()]
    assert sum(each.gaps for each in statistics) == 0, "what an origin teaches arrives in order"
    assert sum(each.duplicates for each in statistics) <= 2.2 * sum(each.received for each in statistics)
    assert max(node.gossip.lag.quantile(0.99) for node in net.nodes.values()) <= 0.5
    net.run_until(net.equal, limit_s=3.0)


@pytest.mark.parametrize(("nodes", "turns_per_s"), [(2, 1300), (4, 700)])
def test_the_byte_budget_is_never_exceeded(nodes: int, turns_per_s: int) -> None:
    """S7: not while more is learned than fits, not while it is repaired. Nothing is lost for good."""
    budget, peer_budget = 2 * MIN_BYTES_PER_S, MIN_BYTES_PER_S
    net = ready(nodes, node_bytes_per_s=budget, peer_bytes_per_s=peer_budget)
    busy(net, 1.5, turns_per_s)
    net.run_until(net.equal, limit_s=60.0, step_s=0.25)
    assert sum(node.gossip.counters.held_back for node in net.nodes.values()) > 0
    for source in net.nodes:
        spent = [
            (at, to, size)
            for at, sender, to, m, size in net.sent
            if sender == source and not isinstance(m, TransferPart)
        ]
        for start, _, _ in spent[::5]:
            window = [(to, size) for at, to, size in spent if start <= at < start + 1.0]
            assert sum(size for _, size in window) <= budget
            for target in net.nodes:
                assert sum(size for to, size in window if to == target) <= peer_budget


# --- bad networks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "mesh"), [(4, 16), (10, 16), (10, 5)], ids=["four", "ten", "ten that pass on"])
@pytest.mark.parametrize(
    "conditions",
    [
        {"loss": 0.3},
        {"loss": 0.1, "duplicate": 0.3, "jitter_s": 0.05},
        {"delay_s": 0.2, "jitter_s": 0.15, "loss": 0.05},
    ],
    ids=["loss", "disorder", "far away"],
)
def test_everybody_knows_everything_in_the_end(nodes: int, mesh: int, conditions: dict[str, float]) -> None:
    """L3: no route of a surviving node stays unknown, once faults stop."""
    net = ready(nodes, mesh_nodes_max=mesh)
    net.link(**conditions)
    learned = busy(net, 2.0, 6.0)
    net.link(loss=0.0, duplicate=0.0)
    net.run_until(net.equal, limit_s=10.0, step_s=0.05)
    assert all(knows(net, session, name) for _, _, name in learned for session in net.nodes)


def test_what_a_dead_node_learned_still_spreads() -> None:
    """T-origin-dies-midway (quickwit#4562): one peer had received it, the others receive it from that one."""
    net = ready(6)
    net.drop = lambda source, target, message: source == 1 and target != 2
    rng = Random(4)
    names = []
    for _ in range(20):
        chain = turn(rng)
        names.append(chain[0][1])
        net.learn(1, chain, 2)
    net.run(0.1)
    net.kill(1)
    net.drop = lambda *_: False
    assert not any(knows(net, 3, name) for name in names)
    net.run_until(lambda: all(knows(net, session, name) for session in range(2, 7) for name in names), limit_s=5.0)
    net.run_until(net.equal, limit_s=2.0)
    assert net.nodes[5].gossip.vector() == {1: 20}


def test_a_dead_node_is_forgotten_by_all_and_stays_forgotten() -> None:
    """T-gc-skew, T-dead-owner-cleanup: they notice at different times, and one was away meanwhile."""
    ttl_s = 40.0
    net = ready(4, ttl_s=ttl_s, forget_after_s=10.0)
    net.learn(1, turn(Random(1)))
    net.run(1.0)
    net.kill(1)
    net.part(4)
    net.run(ttl_s - 5.0)
    net.heal()
    net.run(ttl_s + 5.0)
    assert [node.gossip.vector() for node in net.nodes.values()] == [{}] * 3
    net.sent.clear()
    net.run(FORGOTTEN_S + 20.0)
    assert {type(message) for *_, message, _ in net.sent} == {Digest}, "nobody sends anything about it any more"
    assert all(node.gossip.vector() == {} for node in net.nodes.values())


def test_a_node_that_was_away_for_longer_than_routes_live_catches_up() -> None:
    """weaviate#10698: after a long partition nobody knew anybody."""
    net = ready(3, ttl_s=20.0, forget_after_s=10.0)
    busy(net, 1.0, 5.0)
    net.run(1.0)
    net.part(3)
    busy(net, 60.0, 2.0)
    net.heal()
    net.run_until(
        lambda: len({tuple(sorted(n.gossip.vector().items())) for n in net.nodes.values()}) == 1, limit_s=10.0
    )
    learned = busy(net, 1.0, 5.0)
    net.run(1.0)
    assert all(knows(net, session, name) for _, _, name in learned for session in net.nodes)


def test_a_restarted_node_is_another_origin() -> None:
    """T-fast-restart: its new route updates must not be taken for its old ones."""
    net = ready(3)
    rng = Random(2)
    net.learn(1, turn(rng))
    net.run(0.5)
    net.kill(1)
    net.add(101)
    net.run(0.5)
    chain = turn(rng)
    net.learn(101, chain)
    net.run_until(lambda: all(knows(net, session, chain[0][1]) for session in (2, 3)), limit_s=1.0)
    net.run_until(net.equal, limit_s=3.0)
    assert net.nodes[2].gossip.vector() == {1: 1, 101: 1}


# --- laws -------------------------------------------------------------------------------------------------------------


def origins(turns: Sequence[tuple[int, int, int, int]]) -> list[tuple[bytes, float]]:
    """Route updates as nodes make them, with their evidence: tables learn paths of one small tree."""
    nodes = [RouteNode(session, ttl_s=500.0) for session in range(3)]
    found: list[tuple[bytes, float]] = []
    for number, leaf, backend, at in turns:
        levels = [leaf >> shift for shift in range(3)]  # paths share their upper rows
        chain = [(16 * (3 - up), 1 + up * 1000 + name, 9001 + up * 1000 + name) for up, name in enumerate(levels)]
        nodes[number].serve(chain, 100.0 + at, URLS[backend])
        found += nodes[number].updates(100.0 + at, everything=True)
    return found


TURNS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(8, 15), st.integers(0, BACKENDS - 1), st.integers(0, 200)), max_size=14
).map(lambda turns: sorted(turns, key=lambda each: each[3]))


@settings(max_examples=examples(150))
@given(TURNS, st.randoms(), st.data())
def test_any_order_of_route_updates_with_doubles_gives_the_same_table(
    turns: list[tuple[int, int, int, int]], rng: Random, data: st.DataObject
) -> None:
    """S4: receiving is commutative, associative and idempotent."""
    route_updates = origins(turns)
    sums = []
    for _ in range(3):
        received = route_updates + (
            data.draw(st.lists(st.sampled_from(route_updates), max_size=5)) if route_updates else []
        )
        rng.shuffle(received)
        node = RouteNode(9, rng.sample(URLS, BACKENDS), ttl_s=500.0)
        node.meet(RouteNode(8))
        for route_update, at in received:
            node.sync.receive([(301.0 - at, route_update)], 301.0)
        sums.append(node.sums(301.0))
    assert sums[0] == sums[1] == sums[2]


class Adversary:
    """Three nodes whose messages are delivered, doubled, dropped and reordered at will; time passes at will."""

    def __init__(self, log_entries_max: int) -> None:
        self.net = Net(3, log_entries_max=log_entries_max, ttl_s=50.0)
        self.net.run(0.3)
        self.rng = Random(1)
        self.route_updates: dict[int, list[int]] = {session: [] for session in self.net.nodes}
        self.vectors: dict[int, dict[int, int]] = {session: {} for session in self.net.nodes}
        self.flying: list[tuple[int, int, Message]] = []
        self.net.drop = self.hold

    def hold(self, *sent: Any) -> bool:
        self.flying = [*self.flying[-199:], sent]
        return True

    def act(self, action: int) -> None:
        kind, value = action % 4, action // 4
        if kind == 0:
            session = 1 + value % 3
            chain = turn(self.rng)
            self.net.learn(session, chain, value % BACKENDS)
            self.route_updates[session].append(chain[0][1])
        elif kind == 1:
            self.net.run((value % 40) / 100)
        elif self.flying:
            at = value % len(self.flying)
            source, target, message = self.flying[at] if kind == 2 else self.flying.pop(at)
            if value % 7:  # else it is lost, or stays for another time
                self.net.take(target, source, message)
        self.check()

    def check(self) -> None:
        for session, node in self.net.nodes.items():
            vector, before = node.gossip.vector(), self.vectors[session]
            assert all(vector[origin] >= number for origin, number in before.items()), "a number went back"
            self.vectors[session] = vector
            for origin, number in vector.items():
                if origin == session:
                    continue
                for token in self.route_updates[origin][:number]:
                    assert knows(self.net, session, token), "a number covers what was never received"


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 4 * 200), min_size=30, max_size=150), st.sampled_from((3, 1000)))
def test_numbers_never_go_back_and_cover_only_what_is_known(actions: list[int], log_entries_max: int) -> None:
    """S3, under any network; and once the network is good again all know the same."""
    world = Adversary(log_entries_max)
    for action in actions:
        world.act(action)
    net = world.net
    for source, target, message in world.flying[:50]:
        net.take(target, source, message)
    net.drop = lambda *_: False
    net.run_until(net.equal, limit_s=60.0, step_s=0.2)
    world.vectors = {session: {} for session in net.nodes}
    world.check()


# --- life -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_s", [0.001, 1.7])
def test_no_route_gets_younger_on_its_path(delay_s: float) -> None:
    """S5: at each hop a route may gain at most what the wire took, which nobody can measure."""
    net = ready(9, mesh_nodes_max=4)
    net.link(delay_s=delay_s)
    learned = {name: at for at, _, name in busy(net, 4.0, 5.0)}
    net.run_until(net.equal, limit_s=60.0, step_s=0.5)
    hops = 8
    for node in net.nodes.values():
        for name, at in learned.items():
            (view,) = node.table.subtree(name, limit=1)
            claim = node.table.claim(name, view.holders[0].backend)
            assert claim is not None
            assert claim.evidence <= at + hops * delay_s


def test_a_later_generation_voids_what_an_earlier_one_held_everywhere() -> None:
    """T-epoch-bump: route updates of before the restart come late, by another way, and change nothing."""
    net = ready(3)
    rng = Random(6)
    early, late = turn(rng), turn(rng)
    net.drop = lambda source, target, message: target == 3 and isinstance(message, RouteUpdates)
    net.learn(1, early, 2)
    net.run(0.2)
    net.nodes[2].restart(net.now, URLS[2])
    net.learn(2, late, 2)
    net.nodes[3].restart(net.now, URLS[2])
    net.drop = lambda *_: False
    net.run_until(net.equal, limit_s=5.0)
    for node in net.nodes.values():
        local = node.id(2)
        held: list[PrefixKey] = [*early, *late]
        generations = [-1] * BACKENDS
        generations[local] = node.engine(URLS[2]).generation
        matches = {key[1]: bool(node.table.match([key], generations, net.now)) for key in held}
        assert matches == {**{key[1]: False for key in early}, **{key[1]: True for key in late}}


def test_expired_routes_are_passed_on_by_nobody() -> None:
    net = ready(3, ttl_s=10.0, forget_after_s=1.0)
    net.drop = lambda source, target, message: target == 3 and not isinstance(message, Digest)
    chain = turn(Random(5))
    net.learn(1, chain)
    net.run(11.0)
    net.drop = lambda *_: False
    net.run_until(lambda: net.nodes[3].gossip.vector() == net.nodes[1].gossip.vector(), limit_s=10.0)
    assert not knows(net, 3, chain[0][1])
    assert net.nodes[3].sync.counters.received == 0


def test_vectors_are_reported_only_after_a_difference() -> None:
    """chitchat sends all it knows with every digest: 15 kB/s among ten idle nodes."""
    net = ready(10)
    busy(net, 1.0, 5.0)
    net.run(1.0)
    net.sent.clear()
    net.run(5.0)
    assert not [message for *_, message, _ in net.sent if isinstance(message, Vector | Reset)]
