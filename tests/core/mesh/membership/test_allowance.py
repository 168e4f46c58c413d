"""Per peer: how much of the list of members one of them may change, and what becomes of the rest."""

from __future__ import annotations

import pytest

from ranvier_py.core.mesh.membership.merge_rules import BURST, BURST_PER_MEMBER, FILL_S, PEERS_MAX, SELF_COST, Allowance
from ranvier_py.core.mesh.wire.messages import Members as MemberList
from ranvier_py.core.mesh.wire.messages import Record, State
from tests.core.mesh.membership.lone_node import LoneNode
from tests.core.mesh.membership.small_cluster import grown, named, record_of


class Listener(LoneNode):
    """A node with three proved peers, 1 to 3, who has read their lists. Nothing is answered."""

    def __init__(self) -> None:
        self.peers = {number: record_of(f"n{number}", number) for number in (1, 2, 3)}
        super().__init__(*self.peers.values())
        for record in self.peers.values():
            self.gets(record, MemberList((record,), False))

    def reported(self, by: int, *records: Record, accuser: int = 0) -> None:
        for record in records:
            self.gets_updates(self.peers[by], record, accuser=accuser)

    @property
    def refused(self) -> int:
        return self.members.statistics().changes_refused


def strangers(count: int, first: int = 10_000) -> list[Record]:
    return [record_of(f"n{number}", number) for number in range(first, first + count)]


def test_a_peer_that_reports_ever_new_members_is_believed_up_to_its_bound_and_others_as_before() -> None:
    """Or one of them fills everybody's table, and each entry is greeted, probed, suspected and spread."""
    node = Listener()
    node.reported(1, *strangers(20_000))
    before = node.members.size()
    assert BURST < before < 2000
    assert node.refused == 20_000 - (before - 4)
    node.reported(2, record_of("n7", 7))
    assert node.members.size() == before + 1
    node.reported(1, record_of("n8", 8))
    assert node.members.size() == before + 1


def test_what_was_too_much_is_taken_when_it_is_reported_again_later() -> None:
    node = Listener()
    node.reported(1, *strangers(4000))
    late = record_of("n8", 8)
    node.reported(1, late)
    assert node.members.member(8) is None
    node.now += 1.0
    node.reported(1, late)
    assert node.members.member(8) is not None


def test_what_is_known_already_costs_nothing() -> None:
    node = Listener()
    known = strangers(100)
    for _ in range(200):
        node.reported(1, *known)
    assert node.refused == 0


def test_a_peer_that_refutes_without_end_is_believed_a_few_times_a_second() -> None:
    """Each refutation is spread by the whole cluster: one packet becomes thousands."""
    node = Listener()
    for second in range(20):
        for number in range(100):
            node.reported(1, node.peers[1]._replace(incarnation=100 * second + number + 1))
        node.now += 1.0
    believed = 2000 - node.refused
    most = BURST + BURST_PER_MEMBER * 4
    assert most / SELF_COST < believed <= (most + 20 * most / FILL_S) / SELF_COST
    member = node.known(1)
    assert member.live


def test_whoever_accuses_this_node_without_end_is_answered_a_few_times_a_second() -> None:
    """Each answer costs an incarnation, health and updates to everybody."""
    node = Listener()
    for _ in range(1000):
        node.reported(1, node.members.me._replace(state=State.SUSPECT), accuser=1)
    refutations = node.members.statistics().refutations
    assert refutations == node.members.me.incarnation < 50
    node.reported(2, node.members.me._replace(state=State.DEAD))
    assert node.members.me.incarnation == refutations + 1, "an accusation by somebody else is"


def test_the_operator_is_shown_a_flood_once() -> None:
    node = Listener()
    node.members.changes.clear()
    node.reported(1, *strangers(3000))
    for round_ in range(5):
        node.now += 0.1
        node.reported(1, *strangers(3000, 20_000 + 3000 * round_))
    warnings = [change.record.name for change in node.members.changes if change.what == "flooding"]
    assert warnings == ["n1"]


def test_a_list_read_while_joining_is_taken_whole() -> None:
    """It is what was asked for, and in a large cluster longer than any flood."""
    friend = record_of("n1", 1)
    node = LoneNode(friend)
    node.gets(friend, MemberList(tuple(strangers(3000)), False))
    assert node.members.size() == 3002


def test_a_name_is_not_taken_from_anybody_by_who_may_change_no_more() -> None:
    node = Listener()
    node.reported(1, *strangers(4000))
    node.reported(1, node.peers[1]._replace(name="n2", epoch=9))
    assert named(node.members, "n2") == node.members.member(2)
    assert node.members.member(2) is not None


def test_nobody_is_forgotten_for_a_name_by_who_may_change_no_more() -> None:
    """Whoever claims the name of a later session is forgotten: another can claim it for each member without end."""
    node = Listener()
    node.reported(1, *strangers(4000))
    node.reported(1, node.peers[2]._replace(name="n3", incarnation=1))
    assert node.members.member(2) is not None
    assert node.members.gone == []


def test_an_accusation_can_not_rename_the_accused() -> None:
    """At one incarnation only the state may differ; a name of somebody else would put two members under it."""
    node = Listener()
    node.reported(1, node.peers[2]._replace(name="n3", state=State.SUSPECT), accuser=1)
    accused = node.known(2)
    assert (accused.record.name, accused.state) == ("n2", State.SUSPECT)
    assert named(node.members, "n3") == node.members.member(3)


@pytest.mark.parametrize("size", [5, 30])
def test_no_honest_peer_ever_comes_near_its_bound(size: int) -> None:
    """A third of all packets lost, half of the cluster started again at once, and a cut that heals."""
    cluster, hosts = grown(size, size, loss=0.3)
    for host in hosts[size // 2 :]:
        cluster.restart(host, epoch=2, join=[hosts[0]])
    cluster.run(20.0)
    up = cluster.up()
    cluster.cut(up[: size // 2], up[size // 2 :])
    cluster.run(30.0)
    cluster.heal()
    cluster.run(20.0)
    assert [host.members.statistics().changes_refused for host in up] == [0] * size


def test_buckets_are_bounded_and_the_one_used_longest_ago_goes_first() -> None:
    allowance = Allowance()
    assert not [peer for peer in range(PEERS_MAX) if not allowance.spend(peer, BURST, 0, 0.0)]
    assert not allowance.spend(0, 1, 0, 0.0)
    assert allowance.spend(PEERS_MAX, 1, 0, 0.0)
    assert len(allowance) == PEERS_MAX
    assert not allowance.spend(0, 1, 0, 0.0), "used just now"
    assert allowance.spend(1, BURST, 0, 0.0), "forgotten"
