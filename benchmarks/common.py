"""What all benchmarks share: where it ran, of which commit, how numbers are summed up, where results go."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory and versions."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def processor() -> str:
    """The model name as the kernel tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def commit() -> str:
    """The commit this ran from; «+changes» when tracked source differs from it; «unknown» outside a checkout."""
    try:
        head = run_git("rev-parse", "--short=12", "HEAD")
        changed = run_git(
            "status", "--porcelain", "--untracked-files=no", "--", "ranvier_py", "cluster", "benchmarks/*.py"
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def run_git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def percentiles(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, 99th percentile, least and greatest of at least one value, in the unit of the values."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], digits)

    return {"p50": at(0.5), "p99": at(0.99), "min": at(0.0), "max": at(1.0), "count": len(ordered)}


def write_result(name: str, result: Mapping[str, Any]) -> Path:
    """Write benchmarks/results/NAME.json: the result, with machine and commit if it does not bring them."""
    path = RESULTS / f"{name}.json"
    RESULTS.mkdir(exist_ok=True)
    path.write_text(to_json(result))
    return path


def to_json(result: Mapping[str, Any]) -> str:
    whole = {"commit": commit(), "machine": machine(), **result}
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
