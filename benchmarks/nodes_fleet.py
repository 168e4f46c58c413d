"""The processes of `nodes_processes`: engines, and one kind of routers in front of them, with the command line of each.

Routers share one port on 127.0.0.2, .3, …, as behind a DNS name. Engines are the lab's, on 127.0.0.1. Nothing is
started here; `cluster.processes.children` does that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from cluster.dns.addresses import free_port
from cluster.processes.children import Command

ENGINE_IP = "127.0.0.1"
MODEL = "lab-model"
ENGINE_FLAGS = ("--cache-tokens", "200000", "--prefill-tokens-per-s", "20000", "--decode-ms", "10")


@dataclass(frozen=True, slots=True)
class Kind:
    """One configuration: whose routers, how many, and whether they tell each other anything."""

    router: str  # "ranvier" or "smg"
    nodes: int
    shared: bool

    @property
    def name(self) -> str:
        told = {"ranvier": ("no gossip", "gossip"), "smg": ("no mesh", "mesh")}[self.router][self.shared]
        return f"{self.nodes} {self.router} {told}"


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses and ports. Each router has the same ports on an address of its own."""

    ips: Sequence[str]
    port: int
    side_port: int  # control or metrics
    peer_port: int  # gossip or mesh
    engine_ports: Sequence[int]

    @property
    def engine_urls(self) -> list[str]:
        return [f"http://{ENGINE_IP}:{port}" for port in self.engine_ports]


def make_places(nodes: int, engines: int, rng: Random) -> Places:
    """Free ports, chosen at random. Raises NamesError."""
    ips = [f"127.0.0.{2 + number}" for number in range(nodes)]
    taken: set[int] = set()

    def take(where: Sequence[str]) -> int:
        port = free_port(where, rng, frozenset(taken))
        taken.add(port)
        return port

    return Places(ips, take(ips), take(ips), take(ips), [take([ENGINE_IP]) for _ in range(engines)])


def engine_commands(places: Places) -> list[Command]:
    found = []
    for number, port in enumerate(places.engine_ports):
        argv = [sys.executable, "-m", "cluster", "engine", "--listen", f"{ENGINE_IP}:{port}"]
        argv += ["--name", f"engine-{number}", "--model", MODEL, *ENGINE_FLAGS]
        found.append(Command(f"engine-{number}", tuple(argv), ENGINE_IP, port, "/health"))
    return found


def router_commands(kind: Kind, places: Places, key_file: Path, smg: Path | None) -> list[Command]:
    """The routers in the order in which they are to be started. `smg` is its program, `key_file` our cluster's key."""
    if kind.router == "smg":
        assert smg is not None
        return [smg_command(smg, number, kind, places) for number in range(kind.nodes)]
    return [ranvier_command(number, kind, places, key_file) for number in range(kind.nodes)]


def ranvier_command(number: int, kind: Kind, places: Places, key_file: Path) -> Command:
    ip = places.ips[number]
    argv = [sys.executable, "-m", "ranvier_py", "serve", "--listen", f"{ip}:{places.port}"]
    argv += ["--control", f"{ip}:{places.side_port}", "--log-level", "warning"]
    for url in places.engine_urls:
        argv += ["--backend", url]
    if kind.shared:
        argv += ["--gossip", f"{ip}:{places.peer_port}", "--cluster-key-file", str(key_file)]
        argv += ["--node-name", f"node-{number}"]
        for other in places.ips:
            argv += ["--join", f"{other}:{places.peer_port}"]
    return Command(f"ranvier-{number}", tuple(argv), ip, places.side_port, "/readyz")


def smg_command(program: Path, number: int, kind: Kind, places: Places) -> Command:
    """Its peers are told of the first gateway, which must be up before them."""
    ip = places.ips[number]
    argv = [str(program), "launch", "--host", ip, "--port", str(places.port)]
    argv += ["--prometheus-host", ip, "--prometheus-port", str(places.side_port)]
    argv += ["--policy", "cache_aware", "--disable-tokenizer-autoload", "--log-level", "warn"]
    if kind.shared:
        argv += ["--enable-mesh", "--mesh-server-name", f"smg-{number}", "--mesh-host", ip]
        argv += ["--mesh-advertise-host", ip, "--mesh-port", str(places.peer_port)]
        if number:
            argv += ["--mesh-peer-urls", f"{places.ips[0]}:{places.peer_port}"]
    argv += ["--worker-urls", *places.engine_urls]
    return Command(f"smg-{number}", tuple(argv), ip, places.port, "/readiness")
