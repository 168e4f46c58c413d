"""docs/metrics.md is what a node declares, and what it declares is what Prometheus wants."""

from __future__ import annotations

import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from cluster.pages.metrics_page import PAGE, page
from ranvier_py.control.exposition import render
from ranvier_py.core.metrics import Histogram, Sample
from tests.deploy.promtool import needs_promtool, promtool
from tests.house import leans
from tests.node.node_lab import lab, turn

ROW = re.compile(r"(?m)^\| `(\w+)` \| (\w+) \| (.*)\| (.+) \|$")
UNITS = {"seconds": "second", "bytes": "byte", "tokens": "token"}
"""How a name ends, and what its help speaks of then."""


def rows() -> dict[str, tuple[str, str]]:
    """Kind and help of each metric on the page, by name."""
    return {name: (kind, words) for name, kind, _, words in ROW.findall(PAGE.read_text())}


def test_the_page_is_what_the_parts_of_a_node_declare() -> None:
    assert PAGE.read_text() == page(), "run `make pages`"


def test_each_help_is_a_sentence_that_names_its_unit_and_can_be_read_alone() -> None:
    found = rows()
    assert len(found) > 500
    for name, (_, words) in found.items():
        assert words.endswith("."), name
        assert not leans(words), name
        for unit, word in UNITS.items():
            if re.search(rf"_{unit}(_total)?$", name):
                assert word in words.lower(), f"{name}: {words}"


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
async def test_a_live_node_has_no_metric_that_the_page_lacks(accept: str) -> None:
    async with lab(engines=2) as node:
        for number in range(3):
            await node.chat(turn(f"hello {number} " * 50), stream=True)
        answer = await node.http.get(f"{node.control}/metrics", headers={"accept": accept})
        found = dict(re.findall(r"(?m)^# TYPE (\S+) (\w+)$", answer.text))
        if accept:
            assert answer.text.endswith("# EOF\n")
            found = {name + "_total" * (kind == "counter"): kind for name, kind in found.items()}
            assert len([*parse_openmetrics(answer.text)]) == len(found)
        known = {name: kind for name, (kind, _) in rows().items()}
        assert not found.items() - known.items()
        assert {"ranvier_build_info", "process_resident_memory_bytes", "process_open_fds"} <= found.keys()


@needs_promtool
async def test_the_tool_of_prometheus_finds_nothing_wrong_with_a_page() -> None:
    async with lab(engines=1) as node:
        await node.chat()
        assert promtool("check", "metrics", text=(await node.http.get(f"{node.control}/metrics")).text) == ""


def test_only_openmetrics_shows_the_trace_of_a_request_in_its_bucket() -> None:
    seconds, trace = Histogram((0.1, 1.0)), "4bf92f3577b34da6a3ce929d0e0e4736"
    seconds.observe_all([0.05, 0.5], ["", trace], 1_700_000_000.0)
    sample = Sample("queue_seconds", "histogram", "Seconds of a queue.", seconds)
    (family,) = parse_openmetrics(render([sample], "application/openmetrics-text; version=1.0.0")[0].decode())
    shown = [each.exemplar for each in family.samples if each.exemplar is not None]
    assert [(each.labels, each.value, float(each.timestamp)) for each in shown] == [
        ({"trace_id": trace}, 0.5, 1_700_000_000.0)
    ]
    assert trace not in render([sample])[0].decode()
