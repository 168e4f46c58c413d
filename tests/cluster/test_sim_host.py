"""The simulated machine and the name: pauses, slow processors, restarts, disks, and answers that are wrong."""

from collections.abc import Sequence
from random import Random

import pytest

from cluster.network.fake_network import Network
from cluster.network.virtual_time import VirtualTime
from cluster.simulation.sim_dns import SimDns
from cluster.simulation.sim_host import KERNEL_BUFFER_BYTES, SimHost
from cluster.simulation.trace import EVENTS_KEPT, Trace
from ranvier_py.core.mesh.mesh_values import Address, MemberChange, Plane, Send

HERE: Address = ("10.0.0.1", 7946)
THERE: Address = ("10.0.0.2", 7946)


class StubPeer:
    """Wakes every `interval_s` and writes down when; answers nothing."""

    def __init__(self, time: VirtualTime, interval_s: float = 0.1) -> None:
        self.time = time
        self.interval_s = interval_s
        self.wake_at = time.now + interval_s
        self.ticks: list[float] = []
        self.got: list[tuple[float, bytes]] = []
        self.contacts: list[float] = []
        self.left = False

    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> None:
        self.got.append((now, data))

    def contact(self, addresses: Sequence[Address], now: float) -> None:
        self.contacts.append(now)

    def unreachable(self, address: Address, plane: Plane, now: float) -> None:
        raise AssertionError("nothing was sent")

    def tick(self, now: float) -> None:
        self.ticks.append(now)
        self.wake_at = now + self.interval_s

    def take(self) -> list[Send]:
        return []

    def changes(self) -> list[MemberChange]:
        return []

    def leave(self, now: float) -> None:
        self.left = True

    def state(self) -> bytes:
        return f"at {self.time.now:.0f}".encode()


class StubNode:
    def __init__(self, peer: StubPeer, *, lonely: bool = True) -> None:
        self.peer = peer
        self.session = 7
        self.streams = None
        self.lonely = lonely

    def alone(self) -> bool:
        return self.lonely


def make_host(interval_s: float = 0.1, *, lonely: bool = True) -> tuple[VirtualTime, SimHost, StubPeer]:
    time = VirtualTime()
    host = SimHost(0, HERE, Network(time, Random(1)), Trace(), Random(1))
    host.resolve = lambda asker, answer: answer([THERE])
    node = StubPeer(time, interval_s)
    host.start(StubNode(node, lonely=lonely))  # type: ignore[arg-type]  # as much of one as the host uses
    return time, host, node


def test_timers_are_never_early_and_hardly_late() -> None:
    time, _, node = make_host()
    time.run(2.0)
    assert len(node.ticks) == pytest.approx(20, abs=1)


def test_a_paused_process_does_nothing_and_then_reads_before_it_looks_at_the_clock() -> None:
    time, host, node = make_host()
    time.run(1.0)
    resume = host.pauses.begin(True)
    for number in range(10):
        time.at(1.5 + number / 10, host.arrive, str(number).encode(), THERE, Plane.DATAGRAM)
    time.run(5.0)
    assert max(node.ticks) <= 1.0
    assert node.got == []
    resume()
    assert [data for _, data in node.got] == [str(number).encode() for number in range(10)]
    time.run(5.1)
    assert node.ticks[-1] == pytest.approx(5.0, abs=0.1)


def test_two_pauses_end_with_the_longer_one() -> None:
    time, host, node = make_host()
    first, second = host.pauses.begin(True), host.pauses.begin(True)
    first()
    time.run(1.0)
    assert node.ticks == []
    second()
    time.run(2.0)
    assert node.ticks


def test_the_kernel_keeps_so_much_for_a_paused_process_and_drops_the_rest() -> None:
    _, host, node = make_host()
    resume = host.pauses.begin(True)
    taken = sum(host.arrive(bytes(1200), THERE, Plane.DATAGRAM) for _ in range(2000))
    assert 100 < taken < KERNEL_BUFFER_BYTES / 1200
    assert host.dropped == 2000 - taken
    resume()
    assert len(node.got) == taken


def test_a_slow_processor_takes_its_time_for_each_packet_in_order() -> None:
    time, host, node = make_host()
    host.factor = 100.0
    for number in range(50):
        host.arrive(bytes([number]), THERE, Plane.DATAGRAM)
    time.run(1.0)
    assert [data for _, data in node.got] == [bytes([number]) for number in range(50)]
    assert node.got[-1][0] > 0.4


def test_a_crash_loses_memory_and_what_was_not_written() -> None:
    time, host, _ = make_host()
    time.run(10.0)
    host.crash()
    assert not host.running
    assert host.state == b""
    assert host.generation == 2


def test_the_state_file_is_written_in_time_unless_the_disk_is_full() -> None:
    time, host, _ = make_host()
    time.run(31.0)
    assert host.state == b"at 30"
    host.disk_full.begin(True)
    time.run(61.0)
    assert host.state == b"at 30"


def test_who_leaves_states_so_writes_and_is_gone() -> None:
    time, host, node = make_host()
    time.run(1.0)
    host.stop()
    assert node.left
    time.run(1.9)
    assert host.running, "it answers a last second"
    time.run(2.1)
    assert not host.running
    assert host.state


def test_the_name_is_asked_for_ever_and_often_while_alone() -> None:
    time, _, lonely = make_host()
    time.run(120.0)
    assert len([at for at in lonely.contacts if at < 10]) > 4
    assert any(at > 80 for at in lonely.contacts)
    time, _, settled = make_host(lonely=False)
    time.run(120.0)
    assert 4 <= len(settled.contacts) <= 6


def test_a_loop_that_turns_for_nothing_is_counted() -> None:
    time, host, node = make_host(interval_s=0.0)
    time.run(1.0)
    assert host.spins > 100
    assert len(node.ticks) < 2000, "the simulation itself must go on"


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("all", {0, 1, 2, 3, 4, 5}),
        ("empty", set()),
        ("failing", set()),
        ("self", {2}),
        ("stale", {0, 1}),
        ("foreign", {5}),
    ],
)
def test_the_name_states_what_the_scenario_wants(word: str, found: set[int]) -> None:
    assert {number_of(address) for address in ask(word, 2)} == found


def ask(word: str, asker: int) -> list[Address]:
    time = VirtualTime()
    dns = SimDns(time, Random(1), [(f"10.0.0.{number}", 1) for number in range(6)], word)
    dns.running = lambda: list(range(6))
    dns.foreign = lambda: [5]
    dns.beginning = (0, 1)
    got: list[Address] = []
    dns.resolve(asker, got.extend)
    time.run(10.0)
    return got


def number_of(address: Address) -> int:
    return int(address[0].rpartition(".")[2])


def test_a_subset_is_a_third_and_not_always_the_same() -> None:
    time = VirtualTime()
    dns = SimDns(time, Random(1), [(f"10.0.0.{number}", 1) for number in range(9)], "subset")
    dns.running = lambda: list(range(9))
    seen: list[tuple[int, ...]] = []
    for _ in range(10):
        dns.resolve(0, lambda found: seen.append(tuple(number_of(address) for address in found)))
    time.run(1.0)
    assert {len(found) for found in seen} == {3}
    assert len(set(seen)) > 3


def test_the_trace_keeps_the_last_events_of_each_node() -> None:
    trace = Trace()
    for number in range(200):
        trace.add(number / 10, number % 2, "what", number)
    assert len(trace.last((0, 1))) == EVENTS_KEPT
    assert all(event.node == 1 for event in trace.last((1,)))
    other = Trace()
    other.add(0.0, 0, "what", 0)
    assert other.digest() != trace.digest()
