"""Somebody who has no key, but records every packet and sends any of them to anybody, at any time, from anywhere."""

from __future__ import annotations

from collections import Counter
from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ranvier_py.core.mesh.contact.challenges import CHALLENGE_S
from ranvier_py.core.mesh.mesh_values import Plane
from tests.core.mesh.contact.contact_world import ELSEWHERE, Node, World
from tests.examples import examples

PLACES = [("10.0.0.1", 7946), ("10.0.0.2", 7946), ("10.0.0.3", 7946)]

who = st.integers(0, len(PLACES) - 1)
planes = st.sampled_from([Plane.DATAGRAM, Plane.DATAGRAM, Plane.PROBE])


class Adversary(RuleBasedStateMachine):
    """Three nodes that greet, ping, forget and restart, and the network in the hands of somebody else."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = 0
        self.world = World()
        self.gone: dict[int, float] = {}  # session -> when its run ended
        self.runs: list[Node] = []
        self.forged_bytes = 0
        self.seen = 0
        self.nodes = [self.start(index, 1) for index in range(len(PLACES))]

    def start(self, index: int, epoch: int) -> Node:
        self.sessions += 1
        node = self.world.put(Node(f"node-{index}", self.sessions, PLACES[index], epoch))
        self.runs.append(node)
        return node

    @rule(one=who, other=who, plane=planes)
    def greet(self, one: int, other: int, plane: Plane) -> None:
        self.nodes[one].sessions.greet(PLACES[other], self.world.now, plane)

    @rule(one=who, other=who, plane=planes)
    def ping(self, one: int, other: int, plane: Plane) -> None:
        self.nodes[one].ping(self.nodes[other], plane=plane)

    @rule(one=who, other=who)
    def forget(self, one: int, other: int) -> None:
        self.nodes[one].sessions.forget(self.nodes[other].session)

    @rule(one=who)
    def restart(self, one: int) -> None:
        old = self.nodes[one]
        self.gone[old.session] = self.world.now
        self.nodes[one] = self.start(one, old.record.epoch + 1)

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 3.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(fates=st.lists(st.booleans(), max_size=6))
    def deliver(self, fates: list[bool]) -> None:
        self.world.run(lost=lambda _: bool(fates) and fates.pop())

    @precondition(lambda self: self.world.log)
    @rule(data=st.data(), to=who, forged=st.booleans())
    def replay(self, data: st.DataObject, to: int, forged: bool) -> None:
        delivery = self.world.log[-1 - data.draw(st.integers(0, len(self.world.log) - 1))]
        receiver = self.nodes[to]
        if forged:
            self.forged_bytes += len(delivery.data)
        receiver.receive(delivery.data, ELSEWHERE if forged else delivery.source, delivery.plane, self.world.now)

    @invariant()
    def every_packet_is_taken_once_and_by_whom_it_was_meant_for(self) -> None:
        for node in self.runs:
            taken = [(opened.session, opened.counter) for _, opened in node.taken]
            assert not [packet for packet, times in Counter(taken).items() if times > 1]
            meant = {opened.receiver for _, opened in node.taken}
            assert meant <= {0, node.session}

    @invariant()
    def only_who_is_live_is_proved(self) -> None:
        """At most as long after its end as a number is good."""
        for node in self.runs:
            for session, proved_at in node.proved_at:
                assert proved_at <= self.gone.get(session, inf) + 2 * CHALLENGE_S

    @invariant()
    def nobody_is_flooded_who_never_asked(self) -> None:
        """What goes to an address that only ever was a forged source is no more than what was sent in its name."""
        assert sum(len(delivery.data) for delivery in self.world.log if delivery.to == ELSEWHERE) <= self.forged_bytes


Adversary.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestAdversary = Adversary.TestCase
