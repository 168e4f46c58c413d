"""Renders what `up` shows: the same traffic under two policies, side by side, live and at the end. Pure.

Every figure is from the answers themselves: hit rate is the engines' `cached_tokens`, times are a client's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from cluster.dns.addresses import Address
from cluster.load.load_report import LoadLog, Report
from cluster.load.load_view import show_ms, show_rate

BAR_CELLS = 12


@dataclass(slots=True)
class Column:
    """One policy's half of the comparison. `state` is one word: waiting, starting, running or done."""

    policy: str
    planned: int
    state: str = "waiting"
    log: LoadLog = field(default_factory=LoadLog)
    began_s: float | None = None
    ended_s: float | None = None

    def outcome(self, now_s: float) -> Report:
        if self.began_s is None:
            return Report(self.log, 0.0)
        return Report(self.log, (now_s if self.ended_s is None else self.ended_s) - self.began_s)


def live_table(columns: Sequence[Column], engines: Sequence[str], nodes: Sequence[Address], now_s: float) -> Table:
    """Return the whole screen."""
    table = Table(title="the same chats, under each policy", title_justify="left", caption_justify="left")
    table.caption = "nodes: " + ", ".join(f"{node.ip}:{node.port}" for node in nodes)
    table.add_column("")
    outcomes = [column.outcome(now_s) for column in columns]
    for column in columns:
        table.add_column(f"{column.policy} ({column.state})", justify="right", min_width=22)
    for title, cells in rows(columns, outcomes):
        table.add_row(title, *cells)
    table.add_section()
    for engine in engines:
        table.add_row(engine, *(share_cell(one, engine) for one in outcomes))
    return table


def rows(columns: Sequence[Column], outcomes: Sequence[Report]) -> Iterable[tuple[str, list[str]]]:
    yield "requests", [f"{one.log.ok} of {column.planned}" for column, one in zip(columns, outcomes, strict=True)]
    yield "failed", [f"[red]{one.log.failed}[/]" if one.log.failed else "0" for one in outcomes]
    yield "time", [f"{one.duration_s:.1f} s" for one in outcomes]
    yield "hit rate by the engines", [f"[bold]{show_rate(one.hit_rate)}[/]" for one in outcomes]
    yield "prompt tokens", [f"{one.prompt_tokens:,}" for one in outcomes]
    yield "  prefill saved", [f"{one.cached_tokens:,}" for one in outcomes]
    yield "  prefill computed", [f"{one.prompt_tokens - one.cached_tokens:,}" for one in outcomes]
    for name in ("p50", "p95"):
        yield f"time to first token {name}", [show_ms(one.ttft_s[name]) for one in outcomes]
    yield "end to end p50", [show_ms(one.total_s["p50"]) for one in outcomes]


def share_cell(outcome: Report, engine: str) -> str:
    """Return what one engine got: a bar, its share of the requests, its hit rate."""
    found = next((share for share in outcome.engines if share.name == engine), None)
    if found is None:
        return "-"
    bar = "█" * round(found.share * BAR_CELLS)
    return f"{bar} {found.share:4.0%}  hit {show_rate(found.hit_rate)}"


def plain_line(column: Column, now_s: float) -> str:
    """Return one line with the state of the run, for output that is no terminal."""
    one = column.outcome(now_s)
    first = f"TTFT p50 {show_ms(one.ttft_s['p50'])} p95 {show_ms(one.ttft_s['p95'])}"
    counts = (
        f"{one.log.ok} of {column.planned} ok, {one.log.failed} failed, hit rate {show_rate(one.hit_rate)}, {first}"
    )
    return f"{column.policy:>12} {column.state} {one.duration_s:5.1f} s: {counts}"


def summary(outcomes: Sequence[tuple[str, Report]]) -> str:
    """Return the result in one sentence, which is what `up` is for."""
    saved = " vs ".join(f"{show_rate(one.hit_rate)} ({policy})" for policy, one in outcomes)
    first = " vs ".join(show_ms(one.ttft_s["p50"]) for _, one in outcomes)
    return f"prefill saved: {saved}; time to first token p50: {first}"


def client_help(node: Address, model: str, name: str, dns: tuple[str, int]) -> str:
    """Return how a user can go on with clients of his own."""
    url = f"http://{node.ip}:{node.port}/v1"
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return (
        f"The nodes stay up. Any OpenAI client can go on at {url}, for example:\n\n"
        f"  curl -i {url}/chat/completions -H 'content-type: application/json' \\\n    -d '{body}'\n\n"
        f'  client = openai.OpenAI(base_url="{url}", api_key="none")\n\n'
        "Send it twice and look at the x-ranvier-* headers. All nodes have one name, which turns at each look-up:\n\n"
        f"  dig @{dns[0]} -p {dns[1]} {name} +short\n\n"
        "What one node has learned all of them know: go on with a chat at another address. Ctrl-C ends everything."
    )
