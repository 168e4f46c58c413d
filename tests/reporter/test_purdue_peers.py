"""Several routers: a worker that reports to one of them is known to all, by gossip."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from ranvier_py.reporter.hook import EvictionReporter
from tests.node.node_lab import MODEL, Node, cluster_lab

KEY = "a control key"
PROMPT = list(range(100, 300))
"""Twelve blocks, with anchors at 16, 32, 64 and 128 tokens."""


async def complete(node: Node, prompt: Sequence[int]) -> tuple[str, str]:
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": 2}
    answer = await node.http.post(f"{node.url}/v1/completions", json=body)
    assert answer.status_code == 200
    return answer.headers["x-ranvier-backend"], answer.headers["x-ranvier-reason"]


async def test_what_a_worker_reports_to_one_router_its_peers_know_and_forget_with_it(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, engines=3) as place:
        settings: dict[str, Any] = {"control_key": KEY, "probe_interval_s": 1}
        place.http.headers["authorization"] = f"Bearer {KEY}"
        reported, other = await place.cluster(2, **settings)
        worker = place.engines[2]
        reporter = EvictionReporter(worker, [reported.control], key=KEY, hashes="blocks", model=MODEL)
        reporter.start()
        try:
            for first, prompt in ((500, PROMPT), (600, PROMPT[::-1])):
                for block in range(12):
                    ids = prompt[16 * block : 16 * block + 16]
                    reporter.store_block(first + block, ids, first + block - 1 if block else None)
            await reported.until_routes(lambda view: view["claims"]["confirmed"] == 8)
            await other.until_routes(lambda view: view["claims"]["remote"] == 8)
            name = worker.removeprefix("http://")
            assert await complete(other, PROMPT) == (name, "affinity"), "no request came here or there before"
            await reported.until_routes(lambda view: view["claims"]["confirmed"] == 9)  # with what that request showed
            reporter.free_block(600)
            await reported.until_routes(lambda view: view["claims"]["confirmed"] == 5)
            await other.until_routes(lambda view: view["claims"]["remote"] == 0)
        finally:
            await trio.to_thread.run_sync(reporter.stop)
