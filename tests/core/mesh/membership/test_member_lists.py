"""Push-pull of whole lists: its parts, its pace, its bounds, and clusters of a thousand."""

from __future__ import annotations

from ranvier_py.core.mesh.membership.member_lists import ANSWERED_RECORDS, LIST_RECORDS
from ranvier_py.core.mesh.membership.roster import MISSES_MAX
from ranvier_py.core.mesh.mesh_values import FRAME_BYTES_MAX, Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.messages import Ack, Ping, Push, Record, State, Update
from ranvier_py.core.mesh.wire.messages import Members as MemberList
from ranvier_py.core.mesh.wire.records import size_of
from tests.core.mesh.membership.lone_node import ME, LoneNode
from tests.core.mesh.membership.small_cluster import ROOM_BYTES, record_of


class Lister(LoneNode):
    """Everybody answers its pings."""

    def reads(self, sender: Record, records: list[Record], *, reply: bool = False) -> None:
        for start in range(0, len(records), LIST_RECORDS):
            part = tuple(records[start : start + LIST_RECORDS])
            self.gets(sender, MemberList(part, reply and start + LIST_RECORDS >= len(records)))
        self.members.changes.clear()

    def lists(self) -> list[Outgoing]:
        found = [out for out in self.outbox if isinstance(out.message, MemberList)]
        self.outbox.clear()
        return found

    def wrote(self, sends: list[Outgoing]) -> None:
        for out in sends:
            if isinstance(out.message, Ping):
                self.members.receive(Peer(out.session, out.to), Ack(out.message.seq), self.now)


def thousand(count: int = 999) -> list[Record]:
    return [record_of(f"n{number}", number) for number in range(1, count + 1)]


def test_a_large_list_goes_in_parts_on_the_bulk_stream_and_asks_once() -> None:
    node, others = Lister(), thousand()
    node.reads(others[0], others)
    node.members.proved(others[0], node.now)
    sends = node.lists()
    assert {out.plane for out in sends} == {Plane.BULK}
    parts = [out.message for out in sends if isinstance(out.message, MemberList)]
    assert [part.reply for part in parts] == [False] * (len(parts) - 1) + [True]
    sessions = [record.session for part in parts for record in part.records]
    assert sorted(sessions) == sorted([ME.session, *(record.session for record in others)])
    assert all(len(part.records) <= LIST_RECORDS for part in parts)
    assert all(sum(size_of(Update(record)) for record in part.records) < FRAME_BYTES_MAX for part in parts)


def test_a_small_list_fits_a_datagram_and_a_larger_one_does_not() -> None:
    """cortex#4327: both sides of the limit."""
    planes = {}
    for count in range(1, 40):
        node, others = Lister(), thousand(count)
        node.reads(others[0], others, reply=True)
        out = node.lists()[0]
        assert isinstance(out.message, MemberList)
        size_bytes = sum(size_of(Update(record)) for record in out.message.records)
        planes[count] = out.plane
        assert (out.plane is Plane.DATAGRAM) == (size_bytes <= ROOM_BYTES - 96)
    assert {planes[1], planes[39]} == {Plane.DATAGRAM, Plane.BULK}


def test_a_joining_node_reads_a_few_lists_quickly_and_then_seldom() -> None:
    others = thousand(5)
    node = Lister(*others)
    asked = []
    for _ in range(40):
        node.run(1.0)
        for out in node.lists():
            asked.append(node.now)
            if node.now > 103.0:
                sender = next(record for record in others if record.session == out.session)
                node.reads(sender, others)
    quick = [at for at in asked if at < 115.0]
    assert 4 <= len(quick) <= 9
    assert len(asked) - len(quick) <= 2


def test_a_large_cluster_that_grows_is_read_about_again_until_it_does_not() -> None:
    """Gossip leaves gaps when hundreds join at once; the next exchange of a thousand is minutes away."""
    node, others = Lister(), thousand(400)
    for other in others[:3]:
        node.members.proved(other, node.now)
        node.reads(other, others[:200])
    node.run(60.0)
    node.lists()
    node.reads(others[0], others)
    node.members.lists.wake_at = node.now
    node.run(40.0)
    asked = [out for out in node.lists() if isinstance(out.message, MemberList) and out.message.reply]
    assert len(asked) == 2


def test_a_joining_node_that_nobody_answers_asks_ever_more_slowly() -> None:
    """Each question carries its whole list."""
    others = thousand(5)
    node = Lister(*others)
    node.run(120.0)
    assert 5 <= len(node.lists()) <= 10


def test_a_small_list_takes_the_stream_where_datagrams_do_not_arrive() -> None:
    """Or a cluster whose lists fit a datagram never learns all its members on a network that blocks UDP."""
    others = thousand(5)
    node = Lister(*others)
    node.run(10.0)
    first, *more = [out.plane for out in node.lists()]
    assert first is Plane.DATAGRAM
    assert more
    assert set(more) == {Plane.BULK}
    for record in others[:3]:
        node.reads(record, others)
    node.run(40.0)
    assert node.lists()[0].plane is Plane.DATAGRAM, "one was only lost"
    node.reads(others[0], others)
    for member in node.members.alive():
        member.misses = MISSES_MAX
    node.members.lists.wake_at = node.now
    node.members.tick(node.now)
    assert node.lists()[0].plane is Plane.BULK


def test_a_question_that_came_on_the_stream_is_answered_there() -> None:
    node, others = Lister(), thousand(5)
    node.reads(others[0], others)
    for number, plane in enumerate((Plane.DATAGRAM, Plane.BULK)):
        peer = Peer(others[number].session, (others[number].host, others[number].port))
        node.members.receive(peer, MemberList((others[number],), True), node.now, plane)
        assert [out.plane for out in node.lists()] == [plane]


def test_lists_are_compared_soon_after_somebody_came_back_from_the_dead() -> None:
    """A cut has healed. Who refuted its death while nobody here could hear it says so no more."""
    others = thousand(5)
    node = Lister(*others)
    node.run(1.0)
    for record in others[:3]:
        node.reads(record, others)
    node.run(4.0)
    node.lists()
    peer = Peer(1, (others[0].host, others[0].port))
    dead = others[4]._replace(state=State.DEAD)
    member = node.known(5)
    for record in (dead, others[4]._replace(incarnation=1)):
        node.run(1.5)
        assert node.lists() == []
        member.received_at = 0.0
        node.members.receive(peer, Push((Update(record),)), node.now)
    assert [change.what for change in node.members.changes][-1:] == ["returned"]
    node.run(1.1)
    assert len(node.lists()) == 1


def test_lists_are_exchanged_at_once_with_somebody_held_for_dead() -> None:
    """Both sides of a cut learn from the first pair that meets what the other side has claimed of them."""
    others = thousand(5)
    node = Lister(*others)
    for record in others[:3]:
        node.reads(record, others)
    node.run(4.0)
    member = node.known(5)
    member.received_at = 0.0
    dead = others[4]._replace(state=State.DEAD)
    node.members.receive(Peer(1, (others[0].host, others[0].port)), Push((Update(dead),)), node.now)
    node.lists()
    node.members.proved(others[3], node.now)
    assert node.lists() == []
    node.members.proved(others[4], node.now)
    message = node.lists()[0].message
    assert message.reply
    assert message.records[1] == dead, "what it must refute comes early"


def test_answers_are_bounded_by_records_a_second() -> None:
    """A thousand that start together would each fetch a thousand records from the one that all know."""
    node, others = Lister(), thousand()
    node.reads(others[0], others)
    node.lists()
    answered = 0
    for record in others[:200]:
        node.reads(record, [record], reply=True)
        answered += bool(node.lists())
    assert answered == ANSWERED_RECORDS // 1000
    assert node.members.statistics().exchanges_refused == 200 - answered
    node.now += 1.0
    node.reads(others[300], [others[300]], reply=True)
    assert node.lists()


def test_the_last_dead_are_listed_too() -> None:
    """Or a newcomer would believe stale updates of their lives, and could not heal a cut that is older than itself."""
    node, others = Lister(), thousand(20)
    node.reads(others[0], others)
    peer = Peer(1, ("10.0.0.1", 7946))
    dead = [record._replace(state=State.DEAD, incarnation=1) for record in others[10:]]
    node.members.receive(peer, Push(tuple(Update(record) for record in dead)), node.now)
    node.lists()
    node.reads(others[0], [others[0]], reply=True)
    message = node.lists()[0].message
    assert [record.session for record in message.records][-10:] == list(range(20, 10, -1))
    assert [record.state for record in message.records][-10:] == [State.DEAD] * 10
