"""Whom an operator's order reaches: the other workers of a node, and with an admin key other nodes; and who obeyed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import trio

from cluster.dns.addresses import free_port
from tests.node.fleet.test_backend_orders import command
from tests.node.node_lab import BETWEEN_LOOKS_S, Lab, cluster_lab, opened
from tests.node.test_cluster_of_nodes import ADMIN_KEY
from tests.node.test_reload_of_processes import DEADLINE_S, Served, logged, served, taken_by

DRAINED = "backend.draining one False -> True"


async def ordered(http: httpx.AsyncClient, control: str, path: str, method: str = "POST", **body: Any) -> Any:
    answer = await http.request(method, f"{control}/admin/backends{path}", json=body)
    assert answer.is_success, answer.text
    return answer.json()


async def test_an_answer_names_the_nodes_that_obeyed_and_those_that_do_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with cluster_lab(tmp_path, engines=3) as place:
        first, second, third = place.engines
        keyed = {"backend": [f"{first},name=one", f"{second},name=two"], "gossip_admin_key": ADMIN_KEY}
        asked = await place.start(node_name="asked", **keyed)
        peer = await place.start(node_name="peer", **keyed)
        await place.start(node_name="careful", backend=[f"{first},name=one"])
        await asked.sees(2)
        await peer.sees(2)
        added = await ordered(place.http, asked.control, "", url=third, name="three", cluster=True)
        careful, obedient = added["reached"]
        assert (careful["place"], obedient) == ("careful", {"place": "peer", "why": ""})
        assert "gossip_admin_key" in careful["why"]
        assert f"backend.added three {third} weight 1 (ordered by - on asked)" in caplog.messages
        weighed = await ordered(place.http, asked.control, "/weight", name="two", weight=5, cluster=True)
        assert weighed["reached"][1] == {"place": "peer", "why": ""}
        assert [each["weight"] for each in await peer.backends()] == [1.0, 5.0, 1.0]
        assert "backend.set two weight 1.0 -> 5.0 (ordered by - on asked)" in caplog.messages
        changed = await ordered(place.http, asked.control, "/set", name="two", base_path="/v2", cluster=True)
        assert changed["base_path"] == "/v2"
        assert "backend.set two base_path  -> /v2 (ordered by - on asked)" in caplog.messages
        drained = await ordered(place.http, asked.control, "/drain", name="one")
        assert drained["reached"] == [{"place": "careful", "why": ""}, {"place": "peer", "why": ""}]
        while len(lines := [line for line in caplog.messages if line.startswith(DRAINED)]) < 3:  # noqa: ASYNC110  # a log
            await trio.sleep(BETWEEN_LOOKS_S)
        assert sum("ordered by - on asked" in line for line in lines) == 2
        here = await ordered(place.http, asked.control, "", "DELETE", name="three", cluster=False)
        assert here["reached"] == []
        assert len(await asked.backends()) == 2
        assert len(await peer.backends()) == 3
        await ordered(place.http, peer.control, "/weight", name="two", weight=9, cluster=False)
        listed = await command(asked, "list", "--cluster", status=1)
        assert "careful: differs in 1\n  two is not there\n" in listed
        assert "peer: differs in 2\n  two has weight 9, here 5\n  three is not here\n" in listed
        places = (await asked.ask("/admin/backends?cluster=true"))["places"]
        assert [(each["place"], len(each["backends"])) for each in places] == [("careful", 1), ("peer", 3)]
        assert "differs" not in await command(peer, "list", status=0)


def places(gossips: bool) -> tuple[str, ...]:
    rng = Random()
    public = free_port(["127.0.0.1"], rng)
    control = free_port(["127.0.0.1"], rng, taken_by(public))
    gossip = f"127.0.0.1:{free_port(['127.0.0.1'], rng, taken_by(public, control))}" if gossips else "off"
    listens = ("--listen", f"127.0.0.1:{public}", "--control", f"127.0.0.1:{control}")
    return (*listens, "--workers", "2", "--gossip", gossip)


async def seen_by(node: Served, worker: int) -> list[tuple[str, float, bool]]:
    try:
        answer = await node.http.get(f"{node.control[worker]}/admin/backends")
    except httpx.HTTPError:  # it is being started
        return []
    return [(each["name"], each["weight"], each["draining"]) for each in answer.json()["backends"]]


@pytest.mark.slow
async def test_an_order_reaches_both_workers_and_one_that_is_restarted_later(tmp_path: Path) -> None:
    async with opened(Lab, 3, DEADLINE_S) as place:
        file = tmp_path / "ranvier.toml"
        names = ", ".join(f'"{url},name={name}"' for url, name in zip(place.engines, ("one", "two"), strict=False))
        file.write_text(f"backend = [{names}]\n")
        async with served(place, file, *places(True), workers=2) as node:
            obeyed = [{"place": "worker 1", "why": ""}]
            one = node.control[0]
            assert (await ordered(place.http, one, "", "DELETE", name="two"))["reached"] == obeyed
            assert (await ordered(place.http, one, "", url=place.engines[2], name="three"))["reached"] == obeyed
            assert (await ordered(place.http, one, "/weight", name="one", weight=3))["reached"] == obeyed
            assert (await ordered(place.http, one, "/drain", name="three"))["reached"] == obeyed
            wanted = [("one", 3.0, False), ("three", 1.0, True)]
            for worker in (0, 1):
                assert sorted(await seen_by(node, worker)) == wanted
            drained = await node.http.post(f"{one}/admin/node/drain", json={})
            assert drained.json() == {"draining": True, "reached": obeyed}
            for control in node.control:
                assert (
                    (await node.http.get(f"{control}/readyz"))
                    .json()["reason"]
                    .startswith("drained by an order without a key")
                )
            assert (await node.http.get(f"{node.url}/health")).status_code == 200
            children = await trio.run_process(["pgrep", "-P", str(node.process.pid)], capture_stdout=True)
            os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
            await logged(node, b"worker.started", 3)
            for worker in (0, 1):
                while sorted(await seen_by(node, worker)) != wanted:  # noqa: ASYNC110  # another process
                    await trio.sleep(BETWEEN_LOOKS_S)
            assert (await node.http.post(f"{one}/admin/node/drain", json={"draining": False})).is_success
            (other,) = (await node.http.get(f"{one}/admin/backends?cluster=true")).json()["places"]
            assert (other["place"], other["why"], other["differences"]) == ("worker 1", "", [])
            assert sorted((each["name"], each["weight"], each["draining"]) for each in other["backends"]) == wanted


@pytest.mark.slow
async def test_workers_that_do_not_gossip_are_named_as_not_reached(tmp_path: Path) -> None:
    async with opened(Lab, 1, DEADLINE_S) as place:
        file = tmp_path / "ranvier.toml"
        file.write_text(f'backend = ["{place.engines[0]},name=one"]\n')
        async with served(place, file, *places(False), workers=2) as node:
            answer = await ordered(place.http, node.control[0], "/weight", name="one", weight=3)
            assert "do not gossip" in answer["reached"][0]["why"]
            listed = (await node.http.get(f"{node.control[0]}/admin/backends?cluster=true")).json()
            assert "do not gossip" in listed["places"][0]["why"]
