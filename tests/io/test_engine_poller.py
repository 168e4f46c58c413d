"""The poller against a real, tiny HTTP engine on a real socket."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from random import Random
from time import process_time
from typing import Any

import pytest
import trio
import trio.testing

from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics
from ranvier_py.core.engine_cache.sources.engine_polls import METRICS_BYTES_MAX, MODELS_BYTES_MAX, PollOptions
from ranvier_py.core.engine_cache.sources.event_values import EngineLoad
from ranvier_py.core.engine_cache.sources.publishers import Endpoint, Publisher, of_operator
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import ProbeResult
from ranvier_py.io.engine_poller import PUBLISHERS_BYTES_MAX, EnginePoller
from tests.core.engine_cache.test_engine_metrics import TRTLLM
from tests.core.engine_cache.test_engine_metrics import VLLM as VLLM_METRICS
from tests.io.engine_events.kv_fakes import until
from tests.proxy.wire import Wire, answer, no_more_descriptors, tls_contexts

RARE = PollOptions(probe_interval_s=1000, unsettled_interval_s=900, probe_gap_s=0.005)
FAST = PollOptions(probe_interval_s=0.02, probe_gap_s=0.005, probe_timeout_s=5.0, probes_per_s_max=1000)
A, B = BackendId(0), BackendId(1)


def page(status: int, body: bytes = b"", *fields: bytes) -> bytes:
    return answer(body, *fields, status=status)


def models(*names: str) -> bytes:
    return page(200, json.dumps({"object": "list", "data": [{"id": name} for name in names]}).encode())


@dataclass
class FakeEngine:
    """`pages` are whole answers by path; b"" hangs up, None says nothing at all. Anything else is 404."""

    pages: dict[str, bytes | None] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, stream: Any) -> None:
        with suppress(trio.BrokenResourceError):  # a client that has read enough, or does not like our certificate
            async with Wire(stream) as wire:
                while (request := await wire.next_request()) is not None:
                    path = request[0].split(b" ")[1].decode()
                    self.asked.append(path)
                    self.heads.append(request[0])
                    sent = self.pages.get(path, page(404))
                    if sent is None:
                        await trio.sleep_forever()
                    elif not sent:
                        return
                    else:
                        await wire.send(sent)


@asynccontextmanager
async def serving(*engines: FakeEngine) -> AsyncIterator[None]:
    """The engines run inside; leaving it kills them with all their connections."""
    async with trio.open_nursery() as nursery:
        for engine in engines:
            listeners = await trio.open_tcp_listeners(engine.port, host="127.0.0.1")
            engine.port = listeners[0].socket.getsockname()[1]
            nursery.start_soon(trio.serve_listeners, engine.serve, listeners)
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def running(poller: EnginePoller) -> AsyncIterator[None]:
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(poller.run)
            yield
            nursery.cancel_scope.cancel()


class Reports:
    def __init__(self) -> None:
        self.send, self.receive = trio.open_memory_channel[tuple[BackendId, ProbeResult]](100_000)

    def __call__(self, id_: BackendId, result: ProbeResult) -> None:
        self.send.send_nowait((id_, result))

    async def next(self) -> ProbeResult:
        return (await self.receive.receive())[1]

    async def until(self, ok: bool) -> ProbeResult:
        while (result := await self.next()).ok is not ok:
            pass
        return result


@asynccontextmanager
async def probing(*engines: FakeEngine, options: PollOptions = RARE) -> AsyncIterator[tuple[EnginePoller, Reports]]:
    """A poller that probes these engines, A, B …"""
    reports = Reports()
    poller = EnginePoller(options, Random(1), probed=reports)
    async with serving(*engines), running(poller):
        for id_, engine in enumerate(engines):
            poller.watch(BackendId(id_), engine.url)
        yield poller, reports


async def probed(engine: FakeEngine, options: PollOptions = RARE) -> ProbeResult:
    """What the first probe finds."""
    async with probing(engine, options=options) as (_, reports):
        return await reports.next()


def healthy(*names: str) -> FakeEngine:
    return FakeEngine({"/health": page(200), "/v1/models": models(*names)})


async def test_the_first_probe_comes_at_once_and_reports_health_models_and_start_time() -> None:
    engine = healthy("base", "adapter")
    engine.pages["/metrics"] = page(200, b"# TYPE x gauge\nprocess_start_time_seconds 1.76e+09\nx 1\n")
    result = await probed(engine)
    assert (result.ok, result.status, result.models, result.started_at) == (True, 200, ("base", "adapter"), 1.76e9)
    assert result.cards == ({"id": "base"}, {"id": "adapter"})
    assert result.hybrid is None
    assert 0 < result.latency_s < 5
    assert engine.asked == ["/health", "/v1/models", "/metrics"]


async def test_a_probe_reports_whether_an_engine_is_a_hybrid() -> None:
    engine = healthy("base")
    engine.pages["/metrics"] = page(200, b'vllm:cache_config_info{block_size="528",mamba_block_size="528"} 1\n')
    assert (await probed(engine)).hybrid is True


async def test_backends_may_be_watched_before_it_runs_and_the_first_round_can_be_waited_for() -> None:
    poller = EnginePoller(RARE, Random(1), probed=Reports())
    engine = healthy("m")
    async with serving(engine):
        poller.watch(A, engine.url)
        poller.watch(B, engine.url)
        async with running(poller):
            await poller.wait_first_round()
            assert poller.counters.probes == 2


async def test_probes_go_on_at_the_interval_and_ask_for_models_only_now_and_then() -> None:
    engine = healthy("m")
    async with probing(engine, options=FAST) as (_, reports):
        assert (await reports.next()).models == ("m",)
        for _ in range(5):
            assert (await reports.next()).models is None
    assert engine.asked.count("/v1/models") == 1


async def test_a_metrics_page_that_is_not_there_is_not_asked_for_again() -> None:
    options = replace(FAST, start_time_interval_s=0.001, models_interval_s=0.001)
    engine = healthy("m")
    async with probing(engine, options=options) as (_, reports):
        for _ in range(4):
            await reports.next()
    assert engine.asked.count("/metrics") == 1
    assert engine.asked.count("/v1/models") >= 4


@pytest.mark.parametrize("status", [404, 405])
async def test_an_engine_without_a_health_page_is_judged_by_its_model_list(status: int) -> None:
    engine = FakeEngine({"/health": page(status), "/v1/models": models("m")})
    async with probing(engine, options=FAST) as (_, reports):
        for _ in range(3):
            result = await reports.next()
            assert (result.ok, result.models) == (True, ("m",))
    assert engine.asked.count("/health") == 1


@pytest.mark.parametrize(
    ("status", "ok"), [(200, True), (204, True), (401, True), (403, True), (302, False), (500, False), (503, False)]
)
async def test_only_some_statuses_of_the_health_page_mean_life(status: int, ok: bool) -> None:
    engine = FakeEngine({"/health": page(status, b"", b"Location: /v1/models"), "/v1/models": models("m")})
    if status == 204:
        engine.pages["/health"] = b"HTTP/1.1 204 No Content\r\n\r\n"
    result = await probed(engine)
    assert (result.ok, result.status, result.refused) == (ok, status, False)
    if not ok:
        assert engine.asked == ["/health"]  # a redirect is not followed


async def test_a_refused_connection_is_known_from_other_failures() -> None:
    engine = healthy("m")
    async with serving(engine):
        pass
    async with probing() as (poller, reports):
        poller.watch(A, engine.url)
        result = await reports.next()
    assert (result.ok, result.refused, result.status) == (False, True, 0)


@pytest.mark.parametrize("sent", [b"", b"what?\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"])
async def test_an_engine_that_hangs_up_or_talks_nonsense_has_failed_but_was_not_refused(sent: bytes) -> None:
    result = await probed(FakeEngine({"/health": sent}), replace(RARE, probe_timeout_s=0.05))
    assert (result.ok, result.refused) == (False, False)
    assert result.detail


async def test_a_probe_that_this_node_has_no_descriptor_for_is_no_verdict() -> None:
    engine = healthy("m")
    async with probing(engine, options=FAST) as (poller, reports):
        assert (await reports.next()).ok
        with no_more_descriptors():
            await until(lambda: poller.counters.probes_not_made >= 3)
        while poller.counters.probes < 4:
            assert (await reports.next()).ok


async def test_an_engine_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    result = await probed(FakeEngine({"/health": None}), PollOptions(probe_timeout_s=0.05))
    assert result.detail == "no answer within 0.05 s"


async def test_a_model_list_or_metrics_page_that_hangs_does_not_make_the_engine_ill() -> None:
    engine = FakeEngine({"/health": page(200), "/v1/models": None, "/metrics": b""})
    result = await probed(engine, PollOptions(probe_timeout_s=0.05))
    assert (result.ok, result.models, result.started_at) == (True, None, None)


async def test_an_endless_page_is_read_up_to_its_bound() -> None:
    engine = healthy("m")
    engine.pages["/v1/models"] = page(200, b" " * (4 * MODELS_BYTES_MAX))
    result = await probed(engine)
    assert (result.ok, result.models) == (True, None)


async def test_a_page_in_tiny_chunks_leaves_the_loop_to_others() -> None:
    """By the time of this process alone: other processes may take turns as well."""
    head, longest = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", 0.0

    async def look() -> None:
        nonlocal longest
        while True:
            began = process_time()
            await trio.lowlevel.checkpoint()
            longest = max(longest, process_time() - began)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        result = await probed(FakeEngine({"/health": head + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n"}), PollOptions())
        nursery.cancel_scope.cancel()
    assert result.ok or "no answer" in result.detail
    assert longest < 0.1


async def test_after_a_failure_the_next_good_probe_asks_for_everything_again() -> None:
    """The engine may be another process with other models."""
    engine = healthy("old")
    async with probing(options=FAST) as (poller, reports):
        async with serving(engine):
            poller.watch(A, engine.url)
            assert (await reports.next()).models == ("old",)
        assert (await reports.until(ok=False)).refused
        engine.pages |= {"/v1/models": models("new"), "/metrics": page(200, b"process_start_time_seconds 5\n")}
        async with serving(engine):
            result = await reports.until(ok=True)
    assert (result.models, result.started_at) == (("new",), 5.0)


async def test_trouble_reported_from_a_request_is_looked_at_at_once() -> None:
    engine = healthy("m")
    async with probing(engine) as (poller, reports):
        await reports.next()
        for _ in range(50):
            poller.probe_soon(A)
        await reports.next()
        poller.probe_soon(BackendId(99))
    assert engine.asked.count("/health") == 2


async def test_a_forgotten_backend_is_not_reported_again() -> None:
    async with probing(healthy("m"), healthy("m"), options=FAST) as (poller, reports):
        await reports.next()
        poller.forget(A)
        poller.forget(A)
        while reports.receive.statistics().current_buffer_used:
            reports.receive.receive_nowait()
        for _ in range(10):
            assert (await reports.receive.receive())[0] == B


async def test_forgetting_a_backend_ends_its_probe_even_while_it_waits_for_an_answer() -> None:
    engine = FakeEngine({"/health": None})
    async with probing(engine) as (poller, reports):
        await until(lambda: engine.asked)
        poller.forget(A)
        await trio.testing.wait_all_tasks_blocked()
        assert reports.receive.statistics().current_buffer_used == 0


@pytest.mark.parametrize("word", ["word", "Schlüssel"])
async def test_the_key_of_a_backend_goes_to_that_backend_alone(word: str) -> None:
    guarded, open_ = healthy("m"), healthy("m")
    async with serving(guarded), probing(open_) as (poller, reports):
        poller.watch(B, guarded.url, key=lambda: word)
        await reports.next()
        await reports.next()
    assert all(b"authorization: Bearer " + word.encode() in head for head in guarded.heads)
    assert not any(b"authorization" in head.lower() for head in open_.heads)


async def test_an_https_engine_is_probed_over_tls_and_its_certificate_is_checked() -> None:
    theirs, ours = tls_contexts()
    engine, reports = healthy("m"), Reports()
    trusting, doubting = (EnginePoller(RARE, Random(1), probed=reports, context=context) for context in (ours, None))
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_ssl_over_tcp_listeners(0, theirs, host="127.0.0.1", https_compatible=True)
        port = listeners[0].transport_listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, engine.serve, listeners)
        for poller, ok in [(trusting, True), (doubting, False)]:
            await nursery.start(poller.run)
            poller.watch(A, f"https://127.0.0.1:{port}")
            result = await reports.next()
            assert (result.ok, result.refused) == (ok, False), result
        assert "certificate verify failed" in result.detail
        assert "(127.0.0.1)" in result.detail
        nursery.cancel_scope.cancel()


async def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setitem(os.environ, name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert (await probed(healthy("m"))).ok


METRICS = PollOptions(
    metrics_interval_s=0.02,
    metrics_interval_max_s=0.05,
    metrics_unknown_interval_s=1000,
    metrics_share_max=1.0,
    metrics_timeout_s=0.5,
)


@asynccontextmanager
async def measuring(
    engine: FakeEngine, options: PollOptions = METRICS, owns: Callable[[BackendId], bool] = lambda _: True
) -> AsyncIterator[tuple[EnginePoller, list[EngineMetrics]]]:
    found: list[EngineMetrics] = []
    poller = EnginePoller(options, Random(1), measured=lambda _, metrics: found.append(metrics), owns=owns)
    async with serving(engine), running(poller):
        poller.watch(A, engine.url, lambda: "secret")
        yield poller, found


async def test_metrics_are_looked_at_again_and_again_with_the_engines_key() -> None:
    engine = FakeEngine({"/metrics": page(200, VLLM_METRICS)})
    async with measuring(engine) as (poller, found):
        await until(lambda: len(found) >= 3)
        assert {each.running for each in found} == {2}
        assert b"authorization: Bearer secret" in engine.heads[0]
        assert poller.counters.metrics_failed == 0


async def test_tensorrt_llm_has_its_page_elsewhere_and_is_not_asked_in_vain_again() -> None:
    pages: dict[str, bytes | None] = {
        "/metrics": page(200, b'[{"numActiveRequests":1}]'),
        "/prometheus/metrics": page(200, TRTLLM),
    }
    engine = FakeEngine(pages)
    async with measuring(engine) as (_, found):
        await until(lambda: len(found) >= 3)
        assert engine.asked[:4] == ["/metrics", *["/prometheus/metrics"] * 3]


@pytest.mark.parametrize("answer", [page(404), page(200, b"\0\xff" * 1000), page(302, b"{}"), page(200, b"hello 1\n")])
async def test_an_engine_without_a_page_that_we_know_is_left_alone_for_long(answer: bytes) -> None:
    engine = FakeEngine({"/metrics": answer})
    async with measuring(engine) as (poller, found):
        await until(lambda: poller.counters.metrics_unknown == 1)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert engine.asked == ["/metrics", "/prometheus/metrics"]
        assert not found


@pytest.mark.parametrize(
    "wire",
    [
        page(503, b"busy"),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nvllm:num_requests_running 1\n",
        None,
    ],
)
async def test_what_is_no_answer_counts_as_failed_and_harms_nothing(wire: bytes | None) -> None:
    engine = FakeEngine({"/metrics": wire})
    async with measuring(engine, replace(METRICS, metrics_timeout_s=0.1)) as (poller, found):
        await until(lambda: poller.counters.metrics_failed >= 2)
        assert not found
        engine.pages["/metrics"] = page(200, VLLM_METRICS)
        await until(lambda: found)


async def test_a_metrics_page_without_end_is_cut_off() -> None:
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + VLLM_METRICS + b"# more\n" * (METRICS_BYTES_MAX // 6)
    async with measuring(FakeEngine({"/metrics": endless}), replace(METRICS, metrics_timeout_s=5.0)) as (poller, found):
        await until(lambda: poller.counters.metrics_pages >= 1)
        assert not found


async def test_metrics_that_are_a_peers_to_look_at_are_left_alone_until_they_are_ours() -> None:
    engine = FakeEngine({"/metrics": page(200, VLLM_METRICS)})
    asked: list[BackendId] = []
    ours: list[bool] = []

    def owns(backend: BackendId) -> bool:
        asked.append(backend)
        return bool(ours)

    async with measuring(engine, owns=owns) as (_, found):
        await until(lambda: len(asked) >= 3)
        assert not engine.asked
        ours.append(True)
        await until(lambda: found)


async def test_without_an_interval_no_metrics_are_looked_at() -> None:
    engine = FakeEngine({"/metrics": page(200, VLLM_METRICS)})
    async with measuring(engine, replace(METRICS, metrics_interval_s=0)) as (poller, found):
        await trio.testing.wait_all_tasks_blocked(0.02)
        poller.load_reported(A, EngineLoad(3, 2, 100, 4096, 0, 0))
        assert (engine.asked, found) == ([], [])


async def test_an_engine_that_reports_its_queue_in_its_events_needs_no_page() -> None:
    async with measuring(FakeEngine(), replace(METRICS, metrics_interval_s=1.0)) as (poller, found):
        await until(lambda: poller.counters.metrics_pages >= 1)
        poller.load_reported(A, EngineLoad(3, 2, 100, 4096, 0, 0))
        poller.load_reported(BackendId(9), EngineLoad(3, 2, 100, 4096, 0, 0))
        assert found == [EngineMetrics(running=3, waiting=2, capacity_tokens=4096)]
        assert poller.counters.loads_reported == 1


SELDOM = PollOptions(publishers_interval_s=1000, publishers_unanswered_interval_s=900, publishers_gap_s=0.005)
OFTEN = PollOptions(publishers_interval_s=0.02, publishers_unanswered_interval_s=0.02, publishers_gap_s=0.005)
VLLM, SGLANG, SGLANG_OLD = "/kv_event_sources", "/server_info", "/get_server_info"


def sources(*ports: int, host: str = "*") -> bytes:
    listed = {str(rank): {"publisher": "zmq", "endpoint": f"tcp://{host}:{port}"} for rank, port in enumerate(ports)}
    return page(200, json.dumps(listed).encode())


def here(*ports: int) -> tuple[Publisher, ...]:
    return tuple(Publisher(rank, Endpoint("127.0.0.1", port)) for rank, port in enumerate(ports))


class Discovery:
    """A poller that asks for publishers alone, and all that it reported."""

    def __init__(self, options: PollOptions) -> None:
        self.found: list[tuple[BackendId, tuple[Publisher, ...]]] = []
        self.poller = EnginePoller(options, Random(1), found=lambda *found: self.found.append(found))

    @property
    def looks(self) -> int:
        return self.poller.counters.discoveries


@asynccontextmanager
async def discovering(*engines: FakeEngine, options: PollOptions = SELDOM) -> AsyncIterator[Discovery]:
    discovery = Discovery(options)
    async with serving(*engines), running(discovery.poller):
        for id_, engine in enumerate(engines):
            discovery.poller.watch(BackendId(id_), engine.url)
        yield discovery


async def test_vllm_is_asked_first_and_states_enough() -> None:
    engine = FakeEngine({VLLM: sources(5557, 5558)})
    async with discovering(engine) as discovery:
        await until(lambda: discovery.found)
        assert discovery.found == [(A, here(5557, 5558))]
        assert engine.asked == [VLLM]


@pytest.mark.parametrize("path", [SGLANG, SGLANG_OLD])
async def test_sglang_is_asked_next(path: str) -> None:
    block = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 7000, "dp_size": 2, "topic": ""}
    pages: dict[str, bytes | None] = {path: page(200, json.dumps({"kv_events": block}).encode())}
    engine = FakeEngine(pages)
    async with discovering(engine) as discovery:
        await until(lambda: discovery.found)
        assert discovery.found == [(A, here(7000, 7001))]


async def test_an_engine_without_events_is_asked_seldom_and_nothing_is_reported() -> None:
    engine = FakeEngine()
    async with discovering(engine) as discovery:
        await until(lambda: discovery.looks == 1)
        assert engine.asked == [VLLM, SGLANG, SGLANG_OLD]
        assert discovery.found == []


async def test_after_a_restart_it_is_asked_again() -> None:
    """Port 0 gives other ports each time."""
    engine = FakeEngine({VLLM: sources(5557)})
    async with discovering(engine) as discovery:
        for number, (answer, expected) in enumerate(
            [(sources(5557), here(5557)), (sources(6001), here(6001)), (page(404), ())], 1
        ):
            engine.pages[VLLM] = answer
            discovery.poller.discover_soon(A)
            await until(lambda number=number: len(discovery.found) == number)  # type: ignore[misc]
            assert discovery.found[-1] == (A, expected)


async def test_the_same_answer_is_reported_once() -> None:
    """Each time a reader would be started anew."""
    engine = FakeEngine({VLLM: sources(5557)})
    async with discovering(engine, options=OFTEN) as discovery:
        await until(lambda: discovery.looks >= 5)
        assert len(discovery.found) == 1


async def test_publishers_on_a_host_that_can_not_be_looked_up_just_now_are_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_arguments: object, **_more: object) -> None:
        raise OSError("no name server")

    engine = FakeEngine({VLLM: sources(5557)})
    async with discovering(engine, options=OFTEN) as discovery:
        await until(lambda: discovery.found)
        monkeypatch.setattr(trio.socket, "getaddrinfo", fail)
        engine.pages[VLLM] = sources(5557, host="10.0.0.9")
        looks = discovery.looks
        await until(lambda: discovery.looks >= looks + 3)
        assert discovery.found == [(A, here(5557))]


@pytest.mark.parametrize("answer", [b"", page(503), page(429), page(401), page(408)])
async def test_an_engine_that_does_not_answer_keeps_what_it_had(answer: bytes) -> None:
    engine = FakeEngine({VLLM: answer})
    async with discovering(engine, options=OFTEN) as discovery:
        await until(lambda: discovery.looks >= 2)
        engine.pages[VLLM] = sources(5557)
        await until(lambda: discovery.found)
        engine.pages[VLLM] = answer
        looks = discovery.looks
        await until(lambda: discovery.looks >= looks + 3)
        assert discovery.found == [(A, here(5557))]


async def test_a_silent_engine_holds_up_no_other() -> None:
    silent, quick = FakeEngine({VLLM: None}), FakeEngine({VLLM: sources(5557)})
    options = replace(OFTEN, publishers_timeout_s=0.05)
    async with discovering(silent, quick, options=options) as discovery:
        await until(lambda: len(silent.asked) >= 2 and discovery.found)
        assert discovery.found == [(B, here(5557))]


@pytest.mark.parametrize("host", ["10.255.255.1", "example.invalid"])
async def test_an_engine_that_points_elsewhere_is_refused_with_a_warning(host: str, caplog: Any) -> None:
    """Or whoever runs one engine could make every node connect wherever he likes."""
    engine = FakeEngine({VLLM: sources(5557, host=host)})
    with caplog.at_level(logging.WARNING):
        async with discovering(engine, options=OFTEN) as discovery:
            await until(lambda: discovery.looks >= 3)
            assert discovery.found == []
    (line,) = [record.message for record in caplog.records if "publishers.refused" in record.message]
    assert line.startswith(f"publishers.refused {engine.url}: rank 0: its events are on another host; kv_events of")


@pytest.mark.parametrize(
    "answer",
    [
        page(200, b"x" * (PUBLISHERS_BYTES_MAX + 1)),
        page(200, b"["),
        page(200, b"\xff\xfe\x00"),
        page(200, b'{"0": {"endpoint": "ipc:///tmp/kv"}}'),
        page(302, b"", b"Location: http://127.0.0.1:1/kv_event_sources"),
    ],
)
async def test_odd_answers_about_publishers_state_nothing(answer: bytes) -> None:
    engine = FakeEngine({VLLM: answer})
    async with discovering(engine) as discovery:
        await until(lambda: discovery.looks == 1)
        assert discovery.found == []


async def test_what_an_operator_wrote_is_taken_without_asking() -> None:
    fixed = of_operator("tcp://10.0.0.9:5557", "", 1, "127.0.0.1")
    discovery, engine = Discovery(SELDOM), FakeEngine({VLLM: sources(1)})
    async with serving(engine):
        discovery.poller.watch(A, engine.url, publishers=fixed)
        async with running(discovery.poller):
            discovery.poller.watch(B, engine.url, publishers=fixed)
            discovery.poller.watch(BackendId(2), engine.url, events=False)
            discovery.poller.discover_soon(A)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert discovery.found == [(A, fixed), (B, fixed)]
            assert engine.asked == []


async def test_no_publishers_are_reported_of_a_backend_that_is_forgotten() -> None:
    engine = FakeEngine({VLLM: None})
    async with discovering(engine) as discovery:
        await until(lambda: engine.asked)
        discovery.poller.forget(A)
        await trio.testing.wait_all_tasks_blocked()
        assert discovery.found == []
