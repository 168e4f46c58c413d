"""Of what operators order for all nodes the latest order holds, whoever was away or restarted meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from tests.node.fleet.test_backend_orders import ordered
from tests.node.node_lab import BETWEEN_LOOKS_S, ClusterLab, Node, cluster_lab
from tests.node.test_cluster_of_nodes import ADMIN_KEY

pytestmark = pytest.mark.slow  # each starts several nodes

Settings = dict[str, Any]


class Fleet:
    """Two nodes, each with its own state folder and configuration; the last engine is one that no test orders about."""

    def __init__(self, place: ClusterLab, folder: Path, configured: tuple[str, ...]) -> None:
        self.place, self.folder = place, folder
        *self.engines, self.marker = place.engines
        self.urls = dict(zip(("one", "two", "three"), self.engines, strict=False))
        self.configured = dict.fromkeys(configured, 1.0)

    async def start(self, name: str, **weights: float) -> Node:
        weights = {**self.configured, **weights}
        backends = [f"{self.urls[each]},name={each},weight={weight}" for each, weight in weights.items()]
        state = {"state_folder": self.folder / name, "gossip_admin_key": ADMIN_KEY}
        return await self.place.start(
            node_name=name, backend=[*backends, f"{self.marker},name=marker"], drain_timeout_s=1, **state
        )

    async def stop(self, node: Node, seen_by: Node) -> None:
        node.scope.cancel()
        await seen_by.sees(0)

    async def agree(self, *nodes: Node) -> list[list[tuple[str, float, bool]]]:
        """What each node has, once what all held when these met has spread: an order given after that has come."""
        for node in nodes:
            await node.sees(len(nodes) - 1)
        weight = 1.0
        for node in nodes:
            weight += 1.0
            assert (await ordered(node, "/weight", name="marker", weight=weight, cluster=True)).is_success
            for other in nodes:
                while marker_of(await other.backends()) != weight:  # noqa: ASYNC110
                    await trio.sleep(BETWEEN_LOOKS_S)
        return [await shown(node) for node in nodes]


def marker_of(backends: list[dict[str, Any]]) -> float:
    return float(next(each["weight"] for each in backends if each["name"] == "marker"))


async def shown(node: Node) -> list[tuple[str, float, bool]]:
    found = [(each["name"], each["weight"], each["draining"]) for each in await node.backends()]
    return sorted(each for each in found if each[0] != "marker")


async def test_what_was_undone_while_a_node_was_away_is_undone_there_also_if_the_others_were_restarted(
    tmp_path: Path,
) -> None:
    async with cluster_lab(tmp_path, engines=3) as place:
        fleet = Fleet(place, tmp_path, ("one",))
        first, second = await fleet.start("first"), await fleet.start("second")
        await first.sees(1)
        assert (await ordered(second, "", url=fleet.urls["two"], name="two", cluster=True)).is_success
        assert await fleet.agree(first, second) == [[("one", 1.0, False), ("two", 1.0, False)]] * 2
        await fleet.stop(second, first)
        assert (await ordered(first, "", "", "DELETE", name="two", cluster=True)).is_success
        assert (await ordered(first, "/weight", name="one", weight=5, cluster=True)).is_success
        first.scope.cancel()  # and nobody is there who would hold it
        first, second = await fleet.start("first"), await fleet.start("second")
        assert await fleet.agree(first, second) == [[("one", 5.0, False)]] * 2


async def test_what_a_node_undid_for_itself_does_not_come_back_from_its_peers_after_a_restart(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, engines=3) as place:
        fleet = Fleet(place, tmp_path, ("one",))
        first, second = await fleet.start("first"), await fleet.start("second")
        await first.sees(1)
        assert (await ordered(second, "", url=fleet.urls["two"], name="two", cluster=True)).is_success
        assert (await ordered(second, "", "", "DELETE", name="two", cluster=False)).is_success
        wanted = [[("one", 1.0, False), ("two", 1.0, False)], [("one", 1.0, False)]]
        assert await fleet.agree(first, second) == wanted
        await fleet.stop(second, first)
        second = await fleet.start("second")
        assert await fleet.agree(first, second) == wanted
        assert (await ordered(first, "/weight", name="two", weight=7, cluster=True)).is_success  # a later one
        assert await fleet.agree(first, second) == [[("one", 1.0, False), ("two", 7.0, False)]] * 2


async def test_a_file_that_was_edited_since_an_order_for_all_nodes_wins_over_the_order_that_peers_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster_lab(tmp_path, engines=4) as place:
        fleet = Fleet(place, tmp_path, ("one", "two"))
        first, second = await fleet.start("first"), await fleet.start("second")
        await first.sees(1)
        assert (await ordered(second, "", "", "DELETE", name="one", cluster=True)).is_success
        assert (await ordered(second, "/weight", name="two", weight=3, cluster=True)).is_success
        assert await fleet.agree(first, second) == [[("two", 3.0, False)]] * 2
        await fleet.stop(second, first)
        second = await fleet.start("second", one=4.0)
        assert f"orders.outdated {fleet.urls['one']}: removed, but the configuration was edited since, and holds" in (
            caplog.messages
        )
        assert await fleet.agree(first, second) == [[("two", 3.0, False)], [("one", 4.0, False), ("two", 3.0, False)]]


async def test_a_drain_that_was_ended_while_a_node_was_away_does_not_come_back_with_it(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, engines=2) as place:
        fleet = Fleet(place, tmp_path, ("one",))
        first, second = await fleet.start("first"), await fleet.start("second")
        await first.sees(1)
        assert (await ordered(second, "/drain", name="one")).is_success
        assert await fleet.agree(first, second) == [[("one", 1.0, True)]] * 2
        await fleet.stop(second, first)
        assert (await ordered(first, "/drain", name="one", draining=False)).is_success
        first.scope.cancel()
        first, second = await fleet.start("first"), await fleet.start("second")
        assert await fleet.agree(first, second) == [[("one", 1.0, False)]] * 2
