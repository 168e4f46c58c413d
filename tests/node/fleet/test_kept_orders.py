"""What operators order of engines outlives a restart, unless the configuration was edited since."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node.fleet.test_backend_orders import ordered
from tests.node.fleet.test_orders_reached import places, seen_by
from tests.node.node_lab import Lab, Node, opened
from tests.node.test_reload_of_processes import DEADLINE_S, served


def named(engines: list[str], **weights: float) -> list[str]:
    """Backends of the configuration, the first ones of these engines, by name and weight."""
    return [f"{url},name={name},weight={weight}" for url, (name, weight) in zip(engines, weights.items(), strict=False)]


async def restarted(place: Lab, node: Node, **settings: Any) -> Node:
    node.scope.cancel()
    return await place.start(**settings)


async def shown(node: Node) -> Iterator[tuple[Any, ...]]:
    return sorted((each["name"], each["weight"], each["draining"]) for each in await node.backends())  # type: ignore[return-value]


async def test_orders_outlive_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with opened(Lab, 4, 60) as place:
        settings = {"backend": named(place.engines, one=1, two=1, three=1), "state_folder": tmp_path / "state"}
        node = await place.start(**settings)
        assert (await ordered(node, "", "", "DELETE", name="one")).json()["kept"] is True
        assert (await ordered(node, "/weight", name="two", weight=3)).json()["kept"] is True
        assert (await ordered(node, "/drain", name="three")).json()["kept"] is True
        added = {"url": place.engines[3], "name": "four", "weight": 2, "any_model": True}
        assert (await ordered(node, "", **added)).json()["kept"] is True
        wanted = [("four", 2.0, False), ("three", 1.0, True), ("two", 3.0, False)]
        assert await shown(node) == wanted
        for _ in range(2):
            node = await restarted(place, node, **settings)
            assert await shown(node) == wanted
            assert next(each for each in await node.backends() if each["name"] == "four")["any_model"] is True
        assert (await ordered(node, "", url=place.engines[0], name="one")).is_success
        assert (await ordered(node, "/drain", name="three", draining=False)).is_success
        node = await restarted(place, node, **settings)
        assert [each[0] for each in await shown(node)] == ["four", "one", "three", "two"]  # type: ignore[attr-defined]
        assert not any(each["draining"] for each in await node.backends())
    assert f"orders.restored {place.engines[0]}: removed" in caplog.messages
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


async def test_the_configuration_wins_where_it_was_edited_since_and_a_line_names_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(Lab, 3, 60) as place:
        first, second, third = place.engines
        folder = {"state_folder": tmp_path}
        node = await place.start(backend=named(place.engines, one=1, two=1), **folder)
        await ordered(node, "", "", "DELETE", name="one")
        await ordered(node, "/weight", name="two", weight=3)
        await ordered(node, "", url=third, name="three", weight=7)
        node = await restarted(place, node, backend=named(place.engines, one=5, two=1, three=2), **folder)
        assert [each[:2] for each in await shown(node)] == [("one", 5.0), ("three", 2.0), ("two", 3.0)]  # type: ignore[attr-defined]
        for url, words in ((first, "removed"), (third, "added")):
            line = f"orders.outdated {url}: {words}, but the configuration was edited since, and holds"
            assert line in caplog.messages
        assert not any(line.startswith(f"orders.outdated {second}") for line in caplog.messages)
        node = await restarted(place, node, backend=named(place.engines, one=5, two=1, three=2), **folder)
        assert [each[:2] for each in await shown(node)] == [("one", 5.0), ("three", 2.0), ("two", 3.0)]  # type: ignore[attr-defined]


async def test_a_state_that_is_damaged_or_cannot_be_written_is_named_and_the_node_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(Lab, 1, 60) as place:
        for content in ("{", "[]", '{"version": 2}', json.dumps({"version": 1, "backends": [{"url": "x"}]})):
            (tmp_path / "backends.json").write_text(content)
            node = await place.start(state_folder=tmp_path)
            assert (await node.chat()).status_code == 200
            assert (tmp_path / "unused-backends.json").read_text() == content, "a release before it may need it again"
            node.scope.cancel()
        assert sum(line.startswith("orders.not_restored") for line in caplog.messages) == 4
        assert not any("codec" in line or "Errno" in line or "char 0" in line for line in caplog.messages)
        (tmp_path / "file").write_text("")
        node = await place.start(state_folder=tmp_path / "file")
        answer = await ordered(node, "/drain", url=place.engines[0])
        assert (answer.status_code, answer.json()["kept"]) == (200, False)
        assert any(line.startswith("orders.not_kept") for line in caplog.messages)


async def test_without_a_folder_an_answer_shows_that_nothing_is_kept() -> None:
    async with opened(Lab, 1, 30) as place:
        node = await place.start()
        assert (await ordered(node, "/drain", url=place.engines[0])).json()["kept"] is False


@pytest.mark.slow
async def test_orders_outlive_a_restart_of_all_workers(tmp_path: Path) -> None:
    async with opened(Lab, 2, DEADLINE_S) as place:
        file = tmp_path / "ranvier.toml"
        backends = ", ".join(f'"{each}"' for each in named(place.engines, one=1, two=1))
        file.write_text(f'backend = [{backends}]\nstate_folder = "{tmp_path}/state"\n')
        where = places(True)
        async with served(place, file, *where, workers=2) as node:
            for path, method in (("", "DELETE"), ("/weight", "POST")):
                body = {"name": "one"} if method == "DELETE" else {"name": "two", "weight": 4}
                answer = await node.http.request(method, f"{node.control[0]}/admin/backends{path}", json=body)
                assert answer.json()["kept"] is True
        async with served(place, file, *where, workers=2) as node:
            for worker in (0, 1):
                assert await seen_by(node, worker) == [("two", 4.0, False)]
