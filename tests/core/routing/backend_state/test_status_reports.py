"""Each node's report reaches its peers when it changes, now and then again, and is forgotten with its sender."""

from __future__ import annotations

from random import Random

from hypothesis import example, given
from hypothesis import strategies as st

from ranvier_py.core.mesh.mesh_values import Outgoing
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.routing.backend_state.status_reports import (
    BYTES_PER_S,
    ENGINES_MAX,
    LIFE_S,
    NAME_BYTES_MAX,
    REPEAT_S,
    SENT_S,
    TROUBLES_MAX,
    UNKNOWN,
    WORDS_BYTES_MAX,
    EngineReport,
    StatusReport,
    StatusReports,
    Trouble,
    count_of,
    known,
    words_of,
)
from tests.builders.machine_net import LoneMachine, MachineNet, alike, peer_of

ENGINE = EngineReport(7, 1, 2, 300, 870)
TROUBLE = Trouble(1, 5, "node_full", "in_flight_max", "90 of 100 are in use", "Raise it.")


def made(*peers: int) -> tuple[StatusReports, list[Outgoing]]:
    outbox: list[Outgoing] = []
    machine = StatusReports(outbox, Random(1), 0.0)
    machine.met(alike([peer_of(session) for session in peers]), 0.0)
    return machine, outbox


def test_a_report_is_sent_when_it_changes_and_now_and_then_again() -> None:
    machine, outbox = made(1, 2)
    machine.tick(1000.0)
    assert not outbox, "there is nothing to show yet"
    machine.show([ENGINE], [TROUBLE])
    now = 1000.0
    machine.tick(now)
    assert [each.message for each in outbox] == [StatusReport((ENGINE,), (TROUBLE,))] * 2
    machine.show([ENGINE], [TROUBLE._replace(since_s=9)])
    assert machine.wake_at > now + SENT_S, "that it lasts is no change"
    machine.show([ENGINE._replace(running=5)], [TROUBLE])
    assert machine.wake_at == now + SENT_S
    machine.tick(now + SENT_S - 0.1)
    assert len(outbox) == 2, "not so soon"
    machine.tick(now + SENT_S)
    assert len(outbox) == 4
    machine.tick(now + SENT_S + 1.2 * REPEAT_S)
    assert len(outbox) == 6
    machine.met(alike([peer_of(session) for session in (1, 2, 3)]), now)
    assert outbox[-1].session == 3, "who comes gets it at once"


def test_peers_are_sent_that_nothing_is_wrong_any_more() -> None:
    machine, outbox = made(1)
    machine.show([], [TROUBLE])
    machine.tick(1000.0)
    machine.show([], [])
    machine.tick(1000.0 + SENT_S)
    assert [each.message for each in outbox] == [StatusReport((), (TROUBLE,)), StatusReport((), ())]


def test_a_peers_report_is_kept_until_it_is_old_or_the_peer_gone() -> None:
    machine, _ = made(1, 2)
    report = StatusReport((ENGINE,), (TROUBLE,))
    for session in (1, 2, 9):
        machine.receive(peer_of(session), report, 10.0 + session)
    assert [*machine.of_peers(20.0)] == [(2, report), (1, report)], "the last one first, and none of strangers"
    assert [*machine.of_peers(11.0 + LIFE_S)] == [(2, report)]
    machine.met(alike([peer_of(1)]), 20.0)
    assert [*machine.of_peers(20.0)] == [(1, report)]
    machine.forgotten(1, 20.0)
    assert not [*machine.of_peers(20.0)]


@example("a" * 600, None)
@given(st.text(max_size=600), st.one_of(st.none(), st.floats(-1e12, 1e12)))
def test_whatever_is_shown_can_be_sent(words: str, count: float | None) -> None:
    sent = words_of(words)
    assert len(sent.encode()) <= WORDS_BYTES_MAX
    machine, outbox = made(1)
    engine = EngineReport(1, *[count_of(count)] * 4)
    about = words_of(words, NAME_BYTES_MAX)
    troubles = [Trouble(2, count_of(count), "kind", about, sent, sent)] * (TROUBLES_MAX + 1)
    machine.show([engine] * (ENGINES_MAX + 1), troubles)
    machine.tick(100.0)
    kind, body = CODEC.encode(outbox[0].message)
    assert CODEC.decode(kind, body) == outbox[0].message
    assert count is None or known(count_of(count)) is not None
    assert known(UNKNOWN) is None


class ReportNode(LoneMachine[StatusReports]):
    """A node that reads the pages of some engines; with `load` their counts are others at each of its looks."""

    def __init__(self, session: int, now: float, engines: int) -> None:
        super().__init__(StatusReports, Random(session), now)
        self.rows = [EngineReport(session * 1000 + number, 1, 2, 300, 870) for number in range(engines)]
        self.machine.show(self.rows, ())


def bytes_per_s(engines: int, seconds: float, *, load: bool) -> float:
    """What one of eight nodes sends on average."""
    net = MachineNet(lambda session, now: ReportNode(session, now, engines), 8)
    net.run(REPEAT_S)
    net.sent.clear()
    for step in range(int(seconds / SENT_S)):
        for node in net.nodes.values() if load else ():
            node.machine.show([row._replace(tokens_per_s=step) for row in node.rows], ())
        net.run(SENT_S)
    return sum(size for *_, size in net.sent) / 8 / seconds


def test_reports_cost_an_idle_cluster_little_and_a_busy_one_no_more_than_their_bound() -> None:
    idle = bytes_per_s(1, 600.0, load=False)
    print(f"idle: {idle:.1f} bytes/s a node, under load {bytes_per_s(1, 120.0, load=True):.0f}")
    assert 0 < idle < 50.0
    assert bytes_per_s(1, 120.0, load=True) < 300.0
    assert bytes_per_s(ENGINES_MAX, 120.0, load=True) < 1.1 * BYTES_PER_S
