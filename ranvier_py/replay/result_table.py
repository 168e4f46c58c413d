"""The table that a replay prints: one row for each policy, number of nodes and rate; the findings stand below it.

On a terminal the best figure is bold among runs of the same trace, rate and number of nodes; oracles do not compete.
On a narrow terminal columns are left out rather than rows folded; the files have all columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import fill
from typing import NamedTuple

from ranvier_py.core.findings import counted
from ranvier_py.replay.results import ReplayResults, RunResult, TraceSummary
from ranvier_py.replay.sentences import duration, findings, percent

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"

NO_FIGURE = "-"
"""Shown for a run that served no request, and as an oracle's number of nodes."""

WIDTH = 120
"""Characters in a line of the text below the table if stdout is no terminal."""

Figure = Callable[[RunResult], float]


class Column(NamedTuple):
    """A column. `best` picks the best of several runs' `figure`s; None: no value is better than another.

    A `measured` column has no figure for a run that served no request. On a narrow terminal the columns of lowest
    `worth` are left out first; those of None stay. `meaning` stands below the table.
    """

    title: str
    text: Callable[[RunResult], str]
    figure: Figure = lambda _: 0.0
    best: Callable[[Sequence[float]], float] | None = None
    measured: bool = True
    worth: int | None = None
    meaning: str = ""


def time_column(title: str, figure: Figure, worth: int | None = None, meaning: str = "") -> Column:
    return Column(title, lambda run: duration(figure(run)), figure, min, worth=worth, meaning=meaning)


COLUMNS = (
    Column("policy", lambda run: run.policy, measured=False),
    Column("nodes", lambda run: str(run.nodes or NO_FIGURE), measured=False, worth=7),
    Column(
        "rate",
        lambda run: f"{run.rate:g}",
        measured=False,
        worth=8,
        meaning="at 2 requests come twice as fast as in the trace",
    ),
    Column("requests/s", lambda run: f"{run.requests_per_s:.2f}", worth=4, meaning="finished"),
    Column(
        "hits",
        lambda run: percent(run.hit_rate),
        lambda run: run.hit_rate,
        max,
        meaning="prompt tokens that engines had in the cache",
    ),
    Column("predicted", lambda run: percent(run.predicted_hit_rate), worth=3, meaning="those that the router expected"),
    time_column("TTFT p50", lambda run: run.ttft_s["p50"], meaning="time to the first token, queue included"),
    time_column("p90", lambda run: run.ttft_s["p90"]),
    time_column("p99", lambda run: run.ttft_s["p99"], worth=6),
    time_column("end p50", lambda run: run.e2e_s["p50"], worth=2, meaning="time to the last token"),
    Column(
        "max/mean",
        lambda run: f"{run.max_over_mean:.2f}",
        lambda run: run.max_over_mean,
        min,
        worth=5,
        meaning="requests of the busiest engine, against the average",
    ),
    Column(
        "lost/request",
        lambda run: duration(run.regret_s["mean"]) if run.regret_s else "",
        lambda run: run.regret_s.get("mean", 0.0),
        min,
        worth=9,
        meaning="first token later than from the best engine at that moment",
    ),
    Column("failed", lambda run: f"{run.failed:,}", lambda run: run.failed, min, measured=False),
    Column("wall", lambda run: f"{run.wall_s:.1f} s", measured=False, worth=1, meaning="what the run took here"),
)


def table(results: ReplayResults, *, bold: bool, width: int | None = None) -> str:
    """Return the text: for each trace a headline, its runs and its findings; then a legend. `width` in characters."""
    parts = []
    shown: Sequence[Column] = COLUMNS
    for trace in results.traces:
        runs = [run for run in results.runs if run.trace == trace.name]
        shown = fitting(runs, width)
        head = wrapped(headline(trace, runs), width)
        sent = [wrapped(f"- {each}", width or WIDTH) for each in findings(runs)]
        parts.append("\n".join([head, *lines(runs, shown, bold=bold), "", *sent]))
    return "\n\n".join([*parts, wrapped(legend(shown), width or WIDTH, indent="")])


def wrapped(text: str, width: int | None, indent: str = "  ") -> str:
    return text if width is None else fill(text, max(width, 20), subsequent_indent=indent, break_on_hyphens=False)


def legend(shown: Sequence[Column]) -> str:
    meant = [f"{column.title}: {column.meaning}" for column in shown if column.meaning]
    gone = [column.title for column in COLUMNS if column not in shown]
    narrow = f". Left out, for want of width: {', '.join(gone)}" if gone else ""
    return f"{'; '.join(meant)}{narrow}."


def fitting(runs: Sequence[RunResult], width: int | None) -> list[Column]:
    """Return the columns that fit. Nodes and rate go first if all rows agree in them, then the others by worth."""

    def worth(column: Column) -> tuple[bool, int]:
        same = column.title in ("nodes", "rate") and len({column.text(run) for run in runs}) < 2
        return not same, column.worth or 0

    kept = list(COLUMNS)
    while width is not None and len(spaced(["0" * each for each in widths_of(runs, kept)])) > width:
        spare = [column for column in kept if column.worth is not None]
        if not spare:
            break
        kept.remove(min(spare, key=worth))
    return kept


def headline(trace: TraceSummary, runs: Sequence[RunResult]) -> str:
    engines = f", {counted(runs[0].engines, 'engine')}" if runs else ""
    clock = "" if trace.timed else " (the times are ours)"
    prompts = f"{trace.prompt_tokens:,} prompt tokens"
    return f"{trace.name}: {counted(trace.requests, 'request')} in {duration(trace.span_s)}{clock}, {prompts}{engines}"


def lines(runs: Sequence[RunResult], shown: Sequence[Column], *, bold: bool) -> list[str]:
    """Return the titles and rows as lines; the first column is left-aligned, the others right-aligned."""
    widths = widths_of(runs, shown)
    found = [spaced([column.title for column in shown], widths)]
    for run in runs:
        marked = [bold and is_best(column, run, runs) for column in shown]
        found.append(spaced(cells_of(run, shown), widths, marked))
    return found


def cells_of(run: RunResult, shown: Sequence[Column]) -> list[str]:
    return [column.text(run) if has_figure(column, run) else NO_FIGURE for column in shown]


def widths_of(runs: Sequence[RunResult], shown: Sequence[Column]) -> list[int]:
    rows = [cells_of(run, shown) for run in runs]
    return [max(map(len, cells)) for cells in zip([column.title for column in shown], *rows, strict=True)]


def spaced(cells: Sequence[str], widths: Sequence[int] | None = None, marked: Sequence[bool] | None = None) -> str:
    widths = widths or [len(cell) for cell in cells]
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
    """Whether no competitor has a better figure. If all are equal, none is best."""
    if column.best is None or run.is_oracle or not has_figure(column, run):
        return False
    figures = [
        column.figure(other)
        for other in runs
        if not other.is_oracle and (other.nodes, other.rate) == (run.nodes, run.rate) and has_figure(column, other)
    ]
    return min(figures) < max(figures) and column.figure(run) == column.best(figures)
