"""Plans a chaos run: addresses, ports, files, and the command lines of its nodes. Starts no process.

Clients use the name `router.lab`, which always has every node, dead ones too, since plain DNS does not know of deaths.
Nodes join `peers.lab`, which resolves as the scenario says; outside namespaces they join a list of addresses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random

from cluster.dns.addresses import PORT_MIN, free_port
from cluster.processes.children import Command
from cluster.processes.commands import LOOPBACK, EnginePlace, join_flags, serve_argv
from cluster.processes.link_control import BRIDGE_IP, LinkMode, node_ip
from cluster.processes.relay import End
from cluster.scenario import Cluster, numbers

CLIENTS_NAME, PEERS_NAME = "router.lab", "peers.lab"
DNS_PORT = 53
CLUSTER_NAME = "lab"
RANKS = 2
"""Data-parallel ranks of an engine that has several: enough to choose wrongly."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """One node: its addresses and its files."""

    number: int
    name: str
    ip: str
    port: int
    control_port: int
    gossip: End
    key_file: Path
    control_key_file: Path
    state_dir: Path

    @property
    def state_file(self) -> Path:
        return self.state_dir / "peers"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a run that is decided before it begins."""

    mode: LinkMode
    nodes: tuple[NodePlace, ...]
    engines: tuple[EnginePlace, ...]
    dns: tuple[str, int]  # port 0 takes a free one
    join: tuple[str, ...]
    control_key: str


def make_plan(
    mode: LinkMode, cluster: Cluster, folder: Path, rng: Random, moving: Collection[int] = frozenset()
) -> Plan:
    """Choose addresses and ports, and write the key files. Nodes know engines by address, those that are `moving` by
    name. Raises NamesError, OSError."""
    private = mode.name == "namespaces"
    count = cluster.nodes
    ips = [node_ip(number) if private else f"127.0.0.{2 + number}" for number in range(count)]
    shown = [f"127.0.1.{2 + number}" for number in range(count)] if mode.name == "relay" else ips
    taken: set[int] = set()

    def take(where: Sequence[str]) -> int:
        port = PORT_MIN + len(taken) if private else free_port(where, rng, frozenset(taken))
        taken.add(port)
        return port

    port, gossip_port, control_port = take(ips), take([*ips, *shown]), take(ips)
    engine_ip = BRIDGE_IP if private else LOOPBACK
    ranked = numbers(cluster.ranked) if cluster.ranked != "none" else ()
    engines = tuple(
        EnginePlace(
            f"engine-{number}",
            take([LOOPBACK]),
            engine_ip,
            f"engine-{number}.lab" if number in moving else "",
            RANKS if number in ranked else 1,
            cluster.max_running,
        )
        for number in range(cluster.engines)
    )
    control_key = f"{rng.getrandbits(128):032x}"
    names = cluster.names or tuple(f"n{number}" for number in range(count))
    nodes: list[NodePlace] = []
    for number in range(count):
        home = folder / f"node-{number}"
        (home / "state").mkdir(parents=True, exist_ok=True)
        end = End((ips[number], gossip_port), (shown[number], gossip_port))
        files = home / "cluster.key", home / "control.key", home / "state"
        files[1].write_text(control_key + "\n")
        nodes.append(NodePlace(number, names[number], ips[number], port, control_port, end, *files))
    join = (f"{PEERS_NAME}:{gossip_port}",) if private else tuple(f"{ip}:{gossip_port}" for ip in shown)
    dns = (BRIDGE_IP, DNS_PORT) if private else (LOOPBACK, 0)
    return Plan(mode, tuple(nodes), engines, dns, join, control_key)


def write_keys(place: NodePlace, keys: Sequence[int], seed: int) -> None:
    """Replace a node's key file in one step. `keys`: the scenario's numbers, primary first, which stand for secrets."""
    fresh = place.key_file.with_suffix(".new")
    fresh.write_text("".join(f"{key_line(number, seed)}\n" for number in keys))
    fresh.replace(place.key_file)


def key_line(number: int, seed: int) -> str:
    """Return one key as a line of a key file."""
    return blake2b(f"{seed}/key/{number}".encode(), digest_size=32).hexdigest()


def node_command(
    plan: Plan, place: NodePlace, cluster: Cluster, *, gossip: bool, label: str, prefix: Sequence[str]
) -> Command:
    """Return the command of a node, as any operator would start it."""
    flags = ["--control-key-file", str(place.control_key_file), "--debug-headers"]
    if cluster.route_ttl_s:
        flags += ["--route-ttl-s", f"{cluster.route_ttl_s:g}"]
    if gossip:
        flags += gossip_flags(plan, place, cluster, label)
    backends = [backend for engine in plan.engines for backend in engine.backends]
    argv = serve_argv(f"{place.ip}:{place.port}", f"{place.ip}:{place.control_port}", backends, flags)
    return Command(place.name, (*prefix, *argv), place.ip, place.control_port, "/readyz")


def gossip_flags(plan: Plan, place: NodePlace, cluster: Cluster, label: str) -> list[str]:
    flags = [
        *("--gossip", "{}:{}".format(*place.gossip.real)),
        *("--advertise", "{}:{}".format(*place.gossip.shown)),
        *("--cluster-key-file", str(place.key_file)),
        *("--cluster-name", label or CLUSTER_NAME),
        *("--node-name", place.name),
        *("--gossip-profile", cluster.profile),
        *("--gossip-state-file", str(place.state_file)),
    ]
    flags += join_flags(plan.join)
    if cluster.budget_bytes_per_s:
        flags += ["--gossip-bytes-per-s-max", str(cluster.budget_bytes_per_s)]
    return flags
