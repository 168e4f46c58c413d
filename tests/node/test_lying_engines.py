"""Engines whose events lie: what that costs a node, and what it says of it."""

from __future__ import annotations

import logging
import time
from random import Random

import msgpack
import pytest

from ranvier_py.core.answers.usage_injection import UsageAsker
from ranvier_py.core.engine_cache.gap_values import AskReplay, Level
from ranvier_py.core.engine_cache.sources.publishers import Endpoint
from ranvier_py.core.ids import BackendId
from ranvier_py.node.engine_cache.calibration_parts import CalibrationParts
from ranvier_py.node.engine_cache.engine_event_parts import EngineEvents
from ranvier_py.node.engine_cache.engine_event_views import EngineEventViews
from ranvier_py.node.engine_cache.event_reader import LEVELS_LOGGED_MAX, RESTARTS_MAX
from tests.core.routing.test_router import make_router
from tests.node.test_engine_names import ENGINE, publishers, read, reader, serves


def lie(made: EngineEvents, times: int, now: float) -> None:
    """So many messages at once, each of which can only be another process's first."""
    stream = made.streams[ENGINE][0].stream
    for number in range(times):
        for effect in stream.live(0, bytes(msgpack.packb([float(number), [], 0])), now):
            made._carry(stream, effect)


async def test_events_that_report_of_restarts_without_end_cost_few_epochs_and_few_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Peers count epochs, and each forgives an engine its failures."""
    caplog.set_level(logging.INFO)
    async with reader(monkeypatch) as made:
        serves(made, {"id": "a", "root": "/a"})
        made.found(ENGINE, publishers(""))
        assert read(made) == {0: ("a",)}
        before = made._registry[ENGINE].generation
        lie(made, 2_000, time.monotonic())
        assert EngineEventViews(made).view()["engines"][0]["restarts"] == 1_999
        assert 0 < made._registry[ENGINE].generation - before <= RESTARTS_MAX + 2
        assert made.restarts_unbelieved >= 1_999 - RESTARTS_MAX - 2
        assert (
            sum(record.message.startswith("cache_level.changed") for record in caplog.records) <= LEVELS_LOGGED_MAX + 2
        )
        samples = {each.name: each.value for each in EngineEventViews(made).metrics()}
        assert samples["engine_events_restarts_unbelieved"] == made.restarts_unbelieved


async def test_an_engine_that_really_was_restarted_begins_an_epoch_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reader(monkeypatch) as made:
        now = 100.0
        serves(made, {"id": "a", "root": "/a"})
        made.found(ENGINE, publishers(""))
        read(made)
        lie(made, 1, now)
        for _ in range(3 * RESTARTS_MAX):
            now += 10.0
            generation = made._registry[ENGINE].generation
            stream = made.streams[ENGINE][0].stream
            stream.live(0, bytes(msgpack.packb([now, [], 0])), now)
            assert made._registry[ENGINE].generation == generation + 1
        assert made.restarts_unbelieved == 0


async def test_an_engine_whose_answers_contradict_is_asked_whether_it_is_still_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have been restarted while it said nothing: then nothing in its events shows it."""
    async with reader(monkeypatch) as made:
        carried: list[object] = []
        serves(made, {"id": "a", "root": "/a"})
        made.found(ENGINE, (publishers("")[0]._replace(replay=Endpoint("h", 5558)),))
        read(made)
        reading = made.streams[ENGINE][0]
        monkeypatch.setattr(reading.subscriber, "carry", carried.extend)
        (ask,) = [each for each in reading.stream.connected(1.0) if isinstance(each, AskReplay)]
        reading.stream.replayed(ask.ask, 0, bytes(msgpack.packb([1.0, [], 0])), 1.0)
        reading.stream.replay_ended(ask.ask, 1.0)
        assert reading.stream.level is Level.EXACT
        made.contradicted(ENGINE)
        asked = [each for each in carried if isinstance(each, AskReplay)]
        assert [each.first for each in asked] == [0], "from the last message on that it must know, too"
        before = made._registry[ENGINE].generation
        reading.stream.replayed(asked[0].ask, 0, bytes(msgpack.packb([2.0, [], 0])), 2.0)
        assert made._registry[ENGINE].generation == before + 1


def test_calibration_reports_contradictions_to_the_streams() -> None:
    """What answers and events know of each other, in a node as it is put together."""
    router = make_router(2)
    engine_events = EngineEvents(router, Random(1))
    asked: list[BackendId] = []
    engine_events.contradicted = asked.append  # type: ignore[method-assign]
    made = CalibrationParts(router, UsageAsker(), engine_events, metrics_interval_s=5.0)
    made.calibration._contradicted(ENGINE)
    assert asked == [ENGINE]
    assert made.calibration._estimated(ENGINE), "nothing was heard of it"
    engine_events.level = lambda _: Level.EXACT  # type: ignore[method-assign, assignment]
    assert not made.calibration._estimated(ENGINE)
