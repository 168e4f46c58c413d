"""benchmarks/README.md out of benchmarks/results/: every measured row, its goal, and what misses it.

    python -m benchmarks.report

A function for each result file turns it into rows; a test holds the page to the files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.harness.bench import RESULTS, ROOT, show

PAGE = ROOT / "benchmarks" / "README.md"
SMG, SGLANG, NODE = "smg 1.13.0", "sglang-router 0.3.2", "ranvier_py"

Result = Mapping[str, Any]


class Row(NamedTuple):
    """What was asked, what came of it, and the goal where there is one; `met` is None where there is none."""

    question: str
    figure: str
    goal: str = ""
    met: bool | None = None


def hit_rate(result: Result) -> Iterator[Row]:
    for trace in result["traces"]:
        runs: dict[str, list[Any]] = {}
        for run in trace["runs"]:
            runs.setdefault(run["policy"], []).append(run)
        large, small = (each[:2] for each in (runs["affinity"], runs["round_robin"]))
        (goal,) = [each for each in result["goals"] if each["trace"] == trace["trace"]]
        yield Row(
            f"{trace['trace']} over 8 engines: hit rate with large caches / with {large[1]['cache_tokens']:,} tokens",
            f"`affinity` {large[0]['hit_rate']:.1%} / {large[1]['hit_rate']:.1%}, round-robin "
            f"{small[0]['hit_rate']:.1%} / {small[1]['hit_rate']:.1%}; greedy with perfect knowledge, which counts no "
            f"answers, {trace['reference']['greedy']:.1%}",
            "95 % of greedy",
            goal["reached"],
        )


def data_plane(result: Result) -> Iterator[Row]:
    compared, cases = result["compared"], result["cases"]
    for case, goals in (
        ("chat_3kB", (1, 1)),
        ("chat_60kB", (1, 1)),
        *((each, (2, 5)) for each in cases if "stream" in each),
    ):
        ratios = [compared[case][f"times {name}"] for name in (SMG, SGLANG)]
        yield Row(
            f"{case}: requests/s at 16 connections",
            f"{ratios[0]} x {SMG}, {ratios[1]} x {SGLANG}, {compared[case]['times direct']} x no router",
            f"{goals[0]} x and {goals[1]} x",
            all(ratio >= goal for ratio, goal in zip(ratios, goals, strict=True)),
        )
    names, used = (NODE, SMG, SGLANG), {"chat_3kB": 130, "chat_60kB": 240, "stream_100_chunks": 220}
    for case, goal_us in used.items():
        spent = [cases[case][name]["processor_us"] for name in names]
        others = ", ".join(f"{name} {us:.0f}" for name, us in zip(names[1:], spent[1:], strict=True))
        yield Row(
            f"{case}: processor time of a request", f"{spent[0]:.0f} µs; {others}", f"{goal_us} µs", spent[0] <= goal_us
        )
    for key, shown in (("p50_us", "p50"), ("p99_us", "p99")):
        added = [compared["added_latency_us"][name][key] for name in names]
        others = ", ".join(f"{name} {us:.0f}" for name, us in zip(names[1:], added[1:], strict=True))
        yield Row(
            f"one connection: added latency, {shown}",
            f"{added[0]:.0f} µs; {others}",
            "below both",
            added[0] < min(added[1:]),
        )


def gossip_cost(result: Result) -> Iterator[Row]:
    for name, case in result["cases"].items():
        ratio = {key: case[key]["median"] for key in ("per_s", "p99", "processor")}
        yield Row(
            f"{name}: a node with a peer against one without, pairs of runs",
            f"{ratio['per_s']:.2f} of the requests/s, {ratio['p99']:.2f} of p99, {ratio['processor']:.2f} of its "
            f"processor time; {case['peer_us']['median']:.0f} µs of the peer's for a turn",
            "0.97 of the requests/s",
            ratio["per_s"] >= 0.97,
        )


def nodes(result: Result) -> Iterator[Row]:
    for trace in result["traces"]:
        for each in trace["compared"]:
            if each["nodes"] > 1:
                yield Row(
                    f"{trace['trace']}: {nodes_of(each)} against one",
                    f"{each['hit_points']:+.1f} points of hits, p50 x {each['ttft_p50_times']:.2f}, "
                    f"p99 x {each['ttft_p99_times']:.2f}",
                    "1 point, 5 %" if each["gossip"] else "",
                    each["reached"] if each["gossip"] else None,
                )


def convergence_processes(result: Result) -> Iterator[Row]:
    for goal in result["goals"]:
        yield Row(
            f"{result['nodes']} real nodes: `{goal['goal']}`", f"{goal['is']:g}", f"{goal['at_most']:g}", goal["met"]
        )


def convergence(result: Result) -> Iterator[Row]:
    for row in result["rows"]:
        if row["chats_per_s"] and row["loss"] <= 0.1:
            yield Row(
                f"{row['nodes']:,} simulated nodes, {row['loss']:.0%} loss, {row['chats_per_s']:g} chats/s",
                f"a route is usable at another node within {row['learned_t99_s']:.2f} s (p99), a crash is known to all "
                f"in {row['noticed_all_t100_s']:.1f} s, {row['false_deaths']} others called dead; "
                f"{row['route_bytes_per_turn_and_peer']:.0f} B of routes for each turn and peer",
            )


def flash_crowd(result: Result) -> Iterator[Row]:
    for row in result["hot"]:
        yield Row(
            f"80 % of {row['rate_per_s']:g} requests/s on one prefix, {nodes_of(row)}: diverting from a busy engine",
            f"costs {row['hit_points_paid']:.1f} points of hits for {row['p99_share_won']:.0%} of p99",
        )
    for row in result["burst"]:
        if row["within_s"] == 0.0 and row["policy"] != "least_loaded":
            yield Row(
                f"160 requests of one prefix at once, `{row['policy']}`, {nodes_of(row)}",
                f"busiest engine {row['max_over_mean']['mean']:.1f} x the mean",
            )


def nodes_of(row: Result) -> str:
    how = "" if row["nodes"] == 1 else " that gossip" if row["gossip"] else " without gossip"
    return f"{row['nodes']} node{'s' * (row['nodes'] > 1)}{how}"


def decision(result: Result) -> Iterator[Row]:
    goals = result["goals"]
    for name, us in result["request_microseconds"].items():
        goal = name.startswith("decide")
        met = us["p50"] <= goals["decide_p50_us"] and us["p99"] <= goals["decide_p99_us"]
        wanted = f"{goals['decide_p50_us']} / {goals['decide_p99_us']}"
        yield Row(
            f"`{name}`, 64 backends, 1 M routes, p50 / p99",
            f"{us['p50']:.0f} / {us['p99']:.0f} µs",
            wanted if goal else "",
            met if goal else None,
        )
    memory = result["table"]["memory_bytes_per_claim"]
    yield Row("memory of a route, 1 M of them", f"{memory:.0f} B", "250 B", memory <= 250)


def tokenize(result: Result) -> Iterator[Row]:
    goals = result["goals"]
    for each in result["tokenizers"]:
        for turn, path in zip(each["turns"], each["path"], strict=True):
            at = f"{each['tokenizer']}, {path['history_tokens']:,} tokens of history"
            ratio, waited = turn["tail_to_text_alone"], path["last_byte_busy_node_us"]["p50"]
            yield Row(
                f"{at}: the next turn against its new text alone",
                f"{ratio:.2f} x; in full {turn['full_to_tail']:.0f} x the turn",
                f"{goals['tail_to_text_alone']} x",
                ratio <= goals["tail_to_text_alone"],
            )
            yield Row(
                f"{at}: last body byte to the engine's first byte, p50 under load",
                f"{waited / 1e3:.2f} ms; a bare relay {path['last_byte_busy_relay_us']['p50'] / 1e3:.2f}",
                f"{goals['last_byte_p50_us'] / 1e3} ms",
                waited <= goals["last_byte_p50_us"],
            )


def policies(result: Result) -> Iterator[Row]:
    found = result["goals"]
    each = found["ttft_better_than_each"]
    for policy, row in each["by_policy"].items():
        yield Row(
            f"p90 to the first token of `ttft` against `{policy}`, {row['cells']} cells",
            f"{row['ratio']:.2f} x (geometric mean), better in {row['share']:.0%}",
            "better in 67 %",
            row["share"] >= each["goal"],
        )
    others = {"ttft_never_worse": "the best other policy", "ttft_near_oracle": "an oracle that sees into the engines"}
    for name, other in others.items():
        goal = found[name]
        yield Row(
            f"p90 of `ttft` against {other}, {goal['cells']} cells",
            f"{goal['ratio']:.2f} x; more than {goal['goal'] - 1:.0%} above it in {len(goal['missed'])}",
            f"at most {goal['goal'] - 1:.0%} above in every cell",
            goal["reached"],
        )
    hits = found["affinity_hits"]
    missed = [miss["below"] for miss in hits["missed"]]
    yield Row(
        f"hits of `affinity` below those of a greedy oracle, ample caches, {hits['cells']} cells",
        f"more than 2 points in {len(missed)}, at most {100 * max(missed, default=0.0):.1f}",
        "2 points",
        hits["reached"],
    )


def residency(result: Result) -> Iterator[Row]:
    events = result["events"]["engine_cache"]
    dynamo = result["radix_tree"]
    beside = (
        f"; Dynamo's RadixTree took in {dynamo['blocks_per_s_in_events_of_512']:,} blocks/s in events of 512"
        if dynamo
        else ""
    )
    yield Row(
        "KV events on one core, decoding and route table included",
        f"{events['engines_of_5000_blocks_per_s']} engines of 5,000 blocks/s{beside}",
        "10 engines",
        events["block_us"] <= result["goals"]["block_us"],
    )
    yield Row("memory of a block", f"{result['memory']['bytes_of_a_block']:.0f} B")


def engine_caches(result: Result) -> Iterator[Row]:
    others = {"calibration_recovers_wasted_prefill": "wasted prefill", "calibration_recovers_hits": "hits"}
    for name, what in others.items():
        goal = result["goals"][name]
        yield Row(
            f"{what} that calibration by answers recovers of what events would",
            f"{goal['mean']:.2f} on average; less than half in {len(goal['missed'])} of {goal['cells']} cells",
            "half in every cell",
            goal["reached"],
        )
    nodes_goal = result["goals"]["four_nodes_as_one"]
    yield Row(
        "hits of four nodes with events below those of one, smallest caches",
        f"at most {100 * nodes_goal['greatest']:.1f} points",
        "1 point",
        nodes_goal["reached"],
    )


def stale(result: Result) -> Iterator[Row]:
    cells: dict[tuple[float, float], list[float]] = {}
    for row in result["rows"]:
        cells.setdefault((row["evicted_tokens_per_s"], row["restarts_per_s"]), []).append(row["wasted"])
    worst = max(cells), max(cells, key=lambda cell: cell[1])
    for evicted, restarts in worst:
        wasted = " / ".join(f"{100 * share:.2g} %" for share in cells[evicted, restarts])
        pressure = f"{evicted:.0f} tokens/s evicted by each engine" if evicted else f"{restarts:.2f} restarts/s"
        yield Row(
            f"prompt tokens computed though a route said they were held, {pressure}: estimated / answers / events",
            wasted,
        )


def replay_speed(result: Result) -> Iterator[Row]:
    for regret in (False, True):
        runs = [run for run in result["runs"] if run["regret"] is regret]
        spent = [run["cpu_s"] for run in runs]
        yield Row(
            f"replay of {runs[0]['requests']:,} requests over {result['engines']} engines{', with regret' * regret}",
            f"{min(spent):.1f} to {max(spent):.1f} s of processor time a policy, up to "
            f"{max(run['peak_mib'] for run in runs)} MiB",
            f"{result['goal_s']:g} s",
            all(run["reached"] for run in runs),
        )


def shapes(result: Result) -> Iterator[Row]:
    for name, shape in result["shapes"].items():
        published = ", ".join(f"{key} {value:g}" for key, value in shape["published"].items())
        ours = ", ".join(f"{key} {value:g}" for key, value in shape["ours"].items() if key in shape["published"])
        ours = ours or ", ".join(f"{key} {value:g}" for key, value in list(shape["ours"].items())[-4:])
        yield Row(f"`{name}`: {shape['source']}", ours, f"in shape: {published}", shape["reproduced"])


def nodes_processes(result: Result) -> Iterator[Row]:
    for run in result["runs"]:
        yield Row(
            f"{run['name']}, each turn at the next router",
            f"hits {run['hit_rate']:.1%}, TTFT p50 {run['ttft_s']['p50'] * 1e3:.0f} ms, p99 "
            f"{run['ttft_s']['p99'] * 1e3:.0f} ms, {run['router_cpu_s']:.1f} s of the routers' processor time",
        )


def request_path(result: Result) -> Iterator[Row]:
    for name, case in result["cases"].items():
        counted = f", {case['instructions']:,} instructions" if "instructions" in case else ""
        yield Row(f"{name}: a request on the node's thread", f"{case['user_us'] + case['system_us']:.0f} µs{counted}")


READERS: Mapping[str, Callable[[Result], Iterator[Row]]] = MappingProxyType(
    {
        reader.__name__: reader
        for reader in (
            *(hit_rate, policies, shapes, engine_caches, stale, nodes, flash_crowd),
            *(data_plane, request_path, decision, tokenize, residency, gossip_cost),
            *(convergence, convergence_processes, nodes_processes, replay_speed),
        )
    }
)

HEAD = """# Benchmarks

Generated by `python -m benchmarks.report` from `benchmarks/results/`; a test holds it to them. One file answers one
question: `make bench NAME=decision`, or `python -m benchmarks.NAME --help`. A result names its commit, machine and,
where chance is drawn, its seed. Traces and tokenizers are looked for in `SHARED_DATA`.

How to read it: everything ran on the machine that the result names, engines' stubs and load included, so ratios within
one run mean more than figures; compare two commits by pairs of runs, by turns. Replays are in virtual time: their
figures are those of modelled engines, equal on every machine. What misses its goal is printed like what meets it.
"""


def page(results: Path = RESULTS) -> str:
    """The whole page."""
    parts, missed = [], []
    for name, reader in READERS.items():
        path = results / f"{name}.json"
        if not path.is_file():
            continue
        result = json.loads(path.read_text())
        rows = list(reader(result))
        missed += [f"- `{name}`: {row.question}: {row.figure} (goal: {row.goal})" for row in rows if row.met is False]
        lines = "\n".join(f"| {row.question} | {row.figure} | {shown_goal(row)} |" for row in rows)
        machine = result["machine"]
        ran = f"Commit {result['commit']}, {machine['cores']} cores of {machine['processor']}."
        parts.append(f"\n## {name}\n\n{ran}\n\n| question | measured | goal |\n|---|---|---|\n{lines}\n")
    return f"{HEAD}\n## What misses its goal\n\n{chr(10).join(missed)}\n{''.join(parts)}"


def shown_goal(row: Row) -> str:
    return row.goal if row.met is None else f"{row.goal}: {'met' if row.met else '**missed**'}"


def main() -> int:
    PAGE.write_text(page())
    show(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
