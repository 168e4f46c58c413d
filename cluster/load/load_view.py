"""Shows a load run on the screen: a bar or plain lines while it runs, tables when it is over."""

from __future__ import annotations

import math

import trio
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.load.load_report import LoadLog, Report, Share, quantile

BAR_INTERVAL_S = 0.25
LINE_INTERVAL_S = 5.0
RECENT = 500
"""How many of the latest answers the bar's figures are of: they show what happens now, at a bounded cost."""


def recent_line(log: LoadLog) -> str:
    """Return the counts so far, and hit rate and TTFT of the latest answers."""
    latest = log.samples[-RECENT:]
    prompt = sum(one.prompt_tokens for one in latest)
    cached = sum(one.cached_tokens for one in latest)
    ttft = quantile(sorted(one.ttft_s for one in latest if one.ttft_s is not None), 0.5)
    hit = f"{cached / prompt:6.1%}" if prompt else "     -"
    counts = f"{log.ok} ok, {log.failed} failed, {log.in_flight} in flight"
    return f"{counts} | hit rate {hit} | TTFT p50 {show_ms(ttft)}"


async def show_progress(console: Console, log: LoadLog, planned: int | None, duration_s: float) -> None:
    """Show progress until cancelled: in turns if their number is known, else in seconds."""
    began_s = trio.current_time()

    def done() -> tuple[float, float | None]:
        if planned is not None:
            return log.ok + log.failed + log.cancelled + log.not_sent, planned
        return trio.current_time() - began_s, duration_s if math.isfinite(duration_s) else None

    if not console.is_terminal:
        while True:
            await trio.sleep(LINE_INTERVAL_S)
            completed, total = done()
            share = f"{completed / total:4.0%} " if total else ""
            console.print(f"{trio.current_time() - began_s:6.0f} s {share}{recent_line(log)}", highlight=False)
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("", total=done()[1])
        while True:
            bar.update(task, completed=done()[0], total=done()[1], description=recent_line(log), refresh=True)
            await trio.sleep(BAR_INTERVAL_S)


def show_ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:,.0f} ms" if value_s >= 0.01 else f"{value_s * 1e3:.2f} ms"


def show_rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def show_report(console: Console, report: Report) -> None:
    """Print the outcome: totals, the share of each engine and node, the reasons of routing, and the failures."""
    console.print(summary_table(report))
    for title, rows in (("engine", report.engines), ("node", report.nodes)):
        if rows:
            console.print(share_table(title, rows))
    if report.routes:
        console.print(
            "routed by: " + ", ".join(f"{word} {count}" for word, count in report.routes.items()), highlight=False
        )
    for group in report.failures:
        where = ", ".join(f"{node} {count}" for node, count in group.nodes.items())
        console.print(f"[red]failed {group.count}x[/] ", end="")
        console.print(f"{group.reason} ({where}): {group.example}", markup=False, highlight=False)


def summary_table(report: Report) -> Table:
    table = Table(title="load", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    table.add_row("conversations", f"{report.log.conversations}")
    if report.log.skipped_conversations:
        table.add_row("arrivals skipped (too many at once)", f"{report.log.skipped_conversations}")
    table.add_row("requests sent", f"{report.log.sent}")
    table.add_row("  ok / failed / cancelled", f"{report.log.ok} / {report.log.failed} / {report.log.cancelled}")
    table.add_row("turns not sent", f"{report.log.not_sent} of {report.log.planned}")
    table.add_row("time, rate", f"{report.duration_s:.1f} s, {report.requests_per_s:.1f} ok/s")
    table.add_row("prompt tokens", f"{report.prompt_tokens:,}")
    table.add_row("token hit rate (engines' usage)", show_rate(report.hit_rate))
    if report.predicted_tokens is not None and report.prompt_tokens:
        table.add_row("  as the router predicted it", show_rate(report.predicted_tokens / report.prompt_tokens))
    if report.without_usage:
        table.add_row("answers without usage", f"{report.without_usage}")
    for title, values in (
        ("time to first token", report.ttft_s),
        ("end to end", report.total_s),
        ("between tokens", report.inter_token_s),
        ("arrivals late by", report.lag_s),
    ):
        if any(value is not None for value in values.values()):
            table.add_row(f"{title}, {' / '.join(values)}", " / ".join(show_ms(value) for value in values.values()))
    return table


def share_table(title: str, rows: tuple[Share, ...]) -> Table:
    table = Table()
    table.add_column(title)
    for heading in ("requests", "share", "hit rate"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row.name, f"{row.requests}", show_rate(row.share), show_rate(row.hit_rate))
    return table
