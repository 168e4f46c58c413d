"""A node that measures itself: real sockets, engines of the lab, what is seen of it on the control port."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import trio

from cluster.engine.engine_process import DEFAULT_TOKENIZER
from ranvier_py.core.answers.usage_injection import UsageAsker
from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.checkpoints.cache_profile import ATTENTION, STEPS_SEEN
from ranvier_py.core.splitmix import mix
from ranvier_py.node.engine_cache.calibration_parts import STALE_INTERVALS, CalibrationParts, looked_at_by
from tests.core.engine_cache.test_prediction import URL, A, World
from tests.node.node_lab import BETWEEN_LOOKS_S, Lab, Node, chat, cluster_lab, opened, start_engine, turn

DEADLINE_S = 30


@asynccontextmanager
async def lab(
    cache_tokens: int = 200_000, decode_s: float = 0.0, cache: Mapping[str, Any] = MappingProxyType({}), **settings: Any
) -> AsyncIterator[Node]:
    """One engine of that size behind one node, with the node's own tokenizer: counts are to agree."""
    async with opened(Lab, 0, DEADLINE_S) as place:
        limits = {"cache_tokens": cache_tokens, "decode_s": decode_s, **cache}
        place.engines += [(await start_engine(place.nursery, tokenizer=str(DEFAULT_TOKENIZER), **limits))[0]]
        yield await place.start(**settings)


async def until(node: Node, what: str, wanted: Any) -> dict[str, Any]:
    """The first backend's calibration, once this is as wanted."""
    return dict(
        await node.until("/admin/calibration", lambda view: view["backends"] and view["backends"][0][what] == wanted)
    )


async def test_streams_report_how_good_predictions_are_and_the_engine_how_large_it_is() -> None:
    async with lab(engine_metrics_interval_s=0.1) as node:
        for number in range(4):
            messages = turn("Where are the maps? " * 20, "There.", f"And number {number}?")
            answer = await node.chat(messages, max_tokens=4, stream=True)
            assert b"prompt_tokens" not in answer.content
        view = await until(node, "answers", 4)
        view = await until(node, "capacity_tokens", 200_000)
        assert view["route_precision"] > 0.9
        assert view["backends"][0]["block_tokens"] == 16
        assert view["backends"][0]["biases"] == []
        assert view["asking"]["removed"] == 4
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert "ranvier_route_precision" in page
        assert 'ranvier_calibration_error_tokens_bucket{backend="' in page
        assert "ranvier_engine_capacity_tokens" in page
        assert 'bias="salt"' in page


async def test_a_hybrid_engine_is_recognised_and_predicted_by_its_checkpoints() -> None:
    """R1 to R5 on a node: three questions about one document, and what the node explains of the fourth."""
    hybrid = {"cache": "vllm_align", "block_size": 80}
    async with lab(cache=hybrid, engine_metrics_interval_s=0.1, probe_interval_s=0.5) as node:
        await until(node, "profile", "vllm-align:80")
        document = "Here is what the report of the year says of maps, and of who draws them. " * 40
        cached = []
        for number in range(3):
            answer = (await node.chat(turn(document, "I see.", f"Question {number}? " * 30), max_tokens=4)).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            await until(node, "answers", number + 1)
        assert cached[1] == 0 < cached[2], "from the third occurrence: nothing but the junction was to be kept"
        body = chat(turn(document, "I see.", "And the fourth? " * 30))
        (candidate,) = (await node.http.post(f"{node.control}/explain", content=body)).json()["candidates"]
        assert candidate["matched_tokens"] >= candidate["credit_tokens"] == cached[2]
        engine = (await node.ask("/admin/engine-cache"))["engines"][0]
        assert (engine["profile"], engine["level"]) == ("vllm-align:80", "estimated")
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert 'profile="vllm-align:80"} 1' in page
        assert "ranvier_cache_profile_confidence{" in page
        assert "ranvier_checkpoints_names{" in page


@pytest.mark.slow
async def test_a_small_cache_is_named_once_and_its_size_is_learned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine reports nothing of its size here: it is learned from cold answers alone."""
    with caplog.at_level(logging.WARNING, "ranvier_py.node.engine_cache.calibration_parts"):
        async with lab(cache_tokens=6000, engine_metrics_interval_s=0) as node:
            chats = [turn(f"{number} asks: where are the maps? " * 20) for number in range(40)]
            for chat in chats:
                await trio.sleep(0.06)  # evidence is kept by the second
                await node.chat(chat, max_tokens=4, stream=True)
            await trio.sleep(1.1)
            for chat in (chats[-1], *chats[:24]):  # a hit first: an engine that has none may not count
                await node.chat(chat, max_tokens=4, stream=True)
            view = await until(node, "biases", ["small_cache"])
            learned = view["backends"][0]["capacity_learned"]
            assert 1000 < learned < 20_000  # chats come faster than evidence is dated
            assert view["backends"][0]["refuted"] > 0
    assert sum("small_cache" in record.message for record in caplog.records) == 1


async def test_requests_that_came_past_all_nodes_are_load_and_go_again() -> None:
    async with lab(decode_s=0.02, engine_metrics_interval_s=0.1) as node:
        async with trio.open_nursery() as others:
            for number in range(3):
                body = chat(turn(f"{number}?"), max_tokens=100_000, ignore_eos=True, stream=True)
                others.start_soon(partial(node.http.post, f"{node.engines[0]}/v1/chat/completions", content=body))
            explain = partial(node.http.post, f"{node.control}/explain", content=chat(turn("?")))
            while (await explain()).json()["candidates"][0]["load"] != 3:  # noqa: ASYNC110  # a metric
                await trio.sleep(BETWEEN_LOOKS_S)
            others.cancel_scope.cancel()
        while (await explain()).json()["candidates"][0]["load"] != 0:  # noqa: ASYNC110  # a metric
            await trio.sleep(BETWEEN_LOOKS_S)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def calibration_parts(world: World, clock: Clock) -> CalibrationParts:
    return CalibrationParts(world.router, UsageAsker(), metrics_interval_s=5.0, clock=clock)


def test_a_load_of_others_is_the_lesser_of_two_looks_and_is_forgotten_in_time() -> None:
    """At any one look some of our own requests are on their way."""
    world, clock = World(), Clock()
    parts = calibration_parts(world, clock)
    backend = world.router.registry[A]
    parts.measured(A, EngineMetrics(running=9, waiting=1))
    assert backend.load == 0
    parts.measured(A, EngineMetrics(running=4))
    assert backend.load == 4
    attempt = world.start_attempt([1, 2], 100.0)
    assert backend.load == 5
    parts.measured(A, EngineMetrics(running=4, waiting=1))
    assert backend.load == 5
    clock.now += STALE_INTERVALS * 5.0 + 6.0
    parts.tick(clock.now)
    assert backend.load == 1
    world.answer(attempt, 0, 101.0)
    assert backend.load == 0


def test_a_look_at_a_backend_that_is_gone_changes_nothing() -> None:
    world, clock = World(), Clock()
    parts = calibration_parts(world, clock)
    world.router.registry.remove(URL)
    parts.measured(A, EngineMetrics(running=9))
    parts.tick(clock.now)
    assert parts.view()["backends"] == []


def test_the_last_answer_of_a_removed_backend_does_not_keep_it_among_the_measured() -> None:
    world, clock = World(), Clock()
    parts = calibration_parts(world, clock)
    attempt = world.start_attempt([1, 2], 100.0)
    world.router.registry.remove(attempt.target.url)
    parts.removed(attempt.target)
    world.answer(attempt, 0, 101.0)
    parts.tick(clock.now)
    assert parts.view()["backends"] == []


def test_each_engine_is_looked_at_by_one_of_the_live_members() -> None:
    """Scraping costs engines; and who dies leaves its engines to others."""
    keys = {BackendId(number): mix(number + 1) for number in range(30)}

    def owners(members: Sequence[int]) -> dict[BackendId, list[int]]:
        found: dict[BackendId, list[int]] = {backend: [] for backend in keys}
        for me in members:
            others = [member for member in members if member != me]
            peer = SimpleNamespace(
                features=SimpleNamespace(
                    backends=SimpleNamespace(key_of=keys.get), streams=SimpleNamespace(live=others)
                ),
                me=SimpleNamespace(session=me),
            )
            owns = looked_at_by(peer)  # type: ignore[arg-type]
            for backend in keys:
                found[backend] += [me] if owns(backend) else []
            assert owns(BackendId(99)), "peers don't know it"
        return found

    of_three = owners([11, 22, 33])
    assert all(len(those) == 1 for those in of_three.values())
    assert {those[0] for those in of_three.values()} == {11, 22, 33}
    of_two = owners([11, 33])
    assert all(len(those) == 1 for those in of_two.values())
    assert all(of_two[backend] == those for backend, those in of_three.items() if those != [22])


@pytest.mark.slow
async def test_nodes_of_a_cluster_leave_an_engine_to_one_of_them(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, engines=1, deadline_s=DEADLINE_S) as place:
        nodes = await place.cluster(2, engine_metrics_interval_s=0.1)

        async def looks() -> list[int]:
            return [(await node.ask("/admin/calibration"))["polls"]["metrics_pages"] for node in nodes]

        alone = 0  # seconds in a row in which only one of them looked; a node begins with none
        while alone < 3:
            before = await looks()
            await trio.sleep(1.0)
            after = await looks()
            alone = alone + 1 if sum(now > then for now, then in zip(after, before, strict=True)) == 1 else 0


def with_steps(step: int) -> tuple[Callable[[], object], Callable[[], Any], Any]:
    """A node's calibration of an engine whose hits end at these steps: a look, the profile then, and what it keeps."""
    world, clock = World(), Clock()
    parts = calibration_parts(world, clock)
    world.answer(world.start_attempt([1, 2], 100.0), 0, 100.0)
    evidence = parts.calibration.backends()[A].evidence
    for number in range(STEPS_SEEN):
        evidence.found(step * (1 + number % 5), step * (1 + number % 5) + 96)
    checkpoints = world.router.checkpoints
    return partial(parts.tick, clock.now), partial(checkpoints.profile, A), checkpoints.known


def test_an_engine_that_is_a_hybrid_by_its_counts_alone_stays_one_until_they_disprove_it() -> None:
    look, profile, known = with_steps(528)
    for _ in range(3):
        look()
        assert profile().label == "vllm-align:528"
    own = known[A]
    for number in range(STEPS_SEEN):
        own.counted(16 * (33 + number))
    for _ in range(3):
        look()
        assert profile() == ATTENTION


def test_the_step_that_a_hybrid_engine_shows_later_is_kept_though_another_was_believed_first() -> None:
    look, profile, known = with_steps(1024)
    look()
    for number in range(STEPS_SEEN):
        known[A].counted(512 * (1 + number % 7))
    for _ in range(3):
        look()
        assert profile().label == "vllm-align:512"
