"""Whatever somebody sends who has the cluster's key: no call raises, and the node stays what it is."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.mesh.mesh_values import Plane
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.peer.peer_view import peer_view
from ranvier_py.core.peer.router_peer import CODEC, RouterPeer
from tests.core.mesh.wire.wire_samples import messages
from tests.core.peer.test_gossip_state import started
from tests.examples import examples

SENT = st.tuples(messages, st.sampled_from([0.0, 0.3, 40.0]))  # each so many seconds after the one before


def carry(peers: list[RouterPeer], now: float) -> None:
    at = {(peer.me.host, peer.me.port): peer for peer in peers}
    while sends := [(peer, send) for peer in peers for send in peer.take()]:
        for source, (to, plane, data) in sends:
            if to in at:
                at[to].receive(data, (source.me.host, source.me.port), plane, now)


@settings(max_examples=examples(120))
@given(st.lists(SENT, max_size=30))
def test_no_message_of_a_member_raises_anything(script: list[tuple[Message, float]]) -> None:
    now, node, member = 1.0, started(), started(number=2)
    member.contact([(node.me.host, node.me.port)], now)
    carry([node, member], now)
    assert member.members.size() == 2
    for message, wait_s in script:
        now += wait_s
        packet = member.sealer.seal(Plane.BULK, node.me.session, *CODEC.encode(message))
        node.receive(packet, (member.me.host, 1), Plane.BULK, now)
        node.tick(now)
        node.take()
    assert peer_view(node, now)["state"] == "alive"
    assert len(node.state()) < 96 * 1024
