"""Joining, leaving, restarting, dying: the life of a member, on small clusters."""

from __future__ import annotations

import pytest

from ranvier_py.core.mesh.membership.members import Membership
from ranvier_py.core.mesh.membership.profile import LAN, WAN
from ranvier_py.core.mesh.mesh_values import Peer
from ranvier_py.core.mesh.wire.messages import Message, Ping, State
from tests.core.mesh.membership.small_cluster import Cluster, Host, grown


def known_to_all(hosts: list[Host], what: str, name: str) -> float:
    """When the last of these hosts was reported this. Fails if one was not."""
    times = [host.saw(what, name) for host in hosts]
    assert all(times), f"{sum(not seen for seen in times)} of {len(hosts)} never saw that {name} {what}"
    return max(seen[0] for seen in times)


# --- joining ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 10, 40])
def test_a_cluster_forms_around_one_seed(size: int) -> None:
    cluster = Cluster(size)
    first = cluster.start("n0")
    hosts = [first, *(cluster.start(f"n{number}", join=[first]) for number in range(1, size))]
    assert cluster.until(lambda: cluster.agree(hosts), 3.0) <= 3.0
    cluster.run(3.0)
    assert all(len(host.known) == size - 1 for host in hosts), "each session is proved to each"
    assert all(host.members.size() == size for host in hosts)
    assert not any(host.saw("suspected") for host in hosts)


def test_a_cluster_forms_although_every_tenth_packet_is_lost() -> None:
    cluster = Cluster(5, loss=0.1)
    first = cluster.start("n0")
    hosts = [first]
    for number in range(1, 12):
        hosts.append(cluster.start(f"n{number}", join=[first]))
        while not hosts[-1].known:  # discovery goes on until somebody answers
            cluster.run(0.5)
            cluster.greet(hosts[-1], first.address)
    assert cluster.until(lambda: cluster.agree(hosts), 5.0) <= 5.0


def test_two_clusters_become_one_when_one_node_meets_one_node() -> None:
    cluster = Cluster(1)
    sides = [[cluster.start(f"n{10 * side}")] for side in (1, 2)]
    for side, hosts in enumerate(sides, 1):
        hosts += [cluster.start(f"n{10 * side + number}", join=[hosts[0]]) for number in range(1, 6)]
    cluster.run(10.0)
    assert all(cluster.agree(hosts) for hosts in sides)
    cluster.greet(sides[0][3], sides[1][2].address)
    assert cluster.until(lambda: cluster.agree([*sides[0], *sides[1]]), 3.0) <= 3.0


def test_twenty_that_join_through_one_are_all_served() -> None:
    """nearcore#2512: a few that joined stalled whom they joined through."""
    cluster, hosts = grown(3, 3)
    new = [cluster.start(f"n{number}", join=[hosts[0]]) for number in range(10, 30)]
    assert cluster.until(lambda: cluster.agree([*hosts, *new]), 2.0) <= 2.0


def test_nodes_of_other_schemas_are_members_like_any() -> None:
    """CASSANDRA-21132: a cluster-wide gate kept even equal nodes from starting."""
    cluster = Cluster(1)
    hosts = [cluster.start("n0")]
    for number, schema in enumerate((7, 8, 9), 1):
        host = cluster.start(f"n{number}", join=[hosts[0]])
        host.members.table.identity.record = host.members.me._replace(schema=schema)
        hosts.append(host)
    cluster.until(lambda: cluster.agree(hosts), 3.0)


def test_a_lonely_node_keeps_its_timers_and_recovers() -> None:
    """foca#15, scylladb#403: with nobody left, the timers were not armed again."""
    cluster = Cluster(4)
    a, b = cluster.grow(2)
    cluster.crash(b)
    cluster.run(60.0)
    assert a.state_of(b) is State.DEAD
    assert cluster.now <= a.members.wake_at <= cluster.now + 4.0
    new = cluster.start("n9", join=[a])
    cluster.until(lambda: cluster.agree([a, new]), 1.0)
    cluster.crash(new)
    cluster.until(lambda: a.state_of(new) is State.DEAD, 15.0)


def test_a_member_known_by_report_only_is_greeted_until_it_proves_itself() -> None:
    """So that its first probe is not its first contact."""
    cluster, hosts = grown(4, 2)
    new = cluster.start("n9")
    cluster.block([new], [hosts[1]])
    cluster.greet(new, hosts[0].address)
    cluster.run(1.0)
    member = hosts[1].view(new)
    assert not member.proved
    cluster.heal()
    cluster.run(1.5)
    assert [member.proved for member in hosts[1].members.everybody()] == [True] * 4
    assert new.session in hosts[1].known


def test_a_member_known_by_report_alone_dies() -> None:
    """The last one who had met it is gone, too: nobody else would notice."""
    cluster, hosts = grown(4, 2)
    new = cluster.start("n9")
    cluster.block([new], hosts[1:])
    cluster.greet(new, hosts[0].address)
    cluster.run(0.5)
    assert all(host.state_of(new) is State.ALIVE for host in hosts)
    cluster.crash(new)
    cluster.crash(hosts[0])
    cluster.until(lambda: all(host.state_of(new) is State.DEAD for host in hosts[1:]), 15.0)


# --- dying ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 10])
def test_a_crash_is_known_to_all_within_seconds(size: int) -> None:
    """Also in the smallest clusters, where there is one relay or none (memberlist#350)."""
    found = []
    for seed in range(8):
        cluster, hosts = grown(size, seed)
        cluster.run(10.0 + seed / 8)
        victim = hosts[seed % size]
        cluster.crash(victim)
        at = cluster.now
        cluster.run(6.0)
        found.append(known_to_all(cluster.up(), "died", victim.name) - at)
        assert all(len(host.saw("died")) == 1 for host in cluster.up())
    assert sorted(found)[4] <= 2.6
    assert max(found) <= 4.0


def test_ten_nodes_that_lose_a_tenth_notice_a_crash_in_three_seconds_and_kill_nobody() -> None:
    """The figure to hold. Streams lose as much as datagrams here, so it is more than a tenth."""
    found = []
    for seed in range(7):
        cluster, hosts = grown(10, seed, loss=0.1, streams_lose=True)
        cluster.run(40.0 + seed / 7)
        victim = hosts[seed]
        cluster.crash(victim)
        at = cluster.now
        cluster.run(20.0)
        assert not any(host.saw("died", other.name) for host in hosts for other in hosts if other is not victim)
        found.append(known_to_all(cluster.up(), "died", victim.name) - at)
    assert sorted(found)[3] <= 2.7
    assert max(found) <= 4.5


def test_a_refused_send_is_a_failed_ping() -> None:
    """memberlist#242: an isolated node took errors for success and saw everybody alive."""
    cluster, hosts = grown(4, 3)
    alone = hosts[0]
    members: Membership = alone.members
    cluster.block([alone], hosts[1:])
    ended = cluster.now + 25.0
    while cluster.now < ended:
        for host in hosts[1:]:
            members.unreachable(host.address, cluster.now)
        cluster.after_call(alone)
        cluster.run(0.1)
    assert all(alone.state_of(host) is State.DEAD for host in hosts[1:])
    assert members.statistics().sends_failed > 0


def test_the_dead_of_the_wan_profile_are_found_in_its_time() -> None:
    cluster = Cluster(2, profile=WAN, delay_s=0.1)
    hosts = cluster.grow(5, settle_s=20.0)
    cluster.crash(hosts[0])
    took = cluster.until(lambda: all(host.state_of(hosts[0]) is State.DEAD for host in hosts[1:]), 120.0, step_s=1.0)
    assert took >= 30.0, "mult 6 * 5 s at least"
    assert not any(host.saw("died", other.name) for host in hosts[1:] for other in hosts[1:])


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_whoever_leaves_is_gone_for_all_at_once_and_nobody_calls_it_dead() -> None:
    cluster, hosts = grown(8, 3, loss=0.1)
    leaver = hosts[3]
    others = [host for host in hosts if host is not leaver]
    leaver.members.leave(cluster.now)
    cluster.after_call(leaver)
    assert leaver.members.left_at <= cluster.now + 3.0
    assert cluster.until(lambda: cluster.agree(others), 1.5) <= 1.5
    cluster.run(20.0)
    assert all(host.state_of(leaver) is State.LEFT for host in others)
    assert not any(host.saw("died") or host.saw("suspected", leaver.name) for host in others)


def test_a_node_that_leaves_keeps_answering_and_stops_asking() -> None:
    cluster, hosts = grown(3, 3)
    leaver = hosts[0]
    leaver.members.leave(cluster.now)
    cluster.after_call(leaver)
    asked: list[Message] = []
    answered: list[Message] = []

    def watch(host: Host, peer: Peer, message: Message) -> None:
        if isinstance(message, Ping):
            (answered if host is leaver else asked if peer.session == leaver.session else []).append(message)

    cluster.watch = watch
    cluster.greet(hosts[1], leaver.address)
    for _ in range(20):
        leaver.members.receive(Peer(hosts[1].session, hosts[1].address), Ping(1), cluster.now)
        assert leaver.outbox
        leaver.outbox.clear()
        cluster.run(0.5)
    assert asked == []
    assert leaver.members.me.state is State.LEFT


@pytest.mark.parametrize("epoch", [0, 1, 9])
def test_a_node_that_leaves_and_comes_back_at_once_is_a_member(epoch: int) -> None:
    """consul#13379: stuck in «leaving» after a quick return."""
    cluster, hosts = grown(5, 3)
    hosts[2].members.leave(cluster.now)
    cluster.after_call(hosts[2])
    cluster.run(0.3)
    hosts[2] = cluster.restart(hosts[2], epoch=epoch, join=[hosts[0]])
    cluster.until(lambda: cluster.agree(hosts), 2.0)
    cluster.run(20.0)
    assert cluster.agree(hosts)


def test_an_accusation_does_not_turn_leaving_into_staying() -> None:
    cluster, hosts = grown(4, 3)
    leaver = hosts[1]
    cluster.cut([leaver], [hosts[0], hosts[2], hosts[3]])
    cluster.run(1.5)
    leaver.members.leave(cluster.now)
    cluster.after_call(leaver)
    cluster.heal()
    cluster.run(3.0)
    assert leaver.members.me.state is State.LEFT
    assert all(leaver.session not in [member.session for member in host.members.alive()] for host in hosts)


# --- restarting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 1, 2, 1000])
@pytest.mark.parametrize("down_s", [0.05, 1.0, 10.0])
def test_a_restarted_node_is_a_new_member_whatever_its_epoch(epoch: int, down_s: float) -> None:
    """weave#2085: faster than its death was noticed. scylladb#5801: with a lower number than before."""
    cluster, hosts = grown(5, 7)
    old = hosts[2]
    cluster.crash(old)
    cluster.run(down_s)
    hosts[2] = new = cluster.restart(old, epoch=epoch, join=[hosts[0]])
    assert cluster.until(lambda: cluster.agree(hosts), 2.0) <= 2.0
    assert new.members.me.epoch >= epoch
    assert all(old.session not in host.known for host in hosts), "the planes above were reported to forget it"
    assert all(host.view(old) is None for host in hosts)
    cluster.run(30.0)
    assert cluster.agree(hosts)
    assert not any(host.saw("died", new.name) for host in hosts if down_s < 2.0)


def test_a_restart_into_many_answers_ends_above_all_of_them() -> None:
    """scylladb#5801: the first of several answers decided, and it was the oldest."""
    cluster = Cluster(2)
    new = cluster.start("n0", epoch=3)
    for number, epoch in enumerate((5, 40, 12, 39, 2), 1):
        cluster.start(f"n{number}", join=[]).members.proved(
            new.members.me._replace(session=77, epoch=epoch), cluster.now
        )
    for host in cluster.hosts[1:]:
        cluster.greet(new, host.address)
    cluster.until(lambda: cluster.agree(cluster.hosts), 3.0)
    assert new.members.me.epoch == 41
    assert new.name == "n0"


def test_a_mass_restart_with_low_epochs_finds_itself_again() -> None:
    """memberlist#311: 4500 nodes, some of them invisible for hours afterwards."""
    cluster, hosts = grown(16, 4, loss=0.05)
    for host in hosts:
        for _ in range(5):
            host.members.table.identity.outbid(host.members.me)  # a life with many refutations
    cluster.run(5.0)
    for position, host in enumerate(hosts):
        hosts[position] = cluster.restart(host, epoch=0)
        cluster.run(0.3)
        cluster.greet(hosts[position], hosts[position - 1].address)
        cluster.greet(hosts[position], hosts[(position + 7) % 16].address)
    cluster.until(lambda: cluster.agree(hosts), 10.0)
    cluster.run(20.0)
    assert cluster.agree(hosts)


def test_rolling_restarts_leave_no_trace() -> None:
    cluster, hosts = grown(6, 6, loss=0.05)
    for turn in range(18):
        position = turn % 6
        cluster.crash(hosts[position])
        cluster.run(0.2 + turn % 3)
        hosts[position] = cluster.restart(
            hosts[position], epoch=turn % 4, join=[hosts[(position + 1) % 6], hosts[(position + 2) % 6]]
        )
        cluster.run(2.0)
    cluster.until(lambda: cluster.agree(hosts), 10.0)
    for host in hosts:
        statistics = host.members.statistics()
        assert (statistics.alive, statistics.dead) == (5, 0), "one entry for each name"


def test_a_thousand_restarts_do_not_grow_the_tables() -> None:
    """foca#31, akka-core#23318: identities and version vectors that grew with every restart."""
    cluster, hosts = grown(3, 1)
    keeper = hosts[0].members
    forgotten = 0
    for epoch in range(1, 1001):
        record = hosts[1].members.me._replace(session=10_000 + epoch, epoch=epoch + 1)
        keeper.proved(record, cluster.now)
        forgotten += len(keeper.gone)
        keeper.gone.clear()
        keeper.changes.clear()
        hosts[0].outbox.clear()
    assert forgotten == 1000
    statistics = keeper.statistics()
    assert (statistics.alive, statistics.dead, statistics.supplanted) == (2, 0, 1000)
    assert statistics.queued <= 3


def test_ten_years_of_uptime_do_not_keep_a_node_from_restarting() -> None:
    """scylladb#5164, CASSANDRA-10969: an epoch too far ahead was refused after a year."""
    cluster, hosts = grown(3, 1)
    ten_years_ms = 10 * 365 * 86_400_000
    hosts[1] = cluster.restart(hosts[1], epoch=ten_years_ms, join=[hosts[0]])
    cluster.until(lambda: cluster.agree(hosts), 2.0)
    hosts[1] = cluster.restart(hosts[1], epoch=5, join=[hosts[0]])
    cluster.until(lambda: cluster.agree(hosts), 2.0)
    assert hosts[1].members.me.epoch == ten_years_ms + 1


def test_a_node_finds_its_cluster_by_what_it_remembered() -> None:
    """serf#333: the snapshot held only the living, and nobody was found again."""
    cluster, hosts = grown(4, 2)
    cluster.crash(hosts[1])
    cluster.run(10.0)
    remembered = hosts[0].members.export()
    assert [record.session for record in remembered] == [hosts[2].session, hosts[3].session, hosts[1].session]
    for host in hosts:
        cluster.crash(host)
    back = cluster.start("n1", epoch=9, host=hosts[1].address[0])
    new = cluster.restart(hosts[0], epoch=9)
    new.members.remember(remembered, cluster.now)
    cluster.after_call(new)
    cluster.until(lambda: cluster.agree([back, new]), 1.0)


def test_everybody_is_known_with_the_ages_of_what_is_known() -> None:
    cluster, hosts = grown(4, 1)
    cluster.run(10.0)
    cluster.crash(hosts[3])
    cluster.run(10.0)
    known = {member.record.name: member for member in hosts[0].members.everybody()}
    assert {name: member.state for name, member in known.items()} == {
        "n1": State.ALIVE,
        "n2": State.ALIVE,
        "n3": State.DEAD,
    }
    n1, n3 = known["n1"], known["n3"]
    assert n1.rtt_s == pytest.approx(0.002, abs=0.001)
    assert cluster.now - n1.received_at < 3.0
    assert cluster.now - n3.received_at > 9.0
    assert 6.0 < cluster.now - n3.since < 9.0
    assert (n1.proved, n1.datagrams) == (True, True)
    statistics = hosts[0].members.statistics()
    assert (statistics.alive, statistics.dead, statistics.contacts, statistics.suspects) == (2, 1, 1, 0)
    assert statistics.deaths == 1
    assert LAN.probe_interval_s * statistics.probes <= 30.0
