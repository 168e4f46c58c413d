"""Eight engines that a node finds by a file, by DNS and by an API server at once, and all of them replaced."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.node.discovery.source_labs import SOURCES, quick
from tests.node.node_lab import Lab, opened

pytestmark = pytest.mark.usefixtures("quick")

SHARES = {"file": slice(0, 3), "srv": slice(2, 5), "service": slice(5, 8)}
"""Which engines each source names: the third one is named by two."""


async def test_engines_of_a_file_of_dns_and_of_kubernetes_serve_together_and_none_fails(tmp_path: Path) -> None:
    async with opened(Lab, 8, 60) as place, AsyncExitStack() as stack:
        labs = {kind: await stack.enter_async_context(SOURCES[kind](tmp_path)) for kind in SHARES}
        for kind, share in SHARES.items():
            await labs[kind].give(place.engines[share])
        settings = {name: value for each in labs.values() for name, value in each.settings.items()}
        node = await place.start(backend=[], **settings)

        async def until(count: int, by: dict[str, int]) -> None:
            def holds(answer: dict[str, Any]) -> bool:
                serving = [each for each in answer["backends"] if not each["draining"]]
                kinds = [kind for each in serving for kind in each["wanted_by"]]
                return len(serving) == count and {kind: kinds.count(kind) for kind in set(kinds)} == by

            await node.until("/admin/backends", holds)

        await until(8, {"file": 3, "dns": 3, "kubernetes": 3})
        for number in range(16):
            answer = await node.chat([{"role": "user", "content": f"Question {number} of many? " * 20}])
            assert answer.status_code == 200
        await labs["file"].give(place.engines[3:5])
        await until(6, {"file": 2, "dns": 3, "kubernetes": 3})
        await labs["srv"].give(place.engines[4:5])
        await until(5, {"file": 2, "dns": 1, "kubernetes": 3})
        await labs["service"].fail()
        await labs["file"].give(place.engines[:4])
        await until(8, {"file": 4, "dns": 1, "kubernetes": 3})
        assert (await node.chat()).status_code == 200
        assert await node.faults() == {}


__all__ = ["quick"]
