"""Does Marconi's simulator give every reference integer on our traces, and how do the paper's figures look with them?

`python -m benchmarks.marconi [--quick]`

The traces (`workloads/hybrid_traces.py`) are drawn from seeds and resemble the paper's sets, but are not those sets.
Figures that the paper gives for its own traces are shown with ours and cannot be verified here.

The processor time is spread over walks, insertions, weights and evictions, none of which visits all nodes. It could
fall to a fifth if several processes did the tuning's replays (9 tenths of it, and independent) and an insertion did one
walk instead of two; to gain more would take a compiled tree.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness.bench import RESULTS, command_line, finish, show, show_row
from benchmarks.harness.block_states import BlockStates
from benchmarks.harness.endless_checkpoints import CHECKPOINT_PROFILES, EndlessCheckpoints
from benchmarks.harness.marconi_figures import GB, Requests, figures, requests_of
from benchmarks.harness.marconi_page import page
from benchmarks.harness.marconi_reference import (
    BOOTSTRAP,
    CASES,
    CREDITED,
    CURVES,
    FIRST_EVICTION,
    INSIDE,
    PROFILES,
    REPAIRED_CASES,
    RETUNED_ALPHAS_OF_LMSYS,
    RETUNED_HITS,
    SINGLE_REPAIRS,
    SIZE_GB,
    STATIC_OF_WIDER,
    WIDER,
    Case,
    Tuned,
    Wider,
)
from benchmarks.harness.trace_caches import TraceRun, TreeOfTrace, run
from benchmarks.workloads.hybrid_traces import DIGESTS, TRACES, digest, trace
from ranvier_py.replay.hybrid.alpha_search import ALPHAS, Retuned, TunedOnce, saved_flops
from ranvier_py.replay.hybrid.hybrid_model import PAPER_7B
from ranvier_py.replay.hybrid.state_tree import COMPAT, REPAIRED, Defects, EvictionRule, StateTree

QUICK = ("sharegpt", "rag")
RETUNED_EVERY = (100, 200)

Row = Mapping[str, Any]


def tree_of(
    rule: EvictionRule,
    gigabytes: float,
    *,
    alpha: float = 0.0,
    defects: Defects = COMPAT,
) -> StateTree:
    return StateTree(PAPER_7B, int(gigabytes * GB), rule, alpha=alpha, defects=defects)


def row_of(kind: str, name: str, expected: object, found: object, **more: object) -> Row:
    return {"kind": kind, "trace": name, "expected": expected, "found": found, "equal": expected == found, **more}


def inside_of(cache: StateTree | BlockStates, tokens: int, found: TraceRun) -> tuple[int, int, int, str]:
    """Return the state that a cache ends in, as `Inside`, with the operations as text of seven digits."""
    return cache.clock, cache.nodes, tokens, f"{saved_flops(cache.model, found.reused):.6e}"


def inside_row(name: str, kind: str, found: tuple[int, int, int, str]) -> Row:
    expected = INSIDE[name, kind]
    return row_of(f"{kind} inside", name, [*expected[:3], f"{expected.saved:.6e}"], list(found))


def case_rows(case: Case, requests: Requests, *, inside: bool) -> Iterator[Row]:
    """Yield rows of the published caches at one capacity; with `inside`, also of the state that they end in."""
    name, size = case.trace, case.capacity_gb
    at = {"capacity_gb": size}
    if case.vllm_plus is not None:
        blocks = BlockStates(PAPER_7B, size * GB)
        ran = run(blocks, requests)
        yield row_of("vllm_plus", name, case.vllm_plus, ran.reused_tokens, **at, hit_rate=ran.hit_rate)
        if inside:
            yield inside_row(name, "vllm_plus", inside_of(blocks, blocks.tokens, ran))
    tree = tree_of("lru", size)
    ran = run(TreeOfTrace(tree), requests)
    yield row_of("sglang_plus", name, case.sglang_plus, ran.reused_tokens, **at, hit_rate=ran.hit_rate)
    if inside:
        yield inside_row(name, "sglang_plus", inside_of(tree, tree.symbols, ran))
    tree, tuner, ran = marconi(name, size, COMPAT, requests)
    found = [ran.reused_tokens, tree.alpha, tuner.tuned_at]
    yield row_of("marconi", name, list(case.marconi), found, **at, hit_rate=ran.hit_rate)
    if inside:
        yield inside_row(name, "marconi", inside_of(tree, tree.symbols, ran))
        expected = [FIRST_EVICTION[name], BOOTSTRAP[name] * FIRST_EVICTION[name]]
        yield row_of("first eviction and window", name, expected, [tuner.first_eviction, tuner.window])


def marconi(name: str, gigabytes: float, defects: Defects, requests: Requests) -> tuple[StateTree, TunedOnce, TraceRun]:
    tree, tuner = tree_of("utility", gigabytes, defects=defects), TunedOnce(BOOTSTRAP[name])
    return tree, tuner, run(TreeOfTrace(tree, tuner), requests)


def tuned_row(kind: str, name: str, expected: Tuned, defects: Defects, requests: Requests) -> Row:
    tree, _, ran = marconi(name, SIZE_GB[name], defects, requests)
    found = [ran.reused_tokens, tree.alpha]
    return row_of(kind, name, [expected.reused, expected.alpha], found, hit_rate=ran.hit_rate)


def repair_rows(name: str, requests: Requests) -> Iterator[Row]:
    """Yield a row with all defects repaired, then one for each that is repaired alone."""
    yield tuned_row("repaired", name, REPAIRED_CASES[name], REPAIRED, requests)
    for defect, expected in SINGLE_REPAIRS.get(name, {}).items():
        yield tuned_row(f"{defect} repaired", name, expected, replace(COMPAT, **{defect: False}), requests)


def curve_row(name: str, requests: Requests) -> Row:
    """Return a row of the tokens reused under each static alpha."""
    found = [
        run(TreeOfTrace(tree_of("utility", SIZE_GB[name], alpha=alpha)), requests).reused_tokens for alpha in ALPHAS
    ]
    return row_of("static alpha", name, list(CURVES[name]), found)


def retuned_rows(name: str, requests: Requests) -> Iterator[Row]:
    for every in RETUNED_EVERY:
        tuner = Retuned(every)
        rate = round(run(TreeOfTrace(tree_of("utility", SIZE_GB[name]), tuner), requests).hit_rate, 4)
        yield row_of(f"retuned every {every}", name, RETUNED_HITS[name][every], rate)
        if (name, every) == ("lmsys", 100):
            yield row_of("its alphas", name, list(RETUNED_ALPHAS_OF_LMSYS), tuner.alphas)


def profile_rows(name: str, requests: Requests) -> Iterator[Row]:
    """Yield rows of an unbounded cache under each engine's rule, with a router's credit if it knows only attention."""
    column = list(TRACES).index(name)
    for kind, expected in PROFILES.items():
        cache = EndlessCheckpoints(CHECKPOINT_PROFILES[kind])
        ran = run(cache, requests)
        shares = round(cache.written / len(requests), 2), round(cache.in_vain / cache.worth, 3)
        credited = round(cache.credited / sum(ran.prompts), 4)
        yield row_of(
            f"profile {kind}",
            name,
            [*expected[column], *CREDITED[name]],
            [ran.reused_tokens, *shares, cache.credited, cache.worth],
            hit_rate=ran.hit_rate,
            credited=credited,
        )


def wider_row(case: Wider) -> Row:
    """Return a row of hit rates with other arrivals and sizes."""
    requests, size = requests_of(case.shape), case.capacity_gb
    blocks = run(BlockStates(PAPER_7B, size * GB), requests)
    recent = run(TreeOfTrace(tree_of("lru", size)), requests)
    tree = tree_of("utility", size)
    tuned = run(TreeOfTrace(tree, TunedOnce(case.bootstrap)), requests)
    static = run(TreeOfTrace(tree_of("utility", size, alpha=STATIC_OF_WIDER)), requests)
    found = [round(each.hit_rate, 4) for each in (blocks, recent, tuned, static)]
    return row_of(f"wider sweep, {case.shape.title}", case.shape.name, [*case.hits, case.alpha], [*found, tree.alpha])


def timed_row(requests: Requests) -> Row:
    """Return the processor time of Marconi on the agents' trace, tuning included."""
    began = time.process_time()
    marconi("swebench", SIZE_GB["swebench"], COMPAT, requests)
    return {"kind": "processor time", "trace": "swebench", "goal_s": 25.0, "s": round(time.process_time() - began, 2)}


def tables(name: str) -> Iterator[Row]:
    """Yield the rows of all references of one trace."""
    yield row_of("sha256", name, DIGESTS[name], digest(trace(TRACES[name])))
    requests = requests_of(TRACES[name])
    for case in CASES:
        if case.trace == name:
            yield from case_rows(case, requests, inside=case.capacity_gb == SIZE_GB[name])
    yield from repair_rows(name, requests)
    if name in CURVES:
        yield curve_row(name, requests)
    yield from retuned_rows(name, requests)
    yield from profile_rows(name, requests)
    yield from (wider_row(case) for case in WIDER if case.shape.name == name)
    if name == "swebench":
        yield timed_row(requests)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, quick=f"the tables of {' and '.join(QUICK)} alone")
    arguments: argparse.Namespace = parser.parse_args(argv)
    rows = []
    for name in QUICK if arguments.quick else TRACES:
        for row in tables(name):
            show_row(row)
            rows.append(row)
    differ = [row for row in rows if not row.get("equal", True)]
    result: dict[str, Any] = {"checked": sum("equal" in row for row in rows), "differ": differ}
    if not arguments.quick:
        result["figures"] = list(figures())
    code = finish("marconi", arguments, result, rows=rows)
    if not (arguments.dry or arguments.quick):
        write_page()
    return code


def write_page() -> None:
    """Write the page of the result file."""
    (RESULTS / "marconi.html").write_text(page(json.loads((RESULTS / "marconi.json").read_text())))
    show(f"wrote {RESULTS / 'marconi.html'}")


if __name__ == "__main__":
    sys.exit(main())
