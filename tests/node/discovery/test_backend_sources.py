"""Backends come and go with their sources alone, on a real node."""

from __future__ import annotations

import pytest
import trio

from ranvier_py.config.config_loader import read_backend
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.errors import BadRequest
from ranvier_py.core.routing.backends import Backend, BackendLimits, Registry
from ranvier_py.core.routing.wanted.found_backend import STATIC, EngineKey, FoundBackend, SourceName
from ranvier_py.node.discovery.backend_sources import BETWEEN_PORTIONS_S, PORTION, BackendSources
from tests.node.node_lab import lab

FILE, DNS = SourceName("file"), SourceName("dns", "engines:8000")


class Place:
    """Sources with a registry, and no parts around it."""

    def __init__(self, **limits: int) -> None:
        self.registry = Registry(BackendLimits(**limits), restarted=self.restarted)
        self.sources = BackendSources(self.registry, self.add, lambda url, **_: self.registry.remove(url))

    def restarted(self, backend: Backend) -> None:
        self.sources.restarted(backend)

    def add(self, url: str, weight: float, name: str, _: object, *, by: str) -> int:
        return self.registry.add(url, weight=weight, name=name).id

    def take(self, source: SourceName, *backends: dict[str, object]) -> None:
        self.sources.take(source, [FoundBackend(read_backend(fields)) for fields in backends])

    @property
    def pool(self) -> list[str]:
        return [backend.name for backend in self.registry.pools.pool("", 0.0).backends]

    @property
    def names(self) -> list[str]:
        return [backend.name for backend in self.registry]


def test_a_found_backend_whose_name_is_taken_has_that_of_its_address() -> None:
    place = Place()
    place.take(FILE, {"url": "http://a:1", "name": "one"})
    place.take(DNS, {"url": "http://b:1", "name": "one"})
    assert place.names == ["one", "b:1"]
    with pytest.raises(BadRequest, match="there already"):
        place.sources.add(read_backend({"url": "http://c:1", "name": "one"}))
    assert place.names == ["one", "b:1"]
    assert place.sources.reconciler.is_settled


def test_an_engine_that_is_gone_keeps_its_key_until_it_is_added_without_one_or_others_need_the_room() -> None:
    place, keys = Place(backends_max=2), [EngineKey(f"file-{number}", "secret") for number in range(3)]

    def configured(*numbers: int) -> list[EngineKey | None]:
        place.sources.take(
            STATIC, [FoundBackend(BackendSpec(url=f"http://e:{number + 1}"), key=keys[number]) for number in numbers]
        )
        return [place.sources.key_of(f"http://e:{number + 1}") for number in range(3)]

    assert configured(0) == [keys[0], None, None]
    assert configured(1) == [keys[0], keys[1], None]
    assert configured(1, 2) == [None, keys[1], keys[2]]
    assert configured(2) == [None, keys[1], keys[2]]
    place.sources.add(read_backend({"url": "http://e:2"}))
    assert place.sources.key_of("http://e:2") is None


def test_where_there_is_no_room_the_rest_waits_and_is_named() -> None:
    place = Place(backends_max=1)
    place.take(FILE, {"url": "http://a:1"})
    place.take(DNS, {"url": "http://b:1"})
    assert place.names == ["a:1"]
    assert "at most 1" in place.sources.reconciler.failed["http://b:1"]
    place.sources.remove("a:1")
    place.sources.settle()
    assert place.names == ["b:1"]


def test_while_its_source_fails_a_new_process_gets_no_requests_until_the_source_or_an_operator_confirms_it() -> None:
    for confirm in ("source", "operator"):
        place = Place()
        place.take(DNS, {"url": "http://a:1"})
        (backend,) = place.registry
        place.registry.changes.restart(backend, "start time changed", 1.0)
        assert place.pool == ["a:1"]
        place.sources.fail(DNS, "SERVFAIL")
        place.registry.changes.restart(backend, "start time changed", 2.0)
        assert place.pool == []
        assert "another process" in backend.origin.leaving
        if confirm == "source":
            place.take(DNS, {"url": "http://a:1"})
        else:
            place.sources.add(read_backend({"url": "http://a:1"}))
        assert place.pool == ["a:1"]
        with pytest.raises(BadRequest, match="there already"):
            place.sources.add(read_backend({"url": "http://a:1"}))


async def test_many_backends_come_and_go_in_portions_and_those_of_an_operator_at_once() -> None:
    place, many = Place(), 3 * PORTION + 5
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(place.sources.settle_rest)
            place.take(DNS, *({"url": f"http://a:{number}"} for number in range(1, many + 1)))
            assert len(place.names) == PORTION
            place.sources.add(read_backend({"url": "http://b:1"}))
            assert "b:1" in place.names
            for wanted in (many + 1, 1):
                while len(place.names) != wanted:  # noqa: ASYNC110
                    await trio.sleep(BETWEEN_PORTIONS_S)
                place.take(DNS)
                place.sources.reconciler.drain_s = 0.0
                place.sources.settle()
                assert len(place.names) >= wanted - PORTION
            nursery.cancel_scope.cancel()


async def test_an_operator_removes_what_the_configuration_names_and_adds_it_again() -> None:
    async with lab(engines=2) as node:
        first = node.engines[0]
        assert [each["wanted_by"] for each in await node.backends()] == [["static"], ["static"]]
        await node.http.delete(f"{node.control}/admin/backends", params={"url": first})
        assert len(await node.backends()) == 1
        assert (await node.ask("/admin/sources"))["removed_by_operators"] == [first]
        answer = await node.http.post(f"{node.control}/admin/backends", json={"url": first})
        assert answer.status_code == 200
        assert [each["wanted_by"] for each in await node.backends() if each["url"] == first] == [["api", "static"]]
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert 'ranvier_backend_source_backends{source="static"} 2.0' in page
