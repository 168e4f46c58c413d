"""What makes a node a peer: keys, sockets, discovery and files around one RouterPeer. The second composition root.

`open_cluster` binds the port and finds out the address that peers are told; `ClusterParts.run` keeps the parts running.
Nothing of it is on a request's path, and a request never waits for any of it. Stopping: `leave` says goodbye and the
parts go on until the news has spread; then they are cancelled.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from ipaddress import ip_address
from random import SystemRandom
from typing import Any

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.core.addresses import host_port, is_loopback
from ranvier_py.core.gossip.backend_state.fact_settings import FactSettings
from ranvier_py.core.gossip.endpoints import GossipEndpoints, HostPort, is_wildcard, spelled
from ranvier_py.core.gossip.gossip import GossipSettings
from ranvier_py.core.gossip.gossip_values import MemberChange
from ranvier_py.core.gossip.membership.profile import LAN, WAN
from ranvier_py.core.gossip.peer import PeerSettings, RouterPeer
from ranvier_py.core.gossip.port_traffic import TrafficRates
from ranvier_py.core.gossip.replication.route_settings import RouteGossipSettings
from ranvier_py.core.gossip.wire.messages import Command
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import Sample, samples, values
from ranvier_py.core.routing.backends import Transition
from ranvier_py.core.routing.router import Router
from ranvier_py.io.discovery import Discovery, DiscoveryOptions, own_host
from ranvier_py.io.gossip.gossip_port import GossipPort, GossipSockets, open_sockets
from ranvier_py.io.gossip.gossip_streams import InboundStreams, OutboundStreams
from ranvier_py.io.gossip.state_file import StateFile
from ranvier_py.io.keys import KeyFile, Keys, insecure_keys, keys_of

log = logging.getLogger(__name__)

FOLLOW_INTERVAL_S = 0.25  # for doubts and orders of peers to reach the prober and the registry
SYNC_GRACE_S = 2.0
"""A node is ready this long after its start even if no peer has given it its routes: routing works without."""

LEAVE_S_MAX = 5.0  # a dissemination time is below two seconds for any cluster on a LAN

FINGERPRINT_VERSION = b"2"
"""Of how fingerprints are made from tokens and texts; raised when core/prompts/fingerprint.py changes its results."""

PROFILES = {"lan": LAN, "wan": WAN}


@dataclass(frozen=True, slots=True)
class NodeHooks:
    """What peers may make a node do."""

    probe_soon: Callable[[BackendId], None]
    log_transitions: Callable[[Sequence[Transition]], None]
    follow: Callable[[Command], None]


async def load_keys(config: Config) -> Keys | KeyFile | None:
    """The cluster's keys; None for a node without peers. Raises ConfigError."""
    if config.gossip_endpoints is None:
        return None
    if config.worker_key is not None:
        return keys_of(config.worker_key)
    if config.cluster_key_file is None:
        return insecure_keys(config.cluster_name)
    return await trio.to_thread.run_sync(KeyFile, config.cluster_key_file, lambda _: None)


def secret_of(keys: Keys | KeyFile | None) -> bytes | None:
    """What fingerprints follow from where the operator gives no secret."""
    if isinstance(keys, KeyFile):
        keys = keys.keys
    return keys.fingerprint_secret if keys is not None else None


@dataclass(frozen=True, slots=True)
class FingerprintScheme:
    """How a node makes fingerprints. `identity` tells tokenizer, template and block size."""

    identity: str
    key: bytes
    texts_match: bool

    @property
    def schema(self) -> int:
        """Equal for nodes that make equal fingerprints of equal prompts: only their routes mean anything to each
        other."""
        parts = (FINGERPRINT_VERSION, self.identity.encode(), self.key, b"%d" % self.texts_match)
        whole = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return int.from_bytes(blake2b(whole, digest_size=8, person=b"schema").digest(), "little")


@dataclass(frozen=True, slots=True)
class Ground:
    """What was opened before the parts are made."""

    sockets: GossipSockets
    own: HostPort
    state_file: StateFile | None
    state: bytes


async def open_cluster(
    config: Config, keys: Keys | KeyFile, router: Router, scheme: FingerprintScheme, hooks: NodeHooks
) -> ClusterParts:
    """Bind the port and make the peer. Raises OSError, ConfigError."""
    endpoints = config.gossip_endpoints
    assert endpoints is not None, "there are keys, so there is a place"
    sockets = await open_sockets(*endpoints.listen, udp=config.gossip_udp)
    try:
        own = await own_address(endpoints, sockets)
        state_file = StateFile(config.gossip_state_file) if config.gossip_state_file else None
        state = await trio.to_thread.run_sync(state_file.read) if state_file else b""
        return ClusterParts(config, keys, router, scheme, hooks, Ground(sockets, own, state_file, state))
    except BaseException:
        sockets.close()
        raise


async def own_address(endpoints: GossipEndpoints, sockets: GossipSockets) -> HostPort:
    """Where peers reach this node."""
    host, port = endpoints.advertise or (await own_host(endpoints.join, sockets.family), 0)
    return str(ip_address(host)), port or sockets.port


class ClusterParts:
    """The parts of one peer, wired."""

    def __init__(
        self,
        config: Config,
        keys: Keys | KeyFile,
        router: Router,
        scheme: FingerprintScheme,
        hooks: NodeHooks,
        ground: Ground,
    ) -> None:
        rng = SystemRandom()  # challenges are drawn from it, too
        self.own, self.state_file = ground.own, ground.state_file
        self.label = config.cluster_name
        self._started_at = time.monotonic()
        self._hooks = hooks
        self._key_file = keys if isinstance(keys, KeyFile) else None
        ring = keys.keys.ring if isinstance(keys, KeyFile) else keys.ring
        settings = peer_settings(config, scheme, self.own, ground.state)
        self.peer = RouterPeer(router, settings, ring, rng, self._started_at)
        if self._key_file is not None:
            self._key_file.changed = self.peer.rekey
        sockets = ground.sockets
        self.port = port = GossipPort(self.peer, sockets, changed=self._log_changes)
        self._inbound = InboundStreams(sockets.listener, port)
        host = "" if is_wildcard(sockets.host) else sockets.host
        self._outbound = OutboundStreams(sockets.listener.family, host, port, rng)
        port.send_stream = self._outbound.send
        self.rates = TrafficRates()
        self._given_up = 0
        self.peer.woken = port.poke
        endpoints = config.gossip_endpoints
        join = endpoints.join if endpoints else ()
        options = DiscoveryOptions(family=sockets.family, loopback=is_loopback(self.own[0]))
        self.discovery = Discovery(join, port.contact, lambda: self.peer.alone, rng, options, self.own)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._outbound.run)
            nursery.start_soon(self._inbound.run)
            await nursery.start(self.port.run)
            if self._key_file is not None:
                await nursery.start(self._key_file.run)
            if self.state_file is not None:
                await nursery.start(self.state_file.run, self.peer.state)
            nursery.start_soon(self._follow)
            await nursery.start(self.discovery.run)
            log.info("gossip.started as %s at %s in %s", self.peer.gossip.me.name, spelled(self.own), self.label)
            task_status.started()

    async def _follow(self) -> None:
        """Hand on what peers bring about in this node, for ever."""
        peer, hooks = self.peer, self._hooks
        while True:
            await trio.sleep(FOLLOW_INTERVAL_S)
            if transitions := peer.transitions():
                hooks.log_transitions(transitions)
            for backend in peer.doubted():
                hooks.probe_soon(backend)
            for command in peer.commands():
                hooks.follow(command)
            if self.rates.due(now := time.monotonic()):
                self.rates.look(now, self.port.counters.bytes_sent, self.port.counters.bytes_received)
                self._warn()

    def _warn(self) -> None:
        """Log what peers do not report, and only the operator can mend."""
        if (stranger := self.peer.wrong_key_source()) is not None:
            text = f"gossip.wrong_key a packet from {spelled(stranger)}, sealed with another key or cluster_name"
            self.port.complain("wrong_key", text)
        given_up = self.peer.gossip.members.statistics().datagrams_given_up
        if given_up > self._given_up:
            text = "gossip.datagrams_blocked peers answer over TCP and hardly any over UDP: is the port open for both?"
            self.port.complain("datagrams", text)
        self._given_up = given_up

    def _log_changes(self, changes: Sequence[MemberChange]) -> None:
        for change in changes:
            record = change.record
            log.info(
                "member.%s %s at %s: %s", change.what, record.name, spelled((record.host, record.port)), change.why
            )
            if change.what == "joined" and record.schema != self.peer.gossip.me.schema:
                text = (
                    "gossip.other_routes %s has another tokenizer, template, block size or secret: no route is shared"
                )
                log.warning(text, record.name)

    def order(self, verb: str, url: str, weight: float, name: str) -> None:
        """The operator gave an order here: tell the peers, where they may follow it."""
        if self.peer.signed_commands.give(verb, url, weight, name):
            self.port.poke()

    @property
    def synced(self) -> bool:
        """Whether this node has its peers' routes, or has waited for them long enough."""
        return self.peer.synced or time.monotonic() - self._started_at > SYNC_GRACE_S

    async def leave(self) -> None:
        """Say goodbye, and wait until it has spread."""
        alone = self.peer.alone
        self.port.leave()
        if alone:
            return
        left_at = self.peer.gossip.members.left_at
        await trio.sleep(max(0.0, min(left_at - time.monotonic(), LEAVE_S_MAX)))

    # --- what it shows ----------------------------------------------------------------------------------------------

    def view(self) -> dict[str, Any]:
        """This node among its peers, for the control port."""
        now = time.monotonic()
        traffic = self.port.counters
        return {
            **self.peer.view(now),
            "label": self.label,
            "bytes_per_s": self.rates.per_s(now, traffic.bytes_sent, traffic.bytes_received),
            "traffic": values(traffic),
            **{name: values(counters) for name, counters in self._beside().items()},
        }

    def _beside(self) -> dict[str, Any]:
        """Counters of what stands beside the peer itself, by name."""
        parts = {"discovery": self.discovery, "state_file": self.state_file, "key_file": self._key_file}
        return {name: part.counters for name, part in parts.items() if part is not None}

    def samples(self) -> Iterator[Sample]:
        """For /metrics."""
        peer, port = self.peer, self.port
        gossip = peer.gossip
        yield from samples("gossip", gossip.counters)
        yield from samples("gossip_members", gossip.members.statistics())
        yield from samples("gossip_sessions", gossip.sessions.statistics())
        refused = peer.signed_commands.refused
        yield Sample("gossip_commands_refused", "counter", "Commands of peers not followed.", refused)
        yield from samples("gossip_routes", gossip.routes.counters)
        yield from samples("gossip_route_sync", peer.routes.counters)
        yield from samples("gossip_facts", peer.facts.counters)
        yield from samples("gossip_port", port.counters)
        yield from peer.streams.samples()
        for name, counters in self._beside().items():
            yield from samples(f"gossip_{name}", counters)
        lag = "From being learned anywhere to being received here, as the senders held it."
        yield Sample("gossip_lag_seconds", "histogram", lag, peer.gossip.routes.lag)
        yield Sample("gossip_lateness_seconds", "histogram", "How late the gossip timer woke up.", port.lateness_s)

    async def route_sums(self) -> bytes:
        """Bucket fingerprints of the route table, made in steps."""
        for sums in self.peer.routes.copy.sums(time.monotonic()):
            if sums is not None:
                return sums
            await trio.lowlevel.checkpoint()
        return b""


def public_address(listen: str, own: str) -> str:
    """Where clients reach this node, as peers show it: nobody can call 0.0.0.0."""
    host, port = host_port(listen)
    return spelled((own if is_wildcard(host) else host, port))


def peer_settings(config: Config, scheme: FingerprintScheme, own: HostPort, state: bytes) -> PeerSettings:
    host, port = own
    admin = config.gossip_admin_key
    routes = RouteGossipSettings(
        schema=scheme.schema,
        ttl_s=config.route_ttl_s,
        node_bytes_per_s=config.gossip_bytes_per_s_max,
    )
    gossip = GossipSettings(
        name=config.node_name or spelled(own),
        host=host,
        port=port,
        session=secrets.randbits(64) or 1,
        label=config.cluster_name,
        public=public_address(config.listen, host),
        wall_ms=int(time.time() * 1000),
        state=state,
        datagrams=config.gossip_udp,
        profile=PROFILES[config.gossip_profile],
        routes=routes,
    )
    return PeerSettings(
        gossip=gossip,
        fingerprint_key=scheme.key,
        facts=FactSettings(datagrams=config.gossip_udp),
        admin_key=blake2b(admin.get_secret_value().encode(), person=b"orders").digest() if admin else b"",
    )
