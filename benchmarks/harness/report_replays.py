"""Turns the results of replays into rows of the page of results: one function for each result file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.harness.bench import how_answered
from benchmarks.harness.report_rows import Result, Row, named, rows


def hit_rate(result: Result) -> Iterator[Row]:
    for trace in result["traces"]:
        runs: dict[str, list[Any]] = {}
        for run in trace["runs"]:
            runs.setdefault(run["policy"] + how_answered(run), []).append(run)
        goals = [goal for goal in result["goals"] if goal["trace"] == trace["trace"]]
        kinds = [(how_answered(goal), goal) for goal in goals]
        yield from rows(
            [
                {**trace, **goal, "how": how, **{name: runs[name + how] for name in ("affinity", "round_robin")}}
                for how, goal in kinds
            ],
            "{trace} over 8 engines{how}: hit rate with large caches / with {affinity[1][cache_tokens]:,} tokens",
            "`affinity` {affinity[0][hit_rate]:.1%} / {affinity[1][hit_rate]:.1%}, round-robin "
            "{round_robin[0][hit_rate]:.1%} / {round_robin[1][hit_rate]:.1%}; greedy with perfect knowledge, which "
            "counts no answers, {reference[greedy]:.1%}",
            "95 % of greedy",
            lambda each: each["reached"],
        )


def policies(result: Result) -> Iterator[Row]:
    goals = result["goals"]
    each = goals["ttft_better_than_each"]
    yield from rows(
        named(each["by_policy"]),
        "p90 to the first token of `ttft` against `{name}`, {cells} cells",
        "{ratio:.2f} x (geometric mean), better in {share:.0%}",
        "better in 67 %",
        lambda row: row["share"] >= each["goal"],
    )
    slower, colder = "{ratio:.2f} x; more than {goal} x in {over}", "; hits at most {points_most:.1f} points below"
    greedy, bound = "hits of `affinity` below those of a greedy oracle, ample caches", "at most {goal} x in every cell"
    for name, question, figure, goal in (
        ("ttft_never_worse", "p90 of `ttft` against the best other policy", slower, bound),
        ("ttft_near_oracle", "p90 of `ttft` against an oracle that sees into the engines", slower, bound),
        ("affinity_near_ttft", "p90 of `affinity` against `ttft`", slower + colder, f"{bound}, 1 point"),
        ("affinity_hits", greedy, "more than 2 points in {over}, at most {points_most:.1f}", "2 points"),
    ):
        found = goals[name]
        wanted = goal.format_map(found)
        if found["cells"]:  # cells that were drawn anew have no oracle
            yield from rows([found], f"{question}, {{cells}} cells", figure, wanted, lambda found: found["reached"])


def policies_anew(result: Result) -> Iterator[Row]:
    return policies(result)


def constants(result: Result) -> Iterator[Row]:
    traffic = result["trace"].replace(",", ", ") or "all traces"
    by_name: dict[str, list[Any]] = {}
    for row in result["rows"]:
        by_name.setdefault(row["constant"], []).append(row)
    for name, changes in by_name.items():
        figure = "; ".join(
            f"x {row['times']:g}: {row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f}), over 3 % in "
            f"{row['over']} of {row['cells']}"
            for row in changes
        )
        goal, met = ("", None) if name == "chance" else ("3 % in every cell", all(not row["over"] for row in changes))
        yield Row(
            f"p90 with another `{name}`" if goal else f"{traffic}: p90 with 1 % more load: what chance alone moves",
            figure,
            goal,
            met,
        )


def shapes(result: Result) -> Iterator[Row]:
    for name, shape in [*result["shapes"].items(), *result.get("whole_answers", {}).items()]:
        published = ", ".join(f"{key} {value:g}" for key, value in shape["published"].items())
        alike = [key for key in shape["ours"] if key in shape["published"]] or list(shape["ours"])[-4:]
        ours = ", ".join(f"{key} {shape['ours'][key]:g}" for key in alike)
        yield Row(
            f"`{name}`{how_answered(shape)}: {shape['source']}", ours, f"in shape: {published}", shape["reproduced"]
        )


def engine_caches(result: Result) -> Iterator[Row]:
    goals = result["goals"]
    what = {"calibration_recovers_wasted_prefill": "wasted prefill", "calibration_recovers_hits": "hits"}
    what |= {f"{name}_of_whole_answers": f"{shown} of whole answers" for name, shown in what.items()}
    yield from rows(
        [
            {**goals[name], "name": shown, "count": len(goals[name]["missed"])}
            for name, shown in what.items()
            if goals.get(name, {}).get("cells")
        ],
        "{name} that calibration by answers recovers of what events would",
        "{mean:.2f} on average; less than half in {count} of {cells} cells",
        "half in every cell",
        lambda goal: goal["reached"],
    )
    for name, shown in (("four_nodes_as_one", "with"), ("four_nodes_as_one_without_events", "without")):
        question = f"hits of four nodes {shown} events below those of one, smallest caches"
        figure = f"at most {100 * goals[name]['greatest']:.1f} points"
        yield Row(question, figure, "1 point", goals[name]["reached"])


def stale(result: Result) -> Iterator[Row]:
    kinds: dict[str, dict[tuple[float, float], list[float]]] = {}
    for row in result["rows"]:
        cells = kinds.setdefault(how_answered(row), {})
        cells.setdefault((row["cache_share"], row["restarts_per_s"]), []).append(row["wasted"])
    for how, cells in kinds.items():
        for share, restarts in (min(cells), max(cells, key=lambda cell: cell[1])):
            wasted = " / ".join(f"{100 * each:.2g} %" for each in cells[share, restarts])
            pressure = f"{restarts:.2f} restarts/s" if restarts else f"caches of {share:.0%} of the working set"
            question = f"prompt tokens computed though a route said they were held, {pressure}{how}"
            yield Row(f"{question}: estimated / answers / events", wasted)


def nodes(result: Result) -> Iterator[Row]:
    for trace in result["traces"]:
        for each in trace["compared"]:
            if each["nodes"] > 1:
                [row] = rows(
                    [{**each, "trace": trace["trace"], "kind": kind_of(each)}],
                    "{trace}: {kind} against one",
                    "{hit_points:+.1f} points of hits, p50 x {ttft_p50_times:.2f}, p99 x {ttft_p99_times:.2f}",
                )
                yield row._replace(goal="1 point, 5 %", met=each["reached"]) if each["gossip"] else row


def flash_crowd(result: Result) -> Iterator[Row]:
    at_once = [row for row in result["burst"] if row["within_s"] == 0.0 and row["policy"] != "least_loaded"]
    yield from rows(
        [{**row, "kind": kind_of(row)} for row in at_once],
        "160 requests of one prefix at once, `{policy}`, {kind}",
        "busiest engine {max_over_mean[mean]:.1f} x the mean",
    )
    yield from rows(
        [{**row, "kind": kind_of(row), "first": 1 - row["diverts"]["found"]["share"]} for row in result.get("hot", ())],
        "80 % of all requests have one prefix, {speed:g} x 20 a second, {kind}: staying at its holder / diverting",
        "p99 {stays[ttft_s][p99]:.2f} / {diverts[ttft_s][p99]:.2f} s, of those that find their prefix "
        "{stays[found][ttft_p99_s]:.2f} / {diverts[found][ttft_p99_s]:.2f} s ({first:.1%} compute it first: where that "
        "is more than 1 %, p99 is no less than that prefill), hits {stays[hit_rate]:.1%} / {diverts[hit_rate]:.1%}, "
        "holders {stays[holders]} / {diverts[holders]}",
    )


def marconi(result: Result) -> Iterator[Row]:
    equal = result["checked"] - len(result["differ"])
    yield Row(
        "reference integers of Marconi's simulator, hybrid caches and engines' checkpoints",
        f"{equal} of {result['checked']} found",
        "all",
        not result["differ"],
    )
    [timed] = [row for row in result["rows"] if row["kind"] == "processor time"]
    met = timed["s"] < timed["goal_s"]
    yield Row("Marconi on 1,121 requests of agents, tuning included", f"{timed['s']} s", f"{timed['goal_s']:g} s", met)
    shares = {(row["trace"], row["kind"].removeprefix("profile ")): row for row in result["rows"] if "credited" in row}
    yield from rows(
        [{**shares["rag", kind], "name": kind} for kind in ("sglang_no_buffer", "vllm_align_528", "marconi")],
        "shared documents: what a router credits that knows of attention alone, and what `{name}` reuses",
        "{credited:.1%}, {hit_rate:.1%}",
    )


def hybrid(result: Result) -> Iterator[Row]:
    cells: dict[tuple[str, str, int, str], dict[str, Result]] = {}
    for row in result["rows"]:
        cells.setdefault((row["workload"], row["profile"], row["nodes"], how_answered(row)), {})[row["knows"]] = row
    goals = result["goals"]
    shown = {
        "near_oracle": ("hits below those of the oracle, at most; {cells} cells", "{points:.1f} points", "2 points"),
        "predicted": ("least precision or recall of a profile, mean of its workloads", "{worst:.3f}", "0.98"),
        "attention_unchanged": ("tokens that engines of attention alone reuse less; {cells} cells", "{worst}", "0"),
    }
    for name, (question, figure, goal) in shown.items():
        points = 100 * goals[name]["worst"]
        yield from rows([{**goals[name], "points": points}], question, figure, goal, lambda each: each["reached"])
    alone = [known["checkpoint"] for (_, profile, *_), known in cells.items() if profile == "attention"]
    yield Row(
        "of what engines of attention alone reused unpredicted: less than a step of anchors (256 tokens) behind it",
        f"{sum(row['in_step'] for row in alone) / max(1, sum(row['missed'] for row in alone)):.1%}",
    )
    for (workload, profile, nodes, how), known in cells.items():
        each = [known[name] for name in ("attention", "checkpoint", "oracle")]
        hits = " / ".join(f"{row['hit_rate']:.1%}" for row in each)
        p90 = " / ".join(f"{row['ttft_p90_s']:.2f}" for row in each)
        wasted = " / ".join(f"{row['wasted']:.1%}" for row in each[:2])
        place = f"{workload}, engines of `{profile}`, {nodes} node{'s' * (nodes > 1)}{how}"
        if "hit_rates" in each[1]:
            draws = zip(each[1]["hit_rates"], each[2]["hit_rates"], strict=True)
            hits += f" (draw by draw {', '.join(f'{100 * (ours - best):+.1f}' for ours, best in draws)} of the oracle)"
        yield Row(
            f"{place}: attention's credit / ours / an oracle",
            f"hits {hits}; p90 to the first token {p90} s; believed in vain {wasted}",
            "within 2 points of the oracle",
            f"{workload} {profile} {nodes}{how}" not in goals["near_oracle"]["missed"],
        )


def kind_of(row: Result) -> str:
    if row["nodes"] == 1:
        return f"1 node{how_answered(row)}"
    return f"{row['nodes']} nodes {'that gossip' if row['gossip'] else 'without gossip'}{how_answered(row)}"


def replay_speed(result: Result) -> Iterator[Row]:
    for regret in (False, True):
        runs = [run for run in result["runs"] if run["regret"] is regret]
        spent, memory = [run["cpu_s"] for run in runs], max(run["peak_mib"] for run in runs)
        yield Row(
            f"replay of {runs[0]['requests']:,} requests over {result['engines']} engines{', with regret' * regret}",
            f"{min(spent):.1f} to {max(spent):.1f} s of processor time a policy, up to {memory} MiB",
            f"{result['goal_s']:g} s",
            all(run["reached"] for run in runs),
        )


def route_eviction(result: Result) -> Iterator[Row]:
    goals, hits = result["goals"], dict[str, dict[tuple[float, str], float]]()
    for row in result["rows"]:
        hits.setdefault(row["workload"] + how_answered(row), {})[row["share"], row["eviction"]] = row["hit_rate"]
    points = {name: 100 * goals[name] for name in ("mean", "most", "worst", "goal")}
    yield from rows(
        [{**goals, **points}],
        "hits of small route tables that forget by utility, against LRU, {cells} cells",
        "{mean:+.1f} points on average, more in {better}; {worst:+.1f} to {most:+.1f}",
        "at most 1 point below in every cell",
        lambda each: each["reached"],
    )
    for name, found in hits.items():
        small = sorted({share for share, _ in found if share < 1})
        pairs = [f"{found[share, 'lru']:.1%} / {found[share, 'utility']:.1%}" for share in small]
        question = f"{name}: hits by LRU / utility with {' and '.join(f'{share:.0%}' for share in small)} of the routes"
        yield Row(question, f"{' and '.join(pairs)}; with all of them {found[1.0, 'lru']:.1%}")
    for each in result["costs"]:
        yield from rows(
            [{**each, **each["learn_microseconds"]}],
            "a full table of {rows:,} rows learns a new chat, `{eviction}`",
            "p50 {p50:.0f} µs, p99 {p99:.0f}, {evicted_by_each:.0f} rows evicted; {memory_bytes_per_row:.0f} B a row",
        )
