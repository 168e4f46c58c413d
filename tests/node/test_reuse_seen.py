"""Engines that reuse no prefixes, before a node: it says so everywhere, and shares the load among them."""

from __future__ import annotations

import logging
import re
from collections import Counter

import pytest
import trio

from cluster.engine.engine_process import DEFAULT_TOKENIZER
from tests.node.node_lab import Lab, Node, chat, opened, start_engine, turn

DEADLINE_S = 30
USERS = 6


async def ask(node: Node, requests: int, *, stream: bool) -> Counter[str]:
    """Let users ask side by side about one long system prompt; count who served them."""
    served: Counter[str] = Counter()

    async def user(number: int) -> None:
        for turns in range(requests // USERS):
            answer = await node.chat(turn(f"User {number} asks the {turns}th question. "), max_tokens=4, stream=stream)
            assert answer.status_code == 200, answer.text
            served[answer.headers["x-ranvier-backend"]] += 1

    async with trio.open_nursery() as nursery:
        for number in range(USERS):
            nursery.start_soon(user, number)
    return served


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_engines_that_reuse_nothing_are_named_and_share_the_load(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with opened(Lab, 0, DEADLINE_S) as place:
        for number in range(3):
            tokenizer, limits = str(DEFAULT_TOKENIZER), {"decode_s": 0.01, "cache": "vanilla"}
            place.engines.append((await start_engine(place.nursery, number, tokenizer=tokenizer, **limits))[0])  # type: ignore[arg-type]
        node = await place.start(engine_metrics_interval_s=0.1)
        while any(each["reuses_prefixes"] for each in await node.backends()):
            await ask(node, 5 * USERS, stream=stream)
        served = await ask(node, 20 * USERS, stream=stream)
        assert min(served.values()) > 0.6 * max(served.values()), served
        assert all("served just before" in each["reuses_nothing_because"] for each in await node.backends())
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert re.findall(r"ranvier_backend_reuses_prefixes\{[^}]+\} (\S+)", page) == ["0.0"] * 3
        explained = (await node.http.post(f"{node.control}/explain", content=chat(turn("And now?")))).json()
        assert not any(each["reuses_prefixes"] or each["matched_tokens"] for each in explained["candidates"])
        await node.until("/admin/backends", lambda _: caplog.text.count("backend.reuses_nothing") == 3)


@pytest.mark.parametrize("stream", [True, False])
async def test_of_engines_that_reuse_nothing_and_count_nothing_none_gets_all(stream: bool) -> None:
    """Without counts and pages nothing shows whether they reuse prefixes; how long they take shows their load."""
    async with opened(Lab, 0, DEADLINE_S) as place:
        for number in range(3):
            limits = {"decode_s": 0.005, "prefill_tokens_per_s": 8000.0, "cache": "vanilla"}
            engine = await start_engine(place.nursery, number, tokenizer=str(DEFAULT_TOKENIZER), **limits)  # type: ignore[arg-type]
            place.engines.append(engine[0])
        node = await place.start(engine_metrics_interval_s=0)
        for url in place.engines:
            await node.fault(url, kind="uncached", counts=False)
        await ask(node, 2 * USERS, stream=stream)
        served = await ask(node, 8 * USERS, stream=stream)
        assert all(each["reuses_prefixes"] for each in await node.backends())
        assert max(served.values()) < 0.7 * served.total(), served
        assert len(served) == 3, served


@pytest.mark.slow
async def test_an_engine_restarted_with_its_cache_on_regains_its_affinity() -> None:
    async with opened(Lab, 0, DEADLINE_S) as place:
        tokenizer = str(DEFAULT_TOKENIZER)
        url, scope = await start_engine(place.nursery, tokenizer=tokenizer, cache="vanilla")  # type: ignore[arg-type]
        place.engines.append(url)
        node = await place.start(engine_metrics_interval_s=0.1, probe_interval_s=0.2)
        while (await node.backends())[0]["reuses_prefixes"]:
            await ask(node, 2 * USERS, stream=False)
        scope.cancel()
        await node.until_backend(lambda each: each["health"] == "unhealthy")
        await start_engine(place.nursery, port=int(url.rpartition(":")[2]), tokenizer=tokenizer)
        await node.until_backend(lambda each: each["health"] == "healthy" and each["reuses_prefixes"])
        answers = [await node.chat(turn(f"Question {number}? "), max_tokens=4) for number in range(3)]
        assert int(answers[-1].headers["x-ranvier-matched-tokens"]) > 0
