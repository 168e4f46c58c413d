"""Discovery against a tiny HTTP engine on a real socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from ranvier_py.core.engine_cache.sources.publishers import Endpoint, Publisher, of_operator
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import BackendId
from ranvier_py.io.engine_events.publisher_discovery import PAGE_BYTES_MAX, DiscoveryOptions, KvDiscovery
from tests.io.engine_events.kv_fakes import until
from tests.io.test_health_probes import FakeEngine, page, serving

A, B = BackendId(0), BackendId(1)
RARE = DiscoveryOptions(interval_s=1000, interval_unanswered_s=900, gap_s=0.005)
OFTEN = DiscoveryOptions(interval_s=0.02, interval_unanswered_s=0.02, gap_s=0.005)
VLLM, SGLANG, SGLANG_OLD = "/kv_event_sources", "/server_info", "/get_server_info"


def sources(*ports: int, host: str = "*") -> bytes:
    told = {str(rank): {"publisher": "zmq", "endpoint": f"tcp://{host}:{port}"} for rank, port in enumerate(ports)}
    return page(200, json.dumps(told).encode())


def here(*ports: int) -> tuple[Publisher, ...]:
    return tuple(Publisher(rank, Endpoint("127.0.0.1", port)) for rank, port in enumerate(ports))


class Watch:
    """A discovery and all that it told."""

    def __init__(self, options: DiscoveryOptions) -> None:
        self.told: list[tuple[BackendId, tuple[Publisher, ...]]] = []
        self.discovery = KvDiscovery(lambda *found: self.told.append(found), options, Random(1))


@asynccontextmanager
async def watching(*engines: FakeEngine, options: DiscoveryOptions = RARE) -> AsyncIterator[Watch]:
    watch = Watch(options)
    for id, engine in enumerate(engines):  # noqa: A001
        watch.discovery.watch(BackendId(id), engine.url)
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.discovery.run)
        yield watch
        nursery.cancel_scope.cancel()


async def test_vllm_is_asked_first_and_says_enough() -> None:
    async with serving(FakeEngine({VLLM: sources(5557, 5558)})) as engine, watching(engine) as watch:
        await until(lambda: watch.told)
        assert watch.told == [(A, here(5557, 5558))]
        assert watch.discovery.publishers(A) == here(5557, 5558)
        assert engine.asked == [VLLM]


@pytest.mark.parametrize("path", [SGLANG, SGLANG_OLD])
async def test_sglang_is_asked_next(path: str) -> None:
    block = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 7000, "dp_size": 2, "topic": ""}
    pages: dict[str, bytes | None] = {path: page(200, json.dumps({"kv_events": block}).encode())}
    async with serving(FakeEngine(pages)) as engine, watching(engine) as watch:
        await until(lambda: watch.told)
        assert watch.told == [(A, here(7000, 7001))]


async def test_an_engine_without_events_is_asked_seldom_and_nothing_is_told() -> None:
    async with serving(FakeEngine()) as engine, watching(engine) as watch:
        await until(lambda: watch.discovery.looks == 1)
        assert engine.asked == [VLLM, SGLANG, SGLANG_OLD]
        assert watch.told == []


async def test_after_a_restart_it_is_looked_at_again() -> None:
    """Port 0 gives other ports each time."""
    async with serving(FakeEngine({VLLM: sources(5557)})) as engine, watching(engine) as watch:
        await until(lambda: watch.told)
        engine.pages[VLLM] = sources(6001)
        watch.discovery.look_soon(A)
        await until(lambda: len(watch.told) == 2)
        engine.pages[VLLM] = page(404)
        watch.discovery.look_soon(A)
        await until(lambda: len(watch.told) == 3)
        assert watch.told == [(A, here(5557)), (A, here(6001)), (A, ())]


async def test_the_same_answer_is_told_once() -> None:
    """Each time a subscriber would be started anew."""
    async with serving(FakeEngine({VLLM: sources(5557)})) as engine, watching(engine, options=OFTEN) as watch:
        await until(lambda: watch.discovery.looks >= 5)
        assert len(watch.told) == 1


@pytest.mark.parametrize("answer", [b"", page(503)])
async def test_an_engine_that_does_not_answer_keeps_what_it_had(answer: bytes) -> None:
    async with serving(FakeEngine({VLLM: sources(5557)})) as engine, watching(engine, options=OFTEN) as watch:
        await until(lambda: watch.told)
        engine.pages[VLLM] = answer
        looks = watch.discovery.looks
        await until(lambda: watch.discovery.looks >= looks + 3)
        assert watch.discovery.publishers(A) == here(5557)
        assert len(watch.told) == 1


async def test_one_that_comes_later_is_found() -> None:
    async with serving(FakeEngine({VLLM: page(503)})) as engine, watching(engine, options=OFTEN) as watch:
        await until(lambda: watch.discovery.looks >= 2)
        engine.pages[VLLM] = sources(5557)
        await until(lambda: watch.told)


async def test_a_silent_engine_holds_up_no_other() -> None:
    options = DiscoveryOptions(interval_s=0.02, interval_unanswered_s=0.02, gap_s=0.005, timeout_s=0.05)
    silent, quick = FakeEngine({VLLM: None}), FakeEngine({VLLM: sources(5557)})
    async with serving(silent), serving(quick), watching(silent, quick, options=options) as watch:
        await until(lambda: len(silent.asked) >= 2 and watch.told)
        assert watch.told == [(B, here(5557))]


@pytest.mark.parametrize("host", ["10.255.255.1", "example.invalid"])
async def test_an_engine_that_points_elsewhere_is_refused_and_told_of(host: str, caplog: Any) -> None:
    """Or whoever runs one engine could make every node connect wherever he likes."""
    async with (
        serving(FakeEngine({VLLM: sources(5557, host=host)})) as engine,
        watching(engine, options=OFTEN) as watch,
    ):
        await until(lambda: watch.discovery.looks >= 3)
        assert watch.told == []
    assert [record.message for record in caplog.records if "kv.refused" in record.message] == [
        f"kv.refused {engine.url}: rank 0: its events are on another host; kv_events of the backend can say where"
    ]


@pytest.mark.parametrize(
    "answer",
    [
        page(200, b"x" * (PAGE_BYTES_MAX + 1)),
        page(200, b"["),
        page(200, b"\xff\xfe\x00"),
        page(200, b'{"0": {"endpoint": "ipc:///tmp/kv"}}'),
        page(302, b"", b"Location: http://127.0.0.1:1/kv_event_sources"),
    ],
)
async def test_odd_answers_tell_nothing(answer: bytes) -> None:
    async with serving(FakeEngine({VLLM: answer})) as engine, watching(engine) as watch:
        await until(lambda: watch.discovery.looks == 1)
        assert watch.told == []


async def test_what_an_operator_wrote_is_taken_without_asking() -> None:
    fixed = of_operator("tcp://10.0.0.9:5557", "", 1, "127.0.0.1")
    async with serving(FakeEngine({VLLM: sources(1)})) as engine, watching() as watch:
        watch.discovery.watch(A, engine.url, fixed=fixed)
        watch.discovery.look_soon(A)
        assert watch.told == [(A, fixed)]
        assert watch.discovery.publishers(A) == fixed
        assert engine.asked == []
    early = Watch(RARE)
    early.discovery.watch(A, engine.url, fixed=fixed)
    async with trio.open_nursery() as nursery:
        await nursery.start(early.discovery.run)
        assert early.told == [(A, fixed)], "also when it was watched before"
        nursery.cancel_scope.cancel()


async def test_nothing_is_told_of_a_backend_that_is_forgotten() -> None:
    async with serving(FakeEngine({VLLM: None})) as engine, watching(engine) as watch:
        await until(lambda: engine.asked)
        watch.discovery.forget(A)
        watch.discovery.forget(A)
        await trio.testing.wait_all_tasks_blocked()
        assert watch.told == []
        assert watch.discovery.publishers(A) == ()


async def test_the_key_of_the_backends_is_sent() -> None:
    async with serving(FakeEngine({VLLM: sources(5557)})) as engine, watching() as watch:
        watch.discovery.watch(A, engine.url, "secret")
        await until(lambda: watch.told)
        assert b"authorization: Bearer secret" in engine.heads[0]


def test_times_must_make_sense() -> None:
    with pytest.raises(ConfigError, match="gap_s"):
        DiscoveryOptions(gap_s=0)
    with pytest.raises(ConfigError, match="jitter"):
        DiscoveryOptions(jitter=1)
