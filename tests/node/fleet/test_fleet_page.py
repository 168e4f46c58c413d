"""The commands of docs/fleet.md, run as they stand there."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from shlex import quote

import trio

from tests.node.node_lab import Lab, opened

PAGE = Path(__file__).parents[3] / "docs" / "fleet.md"


def commands() -> list[str]:
    """The commands of the section."""
    section = PAGE.read_text().partition("## Commands")[2].partition("\n## ")[0]
    return re.findall(r"^    (ranvier .+)$", section, re.MULTILINE)


async def test_its_commands_change_the_engines_of_a_node() -> None:
    async with opened(Lab, 2, 60) as place:
        node = await place.start(backend=place.engines[:1])
        seen = []
        for command in commands():
            line = re.sub(r"^ranvier\b", f"{quote(sys.executable)} -m ranvier_py", command)
            line = line.replace("http://localhost:8001", place.engines[1])
            environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[1])}
            await trio.run_process(["sh", "-ec", f"{line} --control {node.control}"], env=environment)
            found = [each for each in await node.backends() if each["name"] == "second"]
            seen.append(tuple((each["weight"], each["any_model"], each["draining"]) for each in found))
    weighed = (3.0, True, False)
    kept = (3.0, True, True)
    assert seen == [(), ((2.0, False, False),), ((3.0, False, False),), (weighed,), (kept,), (weighed,), *[()] * 4]
