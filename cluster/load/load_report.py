"""What came of a load run, by engine truth. Pure: samples in, a report out.

Nothing is lost: every request that was begun ends as ok, failed or cancelled, and `sent` is their sum plus what is
still in flight. Every turn that was planned was either sent or is counted as not sent. Hit rate is what the engines
themselves say (`cached_tokens` of `prompt_tokens` in `usage`), never what a router hoped for.

"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.load.answer import Failure

REASONS_MAX = 100
"""Distinct failure reasons kept; a server with more kinds of errors is summed up as «other reasons»."""

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
    """All failures for one reason, with the first one's own words."""

    reason: str
    count: int = 0
    example: str = ""
    nodes: dict[str, int] = field(default_factory=dict)


class LogHistogram:
    """Counts in buckets that grow by 5 %, from 10 µs to 1,000 s: percentiles within 5 % in 400 numbers."""

    FIRST_S = 1e-5
    GROWTH = 1.05
    BUCKETS = 400

    def __init__(self) -> None:
        self.counts = [0] * self.BUCKETS
        self.total = 0

    def add(self, value_s: float) -> None:
        place = 0 if value_s <= self.FIRST_S else int(math.log(value_s / self.FIRST_S, self.GROWTH)) + 1
        self.counts[min(place, self.BUCKETS - 1)] += 1
        self.total += 1

    def quantile(self, share: float) -> float | None:
        """Upper edge of the bucket that holds this share of all values."""
        rank = math.ceil(share * self.total)
        seen = 0
        for place, count in enumerate(self.counts):
            seen += count
            if count and seen >= rank:
                return self.FIRST_S * self.GROWTH**place
        return None


def quantile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank: the smallest value that at least this share of all values do not exceed. `values` are sorted."""
    if not values:
        return None
    return values[max(0, math.ceil(share * len(values)) - 1)]


class LoadLog:
    """Everything that came of one run."""

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
        self.gaps = LogHistogram()
        self.lags_s: list[float] = []
        """How late each arrival of an open loop was: above a few ms the generator itself is the bottleneck."""

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
        for gap in gaps_s:
            self.gaps.add(gap)

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
    """What one engine or node got of the good answers."""

    name: str
    requests: int
    share: float
    hit_rate: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a run; `as_json` is its stable form. Times in seconds, None where nothing was measured."""

    duration_s: float
    conversations: int
    skipped_conversations: int
    planned: int
    not_sent: int
    sent: int
    ok: int
    failed: int
    cancelled: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    without_usage: int
    predicted_tokens: int | None
    ttft_s: dict[str, float | None]
    total_s: dict[str, float | None]
    inter_token_s: dict[str, float | None]
    lag_s: dict[str, float | None]
    engines: tuple[Share, ...]
    nodes: tuple[Share, ...]
    routes: dict[str, int]
    failures: tuple[FailureGroup, ...]

    @property
    def hit_rate(self) -> float | None:
        """Share of all prompt tokens that the engines took from their caches; None before any usage was reported."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def requests_per_s(self) -> float:
        return self.ok / self.duration_s if self.duration_s > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "duration_s": round(self.duration_s, 3),
            "requests_per_s": round(self.requests_per_s, 3),
            "conversations": {"begun": self.conversations, "skipped": self.skipped_conversations},
            "requests": {
                "planned": self.planned,
                "not_sent": self.not_sent,
                "sent": self.sent,
                "ok": self.ok,
                "failed": self.failed,
                "cancelled": self.cancelled,
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
            "failures": [
                {"reason": one.reason, "count": one.count, "example": one.example, "nodes": one.nodes}
                for one in self.failures
            ],
        }


def share_json(share: Share) -> dict[str, Any]:
    return {"requests": share.requests, "share": share.share, "hit_rate": share.hit_rate}


def report(log: LoadLog, duration_s: float) -> Report:
    """Sum up. May be called while the run goes on: what is in flight then is in `sent` only."""
    samples = log.samples
    predicted = [one.predicted_tokens for one in samples if one.predicted_tokens is not None]
    return Report(
        duration_s=duration_s,
        conversations=log.conversations,
        skipped_conversations=log.skipped_conversations,
        planned=log.planned,
        not_sent=log.not_sent,
        sent=log.sent,
        ok=log.ok,
        failed=log.failed,
        cancelled=log.cancelled,
        prompt_tokens=sum(one.prompt_tokens for one in samples),
        cached_tokens=sum(one.cached_tokens for one in samples),
        completion_tokens=sum(one.completion_tokens for one in samples),
        without_usage=sum(not one.has_usage for one in samples),
        predicted_tokens=sum(predicted) if predicted else None,
        ttft_s=quantiles(one.ttft_s for one in samples if one.ttft_s is not None),
        total_s=quantiles(one.total_s for one in samples),
        inter_token_s={quantile_name(share): log.gaps.quantile(share) for share in QUANTILES},
        lag_s=quantiles(log.lags_s),
        engines=shares((one.engine, one) for one in samples),
        nodes=shares((one.node, one) for one in samples),
        routes=counts(one.route for one in samples if one.route),
        failures=tuple(sorted(log.failures.values(), key=lambda one: -one.count)),
    )


def quantile_name(share: float) -> str:
    return f"p{share * 100:g}"


def quantiles(values: Iterable[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    return {quantile_name(share): quantile(ordered, share) for share in QUANTILES}


def counts(words: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:
        found[word] = found.get(word, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def shares(pairs: Iterable[tuple[str, Sample]]) -> tuple[Share, ...]:
    """Requests and hit rate by name, in the order of names."""
    sums: dict[str, tuple[int, int, int]] = {}
    for name, one in pairs:
        requests, prompt, cached = sums.get(name, (0, 0, 0))
        sums[name] = requests + 1, prompt + one.prompt_tokens, cached + one.cached_tokens
    total = sum(requests for requests, _, _ in sums.values())
    return tuple(
        Share(name, requests, requests / total, cached / prompt if prompt else None)
        for name, (requests, prompt, cached) in sorted(sums.items())
    )
