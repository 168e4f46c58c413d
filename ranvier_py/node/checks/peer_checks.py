"""Greets each peer of the configuration, to see whether it answers with our key and speaks our protocol, and asks its
public port for the time.

Rule: a peer that answers a greeting has proved itself; what it asks in return is not answered, so that nobody takes
this for a member. A node of another key, name or protocol can't read the greeting and is silent, like one that is not
there; its TCP port tells them apart. Bounds: ADDRESSES_MAX addresses, TRIES greetings.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterable
from random import SystemRandom
from typing import NamedTuple

import trio

from ranvier_py import __version__
from ranvier_py.config.config_endpoints import gossip_endpoints
from ranvier_py.config.config_model import Config
from ranvier_py.core.addresses import HostPort, spelled
from ranvier_py.core.errors import ConfigError, words_of
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.mesh.contact.sessions import Sessions
from ranvier_py.core.mesh.mesh_values import DATAGRAM_BYTES_MAX, Outgoing, Plane
from ranvier_py.core.mesh.wire.codec import Codec
from ranvier_py.core.mesh.wire.frame import BASE_VERSION, PROTOCOL_VERSION, BadFrame
from ranvier_py.core.mesh.wire.keyring import KeyRing
from ranvier_py.core.mesh.wire.messages import Record, State
from ranvier_py.core.mesh.wire.seal import Sealer
from ranvier_py.io.certificates import public_context
from ranvier_py.io.discovery import facing, family_of, resolved
from ranvier_py.io.engine_asker import EngineAsker
from ranvier_py.io.keys import insecure_keys, read_keys
from ranvier_py.node.checks.engine_checks import clock_difference

ADDRESSES_MAX = 64
TRIES, TRY_S, CONNECT_S, ASK_S = 4, 0.6, 2.0, 2.0
KEY_REMEDY = "Give both the same cluster_key_file and cluster_name, and releases that are neighbours."


class PeerFound(NamedTuple):
    """A peer that proved itself."""

    name: str
    public: str
    version: int
    release: str


async def check_peers(config: Config) -> list[Finding]:
    endpoints = gossip_endpoints(config)
    if endpoints is None or not endpoints.join:
        return []
    found: list[Finding] = []
    addresses = dict[HostPort, str]()
    for place in endpoints.join:
        try:
            addresses |= dict.fromkeys(await resolved(place, socket.AF_UNSPEC), spelled(place))
        except OSError as error:
            what, remedy = (
                f"{place[0]} does not resolve: {words_of(error)}",
                "Correct join, or the records of that name.",
            )
            found.append(
                Finding("name", Severity.DEGRADED, what, about=f"peer {spelled(place)}", whom="gossip", remedy=remedy)
            )
    try:
        keys = (
            insecure_keys(config.cluster_name)
            if config.cluster_key_file is None
            else read_keys(config.cluster_key_file)
        )
    except ConfigError:  # a problem of the configuration
        return found
    others = [each for each in addresses if not is_own(each, endpoints.listen[1])][:ADDRESSES_MAX]

    async def look(address: HostPort) -> None:
        found.extend(await peer_findings(config, keys.ring, address))

    async with trio.open_nursery() as nursery:
        for address in others:
            nursery.start_soon(look, address)
    return found


def is_own(address: HostPort, port: int) -> bool:
    """Whether a node with this configuration would be there itself."""
    return address[1] == port and facing(address[0]) == address[0]


async def peer_findings(config: Config, ring: KeyRing, address: HostPort) -> Iterable[Finding]:
    about = f"peer {spelled(address)}"
    peer = await greeted(address, ring, config.cluster_name) if config.gossip_udp else None
    if peer is None:
        return [await silent(config, about, address)]
    found = []
    if peer.version != PROTOCOL_VERSION or peer.release != __version__:
        what = f"{peer.name} runs {peer.release or 'another release'}, protocol {peer.version}; this is {__version__}"
        remedy = "End the upgrade."
        found.append(Finding("peer_release", Severity.NOTICE, what, about=about, remedy=remedy))
    scheme = "http" if config.tls_certificate_file is None else "https"
    reply = await EngineAsker("", public_context(), ASK_S).ask(f"{scheme}://{peer.public}", "/health")
    if difference := clock_difference(reply.date, time.time()):
        what = f"the clock of {peer.name} and this machine's differ by {difference:.0f} s"
        remedy = "Have both set by NTP."
        found.append(
            Finding(
                "clocks",
                Severity.DEGRADED,
                what,
                about=about,
                whom="budgets, revocations, orders",
                remedy=remedy,
                command="timedatectl",
            )
        )
    return found


async def silent(config: Config, about: str, address: HostPort) -> Finding:
    """Return what is to be said of a peer that does not answer to a greeting."""
    with trio.move_on_after(CONNECT_S):
        try:
            stream = await trio.open_tcp_stream(*address)
        except OSError as error:
            what = f"{about}: nobody listens there: {words_of(error)}"
            remedy = "Start it, or correct join; this node goes on trying."
            return Finding("peer_lost", Severity.DEGRADED, what, about=about, whom="gossip", remedy=remedy)
        await stream.aclose()
        if not config.gossip_udp:
            return Finding(
                "peer_key", Severity.NOTICE, f"{about} listens; its key was not tried, without UDP", about=about
            )
        what = f"{about} listens, but does not answer to this key: another key, name or protocol, or no UDP"
        return Finding("peer_key", Severity.DEGRADED, what, about=about, whom="gossip", remedy=KEY_REMEDY)
    what, remedy = f"{about}: no answer within {CONNECT_S:g} s", "Open its gossip port, UDP and TCP, to this machine."
    return Finding("peer_lost", Severity.DEGRADED, what, about=about, whom="gossip", remedy=remedy)


async def greeted(address: HostPort, ring: KeyRing, label: str) -> PeerFound | None:
    """Return who is at this address, if it answers."""
    sock = trio.socket.socket(family_of(address[0]), socket.SOCK_DGRAM)
    with sock:
        await sock.bind((facing(address[0]), 0))
        session, sends, codec = secrets.randbits(64) or 1, list[Outgoing](), Codec()
        host, port = sock.getsockname()[:2]
        me = Record(
            name=f"check-{session:016x}",
            session=session,
            epoch=int(time.time() * 1000),
            incarnation=0,
            state=State.ALIVE,
            host=host,
            port=port,
            schema=0,
        )
        sealer = Sealer(session, ring, label)
        sessions = Sessions(me, sends, SystemRandom(), codec, release=__version__)
        for _ in range(TRIES):
            sends.clear()
            sessions.greet(address, time.monotonic())
            for each in sends:
                kind, body = codec.encode(each.message, BASE_VERSION)
                await sock.sendto(sealer.seal(each.plane, each.session, kind, body, BASE_VERSION), address)
            with trio.move_on_after(TRY_S):
                while (peer := taken(await sock.recvfrom(DATAGRAM_BYTES_MAX), sealer, sessions)) is None:
                    pass
                return peer
    return None


def taken(received: tuple[bytes, tuple[str, int]], sealer: Sealer, sessions: Sessions) -> PeerFound | None:
    """Return the peer whose datagram is a proof."""
    try:
        opened = sealer.open(received[0], Plane.DATAGRAM)
    except BadFrame:
        return None
    incoming = sessions.accept(opened, received[1][:2], time.monotonic())
    if incoming is None or incoming.proved is None:
        return None
    known = sessions.known(incoming.proved.session)
    version, release = (known.version, known.release) if known is not None else (0, "")
    return PeerFound(incoming.proved.name, incoming.proved.public, version, release)
