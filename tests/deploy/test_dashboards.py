"""The dashboards are made of one table, and each of its expressions returns data of a cluster under load."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import trio

from cluster.engine.kv_publisher import KvEndpoints
from cluster.pages.dashboards import INTERVAL, JOB, TABLE, dashboards, expressions
from cluster.pages.metrics_page import PAGE
from tests.deploy.live_prometheus import prometheus
from tests.deploy.promtool import needs_prometheus
from tests.node.access.key_lab import BLUE, RED, bearer, key_lines, keys_file
from tests.node.node_lab import Node, chat, cluster_lab, start_engine, turn

DEADLINE_S = 120
RANGE = "20s"


def test_the_files_are_made_of_the_table() -> None:
    for path, text in dashboards().items():
        assert path.read_text() == text, "run `make pages`"


def test_each_panel_has_a_title_of_its_own_a_unit_and_metrics_that_there_are() -> None:
    known = set(re.findall(r"(?m)^\| `(\w+)`", PAGE.read_text()))
    assert len(TABLE) == 3
    for _, panels in TABLE.values():
        assert len({panel.title for panel in panels}) == len(panels)
        assert all(panel.unit and panel.shown for panel in panels)
    for panel, expression in expressions():
        named = set(re.findall(r"\b(?:ranvier|process)_\w+", expression))
        assert named, panel
        assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in named} <= known, panel


def test_a_dashboard_names_no_source_and_no_job_of_ours() -> None:
    for text in dashboards().values():
        shown = json.loads(text)
        assert {each["name"] for each in shown["templating"]["list"]} == {"datasource", "job"}
        assert {target["datasource"]["uid"] for panel in shown["panels"] for target in panel["targets"]} == {
            "${datasource}"
        }


async def user(node: Node, number: int, key: str) -> None:
    """Turns of one chat after another, streamed with counts, until cancelled."""
    while True:
        contents: list[str] = []
        for words in range(4):
            contents += [f"question {number} {words} {trio.current_time()} " * 20]
            body = chat(turn(*contents), stream=True, stream_options={"include_usage": True})
            await node.http.post(f"{node.url}/v1/chat/completions", content=body, headers=bearer(key))
            contents += ["An answer."]
            await trio.sleep(0.05)


@needs_prometheus
@pytest.mark.slow
async def test_every_expression_returns_data_of_a_cluster_under_load(tmp_path: Path) -> None:
    """Asked of a real Prometheus that scrapes both nodes."""
    limited = '[[tenant]]\nname = "small"\nrequests_per_minute = 5\nbudget = [{amount = 100000, window = "day"}]\n\n'
    keys = keys_file(tmp_path, limited, key_lines(RED, tenant="small"), key_lines(BLUE))
    settings = {"keys_file": keys, "shadow": ["ttft"], "response_cache": True, "engine_metrics_interval_s": 0.5}
    async with cluster_lab(tmp_path, engines=0, deadline_s=DEADLINE_S) as place:
        for number in range(2):
            place.engines.append((await start_engine(place.nursery, number, kv=KvEndpoints()))[0])
        nodes = await place.cluster(2, **settings)
        missing = dict.fromkeys(expressions())
        async with (
            prometheus(tmp_path, place.http, [node.control for node in nodes]) as found,
            trio.open_nursery() as nursery,
        ):
            for number in range(4):
                nursery.start_soon(user, nodes[number % 2], number, BLUE)
            nursery.start_soon(user, nodes[0], 4, RED)
            with trio.move_on_after(DEADLINE_S / 2):
                while missing:
                    await trio.sleep(1)
                    for each in [*missing]:
                        if await found.numbers(each[1].replace(INTERVAL, RANGE).replace(JOB, ".*")):
                            del missing[each]
            nursery.cancel_scope.cancel()
    assert [*missing] == []
