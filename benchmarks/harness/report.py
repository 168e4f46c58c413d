"""Generates benchmarks/README.md from benchmarks/results/: every measured row, its goal, and what misses its goal.

    python -m benchmarks.harness.report

One function for each result file turns it into rows: for replays in `report_replays`, for all else here. A test checks
that the page equals what the files give.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.harness import report_replays as replays
from benchmarks.harness.bench import RESULTS, ROOT, how_answered, show
from benchmarks.harness.report_rows import Result, Row, named, rows

PAGE = ROOT / "benchmarks" / "README.md"
SMG, SGLANG, NODE = "smg 1.13.0", "sglang-router 0.3.2", "ranvier_py"
SPENT_MOST = (("chat_3kB", 1.0, (SMG, SGLANG)), ("chat_60kB", 0.6, (SMG,)), ("stream_100_chunks", 0.5, (SMG,)))
"""How much processor time a request may take beside each of these routers in the same run."""

TURN_MOST = {"calls": 400, "instructions": 8330, "switches": 220, "files": 40}
"""Of a warm turn of 3 kB: three quarters of the instructions that it took when this was first counted."""


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
    for case, share, others in SPENT_MOST:
        spent = {name: cases[case][name]["processor_us"] for name in (NODE, SMG, SGLANG)}
        times = spent[NODE] / min(spent[name] for name in others)
        goal = f"{share:g} x {' and '.join(others)}"
        yield Row(f"{case}: processor time of a request", f"{beside(spent)}: {times:.3g} x", goal, times <= share)
    for key in ("p50_us", "p99_us"):
        added = {name: compared["added_latency_us"][name][key] for name in (NODE, SMG, SGLANG)}
        met = added[NODE] < min(added[SMG], added[SGLANG])
        yield Row(f"one connection: added latency, {key.removesuffix('_us')}", beside(added), "below both", met)
    for name, each in result["apis"].items():
        figure = f"{each['processor_us']:.0f} µs, {each['times_chat']:.2f} x a chat's"
        yield Row(f"{name}: processor time of a request", figure, "1.1 x", each["times_chat"] <= 1.1)


def request_cost(result: Result) -> Iterator[Row]:
    for name, case in result["cases"].items():
        turn, found = "a warm turn until its answer's end", {**case, "files": len(case["files"])}
        if name == "chat_3kB":
            for what, most in TURN_MOST.items():
                yield Row(f"{name}: {what} of {turn}", f"{found[what]:,}", f"{most:,}", found[what] <= most)
        else:
            yield Row(f"{name}: {turn}", ", ".join(f"{found[what]:,} {what}" for what in TURN_MOST))


def held_heads(result: Result) -> Iterator[Row]:
    held, together, more = result["held"], result["together"], result["more"]
    for name in ("p50", "p99"):
        figure = f"{held[name]} µs; {together[name]} with the head: {more[name]:+} µs"
        yield Row(f"first event of a stream whose head was held, {name}", figure, "+20 µs", more[name] <= 20)


def response_cache(result: Result) -> Iterator[Row]:
    misses, hits, once = result["misses"], result["hits"], result["equal_at_once"]
    more_us, hit_us = misses["more_us"], hits["on"]["processor_us"]
    yield Row("processor time that a miss costs beside a chat of 3 kB", f"{more_us} µs", "30 µs", more_us <= 30)
    without = f"{hits['off']['processor_us']} µs by an engine"
    yield Row("processor time of a hit", f"{hit_us} µs; {without}", "70 µs", hit_us <= 70)
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


def clients(result: Result) -> Iterator[Row]:
    goals = result["goals"]
    for row in result["rows"]:
        place = f"{row['shape']} by {row['nodes']} of {row['router']}{how_answered(row)}"
        question = f"{place}: turns at a holder; reused of possible"
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
    for streamed, time in ((True, "TTFT"), (False, "the whole answer's time")):
        runs = [run for run in result["runs"] if run.get("streamed", True) is streamed]
        key = "ttft_s" if streamed else "answer_s"
        yield from rows(
            [{**run, "time": time, **{name: 1e3 * value for name, value in run[key].items()}} for run in runs],
            "{name}, pauses of {think_s:g} s, each turn at the next router",
            "hits {hit_rate:.1%}, {time} p50 {p50:.0f} ms, p99 {p99:.0f} ms, {router_cpu_s:.1f} s of the routers' "
            "processors",
        )


def limits(result: Result) -> Iterator[Row]:
    lower = 0.98 - 0.041  # what one request reserves is 0.041 of the limit
    for kind in ("virtual", "processes"):
        for name, case in result[kind].items():
            where, most = f"{name}, {kind}", 1.05 if "partition" in name else 1.02
            is_whole = "partition" not in name and "killed" not in name
            met = case["served_most"] <= most
            yield Row(f"{where}: most served in a sliding minute", f"{case['served_most']:.3f}", f"{most}", met)
            figure, met = (
                f"{case['served_least']:.3f}; on average {case['served_mean']:.3f}",
                case["served_least"] >= lower,
            )
            yield Row(f"{where}: least served in one", figure, f"{lower:.3f}", met if is_whole else None)
            if "held_mean" in case:
                figure, met = f"{case['held_mean']:.3f}", case["held_mean"] >= lower
                yield Row(
                    f"{where}: served and reserved, on average", figure, f"{lower:.3f}", met if is_whole else None
                )
                share, met = case["false"] / case["requests"], case["false"] <= 0.01 * case["requests"]
                yield Row(f"{where}: refused falsely", f"{share:.2%}", "1 %", met)
            if "late_s" in case:
                yield Row(f"{where}: clients, engine and relay were late at most", f"{case['late_s']:.2f} s")
    for name, case in result.get("scale", {}).items():
        memory, bandwidth = case["memory_mb"], case["bytes_per_s_and_peer"]
        figure = f"{memory:g} MB, {bandwidth:,} B/s to each peer"
        met = memory <= 100 and bandwidth <= 5000
        yield Row(f"16 nodes, {name}: 50,000 keys and 2,000 tenants", figure, "100 MB, 5,000 B/s", met)


def limits_peers(result: Result) -> Iterator[Row]:
    lower, release = 0.98 - 0.041, result["litellm_release"]  # as for `limits`
    names = {"ours": "ours", "litellm": f"LiteLLM {release}", "redis": f"LiteLLM {release} with one Redis"}
    for kind, name in names.items():
        for processes, case in result[kind].items():
            most, least, mean = (case[f"served_{each}"] for each in ("most", "least", "mean"))
            figure = f"{most:.3f} at most, {least:.3f} at least, {mean:.3f} on average"
            met = most <= 1.02 and least >= lower if kind == "ours" else None
            yield Row(
                f"{name}, {processes}: served in a sliding minute, of the limit", figure, f"1.02, {lower:.3f}", met
            )


READERS: Mapping[str, Callable[[Result], Iterator[Row]]] = MappingProxyType(
    {
        reader.__name__: reader
        for reader in (
            *(replays.hit_rate, replays.policies, replays.policies_anew, replays.constants, replays.shapes),
            *(replays.stale, replays.engine_caches, replays.route_eviction, replays.nodes),
            *(replays.flash_crowd, replays.marconi, replays.hybrid, replays.replay_speed),
            *(clients, data_plane, request_cost, held_heads, response_cache, decision, tokenize),
            *(residency, gossip_cost),
            *(convergence, convergence_processes, nodes_processes, limits, limits_peers),
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
