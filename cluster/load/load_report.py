"""The report of a load run, by the engines' counts. Pure: it is made from samples.

Every request that was sent ends as ok, failed or cancelled; every planned turn was either sent or counts as not sent.
The hit rate is by the engines' own counts (`cached_tokens` of `prompt_tokens` in `usage`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from cluster.load.answer import Failure

REASONS_MAX = 100
"""Distinct failure reasons that are kept; further ones are summed up as «other reasons»."""

GAPS_MAX = 100_000
"""A p99 of so many drawn values is off by 0.03 points of rank."""

QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Sample:
    """One good answer. Times in seconds; `ttft_s` is None when the answer did not stream."""

    engine: str
    node: str
    total_s: float
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    has_usage: bool = True
    predicted_tokens: int | None = None
    route: str = ""


@dataclass(slots=True)
class FailureGroup:
    """All failures for one reason, with the detail of the first."""

    reason: str
    count: int = 0
    example: str = ""
    nodes: dict[str, int] = field(default_factory=dict)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest rank: the least value that this share of all `values`, which are sorted, does not exceed."""
    if not values:
        return None
    return values[max(0, math.ceil(share * len(values)) - 1)]


class LoadLog:
    """Counts and samples of one run."""

    def __init__(self) -> None:
        self.conversations = 0
        self.planned = 0
        self.not_sent = 0
        self.skipped_conversations = 0
        self.sent = 0
        self.cancelled = 0
        self.failed = 0
        self.samples: list[Sample] = []
        self.failures: dict[str, FailureGroup] = {}
        self.gaps_s: list[float] = []  # between tokens: all, or GAPS_MAX drawn from all
        self._gaps = 0
        self._draw = Random(1)
        self.lags_s: list[float] = []
        """How late each arrival of an open loop was; above a few ms the generator itself is the bottleneck."""

    @property
    def ok(self) -> int:
        return len(self.samples)

    @property
    def in_flight(self) -> int:
        return self.sent - self.ok - self.failed - self.cancelled

    def begin(self, turns: int) -> None:
        self.conversations += 1
        self.planned += turns

    def good(self, sample: Sample, gaps_s: Iterable[float] = ()) -> None:
        self.samples.append(sample)
        for gap_s in gaps_s:
            self._gaps += 1
            if len(self.gaps_s) < GAPS_MAX:
                self.gaps_s.append(gap_s)
            elif (place := self._draw.randrange(self._gaps)) < GAPS_MAX:
                self.gaps_s[place] = gap_s

    def bad(self, failure: Failure, node: str) -> None:
        self.failed += 1
        reason = failure.reason
        if reason not in self.failures and len(self.failures) >= REASONS_MAX:
            reason = "other reasons"
        group = self.failures.setdefault(reason, FailureGroup(reason, example=failure.detail))
        group.count += 1
        group.nodes[node or "no node"] = group.nodes.get(node or "no node", 0) + 1


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the good answers that one engine or node gave."""

    name: str
    requests: int
    share: float
    hit_rate: float | None


class Report:
    """The outcome of a run beside the counts in its log; `as_json` is its stable form. Times are in seconds, None where
    nothing was measured. May be made during a run: requests in flight count in `sent` only."""

    def __init__(self, log: LoadLog, duration_s: float) -> None:
        samples = log.samples
        predicted = [one.predicted_tokens for one in samples if one.predicted_tokens is not None]
        self.log = log
        self.duration_s = duration_s
        self.requests_per_s = log.ok / duration_s if duration_s > 0 else 0.0
        self.prompt_tokens = sum(one.prompt_tokens for one in samples)
        self.cached_tokens = sum(one.cached_tokens for one in samples)
        self.hit_rate = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None
        self.completion_tokens = sum(one.completion_tokens for one in samples)
        self.without_usage = sum(not one.has_usage for one in samples)
        self.predicted_tokens = sum(predicted) if predicted else None
        self.ttft_s = quantiles(one.ttft_s for one in samples if one.ttft_s is not None)
        self.total_s = quantiles(one.total_s for one in samples)
        self.inter_token_s = quantiles(log.gaps_s)
        self.lag_s = quantiles(log.lags_s)
        self.engines = shares((one.engine, one) for one in samples)
        self.nodes = shares((one.node, one) for one in samples)
        self.routes = dict(Counter(one.route for one in samples if one.route).most_common())
        self.failures = sorted(log.failures.values(), key=lambda one: -one.count)

    def as_json(self) -> dict[str, Any]:
        return {
            "duration_s": round(self.duration_s, 3),
            "requests_per_s": round(self.requests_per_s, 3),
            "conversations": {"begun": self.log.conversations, "skipped": self.log.skipped_conversations},
            "requests": {
                name: getattr(self.log, name) for name in ("planned", "not_sent", "sent", "ok", "failed", "cancelled")
            },
            "tokens": {
                "prompt": self.prompt_tokens,
                "cached": self.cached_tokens,
                "completion": self.completion_tokens,
                "predicted_cached": self.predicted_tokens,
                "answers_without_usage": self.without_usage,
            },
            "hit_rate": self.hit_rate,
            "ttft_s": self.ttft_s,
            "total_s": self.total_s,
            "inter_token_s": self.inter_token_s,
            "arrival_lag_s": self.lag_s,
            "engines": {one.name: share_json(one) for one in self.engines},
            "nodes": {one.name: share_json(one) for one in self.nodes},
            "routes": self.routes,
            "failures": [asdict(one) for one in self.failures],
        }


def share_json(share: Share) -> dict[str, Any]:
    return {"requests": share.requests, "share": share.share, "hit_rate": share.hit_rate}


def quantiles(values: Iterable[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    return {f"p{share * 100:g}": quantile(ordered, share) for share in QUANTILES}


def shares(pairs: Iterable[tuple[str, Sample]]) -> tuple[Share, ...]:
    """Return requests and hit rate by name, sorted by name."""
    sums: dict[str, tuple[int, int, int]] = {}
    for name, one in pairs:
        requests, prompt, cached = sums.get(name, (0, 0, 0))
        sums[name] = requests + 1, prompt + one.prompt_tokens, cached + one.cached_tokens
    total = sum(requests for requests, _, _ in sums.values())
    return tuple(
        Share(name, requests, requests / total, cached / prompt if prompt else None)
        for name, (requests, prompt, cached) in sorted(sums.items())
    )
