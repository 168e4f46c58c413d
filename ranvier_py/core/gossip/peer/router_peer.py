"""A router among its peers: what it learns is sent, what they send is learned. A node drives it, and so does the lab.

Out, every `flush_interval_s`: the route table's new routes become updates, and what the registry did becomes facts.
Nothing of it is encoded on a request's path, which only appends to a queue. In: see `replication.route_sync` and
`backend_state.registry_sync`.

Rules: what is sent late or not at all costs cache hits, never a request. Whoever drives this drains `take`, `changes`,
`transitions`, `doubted` and `commands` after each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from random import Random
from typing import Any

from ranvier_py.core.gossip.backend_state.fact_settings import FactSettings
from ranvier_py.core.gossip.backend_state.facts import BackendFacts
from ranvier_py.core.gossip.backend_state.registry_sync import RegistrySync
from ranvier_py.core.gossip.backend_state.signed_commands import SignedCommands
from ranvier_py.core.gossip.endpoints import spelled
from ranvier_py.core.gossip.gossip import TOPICS, Gossip, GossipSettings
from ranvier_py.core.gossip.gossip_values import Address, MemberChange, Outgoing, Plane, Send
from ranvier_py.core.gossip.membership.roster import Member
from ranvier_py.core.gossip.peer.reader_sync import SharedStreams
from ranvier_py.core.gossip.readers.reader_claims import ReaderGossip
from ranvier_py.core.gossip.replication.route_sync import RouteSync
from ranvier_py.core.gossip.wire.keyring import KeyRing
from ranvier_py.core.gossip.wire.messages import Command
from ranvier_py.core.gossip.wire.seal import Subkeys
from ranvier_py.core.histogram import Histogram
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import values
from ranvier_py.core.routing.backends import Transition
from ranvier_py.core.routing.router import Router

FLUSH_INTERVAL_S = 0.05
"""What is learned becomes a route update within this. As often as route updates and loads leave a busy node
(`RouteGossipSettings.tick_s`, `FactSettings.load_interval_s`), so that they do in one tick."""

IDLE_INTERVAL_S = 0.25
"""With no request in flight the registry is looked at so often; table and registry tell when something comes."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """`fingerprint_key`: what fingerprints are keyed with, the same on all nodes. `admin_key` empty: no
    commands are shared."""

    gossip: GossipSettings
    fingerprint_key: bytes
    facts: FactSettings = field(default_factory=FactSettings)
    admin_key: bytes = b""
    flush_interval_s: float = FLUSH_INTERVAL_S


class RouterPeer:
    """One router and its gossip, wired. Has the calls that a shell drives (`gossip.Gossip`'s)."""

    def __init__(
        self,
        router: Router,
        settings: PeerSettings,
        ring: KeyRing,
        rng: Random,
        now: float,
        *,
        subkeys: Subkeys | None = None,
    ) -> None:
        outbox: list[Outgoing] = []
        self.router = router
        self.facts = BackendFacts(settings.gossip.session, settings.facts, outbox, rng, now)
        self.signed_commands = SignedCommands(settings.admin_key, outbox, rng, now)
        self.backends = RegistrySync(router.registry, self.facts, settings.fingerprint_key)
        self.routes = RouteSync(router.routes, self.backends)
        streams = ReaderGossip(settings.gossip.session, router.hasher, outbox, rng, now)
        self.streams = SharedStreams(streams, self.backends, settings.gossip.session, now)
        self.gossip = Gossip(
            settings.gossip,
            ring,
            sync=self.routes,
            facts=self.facts,
            orders=self.signed_commands,
            streams=streams,
            outbox=outbox,
            rng=rng,
            now=now,
            subkeys=subkeys,
        )
        self.woken: Callable[[], object] = lambda: None  # `wake_at` came nearer in between; the shell sets it
        self._flush_interval_s = settings.flush_interval_s
        self._now = self._flushed_at = self._flush_at = now
        self.routes.copy.asked = self._send_everything
        router.routes.outgoing.collect(self._hurry)
        router.registry.busied = self._hurry

    # --- the calls of the shell -------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float:
        return min(self._flush_at, self.gossip.wake_at, self.streams.wake_at)

    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> None:
        self._now = now
        self.backends.count_restarts(now)
        self.gossip.receive(data, source, plane, now)
        self.backends.follow(now)
        self.streams.follow(now, synced=self.synced)
        if self.backends.regained():
            self.gossip.routes.compare_soon(now)

    def contact(self, addresses: Sequence[Address], now: float) -> None:
        self.gossip.contact(addresses, now)

    def unreachable(self, address: Address, plane: Plane, now: float) -> None:
        self.gossip.unreachable(address, plane, now)

    def tick(self, now: float) -> None:
        self._now = now
        if now >= self._flush_at:
            self.flush(now)
        self.gossip.tick(now)
        self.backends.follow(now)
        self.streams.follow(now, synced=self.synced)

    def flush(self, now: float) -> None:
        """Hand down what was learned and seen since the last time."""
        busy = self.backends.look(now)
        self._flushed_at = now
        self._flush_at = now + (self._flush_interval_s if busy else max(self._flush_interval_s, IDLE_INTERVAL_S))
        self._announce(now)

    def _announce(self, now: float, *, everything: bool = False) -> None:
        if self.synced:  # before, our count of generations may be behind the peers', who would not believe an update
            for update, at in self.routes.updates(now, everything=everything):
                self.gossip.announce(update, at)

    def _send_everything(self) -> None:
        """What waits, too."""
        self.flush(self._now)
        self._announce(self._now, everything=True)

    def _hurry(self) -> None:
        """There is something to send: do not wait until the next look of an idle node."""
        wanted_at = self._flushed_at + self._flush_interval_s
        if wanted_at < self._flush_at:
            self._flush_at = wanted_at
            self.woken()

    def take(self) -> list[Send]:
        return self.gossip.take()

    def changes(self) -> list[MemberChange]:
        return self.gossip.changes()

    def leave(self, now: float) -> None:
        self._now = now
        self._send_everything()
        self.gossip.leave(now)

    def state(self) -> bytes:
        return self.gossip.state()

    def rekey(self, ring: KeyRing) -> None:
        self.gossip.rekey(ring)

    # --- what it shows ----------------------------------------------------------------------------------------------

    @property
    def synced(self) -> bool:
        """Whether this node has had its peers' routes as they were when it met them."""
        return self.gossip.routes.synced

    def view(self, now: float) -> dict[str, Any]:
        """This node among its peers, as JSON has it."""
        me, counters = self.gossip.me, self.gossip.counters
        return {
            "name": me.name,
            "session": f"{me.session:016x}",
            "epoch": me.epoch,
            "incarnation": me.incarnation,
            "state": me.state.name.lower(),
            "address": spelled((me.host, me.port)),
            "synced": self.synced,
            "members": [member_view(each, me.schema, now) for each in self.gossip.members.everybody()],
            "topics": {
                topic: {
                    "sent": {"packets": counters.packets_sent[topic], "bytes": counters.bytes_sent[topic]},
                    "received": {"packets": counters.packets_received[topic], "bytes": counters.bytes_received[topic]},
                }
                for topic in TOPICS
            },
            "routes": values(self.gossip.routes.counters),
            "route_sync": values(self.routes.counters),
            "facts": values(self.facts.counters),
            **self.streams.view(),
            "membership": values(self.gossip.members.statistics()),
            "lag_ms": quantiles_ms(self.gossip.routes.lag),
            "sessions": values(self.gossip.sessions.statistics()),
            "refused": dict(counters.refused),
            "opened_by_key": dict(counters.opened),
        }

    # --- what the node does with the rest ---------------------------------------------------------------------------

    def wrong_key_source(self) -> Address | None:
        """Where a packet came from, since the last call, that is sealed with another key or label than ours."""
        source, self.gossip.wrong_key_source = self.gossip.wrong_key_source, None
        return source

    @property
    def alone(self) -> bool:
        return self.gossip.alone

    def transitions(self) -> list[Transition]:
        """What peers made of our backends since the last call; for the log."""
        transitions, self.backends.transitions = self.backends.transitions, []
        return transitions

    def doubted(self) -> list[BackendId]:
        """Backends that a peer calls ill, to be probed now."""
        doubted = list(self.backends.doubted)
        self.backends.doubted.clear()
        return doubted

    def commands(self) -> list[Command]:
        """What the operator commanded on another node, to be followed."""
        commands, self.signed_commands.new = self.signed_commands.new, []
        return commands


def member_view(member: Member, schema: int, now: float) -> dict[str, Any]:
    """One line of the table of members. Ages in seconds, round trips in milliseconds; None where never.

    `routes`: whether its fingerprints are made like ours, by `schema`; else it shares none.
    """
    record = member.record
    return {
        "name": record.name,
        "state": member.state.name.lower(),
        "address": spelled(member.address),
        "public": record.public,
        "incarnation": record.incarnation,
        "epoch": record.epoch,
        "session": f"{member.session:016x}",
        "since_s": round(now - member.since, 1),
        "silent_s": rounded(now - member.received_at, 1),
        "rtt_ms": rounded(member.rtt_s * 1000, 2),
        "proved": member.proved,
        "datagrams": member.datagrams,
        "routes": record.schema == schema,
    }


def quantiles_ms(seconds: Histogram) -> dict[str, float | None]:
    """Since the start, as JSON has it; None while nothing was observed."""
    return {name: rounded(seconds.quantile(share) * 1000, 1) for name, share in (("p50", 0.5), ("p99", 0.99))}


def rounded(value: float, digits: int) -> float | None:
    return round(value, digits) if isfinite(value) else None
