"""The table that a replay prints: one row for each policy, number of nodes and rate.

In each column the best figure of those that compete is bold where there is a terminal: the runs of one trace, at one
rate, on as many nodes. Oracles know what no router can know: they are shown and compete with nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ranvier_py.replay.results import ReplayResults, RunResult, TraceSummary

WHY = {
    "queue_full": "by a full queue (queue_full)",
    "prompt_too_long": "because prompt and answer are longer than an engine's cache (prompt_too_long)",
    "engine_restarted": "by a restart (engine_restarted)",
    "no_engine": "for want of an engine (no_engine)",
}
"""In words what `RunResult.failures` names."""

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"

ORACLE_NODES = "-"
"""In the column of nodes where no router took part."""


NO_FIGURE = "-"
"""Where no request was served."""


class Column(NamedTuple):
    """`figure` is what competes; `best` picks the winner of several, None where nothing is better than another.

    A `measured` column says nothing of a run that served nobody.
    """

    title: str
    text: Callable[[RunResult], str]
    figure: Callable[[RunResult], float] = lambda _: 0.0
    best: Callable[[Sequence[float]], float] | None = None
    measured: bool = True


COLUMNS = (
    Column("policy", lambda run: run.policy, measured=False),
    Column("nodes", lambda run: str(run.nodes or ORACLE_NODES), measured=False),
    Column("rate", lambda run: f"{run.rate:g}", measured=False),
    Column("requests/s", lambda run: f"{run.requests_per_s:.2f}"),
    Column("hits", lambda run: f"{run.hit_rate:.1%}", lambda run: run.hit_rate, max),
    Column("predicted", lambda run: f"{run.predicted_hit_rate:.1%}"),
    Column("TTFT p50", lambda run: seconds(run.ttft_s["p50"]), lambda run: run.ttft_s["p50"], min),
    Column("p90", lambda run: seconds(run.ttft_s["p90"]), lambda run: run.ttft_s["p90"], min),
    Column("p99", lambda run: seconds(run.ttft_s["p99"]), lambda run: run.ttft_s["p99"], min),
    Column("end p50", lambda run: seconds(run.e2e_s["p50"]), lambda run: run.e2e_s["p50"], min),
    Column("max/mean", lambda run: f"{run.max_over_mean:.2f}", lambda run: run.max_over_mean, min),
    Column(
        "lost/request",
        lambda run: seconds(run.regret_s["mean"]) if run.regret_s else "",
        lambda run: run.regret_s.get("mean", 0.0),
        min,
    ),
    Column("failed", lambda run: str(run.failed), lambda run: run.failed, min, measured=False),
    Column("wall", lambda run: f"{run.wall_s:.1f} s", measured=False),
)


def table(results: ReplayResults, *, bold: bool) -> str:
    """All runs, those of one trace together under what was replayed."""
    parts = []
    for trace in results.traces:
        runs = [run for run in results.runs if run.trace == trace.name]
        parts.append("\n".join([headline(trace, runs), *lines(runs, bold=bold), *failures(runs)]))
    return "\n\n".join(parts)


def headline(trace: TraceSummary, runs: Sequence[RunResult]) -> str:
    engines = f", {counted(runs[0].engines, 'engine')}" if runs else ""
    clock = "" if trace.timed else " (the times are ours)"
    prompts = f"{trace.prompt_tokens:,} prompt tokens"
    return f"{trace.name}: {counted(trace.requests, 'request')} in {seconds(trace.span_s)}{clock}, {prompts}{engines}"


def counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}" + "s" * (count != 1)


def failures(runs: Sequence[RunResult]) -> list[str]:
    """Why requests failed, added up over all runs: nobody guesses it from their number."""
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run.failures)
    told = ", ".join(f"{count:,} {WHY.get(reason, reason)}" for reason, count in sorted(total.items()))
    return [f"failed, in all runs: {told}"] if told else []


def lines(runs: Sequence[RunResult], *, bold: bool) -> list[str]:
    """Titles and rows, in columns of equal width; names to the left, figures to the right."""
    rows = [[column.text(run) if has_figure(column, run) else NO_FIGURE for column in COLUMNS] for run in runs]
    titles = [column.title for column in COLUMNS]
    widths = [max(map(len, cells)) for cells in zip(titles, *rows, strict=True)]
    found = [spaced(titles, widths)]
    for run, row in zip(runs, rows, strict=True):
        marked = [bold and is_best(column, run, runs) for column in COLUMNS]
        found.append(spaced(row, widths, marked))
    return found


def spaced(cells: Sequence[str], widths: Sequence[int], marked: Sequence[bool] | None = None) -> str:
    padded = [
        cell.ljust(width) if index == 0 else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    if marked is not None:
        padded = [f"{BOLD}{cell}{PLAIN}" if mark else cell for cell, mark in zip(padded, marked, strict=True)]
    return "  ".join(padded).rstrip()


def has_figure(column: Column, run: RunResult) -> bool:
    return run.served > 0 or not column.measured


def is_best(column: Column, run: RunResult, runs: Sequence[RunResult]) -> bool:
    """Whether no competitor has a better figure; where all are equal nobody is best."""
    if column.best is None or run.is_oracle or not has_figure(column, run):
        return False
    figures = [
        column.figure(other)
        for other in runs
        if not other.is_oracle and (other.nodes, other.rate) == (run.nodes, run.rate) and has_figure(column, other)
    ]
    return min(figures) < max(figures) and column.figure(run) == column.best(figures)


def seconds(value: float) -> str:
    """A length of time with its unit, to three digits or so."""
    for unit_s, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if value >= 2 * unit_s:
            return f"{value / unit_s:,.0f} {unit}"
    if 0.0 < value < 0.001:
        return f"{value * 1000.0:.2g} ms"
    return f"{value:.1f} s" if value >= 10.0 else f"{value:.2f} s" if value >= 1.0 else f"{value * 1000.0:.0f} ms"
