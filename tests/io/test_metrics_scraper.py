"""Looks at engines' metrics: seldom, bounded, in time, and only at one's own."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import trio

from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics
from ranvier_py.core.engine_cache.sources.event_values import EngineLoad
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import BackendId
from ranvier_py.io.metrics_scraper import PAGE_BYTES_MAX, Loop, ScrapeOptions, Scraper
from tests.core.engine_cache.test_engine_metrics import TRTLLM, VLLM
from tests.proxy.wire import Asked

DEADLINE_S = 10
FAST = ScrapeOptions(interval_s=0.02, interval_max_s=0.2, interval_unknown_s=0.3, share_max=1.0, timeout_s=0.5)
ID = BackendId(3)


def page(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


class Pages:
    """An engine that answers each path with some bytes, and notes what it was asked."""

    def __init__(self, pages: dict[str, bytes], hang: bool = False) -> None:
        self.pages = pages
        self.hang = hang
        self.asked: list[tuple[float, str]] = []
        self.heads: list[bytes] = []

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            with suppress(trio.BrokenResourceError):
                await self.answer(stream)

    async def answer(self, stream: trio.SocketStream) -> None:
        asked = Asked(stream)
        while (request := await asked.next()) is not None:
            head, _ = request
            self.heads.append(head)
            self.asked.append((trio.current_time(), head.split(b" ")[1].decode()))
            if self.hang:
                await trio.sleep_forever()
            path = self.asked[-1][1]
            await stream.send_all(self.pages.get(path, page(b"", b"404 Not Found")))


@asynccontextmanager
async def scraping(
    engine: Pages, options: ScrapeOptions = FAST, owns: Callable[[BackendId], bool] = lambda _: True, key: str = ""
) -> AsyncIterator[tuple[Scraper, list[EngineMetrics]]]:
    found: list[EngineMetrics] = []
    scraper = Scraper(lambda _, metrics: found.append(metrics), options, Random(1), owns=owns)
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(partial(trio.serve_tcp, engine.serve, 0, host="127.0.0.1"))
            await nursery.start(scraper.run)
            scraper.watch(ID, f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", key)
            yield scraper, found
            nursery.cancel_scope.cancel()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  # what is waited for sets no event
        await trio.sleep(0.005)


async def test_an_engine_is_looked_at_again_and_again_with_its_key() -> None:
    engine = Pages({"/metrics": page(VLLM)})
    async with scraping(engine, key="secret") as (scraper, found):
        await until(lambda: len(found) >= 3)
        assert {each.running for each in found} == {2}
        assert b"authorization: bearer secret" in engine.heads[0].lower()
        assert scraper.statistics().failed == 0


async def test_tensorrt_llm_has_its_page_elsewhere_and_is_not_asked_in_vain_again() -> None:
    engine = Pages({"/metrics": page(b'[{"numActiveRequests":1}]'), "/prometheus/metrics": page(TRTLLM)})
    async with scraping(engine) as (_, found):
        await until(lambda: len(found) >= 3)
        assert [path for _, path in engine.asked[:4]] == ["/metrics", *["/prometheus/metrics"] * 3]


@pytest.mark.parametrize(
    "body", [page(b"", b"404 Not Found"), page(b"\0\xff" * 1000), page(b"{}", b"302 Found"), page(b"hello 1\n")]
)
async def test_an_engine_without_a_page_that_we_know_is_left_alone_for_long(body: bytes) -> None:
    engine = Pages({"/metrics": body})
    async with scraping(engine) as (scraper, found):
        await until(lambda: scraper.statistics().looks >= 2)
        assert engine.asked[2][0] - engine.asked[0][0] > 0.8 * FAST.interval_unknown_s * 0.9
        assert not found


async def test_an_engine_that_does_not_answer_in_time_is_asked_less_and_less() -> None:
    engine = Pages({}, hang=True)
    options = ScrapeOptions(interval_s=0.05, interval_max_s=60.0, timeout_s=0.02, share_max=1.0, jitter=0.0)
    async with scraping(engine, options) as (scraper, found):
        await until(lambda: scraper.statistics().failed >= 3)
        times = [at for at, _ in engine.asked]
        assert times[2] - times[1] > 1.5 * (times[1] - times[0] - 0.02)
        assert not found


@pytest.mark.parametrize(
    "wire",
    [
        page(b"busy", b"503 Service Unavailable"),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nvllm:num_requests_running 1\n",
    ],
)
async def test_what_is_no_answer_counts_as_failed_and_harms_nothing(wire: bytes) -> None:
    engine = Pages({"/metrics": wire})
    async with scraping(engine, replace(FAST, interval_max_s=0.05, timeout_s=0.1)) as (scraper, found):
        await until(lambda: scraper.statistics().failed >= 2)
        engine.pages["/metrics"] = page(VLLM)
        await until(lambda: len(found) > 0)


async def test_a_page_without_end_is_cut_off() -> None:
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + VLLM + b"# more\n" * (PAGE_BYTES_MAX // 6)
    engine = Pages({"/metrics": endless})
    async with scraping(engine, ScrapeOptions(interval_s=0.05, timeout_s=2.0)) as (scraper, found):
        await until(lambda: scraper.statistics().looks >= 1)
        assert not found


async def test_what_belongs_to_a_peer_is_not_looked_at_until_it_is_ours() -> None:
    engine = Pages({"/metrics": page(VLLM)})
    ours: list[bool] = []
    async with scraping(engine, owns=lambda _: bool(ours)) as (_, found):
        await trio.sleep(0.1)
        assert not engine.asked
        ours.append(True)
        await until(lambda: len(found) > 0)


async def test_a_forgotten_backend_is_not_reported() -> None:
    engine = Pages({"/metrics": page(VLLM)})
    async with scraping(engine) as (scraper, found):
        await until(lambda: len(found) > 0)
        scraper.forget(ID)
        await trio.testing.wait_all_tasks_blocked(0.02)
        count = len(found)
        await trio.sleep(0.1)
        assert len(found) == count


def test_a_slow_page_is_asked_for_less_often_than_it_costs() -> None:
    options = ScrapeOptions()
    loop = Loop(ID, "http://127.0.0.1:1", "", Scraper(lambda *_: None, options, Random(1))._plain)
    loop.took_s = 0.5
    assert loop.wait_s(options) == 25.0
    loop.took_s = 0.001
    assert loop.wait_s(options) == 5.0
    loop.failures = 9
    assert loop.wait_s(options) == 60.0


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="interval_s"):
        ScrapeOptions(interval_s=0)


async def test_an_engine_that_tells_its_queue_in_its_events_needs_no_page() -> None:
    """SGLang has a page only if it is told to; its LoadStat comes many times a second, and counts like a look."""
    async with scraping(Pages({}), replace(FAST, interval_s=1.0)) as (scraper, found):
        await until(lambda: scraper.statistics().looks >= 1)
        for _ in range(50):
            scraper.heard(ID, EngineLoad(3, 2, 100, 4096, 0, 0))
        assert found == [EngineMetrics(running=3, waiting=2, capacity_tokens=4096)]
        scraper.heard(BackendId(9), EngineLoad(3, 2, 100, 4096, 0, 0))
        scraper.heard(ID, EngineLoad(None, 2, 100, 4096, 0, 0))
        assert scraper.statistics().heard == 1


async def test_the_ranks_of_an_engine_add_up_and_its_page_tells_the_rest() -> None:
    async with scraping(Pages({"/metrics": page(VLLM)}), replace(FAST, interval_s=0.05)) as (scraper, found):
        await until(lambda: bool(found))
        told = found[-1]
        scraper.heard(ID, EngineLoad(3, 2, 100, 4096, 0, 0))
        while scraper.statistics().heard == 0:
            await trio.sleep(0.01)
            scraper.heard(ID, EngineLoad(1, None, 100, 4096, 1, 0))
        assert replace(told, running=4, waiting=2) in found
