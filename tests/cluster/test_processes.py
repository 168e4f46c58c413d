"""Nodes and an engine are killed under traffic, for real: no client loses what was not streaming on the dead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from cluster import chaos, processes
from cluster.load_show import show_rate
from cluster.proc_net import Way
from cluster.proc_plan import Engines
from cluster.processes import Options, Outcome
from cluster.scenario import read_scenario, settle

DEADLINE_S = 90
"""A loaded machine starts six processes in ten seconds; the run itself takes as long as the scenario says."""

SHORT = """
about = "One node and one engine die under traffic, the node comes back."
for_s = 8.0

[cluster]
nodes = 3
engines = 2

[load]
chats_per_s = 3.0
turns = 3
think_s = 0.3
prefixes = 3

[[step]]
at_s = 3.0
do = "kill"
nodes = "one"

[[step]]
at_s = 4.5
do = "engine_stop"
engines = "one"

[[step]]
at_s = 5.0
do = "start"
nodes = "all"

[expect]
failed_requests_max = 0
hit_share_min = 0.3
"""

SLOW_STREAMS = Engines(decode_ms=20.0, max_tokens=40, prefill_tokens_per_s=30_000.0)
"""0.8 s for an answer: some stream wherever something is killed."""


async def short_run(folder: Path, seed: int) -> Outcome:
    scenario = settle(read_scenario(SHORT, "short"), seed)
    said: list[str] = []
    with trio.fail_after(DEADLINE_S):
        return await processes.run_scenario(
            scenario, Way("direct", "nothing is cut"), Options(seed=seed, engines=SLOW_STREAMS), folder, said.append
        )


@pytest.mark.slow
async def test_no_request_fails_but_those_that_streamed_on_the_dead(tmp_path: Path) -> None:
    outcome = await short_run(tmp_path, seed=1)
    books = outcome.books
    counts = books.counts()
    report = f"{json.dumps(outcome.as_json(), indent=1)}\nhit rate {show_rate(outcome.hits['last_third'])}"
    assert books.failed == [], report
    assert outcome.good, report
    assert [death.who for death in books.deaths if death.who.startswith("127.")], "a node was killed"
    assert [death.who for death in books.deaths if death.who.startswith("engine-")], "an engine was killed"
    assert counts["sent"] == counts["ok"] + counts["was_streaming_on_a_killed_process"] > 30, report
    assert counts["ok_after_retry"] > 0, "clients met the dead node and went on to the next"
    assert sum("started" in event.text for event in books.diary) == 3 + 2 + 1, "the node came back"
    killed = {death.who: death.at_s for death in books.deaths}
    assert all(entry.began_s < killed.get(entry.engine, DEADLINE_S) for entry in books.entries if entry.ok), report


def test_an_outcome_tells_how_to_have_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    options = chaos.make_parser().parse_args(["--seed", "9", "--nodes", "2", "--links", "direct", "--no-gossip"])
    scenario = chaos.scenario_of("steady", options)
    assert chaos.again(scenario, options) == (
        "python -m cluster chaos --scenario steady --seed 9 --nodes 2 --links direct --no-gossip"
    )
