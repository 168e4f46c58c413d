"""The prefixes of a route table that were used last, as a map shows them: fingerprints, depths, holders; never a text.

Made in steps, each for so many rows, so that no request waits for long; what changes between them may be missing.
Rule: all that stands above a prefix of the map is in it, too. Bound: ROUTES_MAX prefixes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt

from ranvier_py.core.routing.route_table.route_values import Numbers
from ranvier_py.core.routing.route_table.rows import SHARED
from ranvier_py.core.routing.route_table.table import RouteTable

ROUTES_MAX = 10_000
STEP_ROWS, STEP_NAMES = 1 << 16, 2000

HALF_S = 300.0
"""The heat of a prefix falls by half for each such time without a use."""

Bits = npt.NDArray[np.bool_]


def prefix_map(table: RouteTable, now: float, routes_max: int = ROUTES_MAX) -> Generator[None, None, dict[str, Any]]:
    """Return columns with one element for each prefix: `parent` is the place of the one above it, -1 at the top."""
    found, used = np.zeros(0, np.int64), np.zeros(0, np.int32)
    start = 1
    while start < table.rows.top:
        found, used = latest(table, start, found, used, routes_max)
        start += STEP_ROWS
        yield
    chosen = with_ancestors(table, found[np.argsort(-used, kind="stable")], routes_max)
    columns = columns_of(table, chosen, now)
    fingerprints, names = columns.pop("fingerprint").tolist(), list[str]()
    for start in range(0, len(fingerprints), STEP_NAMES):
        yield
        names += [f"{number:016x}" for number in fingerprints[start : start + STEP_NAMES]]
    return {"routes": len(table), **columns, "name": names}


def latest(
    table: RouteTable, start: int, found: Numbers, used: npt.NDArray[np.int32], most: int
) -> tuple[Numbers, npt.NDArray[np.int32]]:
    """Return the rows that were used last among those found so far and the next ones, and when."""
    end = min(start + STEP_ROWS, table.rows.top)
    placed = np.flatnonzero(np.frombuffer(table.rows.parent, np.int32)[start:end] >= 0) + start
    found = np.concatenate((found, placed))
    used = np.concatenate((used, np.frombuffer(table.rows.used, np.int32)[placed]))
    if len(found) > most:
        kept = np.argpartition(-used, most)[:most]
        found, used = found[kept], used[kept]
    return found, used


def with_ancestors(table: RouteTable, found: Numbers, most: int) -> Numbers:
    """Return as many of the first rows as fit with all that stands above them, ascending."""
    parent = np.frombuffer(table.rows.parent, np.int32)
    found = found[parent[found] >= 0]  # a row may have been freed since
    while True:
        known: Bits = np.zeros(len(parent), bool)
        above = found
        while len(above):
            known[above] = True
            above = np.unique(parent[above])
            above = above[(above > 0) & ~known[above]]
        chosen = np.flatnonzero(known)
        if len(chosen) <= most:
            return chosen
        found = found[: min(len(found) * most // len(chosen), len(found) * 7 // 8)]  # few rounds fit it


def columns_of(table: RouteTable, chosen: Numbers, now: float) -> dict[str, Any]:
    rows = table.rows
    place = np.full(len(rows.parent), -1, np.int32)
    place[chosen] = np.arange(len(chosen))
    token, text = (np.frombuffer(column, np.uint64)[chosen] for column in (rows.token, rows.text))
    idle = np.maximum(0, int(now) - np.frombuffer(rows.used, np.int32)[chosen])
    return {
        "parent": place[np.frombuffer(rows.parent, np.int32)[chosen]],
        "tokens": np.frombuffer(rows.tokens, np.uint32)[chosen],
        "holders": holders_of(table, chosen),
        "heat": np.round(0.5 ** (idle / HALF_S), 4),
        "idle_s": idle,
        "fingerprint": np.where(token != 0, token, text),
    }


def holders_of(table: RouteTable, chosen: Numbers) -> npt.NDArray[np.int32]:
    """Return how many backends have a claim for each row."""
    first = np.frombuffer(table.rows.backend, np.int16)[chosen] >= 0
    counts = first.astype(np.int32)
    shared = np.flatnonzero(np.frombuffer(table.rows.flags, np.uint8)[chosen] & SHARED)
    for at in shared.tolist():
        counts[at] += len(table.claims.others.get(int(chosen[at]), ()))
    return counts
