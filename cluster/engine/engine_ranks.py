"""Data-parallel ranks behind one port, as `vllm serve --data-parallel-size N`: each has a cache and a queue of its own.

A request goes to the rank that `x-data-parallel-rank` names, else to the one with the least work. The pages of
metrics, KV event sources and occupancy have all ranks. Everything else, /admin included, is of the rank named, or of
the first.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import orjson

from cluster.engine.engine_metrics import CONTENT_TYPE, merged
from cluster.engine.engine_routes import GENERATE, Engine, EngineConfig
from cluster.engine.engine_text import TextTokenizer
from cluster.engine.kv_publisher import KvEndpoints
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import HttpRequest

RANK_HEADER = b"x-data-parallel-rank"
WAITING_WEIGHT = 4
"""vLLM's balancer counts a request that waits like four that run."""


class Ranks:
    """The ranks of one engine, by number."""

    def __init__(self, config: EngineConfig, tokenizer: TextTokenizer, ranks: int) -> None:
        """Raises OSError if an address for KV events can't be had, ValueError for an encoding without such ranks."""
        if config.kv is not None and config.kv.encoding == "sglang":
            raise ValueError("the lab has no ranks of SGLang's")
        configs = (replace(config, rank=rank, kv=shifted(config.kv, rank)) for rank in range(ranks))
        self.engines = [Engine(each, tokenizer) for each in configs]
        for engine in self.engines:
            engine.models = self.engines[0].models  # an adapter is loaded into all
        self._turns = count()

    async def handle(self, request: HttpRequest, client: Client) -> None:
        """Answer one request of the server."""
        if len(self.engines) > 1 and request.path == b"/metrics":
            client.work()
            client.respond(200, merged(engine.page() for engine in self.engines), content_type=CONTENT_TYPE)
        elif len(self.engines) > 1 and (kv := self.engines[0].kv) is not None and request.path == kv.path:
            client.work()
            client.respond(200, self.sources())
        elif request.path == b"/admin/occupancy":
            client.respond(200, orjson.dumps([engine.live.occupancy() for engine in self.engines]))
        else:
            await self.chosen(request).handle(request, client)

    def chosen(self, request: HttpRequest) -> Engine:
        named = next((value for name, value in request.headers if name.lower() == RANK_HEADER), b"")
        if named.isdigit() and int(named) < len(self.engines):
            return self.engines[int(named)]
        if request.path not in GENERATE:
            return self.engines[0]
        first = next(self._turns) % len(self.engines)
        return min([*self.engines[first:], *self.engines[:first]], key=work)

    def sources(self) -> bytes:
        pages = [orjson.loads(engine.kv.sources()) for engine in self.engines if engine.kv is not None]
        return orjson.dumps({str(rank): page["0"] for rank, page in enumerate(pages)})


def work(engine: Engine) -> int:
    statistics = engine.live.statistics()
    return WAITING_WEIGHT * statistics.waiting + statistics.running


def shifted(kv: KvEndpoints | None, rank: int) -> KvEndpoints | None:
    """Return where a rank publishes: at port + rank, or at a free port."""
    if kv is None or not rank:
        return kv

    def moved(endpoint: str) -> str:
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + rank}" if port not in ("", "0") else endpoint

    return replace(kv, events=moved(kv.events), replay=moved(kv.replay))
