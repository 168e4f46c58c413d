"""The laws of windowed transfers, whatever is transferred. Tests of their features are about what the parts mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from struct import Struct

import pytest

from ranvier_py.core.mesh.budget import Window
from ranvier_py.core.mesh.machine import Machine
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.mesh.transfer import (
    NO_ROOM_S,
    PROGRESS_S,
    RESUMES_MAX,
    SILENCE_S,
    WINDOW_PARTS,
    End,
    Inquiry,
    Piece,
    Refused,
    Transfer,
    TransferPart,
    Transfers,
    TransferTerms,
    Walk,
    Wanted,
)
from ranvier_py.core.mesh.wire.frame import bad
from tests.builders.machine_net import MachineNet, peer_of

HEAD = Struct("<Id")  # number of the part, and when it was read
LONG, BROKEN, SLOW, BAD = b"long", b"broken", b"slow", b"bad"
COUNTS = {LONG: 100, BROKEN: 20, SLOW: 3, BAD: 5, b"one": 1, b"some": 17}
AGAIN = TransferTerms(1, "thing")
AT_ONCE = TransferTerms(1, "thing", steps=4, again=False)
EACH = pytest.mark.parametrize("terms", [AGAIN, AT_ONCE], ids=["again", "at once"])


class Numbers(Walk):
    """Parts that say their number and when they were read."""

    def __init__(self, owner: Thing, subject: bytes) -> None:
        self.owner, self.subject, self.next, self.steps = owner, subject, 0, 0

    def take(self, now: float) -> Piece | End | None:
        self.steps += 1
        if self.subject == SLOW and self.steps % 3:
            return None
        if self.subject == BROKEN and self.next == 10:
            return End.ABSENT
        number, self.next = self.next, self.next + 1
        return Piece(HEAD.pack(number, now) + bytes(self.owner.size), self.next == COUNTS[self.subject])

    def stop(self) -> None:
        self.owner.stopped += 1


@dataclass(slots=True)
class Asked(Inquiry):
    """With what came of it."""

    came: Sequence[int] = ()
    end: End | None = None
    ends: int = 0


class Thing(Machine):
    """A node that gives everybody numbers, and takes them."""

    def __init__(self, session: int, terms: TransferTerms, per_s: int, size: int) -> None:
        self.session, self.size = session, size
        self.begun = self.stopped = 0
        self.outbox: list[Outgoing] = []
        self.transfer = Transfer(terms, self, self.outbox, Window(per_s))
        self.machines = (self, Transfers(self.transfer))

    def met(self, peers: LivePeers, now: float) -> None:
        self.transfer.meet(peers.near, now)

    def begin(self, peer: Peer, subject: bytes, now: float) -> Walk | End:
        if subject not in COUNTS:
            bad("no such thing")
        self.begun += 1
        return Numbers(self, subject)

    def take(self, question: Asked, data: bytes, now: float) -> None:
        number, read_at = HEAD.unpack(data[: HEAD.size])
        assert question.asked_at <= read_at <= now, "nothing gets younger on its way"
        if question.subject == BAD and number == 3:
            bad("this one")
        question.came = (*question.came, number)

    def over(self, question: Asked, end: End, now: float) -> None:
        question.end, question.ends = end, question.ends + 1


class Net(MachineNet[Thing]):
    def __init__(
        self, nodes: int, terms: TransferTerms = AGAIN, seed: int = 1, per_s: int = 1 << 30, size: int = 100
    ) -> None:
        super().__init__(lambda session, _: Thing(session, terms, per_s, size), nodes, seed)

    def ask(self, session: int, other: int, subject: bytes = LONG) -> Asked:
        question = Asked(peer_of(other), subject)
        self.nodes[session].transfer.ask(question, self.now)
        return question

    def get(self, subject: bytes = LONG, seconds: float = 60.0) -> Asked:
        """What node 1 gets of node 2."""
        question = self.ask(1, 2, subject)
        self.run(seconds)
        return question

    def parts(self, source: int = 2) -> list[TransferPart]:
        return [
            message for _, sender, _, message, _ in self.sent if sender == source and isinstance(message, TransferPart)
        ]

    def lose(self, *numbers: int) -> None:
        """Each of these parts is lost once."""
        left = list(numbers)

        def drop(_source: int, _target: int, message: object) -> bool:
            if not isinstance(message, TransferPart) or message.number not in left:
                return False
            left.remove(message.number)
            return True

        self.drop = drop


def whole(question: Asked) -> bool:
    return question.end is End.WHOLE and list(question.came) == list(range(COUNTS[question.subject]))


@EACH
@pytest.mark.parametrize("seed", range(8))
def test_each_question_ends_once_with_all_parts_in_order_or_with_why_not_whatever_happens(
    terms: TransferTerms, seed: int
) -> None:
    """Messages are lost, doubled and late; nodes are cut off, noticed or not; each side is killed and starts again."""
    net, rng = Net(4, terms, seed), Random(seed)
    net.link(loss=0.15, duplicate=0.1, jitter_s=0.05)
    questions: list[tuple[int, Asked]] = []
    for _ in range(60):
        fault = rng.random()
        if fault < 0.1:
            net.part(*rng.sample(sorted(net.nodes), 2))
        elif fault < 0.2:
            net.network.links.heal()
            net.cut(*((one,) for one in rng.sample(sorted(net.nodes), 2)))
        elif fault < 0.5:
            net.heal()
        elif fault < 0.6:
            last = max(net.nodes)
            net.kill(rng.choice(sorted(net.nodes)))
            net.start(last + 1)
        one, other = rng.sample(sorted(net.nodes), 2)
        if other in net.nodes[one].transfer.peers:
            questions.append((one, net.ask(one, other, rng.choice(list(COUNTS)))))
        net.run(rng.random())
    net.link(loss=0.0, duplicate=0.0, jitter_s=0.0)
    net.heal()
    net.run(3 * SILENCE_S)
    live = [question for session, question in questions if session in net.nodes]
    assert all(question.ends == 1 for question in live)
    assert all(question.came == tuple(range(len(question.came))) for _, question in questions)
    assert all(whole(question) for question in live if question.end is End.WHOLE)
    assert End.WHOLE in [question.end for question in live]
    for node in net.nodes.values():
        assert (node.transfer.open, node.transfer.running(), node.stopped) == (0, 0, node.begun)


@EACH
@pytest.mark.parametrize("subject", [LONG, SLOW, b"one", b"some"])
def test_each_part_is_sent_once_and_all_is_forgotten_at_the_end(terms: TransferTerms, subject: bytes) -> None:
    net = Net(2, terms)
    assert whole(net.get(subject, 0.5))
    assert [part.number for part in net.parts()] == list(range(COUNTS[subject]))
    assert [part.last for part in net.parts()].count(True) == 1
    one, two = (node.transfer for node in net.nodes.values())
    assert (one.wake_at, two.wake_at) == (float("inf"),) * 2
    assert (one.counters.asked, one.counters.taken, two.counters.given, two.counters.broken) == (1, 1, 1, 0)


def test_no_more_parts_are_in_transit_than_the_window_has() -> None:
    net = Net(2)
    net.drop = lambda source, target, message: source == 1 and isinstance(message, Wanted) and message.cursor > 0
    net.get(seconds=0.5)
    assert len(net.parts()) == WINDOW_PARTS
    net.drop = lambda *_: False
    net.run(2.5 * PROGRESS_S)
    assert len(net.parts()) > WINDOW_PARTS


@pytest.mark.parametrize("lost", [(0,), (99,), (3, 4, 9), (15, 16, 17, 40), (3, 3, 3)])
def test_lost_parts_are_sent_again_from_where_they_were_lost(lost: Sequence[int]) -> None:
    net = Net(2)
    net.lose(*lost)
    assert whole(net.get())
    counters = net.nodes[2].transfer.counters
    assert 0 < counters.parts_resent <= WINDOW_PARTS * len(lost)
    assert counters.parts_sent == len(net.parts())


def test_a_peer_that_falls_silent_is_given_up_after_some_tries_and_so_is_an_asker() -> None:
    net = Net(2)
    net.drop = lambda source, target, message: source == 2
    question = net.get(seconds=PROGRESS_S * (RESUMES_MAX + 1) - 0.1)
    assert question.end is None
    net.run(0.2)
    assert question.end is End.SILENT
    assert net.nodes[2].transfer.running() == 1
    net.run(SILENCE_S)
    assert net.nodes[2].transfer.running() == 0
    assert net.nodes[2].transfer.counters.broken == 1


def test_what_comes_at_once_or_not_at_all_is_not_asked_for_again() -> None:
    net = Net(2, AT_ONCE)
    net.lose(2)
    assert net.get(b"some", PROGRESS_S + 0.1).end is End.SILENT
    assert len([message for *_, message, _ in net.sent if isinstance(message, Wanted)]) == 1
    assert net.nodes[2].transfer.counters.given == 1


def test_a_lost_confirmation_costs_nobody_a_place() -> None:
    net = Net(4)
    net.drop = lambda source, target, message: isinstance(message, Wanted) and message.cursor == 1
    for session in (2, 3, 4):
        assert net.ask(session, 1, b"one").end is None
        net.run(0.01)
    net.run(SILENCE_S + 0.1)
    assert net.nodes[1].transfer.counters.given == 3
    assert net.nodes[1].stopped == 3


def test_one_peer_too_many_is_refused_as_we_are_busy() -> None:
    net = Net(5)
    questions = [net.ask(session, 1) for session in (2, 3, 4, 5)]
    net.run(1.0)
    assert [question.end for question in questions] == [End.WHOLE] * 2 + [End.BUSY] * 2
    assert net.nodes[1].transfer.counters.refused == 2


def test_a_new_question_of_a_peer_ends_its_old_one_where_it_may_have_but_one() -> None:
    for terms, ends in ((AGAIN._replace(one_each=True), [End.ABSENT, End.WHOLE]), (AGAIN, [End.WHOLE] * 2)):
        net = Net(2, terms)
        first = net.ask(1, 2)
        net.run(0.001)
        second = net.ask(1, 2)
        net.run(10.0)
        assert [first.end, second.end] == ends


def test_a_giver_that_started_again_refuses_what_it_does_not_know() -> None:
    net = Net(2)
    question = net.ask(1, 2)
    net.run(0.002)
    net.put(2, Thing(2, AGAIN, 1 << 30, 100))
    for session, other in ((1, 2), (2, 1)):
        net.nodes[session].transfer.meet([peer_of(other)], net.now)
    net.run(2 * PROGRESS_S)
    assert question.end is End.ABSENT


def test_a_question_ends_with_why_there_is_nothing() -> None:
    net = Net(2)
    assert net.get(BROKEN).end is End.ABSENT
    assert net.get(b"what?").end is End.ABSENT
    assert net.get(BAD).end is End.BAD
    gone = net.ask(1, 2)
    net.run(0.002)
    net.kill(2)
    assert gone.end is End.GONE
    counters = net.nodes[1].transfer.counters
    assert (counters.parts_bad, counters.taken, counters.asked) == (1, 0, 4)


def test_strangers_get_nothing_and_a_later_versions_things_are_not_known() -> None:
    net = Net(2)
    for message in (
        Wanted(1, 5, 0, LONG),
        Wanted(7, 5, 0, LONG),
        TransferPart(7, 5, 0, True, b""),
        Refused(7, 5, False),
    ):
        net.take(1, 9, message)
    net.take(1, 2, Wanted(7, 5, 0, LONG))
    assert net.nodes[1].begun == 0
    assert net.sent == []


def test_parts_of_another_question_peer_or_place_are_dropped() -> None:
    net = Net(3)
    question = net.ask(1, 2)
    net.run(0.0)
    good = TransferPart(1, question.request, 0, True, HEAD.pack(0, net.now))
    for source, part in ((3, good), (2, good._replace(request=99)), (2, good._replace(number=1))):
        net.take(1, source, part)
    net.take(1, 3, Refused(1, question.request, busy=False))
    assert (question.came, question.end, net.nodes[1].transfer.counters.parts_stray) == ((), None, 3)
    net.nodes[1].transfer.drop(question)
    net.take(1, 2, good)
    assert (question.came, question.end) == ((), None)


def test_parts_keep_their_budget_and_each_of_several_its_share() -> None:
    per_s = 200_000
    net = Net(3, AGAIN._replace(share=4), per_s=per_s, size=1000)
    questions = [net.ask(session, 1) for session in (2, 3)]
    net.run(1.0)
    to = Counter({session: sum(size for *_, target, _, size in net.sent if target == session) for session in (2, 3)})
    assert all(0.8 * per_s / 4 < sent <= per_s / 4 for sent in to.values())
    net.run(10.0)
    assert all(map(whole, questions))
    alone = Net(2, AGAIN._replace(share=4), per_s=80_000, size=1000)
    question = alone.ask(1, 2)
    alone.run(1.0 - NO_ROOM_S)
    sizes = [size for *_, message, size in alone.sent if isinstance(message, TransferPart)]
    assert 70_000 < sum(sizes) <= 80_000
    assert alone.nodes[2].transfer.counters.sent_bytes <= 80_000
    alone.run(2.0)
    assert whole(question)
