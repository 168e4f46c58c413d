"""The relay between nodes and its recorder, with plain sockets in place of nodes."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import trio

from cluster.dns.addresses import free_port
from cluster.network.links import CUT, Link, Links, Rule
from cluster.processes.packet_record import Deframer, Recorder
from cluster.processes.relay import End, Relay

DEADLINE_S = 10
REAL, SHOWN = ("127.0.4.2", "127.0.4.3"), ("127.0.5.2", "127.0.5.3")


class Pair:
    """Two nodes' sockets and the relay between them."""

    def __init__(self, relay: Relay, links: Links, port: int) -> None:
        self.relay, self.links, self.port = relay, links, port
        self.udp = [trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in REAL]

    def set(self, sender: int, receiver: int, link: Link | None) -> None:
        """Let this direction be so; all others are open."""
        self.links.heal()
        if link is not None:
            self.links.add(Rule([sender], [receiver], link, one_direction=True))
        self.relay.wake()

    def shown(self, number: int) -> tuple[str, int]:
        return SHOWN[number], self.port

    async def send(self, number: int, text: bytes) -> None:
        await self.udp[number].sendto(text, self.shown(1 - number))

    async def receive(self, number: int) -> tuple[bytes, str]:
        data, source = await self.udp[number].recvfrom(2000)
        return data, source[0]

    async def receives_nothing(self, number: int) -> bool:
        """Nothing comes although something that was sent later, the other way, has come and gone."""
        with trio.move_on_after(0.1):
            await self.receive(number)
            return False
        return True


@asynccontextmanager
async def pair(recorder: Recorder | None = None, real: tuple[str, ...] = REAL) -> AsyncIterator[Pair]:
    port = free_port([*real, *SHOWN], Random())
    ports = [port] * 2 if len(set(real)) == 2 else [port, free_port([real[0]], Random())]
    ends = [End((ip, one), (shown, port)) for ip, one, shown in zip(real, ports, SHOWN, strict=True)]
    links = Links()
    relay = Relay(ends, links, Random(1), recorder)
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(relay.run)
            found = Pair(relay, links, port)
            for sock, end in zip(found.udp, ends, strict=True):
                await sock.bind(end.real)
            try:
                yield found
            finally:
                for sock in found.udp:
                    sock.close()
            nursery.cancel_scope.cancel()


async def test_each_side_sees_the_other_under_its_shown_address() -> None:
    async with pair() as two:
        await two.send(0, b"hello")
        assert await two.receive(1) == (b"hello", SHOWN[0])
        await two.send(1, b"and you")
        assert await two.receive(0) == (b"and you", SHOWN[1])


async def test_a_cut_is_silent_in_its_direction_alone_until_it_heals() -> None:
    async with pair() as two:
        two.set(0, 1, CUT)
        await two.send(0, b"lost")
        await two.send(1, b"received")
        assert await two.receive(0) == (b"received", SHOWN[1])
        assert await two.receives_nothing(1)
        two.set(0, 1, None)
        await two.send(0, b"again")
        assert (await two.receive(1))[0] == b"again"
        assert two.relay.counts["udp cut"] == 1


async def test_a_delayed_datagram_is_overtaken() -> None:
    async with pair() as two:
        two.set(0, 1, Link(delay_s=0.1))
        await two.send(0, b"slow")
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(0.02)  # the relay has taken it
        two.set(0, 1, None)
        await two.send(0, b"quick")
        assert [(await two.receive(1))[0] for _ in range(2)] == [b"quick", b"slow"]


async def test_strangers_are_not_carried() -> None:
    async with pair() as two:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.bind(("127.0.6.6", 0))
            stranger.sendto(b"who?", two.shown(1))
        await two.send(0, b"me")
        assert (await two.receive(1))[0] == b"me"
        assert two.relay.counts["udp from strangers"] == 1


async def stream_to(two: Pair, number: int, local: str | None) -> tuple[trio.SocketStream, trio.SocketStream]:
    """A stream from the other node to this one: the opener's end and the hearer's."""
    (listener,) = await trio.open_tcp_listeners(two.relay.ends[number].real[1], host=two.relay.ends[number].real[0])
    async with listener:
        stream = await trio.open_tcp_stream(*two.shown(number), local_address=local)
        return stream, await listener.accept()


async def test_a_stream_is_carried_and_held_while_the_link_is_cut() -> None:
    async with pair() as two:
        mine, theirs = await stream_to(two, 1, REAL[0])
        assert theirs.socket.getpeername()[0] == SHOWN[0]
        await mine.send_all(b"before")
        assert await theirs.receive_some(100) == b"before"
        two.set(0, 1, CUT)
        await mine.send_all(b"after")
        with trio.move_on_after(0.1) as silence:
            await theirs.receive_some(100)
        assert silence.cancelled_caught
        two.set(0, 1, None)
        assert await theirs.receive_some(100) == b"after"
        await mine.aclose()
        assert await theirs.receive_some(100) == b""
        await theirs.aclose()


async def test_a_node_that_is_gone_breaks_the_stream_of_its_peer() -> None:
    async with pair() as two:
        mine, theirs = await stream_to(two, 1, REAL[0])
        await theirs.aclose()
        assert await mine.receive_some(100) == b""
        await mine.aclose()


async def test_the_recorder_has_what_passed() -> None:
    recorder = Recorder()
    async with pair(recorder) as two:
        await two.send(0, b"a datagram with a secret word")
        await two.receive(1)
        mine, theirs = await stream_to(two, 1, REAL[0])
        frame = b"a frame"
        await mine.send_all(len(frame).to_bytes(4, "little"))
        await mine.send_all(frame)
        while frame not in [packet.data for packet in recorder.packets]:
            await theirs.receive_some(100)
        await mine.aclose()
        await theirs.aclose()
    assert [(packet.sender, packet.receiver, packet.plane) for packet in recorder.packets] == [
        (0, 1, "udp"),
        (0, 1, "tcp"),
    ]
    assert b"secret word" in recorder.packets[0].data


# --- the recorder alone ---------------------------------------------------------------------------------------------


def test_a_full_recorder_states_that_it_is_not_complete() -> None:
    recorder = Recorder(bytes_max=10)
    recorder.note(0, 1, "udp", b"12345678")
    recorder.note(0, 1, "udp", b"12345678")
    assert (len(recorder.packets), recorder.complete) == (1, False)


def test_frames_are_found_whatever_the_cuts() -> None:
    data = b"".join(len(one).to_bytes(4, "little") + one for one in (b"one", b"", b"three"))
    for size in (1, 2, 5, len(data)):
        deframer = Deframer()
        found = [frame for start in range(0, len(data), size) for frame in deframer.feed(data[start : start + size])]
        assert found == [b"one", b"", b"three"]
    assert list(Deframer().feed(b"\xff\xff\xff\xff no frames")) == [b"\xff\xff\xff\xff no frames"]
