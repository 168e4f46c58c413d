"""Engines that serve several base models: each stream is read under the names of its own, or none is."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import trio

from ranvier_py.core.engine_cache.sources.publishers import Endpoint, Publisher
from ranvier_py.core.ids import BackendId
from ranvier_py.io.engine_events import zmq_sockets
from ranvier_py.io.engine_events.zmq_source import SubscriberCounters, SubscriberState
from ranvier_py.node.engine_cache import event_reader
from ranvier_py.node.engine_cache.engine_event_parts import EngineEvents
from ranvier_py.node.engine_cache.engine_event_views import EngineEventViews
from tests.core.routing.test_router import make_router

ENGINE = BackendId(0)
TWO = ({"id": "a", "root": "/a"}, {"id": "b", "root": "/b"}, {"id": "also-b", "root": "/b"})


class Silent:
    """Sockets and subscriber of an engine that says nothing."""

    state = SubscriberState(is_connected=True)

    def __init__(self, *_: object, **__: object) -> None:
        self.counters = SubscriberCounters()

    async def run(self) -> None:
        await trio.sleep_forever()

    def carry(self, *_: object) -> None: ...

    def close(self) -> None: ...


@asynccontextmanager
async def reader(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineEvents]:
    monkeypatch.setattr(zmq_sockets, "KvSockets", Silent)
    monkeypatch.setattr(event_reader, "KvSubscriber", Silent)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            made = EngineEvents(make_router(2), Random(1))
            made.subscriptions.nursery = nursery
            yield made
            nursery.cancel_scope.cancel()


def serves(made: EngineEvents, *cards: dict[str, Any]) -> None:
    backend = made._registry[ENGINE]
    backend.catalog.models, backend.catalog.cards = tuple(card["id"] for card in cards), cards


def publishers(*topics: str) -> tuple[Publisher, ...]:
    return tuple(Publisher(rank, Endpoint("h", 5557 + rank), None, topic) for rank, topic in enumerate(topics))


def read(made: EngineEvents) -> dict[int, tuple[str, ...]]:
    """The names under which each stream is read, by rank."""
    made.look(1.0)
    return {rank: one.stream.names.base for rank, one in made.streams.get(ENGINE, {}).items()}


def unnamed(made: EngineEvents) -> float:
    return next(each.value for each in EngineEventViews(made).metrics() if each.name == "engine_events_ambiguous")


async def test_streams_that_name_their_model_are_read_under_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reader(monkeypatch) as made:
        serves(made, *TWO)
        made.found(ENGINE, publishers("kv@10.0.0.1:8000@also-b", "a"))
        assert read(made) == {0: ("b", "also-b"), 1: ("a",)}
        assert unnamed(made) == 0


@pytest.mark.parametrize(
    "topics", [("",), ("", ""), ("a", ""), ("a", "a"), ("kv@h@c", "a"), ("kv-events", "kv-events"), ("kv@a", "b")]
)
async def test_where_some_of_it_is_not_known_nothing_is_read_and_it_is_stated_once(
    topics: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What nobody tells of would be taken for not held."""
    caplog.set_level(logging.WARNING)
    async with reader(monkeypatch) as made:
        serves(made, *TWO)
        made.found(ENGINE, publishers(*topics))
        assert read(made) == read(made) == {}
        reported = [record for record in caplog.records if record.message.startswith("engine_events.ambiguous")]
        assert [record.getMessage().partition(" base models ")[2] for record in reported] == [
            "(a, b/also-b); its KV events do not say whose they are"
        ]
        assert unnamed(made) == 1
        assert EngineEventViews(made).view()["engines"][0]["why"].startswith("not one base model: a, b, also-b")
        serves(made, {"id": "a", "root": "/a"})
        assert set(read(made).values()) == {("a",)}
        assert unnamed(made) == 0


async def test_a_topic_is_no_matter_for_an_engine_with_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reader(monkeypatch) as made:
        serves(made, {"id": "a", "root": "/a"}, {"id": "x", "root": "/x", "parent": "a"})
        made.found(ENGINE, publishers("kv@h@somebody-else"))
        assert read(made) == {0: ("a",)}


async def test_an_engine_whose_models_change_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reader(monkeypatch) as made:
        serves(made, {"id": "a", "root": "/a"})
        made.found(ENGINE, publishers(""))
        assert read(made) == {0: ("a",)}
        serves(made, {"id": "a", "root": "/a"}, {"id": "a2", "root": "/a"})
        assert read(made) == {0: ("a", "a2")}
