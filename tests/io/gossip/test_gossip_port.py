"""The shell of gossip: time under a mock clock, datagrams and effects on real sockets."""

from __future__ import annotations

import errno
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import pytest
import trio
import trio.testing

from ranvier_py.core.mesh.mesh_values import DATAGRAM_BYTES_MAX, MemberChange, Plane, Send
from ranvier_py.core.mesh.port_traffic import PortOptions
from ranvier_py.core.mesh.wire.messages import Record, State
from ranvier_py.io.gossip.gossip_port import HURRIED_MAX, LOOK_S, ROUNDS_MAX, GossipPort, open_sockets
from tests.io.gossip.gossip_fakes import FakeGossip, address_of, checkpoints, number_of, packet, send, shell

Clock = trio.testing.MockClock
NOWHERE = ("255.255.255.255", 9)  # the kernel refuses to send there


class Timer:
    """A shell of which only the timer runs. The core wants to be woken at `due`."""

    def __init__(self, due: Sequence[float] = ()) -> None:
        self.due = list(due)
        self.gossip = FakeGossip()
        self.gossip.on_tick = self.next
        self.late_s = 0.0
        self.next(0)

    def next(self, now: float) -> None:
        self.gossip.wake_at = self.due.pop(0) if self.due else inf

    @property
    def ticks(self) -> list[float]:
        return [round(at, 6) for at in self.gossip.seen("tick")]

    async def start(self, nursery: trio.Nursery) -> GossipPort:
        sockets = await open_sockets("127.0.0.1", 0)
        net = GossipPort(self.gossip, sockets, clock=lambda: trio.current_time() + self.late_s)
        sockets.close()
        nursery.start_soon(net.keep_time)
        await trio.testing.wait_all_tasks_blocked()
        return net


async def test_the_core_is_woken_when_it_wants(autojump_clock: Clock, nursery: trio.Nursery) -> None:
    timer = Timer([0.5, 0.5, 0.7, 100.25])
    net = await timer.start(nursery)
    await trio.sleep(1000)
    assert timer.ticks == [0.5, 0.5, 0.7, 100.25]
    assert net.counters.ticks == 4


async def test_a_poke_wakes_the_timer_earlier_and_is_harmless_otherwise(
    autojump_clock: Clock, nursery: trio.Nursery
) -> None:
    timer = Timer([0.9, 0.95])
    net = await timer.start(nursery)
    net.poke()
    await trio.sleep(0.1)
    timer.gossip.wake_at = 0.2
    for _ in range(3):
        net.poke()
    await trio.sleep(0.5)
    assert timer.ticks == [0.2]
    timer.gossip.wake_at = 5
    net.poke()
    await trio.sleep(10)
    assert timer.ticks == [0.2, 5]


async def test_a_poke_that_was_forgotten_costs_a_second_at_most(autojump_clock: Clock, nursery: trio.Nursery) -> None:
    timer = Timer([10.0])
    await timer.start(nursery)
    await trio.sleep(1.5)
    timer.gossip.wake_at = 1.5
    await trio.sleep(LOOK_S)
    assert len(timer.ticks) == 1
    assert timer.ticks[0] <= 1.5 + LOOK_S


async def test_a_core_that_is_always_due_leaves_room_for_others(autojump_clock: Clock, nursery: trio.Nursery) -> None:
    """Otherwise one bug there takes the whole core of the machine for ever."""
    timer = Timer()
    timer.gossip.wake_at = 0.0
    timer.gossip.on_tick = lambda now: None
    await timer.start(nursery)
    began = len(timer.ticks)
    await trio.sleep(1)
    assert began <= HURRIED_MAX + 1
    assert 500 <= len(timer.ticks) - began <= 1500


async def test_a_tick_that_fails_is_counted_and_the_next_one_comes(
    autojump_clock: Clock, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    timer = Timer()

    def fail(now: float) -> None:
        raise RuntimeError("a bug of the core")

    timer.gossip.on_tick = fail
    timer.gossip.wake_at = 0.0
    net = await timer.start(nursery)
    await trio.sleep(20)
    assert net.faults.counters.unexpected_errors == {"gossip_tick": len(timer.ticks)}
    assert len(timer.ticks) > 100
    assert len(caplog.records) == 1
    assert "a bug of the core" in caplog.text
    await trio.sleep(20)
    assert len(caplog.records) == 2
    assert "more since the last line" in caplog.records[1].getMessage()


async def test_lateness_of_the_event_loop_is_measured(mock_clock: Clock, nursery: trio.Nursery) -> None:
    timer = Timer([0.5, 0.6])
    net = await timer.start(nursery)
    timer.late_s = 0.3  # while it sleeps, somebody holds the loop
    mock_clock.jump(0.5)
    await trio.testing.wait_all_tasks_blocked()
    assert net.lateness_s.count == 1
    assert net.lateness_s.sum == pytest.approx(0.3)
    assert len(timer.ticks) == 2  # the second was due as well


async def test_effects_of_every_call_are_carried_out_at_once() -> None:
    async with shell() as (net, gossip), shell() as (peer, other):
        to = address_of(peer)
        calls: list[Callable[[], object]] = [
            partial(net.contact, [to]),
            net.leave,
            net.tick,
            partial(net.broke, to, Plane.BULK, ConnectionResetError()),
        ]
        for number, call in enumerate(calls):
            gossip.outbox.append(Send(to, Plane.DATAGRAM, packet(number=number)))
            call()
            assert gossip.outbox == []
        await other.until("receive", 4)
        assert sorted(map(number_of, other.packets())) == [0, 1, 2, 3]
        assert [call for call, _ in gossip.calls] == ["contact", "leave", "tick", "unreachable"]


async def test_an_answer_goes_back_to_where_the_question_came_from() -> None:
    async with shell(host="127.0.0.2") as (net, gossip), shell() as (peer, other):
        other.answer = lambda data, source, plane: [Send(source, plane, packet(number=2))]
        send(net, address_of(peer), Plane.DATAGRAM, packet(number=1))
        (data, source, plane), *_ = await gossip.until("receive")
        assert (number_of(data), source, plane) == (2, address_of(peer), Plane.DATAGRAM)
        assert other.seen("receive")[0][1] == address_of(net)
        assert address_of(net)[0] == "127.0.0.2"


async def test_effects_that_follow_from_effects_come_to_an_end() -> None:
    """A core that answers each failure with another one must not hold the loop for ever."""
    async with shell() as (net, gossip):
        gossip.on_unreachable = lambda address, plane: [Send(address, plane, packet())]
        send(net, NOWHERE, Plane.DATAGRAM, packet())
        assert len(gossip.seen("unreachable")) == ROUNDS_MAX
        gossip.on_unreachable = lambda address, plane: ()
        net.carry(net.clock())
        assert len(gossip.seen("unreachable")) == ROUNDS_MAX + 1


async def test_changes_of_members_are_passed_on() -> None:
    reported: list[MemberChange] = []
    change = MemberChange("joined", Record("a", 1, 1, 0, State.ALIVE, "10.0.0.2", 7, 1), "")
    async with shell() as (net, gossip):
        net.changed = reported.extend
        gossip.changed.append(change)
        net.contact([])
        net.contact([])
    assert reported == [change]


async def test_datagrams_and_streams_share_a_port() -> None:
    sockets = await open_sockets("127.0.0.1", 0)
    assert sockets.datagrams is not None
    assert sockets.datagrams.getsockname() == sockets.listener.getsockname() == ("127.0.0.1", sockets.port)
    with pytest.raises(OSError, match=f"gossip on 127.0.0.1:{sockets.port}") as caught:
        await open_sockets("127.0.0.1", sockets.port)
    assert caught.value.errno == errno.EADDRINUSE
    sockets.close()


async def test_a_port_that_udp_alone_has_is_taken() -> None:
    """Two nodes that got half of each other's packets would be hard to find."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with pytest.raises(OSError, match="gossip on"):
            await open_sockets("127.0.0.1", port)
        (await open_sockets("127.0.0.1", port, udp=False)).close()


async def test_without_udp_datagrams_are_dropped_and_streams_go_on() -> None:
    async with shell(udp=False) as (net, gossip), shell(udp=False) as (peer, other):
        send(net, address_of(peer), Plane.DATAGRAM, packet())
        send(net, address_of(peer), Plane.PROBE, packet(Plane.PROBE))
        await other.until("receive")
        assert net.counters.drops["no_udp"] == 1
        assert gossip.seen("unreachable") == []


async def test_datagrams_that_are_too_long_are_dropped_on_both_sides() -> None:
    async with shell() as (net, gossip), shell() as (peer, _):
        send(net, address_of(peer), Plane.DATAGRAM, packet(size=DATAGRAM_BYTES_MAX + 1))
        assert net.counters.drops["too_long"] == 1
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(b"x" * (DATAGRAM_BYTES_MAX + 1), address_of(net))
            stranger.sendto(b"", address_of(net))
            stranger.sendto(packet(size=DATAGRAM_BYTES_MAX), address_of(net))
        await gossip.until("receive", 2)
        assert [len(data) for data in gossip.packets()] == [0, DATAGRAM_BYTES_MAX]
        assert net.counters.drops["too_long"] == 2


async def test_an_address_that_can_not_be_reached_is_reported_to_the_core() -> None:
    """memberlist#242: the neighbour was kept alive for ever."""
    async with shell() as (net, gossip):
        for address in (NOWHERE, ("::1", 9), ("router.example", 9), ("127.0.0.1", 0)):
            send(net, address, Plane.DATAGRAM, packet())
            assert gossip.seen("unreachable")[-1] == (address, Plane.DATAGRAM)
        assert net.counters.drops["no_such_address"] == 3
        assert net.counters.drops["error"] == sum(net.counters.errors.values()) == 1


class Broken:
    """A socket whose calls fail with these errors first."""

    def __init__(self, sock: socket.socket, *, sending: Sequence[int] = (), receiving: Sequence[int] = ()) -> None:
        self.sock = sock
        self.sending = list(sending)
        self.receiving = list(receiving)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def sendto(self, data: bytes, to: Any) -> int:
        if self.sending:
            raise OSError(self.sending.pop(0), "broken")
        return self.sock.sendto(data, to)

    def recvmsg(self, *sizes: int) -> Any:
        if self.receiving:
            raise OSError(self.receiving.pop(0), "broken")
        return self.sock.recvmsg(*sizes)


@pytest.mark.parametrize(
    ("number", "reachable"),
    [
        (errno.ENOBUFS, True),
        (errno.EMSGSIZE, True),
        (errno.ENETUNREACH, False),
        (errno.EHOSTUNREACH, False),
        (errno.EPERM, False),
        (errno.ECONNREFUSED, False),
        (errno.EINVAL, False),
    ],
)
async def test_an_error_of_sending_is_counted_and_the_next_datagram_leaves(number: int, reachable: bool) -> None:
    async with shell(wrap=partial(Broken, sending=[number])) as (net, gossip), shell() as (peer, other):
        send(net, address_of(peer), Plane.DATAGRAM, packet(number=1))
        send(net, address_of(peer), Plane.DATAGRAM, packet(number=2))
        await other.until("receive")
        assert list(map(number_of, other.packets())) == [2]
        assert (gossip.seen("unreachable") == []) == reachable
        assert net.counters.errors == {errno.errorcode[number]: 1}


async def test_errors_of_receiving_do_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    """chitchat#145: one ECONNREFUSED, and all gossip stopped."""
    caplog.set_level(logging.INFO)
    errors = [errno.ECONNREFUSED, errno.ENOBUFS, errno.ECONNREFUSED]
    async with shell(wrap=partial(Broken, receiving=errors)) as (net, gossip), shell() as (peer, _):
        for number in range(3):
            send(peer, address_of(net), Plane.DATAGRAM, packet(number=number))
        await gossip.until("receive", 3)
        assert net.counters.errors == {"ECONNREFUSED": 2, "ENOBUFS": 1}
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


async def test_a_full_socket_drops_and_blames_no_peer() -> None:
    async with shell(wrap=partial(Broken, sending=[errno.EAGAIN])) as (net, gossip), shell() as (peer, _):
        send(net, address_of(peer), Plane.DATAGRAM, packet())
        assert net.counters.drops["socket_full"] == 1
        assert gossip.seen("unreachable") == []


@pytest.mark.parametrize(("drain_max", "hold_s", "longest"), [(10, 1.0, 2 * 10), (64, 0.0, 2)])
async def test_a_flood_of_datagrams_does_not_keep_the_timer_from_ticking(
    drain_max: int, hold_s: float, longest: int
) -> None:
    """By number or by time. The order of tasks within one turn of the loop is random."""
    async with shell(drain_max=drain_max, hold_s=hold_s) as (net, gossip), shell() as (peer, _):
        gossip.on_tick = lambda now: None
        for number in range(200):
            send(peer, address_of(net), Plane.DATAGRAM, packet(number=number))
        gossip.wake_at = 0.0
        net.poke()
        await gossip.until("receive", 200)
        assert longest_run(gossip, "receive") <= longest
        assert len(gossip.seen("tick")) >= 19


def longest_run(gossip: FakeGossip, call: str) -> int:
    longest = current = 0
    for name, _ in gossip.calls:
        current = current + 1 if name == call else 0
        longest = max(longest, current)
    return longest


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts them")
async def test_what_the_kernel_drops_is_counted() -> None:
    gossip, sockets = FakeGossip(), await open_sockets("127.0.0.1", 0)
    assert sockets.datagrams is not None
    net = GossipPort(gossip, sockets, options=PortOptions(socket_bytes=4096), clock=trio.current_time)  # type: ignore[arg-type]
    assert 4096 <= net.counters.receive_buffer_bytes < 100_000
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer, trio.fail_after(10):
        for _ in range(200):
            peer.sendto(b"x" * 1200, ("127.0.0.1", sockets.port))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(net.receive_datagrams, sockets.datagrams)
            await gossip.until("receive")
            await trio.testing.wait_all_tasks_blocked()
            peer.sendto(b"last", ("127.0.0.1", sockets.port))
            await checkpoints(lambda: gossip.packets()[-1] == b"last")
            nursery.cancel_scope.cancel()
    assert net.counters.kernel_drops == 201 - len(gossip.packets()) > 0
    sockets.close()


async def test_statistics_count_packets_and_bytes_by_plane() -> None:
    async with shell() as (net, _), shell() as (peer, other):
        for plane, size in ((Plane.DATAGRAM, 100), (Plane.PROBE, 200), (Plane.BULK, 300), (Plane.BULK, 300)):
            send(net, address_of(peer), plane, packet(plane, size))
        await other.until("receive", 4)
        await checkpoints(lambda: net.counters.queued_bytes == 0)
        sent, received = net.counters, peer.counters
        assert sent.packets_sent == received.packets_received == {"datagram": 1, "probe": 1, "bulk": 2, "answers": 0}
        assert sent.bytes_sent == received.bytes_received == {"datagram": 100, "probe": 204, "bulk": 608, "answers": 0}
        assert (sent.streams_out, received.streams_in) == (2, 2)
        assert received.packets_sent == dict.fromkeys(("datagram", "probe", "bulk", "answers"), 0)


async def test_a_socket_for_everything_knows_ipv4_peers_by_their_ipv4_addresses() -> None:
    """A peer with two spellings would be two peers."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    async with shell(host="::") as (net, gossip), shell() as (peer, other):
        assert (net.sockets.family, peer.sockets.family) == (socket.AF_UNSPEC, socket.AF_INET)
        send(net, address_of(peer), Plane.DATAGRAM, packet(number=1))
        send(net, address_of(peer), Plane.BULK, packet(Plane.BULK, number=2))
        await other.until("receive", 2)
        assert {source[0] for _, source, _ in other.seen("receive")} == {"127.0.0.1"}
        send(peer, ("127.0.0.1", net.sockets.port), Plane.DATAGRAM, packet(number=3))
        send(peer, ("127.0.0.1", net.sockets.port), Plane.BULK, packet(Plane.BULK, number=4))
        await gossip.until("receive", 2)
        assert {source[0] for _, source, _ in gossip.seen("receive")} == {"127.0.0.1"}
