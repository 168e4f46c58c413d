"""Writes the report of a replay: one self-contained HTML page for somebody who has to choose a policy.

For each trace it has, from the top: the findings in words, the table, and charts of what the table cannot show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby

from ranvier_py.replay.result_table import COLUMNS, NO_FIGURE, cells_of
from ranvier_py.replay.results import ReplayResults, RunResult, TraceSummary
from ranvier_py.replay.sentences import about, comparable, duration, findings, percent, shown_of
from ranvier_py.replay.svg import COLOURS, Axis, Bar, ChartLine, bar_chart, line_chart

LOADS_MAX = 6  # charts of load over time: those of the most and the least even policies
CURVES_MAX = 12  # curves in one chart; if there were more, the medians are left out
SECONDS = Axis("time to first token", log=True, written=duration)


class Colours:
    """One colour for each policy, the same in every chart."""

    def __init__(self, runs: Iterable[RunResult]) -> None:
        names = list(dict.fromkeys(run.policy for run in runs))
        self._of = {name: index for index, name in enumerate(names)}

    def __getitem__(self, run: RunResult) -> int:
        return self._of[run.policy]

    def dashed(self, run: RunResult) -> bool:
        return run.is_oracle or self._of[run.policy] >= COLOURS


def page(results: ReplayResults) -> str:
    """Return the whole page."""
    parts = [section(trace, [run for run in results.runs if run.trace == trace.name]) for trace in results.traces]
    asked = "; ".join(f"{name} {text}" for name, value in results.settings.items() if (text := setting(value)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ranvier replay</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main><h1>ranvier replay</h1>"
        f'{"".join(parts)}<footer><h2>How to read this</h2>{HOW_TO_READ}<p class="small">{escape(asked)}</p></footer>'
        "</main></body></html>"
    )


def setting(value: object) -> str:
    """Return the text of one setting's value; "" if it was not given."""
    if isinstance(value, Mapping):
        return " ".join(f"{name}={setting(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(setting(inner) for inner in value)
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def section(trace: TraceSummary, runs: Sequence[RunResult]) -> str:
    """Return the part of the page about one trace."""
    if not runs:
        return ""
    colours = Colours(runs)
    chosen, at, nodes, rates = shown_of(runs)
    parts = [f"<h2>{escape(trace.name)}</h2>", f"<p>{escape(about(trace, runs[0]))}</p>"]
    parts.append(f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in findings(runs))}</ul>")
    parts.append(table(runs, several_nodes=len(nodes) > 1, several_rates=len(rates) > 1))
    shown = [run for run in chosen if run.served]  # the others have no figures
    figures = [
        ("Prompt tokens found in the cache" + at, hit_bars(shown, colours)),
        ("Times to first token" + at, distribution(shown, colours)),
    ]
    if len(rates) > 1:
        medians = 2 * len({run.policy for run in runs}) <= CURVES_MAX
        name = "Saturation: p90, and p50 dashed, by rate" if medians else "Saturation: p90 by rate, oracles dashed"
        figures.append((name, sweep(runs, nodes[0], colours, medians=medians)))
    if any(run.regret_s and not run.is_oracle for run in shown):
        figures.append(("Lost against the best engine, by request" + at, regret_bars(shown, colours)))
    figures += [(f"Requests in flight: {run.policy}{at}", LOADS + load(run)) for run in most_different(shown)]
    if not shown:
        return f"<section>{''.join(parts)}</section>"
    parts.append(legend(shown, colours))
    parts.append(f'<div class="figures">{"".join(figure(name, chart) for name, chart in figures)}</div>')
    parts.append(reasons(shown))
    return f"<section>{''.join(parts)}</section>"


def table(runs: Sequence[RunResult], *, several_nodes: bool, several_rates: bool) -> str:
    """Return the table: one row for each run, the best policy of each rate and number of nodes in bold."""
    hidden = {"wall", *(["nodes"] * (not several_nodes)), *(["rate"] * (not several_rates))}
    columns = [column for column in COLUMNS if column.title not in hidden]
    ordered = sorted(runs, key=lambda run: (run.rate, run.nodes or 10**6))
    rows = []
    for _, group in groupby(ordered, key=lambda run: (run.rate, run.nodes)):
        together = list(group)
        rivals = comparable(together)
        figures = [run.ttft_s["p90"] for run in rivals]
        for run in together:
            is_best = run in rivals and run.ttft_s["p90"] == min(figures) and best_is_one(figures)
            kind = ' class="best"' if is_best else ' class="oracle"' if run.is_oracle else ""
            cells = "".join(f"<td>{escape(cell or NO_FIGURE)}</td>" for cell in cells_of(run, columns))
            rows.append(f"<tr{kind}>{cells}</tr>")
    head = "".join(f"<th>{escape(column.title)}</th>" for column in columns)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def best_is_one(figures: Sequence[float]) -> bool:
    """Whether the least figure deserves to be marked: it is the only one, or not all are equal."""
    return len(figures) == 1 or min(figures) < max(figures)


def hit_bars(runs: Sequence[RunResult], colours: Colours) -> str:
    bars = [Bar(run.policy, run.hit_rate, colours[run], run.is_oracle) for run in runs]
    return bar_chart("Hit rate by policy", bars, Axis("share of prompt tokens", written=percent))


def regret_bars(runs: Sequence[RunResult], colours: Colours) -> str:
    bars = [Bar(run.policy, run.regret_s["mean"], colours[run]) for run in runs if run.regret_s and not run.is_oracle]
    return bar_chart(
        "Seconds lost by policy", bars, Axis("mean, against the engine with the soonest first token", written=duration)
    )


def distribution(runs: Sequence[RunResult], colours: Colours) -> str:
    lines = [
        ChartLine(
            run.policy,
            [(value, index / 100) for index, value in enumerate(run.ttft_quantiles)],
            colours[run],
            colours.dashed(run),
        )
        for run in runs
        if run.served
    ]
    return line_chart(
        "Distribution of times to first token", lines, SECONDS, Axis("share of requests", written=percent)
    )


def sweep(runs: Sequence[RunResult], nodes: int, colours: Colours, *, medians: bool) -> str:
    lines = []
    ordered = sorted((run for run in runs if run.nodes in (0, nodes)), key=lambda run: (run.policy, run.rate))
    for _, group in groupby(ordered, key=lambda run: run.policy):
        together = list(group)
        first = together[0]
        for name in ("p50", "p90") if medians else ("p90",):
            points = [(run.offered_per_s, run.ttft_s[name]) for run in together if run.served]
            lines.append(
                ChartLine(f"{first.policy} {name}", points, colours[first], colours.dashed(first) or name == "p50")
            )
    return line_chart("Times to first token by rate", lines, Axis("requests/s offered"), SECONDS)


def load(run: RunResult) -> str:
    """Draw requests in flight over time: at the busiest engine, on average, and at the idlest engine."""
    moments = [(moment[0], moment[1:]) for moment in run.load_over_time]
    lines = [
        ChartLine("busiest engine", [(at, max(loads)) for at, loads in moments], 1),
        ChartLine("mean", [(at, sum(loads) / len(loads)) for at, loads in moments], 0),
        ChartLine("idlest engine", [(at, min(loads)) for at, loads in moments], 2),
    ]
    return line_chart(f"Load under {run.policy}", lines, Axis("seconds"), Axis("requests in flight"))


def most_different(runs: Sequence[RunResult]) -> list[RunResult]:
    """Return the runs whose requests are spread most and least evenly, LOADS_MAX in all, in the given order."""
    ranked = sorted((run for run in runs if run.load_over_time), key=lambda run: run.load_cv)
    kept = ranked if len(ranked) <= LOADS_MAX else [*ranked[: LOADS_MAX // 2], *ranked[-LOADS_MAX // 2 :]]
    return [run for run in runs if any(run is each for each in kept)]


LOADS = '<p class="key"><i class="c1"></i>busiest engine <i class="c0"></i>mean <i class="c2"></i>idlest engine</p>'
"""The legend of the charts that `load` draws."""


def figure(name: str, chart: str) -> str:
    return f"<figure><figcaption>{escape(name)}</figcaption>{chart}</figure>"


def legend(runs: Sequence[RunResult], colours: Colours) -> str:
    items = "".join(f'<li><i class="c{colours[run] % COLOURS}"></i>{escape(run.policy)}</li>' for run in runs)
    return f'<ul class="legend">{items}</ul>'


def reasons(runs: Sequence[RunResult]) -> str:
    """Return the counts of the decisions' reasons, by policy."""
    counts = [", ".join(f"{reason} {count:,}" for reason, count in run.reasons.items()) for run in runs]
    rows = "".join(
        f"<tr><td>{escape(run.policy)}</td><td>{escape(text)}</td></tr>" for run, text in zip(runs, counts, strict=True)
    )
    return f"<details><summary>Reasons of the decisions</summary><table><tbody>{rows}</tbody></table></details>"


HOW_TO_READ = (
    "<p><b>TTFT</b> is the time from the arrival of a request to its first token, queue included; <b>end</b> to "
    "its last one. p90: nine of ten requests took no longer. <b>Hits</b> are the modelled engines' own count of prompt "
    "tokens they did not compute, as a share of all; <b>predicted</b> is what the router believed. <b>Rate</b> divides "
    "the gaps between arrivals: at 2 the traffic comes twice as fast as in the trace; <b>requests/s</b> are those that "
    "were finished. <b>Nodes</b> are routers that share what they learn. <b>Max/mean</b> compares the engine "
    "with the most requests to the average. <b>Lost</b> is the difference to the "
    "engine whose first token would have come soonest, asked at that moment and with the queues as they were. Oracles "
    "see into the engines: no router can; they are bounds for one request at a time, not the best that could be "
    "planned. The engines are a model: compare policies by it, not machines.</p>"
)

STYLE = (
    ":root{color-scheme:light dark;--text:#1c2430;--soft:#5b6676;--grid:#d9dee6;--back:#fff;--card:#f6f8fa}"
    "@media(prefers-color-scheme:dark){:root{--text:#e6eaf0;--soft:#9aa5b4;--grid:#333c48;--back:#12161c;--card:#1a2029}}"
    "body{margin:0;background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif}"
    "main{max-width:1180px;margin:auto;padding:16px}h1{font-size:22px}h2{font-size:18px;margin-top:32px;overflow-wrap:anywhere}"
    ".wide{overflow-x:auto;max-width:100%}figure,details{min-width:0;overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "td,th{padding:3px 7px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}"
    "td:first-child,th:first-child{text-align:left}th{color:var(--soft);font-weight:500}tr.best td{font-weight:700}"
    "tr.oracle td{color:var(--soft);font-style:italic}details td{white-space:normal;text-align:left}"
    ".figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(400px,100%),1fr));gap:16px;margin:20px 0}"
    "figure{margin:0;background:var(--card);border-radius:8px;padding:10px}"
    "figcaption{font-weight:600;padding:2px 6px 6px}svg{width:100%;height:auto;display:block}"
    ".grid{stroke:var(--grid);stroke-width:1}.label{fill:var(--soft);font-size:13px}"
    ".line{fill:none;stroke:currentColor;stroke-width:2}.dash{stroke-dasharray:5 4}.dot,.bar{fill:currentColor}"
    ".faint{opacity:.45}.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;padding:0}"
    ".key{margin:0 6px;font-size:13px;color:var(--soft)}"
    ".legend i,.key i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px}"
    ".legend i,.key i{background:currentColor}"
    ".small{color:var(--soft);font-size:12px}"
    ".c0{color:#2f6fde}.c1{color:#d9622b}.c2{color:#2a9d63}.c3{color:#b03a8c}.c4{color:#8a6d1d}.c5{color:#1d9aa8}"
    ".c6{color:#7a55d6}.c7{color:#cf3b4d}.c8{color:#6b7a8f}.c9{color:#4d8b1f}.c10{color:#d6a11c}.c11{color:#9c6b4a}"
    ".c12{color:#e07aa8}.c13{color:#5aa9e6}"
)
