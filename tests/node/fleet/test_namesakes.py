"""Two nodes that were given one name."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from ranvier_py.node import cluster_parts
from tests.node.node_lab import BETWEEN_LOOKS_S, cluster_lab


@pytest.mark.slow
async def test_the_newcomer_is_renamed_both_warn_and_the_name_returns_once_it_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(cluster_parts, "NAME_FREE_S", 0.2)
    named: list[str] = []  # of the lines of the log in JSON
    monkeypatch.setattr(cluster_parts, "name_lines", lambda name, _: named.append(name))
    async with cluster_lab(tmp_path, engines=1) as place:
        elder = await place.start(node_name="same")
        newcomer = await place.start(node_name="same")
        view = await newcomer.until("/admin/cluster", lambda view: view["name"] != "same")
        renamed = view["name"]
        assert renamed.startswith("same-")
        await elder.until("/admin/cluster", lambda view: [each["name"] for each in view["members"]] == [renamed])
        assert (await elder.ask("/admin/cluster"))["name"] == "same"
        while not {"member.renamed", "member.namesake"} <= (found := warned(caplog)):  # noqa: ASYNC110  # a log
            await trio.sleep(BETWEEN_LOOKS_S)
        assert len(found) == 2
        while renamed not in named:  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)
        elder.scope.cancel()
        await newcomer.until("/admin/cluster", lambda view: view["name"] == "same")
        while not any(line.startswith("member.regained same") for line in caplog.messages):  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)


def warned(caplog: pytest.LogCaptureFixture) -> set[str]:
    records = [each for each in caplog.records if each.levelname == "WARNING" and "member." in each.getMessage()]
    return {each.getMessage().partition(" ")[0] for each in records}
