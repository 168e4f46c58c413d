"""Makes a node a peer: keys, sockets, discovery and files around one RouterPeer. The second composition root.

`open_cluster` binds the port and finds the address that peers get; `ClusterParts.run` runs the parts. None of this is
on a request's path, and no request waits for it. Invariant: a node that ends says goodbye first
(test_cluster_of_nodes.py): the parts go on until `leave` has spread.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from ipaddress import ip_address
from random import SystemRandom
from typing import Any

import trio

from ranvier_py import __version__
from ranvier_py.config.config_endpoints import GossipEndpoints, gossip_endpoints
from ranvier_py.config.config_model import Config
from ranvier_py.core.addresses import HostPort, host_port, is_wildcard, spelled
from ranvier_py.core.errors import NotFound
from ranvier_py.core.findings import Finding
from ranvier_py.core.log_events import event
from ranvier_py.core.mesh.membership.profile import LAN, WAN
from ranvier_py.core.mesh.mesh_values import MemberChange
from ranvier_py.core.mesh.port_traffic import TrafficRates
from ranvier_py.core.mesh.wire.frame import PROTOCOL_VERSION
from ranvier_py.core.mesh.wire.records import PUBLIC_BYTES_MAX
from ranvier_py.core.metrics import Sample, samples, values
from ranvier_py.core.peer.peer_findings import PeerSigns, peer_findings
from ranvier_py.core.peer.peer_view import peer_view
from ranvier_py.core.peer.router_peer import GossipSettings, RouterPeer
from ranvier_py.core.response_cache.answer_store import ResponseCacheOptions
from ranvier_py.core.response_cache.peers.answer_values import PeerAnswerSettings
from ranvier_py.core.routing.peers.route_settings import RouteGossipSettings
from ranvier_py.io.discovery import Discovery, own_host
from ranvier_py.io.gossip.gossip_port import GossipPort, GossipSockets, open_sockets
from ranvier_py.io.gossip.gossip_streams import InboundStreams, OutboundStreams
from ranvier_py.io.gossip.state_file import StateFile
from ranvier_py.io.keys import KeyFile, Keys
from ranvier_py.io.logs import name_lines
from ranvier_py.node.asked import Asked, ControlAnswer, Route
from ranvier_py.node.fingerprints import FingerprintScheme
from ranvier_py.node.part import Handler, Node, Part
from ranvier_py.node.parts.status_shares import engines_of_peers
from ranvier_py.node.shared_orders import SharedOrders
from ranvier_py.supervision import Faults

log = logging.getLogger(__name__)

TROUBLE = ("died", "renamed", "flooding")
"""Changes of members at which somebody may have to look."""

SYNC_GRACE_S = 2.0
"""A node is ready so long after its start even if no peer has given it its routes: routing works without them."""

BYTES = "application/octet-stream"

SHOWN = (
    *("name", "address", "release", "protocol", "synced", "label", "members", "lag_ms", "bytes_per_s"),
    *("other_protocols", "route_sync", "backend_sets"),
)
"""What the page of the control port shows of the cluster."""

NAME_FREE_S = 30.0  # a node that restarts keeps its name
LEAVE_S_MAX = 5.0  # an announcement spreads in less than two seconds in any cluster on a LAN

PROFILES = {"lan": LAN, "wan": WAN}


async def open_cluster(config: Config, keys: Keys, key_file: KeyFile | None, node: Node) -> ClusterParts:
    """Bind the port and make the peer. Raises ListenError, ConfigError."""
    endpoints = gossip_endpoints(config)
    assert endpoints is not None, "there are keys, so there is a place"
    sockets = await open_sockets(*endpoints.listen, udp=config.gossip_udp)
    try:
        own, guessed = await own_address(endpoints, sockets)
        state_file = StateFile(config.gossip_state_file) if config.gossip_state_file else None
        state = await trio.to_thread.run_sync(state_file.read) if state_file else b""
        settings = peer_settings(config, node.scheme, own, state)
        peer = RouterPeer(node.router, settings, keys.ring, SystemRandom(), time.monotonic())
        parts = ClusterParts(config, peer, sockets, own, key_file, state_file, node.faults)
        parts.discovery.moved = parts.moved if guessed else None
        return parts
    except BaseException:
        sockets.close()
        raise


async def own_address(endpoints: GossipEndpoints, sockets: GossipSockets) -> tuple[HostPort, bool]:
    """Return the address at which peers reach this node, and whether it is a guess. Raises ConfigError."""
    (host, port), guessed = endpoints.advertise or (sockets.host, 0), False
    if is_wildcard(host):
        host, guessed = await own_host(endpoints.join, sockets.family)
    return (str(ip_address(host)), port or sockets.port), guessed


@dataclass(slots=True)
class Noted:
    """What was logged already: of counts of the peer, and of backends that others list; and by which name."""

    named: str = ""
    given_up: int = 0
    untimely: int = 0
    differing: Mapping[int, str] = field(default_factory=dict)
    signs: PeerSigns = field(default_factory=PeerSigns)


class ClusterParts(Part):
    """The parts of one peer, wired together."""

    name = "cluster"

    def __init__(
        self,
        config: Config,
        peer: RouterPeer,
        sockets: GossipSockets,
        own: HostPort,
        key_file: KeyFile | None,
        state_file: StateFile | None,
        faults: Faults,
    ) -> None:
        self._faults, self._key_file, self._config = faults, key_file, config
        self.peer, self.own, self.state_file = peer, own, state_file
        self._started_at = time.monotonic()
        if key_file is not None:
            key_file.changed = peer.sealer.rekey
        self.port = port = GossipPort(peer, sockets, changed=self._log_changes, faults=faults)
        self._inbound = InboundStreams(sockets.listener, port)
        host = "" if is_wildcard(sockets.host) else sockets.host
        rng = SystemRandom()
        self._outbound = OutboundStreams(sockets.listener.family, host, port, rng)
        port.send_stream = self._outbound.send
        self.rates = TrafficRates()
        self._noted = Noted()
        peer.flushes.woken = port.poke
        self.orders = SharedOrders(peer, port.poke, lambda: self.own[1] - config.worker_index)
        join = endpoints.join if (endpoints := gossip_endpoints(config)) is not None else ()
        self.discovery = Discovery(join, port.contact, lambda: peer.alone, rng, own, sockets.family, faults)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the parts until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._outbound.run)
            nursery.start_soon(self._inbound.run)
            await nursery.start(self.port.run)
            if self._key_file is not None:
                nursery.start_soon(self._faults.keep, "key_file", self._key_file.run)
            if self.state_file is not None:
                nursery.start_soon(self._faults.keep, "state_file", self.state_file.run, self.peer.state)
            await nursery.start(self.discovery.run)
            log.info(
                event(
                    "gossip.started",
                    name=self.peer.me.name,
                    address=spelled(self.own),
                    cluster=self._config.cluster_name,
                )
            )
            task_status.started()

    def moved(self, own: HostPort) -> None:
        """Advertise another address from now on, under its name unless the operator chose one."""
        log.info(event("gossip.moved", before=spelled(self.own), after=spelled(own)))
        self.own, config = own, self._config
        name = config.node_name or spelled(own)
        name_lines(name, config.worker_index)
        self.peer.move(name, own[0], public_address(config.listen, own[0]), time.monotonic())
        self.port.poke()

    async def reread(self, after: Config | None) -> None:
        """Read the cluster's keys again soon."""
        if self._key_file is not None:
            self._key_file.look_soon()

    def look(self) -> None:
        """Measure the traffic, and log problems that no peer reports and only an operator can solve. Call it often."""
        traffic, commands = self.port.counters, self.peer.features.signed_commands
        for clocked in (commands, self.peer.features.worker_commands, self.peer.features.revocations):
            clocked.set_wall_clock(wall_ms(), time.monotonic())
        if not self.rates.look(time.monotonic(), traffic.bytes_sent, traffic.bytes_received):
            return
        stranger, self.peer.wrong_key_source = self.peer.wrong_key_source, None
        if stranger is not None:
            self._noted.signs.stranger, self._noted.signs.stranger_at = stranger, time.monotonic()
            self.port.complain("wrong_key", event("gossip.wrong_key", address=spelled(stranger)))
        if others := self.peer.sessions.others.new:
            listed = [f"{host} ({protocol})" for host, protocol in others.items()]
            if self.port.complain("version", event("gossip.version", protocol=PROTOCOL_VERSION, others=listed)):
                others.clear()
        self._log_backend_sets()
        if (name := self.peer.me.name) != self._noted.named:
            self._noted.named = name
            name_lines(name, self._config.worker_index)
        if before := self.peer.members.regain_name(time.monotonic(), NAME_FREE_S):
            log.info(event("member.regained", name=self.peer.me.name, before=before))
        given_up = self.peer.members.statistics().datagrams_given_up
        if given_up > self._noted.given_up:
            self._noted.signs.blocked_at = time.monotonic()
            self.port.complain("datagrams", event("gossip.datagrams_blocked"))
        self._noted.given_up = given_up
        if commands.counters.refused["time"] > self._noted.untimely:
            self._noted.signs.untimely_at = time.monotonic()
            self.port.complain("command_time", event("gossip.command_time"))
        self._noted.untimely = commands.counters.refused["time"]

    def _log_backend_sets(self) -> None:
        before, self._noted.differing = self._noted.differing, self.peer.features.backend_sets.differing
        for session in [one for one in self._noted.differing if self._noted.differing[one] != before.get(one)]:
            log.warning(
                event("gossip.backends_differ", peer=self.peer.name_of(session), why=self._noted.differing[session])
            )
        for session in [one for one in before if one not in self._noted.differing]:
            log.info(event("gossip.backends_agree", peer=self.peer.name_of(session)))

    def _log_changes(self, changes: Sequence[MemberChange]) -> None:
        for change in changes:
            record = change.record
            level, place = (
                logging.WARNING if change.what in TROUBLE else logging.INFO,
                spelled((record.host, record.port)),
            )
            log.log(level, event(f"member.{change.what}", peer=record.name, address=place, why=change.why))
            if change.what == "joined" and self.peer.members.is_namesake(record.session):
                log.warning(event("member.namesake", peer=record.name, address=place))
            if change.what == "joined" and record.schema != self.peer.me.schema:
                why = "has another tokenizer, template, block size or secret: no route is shared"
                log.warning(event("gossip.other_routes", peer=record.name, why=why))

    async def revoke(self, key_id: str, until_ms: int) -> str:
        """Revoke a client's key on all nodes until this time of day; 0 takes that back. Returns why that can't be."""
        why_not = self.peer.features.revocations.give(key_id, until_ms, time.monotonic())
        if not why_not:
            self.port.poke()
            if self.state_file is not None:
                await self.state_file.save(self.peer.state())
        return why_not

    def unready(self) -> str:
        """Return why it waits, unless this node has its peers' routes, or has waited for them long enough."""
        is_ready = self.peer.synced or time.monotonic() - self._started_at > SYNC_GRACE_S
        return "" if is_ready else "waiting for the routes of a peer"

    async def leave(self) -> None:
        """Announce that this node leaves, and wait until that has spread."""
        alone = self.peer.alone
        self.port.leave()
        if alone:
            return
        left_at = self.peer.members.left_at
        await trio.sleep(max(0.0, min(left_at - time.monotonic(), LEAVE_S_MAX)))

    def findings(self, now: float) -> Iterator[Finding]:
        endpoints = gossip_endpoints(self._config)
        expected, age_s = endpoints is not None and bool(endpoints.join), now - self._started_at
        return peer_findings(self.peer, self._noted.signs, now, expected=expected, age_s=age_s)

    def of_engines(self, now: float) -> Mapping[str, Mapping[str, Any]]:
        return engines_of_peers(self.peer, now)

    def routes(self) -> Mapping[str, Handler]:
        return {
            "GET /admin/cluster": Route(lambda _: self.view(), "This node and its peers"),
            "GET /admin/cluster/sums": Route(self._sums, "Sums of the route table's buckets", kinds=(BYTES,)),
        }

    def view(self) -> dict[str, Any]:
        """Return this node and its peers, for the control port."""
        now = time.monotonic()
        traffic = self.port.counters
        return {
            **peer_view(self.peer, now),
            "label": self._config.cluster_name,
            "bytes_per_s": self.rates.per_s(now, traffic.bytes_sent, traffic.bytes_received),
            "traffic": values(traffic),
            **{name: values(counters) for name, counters in self._beside().items()},
        }

    def panes(self, now: float, *, watched: bool) -> Mapping[str, Any]:
        view = self.view()
        return {"peers": {name: view[name] for name in SHOWN if name in view}}

    def _beside(self) -> dict[str, Any]:
        """Return the counters of the parts around the peer, by name."""
        parts = {"discovery": self.discovery, "state_file": self.state_file, "key_file": self._key_file}
        return {name: part.counters for name, part in parts.items() if part is not None}

    def metrics(self) -> Iterator[Sample]:
        peer, port = self.peer, self.port
        yield from samples("gossip", peer.counters)
        yield from samples("gossip_members", peer.members.statistics())
        yield from samples("gossip_sessions", peer.sessions.statistics())
        for machine in peer.machines.called:
            yield from machine.samples()
        yield from samples("gossip_port", port.counters)
        for name, counters in self._beside().items():
            yield from samples(f"gossip_{name}", counters)
        lag = "Seconds from learning a route on any node to receiving it here, as senders measured it."
        yield Sample("gossip_lag_seconds", "histogram", lag, peer.features.routes.lag)
        lateness = "Seconds by which the timer of gossip woke up late."
        yield Sample("gossip_lateness_seconds", "histogram", lateness, port.lateness_s)

    async def _sums(self, _: Asked) -> ControlAnswer:
        """Return the sums of the route table's buckets, computed in steps."""
        scan = self.peer.features.route_sync.copy.sums(time.monotonic())
        while (sums := scan.step(time.monotonic())) is None:
            await trio.lowlevel.checkpoint()
        return ControlAnswer(sums, kind=BYTES)


class NoCluster(Part):
    """What a node without peers answers about them."""

    def routes(self) -> Mapping[str, Handler]:
        return dict.fromkeys(("GET /admin/cluster", "GET /admin/cluster/sums"), self._refuse)

    def _refuse(self, _: Asked) -> ControlAnswer:
        raise NotFound("this node does not gossip")


def public_address(listen: str, own: str) -> str:
    """Return the address of the public port for peers to show: nobody can call 0.0.0.0; records take no long name."""
    host, port = host_port(listen)
    fits = len(spelled((host, port))) <= PUBLIC_BYTES_MAX
    return spelled((host if fits and not is_wildcard(host) else own, port))


def wall_ms() -> int:
    return int(time.time() * 1000)


def answer_settings(options: ResponseCacheOptions) -> PeerAnswerSettings:
    shares = options.enabled and options.backend == "cluster"
    return PeerAnswerSettings(shares=shares, ttl_s=options.ttl_s, timeout_s=options.peer_timeout_s)


def peer_settings(config: Config, scheme: FingerprintScheme, own: HostPort, state: bytes) -> GossipSettings:
    host, port = own
    admin = config.gossip_admin_key
    routes = RouteGossipSettings(
        schema=scheme.schema,
        ttl_s=config.route_ttl_s,
        node_bytes_per_s=config.gossip_bytes_per_s_max,
    )
    return GossipSettings(
        name=config.node_name or spelled(own),
        host=host,
        port=port,
        session=secrets.randbits(64) or 1,
        label=config.cluster_name,
        public=public_address(config.listen, host),
        release=__version__,
        wall_ms=wall_ms(),
        state=state,
        datagrams=config.gossip_udp,
        profile=PROFILES[config.gossip_profile],
        routes=routes,
        answers=answer_settings(config.responses),
        fingerprint_key=scheme.key,
        worker_key=config.siblings_key or b"",
        worker_ports=range(port - config.worker_index, port - config.worker_index + config.workers),
        admin_key=blake2b(admin.get_secret_value().encode(), person=b"orders").digest() if admin else b"",
    )
