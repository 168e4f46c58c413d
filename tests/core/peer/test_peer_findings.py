"""What a node finds wrong among nodes, from its peer and from what it has noticed."""

from __future__ import annotations

import pytest

from ranvier_py.core.findings import Severity
from ranvier_py.core.mesh.wire.frame import PROTOCOL_VERSION
from ranvier_py.core.mesh.wire.messages import Record, State
from ranvier_py.core.peer.peer_findings import ALONE_S, AUDITS_DIFFERING, HELD_S, LOST_S, PeerSigns, peer_findings
from ranvier_py.core.peer.router_peer import RouterPeer
from tests.core.peer.test_gossip_state import started
from tests.core.peer.test_hostile_member import carry


def kinds(peer: RouterPeer, signs: PeerSigns, now: float, *, expected: bool = False, age_s: float = 1e6) -> list[str]:
    return [each.kind for each in peer_findings(peer, signs, now, expected=expected, age_s=age_s)]


@pytest.mark.parametrize(
    ("kind", "signs"),
    [
        ("peer_key", PeerSigns(stranger=("10.0.0.7", 7946), stranger_at=100.0)),
        ("clocks", PeerSigns(untimely_at=100.0)),
        ("peer_datagrams", PeerSigns(blocked_at=100.0)),
    ],
)
def test_what_a_node_has_noticed_is_named_for_a_while(kind: str, signs: PeerSigns) -> None:
    peer = started()
    assert kinds(peer, PeerSigns(), 100.0) == []
    assert kinds(peer, signs, 100.0) == [kind]
    assert kinds(peer, signs, 99.9 + HELD_S) == [kind]
    assert kinds(peer, signs, 100.1 + HELD_S) == []


def test_a_node_of_another_protocol_is_named_with_its_host() -> None:
    peer = started()
    peer.sessions.others.note("10.0.0.7", 1, 100.0)
    (found,) = peer_findings(peer, PeerSigns(), 101.0, expected=False, age_s=1e6)
    assert (found.kind, found.about, found.severity) == ("peer_protocol", "10.0.0.7", Severity.DEGRADED)


def test_a_node_that_should_have_peers_and_finds_none_is_named_after_its_start() -> None:
    peer = started()
    assert kinds(peer, PeerSigns(), 0.0, expected=True, age_s=ALONE_S) == []
    assert kinds(peer, PeerSigns(), 0.0, expected=True, age_s=ALONE_S + 1) == ["no_peer"]


def test_a_peer_that_died_degrades_the_cluster_for_ten_minutes() -> None:
    peer = started()
    record = Record("n2", 2, 1, 0, State.DEAD, "10.0.0.2", 7946, peer.me.schema)
    peer.members.table.roster.add(record, 100.0)
    for now, severity in ((101.0, Severity.DEGRADED), (100.0 + LOST_S, Severity.NOTICE)):
        (found,) = peer_findings(peer, PeerSigns(), now, expected=False, age_s=1e6)
        assert (found.kind, found.about, found.severity) == ("peer_lost", "n2", severity)


def test_a_peer_of_another_release_is_named_with_both() -> None:
    peer, other = started(), started(number=2)
    peer.sessions.about, other.sessions.about = (PROTOCOL_VERSION, "9.8.6"), (PROTOCOL_VERSION, "9.8.7")
    other.contact([(peer.me.host, peer.me.port)], 1.0)
    carry([peer, other], 1.0)
    (found,) = peer_findings(peer, PeerSigns(), 1.0, expected=False, age_s=1e6)
    assert (found.kind, found.about, found.severity) == ("peer_release", "n2", Severity.NOTICE)
    assert found.what == "peer n2 runs release 9.8.7, this node 9.8.6"


def test_tables_that_differ_once_are_no_finding_and_in_a_row_they_are() -> None:
    peer = started()
    counters = peer.features.routes.counters
    counters.audits_differing, counters.differing_buckets = AUDITS_DIFFERING - 1, 900
    assert kinds(peer, PeerSigns(), 0.0) == []
    counters.audits_differing = AUDITS_DIFFERING
    (found,) = peer_findings(peer, PeerSigns(), 0.0, expected=False, age_s=1e6)
    assert found.kind == "tables_differ"
    assert "900 of 4096" in found.what
