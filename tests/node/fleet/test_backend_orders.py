"""What an operator orders of engines while a node runs, over its control port and by `ranvier backend`."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from ranvier_py.cli import main
from ranvier_py.commands.exit_codes import EXIT_CONFIG
from ranvier_py.commands.fleet.run_backend import compared, report_of
from tests.node.access.key_lab import bearer, value_of
from tests.node.node_lab import Lab, Node, cluster_lab, opened, printed

OPERATOR, ADMIN = "rk-operator-key-of-a-person", "rk-admin-key-of-a-person"


async def ordered(node: Node, path: str, key: str = "", method: str = "POST", **body: Any) -> httpx.Response:
    headers = bearer(key) if key else {}
    return await node.http.request(method, f"{node.control}/admin/backends{path}", json=body, headers=headers)


async def command(node: Node, *words: str, called: str = "backend", status: int = 0) -> str:
    """What the command prints."""
    return await printed(called, *words, "--control", node.control, status=status)


async def test_a_duplicate_is_a_conflict_that_names_the_twin_by_name_and_url() -> None:
    async with opened(Lab, 2, 30) as place:
        first, second = place.engines
        node = await place.start(backend=[f"{first},name=one"])
        for body, named in (
            ({"url": first, "name": "two"}, first),
            ({"url": second, "name": "one"}, first),
            ({"url": first.replace("127.0.0.1", "localhost")}, first),
        ):
            answer = await ordered(node, "", **body)
            assert answer.status_code == 409, answer.text
            assert "'one'" in (text := answer.json()["error"]["message"])
            assert named in text
        assert [each["name"] for each in await node.backends()] == ["one"]


async def test_a_backend_is_drained_weighed_changed_and_removed_by_its_name() -> None:
    async with opened(Lab, 2, 30) as place:
        node = await place.start(backend=[f"{place.engines[0]},name=one", f"{place.engines[1]},name=two"])
        assert (await ordered(node, "/drain", name="two")).json()["draining"] is True
        assert (await ordered(node, "/weight", name="two", weight=3)).json()["weight"] == 3.0
        changed = (await ordered(node, "/set", name="two", any_model=True, weight=2.5)).json()
        assert (changed["any_model"], changed["weight"], changed["draining"]) == (True, 2.5, True)
        assert (await ordered(node, "/drain", name="two", draining=False)).json()["draining"] is False
        assert (await ordered(node, "", method="DELETE", name="two")).json()["name"] == "two"
        (left,) = await node.backends()
        assert left["name"] == "one"
        assert (await node.chat()).headers["x-ranvier-backend"] == "one"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/weight", {"name": "one", "weight": 0}, 400, "weight"),
        ("/weight", {"name": "one"}, 400, "nothing to set"),
        ("/weight", {"name": "one", "any_model": True}, 400, "any_model"),
        ("/set", {"name": "one", "tls_name": "engine.test"}, 400, "https"),
        ("/set", {"name": "nobody", "weight": 2}, 404, "nobody"),
        ("/set", {"weight": 2}, 400, "url is missing"),
        ("/set", {"name": "one", "weight": 2, "cluster": True}, 400, "gossip_admin_key"),
        ("", {"url": "http://127.0.0.1:9", "cluster": True}, 400, "gossip_admin_key"),
        ("", {"url": "http://127.0.0.1:9", "cluster": "all"}, 400, "true or false"),
    ],
)
async def test_an_order_that_is_refused_changes_nothing(path: str, body: Any, status: int, words: str) -> None:
    async with opened(Lab, 1, 30) as place:
        node = await place.start(backend=[f"{place.engines[0]},name=one"])
        before = await node.backends()
        answer = await ordered(node, path, **body)
        assert answer.status_code == status, answer.text
        assert words in answer.json()["error"]["message"]
        assert [(each["name"], each["weight"]) for each in await node.backends()] == [
            (each["name"], each["weight"]) for each in before
        ]


async def test_each_change_is_a_line_with_its_caller_and_the_old_and_the_new_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with opened(Lab, 2, 30) as place:
        first, second = place.engines
        keys = keys_of_people(tmp_path)
        node = await place.start(backend=[f"{first},name=one"], control_keys_file=keys)
        assert (await ordered(node, "/set", OPERATOR, name="one", weight=2)).status_code == 403
        assert (await ordered(node, "/weight", OPERATOR, name="one", weight=2)).is_success
        assert (await ordered(node, "/drain", OPERATOR, name="one")).is_success
        assert (await ordered(node, "", ADMIN, url=second, name="two", weight=4)).is_success
        assert (await ordered(node, "/set", ADMIN, name="two", hosted=True)).is_success
        assert (await ordered(node, "", ADMIN, "DELETE", name="two")).is_success
    for line in (
        "backend.set one weight 1.0 -> 2.0 (ordered by operator)",
        "backend.draining one False -> True (ordered by operator)",
        f"backend.added two {second} weight 4 (ordered by admin)",
        "backend.set two hosted None -> True (ordered by admin)",
        f"backend.removed two {second} (ordered by admin)",
    ):
        assert line in caplog.messages


def keys_of_people(folder: Path) -> Path:
    path = folder / "control.toml"
    lines = []
    for key, role in ((OPERATOR, "operate"), (ADMIN, "admin")):
        members = {"id": key.split("-")[1], "sha256": sha256(key.encode()).hexdigest(), "role": role}
        lines.append("[[key]]\n" + "".join(f"{name} = {value_of(value)}\n" for name, value in members.items()))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
async def test_the_command_lists_adds_weighs_drains_changes_and_removes() -> None:
    async with opened(Lab, 2, 60) as place:
        first, second = place.engines
        node = await place.start(backend=[f"{first},name=one"])
        assert f"two at {second}: added" in await command(node, "add", second, "name=two", "weight=2")
        assert "two at" in await command(node, "weight", "two", "3")
        assert "drained" in await command(node, "drain", second)
        listed = [line.split() for line in (await command(node)).splitlines()]
        assert " ".join(listed[0]) == "backend url health weight draining in flight wanted by"
        assert [row[0] for row in listed[1:]] == ["one", "two"]
        assert (listed[1][-1], listed[2][3:5], listed[2][-1]) == ("static", ["3", "yes"], "api")
        assert "requests again" in await command(node, "undrain", "two")
        assert "set" in await command(node, "set", "two", "any_model=yes")
        assert (await node.backends())[1]["any_model"] is True
        assert "removed" in await command(node, "remove", "two")
        assert "409" in await command(node, "add", first, status=1)
        assert "gossip_admin_key" in await command(node, "weight", "one", "2", "--cluster", status=1)
        assert "needs a name" in await command(node, "drain", status=2)


def test_the_command_names_an_order_that_does_not_outlive_a_restart() -> None:
    answer = {"name": "two", "url": "http://e:1", "kept": False, "reached": []}
    assert [line.split(":")[0] for line in report_of("add", answer)] == ["two at http", "  not kept"]
    assert len([*report_of("add", {**answer, "kept": True})]) == 1


async def test_a_node_is_drained_and_listed_by_command(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with opened(Lab, 1, 30) as place:
        node = await place.start()
        assert "ready" in await command(node, "list", called="node")
        assert "unready" in await command(node, "drain", called="node")
        assert (await node.ask("/readyz"))["reason"] == "drained by an order without a key"
        assert (await node.chat()).status_code == 200
        assert "not ready: drained by an order without a key" in await command(node, called="node")
        assert "again" in await command(node, "undrain", called="node")
        assert (await node.ask("/readyz"))["ready"] is True
    assert "node.drained False -> True (ordered by -)" in caplog.messages


async def test_the_nodes_of_a_cluster_are_listed(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, engines=1) as place:
        first = await place.start(node_name="first")
        await place.start(node_name="second")
        await first.sees(1)
        lines = (await command(first, called="node")).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["node", "first", "second"]


def test_a_worker_that_has_the_same_backend_has_one_backend() -> None:
    place = {"place": "worker 1", "why": "", "backends": [{"name": "one"}], "differences": []}
    assert list(compared({"places": [place]})) == ["worker 1: 1 backend, as here"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["list", "one"], "backend list takes no name"),
        (["set", "one", "url=http://x", "weight=2"], "url is what the engine goes by"),
        (["set", "http://a:1", "name=two"], "name is what the engine goes by"),
        (["add", "http://a:1", "url=http://b:1"], "url is what the engine goes by"),
        (["add", "http://a:1", "weight=1", "weight=2"], "weight stands twice"),
    ],
)
def test_no_word_of_an_order_is_passed_over(words: Sequence[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backend", *words, "--control", "http://127.0.0.1:1"]) == EXIT_CONFIG
    assert why in capsys.readouterr().err
