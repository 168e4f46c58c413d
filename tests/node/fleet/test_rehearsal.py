"""A fleet from an empty folder on: its engines are found, changed by command and its keys rotated, all under load."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
import trio

from cluster.dns.addresses import free_port
from tests.node.access.key_lab import BLUE, RED, bearer, key_lines, value_of
from tests.node.discovery.source_labs import SOURCES
from tests.node.node_lab import BETWEEN_LOOKS_S, SYSTEM, Lab, chat, opened, start_engine
from tests.node.test_cluster_of_nodes import ADMIN_KEY
from tests.node.test_key_rotation import made, steps, typed
from tests.node.test_reload_of_processes import Served, served, taken_by

pytestmark = pytest.mark.slow  # nine processes

LIMIT_S = 270.0  # a quarter of it where the machine is not crowded
NODES, WORKERS = 3, 2
SHARES = {"file": slice(0, 3), "srv": slice(2, 5), "service": slice(5, 8)}
"""Which engines each source names: one is named by two."""

USERS, TURNS = 6, 5  # of what is measured
LOAD_USERS = 2  # beside the commands: the machine has other things to do
PAUSE_S = 0.3  # between two turns of a user: what one node learned is known to the others
POINTS_LOST_MAX, ROUNDS_MAX = 0.02, 3


class Traffic:
    """Users of all nodes, who each have a conversation after another. `key`: what they ask with now."""

    def __init__(self, nodes: Sequence[Served]) -> None:
        self.nodes, self.key = nodes, RED
        self.served, self.failed = 0, list[str]()
        self.stopped = False

    async def turn(self, messages: Sequence[Mapping[str, str]], rng: Random) -> Any:
        """One turn at any node; the answer's JSON, None if it failed."""
        url = f"{rng.choice(self.nodes).url}/v1/chat/completions"
        try:
            answer = await self.nodes[0].http.post(url, content=chat(messages), headers=bearer(self.key))  # type: ignore[arg-type]
        except Exception as error:
            self.failed.append(repr(error))
            return None
        if answer.status_code != 200:
            self.failed.append(f"{answer.status_code}: {answer.text[:200]}")
            return None
        self.served += 1
        return answer.json()

    async def conversation(self, name: str) -> tuple[int, int]:
        """Tokens of all its prompts, and how many of these engines had in their caches."""
        rng, prompts, cached = Random(name), 0, 0
        messages = [{"role": "system", "content": SYSTEM}]
        for number in range(TURNS):
            messages.append({"role": "user", "content": f"{name} asks for the {number}th time. " * 12})
            answer = await self.turn(messages, rng)
            if answer is not None:
                usage = answer["usage"]
                prompts += usage["prompt_tokens"]
                cached += (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            await trio.sleep(PAUSE_S)
        return prompts, cached

    async def hits(self, name: str) -> float:
        """The share of prompt tokens that engines had, of conversations that begin now."""
        found: list[tuple[int, int]] = []

        async def user(number: int) -> None:
            found.append(await self.conversation(f"{name} {number}"))
            found.append(await self.conversation(f"{name} {number} again"))

        async with trio.open_nursery() as nursery:
            for number in range(USERS):
                nursery.start_soon(user, number)
        prompts, cached = map(sum, zip(*found, strict=True))
        return cached / prompts

    async def load(self, user: int) -> None:
        number = 0
        while not self.stopped:
            number += 1
            await self.conversation(f"user {user} of the load, {number}")


def configuration(folder: Path, name: str, places: Sequence[int], own: int, sources: Mapping[str, Any]) -> Path:
    """The file of one node; all of them gossip with two workers each, from these ports on."""
    values = {
        "node_name": name,
        "workers": WORKERS,
        "gossip": f"127.0.0.1:{own}",
        "join": [f"127.0.0.1:{port}" for port in places if port != own],
        "cluster_key_file": str(folder / name / "cluster.key"),
        "gossip_admin_key_file": str(folder / "admin.key"),
        "keys_file": str(folder / "keys.toml"),
        "state_folder": str(folder / name / "state"),
        **{key: list(value) if isinstance(value, list) else str(value) for key, value in sources.items()},
    }
    file = folder / name / "ranvier.toml"
    file.write_text("".join(f"{key} = {number_or(value)}\n" for key, value in values.items()))
    return file


def number_or(value: object) -> str:
    return str(value) if isinstance(value, int) else value_of(value)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():  # noqa: ASYNC110  # what other processes show
        await trio.sleep(5 * BETWEEN_LOOKS_S)


async def backend(node: Served, *words: str, code: int = 0) -> str:
    """What `ranvier backend` prints."""
    line = [sys.executable, "-m", "ranvier_py", "backend", *words, "--control", node.control[0]]
    done = await trio.run_process(line, capture_stdout=True, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == code, done.stdout.decode()
    return done.stdout.decode()


async def listed(node: Served) -> dict[str, Any]:
    return dict((await node.http.get(f"{node.control[0]}/admin/backends?cluster=true")).json())


async def agree(node: Served, holds: Callable[[Mapping[str, Any]], object]) -> None:
    """Until this node's engines, by name, are as expected, and each worker of all nodes has the same."""

    async def same() -> bool:
        answer = await listed(node)
        places = [each for each in answer["places"] if not each["why"] and not each["differences"]]
        return len(places) == NODES * WORKERS - 1 and bool(holds({each["name"]: each for each in answer["backends"]}))

    await until(same)


async def counted(node: Served, name: str) -> list[float]:
    """A counter of each worker."""
    pages = [(await node.http.get(f"{control}/metrics")).text for control in node.control]
    return [sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)) for page in pages]


async def keys_of_the_cluster_are_rotated(folder: Path, nodes: Sequence[Served]) -> None:
    """As docs/cluster.md has it: each step on every node before the next one."""
    for number, commands in enumerate(steps()):
        for name, node in zip(names(), nodes, strict=True):
            before = await counted(node, "ranvier_gossip_key_file_changes_total")
            typed(folder / name, commands, number)
            node.process.send_signal(signal.SIGHUP)

            async def taken(node: Served = node, before: Sequence[float] = before) -> bool:
                now = await counted(node, "ranvier_gossip_key_file_changes_total")
                return all(new > old for new, old in zip(now, before, strict=True))

            await until(taken)


async def keys_of_clients_are_rotated(folder: Path, nodes: Sequence[Served], traffic: Traffic) -> None:
    for lines, key in ((file_of(RED, BLUE), BLUE), (file_of(BLUE), BLUE)):
        new = folder / "next.toml"
        new.write_text(lines)
        new.rename(folder / "keys.toml")
        for node in nodes:
            node.process.send_signal(signal.SIGHUP)

            async def taken(node: Served = node, count: int = lines.count("[[key]]")) -> bool:
                views = [(await node.http.get(f"{control}/admin/access")).json() for control in node.control]
                return [view["keys"]["count"] for view in views] == [count] * WORKERS

            await until(taken)
        traffic.key = key
        await trio.sleep(2 * PAUSE_S)  # requests with the old key have begun


def file_of(*keys: str) -> str:
    """The keys of one tenant: what prompts of the old one left in the caches is the new one's as well."""
    return "".join(key_lines(key, tenant="team") for key in keys) + '[[tenant]]\nname = "team"\n'


def names() -> list[str]:
    return [f"node-{number}" for number in range(NODES)]


async def engines_are_changed_by_command(nodes: Sequence[Served], url: str) -> None:
    first, second, third = nodes
    assert "added" in await backend(first, "add", url, "name=ninth", "weight=2", "--cluster")
    await agree(second, lambda engines: len(engines) == 9 and engines["ninth"]["weight"] == 2.0)
    drained = next(iter((await listed(first))["backends"]))["name"]
    assert "drained" in await backend(second, "drain", drained)
    await agree(third, lambda engines: engines[drained]["draining"])
    assert "set" in await backend(third, "weight", "ninth", "1", "--cluster")
    await agree(first, lambda engines: engines["ninth"]["weight"] == 1.0)
    assert "differs" not in await backend(second, "list", "--cluster")
    assert "again" in await backend(first, "undrain", drained)
    assert "removed" in await backend(second, "remove", "ninth", "--cluster")
    await agree(third, lambda engines: len(engines) == 8 and not engines[drained]["draining"])


async def test_a_fleet_is_found_changed_and_its_keys_are_rotated_under_load(tmp_path: Path) -> None:
    rng = Random()
    async with opened(Lab, 8, LIMIT_S) as place, AsyncExitStack() as stack:
        labs = {kind: await stack.enter_async_context(SOURCES[kind](tmp_path)) for kind in SHARES}
        for kind, share in SHARES.items():
            await labs[kind].give(place.engines[share])
        sources = {key: value for each in labs.values() for key, value in each.settings.items()}
        (tmp_path / "admin.key").write_text(ADMIN_KEY)
        (tmp_path / "keys.toml").write_text(file_of(RED))
        ports: list[int] = []
        for _ in range(3 * NODES):
            ports.append(free_port(["127.0.0.1"], rng, taken_by(*ports)))
        gossip, public, control = ports[:NODES], ports[NODES : 2 * NODES], ports[2 * NODES :]
        nodes: list[Served] = []

        async def started(number: int, name: str) -> None:
            file = configuration(tmp_path, name, gossip, gossip[number], sources)
            where = ("--listen", f"127.0.0.1:{public[number]}", "--control", f"127.0.0.1:{control[number]}")
            nodes.append(await stack.enter_async_context(served(place, file, *where, workers=WORKERS)))

        for number, name in enumerate(names()):
            (tmp_path / name).mkdir()
            typed(tmp_path / name, made(), 100)
            await started(number, name)
        await agree(nodes[0], lambda engines: len(engines) == 8)
        traffic = Traffic(nodes)
        await traffic.hits("warm")
        before = fmean([await traffic.hits(f"before, {again}") for again in range(2)])
        async with trio.open_nursery() as nursery:
            for user in range(LOAD_USERS):
                nursery.start_soon(traffic.load, user)
            url, _ = await start_engine(place.nursery, 9)
            await engines_are_changed_by_command(nodes, url)
            await keys_of_the_cluster_are_rotated(tmp_path, nodes)
            await keys_of_clients_are_rotated(tmp_path, nodes, traffic)
            await agree(nodes[1], lambda engines: len(engines) == 8)
            traffic.stopped = True
        after = 0.0
        for again in range(ROUNDS_MAX):  # sixty turns: one round may lose so much by chance, not three
            after = max(after, await traffic.hits(f"after, {again}"))
            if after >= before - POINTS_LOST_MAX:
                break
        print(json.dumps({"served": traffic.served, "before": round(before, 4), "after": round(after, 4)}))
        assert traffic.failed == []
        assert before > 0.5
        assert after >= before - POINTS_LOST_MAX
        url = f"{nodes[0].url}/v1/chat/completions"
        assert (await place.http.post(url, content=chat(), headers=bearer(RED))).status_code == 401
