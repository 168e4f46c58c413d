"""A sweep: the same requests at several rates, and the curves that come of it.

A rate divides the gaps between arrivals: at 2 the same requests come in half the time. A curve is one policy on so many
nodes over all rates: requests finished per second of virtual time against the time to first token, which bends upwards
where the engines are saturated. What saturates first is the policy's doing: a prompt computed twice is capacity lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

from ranvier_py.replay.results import RunResult

RATES_MAX = 64
"""Rates of one sweep. Each is a whole run of every policy."""


class Point(NamedTuple):
    """One rate. Requests per second as they came and as they were finished; seconds."""

    rate: float
    offered_per_s: float
    requests_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    hit_rate: float
    failed: int


class Curve(NamedTuple):
    """One policy over all rates, the lowest first."""

    trace: str
    policy: str
    nodes: int
    points: Sequence[Point]


def curve_json(curve: Curve) -> dict[str, Any]:
    """A curve as JSON has it, its points by name."""
    return {**curve._asdict(), "points": [point._asdict() for point in curve.points]}


def rates_of(text: str) -> tuple[float, ...]:
    """The rates of `rate=0.5,1,2`, ascending and each once. Raises ValueError saying what was expected."""
    name, _, values = text.partition("=")
    try:
        rates = sorted({float(value) for value in values.split(",")})
    except ValueError:
        rates = []
    if name != "rate" or not rates or len(rates) > RATES_MAX or not all(isfinite(rate) and rate > 0 for rate in rates):
        raise ValueError(f"a sweep is rate= and up to {RATES_MAX} positive numbers, as rate=0.5,1,2, not {text!r}")
    return tuple(rates)


def curves(runs: Sequence[RunResult]) -> list[Curve]:
    """A curve for each trace, policy and number of nodes that was run at several rates, in the order of the runs."""
    found: dict[tuple[str, str, int], list[RunResult]] = {}
    for run in runs:
        found.setdefault((run.trace, run.policy, run.nodes), []).append(run)
    return [
        Curve(*name, [point_of(run) for run in sorted(each, key=lambda run: run.rate)])
        for name, each in found.items()
        if len({run.rate for run in each}) > 1
    ]


def point_of(run: RunResult) -> Point:
    return Point(
        run.rate,
        run.offered_per_s,
        run.requests_per_s,
        run.ttft_s["p50"],
        run.ttft_s["p90"],
        run.hit_rate,
        run.failed,
    )
