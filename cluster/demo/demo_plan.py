"""What `up` starts: ports, addresses, and the command line of every child, each written in one place. No process yet.

The engines' numbers are chosen for two cores and half a minute: prefill slow enough that reuse can be seen in the time
to the first token, caches large enough for the chats of one engine but not for those of all, as in a real cluster.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from cluster.dns.addresses import Address, free_port, node_addresses
from cluster.processes.children import Command

NODES_MAX, ENGINES_MAX = 32, 64
"""One machine; beyond this it measures the scheduler."""

ENGINE_IP = "127.0.0.1"
CONTROL_IP = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be chosen. Times in seconds."""

    nodes: int = 3
    engines: int = 4
    users: int = 24
    turns: int = 6
    seed: int = 1
    think_s: float = 0.1
    max_tokens: int = 48
    policies: tuple[str, ...] = ("round_robin", "affinity")
    gossip: bool = True
    model: str = "lab-model"
    tokenizer: str = ""
    cache_tokens: int = 18_000
    prefill_tokens_per_s: float = 7_500.0
    decode_ms: float = 8.0
    ready_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not (1 <= self.nodes <= NODES_MAX and 1 <= self.engines <= ENGINES_MAX):
            raise ValueError(f"want 1 … {NODES_MAX} nodes and 1 … {ENGINES_MAX} engines")
        if min(self.users, self.turns, self.max_tokens) < 1:
            raise ValueError("users, turns and tokens must be at least 1")
        if self.think_s < 0 or self.ready_s <= 0:
            raise ValueError("times must not be negative")
        if not self.policies:
            raise ValueError("want a policy at least")


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """One engine: its name in answers and on the screen, and where it listens."""

    name: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{ENGINE_IP}:{self.port}"


@dataclass(frozen=True, slots=True)
class Lab:
    """Where everything stands. Each policy has its own nodes: nothing that one has learned helps the other."""

    engines: tuple[EnginePlace, ...]
    nodes: dict[str, tuple[Address, ...]]
    controls: dict[str, tuple[int, ...]]
    gossips: dict[str, tuple[Address, ...]]
    word: str


@dataclass(frozen=True, slots=True)
class Peering:
    """How one node meets its peers."""

    place: Address
    join: tuple[Address, ...]
    key_file: Path


def plan(settings: Settings, rng: Random) -> Lab:
    """Choose ports below 32768 that are free now. Raises NamesError."""
    taken: set[int] = set()

    def take() -> int:
        port = free_port([CONTROL_IP], rng, frozenset(taken))
        taken.add(port)
        return port

    engines = tuple(EnginePlace(f"engine-{number + 1}", take()) for number in range(settings.engines))
    nodes: dict[str, tuple[Address, ...]] = {}
    controls: dict[str, tuple[int, ...]] = {}
    gossips: dict[str, tuple[Address, ...]] = {}
    word = ""
    for policy in settings.policies:
        for places in (nodes, gossips):
            addresses, word = node_addresses(settings.nodes, rng, frozenset(taken))
            taken.update(address.port for address in addresses)
            places[policy] = tuple(addresses)
        controls[policy] = tuple(take() for _ in range(settings.nodes))
    return Lab(engines, nodes, controls, gossips, word)


def write_key(path: Path) -> None:
    """A cluster key of this lab alone, readable by its owner alone."""
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32) + "\n")


EngineCommand = Callable[[Settings, EnginePlace], Command]
NodeCommand = Callable[[str, str, Address, int, Sequence[EnginePlace], str, Peering | None], Command]


def engine_command(settings: Settings, place: EnginePlace) -> Command:
    """A fake engine of this lab."""
    argv = [
        *(sys.executable, "-m", "cluster", "engine"),
        *("--listen", f"{ENGINE_IP}:{place.port}"),
        *("--name", place.name),
        *("--model", settings.model),
        *("--cache-tokens", str(settings.cache_tokens)),
        *("--prefill-tokens-per-s", f"{settings.prefill_tokens_per_s:g}"),
        *("--decode-ms", f"{settings.decode_ms:g}"),
    ]
    if settings.tokenizer:
        argv += ["--tokenizer", settings.tokenizer]
    return Command(place.name, tuple(argv), ENGINE_IP, place.port, "/health")


def node_command(
    name: str,
    policy: str,
    address: Address,
    control: int,
    engines: Sequence[EnginePlace],
    tokenizer: str,
    peering: Peering | None = None,
) -> Command:
    """A router node, as anybody would start it; with peers when it is to have some."""
    argv = [
        *(sys.executable, "-m", "ranvier_py", "serve"),
        *("--listen", f"{address.ip}:{address.port}"),
        *("--control", f"{CONTROL_IP}:{control}"),
        *("--policy", policy),
    ]
    for engine in engines:
        argv += ["--backend", engine.url]
    if tokenizer:
        argv += ["--tokenizer", tokenizer]
    if peering is not None:
        argv += ["--gossip", at(peering.place), "--node-name", name, "--cluster-key-file", str(peering.key_file)]
        for peer in peering.join:
            argv += ["--join", at(peer)]
    return Command(name, tuple(argv), CONTROL_IP, control, "/readyz")


def at(address: Address) -> str:
    return f"{address.ip}:{address.port}"
