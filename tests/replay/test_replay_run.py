"""One run: real routers, modelled engines, restarts and refusals, on one clock."""

from __future__ import annotations

import os
import select
import signal
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import orjson
import pytest

from ranvier_py.core.routing.placement.policies import POLICIES
from ranvier_py.core.routing.request_record import Header
from ranvier_py.core.routing.route_table import RouteTableOptions
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.jobs import Done, Ready, RunFailed, Task, execute, execute_all, make_ready
from ranvier_py.replay.replay_plan import Plan, Restart
from ranvier_py.replay.results import SAMPLES_MAX
from ranvier_py.replay.traces.open_trace import open_trace
from ranvier_py.replay.traces.trace import Trace
from tests.core.routing.recorded import a_record
from tests.examples import some
from tests.replay.synthetic import BLOCK, chats, conversation

LIMITS = EngineLimits(cache_tokens=200_000, block_size=BLOCK)
READY = make_ready(chats())
RUNS_END_S = 3.0  # a run looks for its command several times a second


def plan(policy: str = "affinity", nodes: int = 1, **given: object) -> Plan:
    return replace(Plan(policy, nodes, (LIMITS,) * 4, regret=False), **given)  # type: ignore[arg-type]


def done(wanted: Plan, ready: Ready = READY) -> Done:
    return execute(Task(ready, wanted), lambda: 0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_every_request(policy: str) -> None:
    result = done(plan(policy)).result
    assert result.requests == READY.summary.requests == 200
    assert result.failed == 0
    assert result.prompt_tokens == READY.summary.prompt_tokens
    assert sum(result.requests_by_engine) == 200
    assert sum(result.computed_by_engine) == result.prompt_tokens - result.cached_tokens
    assert sum(result.reasons.values()) == 200


@pytest.mark.parametrize("nodes", [1, 3])
def test_two_runs_of_one_plan_are_equal(nodes: int) -> None:
    wanted = plan("affinity", nodes, per_request=True, restarts=(Restart(12.0, 1),))
    assert done(wanted) == done(wanted)


def test_another_seed_is_another_run() -> None:
    assert (
        done(plan("random", seed=1)).result.requests_by_engine != done(plan("random", seed=2)).result.requests_by_engine
    )


def test_following_the_prefix_finds_what_taking_turns_misses() -> None:
    """The chats outlive their first turn at one engine; what is in no cache yet nobody can find."""
    follows, turns = done(plan("affinity")).result, done(plan("round_robin")).result
    assert follows.hit_rate > turns.hit_rate + 0.15
    assert follows.ttft_s["p50"] < turns.ttft_s["p50"]
    assert follows.predicted_hit_rate == pytest.approx(follows.hit_rate, abs=0.05)
    assert turns.predicted_hit_rate == 0.0


def test_answers_are_learned_with_their_depth() -> None:
    """Later turns are matched through the answers before them: 20 blocks of a second turn, not only 16."""
    first, second = [item for item in READY.items if item.request.session == "chat-0"][:2]
    assert first.answered.tokens == 20 * BLOCK
    assert second.prompt.end.tokens == 28 * BLOCK
    assert second.prompt.tokens == 28 * BLOCK + 5
    assert first.prompt.end.parent is second.prompt.end.parent.parent  # type: ignore[union-attr]  # the same objects


def test_what_opens_a_chat_is_what_the_trace_states() -> None:
    """Or a policy that hashes openings would take all chats of a trace for one."""
    request = replace(READY.items[0].request, opening=b"sixteen bytes of")
    item = make_ready(Trace("one", [request], BLOCK, timed=True)).items[0]
    assert item.prompt.opening(1024, "system") == b"sixteen bytes of"


def test_gossip_gives_several_nodes_the_hits_of_one() -> None:
    one = done(plan("affinity", 1)).result.hit_rate
    assert done(plan("affinity", 4)).result.hit_rate > one - 0.05
    assert done(plan("affinity", 4, gossip_delay_s=0.1)).result.hit_rate > one - 0.05
    assert done(plan("affinity", 4, gossip_delay_s=3600.0)).result.hit_rate < one - 0.05


def test_a_slow_engine_among_fast_ones_is_slow_and_ttft_learns_it() -> None:
    slow = replace(LIMITS, prefill_tokens_per_s=LIMITS.prefill_tokens_per_s / 20)
    mixed = (LIMITS, LIMITS, LIMITS, slow)
    turns = done(plan("round_robin", engines=mixed, per_request=True))
    took = [(row["engine"], row["ttft_s"] / (row["prompt"] - row["cached"])) for row in rows(turns) if row["ttft_s"]]
    slowest = min(each for engine, each in took if engine == 3)
    assert slowest > 5 * min(each for engine, each in took if engine != 3)
    assert turns.result.requests_by_engine[3] == 50
    assert done(plan("ttft", engines=mixed)).result.requests_by_engine[3] < 25


def test_twice_the_speed_is_half_the_time() -> None:
    slow, fast = done(plan()).result, done(plan(speed=2.0)).result
    assert fast.offered_per_s == pytest.approx(2 * slow.offered_per_s, rel=1e-3)
    assert fast.virtual_s < 0.6 * slow.virtual_s


def test_a_prompt_that_fits_no_cache_is_counted_as_failed() -> None:
    """Beside an engine that takes it: each engine has its own limits."""
    small = replace(LIMITS, cache_tokens=40 * BLOCK)
    result = done(plan("round_robin", engines=(small, LIMITS))).result
    assert result.failures.keys() == {"prompt_too_long"}
    assert 0 < result.failed < 100
    assert result.requests == 200
    assert sum(result.requests_by_engine) == 200  # it was sent there: that is the router's choice


def test_a_full_queue_is_counted_as_failed_and_the_rest_is_served() -> None:
    narrow = replace(LIMITS, running_max=1, waiting_max=2)
    result = done(plan("least_loaded", engines=(narrow,) * 2, speed=10.0)).result
    assert result.failures.keys() == {"queue_full"}
    assert len(READY.items) == 200 > result.failed > 0
    assert result.load_over_time
    assert max(max(row[1:]) for row in result.load_over_time) <= 3


@pytest.mark.parametrize("policy", ["affinity", "ttft"])
def test_answers_that_come_as_a_whole_spread_as_streams_do(policy: str) -> None:
    """A router that took them for decoding at once would see no work anywhere, and send all to one engine."""
    streams, whole = READY, make_ready(chats(), stream=False)
    results = [done(plan(policy, speed=10.0), ready).result for ready in (streams, whole)]
    assert results[1].ttft_s["p90"] < 2 * results[0].ttft_s["p90"]
    assert max(results[1].requests_by_engine) < 2 * 200 / 4


def test_in_a_closed_loop_each_turn_comes_after_the_answer_before_it() -> None:
    think_s = 3.0
    found = rows(done(plan("affinity", think_s=think_s, per_request=True)))
    ends: dict[str, float] = {}
    for row in found:
        assert row["at"] >= ends.get(row["session"], -think_s) + think_s - 1e-6
        ends[row["session"]] = row["at"] + row["ttft_s"]
    assert len(found) == 200


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_restart_ends_what_the_engine_had_and_empties_its_cache(nodes: int) -> None:
    calm = done(plan("affinity", nodes)).result
    shaken = done(plan("affinity", nodes, restarts=tuple(Restart(10.0 + each, each) for each in range(4)))).result
    assert shaken.failures.keys() == {"engine_restarted"}
    assert shaken.requests == 200
    assert shaken.hit_rate < calm.hit_rate


def test_a_lone_engine_that_broke_off_many_requests_is_asked_all_the_same_until_probes_find_it_healthy() -> None:
    """Each of the nodes learns of that from the others. Nothing says that the engine refuses: there is no other."""
    slow = replace(LIMITS, prefill_tokens_per_s=2_000.0)
    result = done(plan("affinity", 3, engines=(slow,), restarts=(Restart(5.0, 0),))).result
    assert result.failures.keys() == {"engine_restarted"}
    assert result.requests == 200 == result.served + result.failed
    assert result.reasons["silent"] > 0


def test_nodes_forget_what_a_restarted_engine_held() -> None:
    """Within a probe interval predictions are right again; believed for ever, they would promise what is gone."""
    late = make_ready(chats(count=60, within_s=60.0))
    restarts = tuple(Restart(30.0, engine) for engine in range(4))
    result = done(plan("affinity", restarts=restarts), late).result
    assert result.predicted_hit_rate < result.hit_rate + 0.1


def test_a_recording_is_replayed_whose_prompts_were_learned_with_different_stops(tmp_path: Path) -> None:
    """A deep stop in common, another way to it: engines with small caches looked for blocks that they had evicted."""
    draw, lines = Random(1), [Header(0.0, BLOCK, "a").line()]
    for number in range(150):
        document = draw.randrange(8)
        depths = sorted({*draw.sample(range(1, 60), 3), 60})
        chain = tuple((depth * BLOCK, 100 * document + depth + 1) for depth in depths)
        lines.append(a_record(at=number / 4, chain=chain, ends=(len(chain) - 1,), prompt_tokens=1000).line())
    path = tmp_path / "node.jsonl"
    path.write_bytes(b"".join(lines))
    small = (replace(LIMITS, cache_tokens=150 * BLOCK),) * 2
    result = done(plan("least_loaded", 4, engines=small, regret=True), make_ready(open_trace(path))).result
    assert (result.requests, result.failed) == (150, 0)


def test_load_is_reported_in_few_samples_that_end_with_nothing_in_flight() -> None:
    result = done(plan()).result
    assert 10 < len(result.load_over_time) <= SAMPLES_MAX
    times = [row[0] for row in result.load_over_time]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert all(len(row) == 5 for row in result.load_over_time)
    assert any(sum(row[1:]) > 0 for row in result.load_over_time)


def rows(run: Done) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in run.lines.splitlines()]


def test_each_request_is_reported_alone_where_that_is_wanted() -> None:
    lines = rows(done(plan(per_request=True)))
    assert len(lines) == 200
    assert [line["at"] for line in lines] == sorted(line["at"] for line in lines)
    assert {"session", "engine", "reason", "matched", "cached", "prompt", "ttft_s", "terms", "policy"} <= lines[
        0
    ].keys()
    assert done(plan()).lines == b""


@pytest.mark.parametrize("per_depth_s", some([1e-8, 0.0]))
def test_ttft_predicts_an_engine_whose_tokens_take_longer_the_deeper_they_are(per_depth_s: float) -> None:
    """Chats of up to 13,000 tokens, where a token takes up to 3.6 times as long as the first, or as long."""
    chats_of_length = [conversation(number, number * 0.9, 12, turn_blocks=64) for number in range(40)]
    found = sorted((request for each in chats_of_length for request in each), key=lambda request: request.at)
    limits = replace(LIMITS, prefill_tokens_per_s=50_000.0, prefill_s_per_depth=per_depth_s)
    wanted = plan("ttft", per_request=True, engines=(limits,) * 4)
    lines = rows(done(wanted, make_ready(Trace("long chats", found, BLOCK, timed=True))))
    learned = lines[-100:]
    depths = sorted(line["prompt"] for line in learned)
    for least, most in ((0, depths[len(depths) // 3]), (depths[-len(depths) // 3], inf)):
        alike = [line for line in learned if least <= line["prompt"] <= most]
        predicted_s = [sum(line["terms"][line["engine"]][name] for name in ("queue_s", "prefill_s")) for line in alike]
        errors = [one_s / line["ttft_s"] - 1.0 for one_s, line in zip(predicted_s, alike, strict=True)]
        assert len(alike) > 30
        assert abs(median(errors)) < 0.1


def test_processes_give_the_results_of_one_in_the_order_of_the_tasks() -> None:
    tasks = [Task(READY, plan(policy)) for policy in ("round_robin", "affinity", "random")]
    seen: list[tuple[int, int]] = []
    side_by_side = execute_all(tasks, 2, lambda: 0.0, lambda requests, ended: seen.append((requests, ended)))
    assert side_by_side == execute_all(tasks, 1, lambda: 0.0)
    assert [each.result.policy for each in side_by_side] == ["round_robin", "affinity", "random"]
    assert seen[-1] == (600, 3)


def test_a_run_that_dies_states_where() -> None:
    broken = Task(Ready(READY.summary, (None,)), plan())  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match=r"affinity on 1 nodes at rate 1 died: (?s:.*)Traceback"):
        execute_all([broken, broken], 2, lambda: 0.0)


@pytest.mark.slow
def test_a_run_ends_when_its_command_was_killed() -> None:
    """Whoever kills the command has no other way to end the processes that it began."""
    reported, reporting = os.pipe()
    command = os.fork()
    if command == 0:  # the command; it is killed as soon as its runs are under way, of which each takes ten seconds
        long = Ready(READY.summary, make_ready(chats(1500)).items)

        def killed(requests: int, _: int) -> None:
            if requests:
                os.kill(os.getpid(), signal.SIGKILL)

        execute_all([Task(long, plan())] * 2, 2, lambda: 0.0, killed)
        os._exit(0)
    os.close(reporting)  # open in the command and in its runs alone
    os.waitpid(command, 0)
    ended, _, _ = select.select([reported], [], [], RUNS_END_S)
    os.close(reported)
    assert ended, "a run goes on"


def test_a_trace_of_prompts_without_a_whole_block_is_served() -> None:
    short = [
        replace(request, prompt_tokens=9, chain=(), ends=(), blocks=(), answer_tokens=2)
        for request in chats(4).requests
    ]
    result = done(plan(), make_ready(Trace("short", short, BLOCK, timed=True))).result
    assert result.hit_rate == 0.0
    assert result.reasons == {"no_prefix": 20}


# --- oracles and regret ---------------------------------------------------------------------------------------------


def test_oracles_need_no_nodes_and_bound_what_policies_reach() -> None:
    greedy, soonest = (done(plan(name, 0, regret=True)).result for name in ("oracle_greedy", "oracle_ttft"))
    routed = [done(plan(name, 1, regret=True)).result for name in ("affinity", "round_robin")]
    assert greedy.is_oracle
    assert greedy.reasons == {"oracle_greedy": 200}
    assert greedy.hit_rate > max(each.hit_rate for each in routed) - 0.02  # it does not see what is on its way
    assert soonest.ttft_s["mean"] < 1.1 * min(each.ttft_s["mean"] for each in routed)  # greedy: later ones pay for it
    assert soonest.regret_s["sum"] == 0.0


def test_regret_is_greater_where_prefixes_are_ignored() -> None:
    follows, turns = (done(plan(name, regret=True)).result.regret_s for name in ("affinity", "round_robin"))
    assert 0.0 <= follows["sum"] < turns["sum"]
    assert 0.0 < turns["share_of_ttft"] < 1.0
    assert turns["mean"] == pytest.approx(turns["sum"] / 200, abs=1e-5)


def test_asking_for_regret_changes_nothing_else() -> None:
    with_regret, without = done(plan("ttft", 2, regret=True)).result, done(plan("ttft", 2)).result
    assert replace(with_regret, regret_s={}) == without


def test_a_choice_that_is_refused_has_no_regret_in_seconds() -> None:
    """An engine without room answers never; infinity is no number that JSON has."""
    small = replace(LIMITS, cache_tokens=40 * BLOCK)
    found = done(plan("round_robin", engines=(small, LIMITS), regret=True, per_request=True))
    assert found.result.regret_s["sum"] < 1e6
    reported = [orjson.loads(line) for line in found.lines.splitlines()]
    assert all(("failed" in line) != ("regret_s" in line) for line in reported)


@pytest.mark.slow
def test_a_small_route_table_finds_more_where_it_forgets_by_utility() -> None:
    """Chats that pause: of each idle one the end is what its next turn needs."""
    small = plan(routes_max=300, knowledge="estimated")
    ready = make_ready(chats(80, 6, within_s=8.0))
    lru = done(small, ready).result
    utility = done(replace(small, routes=RouteTableOptions("utility")), ready).result
    assert utility.predicted_hit_rate > lru.predicted_hit_rate + 0.05
    assert utility.hit_rate > lru.hit_rate + 0.05
    whole = done(replace(small, routes_max=1_000_000), ready).result
    assert utility.hit_rate <= whole.hit_rate + 0.01
