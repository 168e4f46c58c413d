"""Draws where a node would send a request, and why: one line for each candidate, in 80 columns. Pure.

Rule: seconds are those that the policy itself weighs; one that weighs other things has them in a line of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from ranvier_py.control.status_page import word
from ranvier_py.control.status_screen import cut, fitted, short

Row = Mapping[str, Any]

WIDTH = 80
WHY_CHARACTERS_MAX = 400
HEAD = f"{'ENGINE':<17} {'HOLDS':>13} {'LOAD':>4} {'WAIT':>6} {'PREFILL':>7} {'REST':>6} {'SUM':>6}  WHY NOT"
SECONDS = ("queue_s", "prefill_s", "others_s", "decode_s", "sum_s", "ahead_s", "tokens_per_s")
"""Terms that have a column, or are parts of one; `ahead_s` and the rate only say where these come from."""


def explain_page(report: Row) -> list[str]:
    """Return the page about one request."""
    tokens, held = report["prompt_tokens"], report["matched_tokens"]
    exact = "" if report["prompt_tokens_exact"] else ", estimated"
    about = f"{tokens} tokens{exact}; {held} of them are held there, found by {word(report['source'])}"
    if tokens is None:
        about = f"not read ({word(report.get('unread'))}): no engine is known to hold any of it"
    lines = [
        f"{word(report['chosen'])} would get it: {word(report['reason'])}, by policy {word(report['policy'])}",
        f"prompt {about}",
        "",
        HEAD,
    ]
    candidates = report["candidates"]
    chosen = next((each for each in candidates if each["backend"] == report["chosen"]), None)
    order = sorted(candidates, key=lambda row: (sum_of(row), -row["matched_tokens"], row["load"]))
    for each in sorted(order, key=lambda row: row is not chosen):
        lines += candidate_lines(each, chosen)
    left_out: Sequence[Row] = report.get("left_out", ())
    lines += ["", "LEFT OUT"] if left_out else []
    for each in left_out:
        name = word(each["backend"])
        why = word(each["why"], WHY_CHARACTERS_MAX).removeprefix(f"engine {name} ")
        lines += wrap(f"{cut(name, 17):<17} {why}", WIDTH, subsequent_indent=" " * 18)
    return [fitted(line, WIDTH) for line in lines]


def candidate_lines(row: Row, chosen: Row | None) -> Iterator[str]:
    terms = row.get("terms", {})
    holds = f"{short(row['matched_tokens'])} {word(row['trust']).lower()}" if row["trust"] else "-"
    rest = [terms[name] for name in ("others_s", "decode_s") if name in terms]
    cells = (terms.get("queue_s"), terms.get("prefill_s"), sum(rest) if rest else None, terms.get("sum_s"))
    wait, prefill, others, total = map(duration, cells)
    start = f"{cut(word(row['backend']), 17):<17} {holds:>13} {row['load']:>4}"
    yield f"{start} {wait:>6} {prefill:>7} {others:>6} {total:>6}  {why_not(row, chosen)}"
    others_of = [f"{name}={value:.4g}" for name, value in terms.items() if name not in SECONDS]
    yield from wrap(" ".join(others_of), WIDTH - 2, initial_indent="  ", subsequent_indent="  ")


def why_not(row: Row, chosen: Row | None) -> str:
    """Return in a few words what speaks against a candidate."""
    if row is chosen or chosen is None:
        return "<- chosen"
    if not row["reuses_prefixes"]:
        return "reuses nothing"
    less, busier = row["matched_tokens"] < chosen["matched_tokens"], row["load"] > chosen["load"]
    words = "holds less" if less else "busier" if busier else "as good"
    own, best = sum_of(row), sum_of(chosen)
    if not row.get("terms") or own == best:
        return words
    later = f"{'+' if own > best else '-'}{duration(abs(own - best))}"
    return later if own > best else f"{later}, {words}"


def sum_of(row: Row) -> float:
    return float(row.get("terms", {}).get("sum_s", 0.0))


def duration(seconds: float | None) -> str:
    """Return a time in at most six characters."""
    if seconds is None:
        return "-"
    if seconds < 1.0:
        return f"{seconds * 1000:.3g}ms" if seconds < 0.01 else f"{seconds * 1000:.0f}ms"
    return f"{seconds:.1f}s" if seconds < 100.0 else f"{seconds:.0f}s"
