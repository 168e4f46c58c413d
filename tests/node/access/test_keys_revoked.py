"""An operator revokes a key on one node: it is refused on all within a second, and stays so when nodes restart."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trio

from ranvier_py.cli import main
from tests.node.access.key_lab import BLUE, RED, asked, bearer, keys_file
from tests.node.node_lab import BETWEEN_LOOKS_S, Node, cluster_lab, lab
from tests.proxy.wire import GOOD, Scripted

ADMIN_KEY = "an-admin-key-of-the-cluster"


async def statuses(node: Node) -> list[int]:
    return [(await asked(node, bearer(key))).status_code for key in (RED, BLUE)]


async def until(node: Node, wanted: list[int]) -> None:
    while await statuses(node) != wanted:  # noqa: ASYNC110
        await trio.sleep(BETWEEN_LOOKS_S)


async def test_a_key_revoked_on_one_node_is_refused_on_all_even_after_all_have_restarted(
    tmp_path: Path,
) -> None:
    settings = {"keys_file": keys_file(tmp_path), "gossip_admin_key": ADMIN_KEY}
    states = [tmp_path / f"state{number}" for number in range(2)]
    async with cluster_lab(tmp_path, engines=1) as place:
        first, second = [await place.start(**settings, gossip_state_file=state) for state in states]
        await second.sees(1)
        assert [await statuses(node) for node in (first, second)] == [[200, 200]] * 2
        order = {"id": "red", "hours": 1}
        with trio.fail_after(3.0):  # a second, and two for a machine that is busy
            answer = await first.http.post(f"{first.control}/admin/access/revoke", json=order)
            assert answer.status_code == 200, answer.text
            await until(second, [401, 200])
        refused = await asked(first, bearer(RED))
        assert "the key was revoked" in refused.text
        assert [each["id"] for each in (await second.ask("/admin/access"))["revoked"]] == ["red"]
        newcomer = await place.start(**settings)
        await newcomer.sees(2)
        await until(newcomer, [401, 200])
        for node in (first, second, newcomer):
            node.scope.cancel()
        await trio.testing.wait_all_tasks_blocked(0.05)
        place.places.clear()
        again = await place.start(**settings, gossip_state_file=states[0])
        assert await statuses(again) == [401, 200]
        answer = await again.http.post(f"{again.control}/admin/access/restore", json={"id": "red"})
        assert answer.json() == {"id": "red", "until": None, "known": True}
        assert await statuses(again) == [200, 200]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"id": "red"}, "revoking needs a keys_file, and gossip with a gossip_admin_key"),
        ({"id": "a b"}, "id must have 1 to 64 printable characters"),
        ({"id": 7}, "id must have"),
        ({}, "id must have"),
        ({"id": "red", "hours": 0}, "hours must be a number above 0"),
        ({"id": "red", "hours": 1e9}, "hours must be a number above 0"),
        ({"id": "red", "days": 1}, "days: there is no such member"),
    ],
)
async def test_an_order_that_can_not_be_followed_is_answered_with_the_reason(
    tmp_path: Path, order: dict[str, object], words: str
) -> None:
    async with lab(Scripted(GOOD), keys_file=keys_file(tmp_path)) as node:
        answer = await node.http.post(f"{node.control}/admin/access/revoke", json=order)
        assert (answer.status_code, words in answer.text) == (400, True), answer.text
        assert await statuses(node) == [200, 200]


async def test_the_command_shows_revokes_and_restores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with cluster_lab(tmp_path, engines=1) as place:
        node = await place.start(keys_file=keys_file(tmp_path), gossip_admin_key=ADMIN_KEY)
        printed = []
        orders = [["revoke", "red", "--hours", "2"], [], ["restore", "red"]]
        orders += [["revoke"], ["revoke", "rde"], ["restore", "x"]]
        for words in orders:
            code = await trio.to_thread.run_sync(partial(main, ["access", *words, "--control", node.control]))
            printed.append((code, *capsys.readouterr()))
        assert printed[0][1].startswith("red is refused until 20")
        assert "red  red  revoked until" in printed[1][1]
        assert printed[2][1] == "red is restored\n"
        assert printed[3][::2] == (2, "ranvier: access revoke needs the id of a key\n")
        assert printed[4][1].endswith("; the file of this node has no key of that id\n"), "a typo revokes nothing"
        assert printed[5][2] == "ranvier: 400: x is not revoked\n"
        assert [code for code, *_ in printed] == [0, 0, 0, 2, 0, 1]
