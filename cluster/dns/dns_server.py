"""A real DNS server for the lab: round-robin over the nodes' addresses, and every kind of DNS failure on demand.

    zone = Zone({"router.lab": ["127.0.0.2", "127.0.0.3"]})
    host, port = await nursery.start(serve, zone, "127.0.0.1", 0)        # then: dig @127.0.0.1 -p PORT router.lab
    zone.fault("router.lab", DnsFault(DnsFaultKind.SLOW, delay_s=5.0))

It speaks UDP alone, with dnspython's messages. The k-th look-up of a name begins with its k-th address, separately for
A and AAAA, and shows at most ADDRESSES_MAX addresses, so each answer fits a datagram. A name outside the zone is
REFUSED; a name of the zone that does not exist is NXDOMAIN; one without an address of that type gets an empty answer.

`Zone` decides and is pure; `serve` moves bytes. Bound: WAITING_MAX slow answers wait at once; further ones are dropped
and counted. An error of one asker never ends the server.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset
import trio
from dns.rcode import Rcode
from dns.rdatatype import RdataType

TTL_S = 1
"""Short, since nodes of a lab come and go and resolvers should ask again."""

WAITING_MAX = 256
"""How many slow answers may wait at once; beyond, a question is dropped, as by an overloaded server."""

ADDRESSES_MAX = 16
"""Addresses in one answer. Even of IPv6 so many fit the 512 bytes of a datagram without EDNS (RFC 1035)."""

MESSAGE_BYTES_MAX = 65_535

HEADER_BYTES = 12


class DnsFaultKind(Enum):
    """What a name resolves to instead of its addresses."""

    SUBSET = "subset"  # `count` of the addresses, the next ones each time
    EMPTY = "empty"  # no error, no address
    SELF = "self"  # only the asker's own address; none if the name does not have it
    OTHER = "other"  # `addresses`, whatever the name has: those of another cluster, or old ones
    SLOW = "slow"  # the right answer, after `delay_s`
    SERVFAIL = "servfail"
    NXDOMAIN = "nxdomain"


CODES = {DnsFaultKind.SERVFAIL: Rcode.SERVFAIL, DnsFaultKind.NXDOMAIN: Rcode.NXDOMAIN}


@dataclass(frozen=True, slots=True)
class DnsFault:
    kind: DnsFaultKind
    count: int = 1
    delay_s: float = 5.0
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """What one SRV record has. `host` is a name of the zone, whose addresses go with the answer if they are shown."""

    host: str
    port: int
    priority: int = 0
    weight: int = 0


@dataclass(frozen=True, slots=True)
class DnsAnswer:
    """An answer and when to send it; `data` None: send nothing."""

    data: bytes | None
    delay_s: float = 0.0


class Zone:
    """Names with their addresses and faults. Names are compared without regard to case; all of them lie in `zone`."""

    def __init__(self, names: Mapping[str, Sequence[str]], zone: str = "lab", ttl_s: int = TTL_S) -> None:
        self.zone = zone.lower()
        self.ttl_s = ttl_s
        self.names: dict[str, tuple[str, ...]] = {}
        self.services: dict[str, tuple[ServiceRecord, ...]] = {}
        self.shows_hosts = True  # whether the addresses of services go with their answer
        self.faults: dict[tuple[str, str], Sequence[DnsFault | None]] = {}
        self.turns: dict[tuple[str, str], int] = {}
        self.lookups: dict[tuple[str, RdataType], int] = {}
        self.counts: dict[str, int] = {}
        for name, addresses in names.items():
            self.set(name, addresses)

    def set(self, name: str, addresses: Sequence[str]) -> None:
        """Set the addresses of a name. Raises ValueError for what is no IP address, and for a name of another zone."""
        name = name.lower()
        if not self.contains(name):
            raise ValueError(f"{name} is not in the zone {self.zone}")
        self.names[name] = tuple(str(ip_address(address)) for address in addresses)

    def serve(self, name: str, services: Sequence[ServiceRecord]) -> None:
        """Set the SRV records of a name."""
        self.set(name, self.names.get(name.lower(), ()))
        self.services[name.lower()] = tuple(services)

    def contains(self, name: str) -> bool:
        return name == self.zone or name.endswith(f".{self.zone}")

    def fault(self, name: str, *faults: DnsFault | None, asker: str = "") -> None:
        """Set the faults of a name, for the asker with this IP or (empty) for all. Several take turns from one look-up
        of an A record to the next. None is the right answer."""
        self.faults[name.lower(), asker] = faults

    def answer(self, data: bytes, asker: str) -> DnsAnswer:
        """Answer one message. Never raises, whatever the bytes are."""
        if len(data) < HEADER_BYTES or data[2] & 0x80:
            self.count("malformed")
            return DnsAnswer(None)  # no header, or an answer: a reply could make two servers answer each other for ever
        try:
            query = dns.message.from_wire(data, continue_on_error=True)
            error = refusal(query)
        except (dns.exception.DNSException, ValueError, IndexError):
            query, error = dns.message.Message(int.from_bytes(data[:2], "big")), Rcode.FORMERR
        if error is not None:
            self.count("malformed")
            reply = dns.message.QueryMessage(query.id)
            reply.flags = dns.flags.QR
            reply.set_opcode(query.opcode())
            reply.set_rcode(error)
            return DnsAnswer(reply.to_wire())
        return self.answer_query(query, asker)

    def answer_query(self, query: dns.message.Message, asker: str) -> DnsAnswer:
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True).lower()
        fault = self.fault_of(name, asker, question.rdtype)
        code, addresses = self.decide(name, question.rdtype, fault, asker)
        self.count(code.name.lower())
        reply = dns.message.make_response(query)
        reply.flags |= dns.flags.AA
        reply.set_rcode(code)
        if addresses:
            found = dns.rrset.from_text_list(question.name, self.ttl_s, "IN", question.rdtype, addresses)
            reply.answer.append(found)
            if question.rdtype == RdataType.SRV and self.shows_hosts:
                reply.additional += self.hosts_of(name)
        elif code in (Rcode.NOERROR, Rcode.NXDOMAIN):  # the SOA says how long a resolver may cache the empty answer
            start = f"ns.{self.zone}. lab.{self.zone}. 1 60 60 60 {self.ttl_s}"
            reply.authority.append(dns.rrset.from_text(f"{self.zone}.", self.ttl_s, "IN", "SOA", start))
        delay_s = fault.delay_s if fault is not None and fault.kind is DnsFaultKind.SLOW else 0.0
        return DnsAnswer(reply.to_wire(want_shuffle=False), delay_s)

    def fault_of(self, name: str, asker: str, kind: RdataType) -> DnsFault | None:
        faults = self.faults.get((name, asker)) or self.faults.get((name, ""), (None,))
        turn = self.turns.get((name, asker), 0)
        if len(faults) > 1 and kind == RdataType.A:
            self.turns[name, asker] = turn + 1
        return faults[turn % len(faults)]

    def decide(self, name: str, kind: RdataType, fault: DnsFault | None, asker: str) -> tuple[Rcode, Sequence[str]]:
        if fault is not None and fault.kind in CODES:
            return CODES[fault.kind], ()
        if not self.contains(name):
            return Rcode.REFUSED, ()
        if name not in self.names:
            return (Rcode.NOERROR if name == self.zone else Rcode.NXDOMAIN), ()
        if kind == RdataType.SRV:
            listed = () if fault is not None and fault.kind is DnsFaultKind.EMPTY else self.services.get(name, ())
            return Rcode.NOERROR, [f"{each.priority} {each.weight} {each.port} {each.host}." for each in listed]
        version = {RdataType.A: 4, RdataType.AAAA: 6}.get(kind)
        fitting = [each for each in self.addresses(name, fault, asker) if ip_address(each).version == version]
        return Rcode.NOERROR, self.rotated(name, kind, fitting, fault)

    def hosts_of(self, name: str) -> list[dns.rrset.RRset]:
        """Return the addresses of a name's services."""
        return [
            dns.rrset.from_text_list(f"{host}.", self.ttl_s, "IN", kind, fitting)
            for host in dict.fromkeys(each.host for each in self.services[name])
            for version, kind in ((4, RdataType.A), (6, RdataType.AAAA))
            if (fitting := [each for each in self.names.get(host, ()) if ip_address(each).version == version])
        ]

    def addresses(self, name: str, fault: DnsFault | None, asker: str) -> Sequence[str]:
        """Return the addresses that the name resolves to under this fault, before rotation."""
        known = self.names[name]
        match fault.kind if fault is not None else None:
            case DnsFaultKind.EMPTY:
                return ()
            case DnsFaultKind.SELF:
                return [address for address in known if address == asker]
            case DnsFaultKind.OTHER:
                return fault.addresses if fault is not None else ()
        return known

    def rotated(self, name: str, kind: RdataType, addresses: list[str], fault: DnsFault | None) -> list[str]:
        if not addresses:
            return addresses
        before = self.lookups.get((name, kind), 0)
        count = len(addresses)
        part = fault is not None and fault.kind is DnsFaultKind.SUBSET and fault.count < count
        shown = max(1, fault.count) if fault is not None and part else min(count, ADDRESSES_MAX)
        self.lookups[name, kind] = before + (shown if part else 1)
        start = before % count
        return (addresses[start:] + addresses[:start])[:shown]

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def refusal(query: dns.message.Message) -> Rcode | None:
    """Return the error for a message that is no plain query; None if it is one."""
    if query.opcode() != dns.opcode.QUERY:
        return Rcode.NOTIMP
    if query.errors or len(query.question) != 1 or query.answer or query.authority:
        return Rcode.FORMERR
    return Rcode.REFUSED if query.question[0].rdclass != dns.rdataclass.IN else None


class DnsServer:
    """Moves bytes between sockets and a zone. `serve` makes one."""

    def __init__(self, zone: Zone) -> None:
        self.zone = zone
        self.waiting = 0

    async def run(self, sock: trio.socket.SocketType) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    data, asker = await sock.recvfrom(MESSAGE_BYTES_MAX)
                except ConnectionError:  # an earlier asker's socket is gone, which the system reports here
                    continue
                outcome = self.zone.answer(data, asker[0])
                if outcome.data is None:
                    continue
                if outcome.delay_s <= 0:
                    await self.send(sock, outcome.data, asker)
                elif self.waiting < WAITING_MAX:
                    self.waiting += 1
                    nursery.start_soon(self.send_later, sock, outcome, asker)
                else:
                    self.zone.count("dropped")

    async def send_later(self, sock: trio.socket.SocketType, outcome: DnsAnswer, asker: tuple[str, int]) -> None:
        try:
            await trio.sleep(outcome.delay_s)
            await self.send(sock, outcome.data or b"", asker)
        finally:
            self.waiting -= 1

    async def send(self, sock: trio.socket.SocketType, data: bytes, asker: tuple[str, int]) -> None:
        try:
            await sock.sendto(data, asker)
        except OSError:
            self.zone.count("unsent")


async def serve(
    zone: Zone, host: str, port: int, *, task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer until cancelled; `started` gets the address. Port 0 takes a free port. Raises OSError."""
    family = socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
    with trio.socket.socket(family, socket.SOCK_DGRAM) as sock:
        await sock.bind((host, port))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(DnsServer(zone).run, sock)
            task_status.started(sock.getsockname()[:2])
