"""The nodes benchmarks: several nodes against one in virtual time, and the processes of real ones."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from benchmarks.harness import report_replays
from benchmarks.harness.report import nodes_processes
from benchmarks.nodes import Case, Run, compare, measure, mooncake, plans_of
from benchmarks.nodes_processes import Kind, conversations, kinds, result_of, router_commands
from benchmarks.workloads.traffic import chat_threads
from benchmarks.workloads.workloads import WORKLOADS
from cluster.demo.demo_plan import Lab, plan, write_key
from cluster.load.load_report import LoadLog, Sample
from ranvier_py.config.config_endpoints import gossip_endpoints
from ranvier_py.config.config_loader import load
from ranvier_py.replay.jobs import Task, execute, make_ready

CACHE_TOKENS = 1_000_000


def runs_of(nodes: Sequence[int]) -> list[Run]:
    ready = make_ready(chat_threads(1, threads=40))
    plans = plans_of(CACHE_TOKENS, ready.summary.block_tokens, nodes, 1)
    return [Run(each.nodes, each.gossip_delay_s is None, execute(Task(ready, each), lambda: 0.0)) for each in plans]


def test_nodes_that_gossip_find_as_much_as_one_and_nodes_that_do_not_find_less() -> None:
    alone, together, apart = runs_of([1, 4])
    assert [(run.nodes, run.gossip) for run in (alone, together, apart)] == [(1, False), (4, True), (4, False)]
    assert alone.done.result.hit_rate > 0.5
    assert together.done.result.hit_rate == pytest.approx(alone.done.result.hit_rate, abs=0.02)
    assert apart.done.result.hit_rate < alone.done.result.hit_rate - 0.03
    assert together.done.result.gossip_bytes > 0 == apart.done.result.gossip_bytes


def test_nodes_are_compared_with_one_in_points_and_times() -> None:
    [alone] = runs_of([1])

    def like(nodes: int, gossip: bool, hits: float, slower: float) -> Run:
        result, rows = alone.done.result, map(orjson.loads, alone.done.lines.splitlines())
        changed = replace(result, cached_tokens=int(result.cached_tokens * hits), nodes=nodes)
        times = b"".join(orjson.dumps({"ttft_s": slower * row["ttft_s"]}) + b"\n" for row in rows)
        return Run(nodes, gossip, alone.done._replace(result=changed, lines=times))

    others = [like(2, True, 1.0, 1.04), like(2, False, 0.7, 1.0), like(4, True, 1.0, 1.06)]
    one, good, bad, slow = compare([alone, *others])
    assert (one["hit_points"], one["ttft_p99_times"], one["reached"]) == (0.0, 1.0, True)
    assert good["reached"]
    assert bad["hit_points"] < -15
    assert not bad["reached"]
    assert not slow["reached"]
    assert compare(others) == []


def test_a_measurement_has_every_run_of_every_seed() -> None:
    arguments = argparse.Namespace(seeds=2, nodes=[1, 2], jobs=1)
    found = measure("threads", Case(lambda seed: chat_threads(seed, threads=3), CACHE_TOKENS), arguments)
    kinds = [(1, False), (2, True), (2, False)]
    assert [(each["nodes"], each["gossip"]) for each in found["compared"]] == [*kinds, *kinds]
    assert [each["streamed"] for each in found["compared"]] == [True] * 3 + [False] * 3
    rows = list(report_replays.nodes({"traces": [found]}))
    assert ["whole answers" in row.question for row in rows] == [False, False, True, True]


def test_mooncake_is_read_as_far_as_wanted() -> None:
    if not WORKLOADS["mooncake"].is_there():
        pytest.skip("the trace is not there")
    trace = mooncake(20.0).trace(1)
    assert 3600 < len(trace.requests) < 3700
    assert trace.requests[-1].at < 1200


# --- processes --------------------------------------------------------------------------------------------------------


def lab_of(kind: Kind) -> Lab:
    return plan(kind.settings, Random(1))


def test_our_nodes_are_started_with_flags_that_the_configuration_knows(tmp_path: Path) -> None:
    """A flag that was renamed would make the benchmark leave us out."""
    key_file = tmp_path / "key"
    write_key(key_file)
    for shared in (True, False):
        kind = Kind("ranvier", 2, shared)
        for command in router_commands(kind, lab_of(kind), key_file, None):
            words = [word for word in command.argv[command.argv.index("serve") + 1 :] if word != "--debug-headers"]
            flags: dict[str, Any] = {}
            for flag, value in zip(words[::2], words[1::2], strict=True):
                name = flag.removeprefix("--").replace("-", "_")
                if name in ("backend", "join"):
                    flags.setdefault(name, []).append(value)
                else:
                    flags[name] = value
            config, *_ = load(flags)
            assert (gossip_endpoints(config) is not None) is shared
            assert len(config.backend) == kind.settings.engines


def test_only_the_first_gateway_of_a_mesh_has_no_peer(tmp_path: Path) -> None:
    mesh, alone = Kind("smg", 3, True), Kind("smg", 2, False)
    commands = router_commands(mesh, lab_of(mesh), tmp_path, Path("/x"))
    assert ["--mesh-peer-urls" in command.argv for command in commands] == [False, True, True]
    assert not any("--enable-mesh" in each.argv for each in router_commands(alone, lab_of(alone), tmp_path, tmp_path))


def test_every_configuration_gets_the_same_chats() -> None:
    arguments = argparse.Namespace(seed=1, rate=2.0, seconds=5.0)
    first = conversations(arguments, 1.0)
    assert first == conversations(arguments, 1.0)
    assert first[-1].start_s is not None
    assert first[-1].start_s > arguments.seconds


def test_one_router_is_run_without_sharing_and_several_with_and_without() -> None:
    names = [kind.name for kind in kinds(argparse.Namespace(nodes=[1, 2], only=["smg"]))]
    assert names == ["1 smg no mesh", "2 smg mesh", "2 smg no mesh"]


def test_our_nodes_are_also_asked_for_whole_answers_and_the_page_shows_their_times() -> None:
    both = kinds(argparse.Namespace(nodes=[1], only=["ranvier"]))
    assert [kind.name for kind in both] == ["1 ranvier no gossip", "1 ranvier no gossip, whole answers"]
    log = LoadLog()
    log.good(Sample("e", "n", total_s=0.5, ttft_s=None, prompt_tokens=10, cached_tokens=5, completion_tokens=1), [])
    log.sent = 1
    found = result_of(both[1], 1.0, log, 1.0, 0.1)
    old = {"name": "old", "hit_rate": 0.5, "ttft_s": {"p50": 0.02, "p99": 0.03}, "router_cpu_s": 1.0, "think_s": 3.0}
    streams, whole = nodes_processes({"runs": [found, old]})
    assert "TTFT p50 20 ms" in streams.figure
    assert "whole answer's time p50 500 ms" in whole.figure
