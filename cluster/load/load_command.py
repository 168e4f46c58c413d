"""The load generator: multi-turn chats against any OpenAI-compatible address, with a report by the engines' counts.

    python -m cluster load --target http://127.0.0.2:8080 --users 50 --turns 10
    python -m cluster load --target http://router.lab:80 --resolve router.lab=127.0.0.2,127.0.0.3 --rate 3 --duration 60
    python -m cluster load --target http://router.lab:8080 --trace chats.jsonl.gz --json out.json

Closed loop: `--users` people, each with one conversation at a time and `--think` seconds between turns. Open loop:
conversations begin by a Poisson process (`--rate`), or at the trace's times (`--arrivals`). Each conversation has its
own client, so DNS round-robin spreads conversations over nodes. The real answer of each turn becomes part of the next
request.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import trio
from rich.console import Console

from cluster.dns.addresses import Address, NamesError, parse_resolve
from cluster.dns.resolvers import RoundRobinResolver
from cluster.load import chats
from cluster.load.chat_trace import read_trace
from cluster.load.http_client import ExchangeFailed
from cluster.load.load_report import LoadLog, Report
from cluster.load.load_view import show_progress, show_report
from cluster.load.runner import Runner, Target, first_model
from cluster.load.workload import (
    UNSTREAMED_SHARE,
    Conversation,
    cut,
    user_starts,
    with_branches,
    with_poisson_arrivals,
    with_think,
    with_trace_arrivals,
    with_unstreamed,
)
from cluster.processes.children import end_on_signal
from ranvier_py.replay.traces.trace import TraceError

USERS_DEFAULT = 10
TURNS_DEFAULT = 6
OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


class LoadError(ValueError):
    """The command cannot be carried out as given. Nothing was sent."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that is ready to start. `starts_s` None: open loop; `planned`: the number of turns, if it is known."""

    conversations: Iterable[Conversation]
    starts_s: list[float] | None
    duration_s: float
    planned: int | None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cluster load", description="Multi-turn chats against any OpenAI-compatible address."
    )
    add = parser.add_argument
    add("--target", required=True, metavar="URL", help="http://HOST:PORT, with or without /v1")
    add("--resolve", action="append", default=[], metavar="NAME=IP,IP", help="answer this name by turns (repeatable)")
    add("--model", help="default: the first that GET /v1/models names")
    add("--api-key", default="", help="sent as a bearer token")
    add("--max-tokens", type=int, default=64, metavar="N", help="of each answer (default 64)")
    add("--extra", type=json.loads, default={}, metavar="JSON", help="object that joins every request's body")
    add("--stream", action=argparse.BooleanOptionalAction, help="ask for streams only, or for none (half and half)")
    add("--timeout", type=float, default=120.0, metavar="S", help="for one whole answer (default 120)")
    shape = parser.add_argument_group("what is said")
    add = shape.add_argument
    add(
        "--trace",
        metavar="FILE",
        help="JSONL, a chat per line, or the word `bundled`; default: the lab's own chats, without end",
    )
    add(
        "--answers", choices=("real", "trace"), default="real", help="which answers stand in the history (default real)"
    )
    add("--turns", type=int, metavar="N", help=f"of each conversation; default: all of a trace, else {TURNS_DEFAULT}")
    add("--conversations", type=int, metavar="N", help="how many; default: a trace's, or one per user")
    add("--system-prompts", type=int, default=6, metavar="K", help="shared by the lab's own chats (default 6)")
    add("--branch", type=float, default=0.0, metavar="P", help="share that goes on from another one's history (0 … 1)")
    add("--seed", type=int, default=1, metavar="N", help="of all draws (default 1)")
    when = parser.add_argument_group("when")
    add = when.add_argument
    add("--users", type=int, metavar="N", help=f"closed loop (default, {USERS_DEFAULT})")
    add("--rate", type=float, metavar="R", help="open loop: conversations per second, Poisson")
    add("--arrivals", action="store_true", help="open loop: when the trace's timestamps say so")
    add("--speed", type=float, default=1.0, metavar="X", help="with --arrivals: that much faster (default 1)")
    add("--think", type=float, default=0.0, metavar="S", help="mean pause before each turn but the first (default 0)")
    add("--duration", type=float, metavar="S", help="begin nothing new after this time")
    out = parser.add_argument_group("outcome")
    out.add_argument("--json", metavar="FILE", help="write the report there")
    out.add_argument("--allow-failures", action="store_true", help="exit with 0 even when requests failed")
    return parser


def check(options: argparse.Namespace) -> None:
    """Check the options. Raises LoadError with all problems."""
    service_rates = [options.users is not None, options.rate is not None, options.arrivals]
    wrong = [
        (sum(service_rates) > 1, "give only one of --users, --rate, --arrivals"),
        (options.arrivals and not options.trace, "--arrivals needs a --trace"),
        (options.users is not None and options.users < 1, "--users must be at least 1"),
        (options.rate is not None and not options.rate > 0, "--rate must be above 0"),
        (options.turns is not None and options.turns < 1, "--turns must be at least 1"),
        (options.conversations is not None and options.conversations < 1, "--conversations must be at least 1"),
        (options.system_prompts < 1, "--system-prompts must be at least 1"),
        (not 0 <= options.branch <= 1, "--branch must be between 0 and 1"),
        (not options.speed > 0, "--speed must be above 0"),
        (options.think < 0, "--think must not be negative"),
        (options.max_tokens < 1, "--max-tokens must be at least 1"),
        (not options.timeout > 0, "--timeout must be above 0"),
        (options.duration is not None and not options.duration > 0, "--duration must be above 0"),
        (not isinstance(options.extra, dict), "--extra must be a JSON object"),
        (
            options.rate is not None and not (options.duration or options.conversations or options.trace),
            "--rate needs an end: --duration, --conversations or a --trace",
        ),
    ]
    problems = [text for bad, text in wrong if bad]
    if problems:
        raise LoadError("; ".join(problems))


def make_target(options: argparse.Namespace) -> Target:
    """Make the target from the options. Raises LoadError."""
    try:
        parts = urlsplit(options.target)
        port = parts.port or 80
    except ValueError as error:
        raise LoadError(f"--target {options.target}: {error}") from error
    if parts.scheme != "http" or not parts.hostname:
        raise LoadError(f"--target {options.target}: want http://HOST:PORT (the lab has no TLS)")
    return Target(
        host=parts.hostname,
        port=port,
        path=parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions",
        model=options.model or "",
        max_tokens=options.max_tokens,
        stream=options.stream is not False,
        timeout_s=options.timeout,
        api_key=options.api_key,
        extra=options.extra,
    )


def make_plan(options: argparse.Namespace) -> Plan:
    """Decide everything that is sent, and when, from one seed. Raises LoadError, TraceError."""
    rng = Random(options.seed)
    users = options.users or USERS_DEFAULT
    supply: Iterator[Conversation]
    count = options.conversations
    if options.trace:
        supply = iter(trace_of(options))
    else:
        supply = chats.conversations(rng, system_prompts=options.system_prompts, turns=options.turns or TURNS_DEFAULT)
        count = count or (users if options.rate is None and options.duration is None else None)
    supply = cut(supply, options.turns) if options.turns else supply
    supply = islice(supply, count) if count else supply
    supply = with_branches(supply, options.branch, rng) if options.branch else supply
    supply = with_think(supply, options.think, rng)
    if options.stream is None:
        supply = with_unstreamed(supply, UNSTREAMED_SHARE, Random(f"{options.seed}/unstreamed"))
    starts_s = None
    if options.rate is not None:
        supply = with_poisson_arrivals(supply, options.rate, rng)
    elif options.arrivals:
        supply = iter(timed(list(supply), options))
    else:
        starts_s = user_starts(users, options.think, rng)
    planned = None
    if (options.trace or count) and options.duration is None:
        known = list(supply)
        supply, planned = iter(known), sum(len(one.turns) for one in known)
    return Plan(supply, starts_s, options.duration or math.inf, planned)


def trace_of(options: argparse.Namespace) -> list[Conversation]:
    """Read the conversations of `--trace`. Raises TraceError."""
    if options.trace == "bundled":
        return chats.bundled(turns=options.turns or chats.BUNDLED_TURNS)
    return read_trace(Path(options.trace), keep_recorded=options.answers == "trace")


def timed(conversations: list[Conversation], options: argparse.Namespace) -> list[Conversation]:
    """Let conversations begin at the trace's times. Raises LoadError if one of them has none."""
    missing = [one.name for one in conversations if one.start_s is None]
    if missing:
        raise LoadError(
            f"--arrivals: {len(missing)} conversations of {options.trace} have no timestamp, first {missing[0]}"
        )
    return with_trace_arrivals(conversations, options.speed)


async def run(
    plan: Plan, target: Target, log: LoadLog, names: dict[str, tuple[Address, ...]], console: Console
) -> tuple[Report, bool]:
    """Run the load and show its progress on the console. The second value is whether a signal ended the run."""
    trio.socket.set_custom_hostname_resolver(RoundRobinResolver(names))
    if not target.model:
        target = replace(target, model=await first_model(target))
    signals: list[str] = []
    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end_on_signal, nursery.cancel_scope, signals.append)
        nursery.start_soon(show_progress, console, log, plan.planned, plan.duration_s)
        await carry_out(plan, target, log)
        nursery.cancel_scope.cancel()
    return Report(log, trio.current_time() - began_s), bool(signals)


async def carry_out(plan: Plan, target: Target, log: LoadLog) -> None:
    """Send the planned traffic."""
    runner = Runner(target, log)
    if plan.starts_s is None:
        await runner.run_open(plan.conversations, plan.duration_s)
    else:
        await runner.run_closed(plan.conversations, plan.starts_s, plan.duration_s)


def make_place(path: Path) -> None:
    """Check, before anything is sent, that the report's file can be written. Raises LoadError."""
    try:
        path.touch()
    except OSError as error:
        raise LoadError(f"--json {path}: {error.strerror}") from error


def write_json(path: Path, options: argparse.Namespace, outcome: Report) -> None:
    settings: dict[str, Any] = {key: value for key, value in vars(options).items() if key != "api_key"}
    path.write_text(json.dumps({"settings": settings, **outcome.as_json()}, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """0: all well. 1: a request failed or was skipped, or none was answered. 2: wrong command. 130: interrupted."""
    options = make_parser().parse_args(argv)
    console = Console()
    log = LoadLog()
    try:
        check(options)
        if options.json:
            make_place(Path(options.json))
        target, plan = make_target(options), make_plan(options)
        names = dict(parse_resolve(text) for text in options.resolve)
    except (LoadError, TraceError, NamesError) as error:
        sys.stderr.write(f"load: {error}\n")
        return MISUSED
    try:
        outcome, interrupted = trio.run(run, plan, target, log, names, console)
    except ExchangeFailed as error:
        sys.stderr.write(f"load: {error.failure.reason}: {error.failure.detail}\n")
        return FAILED
    show_report(console, outcome)
    if options.json:
        write_json(Path(options.json), options, outcome)
    if interrupted:
        return INTERRUPTED
    bad = outcome.log.failed or outcome.log.skipped_conversations or not outcome.log.ok
    return FAILED if bad and not options.allow_failures else OK
