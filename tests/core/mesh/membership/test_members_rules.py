"""What one node believes, message by message: the rules of `merge_rules` and `members` without a network."""

from __future__ import annotations

import pytest

from ranvier_py.core.mesh.membership.members import CORRECTIONS_MAX
from ranvier_py.core.mesh.membership.own_record import EPOCH_MAX, INCARNATION_MAX
from ranvier_py.core.mesh.membership.profile import LAN
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.messages import Ack, Nack, Ping, PingRequest, Push, Record, State, Update
from ranvier_py.core.mesh.wire.messages import Members as MemberList
from ranvier_py.core.mesh.wire.records import size_of
from ranvier_py.core.routing.peers.route_messages import Digest
from tests.core.mesh.membership.lone_node import ME, LoneNode
from tests.core.mesh.membership.small_cluster import ROOM_BYTES, named, record_of

X, A, B, C = (record_of(f"n{number}", number) for number in (1, 2, 3, 4))


def claimed(record: Record, state: State = State.ALIVE, incarnation: int = 0, epoch: int = 1) -> Record:
    return record._replace(state=state, incarnation=incarnation, epoch=epoch)


class Node(LoneNode):
    """A, B and C answer its pings; X is silent."""

    def __init__(self, *proved: Record, datagrams: bool = True) -> None:
        super().__init__(*proved, datagrams=datagrams)
        self.silent: tuple[Record, ...] = ()
        self.run(10.0)  # until nothing is left to spread
        self.forget_packets()
        self.silent = (X,)
        self.outbox.clear()

    def wrote(self, sends: list[Outgoing]) -> None:
        for out in sends:
            if isinstance(out.message, Ping) and out.session not in [silent.session for silent in self.silent]:
                self.members.receive(Peer(out.session, out.to), Ack(out.message.seq), self.now, out.plane)

    def reported(self, receiver: Record) -> list[Update]:
        """Updates sent to this member outside of any ping. Clears all sends."""
        sends = [out for out in self.outbox if out.session == receiver.session]
        self.outbox.clear()
        return [update for out in sends if isinstance(out.message, Push) for update in out.message.updates]

    def holds(self, record: Record) -> tuple[State, int, int] | None:
        member = self.members.member(record.session)
        return None if member is None else (member.state, member.record.epoch, member.record.incarnation)

    def spreads(self) -> dict[int, Update]:
        """The latest update about each member that is pushed to others."""
        self.run(1.0)
        found: dict[int, Update] = {}
        for out in self.outbox:
            for update in out.message.updates if isinstance(out.message, Push) else ():
                if update.record.session != out.session:
                    found[update.record.session] = update
        return found

    def events(self) -> list[str]:
        found = [change.what for change in self.members.changes]
        self.members.changes.clear()
        return found


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", State)
@pytest.mark.parametrize("received", State)
@pytest.mark.parametrize("incarnation", [4, 5, 6])
def test_the_greater_of_two_records_holds(held: State, received: State, incarnation: int) -> None:
    node = Node(A)
    node.gets_updates(A, claimed(X, held, 5))
    assert node.holds(X) == (held, 1, 5)
    node.gets_updates(A, claimed(X, received, incarnation))
    greater = max((5, held), (incarnation, received))
    assert node.holds(X) == (greater[1], 1, greater[0])


def test_a_higher_epoch_beats_every_incarnation() -> None:
    node = Node(A)
    node.gets_updates(A, claimed(X, State.DEAD, INCARNATION_MAX))
    node.gets_updates(A, claimed(X, State.ALIVE, 0, epoch=2))
    assert node.holds(X) == (State.ALIVE, 2, 0)


def test_an_absurd_epoch_is_dropped_and_counted() -> None:
    node = Node(A)
    node.gets_updates(A, claimed(X, epoch=EPOCH_MAX + 1))
    assert node.holds(X) is None
    assert node.members.statistics().absurd == 1


@pytest.mark.parametrize("state", [State.SUSPECT, State.DEAD, State.LEFT])
def test_nobody_is_accused_in_the_last_epoch_but_by_itself(state: State) -> None:
    """There is nothing higher for it to refute that with."""
    node = Node(X, A)
    node.gets_updates(A, claimed(X, epoch=EPOCH_MAX))
    node.gets_updates(A, claimed(X, state, INCARNATION_MAX, epoch=EPOCH_MAX))
    assert node.holds(X) == (State.ALIVE, EPOCH_MAX, 0)
    assert node.members.statistics().absurd == 1
    if state is State.LEFT:
        node.gets_updates(X, claimed(X, state, epoch=EPOCH_MAX))
        assert node.holds(X) == (State.LEFT, EPOCH_MAX, 0)


# --- death and return -------------------------------------------------------------------------------------------------


def test_a_ghost_is_not_believed() -> None:
    """Mesh-LLM#1970, akka.net#8484: third parties brought a dead member back, for three quarters of an hour."""
    node = Node(A, B)
    node.gets_updates(A, claimed(X, State.DEAD, 3))
    for incarnation in (0, 1, 2, 3):
        node.gets_updates(B, claimed(X, State.ALIVE, incarnation))
        node.gets(B, MemberList((claimed(X, State.ALIVE, incarnation),), False), Plane.BULK)
    assert node.holds(X) == (State.DEAD, 1, 3)
    assert X.session not in [member.session for member in node.members.alive()]


def test_a_dead_member_returns_only_by_its_own_higher_word() -> None:
    node = Node(X, A)
    node.gets_updates(A, claimed(X, State.DEAD, 0))
    node.now += 10
    node.members.proved(X, node.now)
    assert node.holds(X) == (State.DEAD, 1, 0)
    assert node.reported(X) == [Update(claimed(X, State.DEAD, 0))], "it must learn what to refute"
    node.members.proved(claimed(X, State.ALIVE, 1), node.now)
    assert node.holds(X) == (State.ALIVE, 1, 1)
    assert node.events()[-2:] == ["died", "returned"]


def test_a_suspicion_at_a_higher_incarnation_means_that_the_dead_had_returned() -> None:
    node = Node(A)
    node.gets_updates(A, claimed(X, State.DEAD, 3))
    node.gets_updates(A, claimed(X, State.SUSPECT, 4), accuser=A.session)
    assert node.holds(X) == (State.SUSPECT, 1, 4)
    assert len(node.members.alive()) == 2


def test_a_stale_life_is_answered_with_the_accusation() -> None:
    """memberlist#311: dropped in silence, the restarted node never learned that it must refute."""
    for state in (State.SUSPECT, State.DEAD, State.LEFT):
        node = Node(A, B)
        node.gets_updates(A, claimed(X, state, 7), accuser=A.session if state is State.SUSPECT else 0)
        node.outbox.clear()
        node.gets_updates(B, claimed(X, State.ALIVE, 6))
        assert [(update.record.state, update.record.incarnation) for update in node.reported(B)] == [(state, 7)]


def test_a_stale_accusation_is_answered_with_what_is_newer() -> None:
    node = Node(A, B)
    node.gets_updates(A, claimed(X, State.ALIVE, 7))
    node.outbox.clear()
    node.gets_updates(B, claimed(X, State.DEAD, 6))
    assert node.reported(B) == [Update(claimed(X, State.ALIVE, 7))]
    assert node.holds(X) == (State.ALIVE, 1, 7)


def test_corrections_in_one_answer_are_bounded() -> None:
    node = Node(A)
    others = [record_of(f"n{number}", number) for number in range(20, 50)]
    node.gets_updates(A, *(claimed(other, State.DEAD, 5) for other in others))
    node.outbox.clear()
    node.gets_updates(A, *(claimed(other, State.ALIVE, 4) for other in others))
    assert len(node.reported(A)) == CORRECTIONS_MAX
    assert node.members.statistics().corrections_dropped == 30 - CORRECTIONS_MAX


@pytest.mark.parametrize("state", [State.SUSPECT, State.DEAD, State.LEFT])
def test_what_is_sent_of_somebody_unknown_is_kept_and_relayed(state: State) -> None:
    """memberlist#345: dropped, the accusation never reached whom it was about."""
    node = Node(A, B, C)
    node.gets_updates(A, claimed(X, state, 5), accuser=B.session if state is State.SUSPECT else 0)
    assert node.holds(X) == (state, 1, 5)
    assert node.spreads()[X.session].record.state is state


def test_a_member_that_comes_and_goes_does_not_keep_the_others_from_being_probed() -> None:
    """Each return gave it one more place in the round: whoever has the cluster's key can report that all day."""
    node = Node(A, B)
    for incarnation in range(100):
        node.gets_updates(A, claimed(X, State.ALIVE, incarnation))
        node.gets_updates(A, claimed(X, State.DEAD, incarnation))
    node.gets_updates(A, claimed(X, State.ALIVE, 100))
    node.outbox.clear()
    node.run(7.0)  # X is probed four times meanwhile, ever more slowly
    assert {out.session for out in node.outbox if isinstance(out.message, Ping)} == {A.session, B.session}


# --- suspicion --------------------------------------------------------------------------------------------------------


def test_a_suspicion_nobody_refutes_ends_in_death() -> None:
    node = Node(A, B, C)
    node.gets_updates(A, claimed(X))
    node.gets_updates(A, claimed(X, State.SUSPECT), accuser=A.session)
    node.gets_updates(B, claimed(X, State.SUSPECT), accuser=B.session)
    node.run(1.4)
    assert node.holds(X) == (State.SUSPECT, 1, 0)
    node.run(0.2)
    assert node.holds(X) == (State.DEAD, 1, 0)
    assert node.events()[-2:] == ["suspected", "died"]


def test_the_same_accuser_twice_is_one_accuser() -> None:
    node = Node(A, B, C)
    node.gets_updates(A, claimed(X, State.SUSPECT), accuser=A.session)
    for sender in (A, B, C):
        node.gets_updates(sender, claimed(X, State.SUSPECT), accuser=A.session)
    assert node.members.statistics().confirmations == 0
    node.gets_updates(B, claimed(X, State.SUSPECT), accuser=B.session)
    assert node.members.statistics().confirmations == 1
    assert node.spreads()[X.session].accuser == B.session, "the others count accusers, too"


def test_a_refutation_ends_the_suspicion() -> None:
    node = Node(A, B, X)
    node.gets_updates(A, claimed(X, State.SUSPECT), accuser=A.session)
    node.gets_updates(B, claimed(X, State.ALIVE, 1))
    assert node.holds(X) == (State.ALIVE, 1, 1)
    assert node.members.statistics().suspects == 0
    assert node.members.statistics().false_alarms == 1
    assert node.events()[-2:] == ["suspected", "refuted"]


def test_a_suspicion_at_a_new_incarnation_starts_anew() -> None:
    """In between lies a sign of life that was missed here."""
    node = Node(A, B, C)
    node.gets_updates(A, claimed(X, State.SUSPECT), accuser=A.session)
    node.gets_updates(B, claimed(X, State.SUSPECT), accuser=B.session)
    node.run(1.4)
    node.gets_updates(A, claimed(X, State.SUSPECT, 1), accuser=A.session)
    node.run(0.2)
    assert node.holds(X) == (State.SUSPECT, 1, 1)


# --- direct evidence --------------------------------------------------------------------------------------------------


def test_the_death_of_whom_we_just_received_from_is_only_a_suspicion_and_sent_to_it() -> None:
    node = Node(X, A, B)
    node.members.received_from(X.session, node.now)
    node.now += 1.9
    node.gets_updates(A, claimed(X, State.DEAD, 4))
    assert node.holds(X) == (State.SUSPECT, 1, 4)
    assert Update(claimed(X, State.SUSPECT, 4), A.session) in node.reported(X)
    assert node.members.statistics().vetoes == 1


def test_the_death_of_whom_we_have_not_received_from_for_two_seconds_is_believed() -> None:
    node = Node(X, A, B)
    node.members.received_from(X.session, node.now)
    node.run(2.1)
    node.gets_updates(A, claimed(X, State.DEAD, 4))
    assert node.holds(X) == (State.DEAD, 1, 4)


def test_packets_of_a_suspect_put_off_its_death_until_two_seconds_after_the_last() -> None:
    """Bounded: a true crash is not delayed further."""
    node = Node(X, A, B)
    node.gets_updates(A, claimed(X, State.SUSPECT), accuser=A.session)
    node.gets_updates(B, claimed(X, State.SUSPECT), accuser=B.session)
    for _ in range(10):
        node.run(0.5)
        node.members.received_from(X.session, node.now)
    assert node.holds(X) == (State.SUSPECT, 1, 0)
    assert node.members.statistics().vetoes >= 1
    node.run(1.9)
    assert node.holds(X) == (State.SUSPECT, 1, 0)
    node.run(0.2)
    assert node.holds(X) == (State.DEAD, 1, 0)


def test_only_what_came_after_the_suspicion_counts() -> None:
    node = Node(X, A, B)
    node.members.received_from(X.session, node.now)
    node.now += 0.5
    node.gets_updates(A, claimed(X, State.SUSPECT), accuser=A.session)
    node.gets_updates(B, claimed(X, State.SUSPECT), accuser=B.session)
    node.run(1.6)
    assert node.holds(X) == (State.DEAD, 1, 0)


def test_the_accused_receives_the_accusation_with_its_first_packet_but_not_with_each() -> None:
    """foca#25: «you are dead» for ever. Once in a probe interval is enough."""
    for state in (State.SUSPECT, State.DEAD):
        node = Node(X, A)
        node.gets_updates(A, claimed(X, state), accuser=A.session if state is State.SUSPECT else 0)
        node.outbox.clear()
        for _ in range(20):
            node.members.received_from(X.session, node.now)
        assert [update.record.state for update in node.reported(X)] == [state]
        node.now += 0.6
        node.members.received_from(X.session, node.now)
        assert len(node.reported(X)) == 1


def test_whoever_sent_goodbye_may_finish_its_sentence() -> None:
    """It answers pings for a while. Later on, somebody who left and talks is reported that it is taken for gone."""
    node = Node(X, A)
    node.gets_updates(A, claimed(X, State.LEFT))
    node.run(0.5)
    node.outbox.clear()
    node.members.received_from(X.session, node.now)
    assert node.reported(X) == []
    node.run(3.0)
    node.outbox.clear()
    node.members.received_from(X.session, node.now)
    assert node.reported(X) == [Update(claimed(X, State.LEFT))]


def test_a_tick_that_comes_late_speaks_against_this_node() -> None:
    """Lifeguard's local health: who runs late himself must be slow to call others dead."""
    node = Node(A, B, C)
    assert node.members.statistics().health == 0
    node.now = node.members.wake_at + 0.75 * LAN.probe_timeout_s
    node.members.tick(node.now)
    assert (node.members.statistics().late_ticks, node.members.statistics().health) == (1, 1)


def test_who_leaves_announces_it_to_each_at_once() -> None:
    """Rumours alone take some rounds, and a process that is made to end may not have them."""
    node = Node(A, B, C)
    node.members.leave(node.now)
    reported = {out.session: out.message for out in node.outbox}
    assert reported == {record.session: Push((Update(node.members.me),)) for record in (A, B, C)}
    assert node.members.me.state is State.LEFT


def test_a_ping_to_a_suspect_carries_the_accusation() -> None:
    node = Node(X)
    node.gets_updates(X, claimed(A, State.LEFT))
    node.members.received_from(X.session, node.now)
    for _ in range(40):  # the suspicion's own broadcast is used up by then
        node.gets_updates(A, claimed(X, State.SUSPECT, 3), accuser=A.session)
        node.run(0.2)
        node.members.received_from(X.session, node.now)
    node.outbox.clear()
    node.run(1.1)
    pings = [out.message for out in node.outbox if isinstance(out.message, Ping)]
    assert pings
    assert all(ping.updates[0] == Update(claimed(X, State.SUSPECT, 3), A.session) for ping in pings)


# --- me ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.SUSPECT, State.DEAD, State.LEFT])
def test_an_accusation_of_me_is_refuted_to_its_sender_and_to_all(state: State) -> None:
    node = Node(A, B)
    node.gets_updates(A, claimed(ME, state, 4))
    assert (node.members.me.state, node.members.me.incarnation) == (State.ALIVE, 5)
    assert node.reported(A) == [Update(node.members.me)]
    statistics = node.members.statistics()
    assert (statistics.refutations, statistics.health) == (1, 1)
    assert node.spreads()[ME.session] == Update(node.members.me)


def test_a_stale_accusation_of_me_changes_nothing_but_is_answered() -> None:
    node = Node(A)
    node.gets_updates(A, claimed(ME, State.DEAD, 4))
    node.outbox.clear()
    node.gets_updates(A, claimed(ME, State.DEAD, 2))
    assert node.members.me.incarnation == 5
    assert node.reported(A) == [Update(node.members.me)]


def test_the_last_incarnation_there_is_does_not_evict_me() -> None:
    """memberlist#358, #359. Whoever believed it believes the next epoch."""
    node = Node(A)
    node.gets_updates(A, claimed(ME, State.DEAD, INCARNATION_MAX))
    assert node.members.me.state is State.ALIVE
    them = Node(A, X)
    them.gets_updates(A, claimed(X, State.DEAD, INCARNATION_MAX))
    them.gets_updates(A, X._replace(epoch=node.members.me.epoch, incarnation=node.members.me.incarnation))
    assert them.holds(X) == (State.ALIVE, 2, 0)


def test_nobody_is_a_member_under_my_session_or_my_name() -> None:
    """foca#34: a node pinged its own previous identity."""
    node = Node(A)
    node.gets_updates(A, claimed(ME, State.ALIVE, 9), ME._replace(session=77), ME._replace(session=78, epoch=50))
    assert [member.session for member in node.members.alive()] == [A.session]
    node.members.proved(ME, node.now)
    assert [member.session for member in node.members.alive()] == [A.session]


def test_my_own_address_is_never_greeted() -> None:
    node = Node(A)
    node.gets_updates(A, record_of("old", 55, host=ME.host))
    node.members.remember([ME], node.now)
    for _ in range(200):
        node.now += 0.05
        node.members.tick(node.now)
        assert (ME.host, ME.port) not in node.members.needs_greeting(node.now)


def test_the_address_of_the_dead_is_not_greeted_while_somebody_else_lives_there() -> None:
    for taken in (False, True):
        node = Node(A, X)
        if taken:
            node.members.proved(record_of("n9", 9, host=X.host), node.now)
        node.gets_updates(A, claimed(X, State.DEAD))
        greeted = []
        for _ in range(80):
            node.now += 0.25
            node.members.received_from(9, node.now)
            node.members.tick(node.now)
            greeted += node.members.needs_greeting(node.now)
        assert ((X.host, X.port) in greeted) is not taken


# --- names and sessions -----------------------------------------------------------------------------------------------


def test_a_new_session_replaces_the_old_one_at_once() -> None:
    """consul#13379, weave#2085: restarted before anybody noticed, and taken for the old one."""
    for state in State:
        node = Node(A, B)
        node.gets_updates(A, claimed(X, state, 6))
        node.members.gone.clear()
        new = X._replace(session=88, epoch=2)
        node.gets_updates(B, new)
        assert node.holds(X) is None
        assert node.holds(new) == (State.ALIVE, 2, 0), "nothing of the old one is left, its incarnation neither"
        assert node.members.gone == [X.session]
        found = named(node.members, "n1")
        assert found.session == 88


def test_the_old_session_does_not_come_back_and_its_friends_are_reported() -> None:
    """akka.net#8015, scylladb#3798: a lagging peer merged the removed one back."""
    node = Node(A, B)
    new = X._replace(session=88, epoch=2)
    node.gets_updates(A, X, new)
    node.outbox.clear()
    for state in State:
        node.gets_updates(B, claimed(X, state, 1000))
    assert node.holds(X) is None
    assert node.holds(new) == (State.ALIVE, 2, 0)
    assert {update.record.session for update in node.reported(B)} == {88}


def test_a_session_that_lost_its_name_is_reported_so_whenever_it_speaks() -> None:
    """memberlist#311: restarted with a low number, it must learn the high one or stay invisible."""
    node = Node(A)
    node.gets_updates(A, X._replace(epoch=100))
    low = X._replace(session=88, epoch=3)
    node.members.proved(low, node.now)
    assert Update(X._replace(epoch=100)) in node.reported(low)
    node.gets(low, Ping(1), Plane.DATAGRAM)
    assert Update(X._replace(epoch=100)) in node.reported(low)
    node.members.proved(low._replace(epoch=101), node.now)
    assert node.holds(low) == (State.ALIVE, 101, 0)
    node.outbox.clear()
    node.gets(low, Ping(2), Plane.DATAGRAM)
    assert node.reported(low) == []


def test_the_same_epoch_is_decided_alike_everywhere() -> None:
    older, later = X, X._replace(session=X.session + 50)
    for order in ((older, later), (later, older)):
        node = Node(A)
        node.gets_updates(A, *order)
        assert node.holds(older) is None
        assert node.holds(later) == (State.ALIVE, 1, 0)


def test_my_epoch_rises_above_what_others_hold_for_my_name() -> None:
    node = Node(A, B)
    old = ME._replace(session=77, epoch=900, state=State.DEAD)
    node.gets_updates(A, old)
    assert node.members.me.epoch == 901
    assert node.reported(A) == [Update(node.members.me)]
    assert node.spreads()[ME.session].record.epoch == 901


def test_a_member_with_a_new_name_keeps_its_session() -> None:
    node = Node(A)
    node.gets_updates(A, X)
    node.gets_updates(A, X._replace(name="n1-0000", incarnation=1))
    assert named(node.members, "n1") is None
    found = named(node.members, "n1-0000")
    assert found.session == X.session


def test_a_member_that_takes_the_name_of_a_later_session_is_forgotten_and_reported() -> None:
    node = Node(A)
    node.gets_updates(A, X, B._replace(epoch=9))
    node.members.gone.clear()
    node.gets_updates(A, X._replace(name=B.name, incarnation=1))
    assert node.holds(X) is None
    assert node.holds(B) == (State.ALIVE, 9, 0)
    assert node.members.gone == [X.session]


# --- lists ------------------------------------------------------------------------------------------------------------


def test_a_death_in_a_list_is_a_suspicion() -> None:
    """memberlist's mergeState. When a cut heals, lists from the other side hold everybody here for dead."""
    node = Node(A, X)
    node.gets(A, MemberList((claimed(X, State.DEAD),), False), Plane.BULK)
    assert node.holds(X) == (State.SUSPECT, 1, 0)


def test_a_list_is_answered_with_a_list_that_has_everybody() -> None:
    node = Node(A, B, X)
    node.gets_updates(A, claimed(B, State.DEAD, 2))
    node.outbox.clear()
    node.gets(A, MemberList((A,), True), Plane.BULK)
    answers = [out.message for out in node.outbox if isinstance(out.message, MemberList)]
    assert [answer.reply for answer in answers] == [False]
    assert [record.session for record in answers[0].records] == [ME.session, A.session, X.session, B.session]
    node.outbox.clear()
    node.gets(A, MemberList((A,), True), Plane.BULK)
    assert not any(isinstance(out.message, MemberList) for out in node.outbox), "one a second"
    assert node.members.statistics().exchanges_refused == 1


# --- relaying ---------------------------------------------------------------------------------------------------------


def asked(node: Node, target: Record, seq: int = 5) -> None:
    node.outbox.clear()
    node.gets(A, PingRequest(seq, target.session, target.host, target.port), Plane.DATAGRAM)


def test_a_relay_pings_and_passes_the_answer_on_under_the_askers_number() -> None:
    node = Node(A, X, B)
    asked(node, X)
    ping = next(out for out in node.outbox if isinstance(out.message, Ping))
    assert (ping.to, ping.session) == ((X.host, X.port), X.session)
    assert isinstance(ping.message, Ping)
    node.outbox.clear()
    node.gets(B, Ack(ping.message.seq), Plane.DATAGRAM)
    assert not node.outbox, "only the target can answer"
    node.gets(X, Ack(ping.message.seq), Plane.DATAGRAM)
    assert [(out.session, out.message) for out in node.outbox] == [(A.session, Ack(5))]
    node.run(1.0)
    assert not any(isinstance(out.message, Nack) for out in node.outbox)


def test_a_relay_reports_in_time_that_it_got_no_answer_and_passes_a_late_one_on() -> None:
    node = Node(A, X)
    asked(node, X)
    seq = next(out.message.seq for out in node.outbox if isinstance(out.message, Ping))
    node.outbox.clear()
    node.run(LAN.probe_interval_s - LAN.probe_timeout_s - 0.1)
    assert [out.message for out in node.outbox if out.session == A.session][:1] == [Nack(5)]
    node.gets(X, Ack(seq), Plane.DATAGRAM)
    assert node.outbox[-1].message == Ack(5)


def test_a_relay_pings_also_whom_it_does_not_know() -> None:
    node = Node(A)
    asked(node, X)
    assert any(out.session == X.session for out in node.outbox)


# --- planes -----------------------------------------------------------------------------------------------------------


def test_an_answer_takes_the_path_the_question_came() -> None:
    node = Node(A)
    for plane in (Plane.DATAGRAM, Plane.PROBE):
        node.outbox.clear()
        node.gets(A, Ping(3), plane)
        assert [(out.plane, out.message.seq) for out in node.outbox if isinstance(out.message, Ack)] == [(plane, 3)]


def test_without_datagrams_nothing_is_sent_as_one() -> None:
    node = Node(A, B, X, datagrams=False)
    node.gets_updates(A, claimed(X, State.SUSPECT), accuser=A.session)
    node.gets(A, MemberList((A,), True), Plane.BULK)
    asked(node, X)
    node.run(20.0)
    node.members.leave(node.now)
    assert {out.plane for out in node.outbox} <= {Plane.PROBE, Plane.BULK}
    assert any(isinstance(out.message, Ping) for out in node.outbox)


def test_no_message_to_a_datagram_is_larger_than_its_room() -> None:
    node = Node(A, *(record_of(f"n{number}", number) for number in range(10, 200)))
    node.run(30.0)
    node.gets(A, MemberList((A,), True), Plane.BULK)
    for out in node.outbox:
        if out.plane is Plane.DATAGRAM:
            records = getattr(out.message, "updates", None) or [
                Update(record) for record in getattr(out.message, "records", ())
            ]
            assert sum(size_of(update) for update in records) + 96 <= ROOM_BYTES


def test_other_messages_are_not_for_membership() -> None:
    node = Node(A)
    with pytest.raises(AssertionError, match="Digest"):
        node.members.receive(Peer(A.session, (A.host, A.port)), Digest(1, 1), node.now)
