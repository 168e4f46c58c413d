"""`python -m cluster up` runs engines, nodes that are peers behind DNS, and the same chats under two policies.

It starts the engines, then one set of nodes per policy, one set after the other; before each the engines' caches are
cleared. A live table shows both policies side by side. Afterwards the last policy's nodes stay up for clients until
Ctrl-C. With `--once` it ends instead, with code 0 if every request was answered.

Rules: no process is left behind, however it ends. If a child dies, the run ends with its last output and code 1.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any

import trio
from rich.console import Console
from rich.live import Live

from cluster.demo.demo_plan import Lab, Settings, node_commands, plan, write_key
from cluster.demo.demo_view import Column, client_help, live_table, plain_line, summary
from cluster.dns.addresses import NamesError
from cluster.dns.dns_server import Zone
from cluster.dns.dns_server import serve as serve_dns
from cluster.dns.resolvers import DnsResolver, RoundRobinResolver
from cluster.load import chats
from cluster.load.http_client import ExchangeFailed, fetch
from cluster.load.runner import Runner, Target
from cluster.load.workload import UNSTREAMED_SHARE, Conversation, user_starts, with_think, with_unstreamed
from cluster.processes.children import (
    Child,
    ChildDied,
    ChildNotReady,
    Command,
    end_on_signal,
    start,
    stop,
    wait_all_ready,
    watch,
)
from cluster.processes.commands import LOOPBACK, engine_command
from ranvier_py.core.errors import leaves

NAME = "router.lab"
"""The name of the nodes. The lab's own DNS server, on a port of its own, resolves it."""

FRAME_INTERVAL_S = 0.5
LINE_INTERVAL_S = 3.0
OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


class EngineRefused(Exception):
    """An engine refused a request to its admin path."""


@dataclass(slots=True)
class Stage:
    """The state of one `up`: its plan, its children, and what was measured."""

    settings: Settings
    lab: Lab
    logs: Path
    console: Console
    once: bool
    columns: list[Column] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)
    dns: tuple[str, int] = (LOOPBACK, 0)
    at: int = 0
    replayed: trio.Event = field(default_factory=trio.Event)

    def report(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @property
    def good(self) -> bool:
        """Whether the replay is over and every request of every policy got a good answer."""
        return self.replayed.is_set() and all(column.log.ok == column.planned for column in self.columns)


def conversations(settings: Settings) -> list[Conversation]:
    """Return the bundled chats with pauses, half of the turns unstreamed: the same for every policy."""
    talks = chats.bundled(settings.seed, turns=settings.turns)
    mixed = with_unstreamed(talks, UNSTREAMED_SHARE, Random(f"{settings.seed}/unstreamed"))
    return list(with_think(mixed, settings.think_s, Random(settings.seed)))


async def begin(stage: Stage, nursery: trio.Nursery, commands: Iterable[Command]) -> list[Child]:
    """Start children and wait until all are ready. A child that dies then or later ends the run."""
    begun: list[Child] = []
    for command in commands:
        child = start(command, stage.logs)
        stage.children.append(child)
        begun.append(child)
        nursery.start_soon(watch, child)
    await wait_all_ready(begun, stage.settings.ready_s)
    return begun


async def serve_names(stage: Stage, nursery: trio.Nursery) -> None:
    """Start the lab's DNS server for the last policy's nodes."""
    addresses = stage.lab.nodes[stage.settings.policies[-1]]
    stage.dns = await nursery.start(serve_dns, Zone({NAME: [address.ip for address in addresses]}), *stage.dns)


def resolver(stage: Stage, policy: str) -> trio.abc.HostnameResolver:
    if stage.lab.word:
        return RoundRobinResolver({NAME: stage.lab.nodes[policy]})
    return DnsResolver(stage.dns)


async def clear_caches(stage: Stage) -> None:
    """Empty the engines' caches, so that every policy begins cold. Raises EngineRefused, ExchangeFailed."""
    for engine in stage.lab.engines:
        status, body = await fetch(engine.ip, engine.port, "/admin/clear", method="POST")
        if not 200 <= status < 300:
            raise EngineRefused(
                f"{engine.name}: POST /admin/clear says {status}: {body[:200].decode(errors='replace')}"
            )


async def replay(stage: Stage, column: Column, talks: list[Conversation]) -> None:
    """Send all chats through the nodes of one policy."""
    settings = stage.settings
    addresses = stage.lab.nodes[column.policy]
    trio.socket.set_custom_hostname_resolver(resolver(stage, column.policy))
    target = Target(NAME, addresses[0].port, model=settings.model, max_tokens=settings.max_tokens)
    starts_s = user_starts(settings.users, settings.think_s * 5, Random(settings.seed))
    column.state, column.began_s = "running", trio.current_time()
    await Runner(target, column.log).run_closed(talks, starts_s)
    column.state, column.ended_s = "done", trio.current_time()


async def perform(stage: Stage, nursery: trio.Nursery) -> None:
    """Start the engines, replay under each policy in turn, then stay up for clients, or end with `--once`."""
    stage.report(
        f"starting {len(stage.lab.engines)} engines and {stage.settings.nodes} nodes; their logs: {stage.logs}"
    )
    await serve_names(stage, nursery)
    key_file = stage.logs / "cluster.key"
    write_key(key_file)
    await begin(stage, nursery, (engine_command(stage.settings, place) for place in stage.lab.engines))
    talks = conversations(stage.settings)
    planned = sum(len(talk.turns) for talk in talks)
    stage.columns = [Column(policy, planned) for policy in stage.settings.policies]
    async with trio.open_nursery() as screen:
        screen.start_soon(show, stage)
        for number, column in enumerate(stage.columns):
            stage.at, column.state = number, "starting"
            key = key_file if stage.settings.gossip else None
            commands = node_commands(stage.lab, column.policy, stage.settings.tokenizer, key)
            nodes = await begin(stage, nursery, commands)
            await clear_caches(stage)
            await replay(stage, column, talks)
            if number < len(stage.columns) - 1:
                await stop(nodes)
        screen.cancel_scope.cancel()
    stage.replayed.set()
    conclude(stage)
    if not stage.once:
        node = stage.lab.nodes[stage.settings.policies[-1]][0]
        stage.report("\n" + client_help(node, stage.settings.model, NAME, stage.dns))
        await trio.sleep_forever()


async def show(stage: Stage) -> None:
    """Show the live table, or without a terminal a line every few seconds, until cancelled."""
    if not stage.console.is_terminal:
        while True:
            await trio.sleep(LINE_INTERVAL_S)
            stage.report(plain_line(stage.columns[stage.at], trio.current_time()))
    with Live(console=stage.console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(table_of(stage), refresh=True)
            await trio.sleep(FRAME_INTERVAL_S)


def table_of(stage: Stage) -> Any:
    names = [engine.name for engine in stage.lab.engines]
    nodes = stage.lab.nodes[stage.columns[stage.at].policy]
    return live_table(stage.columns, names, nodes, trio.current_time())


def conclude(stage: Stage) -> None:
    """Print the last table, the failures, and the result in one sentence."""
    now_s = trio.current_time()
    outcomes = [(column.policy, column.outcome(now_s)) for column in stage.columns]
    stage.console.print(table_of(stage))
    for policy, outcome in outcomes:
        for group in outcome.failures:
            stage.report(f"{policy}: {group.count} failed: {group.reason}: {group.example}")
    stage.report("\n" + summary(outcomes))


async def run(stage: Stage) -> int:
    """Run everything until it is over or a signal comes. Returns the exit code; leaves no child."""
    code = OK
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_on_signal, nursery.cancel_scope, lambda name: stage.report(f"\n{name}: ending all"))
            await perform(stage, nursery)
            nursery.cancel_scope.cancel()
        code = INTERRUPTED if not stage.replayed.is_set() else OK if stage.good else FAILED
    except* (ChildDied, ChildNotReady, EngineRefused, ExchangeFailed, OSError) as group:
        for text in complaints(group):
            stage.report(f"up: {text}")
        code = FAILED
    finally:
        await stop(stage.children)
    return code


def complaints(group: BaseExceptionGroup[BaseException]) -> list[str]:
    """Return the errors to report. If a child died, other errors are its consequences and are left out."""
    errors = list(leaves(group))
    return [describe(error) for error in errors if isinstance(error, ChildDied)] or list(map(describe, errors))


def describe(error: BaseException) -> str:
    if isinstance(error, ExchangeFailed):
        return f"{error.failure.reason} ({error.failure.detail})"
    return str(error)


def make_parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m cluster up", description="Engines, router nodes, and the same chats under two policies."
    )
    add = parser.add_argument
    add("--once", action="store_true", help="end after the replay; exit code 0 when every request was answered")
    add("--logs", type=Path, metavar="DIR", help="keep the children's logs there; default: a folder that is removed")
    add("--policies", default=",".join(defaults.policies), metavar="A,B", help="the last stays up (%(default)s)")
    texts = {
        "nodes": "router nodes",
        "engines": "fake engines",
        "users": "people who chat at the same time",
        "turns": "of each conversation",
        "seed": "of chats and pauses",
        "think_s": "mean pause between turns, seconds",
        "max_tokens": "of each answer",
        "gossip": "let the nodes of a policy share what they learn (default)",
        "model": "name of the model",
        "tokenizer": "of nodes and engines; default: the embedded one",
        "cache_tokens": "size of each engine's cache",
        "prefill_tokens_per_s": "speed of each engine's prefill",
        "decode_ms": "one decode step, milliseconds",
        "ready_s": "longest wait for a child to become ready, seconds",
    }
    for name, text in texts.items():
        default = getattr(defaults, name)
        word = f"{text} (%(default)s)" if default != "" else text
        if isinstance(default, bool):
            add(f"--{name.replace('_', '-')}", action=argparse.BooleanOptionalAction, default=default, help=text)
            continue
        add(f"--{name.replace('_', '-')}", type=type(default), default=default, metavar="X", help=word)
    return parser


def make_settings(options: argparse.Namespace) -> Settings:
    """Raises ValueError."""
    chosen = {one.name: getattr(options, one.name) for one in fields(Settings) if one.name != "policies"}
    return Settings(policies=tuple(dict.fromkeys(options.policies.split(","))), **chosen)


def main(argv: Sequence[str] | None = None) -> int:
    """0: every request was answered. 1: some were not, or a child died. 2: wrong command. 130: interrupted before."""
    options = make_parser().parse_args(argv)
    console = Console()
    try:
        settings = make_settings(options)
        lab = plan(settings, Random())
    except (NamesError, ValueError) as error:
        sys.stderr.write(f"up: {error}\n")
        return MISUSED
    logs = Path(tempfile.mkdtemp(prefix="ranvier-up-")) if options.logs is None else options.logs
    logs.mkdir(parents=True, exist_ok=True)
    if lab.word:
        console.print(lab.word)
    code = trio.run(run, Stage(settings, lab, logs, console, options.once))
    if options.logs is None and code != FAILED:
        shutil.rmtree(logs)
    return code
