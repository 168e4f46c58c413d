"""The goals of the policies benchmark, computed from its rows.

A *cell* is one workload, cache, number of nodes, load and kind of answers. Its rows are the policies, which all had the
same requests. Oracles run once and are in the cells of all numbers of nodes. Times are p90 to the first token, in
seconds, if nothing else is said.
Each goal reports what it found, and lists what missed it, the worst first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp, fsum, log
from typing import Any, NamedTuple

OURS = "ttft"
DEFAULT = "affinity"  # predicts as `ttft` does, so it has goals of its own and is not among the other policies
ORACLES = ("oracle_greedy", "oracle_ttft")
NO_OTHERS = (OURS, DEFAULT, *ORACLES)  # every policy but these is an "other policy"

WORSE_MAX = 1.02  # ratio of p90s, against the best other policy
BETTER_SHARE = 2 / 3  # share of the cells in which ttft must be better, for each other policy
ORACLE_MAX = 1.10
HIT_POINTS_MAX = 0.02
DEFAULT_MAX, DEFAULT_HIT_POINTS_MAX = 1.05, 0.01  # for the default policy, against `ttft`
BEST_MAX, UNEVEN_MAX = 1.05, 0.03  # against the best of a cell
CONTROL_MAX = 1.01
DIGITS = 4


class Row(NamedTuple):
    """One policy in one cell. `load`: a share of the capacity; `rate`: the speed that this is."""

    workload: str
    cache: str
    nodes: int
    load: float
    streamed: bool
    rate: float
    policy: str
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    e2e_p50_s: float
    e2e_p90_s: float | None
    hit_rate: float
    predicted_hit_rate: float
    requests_per_s: float
    max_over_mean: float
    uneven_share: float | None
    failed: int
    regret_s: float | None
    processor_s: float


class Name(NamedTuple):
    """The name of a cell."""

    workload: str
    cache: str
    nodes: int
    load: float
    streamed: bool = True

    def __str__(self) -> str:
        many = "" if self.nodes == 1 else "s"
        kind = "" if self.streamed else ", whole answers"
        return f"{self.workload}, {self.cache} caches, {self.nodes} node{many}, load {self.load:g}{kind}"


Cells = Mapping[Name, Mapping[str, Row]]


def cells_of(rows: Iterable[Row]) -> Cells:
    """Group rows by cell and policy. Oracles, with 0 nodes, are put in each cell of their workload, cache and load."""
    routed = [row for row in rows if row.nodes]
    oracles = [row for row in rows if not row.nodes]
    cells: dict[Name, dict[str, Row]] = {}
    for row in routed:
        cells.setdefault(Name(row.workload, row.cache, row.nodes, row.load, row.streamed), {})[row.policy] = row
    for row in oracles:
        for name, cell in cells.items():
            if (name.workload, name.cache, name.load, name.streamed) == (
                row.workload,
                row.cache,
                row.load,
                row.streamed,
            ):
                cell[row.policy] = row
    return cells


def goals(rows: Sequence[Row], *, ample: str, controls: Sequence[str]) -> dict[str, Any]:
    """Compute all goals. `ample`: the name of the cache that never evicts; `controls`: workloads that share little."""
    cells = cells_of(rows)
    return {
        "ttft_never_worse": never_worse(cells),
        "ttft_better_than_each": better_than_each(cells),
        "ttft_near_oracle": near_oracle(cells),
        "affinity_near_ttft": affinity_near_ttft(cells),
        "near_best": {policy: near_best(cells, policy) for policy in (OURS, DEFAULT)},
        "affinity_hits": affinity_hits(cells, ample),
        "negative_control": negative_control(cells, controls),
    }


def never_worse(cells: Cells) -> dict[str, Any]:
    """Compare `ttft` with the best other policy of each cell."""
    ratios = {}
    for name, cell in cells.items():
        others = {policy: row for policy, row in cell.items() if policy not in NO_OTHERS}
        if OURS in cell and others:
            best = min(others.values(), key=lambda row: row.ttft_p90_s)
            ratios[name] = compared(name, cell[OURS], best)
    return verdict(ratios.values(), WORSE_MAX)


def near_best(cells: Cells, policy: str) -> dict[str, Any]:
    """Compare a policy with the best of each cell, ours included: in first tokens and in whole answers. Names the cells
    where an engine has nothing to do, while requests wait at another, for more than UNEVEN_MAX of the time."""
    found: dict[str, Any] = {}
    for figure in ("ttft_p90_s", "e2e_p90_s"):
        each = []
        for name, cell in cells.items():
            routed = [row for row in cell.values() if row.nodes and getattr(row, figure) is not None]
            if policy in cell and len(routed) > 1:
                best = min(routed, key=lambda row: getattr(row, figure))
                each.append(compared(name, cell[policy], best, figure))
        found[figure] = verdict(each, BEST_MAX)
    uneven = {str(name): cell[policy].uneven_share or 0.0 for name, cell in cells.items() if policy in cell}
    found["uneven_missed"] = {name: share for name, share in uneven.items() if share > UNEVEN_MAX}
    return found


def near_oracle(cells: Cells) -> dict[str, Any]:
    found = [
        compared(name, cell[OURS], cell["oracle_ttft"])
        for name, cell in cells.items()
        if OURS in cell and "oracle_ttft" in cell
    ]
    return verdict(found, ORACLE_MAX)


def better_than_each(cells: Cells) -> dict[str, Any]:
    """Return, by other policy, in which share of the cells `ttft` is better, and the geometric mean of the ratios."""
    policies = dict.fromkeys(policy for cell in cells.values() for policy in cell if policy not in NO_OTHERS)
    found = {}
    for policy in policies:
        pairs = [
            (cell[OURS].ttft_p90_s, cell[policy].ttft_p90_s)
            for cell in cells.values()
            if OURS in cell and policy in cell
        ]
        if pairs:
            share = sum(ours < theirs for ours, theirs in pairs) / len(pairs)
            middle = geometric_mean([ratio(ours, theirs) for ours, theirs in pairs])
            found[policy] = {"share": round(share, DIGITS), "ratio": round(middle, DIGITS), "cells": len(pairs)}
    missed = [policy for policy, each in found.items() if each["share"] < BETTER_SHARE]
    return {"goal": round(BETTER_SHARE, DIGITS), "reached": not missed, "missed": missed, "by_policy": found}


def affinity_near_ttft(cells: Cells) -> dict[str, Any]:
    """Compare `affinity` with `ttft`: its times, and by how many points its hits are lower."""
    both = {name: (cell[DEFAULT], cell[OURS]) for name, cell in cells.items() if DEFAULT in cell and OURS in cell}
    found = verdict([compared(name, *pair) for name, pair in both.items()], DEFAULT_MAX)
    below = {str(name): round(ours.hit_rate - default.hit_rate, DIGITS) for name, (default, ours) in both.items()}
    missed = {name: points for name, points in below.items() if points > DEFAULT_HIT_POINTS_MAX}
    points = {"points_most": points_of(below.values()), "hits_missed": missed}
    return {**found, **points, "reached": found["reached"] and not missed}


def affinity_hits(cells: Cells, ample: str) -> dict[str, Any]:
    """Return by how many points the hit rate of `affinity` is below that of `oracle_greedy` if nothing is evicted."""
    below: list[dict[str, Any]] = [
        {
            "cell": str(name),
            "affinity": cell["affinity"].hit_rate,
            "oracle_greedy": cell["oracle_greedy"].hit_rate,
            "below": round(cell["oracle_greedy"].hit_rate - cell["affinity"].hit_rate, DIGITS),
        }
        for name, cell in cells.items()
        if name.cache == ample and "affinity" in cell and "oracle_greedy" in cell
    ]
    missed = sorted((each for each in below if each["below"] > HIT_POINTS_MAX), key=lambda each: -each["below"])
    points = {"over": len(missed), "points_most": points_of([each["below"] for each in below])}
    return {"goal": HIT_POINTS_MAX, "cells": len(below), "reached": not missed, **points, "missed": missed}


def negative_control(cells: Cells, controls: Sequence[str]) -> dict[str, Any]:
    """Compare each policy with `least_loaded` in workloads where caches cannot help."""
    base = "least_loaded"
    found: dict[str, list[dict[str, Any]]] = {}
    for name, cell in cells.items():
        if name.workload in controls and base in cell:
            for policy, row in cell.items():
                if policy not in (base, *ORACLES):
                    found.setdefault(policy, []).append(compared(name, row, cell[base]))
    verdicts = {policy: verdict(each, CONTROL_MAX) for policy, each in found.items()}
    missed = [policy for policy, each in verdicts.items() if not each["reached"]]
    return {"goal": CONTROL_MAX, "reached": not missed, "missed": missed, "by_policy": verdicts}


# --- parts ------------------------------------------------------------------------------------------------------------


def compared(name: Name, ours: Row, other: Row, figure: str = "ttft_p90_s") -> dict[str, Any]:
    mine, theirs = getattr(ours, figure), getattr(other, figure)
    return {
        "cell": str(name),
        "other": other.policy,
        "p90_s": mine,
        "other_p90_s": theirs,
        "ratio": round(ratio(mine, theirs), DIGITS),
    }


def verdict(compared_cells: Iterable[dict[str, Any]], most: float) -> dict[str, Any]:
    """Sum up comparisons: their number, their geometric mean, and those above `most`."""
    every = list(compared_cells)
    missed = sorted((each for each in every if each["ratio"] > most), key=lambda each: -each["ratio"])
    middle = geometric_mean([each["ratio"] for each in every])
    return {
        "goal": most,
        "cells": len(every),
        "ratio": round(middle, DIGITS),
        "reached": bool(every) and not missed,
        "over": len(missed),
        "missed": missed,
    }


def points_of(below: Iterable[float]) -> float:
    """Return the greatest of these differences of hit rates, in points."""
    return round(100 * max(below, default=0.0), 2)


def ratio(ours: float, other: float) -> float:
    """Return `ours` / `other`; 1 if both are 0, and 1e9 if only `other` is."""
    return ours / other if other > 0 else 1.0 if ours <= 0 else 1e9


def geometric_mean(values: Sequence[float]) -> float:
    positive = [value for value in values if value > 0]
    return exp(fsum(log(value) for value in positive) / len(positive)) if positive else 1.0
