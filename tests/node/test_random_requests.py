"""Requests that nobody thought of, to nodes that have everything on, and engines that fail now and then: whatever is
answered, no code of ours fails. Seeds are drawn anew where RANDOM_REQUESTS_SEED names some."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import trio

from tests.node.access.key_lab import key_lines, keys_file
from tests.node.node_lab import MODEL, Node, cluster_lab

TENANTS: Mapping[str, str] = {
    "red": "requests_per_minute = 600\ntokens_per_minute = 200000",
    "blue": "uncached_tokens_per_minute = 20000\nconcurrent = 4",
    "green": 'budget = [{amount = 100000, window = "hour"}, {amount = 20, window = "day", unit = "cost"}]',
    "grey": 'tokens_per_minute = 3000\nmode = "shadow"\nrequests_per_minute = 50',
    "free": "",
}
KEYS = {f"rk-{tenant}{number}-of-a-client": tenant for tenant in TENANTS for number in (0, 1)}
MODELS: Any = [
    {"name": "gpt-4o", "to": {MODEL: 80, "small": 20}, "fallback": ["other"], "max_tokens": 200},
    {"name": "claude-*", "to": MODEL, "model_in_answer": "asked"},
    {"name": "priced", "to": MODEL, "cost": {"input": 0.001, "output": 0.002}},
]
BODIES: Mapping[str, Any] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 50},
    "/v1/responses": lambda text: {"input": text},
    "/v1/embeddings": lambda text: {"input": [text, text]},
}
OTHERS = (
    "/v1/models",
    "/v1/responses/resp_1",
    "/v1/%72esponses/x",
    "/v1/nothing",
    "/health",
    "/v1/files",
    "/v1/batches",
)
FAULTS: Any = (
    {"kind": "status", "status": 503, "retry_after_s": 1},
    {"kind": "status", "probability": 0.3},
    {"kind": "status", "status": 429, "probability": 0.3},
    {"kind": "refuse", "probability": 0.3},
    {"kind": "reset_mid_stream"},
    {"kind": "error_inside", "form": "announced"},
    {"kind": "error_inside", "form": "late"},
    {"kind": "error_inside", "form": "empty"},
    {"kind": "uncached", "counts": False},
)
CLIENTS, REQUESTS = 8, 150
SEEDS = [int(seed) for seed in os.environ.get("RANDOM_REQUESTS_SEED", "1 2").split()]


def odd_body(rng: Random, path: str) -> bytes:
    """A body of some API with members that fit, and some that nobody would send."""
    body = dict(BODIES[path](f"question {rng.randrange(20)} " * rng.choice((1, 20, 300))))
    odd: Mapping[str, tuple[Any, ...]] = {
        "model": (MODEL, MODEL, MODEL, "small", "gpt-4o", "claude-x", "priced", "other", "nope", 7, None),
        "stream": (True, False),
        "max_tokens": (1, 50, 100_000, -1, "x", None, 1e30),
        "n": (1, 2, 2, 0, -1, 10**9, "2", None),
        "temperature": (0, 0, 1.5),
        "background": (True, False, "x"),
        "stream_options": ({"include_usage": True}, None),
        "messages": (
            [],
            None,
            [{"role": "x", "content": 5}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        ),
        "user": ("a", 5),
    }
    body |= {
        name: rng.choice(values) for name, values in odd.items() if rng.random() < (1.0 if name == "model" else 0.25)
    }
    data = json.dumps(body).encode()
    return rng.choice((data,) * 12 + (data[: len(data) // 2], bytes(rng.randbytes(50)), b"[" * 3000, b""))


async def client(nodes: list[Node], rng: Random, statuses: set[int]) -> None:
    for _ in range(REQUESTS):
        key = rng.choice((*KEYS, *KEYS, "rk-wrong", ""))
        headers = (
            {rng.choice(("x-api-key", "api-key")): key} if rng.random() < 0.5 else {"authorization": f"Bearer {key}"}
        )
        headers |= {"x-priority": str(rng.randint(-3, 99))} if rng.random() < 0.1 else {}
        headers |= (
            {"traceparent": rng.choice(("garbage", f"00-{'a' * 32}-{'b' * 16}-01"))} if rng.random() < 0.1 else {}
        )
        path, node = rng.choice((*BODIES, *BODIES, *OTHERS)), rng.choice(nodes)
        body = odd_body(rng, path) if path in BODIES else b""
        with suppress(httpx.HTTPError), trio.move_on_after(rng.choice((30.0, 30.0, 30.0, rng.random() / 20))):
            answer = await node.http.post(node.url + path, content=body, headers=headers)
            statuses.add(answer.status_code)
            assert not (answer.status_code == 500 and b"internal error" in answer.content)


async def operator(nodes: list[Node], rng: Random, folder: Path) -> None:
    """Reads all that can be read, and changes what can be changed, for as long as there is traffic."""
    while True:
        node = rng.choice(nodes)
        for path in (
            "/metrics",
            "/admin/access",
            "/admin/backends",
            "/admin/cluster",
            "/openapi.json",
            "/readyz?verbose",
        ):
            assert (await node.http.get(node.control + path)).status_code in (200, 503)
        await node.http.post(f"{node.control}/explain", content=odd_body(rng, "/v1/chat/completions"))
        write_keys(folder, rng.choice((60, 600)))
        await node.fault(rng.choice(node.engines), **rng.choice(FAULTS), lasting_s=0.3)


def write_keys(folder: Path, red_requests: int) -> Path:
    tables = [f'[[tenant]]\nname = "{name}"\n{limits}\n\n' for name, limits in TENANTS.items()]
    tables[0] = tables[0].replace("600", str(red_requests)) + '[[tenant.model_limits]]\nmodels = "small*"\n'
    tables[0] += "tokens_per_minute = 5000\n\n"
    more: Mapping[str, Any] = {"models": [MODEL, "gpt*"], "requests_per_minute": 300, "priority": 3}
    keys = [key_lines(key, tenant=tenant, **(more if "1" in key else {})) for key, tenant in KEYS.items()]
    return keys_file(folder, *tables, *keys)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_is_sent_with_everything_on_no_code_of_ours_fails(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng, statuses = Random(seed), set[int]()
    settings = {
        "keys_file": write_keys(tmp_path, 600),
        "model": MODELS,
        "response_cache": True,
        "response_cache_assume_greedy": True,
        "tenant_isolation": "credential",
        "shadow": ["least_loaded"],
        "recent_decisions": 100,
    }
    async with cluster_lab(tmp_path, engines=3, deadline_s=120.0) as lab:
        nodes = await lab.cluster(2, **settings)
        async with trio.open_nursery() as operators:
            operators.start_soon(operator, nodes, rng, tmp_path)
            async with trio.open_nursery() as clients:
                for number in range(CLIENTS):
                    clients.start_soon(client, nodes, Random(f"{seed} {number}"), statuses)
            operators.cancel_scope.cancel()
        assert [await node.faults() for node in nodes] == [{}, {}]
    assert {200, 400, 401, 404, 429} <= statuses
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
