"""`ranvier replay` reads the traces, does the runs, writes the files and prints a table.

Only the table goes to stdout. Progress goes to stderr: as a bar on a terminal, otherwise as one line for each finished
run. Besides the loaders of traces, this module alone touches files and reads a clock.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TextIO

import orjson

from ranvier_py import __version__
from ranvier_py.replay.engine.engine_values import CacheName
from ranvier_py.replay.html_report import page
from ranvier_py.replay.jobs import Done, Ready, RunFailed, Task, execute_all, make_ready, plain
from ranvier_py.replay.replay_request import SPAN_S_MAX, ReplayRequest, RequestRefused, read_request
from ranvier_py.replay.result_table import table
from ranvier_py.replay.results import ReplayResults, curves
from ranvier_py.replay.traces.open_trace import open_trace
from ranvier_py.replay.traces.trace import TraceError

EXIT_OK, EXIT_FAILED, EXIT_USAGE = range(3)
EXIT_INTERRUPTED = 130  # as in shells: nothing was written, so the code must not be that of success
RESULTS, PAGE = "results.json", "report.html"

BAR_CELLS = 30
DRAW_EVERY_S = 0.1


def replay(given: argparse.Namespace) -> int:
    """Run the command with its parsed flags. Returns the exit code."""
    try:
        wanted = read_request(given, cores())
        make_folders(wanted)
        ready = named_apart([read_trace(path, wanted) for path in wanted.traces], wanted.traces)
        cached = [(for_cache(each, cache, wanted), cache) for each in ready for cache in wanted.caches]
        done = run(cached, wanted)
        summaries = [each.summary for each, _ in cached]
        results = ReplayResults(settings(wanted), summaries, [each.result for each in done])
        is_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_terminal else None
        try:
            write(results, done, wanted)  # before the table: the reader of stdout may close it early
        finally:
            print(table(results, bold=is_terminal, width=width), flush=True)  # even if the disk is full
    except BrokenPipeError:  # `ranvier replay … | head`: handled by the command line
        raise
    except KeyboardInterrupt:
        print("ranvier: interrupted, nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (RequestRefused, TraceError) as error:
        print(f"ranvier: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (RunFailed, OSError) as error:
        print(f"ranvier: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_folders(wanted: ReplayRequest) -> None:
    """Before any run, make the output folders and check that files can be written there. Raises RequestRefused."""
    if wanted.out is not None and wanted.out.exists() and not wanted.out.is_dir():
        raise RequestRefused(f"--out: {wanted.out} is a file, expected a directory")
    files = [wanted.out / RESULTS, wanted.out / PAGE] if wanted.out else []
    files += [wanted.per_request] if wanted.per_request else []
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.is_dir():
                raise RequestRefused(f"{file}: is a directory, expected a file")
            if not is_special(file):
                with NamedTemporaryFile(dir=file.parent, prefix=".ranvier-"):  # removed at once
                    pass
        except OSError as error:
            raise RequestRefused(f"{file}: {error.strerror or error}") from error


def read_trace(path: Path, wanted: ReplayRequest) -> Ready:
    try:
        trace = open_trace(path, wanted.options)
    except OSError as error:
        raise RequestRefused(f"{path}: {error.strerror or error}") from error
    if not trace.requests:
        raise RequestRefused(f"{path}: there is no request in it")
    ready = make_ready(trace, stream=wanted.stream)
    wanted.plans(
        ready.summary.block_tokens, wanted.caches[0]
    )  # refuses a cache below one block before the next file is read
    span_s = ready.summary.span_s / min(wanted.rates)
    if span_s > SPAN_S_MAX:
        raise RequestRefused(
            f"{path}: the requests come within {span_s:.2g} s, expected up to {SPAN_S_MAX:g}: "
            "are the time stamps of one clock and unit, and is the speed right?"
        )
    return ready


def named_apart(ready: Sequence[Ready], paths: Sequence[Path]) -> list[Ready]:
    """Rename traces that share a name to their paths, because all output names a run's trace."""
    names = Counter(each.summary.name for each in ready)
    return [
        each if names[each.summary.name] == 1 else each._replace(summary=replace(each.summary, name=str(path)))
        for each, path in zip(ready, paths, strict=True)
    ]


def for_cache(ready: Ready, cache: CacheName | None, wanted: ReplayRequest) -> Ready:
    """Return the trace for engines with this cache; its name includes the cache if there are several."""
    if len(wanted.caches) == 1:
        return ready
    return ready._replace(summary=replace(ready.summary, name=f"{ready.summary.name}, cache {cache}"))


def run(ready: Sequence[tuple[Ready, CacheName | None]], wanted: ReplayRequest) -> list[Done]:
    """Execute the runs of all traces and caches. The results are in the order of the table."""
    tasks = [Task(each, plan) for each, cache in ready for plan in wanted.plans(each.summary.block_tokens, cache)]
    requests = sum(len(task.ready.items) for task in tasks)
    progress = Progress(sys.stderr, requests, len(tasks))
    gc.collect()
    gc.freeze()  # no garbage collection, here or in a forked process, needs to walk through the traces
    try:
        return execute_all(tasks, wanted.jobs, time.perf_counter, progress.show)
    finally:
        gc.unfreeze()
        progress.end()


def settings(wanted: ReplayRequest) -> dict[str, object]:
    """Return what was asked for, as JSON-ready values."""
    return {
        "version": __version__,
        "policies": list(wanted.policies),
        "caches": [cache for cache in wanted.caches if cache],
        "nodes": list(wanted.nodes),
        "rates": list(wanted.rates),
        **plain(wanted.plan),
    }


def write(results: ReplayResults, done: Sequence[Done], wanted: ReplayRequest) -> None:
    """Write the files that were asked for, each whole or not at all. Raises OSError."""
    if wanted.per_request is not None:
        replace_file(wanted.per_request, b"".join(each.lines for each in done))
    if wanted.out is None:
        return
    found = {**results.to_json(), "curves": curves(results.runs)}
    replace_file(wanted.out / RESULTS, orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    replace_file(wanted.out / PAGE, page(results).encode())
    print(f"wrote {wanted.out / RESULTS} and {PAGE}", file=sys.stderr)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file as soon as the new one is complete. Devices and pipes are written directly. Raises OSError."""
    if is_special(path):
        path.write_bytes(data)
        return
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_special(path: Path) -> bool:
    """Whether something is at this path that is neither a regular file nor a directory, as /dev/stdout."""
    return path.exists() and not path.is_file() and not path.is_dir()


class Progress:
    """Shows progress: a bar on a terminal, otherwise a line when a run has ended. `show` may be called often."""

    def __init__(self, stream: TextIO, requests: int, runs: int) -> None:
        self._stream = stream
        self._bar = stream.isatty()
        self._requests, self._runs = requests, runs
        self._ended = 0
        self._began_at = time.perf_counter()
        self._drawn_at = 0.0

    def show(self, requests: int, ended: int) -> None:
        now = time.perf_counter()
        if self._bar and now - self._drawn_at >= DRAW_EVERY_S:
            self._drawn_at = now
            self._stream.write(f"\r{self._line(requests, ended, now)}\x1b[K")
            self._stream.flush()
        elif not self._bar and ended > self._ended:
            self._stream.write(f"{self._line(requests, ended, now)}\n")
            self._stream.flush()
        self._ended = ended

    def end(self) -> None:
        if self._bar:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _line(self, requests: int, ended: int, now: float) -> str:
        share = requests / max(1, self._requests)
        took_s = max(now - self._began_at, 1e-9)
        left = f", {took_s * (1 - share) / share:.0f} s left" if 0 < share < 1 else ""
        bar = f"{'#' * int(share * BAR_CELLS):.<{BAR_CELLS}} " if self._bar else ""
        return f"{bar}{share:4.0%}  {ended} of {self._runs} runs, {requests / took_s:,.0f} requests/s{left}"
