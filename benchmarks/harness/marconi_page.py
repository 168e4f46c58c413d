"""Makes benchmarks/results/marconi.html from marconi.json: the references, and the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ranvier_py.replay.html_report import STYLE, figure
from ranvier_py.replay.sentences import percent
from ranvier_py.replay.svg import Axis, Bar, ChartLine, bar_chart, line_chart

UNVERIFIED = "unverified here"
COLOURS_OF = ("Marconi", "SGLang+", "vLLM+")

HEAD = (
    "<p>Marconi (Pan et al.) evicts prefixes of hybrid models by recency and by what a byte saves. This page holds our "
    "simulator to reference integers on four seeded traces, and shows the paper's figures as those traces give them. "
    "They are shaped like the paper's sets and are not those sets, so what the paper states of its own is shown beside "
    f"ours and marked <b>{UNVERIFIED}</b>; figures of formulas alone are verified.</p>"
)


def page(result: Mapping[str, Any]) -> str:
    """Return the whole page, which needs no other files."""
    machine = result["machine"]
    ran = escape(f"Commit {result['commit']}, {machine['cores']} cores of {machine['processor']}")
    equal = f"{result['checked'] - len(result['differ'])} of {result['checked']} references are found to the integer"
    parts = [
        f"<h1>Marconi's figures, from our traces</h1>{HEAD}",
        f"<section><h2>References</h2><p>{equal}.</p>{table(result['rows'])}</section>",
        f"<section><h2>Figures</h2>{legend()}{''.join(map(shown, result['figures']))}</section>",
        f'<footer><p class="small">{ran}. Made by make bench NAME=marconi.</p></footer>',
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Marconi</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each reference; of lists it shows the first five values."""
    found = [row for row in rows if "equal" in row and row["kind"] != "sha256"]
    cells = [
        (
            row["trace"],
            row["kind"] + (f", {row['capacity_gb']} GB" if "capacity_gb" in row else ""),
            brief(row["expected"]),
            brief(row["found"]),
            percent(row["hit_rate"]) if "hit_rate" in row else "",
            "equal" if row["equal"] else "differs",
        )
        for row in found
    ]
    titles = ("trace", "cache", "reference", "found", "hit rate", "")
    head = "".join(f"<th>{title}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in cells)
    return (
        f"<details><summary>{len(cells)} references</summary>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'
    )


def brief(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(brief, value[:5])) + (" …" if len(value) > 5 else "")
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def legend() -> str:
    items = "".join(f'<li><i class="c{index}"></i>{name}</li>' for index, name in enumerate(COLOURS_OF))
    return f'<ul class="legend">{items}</ul>'


def shown(each: Mapping[str, Any]) -> str:
    """Return a figure of ours, and beside it what the paper states."""
    title, published = f"Figure {each['number']}: {each['title']}", each["published"]
    note = f"<p>{escape(each['note'])}</p>" if "note" in each else ""
    parts = [figure(f"{title} (ours)", key(each["ours"]) + drawn(title, each["ours"]))]
    if published is None:
        parts.append(figure("The paper's is of the same formulas, which are verified", note))
    elif isinstance(published, str):
        parts.append(figure(f"The paper's ({UNVERIFIED})", f"<p>{escape(published)}</p>{note}"))
    else:
        chart = key(published) + drawn(f"{title}, published", published)
        parts.append(figure(f"The paper's ({UNVERIFIED})", chart + note))
    return f'<div class="figures">{"".join(parts)}</div>'


def key(chart: Mapping[str, Any]) -> str:
    """Return the meaning of the colours, if they are not only those of the caches."""
    names = [line["name"] for line in chart.get("series", ())]
    if not names or set(names) <= set(COLOURS_OF):
        return ""
    items = "".join(f'<i class="c{colour(name, index)}"></i>{escape(name)} ' for index, name in enumerate(names))
    return f'<p class="key">{items}</p>'


def colour(name: str, index: int) -> int:
    return COLOURS_OF.index(name) if name in COLOURS_OF else index


def drawn(title: str, chart: Mapping[str, Any]) -> str:
    if "bars" in chart:
        found = [
            Bar(name, value, next((at for at, kind in enumerate(COLOURS_OF) if name.endswith(kind)), 0))
            for name, value in chart["bars"].items()
        ]
        return bar_chart(title, found, Axis(chart["x"], written=percent if chart["percent"] else plain))
    lines = [
        ChartLine(each["name"], [(x, y) for x, y in each["points"]], colour(each["name"], index))
        for index, each in enumerate(chart["series"])
    ]
    y = Axis(chart["y"], log=chart.get("log_y", False), written=percent if chart.get("percent_y") else plain)
    return line_chart(title, lines, Axis(chart["x"], log=chart.get("log_x", False), written=plain), y)


def plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
