"""Two real vLLM engines behind two nodes of a cluster, and what came of talks with them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio

from tests.engines.real import ATTENTION, MODEL, EngineKind, RanvierNode, Vllm
from tests.engines.talks import Served, Share, Talks, share_of


class Site:
    """Two engines, and two nodes before them that may be replaced."""

    def __init__(self, folder: Path, blocks: int, kind: EngineKind = ATTENTION) -> None:
        self.folder, self.kind = folder, kind
        self.engines = [Vllm(name, blocks, folder, kind) for name in ("a", "b")]
        self.nodes: list[RanvierNode] = []
        self.rows: list[str] = []
        try:
            for engine in self.engines:
                engine.ready()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        for process in [*(node.process for node in self.nodes), *(engine.process for engine in self.engines)]:
            process.end()

    def put_before(self, policy: str) -> None:
        """Two nodes with this policy, in place of those that are there, that hear both engines."""
        for node in self.nodes:
            node.process.end()
        urls = {engine.name: engine.url for engine in self.engines}
        first = RanvierNode("one", urls, self.folder, policy, [])
        self.nodes = [first]
        first.ready(len(urls))
        second = RanvierNode("two", urls, self.folder, policy, [first.gossip])
        self.nodes.append(second)
        second.ready(len(urls))
        for node in self.nodes:
            node.until(
                "/admin/engine-cache", lambda view: sum(each["streams"] for each in view["engines"]) == len(urls)
            )

    def until_exact(self) -> None:
        """Until both nodes know all that both engines hold. Of a hybrid that takes a first state, so each gets one."""
        if self.kind is not ATTENTION:
            for engine in self.engines:
                body = {"model": MODEL, "prompt": "read " * self.kind.block_tokens, "max_tokens": 1}
                httpx.post(f"{engine.url}/v1/completions", json=body, timeout=120.0).raise_for_status()
        levels = ["exact"] * len(self.engines)
        for node in self.nodes:
            node.until("/admin/engine-cache", lambda view: [each["level"] for each in view["engines"]] == levels)

    def run(self, talks: Talks, turns: int, users: int = 3, *, calls: bool = False) -> list[Served]:
        return trio.run(partial(talks.run, [node.url for node in self.nodes], turns, users=users, calls=calls))

    def counters(self, name: str) -> float:
        return sum(engine.counter(name) for engine in self.engines)

    def send(self, name: str, served: list[Served]) -> Share:
        share = share_of(served, self.kind.block_tokens)
        self.rows.append(share.row(name))
        return share

    def streams(self) -> list[dict[str, Any]]:
        """Both engines' streams, each from the node that reads it."""
        found = [source for node in self.nodes for source in node.ask("/admin/engine-cache")["sources"]]
        return sorted(found, key=lambda source: str(source["backend"]))
