"""One probe: the ping, the help, the verdict, and what it says about this node."""

from __future__ import annotations

import pytest

from ranvier_py.core.mesh.membership.failure_detector import GREETINGS
from ranvier_py.core.mesh.membership.profile import LAN
from ranvier_py.core.mesh.membership.roster import MISSES_MAX
from ranvier_py.core.mesh.mesh_values import Outgoing, Plane
from ranvier_py.core.mesh.wire.messages import Ack, Nack, Ping, PingRequest, Push, Record, State, Update
from tests.core.mesh.membership.lone_node import ME, LoneNode
from tests.core.mesh.membership.small_cluster import record_of


class Prober(LoneNode):
    """A node with so many others, all proved, all silent unless the test says otherwise."""

    def __init__(self, others: int, *, seed: int = 1, proved: bool = True) -> None:
        self.others = {number: record_of(f"n{number}", number) for number in range(1, others + 1)}
        super().__init__(*(self.others.values() if proved else ()), seed=seed)
        for record in () if proved else self.others.values():
            self.gets_updates(record_of("n99", 99), record)
        self.forget_packets()

    def run(self, seconds: float) -> list[Outgoing]:
        """Probes sent from this time."""
        self.outbox.clear()
        super().run(seconds)
        sends = [out for out in self.outbox if isinstance(out.message, Ping | PingRequest)]
        self.outbox.clear()
        return sends

    def first_ping(self) -> Outgoing:
        while True:
            sends = self.run(0.01)
            if sends:
                return sends[0]

    def until_pinged(self) -> list[Outgoing]:
        """All that leaves with the next probe."""
        while not (sends := self.run(0.01)):
            pass
        return sends

    def answers(self, session: int, message: Ack | Nack | Push, plane: Plane = Plane.DATAGRAM) -> None:
        self.gets(self.others[session], message, plane)

    def answers_pings(self, sends: list[Outgoing], plane: Plane) -> None:
        """Those among these that went by that plane."""
        for out in sends:
            if isinstance(out.message, Ping) and out.plane is plane:
                self.answers(out.session, Ack(seq_of(out)), plane)

    def answers_on_stream(self, sends: list[Outgoing]) -> None:
        self.answers_pings(sends, Plane.PROBE)

    def answers_by_datagram(self, sends: list[Outgoing]) -> None:
        self.answers_pings(sends, Plane.DATAGRAM)

    def suspects(self) -> list[int]:
        return [member.session for member in self.members.alive() if member.state is State.SUSPECT]

    def suspect(self, record: Record) -> None:
        self.gets_updates(self.others[2], record._replace(state=State.SUSPECT), accuser=2)


def seq_of(out: Outgoing) -> int:
    assert isinstance(out.message, Ping | PingRequest)
    return out.message.seq


def test_a_probe_asks_directly_then_on_the_stream_and_three_others_all_in_one_interval() -> None:
    node = Prober(6)
    ping = node.first_ping()
    assert isinstance(ping.message, Ping)
    assert ping.plane is Plane.DATAGRAM
    assert node.run(0.17) == []
    help_wanted = node.run(0.05)
    again = [out for out in help_wanted if isinstance(out.message, Ping)]
    asked = [out for out in help_wanted if isinstance(out.message, PingRequest)]
    assert [(out.to, out.plane) for out in again] == [(ping.to, Plane.PROBE)]
    assert len({out.session for out in asked}) == 3
    assert ping.session not in {out.session for out in asked}
    assert all(seq_of(out) == seq_of(ping) for out in asked)
    assert node.suspects() == []
    node.run(0.3)
    assert node.suspects() == [ping.session]


@pytest.mark.parametrize("who", ["itself", "on the stream", "a relay"])
def test_any_answer_within_the_interval_ends_the_probe(who: str) -> None:
    node = Prober(5)
    ping = node.first_ping()
    help_wanted = node.run(0.25)
    relay = next(out for out in help_wanted if isinstance(out.message, PingRequest))
    stream = next(out for out in help_wanted if isinstance(out.message, Ping))
    if who == "a relay":
        node.answers(relay.session, Ack(seq_of(ping)))
    else:
        node.answers(ping.session, Ack(seq_of(ping if who == "itself" else stream)))
    node.run(0.24)
    assert node.suspects() == []
    assert node.members.statistics().probes_helped == 1


def test_an_answer_by_whoever_was_not_asked_is_none() -> None:
    node = Prober(8)
    ping = node.first_ping()
    asked = {out.session for out in node.run(0.25)} | {ping.session}
    for session in set(node.others) - asked:
        node.answers(session, Ack(seq_of(ping)))
        node.answers(session, Nack(seq_of(ping)))
    node.run(0.3)
    assert node.suspects() == [ping.session]


def test_the_last_relay_there_is_is_always_found() -> None:
    """memberlist#350: random picks with a limited number of tries missed the only candidate in one of forty."""
    for seed in range(60):
        node = Prober(2, seed=seed)
        ping = node.first_ping()
        asked = [out.session for out in node.run(0.25) if isinstance(out.message, PingRequest)]
        assert asked == [3 - ping.session]


def test_healthy_relays_are_asked_before_suspects() -> None:
    node = Prober(6)
    for session in (4, 5):
        node.suspect(node.others[session])
    for _ in range(12):
        ping = node.first_ping()
        asked = [out.session for out in node.run(0.25) if isinstance(out.message, PingRequest)]
        node.answers(ping.session, Ack(seq_of(ping)))
        if ping.session not in (4, 5):
            assert set(asked) <= {1, 2, 3, 6}


def test_whoever_failed_is_reported_at_once() -> None:
    """It may only have lost a packet or two; then it refutes before anybody else asks."""
    node = Prober(1)
    ping = node.first_ping()
    node.run(0.45)
    while not node.suspects():
        node.members.tick(node.now)
        node.now += 0.01
    reported = [out for out in node.outbox if out.session == ping.session and isinstance(out.message, Push)]
    accusation = Update(node.others[1]._replace(state=State.SUSPECT), ME.session)
    assert [out.message for out in reported if out.message == Push((accusation,))]


def test_silent_relays_point_to_trouble_of_our_own_and_nacks_do_not() -> None:
    """Lifeguard: a relay that says «not yet» shows that our packets come and go."""
    found = {}
    for nacks in (0, 1, 3):
        node = Prober(5)
        ping = node.first_ping()
        relays = [out.session for out in node.run(0.25) if isinstance(out.message, PingRequest)]
        for session in relays[:nacks]:
            node.answers(session, Nack(seq_of(ping)))
            node.answers(session, Nack(seq_of(ping)))  # a doubled packet counts once
        node.run(0.26)
        found[nacks] = node.members.statistics().health
    assert found == {0: 3, 1: 2, 3: 0}


def test_a_failed_probe_without_anybody_to_ask_points_to_trouble_of_our_own() -> None:
    node = Prober(1)
    node.first_ping()
    node.run(0.5)
    assert node.members.statistics().health == 1
    assert node.suspects() == [1]


def test_a_member_that_talks_is_not_suspected_for_not_answering() -> None:
    node = Prober(4)
    ping = node.first_ping()
    node.run(0.3)
    node.members.received_from(ping.session, node.now)
    node.run(0.2)
    statistics = node.members.statistics()
    assert node.suspects() == []
    assert (statistics.probes_spared, statistics.probes_failed, statistics.health) == (1, 0, 0)


def test_a_refused_datagram_brings_help_at_once() -> None:
    node = Prober(5)
    ping = node.first_ping()
    node.members.unreachable(ping.to, node.now)
    assert len(node.run(0.001)) == 4
    node.members.unreachable(ping.to, node.now, Plane.PROBE)
    assert node.run(0.2) == []


def test_a_refusal_by_somebody_else_makes_it_the_next_to_be_probed() -> None:
    for session in range(1, 10):
        node = Prober(9)
        ping = node.first_ping()
        other = node.others[session]
        node.members.unreachable((other.host, other.port), node.now)
        node.answers(ping.session, Ack(seq_of(ping)))
        if session != ping.session:
            assert node.first_ping().session == session


def test_an_unreachable_stranger_is_nothing_to_us() -> None:
    node = Prober(3)
    node.members.unreachable(("10.200.0.1", 7), node.now)
    assert node.members.statistics().sends_failed == 1
    assert node.suspects() == []


def test_a_member_without_proof_is_greeted_instead_of_pinged_and_may_fail() -> None:
    """Not at the first time: the greeting may have gone by datagram, where these do not pass."""
    node = Prober(1, proved=False)
    node.greeted.clear()
    sends = node.run(1.4)
    assert node.suspects() == []
    sends += node.run(0.7)
    assert sends == []
    assert node.greeted.count((node.others[1].host, node.others[1].port)) >= GREETINGS
    assert node.suspects() == [1]
    assert node.members.statistics().probes_repeated == GREETINGS - 1


def test_proving_itself_answers_the_probe() -> None:
    node = Prober(1, proved=False)
    while not node.members.statistics().probes:
        node.run(0.01)
    node.run(0.3)
    node.members.proved(node.others[1], node.now)
    node.run(0.25)
    assert node.suspects() == []
    assert node.members.statistics().probes_spared == 0, "answered, not merely excused"


def test_a_suspicion_reported_is_checked_next() -> None:
    """So that it is shared or refuted soon: in small clusters by everybody, in large ones by a few."""
    checked = 0
    for seed in range(40):
        node = Prober(30, seed=seed)
        node.suspect(node.others[7])
        checked += node.first_ping().session == 7
    assert 1 <= checked <= 15
    for seed in range(10):
        node = Prober(3, seed=seed)
        node.suspect(node.others[3])
        assert node.first_ping().session == 3


def test_a_member_that_only_the_stream_answers_for_is_probed_on_it_at_once() -> None:
    """Or every probe of it waits for the time-out of a datagram, and half of its updates is lost."""
    node = Prober(1)
    node.first_ping()
    node.answers_on_stream(node.run(0.25))
    began = node.now
    first = node.until_pinged()
    assert {out.plane for out in first} == {Plane.DATAGRAM, Plane.PROBE}, "with the first trial"
    assert node.now - began < LAN.probe_interval_s
    node.answers_on_stream(first)
    member = node.known(1)
    assert not member.datagrams
    statistics = node.members.statistics()
    assert (statistics.stream_first, statistics.probes_failed) == (1, 0)


def test_datagrams_that_do_not_pass_are_tried_ever_more_seldom() -> None:
    node = Prober(1)
    node.first_ping()
    tried = []
    end = node.now + 600.0
    while node.now < end:
        sends = node.run(0.25)
        tried += [node.now for out in sends if out.plane is Plane.DATAGRAM]
        node.answers_on_stream(sends)
    assert len(tried) < 20
    assert tried[-1] - tried[-2] == pytest.approx(60, abs=2)
    assert node.suspects() == []


def test_one_datagram_in_answer_brings_a_member_back() -> None:
    node = Prober(1)
    node.first_ping()
    node.answers_on_stream(node.run(0.25))
    node.answers_by_datagram(node.until_pinged())
    member = node.known(1)
    assert member.datagrams
    assert {out.plane for out in node.until_pinged()} == {Plane.DATAGRAM}


def test_one_lost_datagram_proves_nothing_of_a_member_that_answered_some() -> None:
    node = Prober(1)
    node.answers_by_datagram([node.first_ping()])
    member = node.known(1)
    node.until_pinged()
    for misses in range(1, MISSES_MAX + 1):
        assert member.datagrams
        node.answers_on_stream(node.run(0.25))
        node.until_pinged()  # until then the datagram may only be slow
        assert member.misses == misses
    assert not member.datagrams


def test_where_datagrams_hardly_pass_newcomers_are_probed_on_the_stream_from_the_start() -> None:
    node = Prober(8)
    for _ in range(5):
        node.until_pinged()
        node.answers_on_stream(node.run(0.25))
    node.until_pinged()
    assert node.members.statistics().datagrams_given_up == 1
    assert not any(member.datagrams for member in node.members.alive())
    node.others[9] = record_of("n9", 9)
    node.members.proved(node.others[9], node.now)
    member = node.known(9)
    assert not member.datagrams


def test_where_most_pass_the_few_that_do_not_are_nobody_elses_matter() -> None:
    """Two nodes of one host and six elsewhere, a firewall around one of them: each way is known for itself."""
    node = Prober(8)
    for _ in range(80):
        sends = node.until_pinged()
        if sends[0].session == 3:
            node.answers_on_stream([*sends, *node.run(0.25)])
        else:
            node.answers_by_datagram(sends)
    assert [member.session for member in node.members.alive() if not member.datagrams] == [3]
    assert node.members.statistics().datagrams_given_up == 0


def test_a_silent_member_is_asked_on_both_paths_before_it_is_suspected() -> None:
    """On whichever it is usually asked."""
    node = Prober(1)
    node.first_ping()
    node.answers_on_stream(node.run(0.25))
    for _ in range(4):
        node.answers_on_stream(node.until_pinged())
    sends = [*node.until_pinged(), *node.run(0.25)]
    assert [out.plane for out in sends] == [Plane.PROBE, Plane.DATAGRAM]
    assert node.suspects() == []
    node.run(0.3)
    assert node.suspects() == [1]


def test_an_accusation_takes_both_paths_where_datagrams_may_not_pass() -> None:
    node = Prober(1)
    node.answers_by_datagram([node.first_ping()])
    node.until_pinged()
    node.answers_on_stream(node.run(0.25))
    node.until_pinged()
    while not node.suspects():
        node.outbox.clear()
        node.members.tick(node.now)
        node.now += 0.01
    reported = [out for out in node.outbox if isinstance(out.message, Push) and out.session == 1]
    assert {out.plane for out in reported} == {Plane.DATAGRAM, Plane.PROBE}


def test_a_datagram_that_is_only_slow_is_no_lost_one() -> None:
    node = Prober(1)
    for _ in range(12):
        ping = node.first_ping()
        stream = next(out for out in node.run(0.25) if out.plane is Plane.PROBE)
        node.answers(1, Ack(seq_of(stream)), Plane.PROBE)
        node.answers(1, Ack(seq_of(ping)))
    member = node.known(1)
    assert member.datagrams


def test_a_node_that_slept_starts_over() -> None:
    node = Prober(5)
    node.suspect(node.others[4])
    node.first_ping()
    node.now += 30.0
    node.members.tick(node.now)
    statistics = node.members.statistics()
    assert (statistics.late_wakes, statistics.probes_void, statistics.health) == (1, 1, 7)
    assert node.suspects() == [4]
    node.run(0.4)
    assert node.suspects() == [4]
