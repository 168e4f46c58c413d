"""`python -m cluster chaos` runs scenarios on real processes, judges every bound and logs every request.

    python -m cluster chaos --scenario rolling_restart --seed 1
    python -m cluster chaos --scenario my.toml --nodes 3 --engines 4 --for 60 --json out.json

It first prints the seed, the mode of the links and the reason for it, so that a run can be repeated. Timing on real
machines is not exact: the seed repeats the victims, chats and draws, not the interleaving.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.table import Table

from cluster.dns.addresses import NamesError
from cluster.processes.chaos_run import Options, Outcome, run_scenario
from cluster.processes.children import GUARD, ROOT, ChildNotReady, end_on_signal
from cluster.processes.link_control import LINK_MODES, PRIVATE_FLAG, CannotDo, LinkMode, choose, enter_private
from cluster.scenario import Scenario, ScenarioError, scenario_names, settled, without_faults
from ranvier_py.core.errors import leaves

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
DIARY_LINES_MAX = 60
HITS_FLAG = "--hits-without-faults"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster chaos", description="Scenarios on real processes.")
    add = parser.add_argument
    known = f"repeatable; of the lab: {', '.join(scenario_names())}"
    add("--scenario", action="append", metavar="NAME|FILE", help=known)
    add("--nodes", type=int, metavar="N", help="other than the scenario says")
    add("--engines", type=int, metavar="N", help="other than the scenario says")
    add("--for", type=float, dest="for_s", metavar="S", help="how long, other than the scenario says")
    add("--seed", type=int, default=1, metavar="N", help="of victims, chats and draws (%(default)s)")
    add(
        "--links",
        choices=LINK_MODES,
        default="auto",
        help="how links are cut (%(default)s: namespaces, else the relay)",
    )
    add("--no-gossip", action="store_true", help="nodes that do not know each other, for comparison")
    add(
        "--no-faults",
        action="store_true",
        help="the same load on engines and nodes to which nothing happens, for comparison",
    )
    add(
        "--first-tree",
        type=Path,
        default=ROOT,
        metavar="DIR",
        help="a checkout that nodes run until they are restarted",
    )
    add("--logs", type=Path, metavar="DIR", help="keep logs and files there (a folder, removed when all is well)")
    add("--json", type=Path, metavar="FILE", help="write the outcomes there")
    add(HITS_FLAG, type=float, help=argparse.SUPPRESS)
    add(PRIVATE_FLAG, action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0: every bound holds. 1: one does not, or a process crashed. 2: it cannot be done. 130: ended by a signal."""
    arguments = list(sys.argv[2:] if argv is None else argv)
    options = make_parser().parse_args(arguments)
    try:
        sizes = (options.nodes, options.engines, options.for_s)
        scenarios = [settled(name, "processes", options.seed, *sizes) for name in options.scenario or ["chaos"]]
        scenarios = [without_faults(one) if options.no_faults else one for one in scenarios]
        modes = [choose(options.links, one) for one in scenarios]
    except (ScenarioError, CannotDo, OSError) as error:
        sys.stderr.write(f"chaos: {error}\n")
        return MISUSED
    if len(scenarios) > 1:
        return each_by_itself(options, arguments)
    if scenarios[0].expect.hit_points_lost_max is not None and options.hits_without_faults is None:
        code, outcome = child_run(without(arguments, "--logs"), "--no-faults")
        if code != OK or outcome is None:
            return code
        options.hits_without_faults = outcome["hit_rate"]["whole"]
        arguments += [HITS_FLAG, str(options.hits_without_faults)]
    if modes[0].name == "namespaces" and not options.inside:
        sys.stdout.flush()
        enter_private(["chaos", *arguments])
    return one(scenarios[0], modes[0], options)


def each_by_itself(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run several scenarios, each in its own process (it may need its own networks). Returns the worst exit code."""
    runs = [child_run(without(arguments, "--scenario"), "--scenario", name) for name in options.scenario]
    if options.json:
        outcomes = [outcome for _, outcome in runs if outcome is not None]
        options.json.write_text(json.dumps(outcomes, indent=2) + "\n")
    return max(code for code, _ in runs)


def child_run(arguments: Sequence[str], *more: str) -> tuple[int, dict[str, Any] | None]:
    """Run a command line with other outcomes and more words. Returns its exit code and its outcome, if it has one."""
    with tempfile.TemporaryDirectory(prefix="ranvier-chaos-") as folder:
        result = Path(folder) / "outcome.json"
        guard = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid())]
        words = [*without(arguments, "--json"), *more, "--json", str(result)]
        code = subprocess.run([*guard, sys.executable, "-m", "cluster", "chaos", *words], check=False).returncode
        return code, json.loads(result.read_text()) if result.exists() else None


def without(arguments: Sequence[str], *flags: str) -> list[str]:
    """Return the command line without these flags and their values."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in flags:
            next(words, None)
        elif not word.startswith(tuple(f"{flag}=" for flag in flags)):
            kept.append(word)
    return kept


def one(scenario: Scenario, mode: LinkMode, options: argparse.Namespace) -> int:
    """Run one scenario in this process. Returns the exit code."""
    console = Console()
    report = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    own = "" if options.logs else tempfile.mkdtemp(prefix="ranvier-chaos-")
    folder = options.logs or Path(own)
    folder.mkdir(parents=True, exist_ok=True)
    report(f"{scenario.name}: {scenario.about}")
    report(f"seed {options.seed}; links: {mode.name} ({mode.why}); files: {folder}")
    settings = Options(options.seed, not options.no_gossip, options.hits_without_faults, first_tree=options.first_tree)
    outcome, code = None, INTERRUPTED
    try:
        outcome = trio.run(supervised, scenario, mode, settings, folder, report)
    except* (ChildNotReady, CannotDo, NamesError, OSError) as group:
        for error in leaves(group):
            sys.stderr.write(f"chaos: {error}\n")
        code = FAILED
    if outcome is None:
        return code
    show(console, outcome)
    if options.json:
        options.json.write_text(json.dumps(outcome.as_json(), indent=2) + "\n")
    if outcome.good and own:
        shutil.rmtree(own, ignore_errors=True)
    elif not outcome.good:
        report(f"logs: {folder}; again: {again(scenario, options)}")
    return OK if outcome.good else FAILED


async def supervised(scenario: Scenario, mode: LinkMode, options: Options, folder: Path, report: Any) -> Outcome | None:
    """Run a scenario. None: a signal ended the run."""
    outcome: Outcome | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end_on_signal, nursery.cancel_scope, lambda name: report(f"{name}: ending the run"))
        outcome = await run_scenario(scenario, mode, options, folder, report)
        nursery.cancel_scope.cancel()
    return outcome


def again(scenario: Scenario, options: argparse.Namespace) -> str:
    """Return the command that repeats this run."""
    words = ["python -m cluster chaos --scenario", scenario.name, "--seed", str(options.seed)]
    for flag, value in (("--nodes", options.nodes), ("--engines", options.engines), ("--for", options.for_s)):
        words += [flag, f"{value:g}"] if value else []
    words += ["--links", options.links] if options.links != "auto" else []
    words += ["--no-gossip"] if options.no_gossip else []
    words += ["--no-faults"] if options.no_faults else []
    words += [f"--first-tree {options.first_tree}"] if options.first_tree != ROOT else []
    return " ".join(words)


def show(console: Console, outcome: Outcome) -> None:
    """Print the diary, the counts of requests, the failures and the verdicts."""
    for event in outcome.log.diary[:DIARY_LINES_MAX]:
        console.print(f"  {event.at_s:7.2f} s  {event.text}", highlight=False, markup=False)
    table = Table(title=f"{outcome.scenario.name}, seed {outcome.options.seed}", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    for name, count in outcome.log.counts().items():
        table.add_row(f"requests {name.replace('_', ' ')}", str(count))
    for reason, count in outcome.log.reasons().items():
        table.add_row(f"  retried: {reason}", str(count))
    for name, value in outcome.hits.items():
        table.add_row(f"hit rate {name.replace('_', ' ')}", "-" if value is None else f"{value:.3f}")
    console.print(table)
    for failure in outcome.log.failures()[:10]:
        console.print(f"failed: {failure}", highlight=False, markup=False, soft_wrap=True)
    for line in (*outcome.log.crashes, *map(str, outcome.verdicts)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for about, note in outcome.notes.items():
        if note and outcome.options.gossip:
            console.print(f"{about}, at the end: {note}", highlight=False, markup=False)
    if outcome.timed_out:
        console.print("the run did not end in time", highlight=False)
    console.print("good" if outcome.good else "NOT GOOD", highlight=False)
