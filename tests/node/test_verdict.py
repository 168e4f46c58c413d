"""What a node finds wrong, on its control port, in its log and among its metrics: real nodes, engines and sockets."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import trio

from ranvier_py.config.config_loader import config_of
from ranvier_py.core.peer import peer_findings
from ranvier_py.core.routing.backend_state import backend_sets, status_reports
from ranvier_py.node.parts import verdict_parts
from ranvier_py.node.parts.backend_views import settings_digest
from tests.documents import DOCS, tables
from tests.node.node_lab import KEY, Lab, Node, cluster_lab, lab, opened, start_engine

DEADLINE_S = 30.0
SOON = {"probe_interval_s": 0.1, "probe_timeout_s": 0.5, "engine_metrics_interval_s": 0.2}


async def until_found(node: Node, kind: str, *, there: bool = True) -> dict[str, Any]:
    """The status as soon as it has a finding of this kind, or none any more."""
    holds = lambda answer: any(each["kind"] == kind for each in answer["findings"]) is there  # noqa: E731
    return dict(await node.until("/admin/status", holds))


async def until_logged(caplog: pytest.LogCaptureFixture, words: str) -> None:
    while words not in caplog.text:  # noqa: ASYNC110  # the log wakes nobody
        await trio.sleep(0.05)


def finding(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(each for each in status["findings"] if each["kind"] == kind)


async def test_an_engine_that_dies_is_a_finding_until_it_is_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(verdict_parts, "LOOK_S", 0.05)
    monkeypatch.setattr("ranvier_py.core.findings.GONE_S", 0.2)
    async with opened(Lab, 2, DEADLINE_S) as place:
        url, scope = await start_engine(place.nursery, 9)
        place.engines.append(url)
        node = await place.start(**SOON)
        status = await node.ask("/admin/status")
        assert status["ready"]
        assert len(status["engines"]) == 3
        scope.cancel()
        status = await until_found(node, "engine_down")
        found = finding(status, "engine_down")
        assert status["severity"] == "degraded"
        assert found["about"] in found["what"]
        assert found["since_s"] < DEADLINE_S
        assert found["whom"]
        assert found["remedy"]
        assert found["command"] == f"curl -m 5 {url}/health"
        assert status["engines"][0]["name"] == found["about"]
        assert [each["state"] for each in status["engines"]] == ["down", "ok", "ok"]
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert 'ranvier_finding{kind="engine_down"} 1.0' in page
        verbose = (await node.http.get(f"{node.control}/readyz?verbose")).json()
        assert verbose["ready"]
        assert "engine_down" in {each["kind"] for each in verbose["findings"]}
        assert (await node.http.get(f"{node.control}/readyz")).json() == {"ready": True, "reason": ""}
        port = int(url.rpartition(":")[2])
        await start_engine(place.nursery, 9, port)
        await until_found(node, "engine_down", there=False)
        await until_logged(caplog, "finding.ended engine_down")
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert 'ranvier_finding{kind="engine_down"} 0.0' in page
    assert caplog.text.count("finding.began engine_down degraded") == 1
    assert caplog.text.count("finding.ended engine_down") == 1


async def test_a_node_whose_engines_are_all_dead_is_down() -> None:
    async with opened(Lab, 0, DEADLINE_S) as place:
        engines = [await start_engine(place.nursery, number) for number in range(2)]
        place.engines += [url for url, _ in engines]
        node = await place.start(**SOON)
        for _, scope in engines:
            scope.cancel()
        status = await until_found(node, "no_engine")
        assert status["severity"] == "down"
        assert status["findings"][0]["kind"] == "no_engine"


async def test_a_node_without_any_engine_shows_how_to_add_one() -> None:
    async with lab(engines=0) as node:
        found = finding(await until_found(node, "no_engine"), "no_engine")
        assert found["command"].startswith("ranvier backend add ")


async def test_a_drained_engine_is_a_notice_and_so_is_what_is_wrong_with_it() -> None:
    async with opened(Lab, 1, DEADLINE_S) as place:
        url, scope = await start_engine(place.nursery, 9)
        place.engines.append(url)
        node = await place.start(**SOON)
        await node.http.post(f"{node.control}/admin/backends/drain", json={"url": url})
        status = await until_found(node, "engine_draining")
        assert finding(status, "engine_draining")["severity"] == "notice"
        assert status["engines"][0]["draining"]
        assert status["engines"][0]["states"] == ["draining"]
        scope.cancel()
        status = await until_found(node, "engine_down")
        assert status["engines"][0]["states"] == ["draining", "down"]
        assert status["severity"] == "notice"


async def test_an_engine_that_fails_inside_200_is_named_with_what_it_answers() -> None:
    async with lab(engines=2, policy="round_robin", **SOON) as node:
        await node.fault(node.engines[0], kind="error_inside", form="first", status=500)
        for number in range(40):
            assert (await node.chat([{"role": "user", "content": f"question {number}"}])).status_code == 200
        found = finding(await until_found(node, "engine_fails"), "engine_fails")
        assert "within a 200" in found["what"]
        assert found["severity"] == "degraded"


async def test_readyz_at_length_takes_a_key() -> None:
    async with lab(engines=1, control_key=KEY) as node:
        assert (await node.http.get(f"{node.control}/readyz")).status_code == 200
        assert (await node.http.get(f"{node.control}/readyz?verbose")).status_code == 401
        asked = await node.http.get(f"{node.control}/readyz?verbose", headers={"authorization": f"Bearer {KEY}"})
        assert "findings" in asked.json()


async def test_a_part_that_fails_when_asked_is_a_finding_and_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("ranvier_py.node.parts.backend_parts.engine_findings", failing)
    async with lab(engines=1, **SOON) as node:
        status = await until_found(node, "loop_failed")
        assert "ZeroDivisionError" in finding(status, "loop_failed")["what"]
        assert finding(status, "cache_level")


@pytest.mark.slow
async def test_what_is_wrong_among_nodes_is_named_with_the_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_sets, "ASK_S", 0.1)
    monkeypatch.setattr(backend_sets, "DIFFERS_S", 0.3)
    async with cluster_lab(tmp_path, engines=2) as place:
        (tmp_path / "old").write_text("19" * 16 + "c4" * 16)
        node = await place.start()
        await place.start(cluster_key_file=tmp_path / "old")
        lost = await place.start(backend=place.engines[:1], block_size_tokens=32)
        status = await until_found(node, "peer_fingerprints")
        (name,) = [each["name"] for each in status["peers"]]
        assert finding(status, "peer_fingerprints")["about"] == name
        found = finding(await until_found(node, "peer_key"), "peer_key")
        assert "another cluster key" in found["what"]
        lost.scope.cancel()
        assert finding(await until_found(node, "peer_lost"), "peer_lost")["about"] == name


async def test_a_peer_with_other_engines_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_sets, "ASK_S", 0.1)
    monkeypatch.setattr(backend_sets, "DIFFERS_S", 0.3)
    async with cluster_lab(tmp_path, engines=2) as place:
        node, _ = await place.start(), await place.start(backend=place.engines[:1])
        found = finding(await until_found(node, "peer_engines"), "peer_engines")
        assert place.engines[1].removeprefix("http://") in found["what"]


async def test_a_peer_that_places_requests_otherwise_is_named_and_what_may_differ_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_sets, "DIFFERS_S", 0.3)
    async with cluster_lab(tmp_path, engines=1) as place:
        node, like = await place.start(), await place.start(shadow=["random"], log_level="warning")
        other = await place.start(policy="least_loaded", node_name="other")
        found = finding(await until_found(node, "peer_config"), "peer_config")
        assert (found["about"], found["severity"]) == ("other", "notice")
        status = await until_found(like, "peer_config")
        assert [each["about"] for each in status["findings"] if each["kind"] == "peer_config"] == ["other"]
        assert (
            len({each["about"] for each in (await until_found(other, "peer_config"))["findings"]} - {"", "other"}) > 1
        )


def test_nodes_that_have_their_keys_in_other_places_place_requests_alike(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("key")
    digests = []
    for key in ({"api_key_file": str(tmp_path / "a")}, {"api_key_file": str(tmp_path / "b")}, {"api_key": "key"}):
        files = {"api_key_file": str(tmp_path / "b")} if "api_key" in key else {}
        backend, model = {"url": "http://10.0.0.1:8000", **files}, {"name": "m", "to": "n", **key}
        digests.append(settings_digest(config_of(backend=[backend], model=[model])))
    assert len({*digests}) == 1
    assert settings_digest(config_of(model=[{"name": "m", "to": "other"}])) not in digests


async def test_a_node_that_finds_none_of_its_peers_is_degraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_findings, "ALONE_S", 0.2)
    async with cluster_lab(tmp_path) as place:
        node = await place.start(join=["127.0.0.1:1"])
        assert (await until_found(node, "no_peer"))["severity"] == "degraded"


async def test_the_status_has_the_members_that_the_documents_list(tmp_path: Path) -> None:
    """Programs read them."""
    text = DOCS["operating.md"].partition("## Status")[2].partition("\n## ")[0]
    rows = [row.split("|") for row in tables(text)[0][2:]]
    listed = {name: row[2] for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    async with cluster_lab(tmp_path, engines=1) as place:
        node, _ = await place.cluster(2)
        status = await until_found(node, "cache_level")
        assert sorted(status) == sorted(listed)
        for name in ("findings", "engines", "peers"):
            assert sorted(status[name][0]) == sorted(re.findall(r"`(\w+)`", listed[name])), name
        assert sorted(status["requests"]) == sorted(re.findall(r"`(\w+)`", listed["requests"]))


async def test_any_node_shows_the_counts_of_all_engines_and_what_is_wrong_with_each_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine's page is read by one node, and only the node itself sees that its port is full."""
    monkeypatch.setattr(verdict_parts, "LOOK_S", 0.05)
    monkeypatch.setattr(status_reports, "SENT_S", 0.1)
    async with cluster_lab(tmp_path, engines=4) as place:
        first = await place.start(**SOON)
        second = await place.start(**SOON, connections_max=2, in_flight_max=2)
        for node in (first, second):
            counted = lambda status: all(each["running"] is not None for each in status["engines"])  # noqa: E731
            await node.until("/admin/status", counted)
        wires = [await second.wire() for _ in range(2)]
        status = await until_found(first, "node_full")
        (name,) = [each["name"] for each in status["peers"]]
        found = finding(status, "node_full")
        assert (found["node"], found["severity"]) == (name, "degraded")
        assert found["what"].startswith(f"{name}: ")
        assert finding(await until_found(second, "node_full"), "node_full")["node"] == ""
        for wire in wires:
            await wire.aclose()
        await until_found(first, "node_full", there=False)
