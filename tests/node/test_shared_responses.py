"""Nodes that share their response caches: an answer of one is a hit on all, and what is void on one is void on all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from ranvier_py.config.config_loader import config_of
from ranvier_py.control.status_page import response_cache_lines
from ranvier_py.core.errors import ConfigError
from tests.examples import some
from tests.node.node_lab import BETWEEN_LOOKS_S, KEY, ClusterLab, Node, cluster_lab, turn
from tests.node.test_cached_responses import COLD, ask, chat, results
from tests.proxy.wire import END, GOOD, ROLE, STREAM_HEAD, TOKEN, Scripted, Step

SHARING = "response_cache_backend"
SHARED = {"response_cache": True, SHARING: "cluster"}
PATIENT = {**SHARED, "response_cache_peer_timeout_s": 2.0}
"""For what is not about the deadline: a crowded machine may take its time."""

TIMEOUT_S = 0.02
SLACK_S = 0.25  # that the rest of a request takes on a crowded machine


@asynccontextmanager
async def sharing(
    folder: Path, engine: Scripted, nodes: int = 2, **settings: Any
) -> AsyncIterator[tuple[ClusterLab, list[Node]]]:
    async with cluster_lab(folder, engines=0) as place:
        place.engines += [await place.listen(engine.serve)]
        yield place, await place.cluster(nodes, **{**PATIENT, **settings})


async def peers_of(node: Node) -> dict[str, Any]:
    return dict((await node.ask("/admin/response-cache/stats"))["peers"])


async def until_known(nodes: Sequence[Node], count: int) -> None:
    for node in nodes:
        await node.until("/admin/response-cache/stats", lambda stats: stats["peers"]["known"] == count)


async def invalidate(node: Node, **wanted: object) -> dict[str, Any]:
    answer = await node.http.post(f"{node.control}/admin/response-cache/invalidate", json=wanted)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def until_result(node: Node, wanted: str) -> None:
    while (await ask(node)).headers["x-cache"] != wanted:  # noqa: ASYNC110  # a peer decides
        await trio.sleep(BETWEEN_LOOKS_S)


async def test_an_answer_of_one_node_is_a_hit_on_all_four_and_no_engine_is_asked_again(tmp_path: Path) -> None:
    engine = Scripted(GOOD)
    async with sharing(tmp_path, engine, 4) as (_, nodes):
        first = await ask(nodes[0])
        await until_known(nodes[1:], 1)
        answers = [await ask(node) for node in nodes[1:]]
        assert results(first, *answers) == ["MISS", "HIT", "HIT", "HIT"]
        assert {answer.content for answer in answers} == {first.content}
        assert all(int(answer.headers["age"]) >= 0 for answer in answers)
        assert len(engine.bodies) == 1
        stats = await nodes[1].ask("/admin/response-cache/stats")
        assert (stats["backend_type"], stats["entries"]) == ("cluster", 1)
        assert stats["peers"]["fetches"]["found"] == 1
        assert any("of peers" in line and "found=1" in line for line in response_cache_lines(stats))
        assert (await peers_of(nodes[0]))["given"]["found"] >= 1
        assert results(await ask(nodes[1], "bob")) == ["MISS"]  # another credential
        page = (await nodes[1].http.get(f"{nodes[1].control}/metrics")).text
        assert 'ranvier_peer_answers_fetches_total{result="found"} 1.0' in page


async def test_a_stream_of_one_node_is_replayed_by_another(tmp_path: Path) -> None:
    engine = Scripted(STREAM_HEAD + ROLE + TOKEN, TOKEN + END)
    async with sharing(tmp_path, engine, ask_usage=False) as (_, nodes):
        first = await ask(nodes[0], stream=True)
        await until_known(nodes[1:], 1)
        second = await ask(nodes[1], stream=True)
        assert results(first, second) == ["MISS", "HIT"]
        assert first.content == second.content


async def test_who_wants_a_fresh_answer_has_no_peer_asked(tmp_path: Path) -> None:
    async with sharing(tmp_path, Scripted(GOOD)) as (_, nodes):
        await ask(nodes[0])
        await until_known(nodes[1:], 1)
        assert results(*[await ask(nodes[1], control=control) for control in ("no-cache", "max-age=0")]) == ["MISS"] * 2
        assert sum((await peers_of(nodes[1]))["fetches"].values()) == 0


async def test_equal_requests_at_once_on_another_node_ask_its_peer_once(tmp_path: Path) -> None:
    engine = Scripted(GOOD)
    async with sharing(tmp_path, engine) as (_, nodes):
        await ask(nodes[0])
        await until_known(nodes[1:], 1)
        found: list[httpx.Response] = []

        async def one() -> None:
            found.append(await ask(nodes[1]))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(one)
        assert results(*found) == ["HIT"] * 20
        assert sum((await peers_of(nodes[0]))["given"].values()) == 1
        assert len(engine.bodies) == 1


@pytest.mark.parametrize("backend", ["memory", "cluster"])
async def test_what_is_void_on_one_node_is_void_on_all(tmp_path: Path, backend: str) -> None:
    engine = Scripted(GOOD)
    async with sharing(tmp_path, engine, 3, response_cache_backend=backend) as (_, nodes):
        for node in nodes:
            await ask(node)
        for wanted in ({"clear_all": True}, {"model": "lab-model"}, {"tenant": "alice"}, {"older_than_s": 0}):
            for node in nodes:
                await until_result(node, "HIT")
            asked = len(engine.bodies)
            assert (await invalidate(nodes[0], **wanted))["cleared_entries"] == 1
            for node in nodes:
                await node.until("/admin/response-cache/stats", lambda stats: stats["entries"] == 0)
            assert results(await ask(nodes[1])) == ["MISS"]
            assert len(engine.bodies) == asked + 1
        await invalidate(nodes[0], model="other")
        assert results(await ask(nodes[1])) == ["HIT"]


async def test_what_is_made_void_while_another_node_waits_for_it_is_given_to_who_waits_and_to_nobody_else(
    tmp_path: Path,
) -> None:
    go_on = trio.Event()
    engine = Scripted(turns=scripts([go_on, GOOD]))
    async with sharing(tmp_path, engine) as (_, nodes), trio.open_nursery() as nursery:
        waited: list[httpx.Response] = []

        async def wait() -> None:
            waited.append(await ask(nodes[1]))

        nursery.start_soon(wait)
        await nodes[1].until("/admin/backends", lambda view: view["backends"][0]["in_flight"] == 1)
        await invalidate(nodes[0], clear_all=True)
        await nodes[1].until("/admin/cluster", lambda view: view["peer_answers"]["invalidations"] == 1)
        assert results(await ask(nodes[1])) == ["MISS"]  # it doesn't wait for what is void
        stored = (await nodes[1].ask("/admin/response-cache/stats"))["entries"]
        go_on.set()
        await nodes[1].until("/admin/response-cache/stats", lambda stats: stats["unkept"] == 1)
        assert (await nodes[1].ask("/admin/response-cache/stats"))["entries"] == stored == 1
    assert results(*waited) == ["MISS"]
    assert len(engine.bodies) == 2


def scripts(first: Sequence[Step]) -> Any:
    yield first
    while True:
        yield [GOOD]


async def test_a_node_that_joins_later_has_what_the_others_have_and_knows_what_is_void(tmp_path: Path) -> None:
    engine = Scripted(GOOD)
    async with sharing(tmp_path, engine) as (place, nodes):
        await ask(nodes[0])
        await invalidate(nodes[0], model="other")
        third = await place.start(**PATIENT)
        await until_known([third], 1)
        assert results(await ask(third)) == ["HIT"]
        assert (await peers_of(third))["invalidations"] == 1
        await invalidate(nodes[1], clear_all=True)
        await third.until("/admin/response-cache/stats", lambda stats: stats["entries"] == 0)
        assert results(await ask(third)) == ["MISS"]


async def test_a_peer_with_another_cluster_secret_shares_nothing_and_harms_nobody(tmp_path: Path) -> None:
    async with sharing(tmp_path, Scripted(GOOD)) as (place, nodes):
        other = await place.start(**PATIENT, cluster_secret="another secret of 16 bytes")
        await other.sees(2)
        await ask(nodes[0])
        await until_known(nodes[1:], 1)
        assert results(await ask(other)) == ["MISS"]
        assert (await peers_of(other))["known"] == 0


async def timed(lab: ClusterLab, url: str, number: int) -> tuple[str, float]:
    """What the cache made of a request, and how long it took."""
    began = time.monotonic()
    answer = await lab.http.post(f"{url}/v1/chat/completions", content=chat(turn(f"question {number}"), **COLD))
    assert answer.status_code == 200
    return answer.headers["x-cache"], time.monotonic() - began


async def until_stats(lab: ClusterLab, control: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    while True:
        stats = (await lab.http.get(f"{control}/admin/response-cache/stats")).json()
        if holds(stats):
            return dict(stats)
        await trio.sleep(BETWEEN_LOOKS_S)


@pytest.mark.parametrize("number", some([signal.SIGKILL, signal.SIGSTOP]), ids=["killed", "paused"])
async def test_a_peer_that_hangs_or_dies_costs_a_request_its_deadline_at_most_and_fails_none(
    tmp_path: Path, number: int
) -> None:
    engine = Scripted(GOOD)
    async with cluster_lab(tmp_path, engines=0) as lab:
        lab.engines += [await lab.listen(engine.serve)]
        node = await lab.start(**SHARED)
        process, url, _ = await lab.addressed_process(**SHARED)
        await node.sees(1)
        for question in range(12):
            await timed(lab, url, question)
        await until_stats(lab, node.control, lambda stats: stats["peers"]["known"] == 12)
        assert (await timed(lab, node.url, 0))[0] in ("HIT", "MISS")
        asked = await peers_of(node)
        os.kill(process.pid, number)
        try:
            waits = [await timed(lab, node.url, question) for question in range(1, 12)]
        finally:
            if number == signal.SIGSTOP:
                os.kill(process.pid, signal.SIGCONT)
        assert [result for result, _ in waits] == ["MISS"] * 11
        assert max(wait for _, wait in waits) < TIMEOUT_S + SLACK_S
        peers = await peers_of(node)
        assert peers["fetches"]["timeout"] - asked["fetches"]["timeout"] <= 3
        assert number != signal.SIGSTOP or peers["passed_over"] > 0


def test_sharing_answers_needs_peers_with_a_key_and_no_tenants_that_are_kept_apart(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    good = {**SHARED, "cluster_key_file": key_file}
    assert config_of(**good).responses.backend == "cluster"
    assert config_of(**SHARED, workers=2).workers == 2
    for wrong, named in (
        (SHARED, "gossip"),
        ({**SHARED, "insecure_gossip": True}, "insecure_gossip"),
        ({**good, "tenant_isolation": "credential"}, "tenant_isolation"),
    ):
        with pytest.raises(ConfigError) as caught:
            config_of(**wrong)
        assert any(SHARING in problem and named in problem for problem in caught.value.problems)
