"""What all benchmarks share: command line, result files, commit and machine of a run, and statistics."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def command_line(doc: str | None, *, seed: str = "", jobs: bool = False, quick: str = "") -> argparse.ArgumentParser:
    """Make a parser with the benchmark's docstring as help, and with `--dry`; with `--jobs` if wanted; with `--seed`
    and `--quick` if these texts, which say what the options mean, are given."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    commit()  # kept: of the code that runs, whatever is changed meanwhile
    parser.add_argument("--dry", action="store_true", help="print the result, and write no file")
    if seed:
        parser.add_argument("--seed", type=int, default=1, help=f"of {seed} (1)")
    if jobs:
        parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    if quick:
        parser.add_argument("--quick", action="store_true", help=f"{quick}; no file is written")
    return parser


def finish(
    name: str,
    arguments: argparse.Namespace,
    result: Mapping[str, Any],
    *,
    whole: bool = True,
    rows: Sequence[Any] | None = None,
) -> int:
    """Write the arguments and the result to benchmarks/results/NAME.json; print them instead if the result is not
    `whole`, or the run is quick or dry. Of a path only the name is written. `rows`: see `to_json`. Returns 0."""
    asked = {key: value.name if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    dry, quick = asked.pop("dry"), asked.pop("quick", False)
    text = to_json({**asked, **result}, rows)
    if dry or quick or not whole:
        print(text, end="")
        return 0
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text)
    show(f"wrote {RESULTS / name}.json")
    return 0


def replace_part(name: str, part: str, found: Mapping[str, Any], *, dry: bool) -> int:
    """Replace one part of a result file, with its own commit, and keep the other parts; if `dry`, print the part.
    Returns the exit code."""
    found = {"commit": commit(), **found}
    if dry:
        print(json.dumps(found, indent=2))
        return 0
    file = RESULTS / f"{name}.json"
    result = {**json.loads(file.read_text()), part: found}
    file.write_text(text_of(result, result.pop("rows", None)))
    show(f"wrote {part} of {file}")
    return 0


def each_apart(measure: Callable[[Any], Any], cases: Sequence[Any], jobs: int = 1) -> Iterator[Any]:
    """Yield the result of each case, in order. Each is measured in a process of its own that has done nothing else."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        yield from pool.map(measure, cases)


def to_json(result: Mapping[str, Any], rows: Sequence[Any] | None = None) -> str:
    """Return a result as JSON, after its commit and machine; `rows`, if any, come last, one on each line."""
    return text_of({"commit": commit(), "machine": machine(), **result}, rows)


def text_of(result: Mapping[str, Any], rows: Sequence[Any] | None = None) -> str:
    """Return a result as JSON, and after it each of the `rows` on its own line."""
    text = json.dumps(result, indent=2, ensure_ascii=False)
    if rows is not None:
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        text = f'{text[:-2]},\n  "rows": [\n{lines}\n  ]\n}}'
    return f"{text}\n"


def how_answered(row: Mapping[str, Any]) -> str:
    """Return what the name of a case ends with if its answers come as a whole. Old rows do not say so: of streams."""
    return "" if row.get("streamed", True) else ", whole answers"


def show(text: str) -> None:
    """Print a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def show_row(row: Mapping[str, Any]) -> None:
    """Show the names and figures of a row on one line: floats to four digits, mappings with the names inside."""
    show("  ".join(cell for name, value in row.items() for cell in cells_of(name, value)))


def cells_of(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{name} {' '.join(cell for key, each in value.items() for cell in cells_of(key, each))}"]
    return [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"]


# --- where it ran -----------------------------------------------------------------------------------------------------


def data_folder() -> Path:
    """Return the folder of traces and tokenizers: SHARED_DATA, or `shared/data` beside the repository."""
    given = os.environ.get("SHARED_DATA")
    return Path(given) if given else ROOT.parent / "shared" / "data"


def machine() -> dict[str, Any]:
    """Return the processor, the cores that this process may use, the memory, the interpreter and its compiler."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "compiler": platform.python_compiler(),
    }


def processor() -> str:
    """Return the processor's model name as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


@cache
def commit() -> str:
    """Return the present commit, with «+changes» if tracked source differs from it; «unknown» outside a checkout."""
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


# --- figures ----------------------------------------------------------------------------------------------------------


def percentiles(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Return the median, 99th percentile, least, greatest and count of at least one value, in the values' unit."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], digits)

    return {"p50": at(0.5), "p99": at(0.99), "min": at(0.0), "max": at(1.0), "count": len(ordered)}


def spread(values: Sequence[int]) -> dict[str, float]:
    """Return how unequal the engines' shares are: if all are equal, 1 for the first figure and 0 for the second."""
    mean = fmean(values) or 1.0
    return {"max_over_mean": max(values) / mean, "coefficient_of_variation": pstdev(values) / mean}
