"""The command lines of the lab's children: fake engines and nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.processes.children import Command
from ranvier_py.replay.engine.engine_values import EngineLimits

LOOPBACK = "127.0.0.1"
NODES_MAX, ENGINES_MAX = 32, 64
"""Limits of one machine; beyond them a run measures the scheduler."""


@dataclass(frozen=True, slots=True)
class Engines:
    """Settings of a run's engines. The caches hold all chats of a run, so that a hit rate can recover."""

    model: str = "lab-model"
    tokenizer: str = ""
    cache_tokens: int = 60_000
    prefill_tokens_per_s: float = 20_000.0
    decode_ms: float = 8.0
    max_tokens: int = 24

    @property
    def longest_step_s(self) -> float:
        """How long a step takes that computes as many tokens of prompts as one may, and one of each answer."""
        return EngineLimits().step_tokens_max / self.prefill_tokens_per_s + self.decode_ms / 1000


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """One engine: its name in answers and on the screen, and its address; `host`: the name by which nodes know it."""

    name: str
    port: int
    ip: str = LOOPBACK
    host: str = ""
    ranks: int = 1
    max_running: int = 0  # requests in work at once; 0 = the engine's default

    @property
    def url(self) -> str:
        return f"http://{self.host or self.ip}:{self.port}"

    @property
    def backends(self) -> list[str]:
        """What a node is told to place requests on: the engine, or each of its ranks."""
        return [f"{self.url}#rank={rank}" for rank in range(self.ranks)] if self.ranks > 1 else [self.url]


def engine_command(engines: Engines, place: EnginePlace) -> Command:
    """Return the command of a fake engine."""
    argv = [
        *(sys.executable, "-m", "cluster", "engine"),
        *("--listen", f"{place.ip}:{place.port}"),
        *("--name", place.name),
        *("--model", engines.model),
        *("--cache-tokens", str(engines.cache_tokens)),
        *("--prefill-tokens-per-s", f"{engines.prefill_tokens_per_s:g}"),
        *("--decode-ms", f"{engines.decode_ms:g}"),
    ]
    if place.max_running:
        argv += ["--max-running", str(place.max_running)]
    if place.ranks > 1:
        argv += ["--ranks", str(place.ranks)]
    if engines.tokenizer:
        argv += ["--tokenizer", engines.tokenizer]
    return Command(place.name, tuple(argv), place.ip, place.port, "/health")


def serve_argv(listen: str, control: str, backends: Iterable[str], flags: Sequence[str] = ()) -> list[str]:
    """Return the command line of a node, as any operator would start it."""
    argv = [sys.executable, "-m", "ranvier_py", "serve", "--listen", listen, "--control", control]
    for url in backends:
        argv += ["--backend", url]
    return [*argv, *flags]


def join_flags(peers: Iterable[str]) -> list[str]:
    return [word for peer in peers for word in ("--join", peer)]
