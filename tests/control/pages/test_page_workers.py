"""The page of any worker shows what all workers of its node have served, and names those that do not answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from cluster.dns.addresses import free_port
from ranvier_py.control.pages.sibling_panes import LATE_S, PATH, SiblingPanes, added_to
from ranvier_py.node.part import Part
from ranvier_py.node.parts.decision_parts import DecisionParts
from tests.node.access.key_lab import BLUE, RED, key_lines, keys_file
from tests.node.node_lab import BETWEEN_LOOKS_S, Lab, chat, opened
from tests.node.test_reload_of_processes import Served, served, taken_by

DEADLINE_S, REQUESTS = 90, 12
KEY = "a-control-key-of-some-length-1234"
LOOKER = "a-key-that-may-only-look-1234"


@asynccontextmanager
async def two_workers(folder: Path) -> AsyncIterator[tuple[Served, Lab]]:
    """A node of two workers whose clients and operators have keys."""
    async with opened(Lab, 1, DEADLINE_S) as place:
        rng, looker = Random(), sha256(LOOKER.encode()).hexdigest()
        (folder / "key").write_text(KEY)
        (folder / "control").write_text(f'[[key]]\nid = "looker"\nsha256 = "{looker}"\nrole = "read"\n')
        clients = keys_file(folder, key_lines(RED, tenant="red") + '[[tenant]]\nname = "red"\n', key_lines(BLUE))
        (folder / "ranvier.toml").write_text(
            f'backend = ["{place.engines[0]}"]\nkeys_file = "{clients}"\nshadow = ["least_loaded"]\n'
            f'control_key_file = "{folder / "key"}"\ncontrol_keys_file = "{folder / "control"}"\n'
        )
        public = free_port(["127.0.0.1"], rng)
        control = free_port(["127.0.0.1"], rng, taken_by(public))
        gossip = free_port(["127.0.0.1"], rng, taken_by(public, control))
        places = ("--listen", f"127.0.0.1:{public}", "--control", f"127.0.0.1:{control}", "--workers", "2")
        file = folder / "ranvier.toml"
        async with served(place, file, *places, "--gossip", f"127.0.0.1:{gossip}", workers=2) as node:
            yield node, place


def looking() -> dict[str, str]:
    return {"authorization": f"Bearer {LOOKER}"}


async def panes_of(http: httpx.AsyncClient, control: str) -> dict[str, Any]:
    """What a viewer of this worker's page sees at first, with the last values of the series and their history."""
    text = (await http.get(f"{control}/admin/page/stream?seconds=1", headers=looking())).text
    lines = [json.loads(line) for line in text.splitlines()]
    history = {name: kept for line in lines for name, kept in line.get("history", {}).get("series", {}).items()}
    return {**lines[1]["panes"], **lines[-1]["panes"], "now": lines[-1]["now"], "history": history}


async def until(http: httpx.AsyncClient, control: str, holds: Any) -> dict[str, Any]:
    while not holds(found := await panes_of(http, control)):  # noqa: ASYNC110  # another process
        await trio.sleep(BETWEEN_LOOKS_S)
    return found


def requests_of(panes: dict[str, Any]) -> int:
    return sum(panes["requests"]["outcomes"].values())


def is_complete(panes: dict[str, Any]) -> bool:
    """Whether all shows all requests: panes are of this moment, series of up to a second before."""
    known = [each for each in panes["history"].get("requests", ()) if each is not None]
    return {requests_of(panes), panes["now"]["requests"], *known[-1:]} == {REQUESTS} and len(known) > 0


@pytest.mark.slow
async def test_the_page_of_each_worker_shows_the_requests_of_all(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (node, place):
        for number in range(REQUESTS):  # each on a connection of its own, so that both workers get some
            fields = {"authorization": f"Bearer {BLUE if number % 3 else RED}"}
            async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client:
                answer = await client.post(f"{node.url}/v1/chat/completions", content=chat(), headers=fields)
                assert answer.is_success
        own = [await place.http.get(f"{url}/admin/page/worker", headers=looking()) for url in node.control]
        alone = [requests_of(each.json()["panes"]) for each in own]
        assert sum(alone) == REQUESTS > max(alone)
        for url in node.control:
            found = await until(place.http, url, is_complete)
            assert found["workers"] == {"of": 2, "missing": []}
            assert len({each["request_id"] for each in found["decisions"]}) == REQUESTS
            assert {name: counts[0] for name, counts in found["tenant_requests"].items()} == {"red": 4, "blue": 8}
            assert sum(row["turns"] for row in found["clients"]["clients"]) == REQUESTS
            assert [row["answers"] for row in found["hits"]["engines"]] == [REQUESTS]
            assert [row["placed"] for row in found["shadows"]["shadows"]] == [REQUESTS]
            for each in found["decisions"]:  # also those that the other worker made
                opened_ = await place.http.get(f"{url}/admin/decisions/{each['request_id']}", headers=looking())
                assert opened_.json()["chosen"] == each["backend"]
            assert (await place.http.get(f"{url}/admin/decisions/none", headers=looking())).status_code == 404
            while await earlier(place.http, url) != REQUESTS:  # noqa: ASYNC110  # another process
                await trio.sleep(BETWEEN_LOOKS_S)


async def earlier(http: httpx.AsyncClient, control: str) -> int:
    """How many requests the page shows of a moment ago."""
    return requests_of((await http.get(f"{control}/admin/page/past?ago=0", headers=looking())).json()["panes"])


async def test_a_worker_that_answers_no_more_stands_for_some_seconds_and_is_then_named(
    autojump_clock: trio.testing.MockClock,
) -> None:
    answered = {1: b'{"panes":{"decisions":[{"at":2,"id":"b"}]},"now":{"requests":5}}'}

    async def ask(path: str, key: str) -> Mapping[int, bytes]:
        assert (path, key) == (PATH, "k")
        return answered

    workers, own = SiblingPanes(ask), {"decisions": b'[{"at":1,"id":"a"}]', "verdict": b"{}"}
    assert workers.panes([Decisions()], own) == {}  # nobody else is known
    workers.key = "k"
    await workers.look()
    for answer, seconds in ((b"", 0.0), (b"", LATE_S)):
        shown = workers.panes([Decisions()], own)
        assert [each["id"] for each in shown["decisions"]] == ["b", "a"]
        assert shown["workers"] == {"of": 2, "missing": []}
        assert workers.summed({"requests": 2, "load/a": 1}) == {"requests": 7, "load/a": 1}
        answered[1] = answer
        await trio.sleep(seconds + 0.1)
        await workers.look()
    shown = workers.panes([Decisions()], own)
    assert [each["id"] for each in shown["decisions"]] == ["a"]
    assert shown["workers"] == {"of": 2, "missing": [1]}
    assert workers.summed({"requests": 2}) == {"requests": 2}


class Decisions(Part):
    joins = DecisionParts.joins


def test_a_history_that_ended_a_second_before_is_added_a_second_earlier_and_its_last_value_stands() -> None:
    other = {"ended_at": 99.1, "series": {"requests": [1.0, 2.0, 3.0], "unknown": [1.0]}}
    found = added_to({"requests": [10.0, 10.0, 10.0], "load/a": [4.0]}, 100.0, [other])
    assert [*found["requests"]][-4:] == [1.0, 12.0, 13.0, 13.0], "a line falls at its end, as if requests were lost"
    assert found["load/a"] == [4.0]
    ahead = {"ended_at": 101.0, "series": {"requests": [1.0, 2.0, 3.0]}}
    old = {"ended_at": 99.0 - LATE_S, "series": {"requests": [1.0]}}
    assert added_to({"requests": [10.0]}, 100.0, [old])["requests"][-1] == 10.0
    assert [*added_to({"requests": [10.0, 10.0]}, 100.0, [ahead])["requests"]][-2:] == [11.0, 12.0]
