"""What a node keeps across a restart, and what it makes of it."""

from __future__ import annotations

from random import Random

import pytest

from cluster.scenario import Cluster
from cluster.simulation.sim_node import KEY, SimRouter
from cluster.simulation.sim_router import Birth
from ranvier_py.core.mesh.membership.own_record import EPOCH_MAX
from ranvier_py.core.mesh.mesh_values import Peer
from ranvier_py.core.mesh.wire.keyring import insecure_ring
from ranvier_py.core.mesh.wire.messages import Push, Record, State, Update
from ranvier_py.core.peer.router_peer import STATE_HEAD, STATE_MAGIC, GossipSettings, RouterPeer, SavedState, read_state
from ranvier_py.core.routing.backend_state.signed_commands import Command, Commands, signature_of

NOON_MS = 1_795_262_400_000
URL = "http://10.0.0.1:8000"
ADMIN_KEY = b"k" * 32
PEER = Peer(9, ("10.0.0.9", 7946))


def started(state: bytes = b"", wall_ms: int = NOON_MS, number: int = 1) -> RouterPeer:
    cluster = Cluster(nodes=1, engines=1)
    name, host, port = f"n{number}", f"10.0.0.{number}", 7946
    birth = Birth(0, name, (host, port), "seed", 0.0, wall_ms, state, (), "test", cluster, (URL,))
    settings = GossipSettings(
        name, host, port, number, fingerprint_key=KEY, wall_ms=wall_ms, state=state, admin_key=ADMIN_KEY
    )
    return RouterPeer(SimRouter(birth, Random(1)).router, settings, insecure_ring(), Random(1), 0.0)


def test_a_run_begins_with_a_higher_epoch_than_the_last_one() -> None:
    before = started()
    assert started(before.state(), wall_ms=0).me.epoch == before.me.epoch + 1


@pytest.mark.parametrize("epoch", [EPOCH_MAX, 2**64 - 1])
def test_an_epoch_that_a_peer_drove_to_its_end_is_given_up_with_the_run(epoch: int) -> None:
    """One more would be refused by everybody, run for run."""
    before = started()
    assert read_state(before.state()).records == ()
    spoilt = STATE_HEAD.pack(STATE_MAGIC, epoch, 0) + before.state()[STATE_HEAD.size :]
    assert started(spoilt).me.epoch == NOON_MS


def test_a_command_from_before_a_later_one_is_refused_after_a_restart() -> None:
    before = started()
    added, removed = (Command(clock, NOON_MS, verb, URL, 1.0, "", b"") for clock, verb in ((1, "add"), (2, "remove")))
    added, removed = (each._replace(signature=signature_of(ADMIN_KEY, each)) for each in (added, removed))
    before.features.signed_commands.receive(PEER, Commands((added, removed)), 0.0)
    after = started(before.state())
    after.features.signed_commands.receive(PEER, Commands((added,)), 0.0)
    assert after.features.signed_commands.take_new() == []


def test_a_session_that_lost_its_name_is_no_peer_any_more() -> None:
    """Membership forgot it without a word to the operator, and the machines above went on sending to it."""
    peer = started()
    schema = peer.me.schema
    first, second = (Record(f"n{each}", each, each, 0, State.ALIVE, f"10.0.0.{each}", 7946, schema) for each in (8, 9))
    for record in (first, second):
        peer.members.proved(record, 1.0)
    peer.tick(1.0)
    peer.tick(2.0)
    assert set(peer.live_members.sharing) == {8, 9}
    claim = Push((Update(first._replace(name="n9", incarnation=1)),))
    peer.members.receive(PEER, claim, 2.0)
    peer.tick(2.0)
    peer.tick(3.0)
    assert set(peer.live_members.sharing) == {9}


def test_a_state_that_is_cut_off_or_something_else_is_none() -> None:
    whole = started()
    whole.features.signed_commands.give("add", URL, 1.0, "", 0.0)
    state = whole.state()
    assert len(read_state(state).floors) == 1
    for end in range(STATE_HEAD.size):
        assert read_state(state[:end]) == SavedState()
    assert read_state(state[: STATE_HEAD.size + 8]) == SavedState()
    assert read_state(b"RGS1" + state[4:]) == SavedState()
