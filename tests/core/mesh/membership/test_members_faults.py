"""What networks, pauses and namesakes do to a cluster, and what must not come of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from cluster.network.links import UDP, Link
from ranvier_py.core.mesh.membership.own_record import EPOCH_MAX, INCARNATION_MAX, first_epoch
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.messages import Push, State, Update
from tests.core.mesh.membership.small_cluster import Cluster, Host, grown


def false_deaths(hosts: Sequence[Host]) -> int:
    """How often one of these, all alive, was declared dead by another."""
    names = {host.name for host in hosts}
    return sum(len(host.saw("died", name)) for host in hosts for name in sorted(names))


def quiet(cluster: Cluster, seconds: float = 10.0) -> dict[str, int]:
    """Messages sent in so many seconds."""
    cluster.sent.clear()
    cluster.run(seconds)
    return cluster.sent


# --- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "loss"), [(3, 0.1), (10, 0.1), (10, 0.3)])
def test_loss_kills_nobody(size: int, loss: float) -> None:
    """Rapid's criticism of memberlist#145. Streams lose as much as datagrams here, though real ones would be late."""
    for seed in range(3):
        cluster, hosts = grown(size, seed, loss=loss, streams_lose=True)
        cluster.run(60.0)
        assert false_deaths(hosts) == 0
        assert any(host.members.statistics().probes_helped for host in hosts)


def test_a_network_that_loses_a_third_is_probed_more_slowly_and_recovers() -> None:
    cluster, hosts = grown(6, 1, loss=0.35)
    cluster.run(60.0)
    assert all(host.members.statistics().strained for host in hosts)
    cluster.lose(0.0)
    cluster.run(120.0)
    assert not any(host.members.statistics().strained for host in hosts)
    assert false_deaths(hosts) == 0


def test_a_member_that_datagrams_do_not_reach_stays_a_member() -> None:
    """consul#19965, #2200: UDP blocked, TCP fine, and a line in the log for every probe."""
    cluster, hosts = grown(5, 2)
    cluster.block([hosts[2]], hosts, planes=UDP)
    cluster.run(60.0)
    assert not any(host.saw("died") for host in hosts)
    assert sum(len(host.saw("suspected")) for host in hosts) <= 2
    for host in (hosts[0], hosts[4]):
        member = host.view(hosts[2])
        assert not member.datagrams
        assert not host.members.statistics().strained, "one odd member is no lossy network"
    cluster.heal()
    cluster.run(30.0)
    assert all(host.members.member(hosts[2].session).datagrams for host in hosts if host is not hosts[2])  # type: ignore[union-attr]


def test_a_cluster_without_any_datagrams_works_on_streams() -> None:
    cluster, hosts = grown(6, 2, datagrams=False)
    sent = quiet(cluster, 30.0)
    assert not any(host.saw("suspected") for host in hosts)
    assert sent["Ping"] <= 6 * 30 * 2 + 6
    cluster.crash(hosts[0])
    cluster.until(lambda: cluster.agree(hosts[1:]), 4.0)


@pytest.mark.parametrize("deaf", [True, False])
def test_a_one_path_link_kills_nobody_else(deaf: bool) -> None:
    """One that can't be received is dead. One that can't hear takes the others for dead, which they must survive."""
    cluster, hosts = grown(6, 4)
    odd = hosts[1]
    others = [host for host in hosts if host is not odd]
    cluster.block(*(others, [odd]) if deaf else ([odd], others), one_direction=True)
    cluster.run(40.0)
    assert false_deaths(others) == 0
    assert deaf or all(host.state_of(odd) is State.DEAD for host in others)
    cluster.heal()
    cluster.until(lambda: cluster.agree(hosts), 20.0)


def test_two_that_cannot_reach_each_other_are_vouched_for_by_the_others() -> None:
    cluster, hosts = grown(6, 5)
    cluster.block(hosts[:1], hosts[1:2])
    cluster.run(60.0)
    assert not any(host.saw("died") for host in hosts)
    assert hosts[0].members.statistics().health == 0


# --- pauses and slowness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.7, 3.0, 10.0, 60.0])
def test_a_node_that_wakes_up_late_blames_nobody(seconds: float) -> None:
    """hazelcast#7408, #9005: whoever was stopped for a while kicked the others out when it went on."""
    cluster, hosts = grown(8, 6, loss=0.05)
    cluster.pause(hosts[1], seconds)
    cluster.run(seconds + 15.0)
    assert not hosts[1].saw("died")
    assert hosts[1].members.statistics().late_wakes == 1
    assert false_deaths([host for host in hosts if host is not hosts[1]]) == 0
    assert cluster.agree(hosts)
    assert hosts[0].saw("died", "n1") or seconds < 10.0


def test_suspicions_wait_while_a_node_does_not_run() -> None:
    """It suspects somebody, sleeps through the refutation, and must not bury it when it wakes up."""
    cluster, hosts = grown(5, 1)
    cluster.block(hosts[:1], hosts[1:])
    cluster.until(lambda: bool(hosts[0].saw("suspected")), 10.0, step_s=0.01)
    suspect = next(member.record.name for member in hosts[0].members.alive() if member.state is State.SUSPECT)
    hosts[0].paused_until = cluster.now + 30.0
    cluster.heal()
    cluster.run(29.9)
    cluster.later(0.1, lambda: cluster.resume(hosts[0]))
    cluster.run(5.0)
    assert not hosts[0].saw("died", suspect)
    assert cluster.agree(hosts)


def test_nodes_that_slept_at_the_same_time_do_not_believe_that_the_others_died() -> None:
    """What was claimed about them meanwhile waits in their sockets, and none of them was received lately."""
    cluster, hosts = grown(8, 6)
    for host in hosts[:4]:
        cluster.pause(host, 12.0)
    cluster.run(12.5)
    assert all(host.saw("died") for host in hosts[4:])
    cluster.run(10.0)
    assert not any(host.saw("died") for host in hosts[:4])
    assert cluster.agree(hosts)


def test_the_first_tick_may_come_late() -> None:
    """snapchain#889: the loop started long after the node said hello."""
    cluster, hosts = grown(3, 1)
    slow = cluster.start("n9", join=[hosts[0]])
    cluster.run(0.005)
    assert slow.known
    cluster.pause(slow, 8.0)
    cluster.run(20.0)
    assert cluster.agree([*hosts, slow])
    assert false_deaths(hosts) == 0


def test_a_few_slow_members_do_not_make_healthy_ones_die() -> None:
    """Lifeguard's experiment: members that stall now and then accuse the wrong ones. consul#916, #1335."""
    cluster, hosts = grown(16, 3, loss=0.1)
    slow, healthy = hosts[:3], hosts[3:]
    for turn in range(8):
        for host in slow:
            if cluster.now >= host.paused_until:
                cluster.pause(host, 1.0 + (turn % 3))
        cluster.run(5.0)
    assert false_deaths(healthy) == 0
    cluster.run(15.0)
    assert cluster.agree(hosts)


# --- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [4.0, 30.0, 300.0])
@pytest.mark.parametrize(("size", "left"), [(2, 1), (3, 1), (10, 5), (10, 1)])
def test_a_cut_heals_by_itself_in_seconds(size: int, left: int, seconds: float) -> None:
    """mimir#16254, weaviate#10698: nobody greeted the dead any more. No names, no seeds are asked here."""
    cluster, hosts = grown(size, 3, loss=0.02)
    cluster.cut(hosts[:left], hosts[left:])
    cluster.run(seconds)
    assert seconds < 10.0 or cluster.agree(hosts[left:])
    cluster.heal()
    assert cluster.until(lambda: cluster.agree(hosts), 5.0) <= 5.0


def test_one_greeting_from_outside_heals_a_cut_of_any_length() -> None:
    """The other way: names are resolved again, and one node greets one other. Contacts have long been forgotten."""
    cluster, hosts = grown(6, 3)
    cluster.cut(hosts[:3], hosts[3:])
    cluster.run(30.0)
    for host in hosts:
        for other in hosts:  # a day later
            host.members.table.contacts.remove(other.address)
    cluster.heal()
    cluster.run(20.0)
    assert not cluster.agree(hosts)
    cluster.greet(hosts[0], hosts[5].address)
    cluster.until(lambda: cluster.agree(hosts), 3.0)


def test_one_packet_from_the_dead_heals_a_cut() -> None:
    """The third way: it was held for dead on one side only, and goes on talking."""
    cluster, hosts = grown(4, 3)
    odd, accuser = hosts[0], hosts[1]
    death = Push((Update(odd.members.me._replace(state=State.DEAD)),))
    for host in hosts[2:]:
        member = host.view(odd)
        member.received_at = 0.0
        host.members.receive(Peer(accuser.session, accuser.address), death, cluster.now)
        assert host.state_of(odd) is State.DEAD
        host.outbox.clear()
        for other in hosts:
            host.members.table.contacts.remove(other.address)
    cluster.until(lambda: cluster.agree(hosts), 8.0)


def test_after_a_cut_has_healed_the_traffic_is_what_it_was() -> None:
    """foca#25: two nodes reported each other «you are dead» for ever."""
    cluster, hosts = grown(10, 4)
    cluster.run(40.0)
    before = sum(quiet(cluster).values())
    cluster.cut(hosts[:5], hosts[5:])
    cluster.run(30.0)
    cluster.heal()
    cluster.run(10.0)
    for host in hosts:
        host.changes.clear()
    after = quiet(cluster)
    assert sum(after.values()) <= 1.1 * before
    assert after.get("Push", 0) == 0
    assert not any(host.changes for host in hosts)


def test_an_address_taken_over_by_strangers_is_not_pestered() -> None:
    """akka-core#20846: the old cluster went on gossiping to a node that had moved to another one. Here it does not
    answer greetings, because its key or label is another."""
    cluster, hosts = grown(4, 4)
    cluster.crash(hosts[2])
    cluster.run(10.0)
    sent = quiet(cluster, 300.0)
    assert 100 <= sent["Hello"] <= 400, "about one a second, from all of them together"
    assert all(host.state_of(hosts[2]) is State.DEAD for host in cluster.up())


# --- namesakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_of_two_living_nodes_with_one_name_one_takes_another_and_all_is_quiet(epoch: int) -> None:
    """consul#2430: duplicates cost everybody half a million problems an hour."""
    for seed in range(3):
        cluster, hosts = grown(5, seed)
        twin = cluster.start("n2", epoch=epoch, host="10.9.9.9", join=[hosts[0]])
        everybody = [*hosts, twin]
        cluster.until(lambda c=cluster, e=everybody: c.agree(e), 6.0)  # type: ignore[misc]
        assert sorted(host.name == "n2" for host in (hosts[2], twin)) == [False, True]
        renamed = twin if hosts[2].name == "n2" else hosts[2]
        assert renamed.name.startswith("n2-")
        assert [len(host.saw("renamed")) for host in everybody] == [int(host is renamed) for host in everybody]
        cluster.run(35.0)
        assert quiet(cluster).get("Push", 0) == 0
        assert max(host.members.statistics().overtaken for host in everybody) <= 3


def test_three_with_one_name_end_with_three_names() -> None:
    cluster, hosts = grown(4, 2)
    twins = [cluster.start("n2", epoch=2, host=f"10.9.9.{number}", join=[hosts[0]]) for number in (1, 2)]
    everybody = [*hosts, *twins]
    cluster.until(lambda: cluster.agree(everybody), 10.0)
    assert len({host.name for host in everybody}) == 6


def test_two_nodes_at_one_address_poison_nobody() -> None:
    """consul#2430. The packets reach only one of them; the other is received, but can't be reached."""
    cluster, hosts = grown(6, 5)
    squatter = cluster.start("n77", host=hosts[3].address[0], join=[hosts[0]])
    cluster.run(30.0)
    fine = [host for host in hosts if host is not hosts[3]]
    assert false_deaths([*fine, squatter]) == 0
    assert cluster.agree([*fine, squatter]) or all(host.view(hosts[3]) is not None for host in fine)
    for host in fine:
        names = {member.record.name for member in host.members.alive() if member.state is State.ALIVE}
        assert names >= {other.name for other in (*fine, squatter) if other is not host}


# --- quiet ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [EPOCH_MAX, EPOCH_MAX - 1, 2**62])
@pytest.mark.parametrize("state", [State.ALIVE, State.SUSPECT, State.DEAD])
@pytest.mark.parametrize("about", ["session", "name"])
def test_no_record_whatever_its_epoch_keeps_a_node_out(epoch: int, state: State, about: str) -> None:
    """Not while it runs, and not when it comes back with the epoch that its state file has, whoever was last to say."""
    cluster, hosts = grown(4)
    victim, liar, *others = hosts
    claim = victim.members.me._replace(epoch=epoch, incarnation=INCARNATION_MAX, state=state)
    if about == "name":
        claim = claim._replace(session=2**64 - 1, host="10.9.9.9")
    for host in hosts:
        for plane in (Plane.DATAGRAM, Plane.BULK):
            cluster.carry(liar, Outgoing(host.address, host.session, plane, Push((Update(claim, liar.session),))))
    cluster.run(20.0)
    cluster.until(lambda: alive_everywhere(hosts, victim), 60.0)
    for _ in range(2):
        victim = cluster.restart(victim, epoch=first_epoch(victim.members.me.epoch, 1000), join=others, name="n0")
        hosts = [victim, liar, *others]
        cluster.until(partial(alive_everywhere, hosts, victim), 60.0)


def alive_everywhere(hosts: Sequence[Host], who: Host) -> bool:
    return all(host is who or host.state_of(who) is State.ALIVE for host in hosts) and who.members.size() >= len(hosts)


def test_an_idle_cluster_sends_little() -> None:
    """Two pings and two answers a second for each node, and a list now and then."""
    cluster = Cluster(4)
    cluster.grow(10)
    cluster.run(40.0)
    sent = quiet(cluster, 60.0)
    assert sent["Ping"] <= 10 * 60 * 2 + 10
    assert sent["Ack"] <= sent["Ping"]
    assert sent["Members"] <= 10 * 2 * 3 * 1.5
    assert set(sent) == {"Ping", "Ack", "Members"}


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_an_address_that_refuses_is_not_probed_by_all_who_were_asked_to_help() -> None:
    """A relay that probed it too would ask other relays: until all have, each with three helpers."""
    for seed in range(3):
        cluster = Cluster(seed)
        dead, *others = cluster.grow(30, 8.0)
        cluster.block([dead], others, Link(cut=True, refuse=True))
        cluster.crash(dead)
        cluster.run(6.0)
        assert all(host.saw("died", dead.name) for host in others)
        assert sum(host.members.statistics().relayed for host in others) < 150
