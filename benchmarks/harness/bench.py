"""What every benchmark shares: its command line, where it ran and of which commit, sums of figures, result files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def command_line(doc: str | None, *, seed: str = "", jobs: bool = False, quick: str = "") -> argparse.ArgumentParser:
    """A parser with the benchmark's docstring and `--dry`, and with those of `--seed`, `--jobs` and `--quick` that mean
    something to it: `seed` and `quick` say what."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    """Write what was asked for and the result to benchmarks/results/NAME.json; print it where it is not the whole of
    it, is quick or dry. Of a path the name is written. `rows`: see `to_json`. Returns the exit code."""
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
    """Write a part of a result anew, with its own commit, beside the others, which keep theirs; or print it. Returns
    the exit code."""
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
    """What comes of each case, in order, each in a process of its own that has done nothing else."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        yield from pool.map(measure, cases)


def to_json(result: Mapping[str, Any], rows: Sequence[Any] | None = None) -> str:
    """The result behind its commit and machine; the `rows` of it, where there are any, one to a line."""
    return text_of({"commit": commit(), "machine": machine(), **result}, rows)


def text_of(result: Mapping[str, Any], rows: Sequence[Any] | None = None) -> str:
    """As JSON, each of the `rows` behind it on a line of its own."""
    text = json.dumps(result, indent=2, ensure_ascii=False)
    if rows is not None:
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        text = f'{text[:-2]},\n  "rows": [\n{lines}\n  ]\n}}'
    return f"{text}\n"


def show(text: str) -> None:
    """A line for the person who waits."""
    print(text, file=sys.stderr, flush=True)


def show_row(row: Mapping[str, Any]) -> None:
    """The names and figures of a row on one line: numbers to four digits, and those of a mapping by their names."""
    show("  ".join(cell for name, value in row.items() for cell in cells_of(name, value)))


def cells_of(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{name} {' '.join(cell for key, each in value.items() for cell in cells_of(key, each))}"]
    return [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"]


# --- where it ran -----------------------------------------------------------------------------------------------------


def data_folder() -> Path:
    """Where traces and tokenizers lie: SHARED_DATA, or `shared/data` beside the repository."""
    given = os.environ.get("SHARED_DATA")
    return Path(given) if given else ROOT.parent / "shared" / "data"


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, and the interpreter with what compiled it."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "compiler": platform.python_compiler(),
    }


def processor() -> str:
    """The model name that the kernel gives."""
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


# --- figures ----------------------------------------------------------------------------------------------------------


def percentiles(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, 99th percentile, least and greatest of at least one value, in the unit of the values."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], digits)

    return {"p50": at(0.5), "p99": at(0.99), "min": at(0.0), "max": at(1.0), "count": len(ordered)}


def spread(values: Sequence[int]) -> dict[str, float]:
    """How unequal the engines' shares are: 1 and 0 when they are equal."""
    mean = fmean(values) or 1.0
    return {"max_over_mean": max(values) / mean, "coefficient_of_variation": pstdev(values) / mean}
