"""What a node does with an API server: lists, watches, and all that goes wrong with these."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
import trustme

from cluster.kubernetes.api_server import ApiServer
from cluster.kubernetes.api_server import serve as serve_api
from ranvier_py.config.config_loader import config_of
from ranvier_py.config.source_targets import KubernetesTarget
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.routing.backends import BackendLimits, Registry
from ranvier_py.core.routing.wanted.source_set import SourceSet
from ranvier_py.io.sources import kubernetes_api
from ranvier_py.io.sources.kubernetes_api import KubernetesApi
from ranvier_py.node.discovery import kubernetes_watch
from ranvier_py.node.discovery.backend_sources import BackendSources
from ranvier_py.node.discovery.followers import Sink
from ranvier_py.node.discovery.kubernetes_source import KubernetesSource
from tests.node.discovery.source_labs import KUBERNETES, KubernetesLab, PodsLab, PoolLab, ServiceLab, quick

pytestmark = pytest.mark.usefixtures("quick")

DEADLINE_S = 20
LOOK_S = 0.01
ONE, TWO, THREE = (f"http://127.0.0.1:{port}" for port in (8001, 8002, 8003))


class Followed:
    """One source that follows an API server, without a node around it."""

    def __init__(self, lab: KubernetesLab, source: KubernetesSource) -> None:
        self.lab, self.api, self.registry = lab, lab.api, Registry(BackendLimits())
        registry = self.registry
        self.sources = BackendSources(
            registry,
            lambda url, weight, name, _, by: registry.add(url, weight=weight, name=name).id,
            lambda url, **_: registry.remove(url),
        )
        self.source = source

    async def run(self) -> None:
        await self.source.run(Sink(self.sources, self.source.name))

    @property
    def set(self) -> SourceSet[Any]:
        return self.sources.reconciler.source(self.source.name, 0.0)

    @property
    def serving(self) -> list[str]:
        return sorted(backend.url for backend in self.registry if not backend.draining)

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():  # noqa: ASYNC110  # what it waits for is at the end of a socket
            await trio.sleep(LOOK_S)

    async def until_serving(self, *engines: str) -> None:
        await self.until(lambda: self.serving == sorted(engines))

    async def until_watched(self, times: int = 1) -> None:
        """Until so many watches have been asked for."""
        await self.until(lambda: self.verbs.count("watch") >= times)

    @property
    def verbs(self) -> list[str]:
        return [verb for verb, _, _ in self.api.asked]


@asynccontextmanager
async def followed(
    kind: str, folder: Path, *engines: str, target: str = "", tls: trustme.CA | None = None
) -> AsyncIterator[Followed]:
    api, (lab_of, usual, name) = ApiServer(), KUBERNETES[kind]
    context = None
    if tls is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.issue_cert("127.0.0.1").configure_cert(context)
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            port = await nursery.start(serve_api, api, context)
            lab = lab_of(api, port, folder / "credentials", target or usual, name)
            await lab.give(engines)
            url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
            parsed = KubernetesTarget.parse(target or usual)
            source = KubernetesSource(parsed, KubernetesApi(url, folder / "credentials"), Random(0), None)
            place = Followed(lab, source)
            nursery.start_soon(place.run)
            yield place
            nursery.cancel_scope.cancel()


def pods_lab(place: Followed) -> PodsLab:
    assert isinstance(place.lab, PodsLab)
    return place.lab


def service_lab(place: Followed) -> ServiceLab:
    assert isinstance(place.lab, ServiceLab)
    return place.lab


@pytest.mark.parametrize("kind", KUBERNETES)
async def test_engines_come_by_the_list_and_then_by_events(kind: str, tmp_path: Path) -> None:
    async with followed(kind, tmp_path, ONE) as place:
        await place.until_serving(ONE)
        lists = place.verbs.count("list")
        await place.lab.give([ONE, TWO])
        await place.until_serving(ONE, TWO)
        await place.lab.give([TWO])
        await place.until_serving(TWO)
        assert place.verbs.count("list") == lists
        assert [backend.name for backend in place.registry if backend.url == TWO] == ["pod-8002"]


async def test_a_watch_that_ends_goes_on_from_the_last_bookmark_without_a_new_list(tmp_path: Path) -> None:
    async with followed("pods", tmp_path, ONE) as place:
        await place.until_watched()
        place.api.bookmark("pods")
        version = str(place.api.version)
        await place.lab.give([ONE, TWO])
        await place.until_serving(ONE, TWO)
        place.api.cut()
        await place.until_watched(2)
        assert place.verbs.count("list") == 1
        assert int(place.api.asked[-1][2]["resourceVersion"]) > int(version)
        assert place.api.asked[-1][2]["allowWatchBookmarks"] == "true"
        await place.lab.give([TWO])
        await place.until_serving(TWO)
        assert place.set.counters.failures == 0


@pytest.mark.parametrize("is_status", [True, False])
async def test_410_in_either_form_means_a_new_list_and_nothing_is_lost_meanwhile(
    tmp_path: Path, is_status: bool
) -> None:
    async with followed("pods", tmp_path, ONE, TWO) as place:
        await place.until_serving(ONE, TWO)
        await place.until_watched()
        place.api.gone_status = is_status
        pods_lab(place).api.objects.pop(("pods", "pod-8001"))
        place.lab.api.forget()
        await place.until_serving(TWO)
        assert place.verbs.count("list") == 2
        assert place.set.counters.failures == 0


async def test_lists_come_in_pages_and_one_that_is_gone_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_watch, "PAGE_OBJECTS", 2)
    async with followed("pods", tmp_path) as place:
        place.api.gone_pages = 1
        await place.lab.give([f"http://127.0.0.1:{port}" for port in range(9000, 9005)])
        place.api.forget()
        await place.until(lambda: len(place.serving) == 5)
        tokens = [query.get("continue") for verb, _, query in place.api.asked if verb == "list"]
        assert tokens[-3:] == [None, "2", "4"]
        assert place.api.gone_pages == 0


async def test_a_token_that_rotates_is_read_again(tmp_path: Path) -> None:
    async with followed("pods", tmp_path, ONE) as place:
        await place.until_serving(ONE)
        place.api.tokens = {"second"}
        place.api.cut()
        await place.until(lambda: "401: the token is refused" in place.set.why)
        assert place.serving == [ONE]
        (tmp_path / "credentials" / "token").write_text("second\n")
        await place.lab.give([ONE, TWO])
        await place.until_serving(ONE, TWO)


async def test_the_server_must_prove_itself_by_the_authority_beside_the_token(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    async with followed("pods", tmp_path, ONE, tls=authority) as place:
        other.cert_pem.write_to_path(str(tmp_path / "credentials" / "ca.crt"))
        await place.until(lambda: "CERTIFICATE_VERIFY_FAILED" in place.set.why)
        authority.cert_pem.write_to_path(str(tmp_path / "credentials" / "ca.crt"))
        await place.until_serving(ONE)
        await place.until_watched()  # httpcore leaves a socket open whose handshake is cancelled


@pytest.mark.parametrize("verb", ["list", "watch"])
@pytest.mark.parametrize(
    ("kind", "resource"), [("pods", "pods"), ("service", "endpointslices"), ("pool", "inferencepools")]
)
async def test_what_the_role_does_not_allow_is_named(tmp_path: Path, kind: str, resource: str, verb: str) -> None:
    async with followed(kind, tmp_path) as place:
        place.api.forbidden.add((verb, resource))
        place.api.forget()
        await place.until(lambda: f"must allow {verb} on {resource}" in place.set.why)
        place.api.forbidden.clear()
        await place.lab.give([ONE])
        await place.until_serving(ONE)


async def test_a_service_serves_without_its_pods_annotations_if_they_can_not_be_read(tmp_path: Path) -> None:
    async with followed("service", tmp_path, ONE) as place:
        place.api.forbidden |= {("list", "services"), ("watch", "services")}
        place.api.forget()
        await place.until(lambda: any("must allow" in text for text in place.set.left_out))
        await place.lab.give([ONE, TWO])
        await place.until_serving(ONE, TWO)


async def test_streams_that_break_off_or_turn_to_garbage_lose_nothing(tmp_path: Path) -> None:
    async with followed("pods", tmp_path, ONE) as place:
        await place.until_watched()
        for garbage in (b'{"type": "ADDED", "obj', b"<html>\n", b'{"type": "ODD", "object": {"metadata": {}}}\n'):
            watches = place.verbs.count("watch")
            place.api.cut(garbage)
            await place.until(lambda: bool(place.set.why))
            place.api.garbage = b""
            await place.until_watched(watches + 1)
            await place.until(lambda: not place.set.why)
            assert place.serving == [ONE]
        await place.lab.give([TWO])
        await place.until_serving(TWO)


async def test_an_event_beyond_the_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_api, "LINE_BYTES_MAX", 2000)
    async with followed("pods", tmp_path, ONE) as place:
        await place.until_watched()
        place.api.cut(b"x" * 4000)
        await place.until(lambda: "more than 2000 bytes" in place.set.why)
        assert place.serving == [ONE]


async def test_a_slow_server_is_waited_for_and_a_silent_watch_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_watch, "WATCH_S", 0)
    monkeypatch.setattr(kubernetes_watch, "SILENCE_S", 0.3)
    async with followed("pods", tmp_path, ONE) as place:
        place.api.slow_s = 0.1
        await place.until_serving(ONE)
        await place.until_watched(3)
        assert place.serving == [ONE]


async def test_an_endpoint_that_terminates_is_drained_and_then_goes(tmp_path: Path) -> None:
    async with followed("service", tmp_path, ONE, TWO) as place:
        await place.until_serving(ONE, TWO)
        lab = service_lab(place)
        lab.slice("vllm-8001", 8001, [lab.endpoint(ONE, ready=False, serving=True, terminating=True)])
        await place.until_serving(TWO)
        assert len(place.registry) == 2
        (leaving,) = [backend.origin.leaving for backend in place.registry if backend.url == ONE]
        assert leaving == "it ends, as kubernetes service/vllm has it"


async def test_an_endpoint_may_stand_in_two_slices_and_move_between_them(tmp_path: Path) -> None:
    async with followed("service", tmp_path, ONE, TWO) as place:
        await place.until_serving(ONE, TWO)
        lab, added = service_lab(place), place.registry.counters.backends_added
        lab.slice("vllm-8001-other", 8001, [lab.endpoint(ONE)])
        lab.api.drop("endpointslices", "vllm-8001")
        lab.slice("vllm-8001", 8001, [])
        lab.pod(THREE)
        lab.slice("vllm-8003", 8003, [lab.endpoint(THREE)])
        await place.until_serving(ONE, TWO, THREE)
        assert place.registry.counters.backends_added == added + 1


async def test_another_pod_at_the_same_address_is_another_backend(tmp_path: Path) -> None:
    async with followed("pods", tmp_path, ONE) as place:
        await place.until_serving(ONE)
        pods_lab(place).pod(ONE, uid="another")
        await place.until(lambda: place.registry.counters.backends_removed == 1)
        await place.until_serving(ONE)


@pytest.mark.parametrize("kind", KUBERNETES)
async def test_annotations_of_pods_are_options_and_what_is_wrong_in_them_is_named(kind: str, tmp_path: Path) -> None:
    async with followed(kind, tmp_path, ONE) as place:
        await place.until_serving(ONE)
        annotations = {"ranvier.io/weight": "3", "ranvier.io/any-model": "true", "ranvier.io/tls-name": "a.test"}
        labels = {"app": "vllm", "model": "gemma"}
        pods_or_service = place.lab
        pods_or_service.pod(ONE, annotations={**annotations, "ranvier.io/odd": "1"}, labels=labels)
        await place.until(lambda: [backend.weight for backend in place.registry] == [3.0])
        (backend,) = place.registry
        wanted = place.sources.reconciler.placed[backend.url].want.found
        assert (wanted.spec.any_model, dict(wanted.about)) == (True, {"model": "gemma"})
        left_out = " ".join(place.set.left_out)
        assert "ranvier.io/odd is not used" in left_out
        assert "ranvier.io/tls_name is not used" in left_out


async def test_a_pool_that_chooses_other_pods_is_followed(tmp_path: Path) -> None:
    async with followed("pool", tmp_path, ONE) as place:
        assert isinstance(place.lab, PoolLab)
        await place.until_serving(ONE)
        place.lab.pod(TWO, labels={"app": "other"})
        spec = {"selector": {"matchLabels": {"app": "other"}}, "targetPorts": [{"number": 8000}]}
        place.api.put("inferencepools", "gemma", {"spec": spec})
        await place.until_serving(TWO)
        place.api.drop("inferencepools", "gemma")
        await place.until_serving()


async def test_without_pools_the_kind_is_named_and_found_once_it_is_there(tmp_path: Path) -> None:
    async with followed("pool", tmp_path, ONE) as place:
        place.api.unknown.add("inferencepools")
        place.api.forget()
        await place.until(lambda: "there is no such resource" in place.set.why)
        place.api.unknown.clear()
        await place.lab.give([TWO])
        await place.until_serving(TWO)


async def test_outside_of_a_cluster_the_source_names_what_to_set(autojump_clock: trio.testing.MockClock) -> None:
    registry = Registry(BackendLimits())
    sources = BackendSources(registry, registry.add, registry.remove)
    source = KubernetesSource(KubernetesTarget.parse("service=vllm"), None, Random(0), None)
    with trio.move_on_after(1):
        await source.run(Sink(sources, source.name))
    assert "set kubernetes_api" in sources.reconciler.source(source.name, 0.0).why


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("vllm", "must begin with service="),
        ("service=", "must begin"),
        ("service=Not_A_Name", "service must be the name"),
        ("pods=app", "pods must be labels"),
        ("pods=app=vllm&", "pods must be labels"),
        ("pool=gemma,port=0", "port"),
        ("pool=gemma,namespace=A", "namespace"),
        ("service=vllm,family=5", "family"),
        ("service=vllm,weigth=2", "weigth is no option"),
        ("service=vllm,api_key_file=/etc/passwd", "api_key_file: only the backends of a node's own configuration"),
    ],
)
def test_what_is_no_target_is_refused_at_the_start(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(backend_kubernetes=[text])
    assert problem in str(refused.value)


__all__ = ["quick"]
