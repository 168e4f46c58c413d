"""Limits over several nodes: real sockets and processes, a killed node, and one that is cut off."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import trio
import trio.lowlevel

from cluster.dns.addresses import free_port
from ranvier_py.io.gossip.state_file import write_whole
from ranvier_py.io.limit_file import SMALL_BYTES, LimitFile
from ranvier_py.node.access import limit_parts
from tests.builders.built_nodes import built
from tests.node.access.key_lab import CHAT, RED, bearer, key_lines, keys_file
from tests.node.access.test_limits_of_requests import counted, limited
from tests.node.node_lab import BETWEEN_LOOKS_S, ClusterLab, Lab, Node, chat, cluster_lab, opened
from tests.node.test_reload_of_processes import DEADLINE_S, served, taken_by
from tests.planted_bugs import Bug, plant
from tests.proxy.wire import Scripted, answer

TABLE = '[[tenant]]\nname = "acme"\n'


def limits_file(folder: Path, **limits: Any) -> Path:
    return keys_file(folder, f"{TABLE}\n", key_lines(RED, tenant="acme", **limits))


async def ask(http: httpx.AsyncClient, url: str) -> int:
    response = await http.post(url + CHAT, content=chat(), headers=bearer(RED))
    if response.status_code == 429:
        assert int(response.headers["retry-after"]) > 0
    return response.status_code


async def at_all(nodes: Sequence[str], http: httpx.AsyncClient, times: int) -> list[int]:
    """The statuses of so many requests at each node, all at once."""
    found: list[int] = []

    async def one(url: str) -> None:
        found.append(await ask(http, url))

    async with trio.open_nursery() as nursery:
        for url in nodes:
            for _ in range(times):
                nursery.start_soon(one, url)
    return found


async def engines(place: ClusterLab) -> None:
    place.engines[:] = [await place.listen(Scripted(answer(counted(10, 5))).serve)]


async def test_requests_at_all_nodes_at_once_get_together_no_more_than_the_limit(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, engines=0) as place:
        await engines(place)
        file = limits_file(tmp_path, requests_per_minute=10)
        nodes = await place.cluster(3, keys_file=file)
        await known_to_all(nodes)
        statuses = await at_all([node.url for node in nodes], place.http, 8)
        assert (statuses.count(200), statuses.count(429)) == (10, 14)


async def known_to_all(nodes: Sequence[Node]) -> None:
    """Until each node has counts of each other."""
    for node in nodes:
        await node.until("/admin/access", lambda view: view["nodes"] == len(nodes))


@pytest.mark.slow
async def test_what_a_killed_process_took_stays_taken_and_its_share_is_kept(
    tmp_path: Path,
) -> None:
    async with cluster_lab(tmp_path, engines=0) as place:
        await engines(place)
        file = limits_file(tmp_path, budget="BUDGET")
        file.write_text(file.read_text().replace('"BUDGET"', '[{amount = 1500, window = "month"}]'))
        nodes = await place.cluster(2, keys_file=file)
        process, public, _ = await place.addressed_process(keys_file=file)
        for node in nodes:
            await node.until("/admin/access", lambda view: view["nodes"] == 3)
        for url in (nodes[0].url, public):
            assert await ask(place.http, url) == 200
        await nodes[0].until("/admin/access", lambda view: used(view) == 30)
        process.send_signal(signal.SIGKILL)
        await nodes[0].until("/admin/access", lambda view: view["vanished_nodes"] == 1)
        assert used(await nodes[0].ask("/admin/access")) == 30, "it is not forgotten"
        left = (await nodes[0].ask("/admin/access"))["limits"]["key red"]["limits"][0]["remaining"]
        assert left < 1400, "a share is kept for it"


def used(view: dict[str, Any]) -> float:
    scope = view["limits"].get("key red")
    return float(scope["limits"][0]["used"]) if scope else 0.0


@pytest.mark.parametrize("starts", [((0, 150), (0, 300)), ((0, 150), (40, 150), (0, 300))])
async def test_a_budget_outlives_a_restart_of_all_nodes_by_its_file_and_one_with_a_clock_that_is_days_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: Sequence[tuple[int, int]]
) -> None:
    engine = Scripted(answer(counted(100, 50)))
    settings = {"limit_state_file": tmp_path / "limits"}
    tenant = 'budget = [{amount = 100000, window = "month"}]'
    for days, expected in starts:
        wall_s = time.time() + 86_400.0 * days
        clock = SimpleNamespace(time=partial(float, wall_s), monotonic=time.monotonic)
        monkeypatch.setattr(limit_parts, "time", clock)
        async with limited(tmp_path, engine, tenant=tenant, settings=settings) as node:
            assert (await node.http.post(node.url + CHAT, content=chat(), headers=bearer(RED))).status_code == 200
            shown = (await node.ask("/admin/access"))["limits"]["tenant acme"]["limits"][0]
            assert (shown["used"], shown["reserved"]) == (expected, 0)
            node.scope.cancel()
            while not (tmp_path / "limits").exists() or not (tmp_path / "limits").stat().st_size:  # noqa: ASYNC110
                await trio.sleep(BETWEEN_LOOKS_S)


async def test_a_file_of_budgets_that_can_not_be_read_is_named_and_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "limits"
    file.write_text("keys of somebody, by a typo in the configuration")
    for _ in range(2):
        async with limited(tmp_path, Scripted(answer(counted(1, 1))), settings={"limit_state_file": file}):
            pass
    assert (tmp_path / "unused-limits").read_text().startswith("keys of somebody")
    (line,) = [line for line in caplog.messages if line.startswith("limits.state_refused")]
    assert line.endswith("it is damaged, or not ours, and is unused-limits now; starting without")


async def test_nodes_that_are_all_killed_at_once_lose_no_more_than_was_counted_since_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limit_parts.SAVE_S <= 5.0
    monkeypatch.setattr(limit_parts, "SAVE_S", 0.01)
    file, copied, tenant = tmp_path / "limits", tmp_path / "copied", 'budget = [{amount = 100000, window = "month"}]'
    engine = Scripted(answer(counted(100, 50)))
    async with limited(tmp_path, engine, tenant=tenant, settings={"limit_state_file": file}) as node:
        size = file.stat().st_size
        assert (await node.http.post(node.url + CHAT, content=chat(), headers=bearer(RED))).status_code == 200
        while file.stat().st_size == size:  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)
        await trio.sleep(0.1)  # ten times of what it may take
        copied.write_bytes(file.read_bytes())  # as a kill leaves it
    async with limited(tmp_path, engine, tenant=tenant, settings={"limit_state_file": copied}) as node:
        assert (await node.http.post(node.url + CHAT, content=chat(), headers=bearer(RED))).status_code == 200
        assert (await node.ask("/admin/access"))["limits"]["tenant acme"]["limits"][0]["used"] == 300


async def test_a_file_of_counts_that_has_grown_is_due_to_be_written_anew_and_so_is_one_behind_a_failure(
    tmp_path: Path,
) -> None:
    file = LimitFile(tmp_path / "limits", write_whole)
    await file.replace(bytes(SMALL_BYTES // 2))
    dues = []
    for _ in range(5):
        await file.append(bytes(SMALL_BYTES // 2))
        dues.append(file.is_due)
    assert dues == [False, False, False, True, True]
    await file.replace(b"all")
    assert (file.is_due, file.read()) == (False, b"all")
    file.path = tmp_path
    await file.append(b"more")
    assert (file.is_due, file.counters.failures) == (True, 1)


def test_limit_on_partition_decides_how_long_what_vanished_keeps_its_share(tmp_path: Path) -> None:
    keys = keys_file(tmp_path)
    for value, keeps in ((None, False), ("open", False), ("keep", True)):
        node = built(keys_file=keys, **({"limit_on_partition": value} if value else {}))
        limiter = node.part(limit_parts.LimitParts).limiter
        assert limiter is not None
        assert limiter.peers.keeps is keeps


@pytest.mark.slow
async def test_a_process_that_stands_still_keeps_its_share_until_it_goes_on(tmp_path: Path) -> None:
    """As if its network were cut."""
    async with cluster_lab(tmp_path, engines=0) as place:
        await engines(place)
        file = limits_file(tmp_path, tokens_per_minute=100_000)
        node = await place.start(keys_file=file)
        process, public, _ = await place.addressed_process(keys_file=file)
        await node.until("/admin/access", lambda view: view["nodes"] == 2)
        for url in (public, node.url):
            assert await ask(place.http, url) == 200
        process.send_signal(signal.SIGSTOP)
        await node.until("/admin/access", lambda view: view["vanished_nodes"] == 1)
        assert (await ask(place.http, node.url)) == 200
        assert remaining(await node.ask("/admin/access")) < 60_000
        process.send_signal(signal.SIGCONT)
        await node.until("/admin/access", lambda view: remaining(view) > 99_000)


def remaining(view: dict[str, Any]) -> float:
    return float(view["limits"]["key red"]["limits"][0]["remaining"])


@pytest.mark.slow
async def test_a_changed_limit_holds_at_once_on_all_workers_of_a_port(tmp_path: Path) -> None:
    async with opened(Lab, 0, DEADLINE_S) as place:
        url = await place.listen(Scripted(answer(counted(10, 5))).serve)
        keys, file = limits_file(tmp_path, requests_per_minute=4), tmp_path / "ranvier.toml"
        file.write_text(f'backend = ["{url}"]\nkeys_file = "{keys}"\n')
        rng = Random()
        public = free_port(["127.0.0.1"], rng)
        control = free_port(["127.0.0.1"], rng, taken_by(public))
        gossip = free_port(["127.0.0.1"], rng, taken_by(public, control))
        places = ("--listen", f"127.0.0.1:{public}", "--control", f"127.0.0.1:{control}", "--workers", "2")
        async with served(place, file, *places, "--gossip", f"127.0.0.1:{gossip}", workers=2) as node:
            for control in node.control:
                await until(place.http, control, lambda view: view["nodes"] == 2)
            statuses = await at_all([node.url], place.http, 12)
            assert statuses.count(200) == 4, "workers are nodes that share limits"
            limits_file(tmp_path, requests_per_minute=9)
            await place.http.post(f"{node.control[0]}/admin/reload")
            for control in node.control:
                await until(place.http, control, lambda view: view["keys"]["count"] and amounts(view) <= {4, 9})
            await trio.lowlevel.checkpoint()
            while 200 not in (more := await at_all([node.url], place.http, 1)):  # noqa: ASYNC110
                await trio.sleep(BETWEEN_LOOKS_S)
            more += await at_all([node.url], place.http, 12)
            assert more.count(200) == 5


def amounts(view: dict[str, Any]) -> set[float]:
    return {limit["amount"] for scope in view["limits"].values() for limit in scope["limits"]}


async def until(http: httpx.AsyncClient, control: str, holds: Any) -> None:
    while not holds((await http.get(f"{control}/admin/access")).json()):  # noqa: ASYNC110
        await trio.sleep(BETWEEN_LOOKS_S)


async def test_a_bug_while_counts_are_saved_is_counted_and_later_ones_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit_parts, "SAVE_S", 0.01)
    plant(monkeypatch, limit_parts.__name__, "LimitParts.loop", Bug(1))
    file, tenant = tmp_path / "limits", 'budget = [{amount = 100000, window = "month"}]'
    settings = {"limit_state_file": file}
    async with limited(tmp_path, Scripted(answer(counted(100, 50))), tenant=tenant, settings=settings) as node:
        while await node.faults() == {}:  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)
        size = file.stat().st_size
        assert (await node.http.post(node.url + CHAT, content=chat(), headers=bearer(RED))).status_code == 200
        while file.stat().st_size == size:  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)
