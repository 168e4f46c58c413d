"""`python -m cluster sim` simulates whole clusters in virtual time from a seed, with faults and checkers.

    python -m cluster sim --scenario kill_half --seed 7            one run; one JSON line of measures
    python -m cluster sim --scenario swarm --nodes 8 --for 120     faults drawn from the seed
    python -m cluster sim --seeds 0:200 --jobs 2 --small           many runs; small ones of mixed sizes
    python -m cluster sim --until-fail --jobs 2 --budget-s 600     as many seeds as the time allows
    python -m cluster sim --replay failed.toml --seed 7 --shrink   a kept schedule again, and made smaller

All packets on the simulated network are real bytes, sealed; every node is the real core. Exit code 0: all invariants
held; 1: one did not, and the report names it, with the command that repeats the run; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import NamedTuple, TextIO

from cluster.scenario import Scenario, ScenarioError, scenario_names, settle, settled, write_scenario
from cluster.simulation.sim_node import sim_nodes
from cluster.simulation.sim_run import simulate
from cluster.simulation.swarm import WARM_S, shrink, swarm
from cluster.simulation.trace import Event
from cluster.simulation.world import Result, Violation, World

SMALL_NODES = (2, 3, 3, 3, 4, 4, 5, 5, 6, 8)
SMALL_LARGE_EVERY, SMALL_LARGE_NODES, SMALL_LARGE_FOR_S = 40, 20, 35.0
"""Every 40th small run has 20 nodes; smaller runs find more in the same time."""

SWARMS = ("swarm", "swarm-engines")
SMALL_FOR_S = 40.0
SHRINK_BUDGET_S = 300.0
PROGRESS_S = 10.0
"""Wall time between two lines about the progress of a single run."""


class RunRequest(NamedTuple):
    """What to run. Picklable, since it goes to other processes."""

    scenario: str  # a name, a path, or swarm
    seed: int
    nodes: int  # 0: as in the scenario
    for_s: float  # 0: as in the scenario
    small: bool


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster sim", description="clusters in virtual time")
    parser.add_argument(
        "--scenario", default="swarm", help=f"swarm, swarm-engines, a .toml file, or: {', '.join(scenario_names())}"
    )
    parser.add_argument("--replay", metavar="FILE", help="a kept schedule; the same as --scenario FILE.toml")
    parser.add_argument("--nodes", type=int, default=0, help="number of nodes (default: as in the scenario)")
    parser.add_argument("--for", dest="for_s", type=float, default=0.0, help="virtual seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=seeds, metavar="A:B", help="all seeds from A up to B")
    parser.add_argument("--small", action="store_true", help="sizes drawn from the seed, for many short runs")
    parser.add_argument("--until-fail", action="store_true", help="seed after seed until one fails or time is up")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--budget-s", type=float, default=600.0, help="of wall time, for --until-fail and --shrink")
    parser.add_argument("--check", action="store_true", help="run twice and compare the traces")
    parser.add_argument("--shrink", action="store_true", help="make a failing schedule smaller")
    parser.add_argument("--trace", metavar="FILE", help="write every event, one JSON list a line")
    parser.add_argument("--save", metavar="FILE", help="keep the (failing, shrunk) schedule as a scenario file")
    parser.add_argument("--quiet", action="store_true", help="print nothing of runs that held")
    return parser


def seeds(text: str) -> range:
    """Read A:B. Raises ValueError."""
    first, _, end = text.partition(":")
    return range(int(first), int(end))


def main(argv: list[str]) -> int:
    """Run the command and return the exit code, see the module."""
    options = arguments().parse_args(argv)
    try:
        if options.until_fail or options.seeds is not None:
            return many(options)
        return one(options)
    except (ScenarioError, OSError) as error:
        print(f"sim: {error}", file=sys.stderr)
        return 2


# --- what to run ------------------------------------------------------------------------------------------------------


def request_of(options: argparse.Namespace, seed: int) -> RunRequest:
    return RunRequest(options.replay or options.scenario, seed, options.nodes, options.for_s, options.small)


def scenario_of(request: RunRequest) -> Scenario:
    """Return the settled scenario of a request. Raises ScenarioError, OSError."""
    if request.scenario in SWARMS:
        nodes, for_s = request.nodes or 8, request.for_s or 120.0
        if request.small:
            large = request.seed % SMALL_LARGE_EVERY == SMALL_LARGE_EVERY - 1
            drawn = Random(f"{request.seed}/size").choice(SMALL_NODES)
            nodes = request.nodes or (SMALL_LARGE_NODES if large else drawn)
            for_s = request.for_s or (SMALL_LARGE_FOR_S if large else SMALL_FOR_S)
        if nodes < 1 or for_s <= WARM_S:
            raise ScenarioError(f"{request.scenario}: want at least one node, and more than {WARM_S:g} s")
        return settle(swarm(request.seed, nodes, for_s, engines_fail=request.scenario != "swarm"), request.seed)
    return settled(request.scenario, "sim", request.seed, request.nodes, None, request.for_s)


def command_of(request: RunRequest) -> str:
    parts = ["python -m cluster sim --scenario", request.scenario, "--seed", str(request.seed)]
    parts += ["--small"] if request.small else []
    parts += ["--nodes", str(request.nodes)] if request.nodes else []
    parts += ["--for", f"{request.for_s:g}"] if request.for_s else []
    return " ".join(parts)


def run(
    scenario: Scenario, seed: int, out: TextIO | None = None, sampled: Callable[[World], object] | None = None
) -> tuple[Result, float]:
    """Return the result and the wall seconds. Garbage collection is off during the run, which does not need it."""
    began = time.perf_counter()
    gc.disable()
    try:
        result = simulate(scenario, seed, sim_nodes(), out, sampled)
    finally:
        gc.enable()
    return result, time.perf_counter() - began


# --- one --------------------------------------------------------------------------------------------------------------


def one(options: argparse.Namespace) -> int:
    request = request_of(options, options.seed)
    scenario = scenario_of(request)
    with ExitStack() as stack:
        out = stack.enter_context(Path(options.trace).open("w")) if options.trace else None
        result, wall_s = run(scenario, request.seed, out, Progress())
    print(line(result, wall_s))
    if options.check:
        again, _ = run(scenario, request.seed)
        if again.digest != result.digest:
            print(f"NOT DETERMINISTIC: {result.digest} and then {again.digest}", file=sys.stderr)
            return 1
    if result.violation is None:
        return 0
    print(failure(result, command_of(request)), file=sys.stderr)
    kept = result.scenario
    if options.shrink:
        kept = smaller(result, result.violation, options.budget_s or SHRINK_BUDGET_S)
        print(f"shrunk from {len(result.scenario.steps)} steps to {len(kept.steps)}", file=sys.stderr)
        small, _ = run(kept, request.seed)
        path = options.save or f"failed-{kept.name}.toml"
        Path(path).write_text(write_scenario(kept))
        print(failure(small, f"python -m cluster sim --replay {path} --seed {request.seed}"), file=sys.stderr)
    elif options.save:
        Path(options.save).write_text(write_scenario(kept))
    return 1


class Progress:
    """Prints from time to time how far a long run is."""

    def __init__(self) -> None:
        self.began = self.shown_at = time.monotonic()

    def __call__(self, world: World) -> None:
        now = time.monotonic()
        if now - self.shown_at >= PROGRESS_S:
            self.shown_at = now
            heap, whole_s = world.time, world.scenario.for_s
            text = f"sim: {heap.now:.0f} of {whole_s:g} s, {heap.done:,} events, {now - self.began:.0f} s of wall time"
            print(text, file=sys.stderr, flush=True)


def smaller(result: Result, violation: Violation, budget_s: float) -> Scenario:
    until = time.monotonic() + budget_s

    def fails(scenario: Scenario) -> Violation | None:
        return run(scenario, result.seed)[0].violation

    found, _ = shrink(result.scenario, violation.invariant, fails, lambda: time.monotonic() > until)
    return found


# --- many -------------------------------------------------------------------------------------------------------------


def outcome(request: RunRequest) -> tuple[RunRequest, str, str]:
    """Run a request in another process. Returns (request, its line, the report of its failure or "")."""
    result, wall_s = run(scenario_of(request), request.seed)
    line_text = failure(result, command_of(request)) if result.violation is not None else ""
    return request, line(result, wall_s), line_text


def many(options: argparse.Namespace) -> int:
    """Run seeds in order, several at a time. With --until-fail it ends at the first failure, else it runs all."""
    began = time.monotonic()
    deadline = began + options.budget_s if options.until_fail else float("inf")
    chosen = range(options.seed, 2**62) if options.seeds is None else options.seeds
    requests = (request_of(options, seed) for seed in chosen)
    done, failed = 0, []
    for request, line_text, wrong in outcomes(requests, options.jobs, lambda: time.monotonic() > deadline):
        done += 1
        if wrong:
            failed.append(request)
            print(wrong, file=sys.stderr)
        if wrong or not options.quiet:
            print(line_text, flush=True)
        if wrong and options.until_fail:
            break
    wall_s = time.monotonic() - began
    print(f"{done} runs, {len(failed)} failed, {wall_s:.1f} s", file=sys.stderr)
    for request in failed:
        print(f"  {command_of(request)}", file=sys.stderr)
    return 1 if failed else 0


def outcomes(
    requests: Iterator[RunRequest], jobs: int, enough: Callable[[], bool]
) -> Iterator[tuple[RunRequest, str, str]]:
    """Yield the outcomes of all requests, at most `jobs` running at a time, until `enough` returns True."""
    if jobs <= 1:
        for request in requests:
            if enough():
                return
            yield outcome(request)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running: dict[Future[tuple[RunRequest, str, str]], RunRequest] = {}
        try:
            while True:
                while len(running) < 2 * jobs and not enough() and (following := next(requests, None)) is not None:
                    running[pool.submit(outcome, following)] = following
                if not running:
                    return
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in sorted(finished, key=lambda one: running[one].seed):
                    del running[future]
                    yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


ROOT = Path(__file__).resolve().parents[2]


def line(result: Result, wall_s: float) -> str:
    """Return one JSON object: what ran, whether all held, and the measures."""
    head = {
        "scenario": result.scenario.name,
        "seed": result.seed,
        "ok": result.violation is None,
        "trace": result.digest,
        "wall_s": round(wall_s, 2),
        "events": result.events,
        "events_per_wall_s": round(result.events / max(wall_s, 1e-9)),
        "virtual_per_wall": round(result.measures["virtual_s"] / max(wall_s, 1e-9), 2),
    }
    return json.dumps(head | result.measures)


def failure(result: Result, command: str) -> str:
    """Return the report of a run that failed, for a person."""
    violation = result.violation
    assert violation is not None
    where = ", ".join(str(node) for node in violation.nodes) or "all"
    lines = [
        f"FAILED seed {result.seed}, scenario {result.scenario.name}, commit {commit()}",
        f"  {violation.invariant} at {violation.at_s:.3f} s (nodes {where}): {violation.text}",
        "  --- options and schedule ---",
        *(f"  {text}" for text in write_scenario(result.scenario).splitlines()),
        f"  --- the last events of these nodes ({len(result.last)}) ---",
        *(f"  {shown(event)}" for event in result.last),
        f"  replay: {command}",
    ]
    return "\n".join(lines)


def shown(event: Event) -> str:
    who = "world" if event.node < 0 else f"node {event.node}"
    return f"{event.at_s:10.4f}  {who:<9} {event.what:<12} {' '.join(str(part) for part in event.detail)}"


def commit() -> str:
    """Return the commit of the checkout; «unknown» outside one."""
    try:
        argv = ("git", "rev-parse", "--short=12", "HEAD")
        return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
