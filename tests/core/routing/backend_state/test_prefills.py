"""Nodes follow the long prompts that engines compute for their peers, before anything of them is proved."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from cluster.scenario import Cluster, Load, Scenario, Step
from cluster.simulation.sim_node import SimNode, sim_nodes
from cluster.simulation.sim_run import Run
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backend_state.prefills import (
    FROM_ONE_MAX,
    INTERVAL_S,
    KEPT_S,
    LIFE_S,
    PREFILL_FINGERPRINTS_MAX,
    PREFILLS_MAX,
    PrefillGossip,
    Prefills,
    SharedPrefill,
)
from ranvier_py.core.routing.backends import Outcome
from ranvier_py.core.routing.placement import Decision
from ranvier_py.core.routing.request_paths import CHAT_PATH
from ranvier_py.core.routing.speculation import SHARED_TOKENS_MIN, Prefill, Speculation
from tests.builders.machine_net import alike

DOCUMENT = "a word " * 2 * SHARED_TOKENS_MIN
SHORT = "a word"


class Lab:
    """Simulated nodes without traffic of their own, whose gossip is sealed as on a network."""

    def __init__(self, *steps: Step) -> None:
        size = Cluster(nodes=3, engines=3)
        scenario = Scenario("prefills", "of nodes", 300.0, cluster=size, load=Load(chats_per_s=0.0), steps=steps)
        self.run = Run(scenario, 5, sim_nodes())
        self.run.steps.plan()
        self.until(4.0)

    @property
    def now(self) -> float:
        return self.run.world.time.now

    def until(self, at_s: float) -> None:
        self.run.world.time.run(at_s)

    def pass_by(self, seconds: float) -> None:
        self.until(self.now + seconds)

    def node(self, number: int) -> SimNode:
        node = self.run.world.hosts[number].node
        assert isinstance(node, SimNode)
        return node

    def read(self, number: int, document: str, question: str) -> Prompt:
        messages = [{"role": "user", "content": document}, {"role": "user", "content": question}]
        body = json.dumps({"model": "m", "messages": messages, "stream": True}).encode()
        return self.node(number).router.read(CHAT_PATH, body)

    def send(self, number: int, document: str, question: str) -> Attempt:
        router = self.node(number).router
        prompt = self.read(number, document, question)
        attempt = router.start_attempt(prompt, self.placed(number, document, question), self.now)
        self.pass_by(INTERVAL_S + 0.05)
        return attempt

    def placed(self, number: int, document: str, question: str) -> Decision:
        router = self.node(number).router
        prompt = self.read(number, document, question)
        return router.place(prompt, router.find(prompt, self.now))

    def speculated(self) -> list[int]:
        """How many fingerprints of requests in flight each node knows."""
        return [self.node(number).router.holders.speculation.counters.fingerprints for number in range(3)]


def test_a_question_on_a_document_that_is_being_computed_for_a_peer_goes_to_the_same_engine() -> None:
    lab = Lab()
    attempt = lab.send(0, DOCUMENT, "what?")
    for number in (1, 2):
        decision = lab.placed(number, DOCUMENT, f"and {number}?")
        assert decision.backend == attempt.target.id
        assert decision.matched_tokens >= SHARED_TOKENS_MIN


def test_nothing_is_lost_between_the_prefill_and_the_routes_that_it_leaves() -> None:
    lab = Lab()
    attempt = lab.send(0, DOCUMENT, "what?")
    lab.node(0).router.first_token(attempt, lab.now)
    lab.node(0).router.finish_attempt(attempt, Outcome.SUCCESS, lab.now)
    for _ in range(20):
        lab.pass_by(KEPT_S / 5)
        assert lab.placed(1, DOCUMENT, "who?").backend == attempt.target.id
    assert lab.speculated() == [0, 0, 0]


def test_a_prefill_that_fails_is_followed_no_more() -> None:
    lab = Lab()
    attempt = lab.send(0, DOCUMENT, "what?")
    assert min(lab.speculated()) > 0
    lab.node(0).router.finish_attempt(attempt, Outcome.CONNECT_ERROR, lab.now)
    lab.pass_by(2 * INTERVAL_S + KEPT_S)
    assert lab.speculated() == [0, 0, 0]
    assert lab.placed(1, DOCUMENT, "who?").matched_tokens == 0


def test_prompts_that_are_computed_in_no_time_are_not_sent() -> None:
    lab = Lab()
    lab.send(0, SHORT, "what?")
    assert lab.speculated()[0] > 0
    assert lab.speculated()[1:] == [0, 0]


def test_a_peer_that_dies_takes_its_prefills_with_it() -> None:
    lab = Lab(Step(6.0, "kill", nodes=(0,)))
    lab.send(0, DOCUMENT, "what?")
    assert lab.speculated()[1] > 0
    lab.until(16.0)
    assert [lab.node(number).router.holders.speculation.counters.fingerprints for number in (1, 2)] == [0, 0]


def test_a_prefill_ends_with_its_backend_whose_id_is_another_ones_next() -> None:
    lab = Lab()
    attempt = lab.send(0, DOCUMENT, "what?")
    for number, registry in ((number, lab.node(number).router.registry) for number in (1, 2)):
        backend = registry.ids.known(lab.node(0).router.registry[attempt.target.id].url)
        if number == 1:
            registry.remove(backend.url)
            assert registry.add("http://10.9.9.9:1").id == backend.id
        else:
            registry.changes.restart(backend, "test", lab.now)
    lab.pass_by(0.5)
    assert lab.speculated()[0] > 0
    assert lab.speculated()[1:] == [0, 0]
    assert lab.placed(1, DOCUMENT, "who?").matched_tokens == 0


def test_a_prefill_whose_end_is_lost_is_forgotten_in_time() -> None:
    lab = Lab()
    lab.send(0, DOCUMENT, "what?")
    lab.pass_by(LIFE_S - 1.0)
    assert lab.speculated()[1] > 0
    lab.pass_by(2.0)
    assert lab.speculated()[1:] == [0, 0]


def test_what_names_no_process_of_an_engine_or_is_too_much_is_counted_and_claims_nothing() -> None:
    lab = Lab()
    peer = lab.node(1).peer
    sender, router = Peer(lab.node(0).session, ("10.9.9.9", 1)), lab.node(1).router
    backend = next(iter(router.registry))
    key, generation = peer.features.backends.name_of(backend.id, backend.generation) or (0, 0)
    unknown = SharedPrefill(1, 7, 0, bytes(range(1, 9)))
    peer.features.prefills.receive(sender, Prefills((unknown,), b""), lab.now)
    assert (router.holders.speculation.counters.void, len(router.holders.speculation)) == (1, 0)
    for number in range(FROM_ONE_MAX + 5):
        known = SharedPrefill(number, key, generation, (number + 1).to_bytes(8, "little"))
        peer.features.prefills.receive(sender, Prefills((known, known), b""), lab.now)
    assert len(router.holders.speculation) == FROM_ONE_MAX
    assert router.holders.speculation.counters.received == FROM_ONE_MAX
    peer.features.prefills.met(alike(()), lab.now)
    assert len(router.holders.speculation) == 0


def test_however_much_peers_compute_half_of_the_room_is_left_to_requests_of_ones_own() -> None:
    lab = Lab()
    speculation, backends = Speculation(capacity=20), lab.node(0).peer.features.backends
    gossip = PrefillGossip(speculation, backends, [], 0.0)
    backend = next(iter(lab.node(0).router.registry))
    key, generation = backends.name_of(backend.id, backend.generation) or (0, 0)
    begun = tuple(SharedPrefill(number, key, generation, bytes(range(16))) for number in range(20))
    gossip.receive(Peer(9, ("10.9.9.9", 1)), Prefills(begun, b""), lab.now)
    assert (speculation.counters.fingerprints, speculation.counters.void) == (10, 15)
    assert speculation.add([1, 2, 3], backend.id)


@pytest.mark.parametrize("count", [1, 128, 129, 5000])
def test_of_a_long_prompt_its_end_and_prefixes_all_along_are_sent(count: int) -> None:
    lab = Lab()
    outbox: list[Outgoing] = []
    speculation, peers = Speculation(), [Peer(9, ("10.9.9.9", 1))]
    gossip = PrefillGossip(speculation, lab.node(0).peer.features.backends, outbox, 0.0)
    gossip.met(alike(peers), 0.0)
    backend = next(iter(lab.node(0).router.registry))
    speculation.begun[1] = Prefill(backend.id, backend.generation, range(1, count + 1))
    gossip.tick(INTERVAL_S)
    message = outbox[0].message
    assert isinstance(message, Prefills)
    sent = memoryview(message.begun[0].fingerprints).cast("Q").tolist()
    assert sent[0] == 1
    assert len(sent) <= PREFILL_FINGERPRINTS_MAX
    steps = {after - before for before, after in pairwise(sent)}
    assert len(steps) <= 1
    assert count - sent[-1] <= max(steps, default=1)


def test_what_begins_beyond_the_bound_of_a_message_is_counted() -> None:
    lab = Lab()
    speculation = Speculation()
    gossip = PrefillGossip(speculation, lab.node(0).peer.features.backends, [], 0.0)
    gossip.met(alike([Peer(9, ("10.9.9.9", 1))]), 0.0)
    backend = next(iter(lab.node(0).router.registry))
    for number in range(PREFILLS_MAX + 3):
        speculation.begun[number] = Prefill(backend.id, backend.generation, [1, 2, 3])
    gossip.tick(1.0)
    assert (speculation.counters.shared, speculation.counters.unshared) == (PREFILLS_MAX, 3)
