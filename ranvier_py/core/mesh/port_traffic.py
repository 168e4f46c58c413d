"""Bounds, counters and rates of the gossip port: what passes it, and what is dropped.

Every drop has a reason and a counter; every error of the kernel is counted by its name (ENOBUFS).
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address

from ranvier_py.core.mesh.mesh_values import Address, Plane
from ranvier_py.core.metrics import counter, gauge

OUR_FAULTS = frozenset(
    (errno.ENOBUFS, errno.ENOMEM, errno.EMSGSIZE, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EADDRNOTAVAIL)
)
"""Errors of sending that are due to this machine and say nothing about the peer."""

LOOK_INTERVAL_S = 1.0
WINDOW_S = 10.0  # of rates: some ten rounds of probes and repair, so that the figure of an idle node is steady
SAMPLES_MAX = int(WINDOW_S / LOOK_INTERVAL_S) + 1

MAPPED = "::ffff:"


class Drop(StrEnum):
    """Why a packet went no further; the label of a counter."""

    TOO_LONG = "too_long"  # longer than its plane carries
    SOCKET_FULL = "socket_full"  # the kernel takes no more datagrams just now
    NO_UDP = "no_udp"  # a datagram, where there are only streams
    NO_SUCH_ADDRESS = "no_such_address"  # no IP literal, or of a family that this socket lacks
    ERROR = "error"  # the kernel refused
    QUEUE_FULL = "queue_full"  # the queue of this stream is full
    MEMORY = "memory"  # the queues of all streams together are full
    STREAMS = "streams"  # too many streams
    BROKEN = "broken"  # it was waiting when its stream broke
    FOREIGN = "foreign"  # received, and its first bytes are not those of our packets


@dataclass(frozen=True, slots=True)
class PortOptions:
    """Bounds of the port. Times in seconds, sizes in bytes."""

    drain_max: int = 64  # datagrams read in one wake-up, before timers and requests have their turn
    hold_s: float = 0.002  # the longest time of one such wake-up: a request waits no longer for gossip
    socket_bytes: int = 4 * 1024 * 1024  # SO_RCVBUF, 212,992 by default: 150 datagrams; Linux cuts it to rmem_max
    probe_queue_bytes: int = 256 * 1024  # some 200 probes; older ones would come too late
    bulk_queue_bytes: int = 4 * 1024 * 1024  # sixteen of the largest frames: a tenth of a second at 300 Mbit/s
    queued_bytes: int = 64 * 1024 * 1024  # of all streams together
    streams_out: int = 1024  # two or three for each of 341 peers
    streams_in: int = 512  # strangers can make us hold one frame for each, 256 KiB: 128 MiB
    connect_s: float = 3.0  # one lost SYN and its repetition
    stall_s: float = 10.0  # a peer that takes nothing for this long is gone; TCP_USER_TIMEOUT as well
    idle_out_s: float = 60.0
    idle_in_s: float = 90.0  # longer than the sender's, so that the sender closes
    first_frame_s: float = 10.0  # within which a stranger must send its first frame
    frame_s: float = 30.0  # for a whole frame: 9 kB/s
    retry_s: float = 0.1  # after a broken stream; doubles
    retry_s_max: float = 5.0
    settled_s: float = 5.0  # after a stream that lived this long, retries start at `retry_s` again


PLANES = tuple(plane.name.lower() for plane in Plane)  # labels of the counters by plane


@dataclass(slots=True)
class PortCounters:
    """Totals since the start, and gauges. The planes are datagram, probe, bulk and answers."""

    streams_out: int = gauge("Streams for gossip that this node has open to peers.")
    streams_in: int = gauge("Streams for gossip that peers have open to this node.")
    queued_bytes: int = gauge("Bytes that wait in all streams to peers.")
    receive_buffer_bytes: int = gauge("Bytes of the gossip socket's receive buffer for datagrams.")
    packets_sent: dict[str, int] = counter("Datagrams sent by the gossip port.", label="plane")
    packets_received: dict[str, int] = counter("Datagrams received on the gossip port.", label="plane")
    bytes_sent: dict[str, int] = counter("Bytes of datagrams sent by the gossip port.", label="plane")
    bytes_received: dict[str, int] = counter("Bytes of datagrams received on the gossip port.", label="plane")
    drops: dict[str, int] = counter("Packets dropped by the gossip port, by reason.", label="reason")
    errors: dict[str, int] = counter("Errors of the kernel when the gossip port sent or received.", label="name")
    kernel_drops: int = counter("Datagrams that found no room in the gossip socket's buffer.")
    connects: int = counter("Streams for gossip that this node opened to peers.")
    broken: int = counter("Streams to peers that could not be opened, broke or stalled.")
    accepted: int = counter("Streams for gossip that this node accepted from peers.")
    closed: dict[str, int] = counter("Streams of peers closed by the gossip port, by reason.", label="why")
    ticks: int = counter("Ticks of the timer that drives gossip.")

    def __post_init__(self) -> None:
        for by_plane in (self.packets_sent, self.packets_received, self.bytes_sent, self.bytes_received):
            by_plane.update(dict.fromkeys(PLANES, 0))
        self.drops.update({reason.value: 0 for reason in Drop})

    def sent(self, plane: Plane, size: int, packets: int = 1) -> None:
        self.packets_sent[PLANES[plane]] += packets
        self.bytes_sent[PLANES[plane]] += size

    def received(self, plane: Plane, size: int) -> None:
        self.packets_received[PLANES[plane]] += 1
        self.bytes_received[PLANES[plane]] += size

    def drop(self, reason: Drop, packets: int = 1) -> None:
        self.drops[reason] += packets

    def close(self, why: str) -> None:
        self.closed[why] += 1

    def error(self, error: OSError) -> str:
        """Count an error of the kernel. Returns its name."""
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        self.errors[name] += 1
        return name


class TrafficRates:
    """Bytes per second sent and received by plane: the mean over the last WINDOW_S, or over the time since the first
    sample if that is shorter. `now` in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[str, int], Mapping[str, int]]] = deque(maxlen=SAMPLES_MAX)

    def look(self, now: float, sent: Mapping[str, int], received: Mapping[str, int]) -> bool:
        """Sample the counters' values, once in LOOK_INTERVAL_S. Returns whether a sample was due."""
        is_due = not self._samples or now >= self._samples[-1][0] + LOOK_INTERVAL_S
        if is_due:
            self._samples.append((now, dict(sent), dict(received)))
        return is_due

    def per_s(self, now: float, sent: Mapping[str, int], received: Mapping[str, int]) -> dict[str, dict[str, float]]:
        """Return {plane: {"sent": …, "received": …}}, from the oldest sample to these values of the counters."""
        then, sent_then, received_then = self._samples[0] if self._samples else (now, sent, received)
        elapsed_s = max(now - then, LOOK_INTERVAL_S)
        return {
            plane: {
                "sent": round((sent[plane] - sent_then[plane]) / elapsed_s, 1),
                "received": round((received[plane] - received_then[plane]) / elapsed_s, 1),
            }
            for plane in sent
        }


SocketAddress = tuple[str, int] | tuple[str, int, int, int]


def socket_address(address: Address, *, ipv6: bool) -> SocketAddress | None:
    """Return the address as a socket of this family takes it; None if it can't. Nothing is ever looked up."""
    host, port = address
    try:
        version = ip_address(host).version
    except ValueError:
        return None
    if not 0 < port < 65536 or (version == 6 and not ipv6):
        return None
    return (host if version == 6 else MAPPED + host, port, 0, 0) if ipv6 else (host, port)


def plain_address(address: tuple[object, ...]) -> Address:
    """Return a socket's address as the core knows it: an IPv4 peer of an IPv6 socket has its IPv4 address."""
    host, port = address[:2]
    assert isinstance(host, str)
    assert isinstance(port, int)
    return (host.removeprefix(MAPPED) if "." in host else host), port
