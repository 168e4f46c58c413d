"""One suite for all sources: what engines a node has when they give some, break, give none, and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from cluster.dns.dns_server import DnsFault, DnsFaultKind, ServiceRecord
from tests.node.discovery.source_labs import SOURCES, SourceLab, quick, zone_lab
from tests.node.node_lab import BETWEEN_LOOKS_S, Lab, Node, opened
from tests.node.test_reload import ReloadLab

pytestmark = pytest.mark.usefixtures("quick")

DEADLINE_S = 30
MakeLab = Callable[[Path], AbstractAsyncContextManager[SourceLab]]


async def until_serving(node: Node, source: SourceLab, engines: Sequence[str]) -> None:
    """Until these and no others get requests."""
    urls = sorted(map(source.url_of, engines))

    def holds(answer: dict[str, Any]) -> bool:
        return sorted(each["url"] for each in answer["backends"] if not each["draining"]) == urls

    await node.until("/admin/backends", holds)


async def until_state(node: Node, source: SourceLab, state: str) -> dict[str, Any]:
    def holds(answer: dict[str, Any]) -> bool:
        return bool(answer["sources"].get(source.name, {}).get("state") == state)

    return dict((await node.until("/admin/sources", holds))["sources"][source.name])


async def until_finding(node: Node, kind: str, about: str) -> None:
    def holds(answer: dict[str, Any]) -> bool:
        return any((each["kind"], each["about"]) == (kind, about) for each in answer["findings"])

    await node.until("/admin/status", holds)


@pytest.fixture(params=SOURCES.values(), ids=SOURCES)
def make(request: pytest.FixtureRequest) -> MakeLab:
    return request.param  # type: ignore[no-any-return]


async def test_engines_come_and_go_as_their_source_names_them(make: MakeLab, tmp_path: Path) -> None:
    async with opened(Lab, 3, DEADLINE_S) as place, make(tmp_path) as source:
        await source.give(place.engines[:2])
        node = await place.start(backend=[], **source.settings)
        await until_serving(node, source, place.engines[:2])
        assert (await node.chat()).status_code == 200
        assert {tuple(each["wanted_by"]) for each in await node.backends()} == {(source.name.partition(" ")[0],)}
        await source.give(place.engines[1:])
        await until_serving(node, source, place.engines[1:])
        await source.give([])
        await until_serving(node, source, [])


async def test_a_source_that_fails_keeps_its_engines_and_names_why(make: MakeLab, tmp_path: Path) -> None:
    async with opened(Lab, 3, DEADLINE_S) as place, make(tmp_path) as source:
        await source.give(place.engines[:2])
        node = await place.start(backend=[], **source.settings)
        await until_serving(node, source, place.engines[:2])
        await source.fail()
        assert (await until_state(node, source, "failing"))["why"]
        assert len(await node.backends()) == 2
        assert (await node.chat()).status_code == 200
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert f'ranvier_backend_source_failing{{source="{source.name}"}} 1.0' in page
        await until_finding(node, "source_failing", source.name)
        await source.give(place.engines[2:])
        await until_serving(node, source, place.engines[2:])
        assert (await until_state(node, source, "good"))["why"] == ""
        assert await node.faults() == {}


async def test_an_empty_set_after_a_failure_is_not_obeyed(make: MakeLab, tmp_path: Path) -> None:
    async with opened(Lab, 2, DEADLINE_S) as place, make(tmp_path) as source:
        await source.give(place.engines)
        node = await place.start(backend=[], **source.settings)
        await until_serving(node, source, place.engines)
        await source.fail()
        await until_state(node, source, "failing")
        await source.give([])

        def ignored(answer: dict[str, Any]) -> bool:
            return "not obeyed" in answer["sources"][source.name]["why"]

        await node.until("/admin/sources", ignored)
        await until_serving(node, source, place.engines)


async def test_a_node_whose_source_fails_from_the_start_serves_what_it_is_configured_with(
    make: MakeLab, tmp_path: Path
) -> None:
    async with opened(Lab, 2, DEADLINE_S) as place, make(tmp_path) as source:
        await source.give(place.engines[:1])
        await source.fail()
        first = source.url_of(place.engines[0])
        node = await place.start(backend=[first], **source.settings)
        await until_state(node, source, "failing")
        assert (await node.chat()).status_code == 200
        await source.give(place.engines)
        await until_serving(node, source, place.engines)
        wanted_by = {each["url"]: each["wanted_by"] for each in await node.backends()}
        kind = source.name.partition(" ")[0]
        assert wanted_by == {first: ["static", kind], source.url_of(place.engines[1]): [kind]}


async def test_a_node_waits_for_the_first_answer_of_its_sources_before_it_is_ready(tmp_path: Path) -> None:
    async with opened(Lab, 1, DEADLINE_S) as place, zone_lab() as (zone, server, _):
        name = "_http._tcp.engines.lab"
        zone.set("engine.lab", ["127.0.0.1"])
        zone.serve(name, [ServiceRecord("engine.lab", int(place.engines[0].rpartition(":")[2]))])
        zone.fault(name, DnsFault(DnsFaultKind.SLOW, delay_s=0.5))
        node = await place.start(backend=[], backend_dns=[name], backend_dns_server="{}:{}".format(*server))
        answer = await node.http.get(f"{node.control}/readyz")
        assert (answer.status_code, f"dns {name}" in answer.text) == (503, True)
        while (await node.http.get(f"{node.control}/readyz")).status_code != 200:  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)
        assert (await node.chat()).status_code == 200


async def test_a_reload_follows_new_sources_and_forgets_those_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANVIER_CONFIG", raising=False)
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    async with opened(partial(ReloadLab, folder=tmp_path), 2, DEADLINE_S) as place:
        for path, engine in ((first, place.engines[0]), (second, place.engines[1])):
            path.write_text(f'[[backend]]\nurl = "{engine}"\n')
        place.write(backend=[], backends_file=str(first))
        node = await place.start()
        for settings, wanted in (
            ({"backends_file": str(second)}, place.engines[1:]),
            ({"backends_file": str(first)}, place.engines[:1]),
            ({}, []),
        ):
            place.write(backend=[], reload_allow_empty=True, **settings)
            answer = await node.http.post(f"{node.control}/admin/reload")
            assert answer.status_code == 200, answer.text
            await node.until(
                "/admin/backends",
                lambda view, urls=wanted: [each["url"] for each in view["backends"] if not each["draining"]] == urls,
            )
        assert "file" not in (await node.ask("/admin/sources"))["sources"]


__all__ = ["quick"]
