"""What peers say of backends, and what becomes of it."""

from random import Random

import pytest

from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.routing.backend_state import facts as f
from ranvier_py.core.routing.backend_state.loads import BACKENDS_MAX, LOAD_INTERVAL_S, Loads
from ranvier_py.core.routing.rates.work import NO_LOAD, Load
from tests.builders.machine_net import LoneMachine, MachineNet, alike, peer_of

ENGINE, OTHER = 11, 22
A, B, C = map(peer_of, (1, 2, 3))


class Net(MachineNet[LoneMachine[f.BackendFacts]]):
    """Some nodes that hear each other at once and without loss."""

    def __init__(self, *peers: Peer) -> None:
        super().__init__(lambda session, now: LoneMachine(f.BackendFacts, Random(session), now), len(peers), now=0.0)
        self.link(delay_s=0.0)

    def __getitem__(self, peer: Peer) -> f.BackendFacts:
        return self.nodes[peer.session].machine

    def until(self, now: float) -> None:
        self.time.run(now)
        self.run(0.0)


def fact(
    generation: int = 1, started_at: float = 0.0, verdict: int = 1, drain_clock: int = 0, *, draining: bool
) -> f.Fact:
    return f.Fact(ENGINE, generation, started_at, verdict, draining, drain_clock)


def receive(node: f.BackendFacts, peer: Peer, *facts: f.Fact, now: float = 1.0) -> None:
    node.receive(peer, f.Facts(facts), now)


def test_loads_of_all_peers_add_up() -> None:
    net = Net(A, B, C)
    net[B].loads.carry({ENGINE: Load(3, 2, 900), OTHER: Load(1)})
    net[C].loads.carry({ENGINE: Load(2, 1, 50)})
    net.until(1.0)
    assert net[A].loads.of(ENGINE) == Load(5, 3, 950)
    assert net[A].loads.of(OTHER) == Load(1)
    net[B].loads.carry({})
    net.until(2.0)
    assert net[A].loads.of(ENGINE) == Load(2, 1, 50)
    assert net[A].loads.of(OTHER) == NO_LOAD
    assert set(net[A].loads.moved) == {ENGINE, OTHER}


def test_an_older_report_of_load_is_ignored() -> None:
    node = Net(A, B)[A]
    node.receive(B, Loads(2, ((ENGINE, 7, 0, 0),)), 1.0)
    node.receive(B, Loads(1, ((ENGINE, 1, 0, 0),)), 1.1)
    assert node.loads.of(ENGINE) == Load(7)
    assert node.counters.loads_old == 1


def test_the_load_of_a_silent_peer_expires() -> None:
    node = Net(A, B)[A]
    node.receive(B, Loads(1, ((ENGINE, 7, 0, 0),)), 1.0)
    assert node.wake_at <= 4.0
    node.tick(3.9)
    assert node.loads.of(ENGINE) == Load(7)
    node.tick(4.0)
    assert node.loads.of(ENGINE) == NO_LOAD


def test_the_load_of_a_peer_that_left_goes_at_once() -> None:
    node = Net(A, B)[A]
    node.receive(B, Loads(1, ((ENGINE, 7, 0, 0),)), 1.0)
    node.met(alike([]), 1.0)
    assert node.loads.of(ENGINE) == NO_LOAD


def test_load_travels_by_datagram_while_it_fits_one() -> None:
    net = Net(A, B)
    net[A].loads.carry(dict.fromkeys(range(10), Load(1)))
    net[A].tick(1.0)
    net[A].loads.carry(dict.fromkeys(range(1000), Load(1)))
    net[A].tick(2.0)
    planes = [outgoing.plane for outgoing in net.nodes[1].outbox if isinstance(outgoing.message, Loads)]
    assert planes == [Plane.DATAGRAM, Plane.BULK]


def test_load_travels_by_stream_to_those_alone_whom_datagrams_do_not_reach() -> None:
    """In a cluster without UDP nobody ever knew what the others had in flight."""
    outbox: list[Outgoing] = []
    planes = {B.session: Plane.DATAGRAM, C.session: Plane.PROBE}
    node = f.BackendFacts(outbox, Random(1), 0.0, plane_of=planes.__getitem__)
    node.met(alike([B, C]), 0.0)
    node.loads.carry({ENGINE: Load(1)})
    node.tick(1.0)
    assert {each.session: each.plane for each in outbox if isinstance(each.message, Loads)} == planes


def test_a_newcomer_is_sent_loads_within_a_tick() -> None:
    """Else it would think engines idle until the next repetition, and fill them."""
    net = Net(A, B, C)
    net[A].met(alike([B]), 0.0)
    net[A].loads.carry({ENGINE: Load(4)})
    net[A].tick(1.0)
    net.nodes[1].outbox.clear()
    net[A].met(alike([B, C]), 1.0)
    assert net[A].wake_at <= 1.0 + LOAD_INTERVAL_S
    net.until(1.0 + LOAD_INTERVAL_S)
    assert net[C].loads.of(ENGINE) == Load(4)


def test_unchanged_load_is_repeated_before_it_expires() -> None:
    net = Net(A, B)
    net[A].loads.carry({ENGINE: Load(1)})
    for tenth in range(100):
        net.until(1.0 + tenth / 10)
        assert net[B].loads.of(ENGINE) == Load(1)


def test_a_newcomer_takes_over_the_count_without_voiding_its_claims() -> None:
    """Both know the same process: only the number differs."""
    node = Net(A, B)[A]
    node.observe(ENGINE, f.Verdict.HEALTHY, 100.0)
    receive(node, B, fact(5, 100.0, draining=False))
    assert node.of(ENGINE).generation == 5
    assert not [change for change in node.changes if isinstance(change, f.NewGeneration)]


def test_of_two_processes_with_one_number_the_later_one_counts_everywhere() -> None:
    net = Net(A, B)
    net[A].observe(ENGINE, f.Verdict.HEALTHY, 100.0)
    net[B].observe(ENGINE, f.Verdict.HEALTHY, 900.0)
    net.until(1.0)
    assert net[A].of(ENGINE).generation == net[B].of(ENGINE).generation == 2
    assert f.NewGeneration(ENGINE, 2, 900.0) in net[A].changes
    assert not [change for change in net[B].changes if isinstance(change, f.NewGeneration)]


def test_a_route_update_of_an_unknown_generation_is_believed_and_an_old_one_is_not() -> None:
    node = Net(A, B)[A]
    node.observe(ENGINE, f.Verdict.HEALTHY, 0.0)
    assert node.generation_of(ENGINE, 1) == 1
    assert node.generation_of(ENGINE, 3) == 3 == node.of(ENGINE).generation
    assert node.generation_of(ENGINE, 2) == 2 < node.of(ENGINE).generation
    assert node.generation_of(ENGINE, 250) < node.of(ENGINE).generation


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({"generation": f.COUNT_MAX}, False),
        ({"drain_clock": f.COUNT_MAX}, False),
        ({"generation": 2 + f.COUNT_STEP_MAX}, False),
        ({"generation": 1 + f.COUNT_STEP_MAX, "drain_clock": f.COUNT_STEP_MAX}, True),
    ],
)
def test_a_count_far_ahead_of_ours_is_not_taken(changes: dict[str, int], taken: bool) -> None:
    node = Net(A, B)[A]
    node.observe(ENGINE, f.Verdict.HEALTHY, 0.0)
    receive(node, B, fact(draining=True)._replace(**changes))  # type: ignore[arg-type]
    assert node.of(ENGINE).counted is taken
    assert node.counters.facts_absurd == (not taken)
    assert (node.of(ENGINE).generation > 1) is taken


def test_counts_that_peers_drove_to_their_end_still_travel() -> None:
    """The next order to drain made one that no message holds: all facts beside it were lost with it, for ever."""
    net = Net(A, B)
    for node in (A, B):
        net[node].observe(ENGINE, f.Verdict.HEALTHY, 0.0)
    for count in (*range(1, f.COUNT_MAX, f.COUNT_STEP_MAX), f.COUNT_MAX):
        receive(net[A], B, fact(count, drain_clock=count, draining=False))
    assert net[A].of(ENGINE).drain_clock == net[A].of(ENGINE).generation == f.COUNT_MAX
    assert net[A].generation_of(ENGINE, 5) > f.COUNT_MAX
    net[A].restarted(ENGINE, 1.0)
    net[A].drain(ENGINE, draining=True)
    CODEC.encode(f.Facts(tuple(net[A].known(1.0))))


def test_what_is_ill_is_a_doubt_that_passes() -> None:
    node = Net(A, B, C)[A]
    node.observe(ENGINE, f.Verdict.HEALTHY, 0.0)
    receive(node, B, fact(verdict=2, draining=False), now=1.0)
    assert node.changes[-1] == f.Doubt(ENGINE, 1)
    receive(node, C, fact(verdict=3, draining=False), now=2.0)
    assert node.changes[-1] == f.Doubt(ENGINE, 2)
    assert node.doubts.count(ENGINE, 4.5) == 1
    assert node.doubts.count(ENGINE, 5.5) == 0


def test_an_observer_that_reports_it_well_again_withdraws_its_doubt_and_heals_nothing() -> None:
    node = Net(A, B)[A]
    node.observe(ENGINE, f.Verdict.UNHEALTHY, 0.0)
    receive(node, B, fact(verdict=2, draining=False), now=1.0)
    node.changes.clear()
    receive(node, B, fact(verdict=1, draining=False), now=1.5)
    assert node.doubts.count(ENGINE, 1.5) == 0
    assert not node.changes


def test_facts_of_more_backends_than_there_can_be_are_dropped_and_counted() -> None:
    node = Net(A, B)[A]
    many = tuple(f.Fact(key, 1, 0.0, 1, False, 0) for key in range(5000))
    receive(node, B, *many)
    assert node.counters.dropped == 5000 - 4096


def test_a_new_backend_finds_room_however_many_there_were_in_the_life_of_the_cluster() -> None:
    """Nobody counted the backends of a cluster whose engines come with a new address each time, after 4096 of them."""
    net = Net(A, B)
    now = 0.0
    for first in range(0, BACKENDS_MAX + 2000, 1000):
        now += 1.0
        for backend in range(first, first + 1000):
            for node in (A, B):
                net[node].observe(backend, f.Verdict.HEALTHY, 1.0)
        net.until(now)
        assert all(net[node].of(backend).counted for node in (A, B) for backend in range(first, first + 1000))
        for backend in range(first, first + 1000):
            for node in (A, B):
                net[node].left(backend, now)
    assert len(net[A].backends) == BACKENDS_MAX


def test_our_own_backends_always_have_room_and_are_never_dropped_for_those_of_others() -> None:
    node = Net(A, B)[A]
    node.observe(ENGINE, f.Verdict.HEALTHY, 1.0)
    receive(node, B, *[f.Fact(key, 1, 0.0, 1, False, 0) for key in range(100, 100 + BACKENDS_MAX)], now=1.0)
    assert (len(node.backends), node.counters.dropped) == (BACKENDS_MAX, 1)
    node.observe(OTHER, f.Verdict.HEALTHY, 1.0)
    receive(node, B, *[f.Fact(key, 1, 0.0, 1, False, 0) for key in range(9000, 9000 + BACKENDS_MAX)], now=9.0)
    assert {ENGINE, OTHER} <= {fact.backend for fact in node.known(9.0)}
    assert len(node.backends) == BACKENDS_MAX


def test_what_longer_nobody_had_takes_the_place_of_no_later_fact() -> None:
    node = Net(A, B)[A]
    receive(node, B, *[f.Fact(key, 1, 0.0, 1, False, 0, 10) for key in range(BACKENDS_MAX)], now=100.0)
    receive(node, B, f.Fact(9001, 1, 0.0, 1, False, 0, 11), now=100.0)
    assert not node.of(9001).counted
    receive(node, B, f.Fact(9002, 1, 0.0, 1, False, 0, 9), now=100.0)
    assert node.of(9002).counted
    assert node.counters.dropped == 2


def test_whatever_order_they_come_in_the_one_that_no_node_had_for_longest_makes_room() -> None:
    """The first that had come went, though a node had it just now; or nothing did, and the later fact was dropped."""
    node, others = Net(A, B)[A], range(100, 99 + BACKENDS_MAX)
    receive(node, B, *[f.Fact(key, 1, 0.0, 1, False, 0, 10) for key in others], now=100.0)
    receive(node, B, f.Fact(9001, 1, 0.0, 1, False, 0, 60), now=100.0)
    receive(node, B, f.Fact(9002, 1, 0.0, 1, False, 0, 30), now=100.0)
    assert (node.of(9001).counted, node.of(9002).counted) == (False, True)
    node.observe(ENGINE, f.Verdict.HEALTHY, 0.0)
    receive(node, B, f.Fact(9003, 1, 0.0, 1, False, 0, 40), now=100.0)
    assert (node.of(9002).counted, node.of(9003).counted, node.counters.dropped) == (False, False, 3)
    assert {fact.backend for fact in node.known(100.0)} == {*others, ENGINE}


def test_facts_of_a_backend_that_no_registry_has_end_on_all_nodes_though_they_are_repeated() -> None:
    net = Net(A, B, C)
    net[A].observe(ENGINE, f.Verdict.HEALTHY, 1.0)
    net[A].observe(OTHER, f.Verdict.HEALTHY, 1.0)
    net.until(1.0)
    net[A].left(OTHER, 2.0)
    for step in range(int(f.KEPT_S / f.REPAIR_INTERVAL_S) - 1):
        net.until(2.0 + step * f.REPAIR_INTERVAL_S)
    assert [len(net[node].backends) for node in (A, B, C)] == [2, 2, 2]
    for step in range(6):
        net.until(2.0 + f.KEPT_S + step * f.REPAIR_INTERVAL_S)
    assert [[fact.backend for fact in net[node].known(4000.0)] for node in (A, B, C)] == [[ENGINE]] * 3


def test_what_drains_is_repeated_to_everybody() -> None:
    """Whoever adds it must know; all else is repeated to one peer at a time."""
    outbox: list[Outgoing] = []
    node = f.BackendFacts(outbox, Random(1), 0.0)
    for backend in (ENGINE, OTHER):
        node.observe(backend, f.Verdict.HEALTHY, 1.0)
    node.drain(ENGINE, draining=True)
    node.met(alike([B, C]), 0.0)
    node.tick(0.1)
    outbox.clear()
    node.tick(0.1 + 2 * f.REPAIR_INTERVAL_S)
    sent = [(each.session, len(each.message.facts)) for each in outbox if isinstance(each.message, f.Facts)]
    assert {(B.session, 1), (C.session, 1)} <= set(sent)


def test_a_backend_that_is_ours_again_is_counted_by_what_was_known_of_it() -> None:
    net = Net(A, B)
    for node in (A, B):
        net[node].observe(ENGINE, f.Verdict.HEALTHY, 1.0)
    net[A].restarted(ENGINE, 2.0)
    net.until(1.0)
    net[A].left(ENGINE, 2.0)
    net[A].observe(ENGINE, f.Verdict.HEALTHY, 2.0)
    assert net[A].of(ENGINE).counted
    assert net[A].of(ENGINE).generation == 2


def test_of_a_peer_s_requests_no_more_wait_than_are_in_flight() -> None:
    node = Net(A, B)[A]
    node.receive(B, Loads(1, ((ENGINE, 7, 9, 500),)), 1.0)
    assert node.loads.of(ENGINE) == Load(7, 7, 500)


def test_a_node_that_was_sent_its_peers_counts_too_early_asks_for_them() -> None:
    """By then they have answered it once. Without a count no claim is taken, so it must not wait for the repair."""
    net = Net(A, B)
    for node in (A, B):
        net[node].observe(ENGINE, f.Verdict.HEALTHY, 1.0)
    net.until(0.0)
    assert net[A].of(ENGINE).counted
    late = net.start(A.session).machine  # all that came before it could read is lost
    late.observe(ENGINE, f.Verdict.HEALTHY, 1.0)
    net.until(0.1)
    assert not late.of(ENGINE).counted, "B has answered A before"
    assert late.wake_at == 0.1 + f.ASK_S
    net.until(0.1 + f.ASK_S)
    assert late.of(ENGINE).counted
    assert late.wake_at > 0.1 + 2 * f.ASK_S, "it asks no more"


def test_who_has_no_answer_asks_ever_more_seldom() -> None:
    outbox: list[Outgoing] = []
    alone = f.BackendFacts(outbox, Random(1), 0.0)
    alone.observe(ENGINE, f.Verdict.HEALTHY, 1.0)
    alone.met(alike([B]), 0.0)
    for tick in range(1200):
        alone.tick(0.1 * tick)
    questions = [each for each in outbox if isinstance(each.message, f.Facts) and not each.message.facts]
    assert 10 < len(questions) < 25
