"""Streams of gossip on real sockets: what arrives, what is dropped, and who learns of trouble."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from ranvier_py.core.mesh.mesh_values import FRAME_BYTES_MAX, Address, Plane, Send
from ranvier_py.core.mesh.wire.frame import OVERHEAD_BYTES, STREAM_HEAD
from ranvier_py.io.gossip import gossip_streams
from ranvier_py.io.gossip.gossip_port import GossipPort
from tests.io.gossip.gossip_fakes import address_of, checkpoints, frame, number_of, packet, send, shell

BULK, PROBE = Plane.BULK, Plane.PROBE


def bulk(size: int = 100, number: int = 0) -> bytes:
    return packet(BULK, size, number)


class Raw:
    """A peer made of plain sockets: accepts and reads when the test wants."""

    def __init__(self, receive_bytes: int = 0) -> None:
        self.listener = trio.socket.socket()
        self.streams: list[trio.SocketStream] = []
        if receive_bytes:
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)

    async def bind(self) -> Address:
        await self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(64)
        found: Address = self.listener.getsockname()
        return found

    async def accept(self) -> trio.SocketStream:
        sock, _ = await self.listener.accept()
        self.streams.append(trio.SocketStream(sock))
        return self.streams[-1]

    def close(self) -> None:
        self.listener.close()
        for stream in self.streams:
            stream.socket.close()


@asynccontextmanager
async def raw(receive_bytes: int = 0) -> AsyncIterator[tuple[Raw, Address]]:
    peer = Raw(receive_bytes)
    try:
        yield peer, await peer.bind()
    finally:
        peer.close()


Dial = Callable[[GossipPort], Awaitable[trio.SocketStream]]


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    """Opens streams to a shell, as strangers do."""
    streams: list[trio.SocketStream] = []

    async def opened(net: GossipPort) -> trio.SocketStream:
        streams.append(await trio.open_tcp_stream(*address_of(net)))
        return streams[-1]

    yield opened
    for stream in streams:
        stream.socket.close()


async def read_frame(stream: trio.SocketStream) -> bytes:
    (length,) = STREAM_HEAD.unpack(await exactly(stream, STREAM_HEAD.size))
    return await exactly(stream, length)


async def exactly(stream: trio.SocketStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = await stream.receive_some(count - len(data))
        assert piece, "the stream ended"
        data += piece
    return data


async def ended(stream: trio.SocketStream) -> None:
    """Wait until the other side has closed it."""
    with suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass


async def test_packets_of_every_size_arrive_whole_and_in_order() -> None:
    sizes = [OVERHEAD_BYTES, 47, 1000, 65_536, FRAME_BYTES_MAX, FRAME_BYTES_MAX - 1, 100, *[60] * 500]
    async with shell() as (net, _), shell() as (peer, other):
        for number, size in enumerate(sizes):
            send(net, address_of(peer), BULK, bulk(size, number))
        await other.until("receive", len(sizes))
        assert list(map(number_of, other.packets())) == list(range(len(sizes)))
        assert list(map(len, other.packets())) == sizes
        assert {plane for _, _, plane in other.seen("receive")} == {BULK}


async def test_each_address_and_plane_has_one_stream_that_comes_from_where_we_listen() -> None:
    """A peer tells us apart by address; the kernel would choose 127.0.0.1."""
    async with shell(host="127.0.0.2") as (net, _), shell() as (peer, other):
        for number in range(20):
            send(net, address_of(peer), BULK, bulk(number=number))
            send(net, address_of(peer), PROBE, packet(PROBE, number=number))
            await other.until("receive", 2 * number + 2)
        assert peer.counters.accepted == net.counters.connects == 2
        assert {source[0] for _, source, _ in other.seen("receive")} == {"127.0.0.2"}
        assert sorted(plane for _, _, plane in other.seen("receive")) == [PROBE] * 20 + [BULK] * 20


async def test_a_packet_that_is_too_long_or_empty_is_dropped() -> None:
    async with shell() as (net, _), shell() as (peer, _):
        send(net, address_of(peer), BULK, bulk(FRAME_BYTES_MAX + 1))
        send(net, address_of(peer), BULK, b"")
        assert net.counters.drops["too_long"] == 2
        assert net.counters.streams_out == 0


async def test_an_idle_stream_is_closed_and_opened_again_and_nobody_is_blamed() -> None:
    async with shell(idle_out_s=0.01) as (net, gossip), shell() as (peer, other):
        for number in range(3):
            send(net, address_of(peer), BULK, bulk(number=number))
            await other.until("receive", number + 1)
            await checkpoints(lambda: net.counters.streams_out == 0)
        await checkpoints(lambda: peer.counters.streams_in == 0)
        assert peer.counters.closed == {"peer": 3}
        assert gossip.seen("unreachable") == []
        assert net.counters.broken == 0


async def test_a_refused_stream_is_reported_and_its_queue_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with raw() as (_, nowhere):
        pass
    async with shell() as (net, gossip):
        for number in range(3):
            send(net, nowhere, BULK, bulk(number=number))
        assert (await gossip.until("unreachable"))[0] == (nowhere, BULK)
        statistics = net.counters
        assert (statistics.drops["broken"], statistics.queued_bytes, statistics.broken) == (3, 0, 1)
        assert statistics.errors == {"ECONNREFUSED": 1}
        await checkpoints(lambda: net.counters.streams_out == 0)
    (record,) = caplog.records
    assert record.getMessage() == f"gossip.stream_failed 127.0.0.1:{nowhere[1]} Connection refused"


async def test_a_peer_that_is_refused_again_and_again_is_tried_ever_more_rarely() -> None:
    async with raw() as (_, nowhere):
        pass
    async with shell(retry_s=0.01, retry_s_max=0.08) as (net, gossip):
        times: list[float] = []
        tries = 8

        def insist(address: Address, plane: Plane) -> Sequence[Send]:
            times.append(trio.current_time())
            return [Send(address, plane, bulk())] if len(times) < tries else []

        gossip.on_unreachable = insist
        send(net, nowhere, BULK, bulk())
        await gossip.until("unreachable", tries)
        least = [0.005, 0.01, 0.02, 0.04, 0.04, 0.04, 0.04]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert all(gap >= wait for gap, wait in zip(gaps, least, strict=True))


async def test_a_stream_that_its_peer_closes_is_reported_and_opened_when_needed() -> None:
    async with shell(retry_s=0.001) as (net, gossip), raw() as (peer, address):
        send(net, address, BULK, bulk(number=1))
        first = await peer.accept()
        assert number_of(await read_frame(first)) == 1
        await first.aclose()
        assert await gossip.until("unreachable") == [(address, BULK)]
        await checkpoints(lambda: net.counters.streams_out == 0)
        send(net, address, BULK, bulk(number=2))
        second = await peer.accept()
        assert number_of(await read_frame(second)) == 2


async def test_a_peer_that_answers_on_a_stream_is_cut_off() -> None:
    """Nothing is ever read from it, so it would fill up."""
    async with shell() as (net, gossip), raw() as (peer, address):
        send(net, address, BULK, bulk())
        stream = await peer.accept()
        await read_frame(stream)
        await stream.send_all(b"hello")
        await gossip.until("unreachable")
        await ended(stream)


async def test_a_peer_that_takes_nothing_is_given_up_and_others_are_not_held_up() -> None:
    async with (
        shell(stall_s=0.05) as (net, gossip),
        raw(receive_bytes=4096) as (peer, address),
        shell() as (well, other),
    ):
        for number in range(64):
            send(net, address, BULK, bulk(60_000, number))
        await peer.accept()
        send(net, address_of(well), BULK, bulk())
        await other.until("receive")
        assert await gossip.until("unreachable") == [(address, BULK)]
        assert net.counters.queued_bytes == 0
        assert net.counters.drops["broken"] > 0


async def test_a_slow_peer_that_takes_a_little_at_a_time_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time-out is for the next bytes alone, however long all of them take."""
    async with raw(receive_bytes=4096) as (peer, address), shell(stall_s=0.5) as (net, gossip):
        real = net.outbound.connect

        async def narrow(to: Address) -> socket.socket:
            sock = await real(to)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # or the kernel takes all of it at once
            return sock

        monkeypatch.setattr(net.outbound, "connect", narrow)
        send(net, address, BULK, bulk(60_000))
        stream = await peer.accept()
        began, left = trio.current_time(), STREAM_HEAD.size + 60_000
        while left:
            left -= len(await stream.receive_some(2000))
            await trio.sleep(0.04)
        assert trio.current_time() - began > 2 * net.options.stall_s
        assert gossip.seen("unreachable") == []
        assert net.counters.drops["broken"] == 0


async def test_a_connection_that_is_not_made_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that answers nothing at all: SYNs go to a backlog that is full."""
    with socket.socket() as listener, trio.fail_after(10):
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(8)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        async with shell(connect_s=0.05) as (net, gossip):
            send(net, address, BULK, bulk())
            assert await gossip.until("unreachable") == [(address, BULK)]
            assert net.counters.errors == {"TimeoutError": 1}
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize(("plane", "bound"), [(BULK, 10_000), (PROBE, 5_000)])
async def test_what_has_no_room_in_its_queue_is_dropped(plane: Plane, bound: int) -> None:
    async with shell(bulk_queue_bytes=10_000, probe_queue_bytes=5_000) as (net, gossip), raw() as (peer, address):
        for number in range(20):
            send(net, address, plane, packet(plane, 996, number))
        fitting = bound // 1000
        assert net.counters.drops["queue_full"] == 20 - fitting
        assert net.counters.queued_bytes == 1000 * fitting
        stream = await peer.accept()
        assert [number_of(await read_frame(stream)) for _ in range(fitting)] == list(range(fitting))
        assert gossip.seen("unreachable") == []


async def test_all_queues_together_are_bounded_and_so_are_streams() -> None:
    async with shell(queued_bytes=5_000, streams_out=8) as (net, gossip):
        for number in range(10):
            send(net, (f"127.0.0.{number + 3}", 9), BULK, bulk(996))
        assert net.counters.queued_bytes == 5_000
        assert net.counters.drops["memory"] == 5
    async with shell(streams_out=3) as (net, gossip):
        for number in range(10):
            send(net, (f"127.0.0.{number + 3}", 9), BULK, bulk())
        assert net.counters.streams_out == 3
        assert net.counters.drops["streams"] == 7
        assert gossip.seen("unreachable") == []


async def test_an_address_that_no_stream_can_have_is_reported() -> None:
    async with shell() as (net, gossip):
        send(net, ("router.example", 9), BULK, bulk())
        assert gossip.seen("unreachable") == [(("router.example", 9), BULK)]
        assert net.counters.streams_out == 0


async def test_whoever_is_cancelled_in_the_middle_of_a_frame_ends_the_connection(dial: Dial) -> None:
    """Half a frame would be taken for the beginning of the next one."""
    async with raw(receive_bytes=4096) as (peer, address), shell() as (reader, other):
        async with shell() as (net, _):
            for number in range(16):
                send(net, address, BULK, bulk(FRAME_BYTES_MAX, number))
            stream = await peer.accept()
            half = await exactly(stream, 1000)
        await ended(stream)
        relay = await dial(reader)
        await relay.send_all(half)
        relay.socket.close()
        await checkpoints(lambda: reader.counters.closed == {"peer": 1})
        assert other.packets() == []


async def test_want_of_descriptors_is_no_fault_of_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [2]

    async with shell(retry_s=0.001) as (net, gossip), shell() as (peer, other):
        real = net.outbound.connect

        async def scarce(address: Address) -> socket.socket:
            if left[0] > 0:
                left[0] -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return await real(address)

        monkeypatch.setattr(net.outbound, "connect", scarce)
        for number in range(3):
            send(net, address_of(peer), BULK, bulk(number=number))
            await checkpoints(lambda: net.counters.queued_bytes == 0)
        await other.until("receive")
        assert net.counters.errors == {"EMFILE": 2}
        assert gossip.seen("unreachable") == []


async def test_a_bug_in_one_stream_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shell() as (net, _), shell() as (peer, other):
        real = net.outbound.connect

        async def connect(address: Address) -> Any:
            if address[1] == 9:
                raise RuntimeError("a bug")
            return await real(address)

        monkeypatch.setattr(net.outbound, "connect", connect)
        send(net, ("127.0.0.1", 9), BULK, bulk())
        send(net, address_of(peer), BULK, bulk())
        await other.until("receive")
        await checkpoints(lambda: net.counters.streams_out == 1)
        assert net.faults.counters.unexpected_errors == {"gossip_stream": 1}
        assert net.counters.queued_bytes == 0


@pytest.mark.parametrize(
    "head", [FRAME_BYTES_MAX + 1, 2**32 - 1, 0, OVERHEAD_BYTES - 1, int.from_bytes(b"GET ", "little")]
)
async def test_a_length_that_can_not_be_ends_its_stream_and_no_other(dial: Dial, head: int) -> None:
    async with shell() as (net, gossip):
        good, bad = [await dial(net) for _ in range(2)]
        await bad.send_all(frame(bulk(number=1)) + STREAM_HEAD.pack(head) + bytes(100_000))
        await ended(bad)
        await good.send_all(frame(bulk(number=2)))
        await gossip.until("receive", 2)
        assert sorted(map(number_of, gossip.packets())) == [1, 2]
        assert net.counters.closed == {"malformed": 1}


async def test_a_frame_that_is_none_of_ours_costs_only_itself(dial: Dial) -> None:
    async with shell() as (net, gossip):
        stream = await dial(net)
        foreign = [b"x" * 100, packet(Plane.DATAGRAM), packet(PROBE, number=1)]
        await stream.send_all(b"".join(map(frame, foreign)))
        (data, source, plane), *_ = await gossip.until("receive")
        assert (number_of(data), plane) == (1, PROBE)
        assert source == stream.socket.getsockname()
        assert net.counters.drops["foreign"] == 2


async def test_frames_may_come_in_any_pieces(dial: Dial) -> None:
    stream_bytes = b"".join(frame(bulk(50 + number, number)) for number in range(30))
    rng = Random(3)
    async with shell() as (net, gossip):
        stream = await dial(net)
        while stream_bytes:
            cut = rng.choice((1, 3, 4, 5, 50, 200, 700))
            await stream.send_all(stream_bytes[:cut])
            stream_bytes = stream_bytes[cut:]
            await trio.testing.wait_all_tasks_blocked()
        await gossip.until("receive", 30)
        assert [(len(data), number_of(data)) for data in gossip.packets()] == [(50 + n, n) for n in range(30)]


async def test_memory_grows_with_what_came_and_not_with_what_was_announced(dial: Dial) -> None:
    """memberlist#357: the count in a header was allocated."""
    async with shell() as (net, _):
        stream = await dial(net)
        await stream.send_all(STREAM_HEAD.pack(FRAME_BYTES_MAX) + b"x" * 10)
        await checkpoints(lambda: any(inbound.buffer for inbound in net.inbound.inbound.values()))
        (inbound,) = net.inbound.inbound.values()
        assert len(inbound.buffer) == 14


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ([], "slow"),
        ([STREAM_HEAD.pack(1000)], "slow"),
        ([frame(bulk())], "idle"),
        ([frame(bulk()) + b"\x40\x00"], "slow"),
    ],
)
async def test_streams_that_send_nothing_or_too_slowly_are_closed(dial: Dial, sent: list[bytes], why: str) -> None:
    async with shell(first_frame_s=0.05, idle_in_s=0.05, frame_s=0.05) as (net, _):
        stream = await dial(net)
        for data in sent:
            await stream.send_all(data)
        await ended(stream)
        await checkpoints(lambda: net.counters.closed == {why: 1})


async def test_a_frame_that_trickles_does_not_live_for_ever(dial: Dial) -> None:
    """A byte now and then keeps an idle time-out away, and 256 KiB of memory taken."""
    async with shell(first_frame_s=0.1, idle_in_s=60, frame_s=0.1) as (net, _):
        stream = await dial(net)
        await stream.send_all(frame(bulk()) + STREAM_HEAD.pack(1000))
        began = trio.current_time()
        with suppress(trio.BrokenResourceError):
            while True:
                await stream.send_all(b"x")
                await trio.sleep(0.01)
        assert trio.current_time() - began < 5
        assert net.counters.closed == {"slow": 1}


async def test_at_the_bound_the_stream_that_was_silent_longest_makes_place(dial: Dial) -> None:
    """Refusing the newest would let strangers lock the peers out."""
    async with shell(streams_in=3) as (net, gossip):
        streams = []
        for number in range(3):
            streams.append(await dial(net))
            await streams[-1].send_all(frame(bulk(number=number)))
            await gossip.until("receive", number + 1)
        await streams[0].send_all(frame(bulk(number=10)))
        await gossip.until("receive", 4)
        newest = await dial(net)
        await ended(streams[1])
        for stream, number in ((streams[0], 20), (streams[2], 21), (newest, 22)):
            await stream.send_all(frame(bulk(number=number)))
        await gossip.until("receive", 7)
        assert net.counters.streams_in == 3
        assert net.counters.closed == {"displaced": 1}


class Scarce:
    """A listener that has no descriptor for the first connections."""

    def __init__(self, sock: socket.socket, failures: int) -> None:
        self.sock = sock
        self.failures = failures

    def fileno(self) -> int:
        return self.sock.fileno()

    def accept(self) -> Any:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.sock.accept()


async def test_accepting_pauses_while_there_are_no_descriptors(dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_streams, "ACCEPT_PAUSE_S", 0.02)
    async with shell() as (net, gossip):
        listener = Scarce(net.inbound.listener, 3)
        net.inbound.listener = listener  # type: ignore[assignment]
        began = trio.current_time()
        streams = [await dial(net) for _ in range(2)]
        for number, stream in enumerate(streams):
            await stream.send_all(frame(bulk(number=number)))
        await gossip.until("receive", 2)
        assert trio.current_time() - began >= 3 * 0.02 * 0.9
        assert net.counters.errors == {"EMFILE": 3}


async def test_a_stream_full_of_frames_does_not_keep_the_timer_from_ticking(dial: Dial) -> None:
    async with shell(hold_s=0.0) as (net, gossip):
        gossip.on_tick = lambda now: None
        gossip.wake_at = 0.0
        net.poke()
        stream = await dial(net)
        await stream.send_all(b"".join(frame(bulk(number=number)) for number in range(50)))
        await gossip.until("receive", 50)
        calls = [name for name, _ in gossip.calls]
        first = calls.index("receive")
        assert calls[first:].count("tick") >= 25
        assert list(map(number_of, gossip.packets())) == list(range(50))


async def test_an_exception_in_the_core_does_not_end_the_stream(dial: Dial, caplog: pytest.LogCaptureFixture) -> None:
    async with shell() as (net, gossip):

        def answer(data: bytes, source: Address, plane: Plane) -> Sequence[Send]:
            if number_of(data) == 0:
                raise RuntimeError("a bug")
            return ()

        gossip.answer = answer
        stream = await dial(net)
        await stream.send_all(frame(bulk(number=0)) + frame(bulk(number=1)))
        await gossip.until("receive", 2)
        assert net.faults.counters.unexpected_errors == {"gossip_receive": 1}
        assert net.counters.closed == {}


async def test_a_peer_that_resets_its_stream_is_forgotten(dial: Dial) -> None:
    async with shell() as (net, gossip):
        stream = await dial(net)
        await stream.send_all(frame(bulk()))
        await gossip.until("receive")
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        await stream.aclose()
        await checkpoints(lambda: net.counters.closed == {"error": 1})
        assert net.counters.streams_in == 0
