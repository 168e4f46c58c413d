"""The prober against a real, tiny HTTP engine on a real socket."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
import trio
import trio.abc
import trio.testing
import trustme

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import ProbeResult
from ranvier_py.io.health_probes import (
    MODELS_BYTES_MAX,
    MODELS_MAX,
    Page,
    ProbeOptions,
    Prober,
    read_models,
    read_start_time,
)

FAST = ProbeOptions(interval_s=0.02, interval_unsettled_s=0.02, gap_s=0.005, timeout_s=5.0, probes_per_s_max=1000)
RARE = ProbeOptions(interval_s=1000, interval_unsettled_s=900, gap_s=0.005)
A, B = BackendId(0), BackendId(1)


def page(status: int, body: bytes = b"", *fields: bytes) -> bytes:
    lines = [b"HTTP/1.1 %d Whatever" % status, b"Content-Length: %d" % len(body), *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


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

    async def serve(self, stream: trio.abc.Stream) -> None:
        received = b""
        async with stream:
            while chunk := await stream.receive_some():
                received += chunk
                while b"\r\n\r\n" in received:
                    head, _, received = received.partition(b"\r\n\r\n")
                    if not await self.answer(stream, head):
                        return

    async def serve_or_hang_up(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        """A client that does not like our certificate ends the handshake."""
        with suppress(trio.BrokenResourceError):
            await self.serve(stream)

    async def answer(self, stream: trio.abc.Stream, head: bytes) -> bool:
        path = head.split(b" ")[1].decode()
        self.asked.append(path)
        self.heads.append(head)
        answer = self.pages.get(path, page(404))
        if answer is None:
            await trio.sleep_forever()
        try:
            await stream.send_all(answer or b"")
        except trio.BrokenResourceError:
            return False
        return bool(answer)


@asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    """The engine runs inside; leaving it kills the engine with all its connections."""
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(engine.port, host="127.0.0.1")
        engine.port = listeners[0].socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, engine.serve, listeners)
        yield engine
        nursery.cancel_scope.cancel()


class Reports:
    def __init__(self) -> None:
        self.send, self.receive = trio.open_memory_channel[tuple[BackendId, ProbeResult]](100_000)

    def __call__(self, id_: BackendId, result: ProbeResult) -> None:
        self.send.send_nowait((id_, result))

    async def next(self) -> ProbeResult:
        with trio.fail_after(10):
            return (await self.receive.receive())[1]

    async def until(self, ok: bool) -> ProbeResult:
        while (result := await self.next()).ok is not ok:
            pass
        return result


@asynccontextmanager
async def probing(options: ProbeOptions) -> AsyncIterator[tuple[Prober, Reports]]:
    reports = Reports()
    prober = Prober(reports, options, Random(1))
    async with trio.open_nursery() as nursery:
        await nursery.start(prober.run)
        yield prober, reports
        nursery.cancel_scope.cancel()


def healthy(*names: str) -> FakeEngine:
    return FakeEngine({"/health": page(200), "/v1/models": models(*names)})


async def test_the_first_probe_comes_at_once_and_tells_health_models_and_start_time() -> None:
    engine = healthy("base", "adapter")
    engine.pages["/metrics"] = page(200, b"# TYPE x gauge\nprocess_start_time_seconds 1.76e+09\nx 1\n")
    async with serving(engine), probing(RARE) as (prober, reports):
        prober.watch(A, engine.url)
        result = await reports.next()
    assert (result.ok, result.status, result.models, result.started_at) == (True, 200, ("base", "adapter"), 1.76e9)
    assert result.cards == ({"id": "base"}, {"id": "adapter"})
    assert 0 < result.latency_s < 5
    assert engine.asked == ["/health", "/v1/models", "/metrics"]


async def test_backends_may_be_watched_before_it_runs_and_the_first_round_can_be_waited_for() -> None:
    reports = Reports()
    prober = Prober(reports, RARE, Random(1))
    async with serving(healthy("m")) as engine, trio.open_nursery() as nursery:
        prober.watch(A, engine.url)
        prober.watch(B, engine.url)
        await nursery.start(prober.run)
        with trio.fail_after(10):
            await prober.wait_first_round()
        assert prober.probes == 2
        nursery.cancel_scope.cancel()


async def test_probes_go_on_at_the_interval_and_ask_for_models_only_now_and_then() -> None:
    async with serving(healthy("m")) as engine, probing(FAST) as (prober, reports):
        prober.watch(A, engine.url)
        assert (await reports.next()).models == ("m",)
        for _ in range(5):
            assert (await reports.next()).models is None
    assert engine.asked.count("/v1/models") == 1


async def test_a_metrics_page_that_is_not_there_is_not_asked_for_again() -> None:
    options = ProbeOptions(interval_s=0.02, metrics_interval_s=0.001, models_interval_s=0.001, gap_s=0.005)
    async with serving(healthy("m")) as engine, probing(options) as (prober, reports):
        prober.watch(A, engine.url)
        for _ in range(4):
            await reports.next()
    assert engine.asked.count("/metrics") == 1
    assert engine.asked.count("/v1/models") >= 4


@pytest.mark.parametrize("status", [404, 405])
async def test_an_engine_without_a_health_page_is_judged_by_its_model_list(status: int) -> None:
    engine = FakeEngine({"/health": page(status), "/v1/models": models("m")})
    async with serving(engine), probing(FAST) as (prober, reports):
        prober.watch(A, engine.url)
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
    async with serving(engine), probing(RARE) as (prober, reports):
        prober.watch(A, engine.url)
        result = await reports.next()
    assert (result.ok, result.status, result.refused) == (ok, status, False)
    if not ok:
        assert engine.asked == ["/health"]  # a redirect is not followed


async def test_a_refused_connection_is_told_from_other_failures() -> None:
    async with serving(healthy("m")) as engine:
        pass
    async with probing(RARE) as (prober, reports):
        prober.watch(A, engine.url)
        result = await reports.next()
    assert (result.ok, result.refused, result.status) == (False, True, 0)


@pytest.mark.parametrize("answer", [b"", b"what?\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"])
async def test_an_engine_that_hangs_up_or_talks_nonsense_has_failed_but_was_not_refused(answer: bytes) -> None:
    engine = FakeEngine({"/health": answer})
    options = ProbeOptions(interval_s=1000, timeout_s=0.05)
    async with serving(engine), probing(options) as (prober, reports):
        prober.watch(A, engine.url)
        result = await reports.next()
    assert (result.ok, result.refused) == (False, False)
    assert result.detail


async def test_an_engine_that_says_nothing_is_given_up_at_the_deadline() -> None:
    engine = FakeEngine({"/health": None})
    async with serving(engine), probing(ProbeOptions(timeout_s=0.05)) as (prober, reports):
        prober.watch(A, engine.url)
        assert (await reports.next()).detail == "no answer within 0.05 s"


async def test_a_model_list_or_metrics_page_that_hangs_does_not_make_the_engine_ill() -> None:
    engine = FakeEngine({"/health": page(200), "/v1/models": None, "/metrics": b""})
    async with serving(engine), probing(ProbeOptions(timeout_s=0.05)) as (prober, reports):
        prober.watch(A, engine.url)
        result = await reports.next()
    assert (result.ok, result.models, result.started_at) == (True, None, None)


async def test_an_endless_page_is_read_up_to_its_bound() -> None:
    engine = healthy("m")
    engine.pages["/v1/models"] = page(200, b" " * (4 * MODELS_BYTES_MAX))
    async with serving(engine), probing(RARE) as (prober, reports):
        prober.watch(A, engine.url)
        result = await reports.next()
    assert (result.ok, result.models) == (True, None)


async def test_after_a_failure_the_next_good_probe_asks_for_everything_again() -> None:
    """The engine may be another process with other models."""
    engine = healthy("old")
    async with probing(FAST) as (prober, reports):
        async with serving(engine):
            prober.watch(A, engine.url)
            assert (await reports.next()).models == ("old",)
        assert (await reports.until(ok=False)).refused
        engine.pages |= {"/v1/models": models("new"), "/metrics": page(200, b"process_start_time_seconds 5\n")}
        async with serving(engine):
            result = await reports.until(ok=True)
    assert (result.models, result.started_at) == (("new",), 5.0)


async def test_trouble_reported_from_a_request_is_looked_at_at_once() -> None:
    async with serving(healthy("m")) as engine, probing(RARE) as (prober, reports):
        prober.watch(A, engine.url)
        await reports.next()
        for _ in range(50):
            prober.probe_soon(A)
        await reports.next()
        prober.probe_soon(BackendId(99))
    assert engine.asked.count("/health") == 2


async def test_failures_are_followed_up_at_the_short_interval_until_it_is_settled(autojump_clock: object) -> None:
    """Nobody listens on a closed port of loopback, so the virtual clock can run: no answer is ever under way."""
    async with serving(FakeEngine()) as engine:
        pass
    times: list[float] = []
    prober = Prober(lambda *_: times.append(trio.current_time()), ProbeOptions(jitter=0.0), Random(1))
    async with trio.open_nursery() as nursery:
        await nursery.start(prober.run)
        prober.watch(A, engine.url)
        await trio.sleep(40)
        nursery.cancel_scope.cancel()
    gaps = [round(later - earlier) for earlier, later in pairwise(times)]
    assert gaps[:4] == [1, 1, 1, 10]


def test_many_healthy_backends_are_asked_less_often_each() -> None:
    reports = Reports()
    prober = Prober(reports, ProbeOptions(), Random(1))
    loop_ids = [BackendId(number) for number in range(200)]
    for id_ in loop_ids:
        prober.watch(id_, "http://127.0.0.1:1")
    assert prober.settled_s == 40
    for id_ in loop_ids[20:]:
        prober.forget(id_)
    assert prober.settled_s == 10


async def test_a_forgotten_backend_is_not_heard_of_again() -> None:
    engine = healthy("m")
    async with serving(engine), probing(FAST) as (prober, reports):
        prober.watch(A, engine.url)
        prober.watch(B, engine.url)
        await reports.next()
        prober.forget(A)
        prober.forget(A)
        while reports.receive.statistics().current_buffer_used:
            reports.receive.receive_nowait()
        for _ in range(10):
            with trio.fail_after(10):
                assert (await reports.receive.receive())[0] == B


async def test_forgetting_a_backend_ends_its_probe_even_while_it_waits_for_an_answer() -> None:
    engine = FakeEngine({"/health": None})
    async with serving(engine), probing(RARE) as (prober, reports):
        prober.watch(A, engine.url)
        with trio.fail_after(10):
            while not engine.asked:
                await trio.lowlevel.checkpoint()
            prober.forget(A)
            await trio.testing.wait_all_tasks_blocked()
        assert not prober.loops
        assert reports.receive.statistics().current_buffer_used == 0


async def test_the_key_of_a_backend_goes_to_that_backend_alone_and_no_other_header_tells_of_us() -> None:
    guarded, open_ = healthy("m"), healthy("m")
    async with serving(guarded), serving(open_), probing(RARE) as (prober, reports):
        prober.watch(A, guarded.url, api_key="word")
        prober.watch(B, open_.url)
        await reports.next()
        await reports.next()
    assert all(b"authorization: Bearer word" in head for head in guarded.heads)
    assert not any(b"authorization" in head.lower() for head in open_.heads)


async def test_an_https_engine_is_probed_over_tls_and_its_certificate_is_checked() -> None:
    authority = trustme.CA()
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)
    engine, reports = healthy("m"), Reports()
    trusting, doubting = (Prober(reports, RARE, Random(1), context) for context in (ours, None))
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_ssl_over_tcp_listeners(0, theirs, host="127.0.0.1", https_compatible=True)
        port = listeners[0].transport_listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, engine.serve_or_hang_up, listeners)
        for prober, ok in [(trusting, True), (doubting, False)]:
            await nursery.start(prober.run)
            prober.watch(A, f"https://127.0.0.1:{port}")
            result = await reports.next()
            assert (result.ok, result.refused) == (ok, False), result
        nursery.cancel_scope.cancel()


async def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setitem(os.environ, name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with serving(healthy("m")) as engine, probing(RARE) as (prober, reports):
        prober.watch(A, engine.url)
        assert (await reports.next()).ok


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b'{"data": [{"id": "a"}, {"id": "b", "parent": "a"}]}', ("a", "b")),
        (b'{"data": [{"id": "a"}, {"id": 3}, {}, null, "x"]}', ("a",)),
        (b'{"data": []}', None),
        (b'{"data": {"id": "a"}}', None),
        (b'[{"id": "a"}]', None),
        (b"not json", None),
        (b"\xff\xfe", None),
        (b"[" * 100_000, None),
    ],
)
def test_odd_model_lists_are_read_as_far_as_they_make_sense(body: bytes, names: tuple[str, ...] | None) -> None:
    assert read_models(Page(200, body, cut=False))[0] == names
    assert read_models(Page(500, body, cut=False)) == read_models(Page(200, body, cut=True)) == (None, ())


def test_a_model_list_is_bounded() -> None:
    body = json.dumps({"data": [{"id": str(number)} for number in range(MODELS_MAX + 5)]}).encode()
    names, cards = read_models(Page(200, body, cut=False))
    assert names is not None
    assert len(names) == len(cards) == MODELS_MAX


@pytest.mark.parametrize(
    ("metrics", "value"),
    [
        (b"process_start_time_seconds 12.5\n", 12.5),
        (b"a 1\nprocess_start_time_seconds 1.7e9\nb 2\n", 1.7e9),
        (b'a 1\nprocess_start_time_seconds{pid="4"} 7 1700000000000\n', 7.0),
        (b"# HELP process_start_time_seconds Start time\nprocess_start_time_seconds 3\n", 3.0),
        (b"# HELP process_start_time_seconds Start time\n", None),
        (b"process_start_time_seconds 12", None),  # cut in the middle of the line
        (b"process_start_time_seconds NaN\n", None),
        (b"process_start_time_seconds many\n", None),
        (b"process_start_time_seconds\n", None),
        (b"", None),
    ],
)
def test_the_start_time_is_read_from_a_metrics_page(metrics: bytes, value: float | None) -> None:
    assert read_start_time(metrics) == value


def test_probe_options_that_make_no_sense_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        ProbeOptions(interval_s=0, jitter=1, concurrent_max=0)
    assert len(caught.value.problems) == 3
