"""What one router shares with its peers: each machine is named once, and is called and gets its messages by that."""

from __future__ import annotations

from ranvier_py.core.mesh.wire.codec import MESH_KINDS
from ranvier_py.core.peer.router_peer import CODEC
from tests.core.peer.test_gossip_state import started


def test_each_machine_is_called_once_in_the_order_of_the_fields_and_takes_the_messages_that_it_declares() -> None:
    node = started()
    features, machines, taking = node.features, node.machines.called, node.machines.taking
    assert machines[:2] == [features.routes, features.backends]
    assert machines[-1] is features.transfers
    assert len({id(machine) for machine in machines}) == len(machines)
    assert features.facts not in machines, "its owner calls it"
    declared = {kind.make for kind in CODEC.kinds} - {kind.make for kind in MESH_KINDS}
    assert declared == taking.keys()
    assert {kind.make for machine in machines for kind in machine.kinds} == declared
