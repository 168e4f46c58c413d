"""Measures a run: how fast route updates spread, when deaths are noticed, what it costs. One flat object.

For a *followed* route update every node that ran when it was learned is watched until the update arrives. At most
FOLLOWED_MAX are followed at once, so these are a sample. Times are virtual seconds from learned to usable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.simulation.sim_host import SimHost
from cluster.simulation.world import World
from ranvier_py.core.mesh.mesh_values import MemberChange, Plane
from ranvier_py.core.prompts.prompt import Boundary

FOLLOWED_MAX = 16
FOLLOW_S = 20.0
"""A route update that is not at all nodes by then counts as late and is left to the check at the end."""

PERCENTILES = (("t50", 0.5), ("t99", 0.99), ("t100", 1.0))


@dataclass(slots=True)
class Followed:
    """A route update on its way to the nodes in `missing`."""

    fingerprint: int
    engine: int
    generation: int
    at_s: float
    missing: dict[int, int]  # host -> its generation


class Measure:
    """Observes hosts and clients; changes nothing."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.followed: list[Followed] = []
        self.learned_s: list[float] = []  # for each route update and node
        self.everywhere_s: list[float] = []  # for each route update, until it was at all nodes
        self.late = 0  # (route update, node) pairs given up
        self.overtaken = 0  # pairs whose node ended or engine restarted meanwhile
        self.noticed_s: dict[int, list[float]] = {}  # ended session -> after how long each other node reported it
        self.false_deaths: list[tuple[float, int, int]] = []  # (when, observer, subject)
        self.deaths = 0

    # --- route updates
    # ----------------------------------------------------------------------------------------------------

    def served(self, host: SimHost, end: Boundary, engine: int) -> None:
        if len(self.followed) >= FOLLOWED_MAX or not end.token:
            return  # a turn that is never tokenized arrives later, on purpose (route_sync.TEXTS_WAIT_S)
        label = self.world.labels[host.index]
        others = {
            other: self.world.hosts[other].generation
            for other in self.world.live()
            if other != host.index and self.world.labels[other] == label
        }
        if others:
            generation = self.world.engines[engine].generation
            self.followed.append(Followed(end.token, engine, generation, self.world.time.now, others))

    def received(self, host: SimHost, plane: Plane) -> None:
        """Check whether a node that has received something now has the followed route updates."""
        if plane is Plane.BULK and self.followed:
            for route_update in self.followed:
                if host.index in route_update.missing:
                    self._look(host, route_update)

    def _look(self, host: SimHost, route_update: Followed) -> None:
        now, node = self.world.time.now, host.node
        if node is None or route_update.missing.get(host.index) != host.generation:
            return
        if node.holds(route_update.fingerprint, route_update.engine, now):
            del route_update.missing[host.index]
            self.learned_s.append(now - route_update.at_s)
            if not route_update.missing:
                self.everywhere_s.append(now - route_update.at_s)

    def sample(self) -> None:
        """Check all nodes, and give up route updates that are late. Called once a second."""
        now, kept = self.world.time.now, []
        for route_update in self.followed:
            if self.world.engines[route_update.engine].generation != route_update.generation:
                self.overtaken += len(route_update.missing)
                continue
            for number in [*route_update.missing]:
                host = self.world.hosts[number]
                if host.generation != route_update.missing[number]:
                    del route_update.missing[number]
                    self.overtaken += 1
                else:
                    self._look(host, route_update)
            if route_update.missing and now - route_update.at_s < FOLLOW_S:
                kept.append(route_update)
            else:
                self.late += len(route_update.missing)
        self.followed = kept

    # --- members ----------------------------------------------------------------------------------------------------

    def changed(self, host: SimHost, change: MemberChange) -> None:
        session = change.record.session
        self.world.trace.add(self.world.time.now, host.index, change.what, change.record.name, session, change.why)
        if change.what not in ("died", "left") or session not in self.world.sessions:
            return
        ended = self.world.ended.get(session)
        if ended is not None:
            self.noticed_s.setdefault(session, []).append(self.world.time.now - ended)
        elif change.what == "died":
            self.deaths += 1
            subject = self.world.hosts[self.world.sessions[session][0]]
            if not subject.paused:
                self.false_deaths.append((self.world.time.now, host.index, subject.index))

    # --- the whole --------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return all measures as one flat JSON object."""
        world = self.world
        net, seconds = world.net.counters, max(world.time.now, 1e-9)
        nodes = max(1, len(world.hosts))
        found: dict[str, Any] = {"nodes": nodes, "virtual_s": round(world.time.now, 3), "packets": net.sent}
        noticed = self.noticed_s.values()
        for what, values in (
            ("learned", self.learned_s),
            ("everywhere", self.everywhere_s),
            ("noticed_first", [min(times) for times in noticed]),
            ("noticed_all", [max(times) for times in noticed]),
        ):
            found |= {f"{what}_{name}_s": value for name, value in percentiles(values).items()}
        found |= {"updates_late": self.late, "false_deaths": len(self.false_deaths), "deaths_of_stopped": self.deaths}
        for plane in Plane:
            found[f"{plane.name.lower()}_bytes_per_node_s"] = round(net.bytes_by_plane[plane] / nodes / seconds, 1)
        found |= {f"net_{name}": value for name, value in asdict(net).items() if name != "bytes_by_plane"}
        found |= counters_of(world)
        found["hit_share"] = hit_share(world)
        expected = found["client_served"] * (nodes - 1)
        found["route_bytes_per_turn_and_peer"] = (
            round(found.get("node_sent_routes_bytes", 0) / expected, 1) if expected else None
        )
        return found


def counters_of(world: World) -> dict[str, int]:
    """Return the sums of the running nodes' counters, and the clients' counters."""
    found: dict[str, int] = {}
    for node in world.live().values():
        for name, value in node.counters().items():
            found[f"node_{name}"] = found.get(f"node_{name}", 0) + value
    clients = world.clients.counters
    for name in ("turns", "served", "failed", "hopeless", "torn", "second_tries"):
        found[f"client_{name}"] = getattr(clients, name)
    return dict(sorted(found.items()))


def hit_share(world: World) -> float:
    """Return the share of prompt tokens that the engines had cached, by their own count."""
    asked = sum(engine.prompt_tokens for engine in world.engines)
    return round(sum(engine.cached_tokens for engine in world.engines) / asked, 4) if asked else 0.0


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return t50, t99 and t100; None for each if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return {name: None for name, _ in PERCENTILES}
    last = len(ordered) - 1
    return {name: round(ordered[min(last, int(share * len(ordered)))], 4) for name, share in PERCENTILES}
