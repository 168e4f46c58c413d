"""The commands of docs/fleet.md, run as they stand there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node.node_lab import Lab, opened
from tests.page_commands import commands, shell


@pytest.mark.slow
async def test_its_commands_change_the_engines_of_a_node(tmp_path: Path) -> None:
    async with opened(Lab, 2, 60) as place:
        node = await place.start(backend=place.engines[:1])
        seen = []
        for command in commands("docs/fleet.md", "Commands"):
            await shell(f"{command} --control {node.control}", tmp_path, {"http://localhost:8001": place.engines[1]})
            found = [each for each in await node.backends() if each["name"] == "second"]
            seen.append(tuple((each["weight"], each["any_model"], each["draining"]) for each in found))
    weighed = (3.0, True, False)
    kept = (3.0, True, True)
    assert seen == [(), ((2.0, False, False),), ((3.0, False, False),), (weighed,), (kept,), (weighed,), *[()] * 4]
