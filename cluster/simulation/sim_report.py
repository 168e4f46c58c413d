"""What a simulated run says: one JSON line of measures, and of a failure everything that is needed to see it again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from cluster.scenario import Scenario, write_scenario
from cluster.simulation.trace import Event
from cluster.simulation.world import Result

ROOT = Path(__file__).resolve().parents[2]


def line(result: Result, wall_s: float) -> str:
    """One JSON object: what ran, whether it held, what it measured."""
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
    """Everything about a run that failed, for a person."""
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


def save(scenario: Scenario, path: Path) -> None:
    """Keep a schedule as a scenario file. Raises OSError."""
    path.write_text(write_scenario(scenario))


def commit() -> str:
    """Of the checkout; «unknown» outside one."""
    try:
        argv = ("git", "rev-parse", "--short=12", "HEAD")
        return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
