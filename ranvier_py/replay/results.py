"""The results of runs, as plain values that are JSON as they are: seconds, tokens, and shares from 0 to 1.

Rules: hit rates are the engines' own: of the prompt tokens of all started requests, the share not computed. A time to
first token counts from arrival at the node, queue included; a request that fails later keeps it, and has no `e2e_s`.
Two runs of one plan are equal in everything but `wall_s`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ranvier_py.replay.engine.engine_values import CacheName

SAMPLES_MAX = 120
"""Samples of load that are kept: as many as a chart can show."""

FIRST_STEP_S = 0.25
"""Seconds between two load samples at first; doubled whenever SAMPLES_MAX are reached."""

DIGITS = 6
"""Decimals of times and shares: a microsecond, a millionth."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of one run: one trace, policy, number of nodes and of engines, and rate.

    `nodes` is 0 for oracles, which use no router. `rate` divides the gaps between arrivals. `ttft_s` and `e2e_s` have
    p50, p90, p95, p99 and mean; `ttft_quantiles` the 101 values at 0, 1 … 100 %. `offered_per_s` counts arrivals and
    `requests_per_s` finished requests, per virtual second. `load_over_time` has rows of [seconds since the first
    arrival, requests in flight at each engine …]. `load_cv` and `max_over_mean` are of `requests_by_engine`. `regret_s`
    (`oracles.regret`) has sum, mean, p90 and share_of_ttft; it is empty if it was not asked for. `gossip_packets` and
    `gossip_bytes` are what the real gossip between all nodes sent. `caches`: the kinds of the engines' caches.
    `uneven_share`: the share of the time in which an engine had nothing to do while requests queued at another.
    """

    trace: str
    policy: str
    nodes: int
    engines: int
    rate: float
    seed: int
    requests: int
    failed: int
    failures: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    predicted_hit_rate: float
    ttft_s: Mapping[str, float]
    ttft_quantiles: Sequence[float]
    e2e_s: Mapping[str, float]
    offered_per_s: float
    requests_per_s: float
    load_over_time: Sequence[Sequence[float]]
    requests_by_engine: Sequence[int]
    computed_by_engine: Sequence[int]
    load_cv: float
    max_over_mean: float
    regret_s: Mapping[str, float]
    reasons: Mapping[str, int]
    virtual_s: float
    uneven_share: float = 0.0
    gossip_packets: int = 0
    gossip_bytes: int = 0
    caches: Sequence[CacheName] = ("attention",)
    wall_s: float = field(compare=False, default=0.0)

    @property
    def served(self) -> int:
        """Requests that did not fail. If there are none, no time and no share means anything."""
        return self.requests - self.failed

    @property
    def is_oracle(self) -> bool:
        """Whether an oracle placed the requests."""
        return self.nodes == 0


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A trace as it was replayed. `timed`: False if its times are made up. `span_s`: at rate 1."""

    name: str
    requests: int
    prompt_tokens: int
    answer_tokens: int
    block_tokens: int
    span_s: float
    timed: bool


@dataclass(frozen=True, slots=True)
class ReplayResults:
    """All results of one command. `settings`: what was asked for, as JSON-ready values."""

    settings: Mapping[str, Any]
    traces: Sequence[TraceSummary]
    runs: Sequence[RunResult]

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": dict(self.settings),
            "traces": [asdict(each) for each in self.traces],
            "runs": [asdict(each) for each in self.runs],
        }


class LoadSamples:
    """Evenly spaced samples of the requests in flight at each engine, fewer than SAMPLES_MAX."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._step_s = FIRST_STEP_S
        self._rows: list[tuple[float, ...]] = []
        self.due_at = started_at

    def take(self, now: float, inflight: Sequence[int]) -> None:
        """Take all samples that are due up to `now`. `inflight` must not have changed since the first of them."""
        while self.due_at <= now:
            self._rows.append((round(self.due_at - self._started_at, 3), *inflight))
            if len(self._rows) == SAMPLES_MAX:
                self._rows = self._rows[::2]
                self._step_s *= 2
                self.due_at = self._started_at + len(self._rows) * self._step_s
            else:
                self.due_at += self._step_s

    def rows(self) -> list[list[float]]:
        return [list(row) for row in self._rows]


class Unevenness:
    """Sums the time in which at least one engine has no request while at least one other has requests that wait."""

    def __init__(self, engines: int, started_at: float) -> None:
        self._idle = [True] * engines
        self._queues = [False] * engines
        self._since = started_at
        self.seconds = 0.0

    def note(self, engine: int, running: int, waiting: int, now: float) -> None:
        """Note what an engine has from now on."""
        if any(self._idle) and any(self._queues):
            self.seconds += now - self._since
        self._since = now
        self._idle[engine], self._queues[engine] = not running + waiting, waiting > 0


class Times:
    """Seconds of each request."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.e2e_s: list[float] = []
        self.regret_s: list[float] = []


class Tally:
    """The counts of one run. Its owner updates them; prompt and cached tokens are counted when a request starts."""

    def __init__(self, engines: int, started_at: float) -> None:
        self.requests = 0
        self.failures: dict[str, int] = {}
        self.reasons: dict[str, int] = {}
        self.cached_tokens = 0
        self.placed_tokens = 0  # tokens of all placed prompts; below, how many were predicted to be cached
        self.predicted_tokens = 0
        self.times = Times()
        self.inflight = [0] * engines
        self.requests_by_engine = [0] * engines
        self.computed_by_engine = [0] * engines
        self.samples = LoadSamples(started_at)
        self.unevenness = Unevenness(engines, started_at)
        self.started_at = started_at
        self.ended_at = started_at

    def failed(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def placed(self, engine: int, reason: str, prompt_tokens: int, predicted_tokens: int) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.requests_by_engine[engine] += 1
        self.inflight[engine] += 1
        self.placed_tokens += prompt_tokens
        self.predicted_tokens += predicted_tokens

    def started(self, engine: int, prompt_tokens: int, cached_tokens: int) -> None:
        self.cached_tokens += cached_tokens
        self.computed_by_engine[engine] += prompt_tokens - cached_tokens

    def measures(self, span_s: float) -> dict[str, Any]:
        """Return the fields of a RunResult that are counted. `span_s`: from the first arrival to the last."""
        quantiles, ttft = times_of(self.times.ttft_s)
        prompt_tokens = self.cached_tokens + sum(self.computed_by_engine)
        cv, peak = spread(self.requests_by_engine)
        virtual_s = self.ended_at - self.started_at
        return {
            "requests": self.requests,
            "failed": sum(self.failures.values()),
            "failures": dict(sorted(self.failures.items())),
            "prompt_tokens": prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "hit_rate": share(self.cached_tokens, prompt_tokens),
            "predicted_hit_rate": share(self.predicted_tokens, self.placed_tokens),
            "ttft_s": ttft,
            "ttft_quantiles": quantiles,
            "e2e_s": times_of(self.times.e2e_s)[1],
            "offered_per_s": share(self.requests, span_s),
            "requests_per_s": share(len(self.times.e2e_s), virtual_s),
            "load_over_time": self.samples.rows(),
            "requests_by_engine": list(self.requests_by_engine),
            "computed_by_engine": list(self.computed_by_engine),
            "load_cv": cv,
            "max_over_mean": peak,
            "regret_s": self._regret(),
            "reasons": dict(sorted(self.reasons.items())),
            "virtual_s": round(virtual_s, DIGITS),
            "uneven_share": share(self.unevenness.seconds, virtual_s),
        }

    def _regret(self) -> dict[str, float]:
        regret_s = self.times.regret_s
        if not regret_s:
            return {}
        total = sum(regret_s)
        return {
            "sum": round(total, DIGITS),
            "mean": round(total / len(regret_s), DIGITS),
            "p90": round(float(np.percentile(regret_s, 90)), DIGITS),
            "share_of_ttft": share(total, sum(self.times.ttft_s)),
        }


def times_of(values: Sequence[float]) -> tuple[list[float], dict[str, float]]:
    """Return the 101 quantiles, and p50, p90, p95, p99 and mean; zeros if there are no values."""
    if not values:
        return [0.0] * 101, dict.fromkeys(("p50", "p90", "p95", "p99", "mean"), 0.0)
    quantiles = [round(float(each), DIGITS) for each in np.percentile(values, range(101))]
    found = {f"p{percent}": quantiles[percent] for percent in (50, 90, 95, 99)}
    return quantiles, {**found, "mean": round(sum(values) / len(values), DIGITS)}


def share(part: float, whole: float) -> float:
    return round(part / whole, DIGITS) if whole > 0 else 0.0


def spread(values: Sequence[int]) -> tuple[float, float]:
    """Return the coefficient of variation, and the greatest value over the mean; (0, 1) if all values are equal."""
    mean = sum(values) / len(values)
    if mean == 0:
        return 0.0, 1.0
    deviation = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    return round(deviation / mean, DIGITS), round(max(values) / mean, DIGITS)


def curves(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return, JSON-ready, a curve for each trace, policy and number of nodes that was run at several rates.

    A curve has a point for each rate, ascending: arrivals and finished requests per second, hit rate, failures, and the
    time to first token, which bends upwards where the engines are saturated.
    """
    found: dict[tuple[str, str, int], dict[float, RunResult]] = {}
    for run in runs:
        found.setdefault((run.trace, run.policy, run.nodes), {})[run.rate] = run
    return [
        {"trace": trace, "policy": policy, "nodes": nodes, "points": [point_of(each[rate]) for rate in sorted(each)]}
        for (trace, policy, nodes), each in found.items()
        if len(each) > 1
    ]


def point_of(run: RunResult) -> dict[str, float]:
    return {
        "rate": run.rate,
        "offered_per_s": run.offered_per_s,
        "requests_per_s": run.requests_per_s,
        "ttft_p50_s": run.ttft_s["p50"],
        "ttft_p90_s": run.ttft_s["p90"],
        "hit_rate": run.hit_rate,
        "failed": run.failed,
    }
