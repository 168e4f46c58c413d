"""Says in sentences what a replay found, and writes its figures as text, for the table and for the report.

Rules: a policy competes only if it served about as many requests as the others; oracles never compete. A p90 that is
less than CLOSE above another counts as equally good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from ranvier_py.core.findings import counted
from ranvier_py.replay.results import RunResult, TraceSummary

BASELINES = ("least_loaded", "round_robin", "random", "power_of_two")
"""Load balancers that know nothing of caches. Gains are measured against the first of them that was run."""

SERVED_SHARE = 0.95
"""A policy kept up if this share of its run took no longer than the span of arrivals plus the time of an answer."""

FAILED_SHARE_MAX = 0.01
"""A policy competes if its share of failed requests exceeds the least such share by no more than this."""

CLOSE = 0.03
"""Relative difference of p90s that another seed causes as well."""

AS_RECORDED = 1.0
"""The rate at which requests come as they came."""

ENOUGH = 300
"""Requests from which on the slowest tenth is more than chance."""

BELIEF_SHARE = 0.03
"""Share of the prompt tokens by which a router's predictions may be wrong without being reported."""

WHY = MappingProxyType(
    {
        "queue_full": "by a full queue (queue_full)",
        "prompt_too_long": "because prompt and answer are longer than an engine's cache (prompt_too_long)",
        "engine_restarted": "by a restart (engine_restarted)",
        "no_engine": "for want of an engine (no_engine)",
    }
)
"""The reasons in `RunResult.failures`, in words."""


class Shown(NamedTuple):
    """The runs that charts and sentences are about; `at` says which, if not all. `nodes`, `rates`: of all runs."""

    runs: Sequence[RunResult]
    at: str
    nodes: Sequence[int]
    rates: Sequence[float]


def shown_of(runs: Sequence[RunResult]) -> Shown:
    """Choose the runs with the fewest nodes and those of oracles, of the traffic as it was recorded; without such runs
    those at the highest rate that some policy kept up with."""
    nodes = sorted({run.nodes for run in runs if not run.is_oracle}) or [0]
    rates = sorted({run.rate for run in runs})
    rate = AS_RECORDED if AS_RECORDED in rates else busiest(runs, rates)
    at = f" at rate {rate:g}" if len(rates) > 1 else ""
    at += " (as recorded)" if at and rate == AS_RECORDED else ""
    at += f" with {counted(nodes[0], 'node')}" if len(nodes) > 1 else ""
    return Shown([run for run in runs if run.rate == rate and run.nodes in (0, nodes[0])], at, nodes, rates)


def busiest(runs: Sequence[RunResult], rates: Sequence[float]) -> float:
    """Return the highest rate that some policy kept up with, else the lowest: beyond it charts show only queues."""
    kept = rates_kept(runs)
    return next((rate for rate in reversed(rates) if rate in kept), rates[0])


def rates_kept(runs: Sequence[RunResult]) -> set[float]:
    """Return the rates at which some policy served requests as fast as they came."""
    real = [run for run in runs if run.served and not run.is_oracle]
    rest_s = min((run.e2e_s["p99"] for run in real), default=0.0)  # arrivals end before the last answers do
    return {
        run.rate
        for run in real
        if run.offered_per_s == 0.0  # all arrived at once
        or SERVED_SHARE * run.served <= run.requests_per_s * (run.requests / run.offered_per_s + rest_s)
    }


def about(trace: TraceSummary, run: RunResult) -> str:
    timed = "" if trace.timed else " Its times are made up, since the file has none."
    return (
        f"{counted(trace.requests, 'request')} within {duration(trace.span_s)}, {trace.prompt_tokens:,} prompt tokens "
        f"and {trace.answer_tokens:,} of answers, on {counted(run.engines, 'engine')}.{timed}"
    )


def findings(runs: Sequence[RunResult]) -> list[str]:
    """Return the sentences about all runs of one trace."""
    shown = shown_of(runs)
    real = comparable(shown.runs)
    if not real:
        return [nobody(shown.runs), *failures(runs)]
    best = min(real, key=p90)
    found = [
        *leader(best, real, shown.at),
        *against_baseline(best, real),
        *against_oracle(best, shown.runs),
        *over_rates(runs, shown),
        *over_nodes(best, runs),
        *beliefs(best),
    ]
    return [*found, *failures(runs), *caution(best), *advice(best, real, shown.at)]


def p90(run: RunResult) -> float:
    return run.ttft_s["p90"]


def leader(best: RunResult, real: Sequence[RunResult], at: str) -> Iterator[str]:
    if len(real) > 1 and all(p90(run) == p90(best) for run in real):
        yield f"All policies have the same p90 to the first token{at}: {duration(p90(best))}."
    else:
        yield f"Least p90 to the first token{at}: {best.policy}, {duration(p90(best))}."


def against_baseline(best: RunResult, real: Sequence[RunResult]) -> Iterator[str]:
    base = next((run for name in BASELINES for run in real if run.policy == name), None)
    if base is not None and base is not best:
        yield (
            f"Against {base.policy} that is {change(p90(best), p90(base))} at p90 and "
            f"{change(best.ttft_s['p50'], base.ttft_s['p50'])} at p50, with {percent(best.hit_rate)} of the prompt "
            f"tokens found instead of {percent(base.hit_rate)}."
        )


def against_oracle(best: RunResult, shown: Sequence[RunResult]) -> Iterator[str]:
    oracle = next((run for run in shown if run.policy == "oracle_ttft"), None)
    if oracle is not None and oracle.served:
        yield (
            f"A router that knew the engines' caches and queues (oracle_ttft) would reach {duration(p90(oracle))}: "
            f"{best.policy} has {change(p90(best), p90(oracle))}."
        )


def over_rates(runs: Sequence[RunResult], shown: Shown) -> Iterator[str]:
    """Say which policy is the best at which rate, and from which rate on no policy keeps up."""
    if len(shown.rates) < 2:
        return
    winners = []
    for rate in shown.rates:
        real = comparable(run for run in runs if run.rate == rate and run.nodes == shown.nodes[0])
        if real:
            winners.append((min(real, key=p90).policy, rate))
    if len({policy for policy, _ in winners}) > 1:
        by_rate = [
            f"{policy} at {', '.join(f'{rate:g}' for _, rate in group)}"
            for policy, group in groupby(winners, key=lambda each: each[0])
        ]
        yield f"The best changes with the rate: {'; '.join(by_rate)}."
    kept = rates_kept(runs)
    above = [rate for rate in shown.rates if rate not in kept]
    if above:
        yield f"From rate {above[0]:g} on no policy serves requests as fast as they come: that takes more engines."


def over_nodes(best: RunResult, runs: Sequence[RunResult]) -> Iterator[str]:
    """Compare the best policy's runs on more nodes with its run on the fewest."""
    for run in runs:
        if run.policy == best.policy and run.rate == best.rate and run.nodes > best.nodes > 0 and run.served:
            yield (
                f"{best.policy} on {counted(run.nodes, 'node')} instead of {best.nodes}: {duration(p90(run))} "
                f"instead of {duration(p90(best))}, {percent(run.hit_rate)} of the prompt tokens found."
            )


def reason_of(run: RunResult, wrong: float) -> str:
    """Return why a router predicted more cached tokens than there were (`wrong` above 0), or fewer."""
    if wrong < 0:
        return "it learned too little of answers or peers."
    if {*run.caches} != {"attention"}:
        return "they reuse a prefix only where they kept a checkpoint of it."
    return "the caches are smaller than the traffic."


def beliefs(best: RunResult) -> Iterator[str]:
    wrong = best.predicted_hit_rate - best.hit_rate
    if abs(wrong) > BELIEF_SHARE:
        less = "more" if wrong > 0 else "less"
        yield (
            f"{best.policy} believed {percent(abs(wrong))} of the prompt tokens {less} to be cached than were: "
            + reason_of(best, wrong)
        )


def caution(best: RunResult) -> Iterator[str]:
    if best.served < ENOUGH:
        few = counted(best.served - int(best.served * 0.9), "request")
        yield f"Only {counted(best.served, 'request')}: the p90 hangs on {few}. Replay more traffic before you decide."


def advice(best: RunResult, real: Sequence[RunResult], at: str) -> Iterator[str]:
    """Say which policy to use. No advice if only one policy was run."""
    close = [run.policy for run in real if run is not best and p90(run) <= p90(best) * (1 + CLOSE)]
    if close:
        yield f"What to do{at}: {best.policy} or {' or '.join(close)}, they are as good: ranvier serve --policy NAME."
    elif len(real) > 1:
        yield f"What to do{at}: ranvier serve --policy {best.policy}."


def comparable(runs: Iterable[RunResult]) -> list[RunResult]:
    """Return the runs of policies that served requests, and about as many as the others (FAILED_SHARE_MAX)."""
    served = [run for run in runs if run.served and not run.is_oracle]
    fewest = min((run.failed / run.requests for run in served), default=0.0)
    return [run for run in served if run.failed / run.requests <= fewest + FAILED_SHARE_MAX]


def nobody(shown: Sequence[RunResult]) -> str:
    """Return why there is nothing to compare."""
    if any(not run.is_oracle for run in shown):
        return "No policy served a request."
    return "Only oracles were run: they are bounds, and no router can do what they do."


def failures(runs: Sequence[RunResult]) -> list[str]:
    """Say why requests failed, added up over all runs, and which run has the most failures."""
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run.failures)
    if not total:
        return []
    why = ", ".join(f"{count:,} {WHY.get(reason, reason)}" for reason, count in sorted(total.items()))
    worst = max(runs, key=lambda run: run.failed)
    return [f"Failed, in all runs: {why}; most with {worst.policy} at rate {worst.rate:g}: {worst.failed:,}."]


def duration(seconds: float) -> str:
    """Return a time with its unit, from milliseconds to days, with about three digits."""
    for unit_s, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:,.0f} {unit}"
    if seconds >= 1.0:
        return f"{seconds:.1f} s" if seconds >= 10.0 else f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2g} ms" if 0.0 < seconds < 0.001 else f"{seconds * 1e3:.0f} ms"


def percent(value: float) -> str:
    return f"{value:.1%}"


def change(now: float, before: float) -> str:
    """Compare `now` with `before`, as «12% less»."""
    if before <= 0:
        return "no different"
    part = now / before - 1
    return "as much" if abs(part) < 0.005 else f"{abs(part):.0%} {'less' if part < 0 else 'more'}"
