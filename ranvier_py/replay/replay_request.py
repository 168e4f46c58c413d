"""Reads the command line of `ranvier replay` into a ReplayRequest, and checks it before any work is done.

A wrong value raises RequestRefused with one line that names the flag, what was given and what was expected.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.routing.placement.policies import POLICIES, PlacementOptions
from ranvier_py.core.routing.route_table.route_values import LRU, UTILITY, RouteTableOptions
from ranvier_py.replay.engine.engine_values import CACHES, CacheName, EngineLimits
from ranvier_py.replay.engine.presets import preset
from ranvier_py.replay.hybrid.hybrid_model import HYBRID_MODELS
from ranvier_py.replay.knowledge import KnowledgeName
from ranvier_py.replay.oracles import ORACLES
from ranvier_py.replay.replay_plan import Plan, Restart
from ranvier_py.replay.traces.trace import Format, TraceOptions

EVERYDAY = ("ttft", "affinity", "least_loaded", "round_robin", "oracle_greedy", "oracle_ttft")
"""The policies that run without `--policy`: our own, the usual load balancers, and the oracles as bounds."""

ENGINES_MAX = 4096  # as many as a node's registry takes
NODES_MAX = 64
ROUTES_MAX = 1 << 30  # half of the greatest row number
SPEED_MAX = 10_000.0
RATES_MAX = 64  # rates of one sweep; every policy runs once at each
JOBS_MAX = 1024
REQUESTS_MAX = 1 << 32
SPAN_S_MAX = 1e9
"""Greatest time from the first request to the last, 30 years. A longer one means mixed clocks or a wrong unit."""

SIZE = re.compile(r"(\d[\d_]{0,20}(?:\.\d{1,20})?)\s*([kKMG]?)")
UNITS = MappingProxyType({"": 1, "k": 1_000, "K": 1_000, "M": 1_000_000, "G": 1_000_000_000})

Value = TypeVar("Value")
Name = TypeVar("Name", bound=str)


class RequestRefused(Exception):
    """The command line is wrong. The message is one line."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """A command line that was read and checked. `plan` is what all runs have in common."""

    traces: tuple[Path, ...]
    options: TraceOptions
    plan: Plan
    policies: tuple[str, ...]
    caches: tuple[CacheName | None, ...]
    nodes: tuple[int, ...]
    rates: tuple[float, ...]
    jobs: int
    out: Path | None
    per_request: Path | None
    stream: bool  # whether routers see the first token of each answer

    def plans(self, block_tokens: int, cache: CacheName | None) -> list[Plan]:
        """Return the plans of one trace, for engines with this cache, or for None with their presets' caches. An oracle
        runs once per rate, whatever the numbers of nodes. Raises RequestRefused."""
        if min(limits.cache_tokens for limits in self.plan.engines) < block_tokens:
            raise RequestRefused(f"--cache-tokens: expected at least the {block_tokens} tokens of a block")
        engines = tuple(
            replace(limits, block_size=block_tokens, cache=cache or limits.cache) for limits in self.plan.engines
        )
        routed = [(policy, nodes) for nodes in self.nodes for policy in self.policies if policy not in ORACLES]
        oracles = [(policy, 0) for policy in self.policies if policy in ORACLES]
        return [
            replace(self.plan, policy=policy, nodes=nodes, engines=engines, speed=rate)
            for rate in self.rates
            for policy, nodes in [*routed, *oracles]
        ]


def read_request(given: argparse.Namespace, cores: int) -> ReplayRequest:
    """Read and check all flags. `cores`: how many runs go at a time without `--jobs`. Raises RequestRefused."""
    if given.sweep is not None and given.speed != "1":
        raise RequestRefused("--sweep: names its speeds itself, so --speed has no place beside it")
    if given.arrivals_replace and given.arrivals is None:
        raise RequestRefused("--arrivals-replace: needs the file of --arrivals")
    engines = engines_of(given)
    speed = read("--speed", given.speed, positive(SPEED_MAX))
    plan = Plan(
        policy="",
        nodes=0,
        engines=engines,
        seed=read("--seed", given.seed, whole(0, REQUESTS_MAX)),
        options=policy_options(given.policy_option),
        gossip_delay_s=optional("--gossip-delay", given.gossip_delay, positive(3600)),
        restarts=tuple(restart_of(text, len(engines)) for text in given.restart),
        regret=not given.no_regret,
        per_request=given.per_request is not None,
        knowledge=one_of("--knowledge", given.knowledge, get_args(KnowledgeName)),
        routes_max=read("--routes", given.routes, whole(1, ROUTES_MAX)),
        routes=RouteTableOptions(eviction=one_of("--eviction", given.eviction, (LRU, UTILITY))),
        think_s=optional("--think", given.think, positive(3600)),
    )
    return ReplayRequest(
        traces=tuple(dict.fromkeys(existing("TRACE", path) for path in given.traces)),
        options=trace_options(given, plan.seed),
        plan=plan,
        policies=policies_of(given.policy),
        caches=(None,) if given.cache is None else several("--cache", given.cache, cache_of),
        nodes=several("--nodes", given.nodes, whole(1, NODES_MAX)),
        rates=(speed,) if given.sweep is None else rates_of(given.sweep),
        jobs=optional("--jobs", given.jobs, whole(1, JOBS_MAX)) or cores,
        out=given.out,
        per_request=given.per_request,
        stream=not given.unstreamed,
    )


def policies_of(text: str | None) -> tuple[str, ...]:
    known = (*POLICIES, *ORACLES)
    if text is None:
        return EVERYDAY
    named = [one_of("--policy", name.strip(), (*known, "all")) for name in text.split(",")]
    return tuple(dict.fromkeys(each for name in named for each in (known if name == "all" else (name,))))


def policy_options(given: Sequence[str]) -> PlacementOptions:
    try:
        return PlacementOptions.parse(given)
    except ConfigError as error:
        raise RequestRefused(f"--policy-option: {'; '.join(error.problems)}") from error


def engines_of(given: argparse.Namespace) -> tuple[EngineLimits, ...]:
    count = read("--engines", given.engines, whole(1, ENGINES_MAX))
    try:
        kinds = [preset(name.strip()) for name in given.preset.split(",")]
    except ValueError as error:
        raise RequestRefused(f"--preset: {error}") from error
    model = one_of("--hybrid-model", given.hybrid_model, tuple(HYBRID_MODELS))
    kinds = [replace(kind, hybrid_model=model) for kind in kinds]
    cache_tokens = optional("--cache-tokens", given.cache_tokens, whole(1, REQUESTS_MAX))
    if cache_tokens is not None:
        kinds = [replace(kind, cache_tokens=cache_tokens, block_size=1) for kind in kinds]  # `plans` sets the trace's
    return tuple(kinds[index % len(kinds)] for index in range(count))


def cache_of(name: str) -> CacheName:
    return one_of("--cache", name, CACHES)


def restart_of(text: str, engines: int) -> Restart:
    engine, _, at = text.partition("@")
    if not at:
        raise RequestRefused(f"--restart: expected ENGINE@SECONDS, not {text!r}")
    return Restart(read("--restart", at, positive(1e9)), read("--restart", engine, whole(0, engines - 1)))


def rates_of(text: str) -> tuple[float, ...]:
    """Return the rates of a text like `rate=0.5,1,2`, ascending and without repetition. Raises RequestRefused."""
    name, _, values = text.partition("=")
    try:
        rates = sorted({positive(SPEED_MAX)(value) for value in values.split(",")})
    except ValueError:
        rates = []
    if name != "rate" or not 0 < len(rates) <= RATES_MAX:
        known = f"rate= and up to {RATES_MAX} positive numbers up to {SPEED_MAX:g}, as rate=0.5,1,2"
        raise RequestRefused(f"--sweep: a sweep is {known}, not {text!r}")
    return tuple(rates)


def trace_options(given: argparse.Namespace, seed: int) -> TraceOptions:
    formats: tuple[Format, ...] = get_args(Format)
    block_tokens = optional("--block-tokens", given.block_tokens, whole(1, 1_000_000))
    named: dict[str, Any] = {
        "format": given.format and one_of("--format", given.format, formats[1:]),
        "limit": optional("--limit", given.limit, whole(1, REQUESTS_MAX)),
        "block_tokens": block_tokens,
        "engine_block_tokens": block_tokens,
        "tokenizer": given.tokenizer,
        "chat_template": given.chat_template,
        "arrivals": given.arrivals and existing("--arrivals", given.arrivals),
    }
    chosen = {name: value for name, value in named.items() if value is not None}
    return TraceOptions(seed=seed, arrivals_replace=given.arrivals_replace, **chosen)


def existing(flag: str, path: Path) -> Path:
    if not path.is_file():
        kind = "a directory" if path.is_dir() else "no regular file, and it is read twice" if path.exists() else ""
        raise RequestRefused(f"{flag}: {path} is {kind}" if kind else f"{flag}: there is no file {path}")
    return path


def read(flag: str, text: str, reader: Callable[[str], Value]) -> Value:
    """Return one value, read by `reader`, whose ValueError says what it expected. Raises RequestRefused."""
    try:
        return reader(text.strip())
    except ValueError as error:
        raise RequestRefused(f"{flag}: expected {error}, not {text!r}") from error


def optional(flag: str, text: str | None, reader: Callable[[str], Value]) -> Value | None:
    return None if text is None else read(flag, text, reader)


def one_of(flag: str, text: str, names: Sequence[Name]) -> Name:
    for name in names:
        if name == text:
            return name
    raise RequestRefused(f"{flag}: there is no {text!r}, there are {', '.join(names)}")


def several(flag: str, text: str, reader: Callable[[str], Value]) -> tuple[Value, ...]:
    """Return the values of a comma-separated list in its order, without repetition. Raises RequestRefused."""
    return tuple(dict.fromkeys(read(flag, part, reader) for part in text.split(",")))


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of whole numbers in these limits, which may have a unit: 200k, 1M."""

    def reader(text: str) -> int:
        value = size_of(text)
        if value is None or not least <= value <= most:
            raise ValueError(f"a whole number from {least} to {most} (200k and 1M are numbers)")
        return value

    return reader


def positive(most: float) -> Callable[[str], float]:
    def reader(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not isfinite(value) or not 0.0 < value <= most:
            raise ValueError(f"a number above 0, up to {most:g}")
        return value

    return reader


def size_of(text: str) -> int | None:
    """Return the number that a text stands for: 200k is 200,000. None if it is no number, or no whole one."""
    found = SIZE.fullmatch(text)
    if found is None:
        return None
    value = Fraction(found[1].replace("_", "")) * UNITS[found[2]]  # exact: as floats, 4.1M is no whole number
    return value.numerator if value.denominator == 1 else None
