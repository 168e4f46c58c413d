"""Plans what `up` starts: ports, addresses, and the command lines of the nodes. Starts no process.

The engines' defaults suit two cores and half a minute: prefill is slow enough that reuse shows in the time to the first
token, and caches hold the chats of one engine but not those of all, as in a real cluster.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from random import Random

from cluster.dns.addresses import Address, free_port, node_addresses
from cluster.processes.children import Command
from cluster.processes.commands import ENGINES_MAX, LOOPBACK, NODES_MAX, EnginePlace, Engines, join_flags, serve_argv


@dataclass(frozen=True, slots=True)
class Settings(Engines):
    """All settings of `up`. Times in seconds."""

    cache_tokens: int = 18_000
    prefill_tokens_per_s: float = 7_500.0
    max_tokens: int = 48

    nodes: int = 3
    engines: int = 4
    users: int = 24
    turns: int = 6
    seed: int = 1
    think_s: float = 0.1
    policies: tuple[str, ...] = ("round_robin", "affinity")
    gossip: bool = True
    ready_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises ValueError for settings out of range."""
        if not (1 <= self.nodes <= NODES_MAX and 1 <= self.engines <= ENGINES_MAX):
            raise ValueError(f"want 1 … {NODES_MAX} nodes and 1 … {ENGINES_MAX} engines")
        if min(self.users, self.turns, self.max_tokens) < 1:
            raise ValueError("users, turns and tokens must be at least 1")
        if self.think_s < 0 or self.ready_s <= 0:
            raise ValueError("times must not be negative")
        if not self.policies:
            raise ValueError("want a policy at least")


@dataclass(frozen=True, slots=True)
class Lab:
    """All ports and addresses. Each policy has its own nodes, so nothing that one learns helps the other."""

    engines: tuple[EnginePlace, ...]
    nodes: dict[str, tuple[Address, ...]]
    controls: dict[str, tuple[int, ...]]
    gossips: dict[str, tuple[Address, ...]]
    word: str


def plan(settings: Settings, rng: Random) -> Lab:
    """Choose ports below 32768 that are free now. Raises NamesError."""
    taken: set[int] = set()

    def take() -> int:
        port = free_port([LOOPBACK], rng, frozenset(taken))
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
    """Write a cluster key for this run alone, readable by its owner alone."""
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32) + "\n")


def node_commands(lab: Lab, policy: str, tokenizer: str = "", key_file: Path | None = None) -> list[Command]:
    """Return the commands of one policy's nodes, which are peers of each other if they have a key."""
    gossips = [at(address) for address in lab.gossips[policy]]
    commands = []
    for number, (address, control) in enumerate(zip(lab.nodes[policy], lab.controls[policy], strict=True)):
        name, flags = f"{policy}-node-{number + 1}", ["--policy", policy, "--debug-headers"]
        if tokenizer:
            flags += ["--tokenizer", tokenizer]
        if key_file is not None:
            flags += ["--gossip", gossips[number], "--node-name", name, "--cluster-key-file", str(key_file)]
            flags += join_flags(gossips)
        argv = serve_argv(at(address), f"{LOOPBACK}:{control}", [engine.url for engine in lab.engines], flags)
        commands.append(Command(name, tuple(argv), LOOPBACK, control, "/readyz"))
    return commands


def at(address: Address) -> str:
    return f"{address.ip}:{address.port}"
