"""Generates benchmarks/README.md from benchmarks/results/: every measured row, its goal, and what misses its goal.

    python -m benchmarks.harness.report

One function for each result file turns it into rows. A test checks that the page equals what the files give.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.harness.bench import RESULTS, ROOT, show

PAGE = ROOT / "benchmarks" / "README.md"
SMG, SGLANG, NODE = "smg 1.13.0", "sglang-router 0.3.2", "ranvier_py"

Result = Mapping[str, Any]


class Row(NamedTuple):
    """A row of the page: what was measured, the figure, and the goal. Without a goal `met` is None."""

    question: str
    figure: str
    goal: str = ""
    met: bool | None = None


def rows(
    items: Iterable[Result], question: str, figure: str, goal: str = "", met: Callable[[Result], bool] | None = None
) -> Iterator[Row]:
    """Yield a row for each item, whose members fill in the templates `question` and `figure`."""
    for each in items:
        yield Row(question.format_map(each), figure.format_map(each), goal, met(each) if met else None)


def named(items: Mapping[str, Result]) -> list[Result]:
    return [{"name": name, **each} for name, each in items.items()]


# --- replays ----------------------------------------------------------------------------------------------------------


def hit_rate(result: Result) -> Iterator[Row]:
    for trace in result["traces"]:
        runs: dict[str, list[Any]] = {}
        for run in trace["runs"]:
            runs.setdefault(run["policy"], []).append(run)
        each = {**trace, **runs, "goals": [goal for goal in result["goals"] if goal["trace"] == trace["trace"]]}
        yield from rows(
            [each],
            "{trace} over 8 engines: hit rate with large caches / with {affinity[1][cache_tokens]:,} tokens",
            "`affinity` {affinity[0][hit_rate]:.1%} / {affinity[1][hit_rate]:.1%}, round-robin "
            "{round_robin[0][hit_rate]:.1%} / {round_robin[1][hit_rate]:.1%}; greedy with perfect knowledge, which "
            "counts no answers, {reference[greedy]:.1%}",
            "95 % of greedy",
            lambda each: each["goals"][0]["reached"],
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
        yield from rows([found], f"{question}, {{cells}} cells", figure, wanted, lambda found: found["reached"])


def shapes(result: Result) -> Iterator[Row]:
    for name, shape in result["shapes"].items():
        published = ", ".join(f"{key} {value:g}" for key, value in shape["published"].items())
        alike = [key for key in shape["ours"] if key in shape["published"]] or list(shape["ours"])[-4:]
        ours = ", ".join(f"{key} {shape['ours'][key]:g}" for key in alike)
        yield Row(f"`{name}`: {shape['source']}", ours, f"in shape: {published}", shape["reproduced"])


def engine_caches(result: Result) -> Iterator[Row]:
    goals = result["goals"]
    what = {"calibration_recovers_wasted_prefill": "wasted prefill", "calibration_recovers_hits": "hits"}
    yield from rows(
        [{**goals[name], "name": shown, "count": len(goals[name]["missed"])} for name, shown in what.items()],
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
    cells: dict[tuple[float, float], list[float]] = {}
    for row in result["rows"]:
        cells.setdefault((row["evicted_tokens_per_s"], row["restarts_per_s"]), []).append(row["wasted"])
    for evicted, restarts in (max(cells), max(cells, key=lambda cell: cell[1])):
        wasted = " / ".join(f"{100 * share:.2g} %" for share in cells[evicted, restarts])
        pressure = f"{evicted:.0f} tokens/s evicted by each engine" if evicted else f"{restarts:.2f} restarts/s"
        question = f"prompt tokens computed though a route said they were held, {pressure}"
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
    cells: dict[tuple[str, str, int], dict[str, Result]] = {}
    for row in result["rows"]:
        cells.setdefault((row["workload"], row["profile"], row["nodes"]), {})[row["knows"]] = row
    goals = result["goals"]
    shown = {
        "near_oracle": ("hits below those of the oracle, at most; {cells} cells", "{points:.1f} points", "2 points"),
        "predicted": ("least precision or recall of a profile, mean of its workloads", "{worst:.3f}", "0.98"),
        "attention_unchanged": ("tokens that engines of attention alone reuse less; {cells} cells", "{worst}", "0"),
    }
    for name, (question, figure, goal) in shown.items():
        points = 100 * goals[name]["worst"]
        yield from rows([{**goals[name], "points": points}], question, figure, goal, lambda each: each["reached"])
    alone = [known["checkpoint"] for (_, profile, _), known in cells.items() if profile == "attention"]
    yield Row(
        "of what engines of attention alone reused unpredicted: less than a step of anchors (256 tokens) behind it",
        f"{sum(row['in_step'] for row in alone) / max(1, sum(row['missed'] for row in alone)):.1%}",
    )
    for (workload, profile, nodes), known in cells.items():
        each = [known[name] for name in ("attention", "checkpoint", "oracle")]
        hits = " / ".join(f"{row['hit_rate']:.1%}" for row in each)
        p90 = " / ".join(f"{row['ttft_p90_s']:.2f}" for row in each)
        wasted = " / ".join(f"{row['wasted']:.1%}" for row in each[:2])
        place = f"{workload}, engines of `{profile}`, {nodes} node{'s' * (nodes > 1)}"
        if "hit_rates" in each[1]:
            draws = zip(each[1]["hit_rates"], each[2]["hit_rates"], strict=True)
            hits += f" (draw by draw {', '.join(f'{100 * (ours - best):+.1f}' for ours, best in draws)} of the oracle)"
        yield Row(
            f"{place}: attention's credit / ours / an oracle",
            f"hits {hits}; p90 to the first token {p90} s; believed in vain {wasted}",
            "within 2 points of the oracle",
            f"{workload} {profile} {nodes}" not in goals["near_oracle"]["missed"],
        )


def kind_of(row: Result) -> str:
    if row["nodes"] == 1:
        return "1 node"
    return f"{row['nodes']} nodes {'that gossip' if row['gossip'] else 'without gossip'}"


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


# --- processes and parts ----------------------------------------------------------------------------------------------


def data_plane(result: Result) -> Iterator[Row]:
    compared, cases = result["compared"], result["cases"]
    for case in cases:
        if case != "one_connection":
            smg, sglang = (compared[case][f"times {name}"] for name in (SMG, SGLANG))
            least = (2, 5) if "stream" in case else (1, 1)
            yield Row(
                f"{case}: requests/s at 16 connections",
                f"{smg} x {SMG}, {sglang} x {SGLANG}, {compared[case]['times direct']} x no router",
                f"{least[0]} x and {least[1]} x",
                smg >= least[0] and sglang >= least[1],
            )
    for case, goal_us in (("chat_3kB", 130), ("chat_60kB", 240), ("stream_100_chunks", 220)):
        spent = {name: cases[case][name]["processor_us"] for name in (NODE, SMG, SGLANG)}
        yield Row(f"{case}: processor time of a request", beside(spent), f"{goal_us} µs", spent[NODE] <= goal_us)
    for key in ("p50_us", "p99_us"):
        added = {name: compared["added_latency_us"][name][key] for name in (NODE, SMG, SGLANG)}
        met = added[NODE] < min(added[SMG], added[SGLANG])
        yield Row(f"one connection: added latency, {key.removesuffix('_us')}", beside(added), "below both", met)
    for name, each in result["apis"].items():
        figure = f"{each['processor_us']:.0f} µs, {each['times_chat']:.2f} x a chat's"
        yield Row(f"{name}: processor time of a request", figure, "1.1 x", each["times_chat"] <= 1.1)


def response_cache(result: Result) -> Iterator[Row]:
    misses, hits, once = result["misses"], result["hits"], result["equal_at_once"]
    more_us, hit_us = misses["more_us"], hits["on"]["processor_us"]
    yield Row("processor time that a miss costs beside a chat of 3 kB", f"{more_us} µs", "20 µs", more_us <= 20)
    without = f"{hits['off']['processor_us']} µs by an engine"
    yield Row("processor time of a hit", f"{hit_us} µs; {without}", "60 µs", hit_us <= 60)
    per_s = ", ".join(
        f"{name} {hits[key]['per_s']:.0f}" for key, name in (("off", "forwarded"), ("direct", "no router"))
    )
    yield Row("hits/s at 16 connections", f"{hits['on']['per_s']:.0f}; {per_s}")
    if (in_redis := result.get("in_redis")) is not None:
        for connections, found in in_redis.items():
            words = f"look-ups in Redis at {connections} connections: p99 of a round trip at most"
            yield Row(words, f"{found['p99_ms_max']:g} ms", "5 ms", found["p99_ms_max"] <= 5)
        yield Row(
            "hits/s from Redis; processor time of a hit",
            f"{hits['redis']['per_s']:.0f}; {hits['redis']['processor_us']} µs",
        )
    sent = once["sent_to_engines"]
    yield Row(f"{once['requests']} equal requests at once: sent to engines", f"{sent}", "1", sent == 1)
    yield from shared_responses(result["shared"]) if "shared" in result else ()


def shared_responses(shared: Mapping[str, Any]) -> Iterator[Row]:
    by_trace: dict[str, dict[str, Any]] = {}
    for row in shared["rows"]:
        by_trace.setdefault(row["trace"], {})[row["backend"]] = row
    for trace, found in by_trace.items():
        figure = ", ".join(f"{backend} {row['hit_share']:.3f}" for backend, row in found.items())
        ideal = found["cluster"]["ideal_share"]
        question = f"{trace} at {shared['nodes']} nodes: share of hits; one cache would have {ideal:.3f}"
        met = found["cluster"]["hit_share"] >= found["redis"]["hit_share"] - 0.01 if "redis" in found else None
        yield Row(question, figure, "" if met is None else "cluster within 0.01 of redis", met)
        for key, name in (("hit_ms", "a hit"), ("first_hit_ms", "a hit of what the node has not")):
            known = {backend: row[key] for backend, row in found.items() if key in row}
            times = [f"{backend} {each['p50']:.2f} / {each['p99']:.2f}" for backend, each in known.items()]
            yield Row(f"{trace}: {name}, p50 / p99", f"{', '.join(times)} ms")


def beside(microseconds: Mapping[str, float]) -> str:
    return f"{microseconds[NODE]:.0f} µs; {SMG} {microseconds[SMG]:.0f}, {SGLANG} {microseconds[SGLANG]:.0f}"


def decision(result: Result) -> Iterator[Row]:
    goals = result["goals"]
    for each in named(result["request_microseconds"]):
        [row] = rows([each], "`{name}`, 64 backends, 1 M routes, p50 / p99", "{p50:.0f} / {p99:.0f} µs")
        kind = each["name"].partition("_")[0]
        wanted = [goals[f"{kind}_{part}_us"] for part in ("p50", "p99") if f"{kind}_{part}_us" in goals]
        met = all(each[part] <= most for part, most in zip(("p50", "p99"), wanted, strict=False))
        yield row._replace(goal=" / ".join(map(str, wanted)), met=met) if wanted else row
    size = result["table"]["memory_bytes_per_claim"]
    yield Row("memory of a route, 1 M of them", f"{size:.0f} B", "250 B", size <= 250)


def tokenize(result: Result) -> Iterator[Row]:
    goals = result["goals"]
    for each in result["tokenizers"]:
        for turn, path in zip(each["turns"], each["path"], strict=True):
            at = f"{each['tokenizer']}, {path['history_tokens']:,} tokens of history"
            ratio, waited, bare = (
                turn["tail_to_text_alone"],
                path["last_byte_busy_node_us"]["p50"],
                path["last_byte_busy_relay_us"]["p50"],
            )
            yield Row(
                f"{at}: the next turn against its new text alone",
                f"{ratio:.2f} x; in full {turn['full_to_tail']:.0f} x the turn",
                f"{goals['tail_to_text_alone']} x",
                ratio <= goals["tail_to_text_alone"],
            )
            yield Row(
                f"{at}: last body byte to the engine's first byte, p50 under load",
                f"{waited / 1e3:.2f} ms; a bare relay {bare / 1e3:.2f}",
                f"{goals['last_byte_p50_us'] / 1e3} ms",
                waited <= goals["last_byte_p50_us"],
            )


def residency(result: Result) -> Iterator[Row]:
    yield from rows(
        [{**result["events"]["engine_cache"], "dynamo": result["radix_tree"]}],
        "KV events on one core, decoding and route table included",
        "{engines_of_5000_blocks_per_s} engines of 5,000 blocks/s; Dynamo's RadixTree took in "
        "{dynamo[blocks_per_s_in_events_of_512]:,} blocks/s in events of 512",
        "10 engines",
        lambda events: events["block_us"] <= result["goals"]["block_us"],
    )
    yield Row("memory of a block", f"{result['memory']['bytes_of_a_block']:.0f} B")


def gossip_cost(result: Result) -> Iterator[Row]:
    return rows(
        named(result["cases"]),
        "{name}: a node with a peer against one without, pairs of runs",
        "{per_s[median]:.2f} of the requests/s, {p99[median]:.2f} of p99, {processor[median]:.2f} of its processor "
        "time; {peer_us[median]:.0f} µs of the peer's for a turn",
        "0.97 of the requests/s",
        lambda case: case["per_s"]["median"] >= 0.97,
    )


def convergence(result: Result) -> Iterator[Row]:
    return rows(
        [row for row in result["rows"] if row["chats_per_s"] and row["loss"] <= 0.1],
        "{nodes:,} simulated nodes, {loss:.0%} loss, {chats_per_s:g} chats/s",
        "a route is usable at another node within {learned_t99_s:.2f} s (p99), a crash is known to all in "
        "{noticed_all_t100_s:.1f} s, {false_deaths} others called dead; {route_bytes_per_turn_and_peer:.0f} B of "
        "routes for each turn and peer",
    )


def route_eviction(result: Result) -> Iterator[Row]:
    goals, hits = result["goals"], dict[str, dict[tuple[float, str], float]]()
    for row in result["rows"]:
        hits.setdefault(row["workload"], {})[row["share"], row["eviction"]] = row["hit_rate"]
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
    spent_s = result["tuning_s"]
    yield Row("processor time of a tuning that tries all alphas", f"{spent_s:.1f} s", "2 s", spent_s <= 2)


def clients(result: Result) -> Iterator[Row]:
    goals = result["goals"]
    for row in result["rows"]:
        question = f"{row['shape']} by {row['nodes']} of {row['router']}: turns at a holder; reused of possible"
        if "refused" in row:
            yield Row(question, f"refused: {row['refused'][:60]}")
            continue
        shares = row["shares"]
        is_ours = row["router"] == "ranvier_py"
        met = shares["reached"] >= goals["reached"] and shares["lost"] <= goals["lost"] if is_ours else None
        figure = f"{shares['reached']:.0%}; {shares['reused']:.1%} of {shares['possible']:.1%}"
        yield Row(question, figure, "99 %; 1 point less" if is_ours else "", met)
    mended = result.get("mended", {"rows": ()})
    for row in mended["rows"]:
        place = f"{row['shape']} with a {row['breaker']}, {row['nodes']} node{'s' * (row['nodes'] > 1)}"
        yield Row(
            f"{place}: reused without it / with it / with `{row['rule']}` on",
            f"{row['without']:.1%} / {row['broken']:.1%} / {row['mended']:.1%}",
            "1 point less than without",
            row["mended"] >= row["without"] - mended["goal"],
        )


def convergence_processes(result: Result) -> Iterator[Row]:
    goals = [{**goal, "nodes": result["nodes"]} for goal in result["goals"]]
    for row, goal in zip(rows(goals, "{nodes} real nodes: `{goal}`", "{is:g}"), goals, strict=True):
        yield row._replace(goal=f"{goal['at_most']:g}", met=goal["met"])


def nodes_processes(result: Result) -> Iterator[Row]:
    return rows(
        [{**run, **{key: 1e3 * value for key, value in run["ttft_s"].items()}} for run in result["runs"]],
        "{name}, each turn at the next router",
        "hits {hit_rate:.1%}, TTFT p50 {p50:.0f} ms, p99 {p99:.0f} ms, {router_cpu_s:.1f} s of the routers' processors",
    )


READERS: Mapping[str, Callable[[Result], Iterator[Row]]] = MappingProxyType(
    {
        reader.__name__: reader
        for reader in (
            *(hit_rate, policies, shapes, engine_caches, stale, route_eviction, nodes),
            *(flash_crowd, marconi, hybrid, replay_speed),
            *(clients, data_plane, response_cache, decision, tokenize, residency, gossip_cost),
            *(convergence, convergence_processes, nodes_processes),
        )
    }
)

HEAD = """# Benchmarks

Generated by `python -m benchmarks.harness.report` from `benchmarks/results/`; a test holds it to them. One file answers
one question: `make bench NAME=decision`, or `python -m benchmarks.NAME --help`. A result names its commit, machine and,
where chance is drawn, its seed. Traces and tokenizers are looked for in `SHARED_DATA`.

How to read it: everything ran on the machine that the result names, engines' stubs and load included, so ratios within
one run mean more than figures; compare two commits by pairs of runs, by turns. Replays are in virtual time: their
figures are those of modelled engines, equal on every machine. What misses its goal is printed like what meets it.

Which interpreter runs it matters: CPython as Debian and the Docker images build it (guided by a profile) is faster than
one compiled without, as pyenv does unless told otherwise, and 3.14 is faster than 3.11. `data_plane` is to be run with
what `deploy/Dockerfile` runs: `make bench NAME=data_plane PYTHON=python3.14 VENV=.venv-bench`.
"""


def page(results: Path = RESULTS) -> str:
    """Return the whole page."""
    parts, missed = [], []
    for name, reader in READERS.items():
        result = json.loads((results / f"{name}.json").read_text())
        found = list(reader(result))
        missed += [f"- `{name}`: {row.question}: {row.figure} (goal: {row.goal})" for row in found if row.met is False]
        lines = "\n".join(f"| {row.question} | {row.figure} | {shown_goal(row)} |" for row in found)
        machine = result["machine"]
        where = f"{machine['cores']} cores of {machine['processor']}, Python {machine['python']}"
        commits = result["commit"]
        if "others_commit" in result:
            commits += f" ({result['policy']}), {result['others_commit']} (all others)"
        ran = f"Commit {commits}, {where}."
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
