"""Makes one pane of those of several workers of a node: each has served other requests, of the same clients.

Each join takes the panes as JSON values, the own one first, and changes none of them. What only grows is added up;
shares are made anew of what they are shares of; what all workers know alike (rules, limits) is the own one's.
Bounds: those of one worker, times as many as there are; of what has happened, `most`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isnan
from typing import Any

Join = Callable[[Sequence[Any]], Any]
Row = dict[str, Any]


def newest(panes: Sequence[Sequence[Row]], most: int) -> list[Row]:
    """Join lists of what has happened, the last first."""
    return sorted((row for pane in panes for row in pane), key=lambda row: -row["at"])[:most]


def summed(panes: Sequence[Any]) -> Any:
    """Join numbers, and mappings and lists of numbers, by adding them up; words are the first one's."""
    first = panes[0]
    if isinstance(first, dict):
        names = dict.fromkeys(name for pane in panes for name in pane)
        return {name: summed([pane[name] for pane in panes if name in pane]) for name in names}
    if isinstance(first, list):
        return [sum(column) for column in zip(*panes, strict=True)]
    return first if isinstance(first, str | bool | None) else sum(panes)


def of_requests(panes: Sequence[Row]) -> Row:
    """Join what was served. The route table is the cluster's."""
    return {**summed(panes), "routes": panes[0]["routes"]}


def limited(panes: Sequence[Row]) -> Row:
    """Join the limits of tenants. Workers tell each other what is used; each counts whom it has refused."""
    own, scopes = panes[0], dict[str, Row]()
    for pane in panes:
        for scope, row in pane["limits"].items():
            known = scopes.setdefault(scope, {**row, "refused": 0})
            known["refused"] += row["refused"]
            known["last_refusal"] = known["last_refusal"] or row["last_refusal"]
    return {**own, "limited": max(pane["limited"] for pane in panes), "limits": scopes}


def of_clients(panes: Sequence[Row]) -> Row:
    """Join clients and what breaks their prefixes, who sent most first. A conversation may have been at each worker."""
    rows = [joined_client(same) for same in by((row for pane in panes for row in pane["clients"]), "client")]
    return {**panes[0], "clients": sorted(rows, key=lambda row: -row["prompt_tokens"])}


def joined_client(rows: Sequence[Row]) -> Row:
    breaks = by((each for row in rows for each in row["breaks"]), "cause", "path", "scope")
    added = ("turns", "prompt_tokens", "counted_tokens", "compared_tokens", "break_tokens", "break_prefill_s")
    return {
        **rows[0],
        **{name: sum(row[name] for row in rows) for name in added},
        "sessions": max(row["sessions"] for row in rows),
        "reused_share": of_all(rows, "reused_share", "counted_tokens"),
        "reusable_share": of_all(rows, "reusable_share", "compared_tokens"),
        "breaks": sorted((summed(same) for same in breaks), key=lambda each: -each["tokens"]),
    }


def of_hits(panes: Sequence[Row]) -> Row:
    """Join what was predicted and counted of each engine. Its own figures are from whoever reads its metrics."""
    engines = []
    for same in by((row for pane in panes for row in pane["engines"]), "name"):
        row = {name: next((each[name] for each in same if each[name] is not None), None) for name in same[0]}
        for name in ("answers", "predicted_tokens", "cached_tokens"):
            row[name] = sum(each[name] for each in same)
        row["precision"] = of_all(same, "precision", "predicted_tokens")
        row["recall"] = of_all(same, "recall", "cached_tokens")
        row["biases"] = list(dict.fromkeys(bias for each in same for bias in each["biases"]))
        engines.append(row)
    precision, recall = of_all(engines, "precision", "predicted_tokens"), of_all(engines, "recall", "cached_tokens")
    return {**panes[0], "route_precision": precision, "route_recall": recall, "engines": engines}


def of_shadows(panes: Sequence[Row]) -> Row:
    """Join what policies in the shadow would have saved."""
    shadows = []
    for same in by((row for pane in panes for row in pane["shadows"]), "policy"):
        row = {"policy": same[0]["policy"], "elsewhere_share": of_all(same, "elsewhere_share", "placed")}
        row |= {name: sum(each[name] for each in same) for name in ("placed", "saved_tokens", "saved_s")}
        shadows.append({**row, "saved_ms_per_request": round(1000 * row["saved_s"] / max(1, row["placed"]), 2)})
    return {**panes[0], "shadows": shadows}


def by(rows: Iterable[Row], *names: str) -> Iterable[list[Row]]:
    """Return the rows that agree in the members with these names together, in the order of the first ones."""
    found = dict[tuple[Any, ...], list[Row]]()
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found.values()


def of_all(rows: Sequence[Mapping[str, Any]], share: str, whole: str) -> float | None:
    """Return the share of all of what each row has a share of; None if none is known."""
    known = [(row[share], row[whole]) for row in rows if row[share] is not None]
    total = sum(amount for _, amount in known)
    return sum(part * amount for part, amount in known) / total if total else None


def added_up(columns: Iterable[Sequence[float | None]], length: int) -> list[float | None]:
    """Add up histories that end at the same time, each by second, the last one at the end; None: not known of any."""
    total: list[float | None] = [None] * length
    for column in columns:
        for place, value in enumerate(column[-length:], max(0, length - len(column))):
            if value is not None and not isnan(value):
                total[place] = (total[place] or 0.0) + value
    return total
