"""The cluster's key is changed as docs/cluster.md has it, to the letter, while nodes restart."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from random import Random

import pytest
import trio

from ranvier_py.io.keys import KeyFile, read_keys
from tests.documents import OPERATORS
from tests.node.node_lab import BETWEEN_LOOKS_S, Node, chat, cluster_lab, turn


def steps() -> list[str]:
    """The shell commands of each step."""
    (block,) = re.findall(r"takes three steps(?s:.*?)\n\n((?:    .*\n)+)", OPERATORS)
    lines = [line.removeprefix("    ") for line in block.splitlines()]
    return ["\n".join(part.splitlines()[1:]) for part in re.split(r"(?m)^(?=# \d\. )", "\n".join(lines)) if part]


def made() -> str:
    """The command that makes a key."""
    (command,) = re.findall(r"^    (\(.*> cluster.key\))  ", OPERATORS, re.MULTILINE)
    return str(command)


def typed(folder: Path, commands: str, number: int) -> None:
    """Run commands of our pages. What makes a key makes the one with this number: two random ones may share an id."""
    key = Random(f"key {number}").randbytes(32).hex()
    given = f'openssl() {{ [ "$*" = "rand -hex 32" ] && echo {key}; }}\n'
    subprocess.run(["sh", "-euc", given + commands], cwd=folder, check=True)


async def rings(node: Node) -> float:
    """How many rings of keys the node has read from its file since it started."""
    page = (await node.http.get(f"{node.control}/metrics")).text
    return float(re.findall(r"^ranvier_gossip_key_file_changes_total (\S+)", page, re.MULTILINE)[0])


async def finds(node: Node, messages: list[dict[str, str]], backend: str) -> None:
    """Until the node has the routes of this prompt; then its next turn goes to the engine that served it."""
    headers = {}
    while headers.get("x-ranvier-reason") != "affinity":
        view = await node.http.post(f"{node.control}/explain", content=chat(messages))
        if 2 * view.json()["matched_tokens"] > view.json()["prompt_tokens"]:
            headers = (await node.chat(messages)).headers
            assert headers["x-ranvier-backend"] == backend
        await trio.sleep(BETWEEN_LOOKS_S)


def test_the_documents_have_three_steps(tmp_path: Path) -> None:
    typed(tmp_path, made(), 100)
    file = tmp_path / "cluster.key"
    first = read_keys(file)
    assert file.stat().st_mode & 0o077 == 0
    counts = []
    for number, commands in enumerate(steps() * 2):
        typed(tmp_path, commands, number)
        keys = read_keys(file)
        counts.append(len(keys.ring.keys))
        assert keys.fingerprint_secret == first.fingerprint_secret
        assert file.stat().st_mode & 0o077 == 0
    assert counts == [2, 2, 1] * 2
    assert not set(keys.ring.keys.values()) & set(first.ring.keys.values())


@pytest.mark.slow
async def test_routes_are_shared_throughout_though_a_node_restarts_after_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(KeyFile.__init__.__kwdefaults__, "interval_s", 0.02)
    async with cluster_lab(tmp_path) as place:
        typed(tmp_path, made(), 100)
        place.key_file = tmp_path / "cluster.key"
        nodes = await place.cluster(2)
        known = turn("Where are the atlases? " * 10)
        backend = (await nodes[0].chat(known)).headers["x-ranvier-backend"]
        for number, commands in enumerate(steps() * 2):
            before = [await rings(node) for node in nodes]
            typed(tmp_path, commands, number)
            for node, count in zip(nodes, before, strict=True):
                while await rings(node) == count:  # noqa: ASYNC110  # a page
                    await trio.sleep(BETWEEN_LOOKS_S)
            nodes.pop(0).scope.cancel()
            nodes.append(await place.start())
            await finds(nodes[1], known, backend)  # learned before the first step, by a node that is gone
            for one, other in (nodes, nodes[::-1]):
                fresh = turn(f"Where is book {number}, asked at {one.url}? " * 10)
                await finds(other, fresh, (await one.chat(fresh)).headers["x-ranvier-backend"])
    assert "gossip.other_routes" not in caplog.text
    assert "gossip.fingerprint" not in caplog.text
