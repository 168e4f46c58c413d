"""What passes the gossip port and what does not: plain counters, limits, and complaints that do not flood the log.

Every drop has a reason and a counter; every error of the kernel is counted by its name (ENOBUFS). A kind of trouble is
logged once in COMPLAINT_INTERVAL_S, with the number of times that were not (consul#19965: a line every 3 s for years).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_address

from ranvier_py.core.gossip.endpoints import spelled
from ranvier_py.core.gossip.gossip_values import Address, Plane

log = logging.getLogger("ranvier_py.io.gossip.gossip_port")

COMPLAINT_INTERVAL_S = 30.0

FRAME_HEAD = struct.Struct("<I")
"""Before each packet on a stream: its length."""

OURS = frozenset(
    (errno.ENOBUFS, errno.ENOMEM, errno.EMSGSIZE, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EADDRNOTAVAIL)
)
"""Errors of sending that say something about this machine and nothing about the peer."""


class Drop(StrEnum):
    """Why a packet went no further; the label of a counter."""

    TOO_LONG = "too_long"  # above what its plane carries
    SOCKET_FULL = "socket_full"  # the kernel takes no more datagrams just now
    NO_UDP = "no_udp"  # a datagram, where there are only streams
    NO_SUCH_ADDRESS = "no_such_address"  # no IP literal, or of a family that this socket has not
    ERROR = "error"  # the kernel refused
    QUEUE_FULL = "queue_full"  # of this stream
    MEMORY = "memory"  # of the queues of all streams together
    STREAMS = "streams"  # too many streams
    BROKEN = "broken"  # was waiting when its stream broke
    FOREIGN = "foreign"  # received, and not even the first bytes are ours


@dataclass(frozen=True, slots=True)
class NetOptions:
    """Bounds of the shell. Times in seconds, sizes in bytes."""

    drain_max: int = 64  # datagrams for one wake-up, before timers and requests have their turn
    hold_s: float = 0.002  # the same in time; a request waits no longer for gossip
    socket_bytes: int = 4 * 1024 * 1024  # SO_RCVBUF, 212,992 by default: 150 datagrams; Linux cuts it to rmem_max
    probe_queue_bytes: int = 256 * 1024  # some 200 probes; older ones would come too late
    bulk_queue_bytes: int = 4 * 1024 * 1024  # sixteen of the largest frames: a tenth of a second at 300 Mbit/s
    queued_bytes: int = 64 * 1024 * 1024  # of all streams together
    streams_out: int = 1024  # two for each of 512 peers
    streams_in: int = 512  # a frame of each, 256 KiB, is what strangers can make us hold: 128 MiB
    connect_s: float = 3.0  # one lost SYN and its repetition
    stall_s: float = 10.0  # a peer that takes nothing for this long is gone; TCP_USER_TIMEOUT as well
    idle_out_s: float = 60.0
    idle_in_s: float = 90.0  # longer than the sender's, so that the sender closes
    first_frame_s: float = 10.0  # from a stranger
    frame_s: float = 30.0  # for a whole frame: 9 kB/s
    retry_s: float = 0.1  # after a broken stream; doubles
    retry_s_max: float = 5.0
    settled_s: float = 5.0  # a stream that lived this long was fine: its next trouble is a new story


@dataclass(frozen=True, slots=True)
class NetStatistics:
    """A snapshot: gauges first, then totals since the start. By plane: datagram, probe, bulk."""

    streams_out: int
    streams_in: int
    queued_bytes: int
    receive_buffer_bytes: int
    packets_sent: dict[str, int]
    packets_received: dict[str, int]
    bytes_sent: dict[str, int]
    bytes_received: dict[str, int]
    drops: dict[str, int]  # by reason, see Drop
    errors: dict[str, int]  # by name, as the kernel gave them
    kernel_drops: int  # datagrams that found no room in the socket's buffer
    connects: int
    broken: int  # streams out that could not be opened, broke or stalled
    accepted: int
    closed: dict[str, int]  # streams in, by why: peer, idle, slow, malformed, displaced, error
    ticks: int
    faults: int  # exceptions in the core, of which there should be none


GAUGES = ("streams_out", "streams_in", "queued_bytes", "receive_buffer_bytes")


def by_plane() -> dict[Plane, int]:
    return dict.fromkeys(Plane, 0)


@dataclass(slots=True)
class Traffic:
    """The counters while they count, and the rate of complaints."""

    clock: Callable[[], float]
    packets_sent: dict[Plane, int] = field(default_factory=by_plane)
    packets_received: dict[Plane, int] = field(default_factory=by_plane)
    bytes_sent: dict[Plane, int] = field(default_factory=by_plane)
    bytes_received: dict[Plane, int] = field(default_factory=by_plane)
    drops: dict[Drop, int] = field(default_factory=lambda: dict.fromkeys(Drop, 0))
    errors: dict[str, int] = field(default_factory=dict)
    closed: dict[str, int] = field(default_factory=dict)
    kernel_drops: int = 0
    connects: int = 0
    broken: int = 0
    accepted: int = 0
    ticks: int = 0
    faults: int = 0
    complaints: dict[str, tuple[float, int]] = field(default_factory=dict)  # kind -> (told at, not told since)

    def sent(self, plane: Plane, size: int, packets: int = 1) -> None:
        self.packets_sent[plane] += packets
        self.bytes_sent[plane] += size

    def received(self, plane: Plane, size: int) -> None:
        self.packets_received[plane] += 1
        self.bytes_received[plane] += size

    def drop(self, reason: Drop, packets: int = 1) -> None:
        self.drops[reason] += packets

    def close(self, why: str) -> None:
        self.closed[why] = self.closed.get(why, 0) + 1

    def error(self, error: OSError, doing: str, address: Address | None = None) -> None:
        """Count an error of the kernel, and tell of it now and then: as a warning when this machine is to blame."""
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        self.errors[name] = self.errors.get(name, 0) + 1
        where = f" {spelled(address)}" if address else ""
        level = logging.WARNING if error.errno in OURS else logging.INFO
        self.complain(f"{doing} {name}", f"gossip.{doing}_failed{where} {error.strerror or error}", level=level)

    def fault(self, where: str) -> None:
        """The exception of just now is a bug. It costs what was under way, and nobody else's task."""
        self.faults += 1
        self.complain(f"fault {where}", f"gossip.fault in {where}", traceback=True, level=logging.ERROR)

    def complain(self, kind: str, text: str, *, level: int = logging.WARNING, traceback: bool = False) -> None:
        """Log it, unless one of the kind was logged a moment ago. Kinds are few: parts of the program and errors."""
        now = self.clock()
        told_at, unsaid = self.complaints.get(kind, (-COMPLAINT_INTERVAL_S, 0))
        if now - told_at < COMPLAINT_INTERVAL_S:
            self.complaints[kind] = (told_at, unsaid + 1)
            return
        self.complaints[kind] = (now, 0)
        more = f" ({unsaid} more since the last line)" if unsaid else ""
        log.log(level, "%s%s", text, more, exc_info=traceback)


# --- addresses and sockets ------------------------------------------------------------------------------------------

SocketAddress = tuple[str, int] | tuple[str, int, int, int]
MAPPED = "::ffff:"


def socket_address(address: Address, family: int) -> SocketAddress | None:
    """How a socket of this family is told the address; None when it can't be. Nothing is ever looked up."""
    host, port = address
    try:
        version = ip_address(host).version
    except ValueError:
        return None
    if not 0 < port < 65536:
        return None
    if family == socket.AF_INET:
        return (host, port) if version == 4 else None
    return (host if version == 6 else MAPPED + host, port, 0, 0)


def plain_address(address: tuple[object, ...]) -> Address:
    """As the core knows it: an IPv4 peer of an IPv6 socket has its IPv4 address."""
    host, port = address[:2]
    assert isinstance(host, str)
    assert isinstance(port, int)
    return (host.removeprefix(MAPPED) if "." in host else host), port


def try_option(sock: socket.socket, level: int, option: int | None, value: int) -> None:
    """Set an option that only some systems have (None elsewhere), and that is a refinement."""
    if option is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, value)
