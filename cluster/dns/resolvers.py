"""Asks a DNS server directly, as a resolver does: UDP first, TCP when the answer was cut, again when none came.

`DnsResolver` puts it under trio, and so under httpx and openai: `trio.socket.set_custom_hostname_resolver`. Only names
of the lab are asked there, all others are the system's. Nothing is remembered: every look-up is a question.
"""

from __future__ import annotations

import socket
from ipaddress import ip_address
from random import Random
from typing import Any

import trio

from cluster.dns.dns_messages import BadReply, Code, Kind, Reply, read_reply, write_query
from cluster.dns.dns_server import receive_exactly

TRY_S = 2.0
TRIES_MAX = 2
"""A resolver of glibc waits 5 s and tries twice; on one machine less is enough."""


class LookupFailed(OSError):
    """The name could not be resolved. `code` is the server's word, None when no answer came."""

    def __init__(self, name: str, code: int | None) -> None:
        super().__init__(f"{name}: {'no answer' if code is None else Code(code).name}")
        self.code = code


async def ask(server: tuple[str, int], name: str, kind: Kind, rng: Random) -> Reply:
    """One question. Raises LookupFailed when no answer comes, ValueError for a name that DNS cannot say."""
    for _ in range(TRIES_MAX):
        query = write_query(rng.randrange(65_536), name, kind)
        with trio.move_on_after(TRY_S):
            try:
                reply = await ask_udp(server, query)
                return await ask_tcp(server, query) if reply.truncated else reply
            except (OSError, trio.BrokenResourceError, BadReply):
                continue
    raise LookupFailed(name, None)


async def ask_udp(server: tuple[str, int], query: bytes) -> Reply:
    """Raises OSError."""
    with trio.socket.socket(family_of(server[0]), socket.SOCK_DGRAM) as sock:
        await sock.connect(server)
        await sock.send(query)
        while True:
            data = await sock.recv(65_535)
            try:
                return read_reply(data, query)
            except BadReply:
                continue  # a late answer to an earlier question, or a stranger's


async def ask_tcp(server: tuple[str, int], query: bytes) -> Reply:
    """Raises OSError, trio.BrokenResourceError, BadReply."""
    async with await trio.open_tcp_stream(*server) as stream:
        await stream.send_all(len(query).to_bytes(2, "big") + query)
        head = await receive_exactly(stream, 2)
        return read_reply(await receive_exactly(stream, int.from_bytes(head, "big")), query)


async def look_up(server: tuple[str, int], name: str, kind: Kind, rng: Random) -> tuple[str, ...]:
    """The addresses, in the server's order; none for a name without such. Raises LookupFailed."""
    reply = await ask(server, name, kind, rng)
    if reply.code != Code.NOERROR:
        raise LookupFailed(name, reply.code)
    return reply.addresses


def family_of(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ip_address(ip).version == 6 else socket.AF_INET


class DnsResolver(trio.abc.HostnameResolver):
    """Names that end in `.zone` by the lab's server, others by the system."""

    def __init__(self, server: tuple[str, int], rng: Random, zone: str = "lab") -> None:
        self.server = server
        self.rng = rng
        self.suffix = f".{zone.lower()}"

    async def getaddrinfo(
        self,
        host: bytes | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,  # noqa: A002  # the name is trio's
        proto: int = 0,
        flags: int = 0,
    ) -> Any:
        name = host.decode("ascii").lower() if host is not None else ""
        if not name.endswith(self.suffix):
            return await trio.to_thread.run_sync(
                socket.getaddrinfo, host, port, family, type, proto, flags, abandon_on_cancel=True
            )
        kinds = {socket.AF_INET: (Kind.A,), socket.AF_INET6: (Kind.AAAA,)}.get(
            socket.AddressFamily(family), (Kind.A, Kind.AAAA)
        )
        found: list[str] = []
        try:
            for kind in kinds:
                found += await look_up(self.server, name, kind, self.rng)
        except LookupFailed as error:
            gone = error.code == Code.NXDOMAIN
            raise socket.gaierror(socket.EAI_NONAME if gone else socket.EAI_AGAIN, str(error)) from error
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, f"{name} has no address of that family")
        stream = socket.SocketKind(type or socket.SOCK_STREAM)
        return [(family_of(ip), stream, proto, "", (ip, int(port or 0))) for ip in found]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        return await trio.to_thread.run_sync(socket.getnameinfo, sockaddr, flags, abandon_on_cancel=True)
