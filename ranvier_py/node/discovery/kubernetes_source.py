"""Backends from Kubernetes: the engines of a Service, of an InferencePool, or of pods with some labels.

A Service's engines are its EndpointSlices'; its pods are watched beside them for their annotations, and if that is not
allowed, their engines serve without. A pool, or the Service, chooses pods by labels: others mean another watch of pods.
Rule: a set is given once all that it needs was read, and no more while some of that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, NamedTuple

import trio

from ranvier_py.config.config_values import OWN_FILES_ONLY, BackendSpec
from ranvier_py.config.source_targets import OPTIONS, SCHEMES, Common, KubernetesTarget
from ranvier_py.core.routing.backend import NAME_CHARS_MAX
from ranvier_py.core.routing.wanted.found_backend import FoundBackend, SourceName
from ranvier_py.core.routing.wanted.kubernetes_objects import (
    Endpoints,
    EngineEndpoint,
    PodFacts,
    PoolFacts,
    endpoints_of_pods,
    endpoints_of_slices,
    facts_of,
    pool_of,
    selector_text,
    table,
    word,
)
from ranvier_py.io.sources.kubernetes_api import KubernetesApi, Resource
from ranvier_py.node.discovery.followers import Sink, SourceFollower
from ranvier_py.node.discovery.kubernetes_watch import ObjectWatch, WatchedObjects

BURST_S = 0.05  # a set of thousands is made again at most so often
SLICES, PODS, CHOICE = "endpointslices", "pods", "choice"
RESOURCES = {
    SLICES: (Resource("discovery.k8s.io", "v1", "endpointslices"),),
    PODS: (Resource("", "v1", "pods"),),
    "service": (Resource("", "v1", "services"),),
    "pool": (
        Resource("inference.networking.k8s.io", "v1", "inferencepools"),
        Resource("inference.networking.x-k8s.io", "v1alpha2", "inferencepools"),
    ),
}


@dataclass(slots=True)
class WatchedPiece:
    """One list that a set is made of. `objects` None: not read yet. `why`: it can't be read now."""

    objects: Mapping[str, Any] | None = None
    why: str = ""
    is_needed: bool = True


class MadeBackend(NamedTuple):
    """A backend, what it was made of, and what of its annotations is wrong."""

    made_of: tuple[EngineEndpoint, str, PodFacts]
    found: FoundBackend[BackendSpec]
    wrong: Sequence[str]


class KubernetesSource(SourceFollower):
    """See the module. `api` None: the node runs in no cluster, and no API server is named."""

    def __init__(self, target: KubernetesTarget, api: KubernetesApi | None, rng: Random, settings: object) -> None:
        super().__init__(SourceName("kubernetes", target.text), settings)
        self._target, self._api, self._rng = target, api, rng
        self._pieces: dict[str, WatchedPiece] = {}
        self._choice: PoolFacts | str | None = None
        self._pods_scope = trio.CancelScope()
        self._changed = trio.Event()  # since the last set
        self._making: dict[tuple[str, int], MadeBackend] = {}
        self._made: dict[tuple[str, int], MadeBackend] = {}  # in the last set

    async def run(self, sink: Sink) -> None:
        if self._api is None:
            sink.fail("no API server is known: the node runs in no cluster, so set kubernetes_api")
            await trio.sleep_forever()
        target, namespace = self._target, self._target.namespace
        namespace = namespace or await trio.to_thread.run_sync(self._api.namespace)
        self._pieces, self._choice = {}, None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._give, sink)
            watch = partial(self._watch, sink, namespace, nursery)
            if target.kind == "service":
                self._pieces[SLICES] = WatchedPiece()
                self._pieces[CHOICE], self._pieces[PODS] = WatchedPiece(is_needed=False), WatchedPiece(is_needed=False)
                watch(SLICES, RESOURCES[SLICES], labelSelector=f"kubernetes.io/service-name={target.name}")
            elif target.kind == "pool":
                self._pieces[CHOICE], self._pieces[PODS] = WatchedPiece(), WatchedPiece()
            else:
                self._pieces[PODS] = WatchedPiece()
                watch(PODS, RESOURCES[PODS], labelSelector=target.name)
            if target.kind != "pods":
                watch(CHOICE, RESOURCES[target.kind], fieldSelector=f"metadata.name={target.name}")

    def _watch(
        self, sink: Sink, namespace: str, nursery: trio.Nursery, piece: str, resources: Sequence[Resource], **query: str
    ) -> trio.CancelScope:
        """Begin to watch a piece of the set, until the scope is cancelled."""
        assert self._api is not None
        scope = trio.CancelScope()

        def changed(objects: Mapping[str, Any]) -> None:
            if scope.cancel_called:
                return
            self._pieces[piece].objects, self._pieces[piece].why = objects, ""
            if piece == CHOICE:
                self._choose(objects, partial(self._watch, sink, namespace, nursery))
            self._changed.set()

        def failed(why: str) -> None:
            self._pieces[piece].why = why
            if piece == CHOICE and self._choice is None:  # which pods there are is not known: they are not waited for
                self._pieces[PODS].objects = self._pieces[PODS].objects or {}
            self._changed.set()
            if self._pieces[piece].is_needed:  # at once: what may come next is not to be taken for a good set's change
                sink.fail(why)

        async def run() -> None:
            with scope:
                await ObjectWatch(api, WatchedObjects(resources, namespace, query), self._rng, changed, failed).run()

        api = self._api
        nursery.start_soon(run)
        return scope

    def _choose(self, objects: Mapping[str, Any], watch: Callable[..., trio.CancelScope]) -> None:
        """Watch the pods that the Service or pool chooses now, if those are others than before."""
        found = objects.get(self._target.name)
        choice = None if found is None else self._choice_of(found)
        if choice == self._choice and self._pieces[PODS].objects is not None:
            return
        before, self._choice = self._choice, choice
        same_pods = (
            isinstance(choice, PoolFacts) and isinstance(before, PoolFacts) and choice.selector == before.selector
        )
        if same_pods:
            return
        self._pods_scope.cancel()
        pods = self._pieces[PODS]
        if isinstance(choice, PoolFacts):
            pods.objects, pods.why = None, ""
            self._pods_scope = watch(PODS, RESOURCES[PODS], labelSelector=choice.selector)
        else:
            pods.objects, pods.why = {}, choice or ""

    def _choice_of(self, found: Any) -> PoolFacts | str:
        if self._target.kind == "pool":
            return pool_of(found)
        selector = table(found, "spec", "selector")
        return PoolFacts(selector_text(selector), ()) if selector else ""

    async def _give(self, sink: Sink) -> None:
        """Give a set whenever something has changed; of a burst of events the last one."""
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            self._emit(sink)
            await trio.sleep(BURST_S)

    def _emit(self, sink: Sink) -> None:
        """Give the set as it is, if all that it needs is known."""
        why = next((piece.why for piece in self._pieces.values() if piece.is_needed and piece.why), "")
        if why:
            sink.fail(why)
        elif all(piece.objects is not None or piece.why for piece in self._pieces.values()):
            found, left_out = self._endpoints(), list[str]()
            self._making = {}
            backends = [*self._backends(found, left_out)]
            self._made = self._making
            unread = [piece.why for piece in self._pieces.values() if not piece.is_needed and piece.why]
            notes = [f"annotations of pods are not read: {why}" for why in unread]
            sink.take(backends, (*found.left_out, *left_out, *notes))

    def _endpoints(self) -> Endpoints:
        target = self._target
        if target.kind == "service":
            slices = (self._pieces[SLICES].objects or {}).values()
            return endpoints_of_slices(slices, target.port, target.family)
        ports: Sequence[str] = (target.port,) if target.port else ()
        if isinstance(self._choice, PoolFacts):
            ports = ports or self._choice.ports
        return endpoints_of_pods((self._pieces[PODS].objects or {}).values(), ports, target.family)

    def _backends(self, found: Endpoints, left_out: list[str]) -> Iterator[FoundBackend[BackendSpec]]:
        pods = self._pieces[PODS].objects or {}
        several = {endpoint.pod for endpoint in found.found if endpoint.pod}
        counts = {pod: sum(each.pod == pod for each in found.found) for pod in several}
        for endpoint in found.found:
            pod = pods.get(endpoint.pod)
            is_it = pod is not None and word(pod, "metadata", "uid") == endpoint.process
            facts = facts_of(pod) if is_it else PodFacts()
            if facts.left_out:
                left_out.append(f"pod {endpoint.pod}: {facts.left_out}")
                continue
            is_slice = self._target.kind == "service"
            ports = facts.ports if is_slice and facts.ports else (endpoint.port,)
            for port in ports:
                is_one = len(ports) == 1 and counts.get(endpoint.pod, 1) == 1
                name = endpoint.pod if is_one or not endpoint.pod else f"{endpoint.pod}:{port}"
                yield self._found(endpoint._replace(port=port), name, facts, left_out)

    def _found(
        self, endpoint: EngineEndpoint, name: str, facts: PodFacts, left_out: list[str]
    ) -> FoundBackend[BackendSpec]:
        """Return a backend, the same one as long as nothing of it changes: each event asks for all of them."""
        known = self._made.get((endpoint.host, endpoint.port))
        if known is None or known.made_of != (endpoint, name, facts):
            wrong = list[str]()
            spec = self._spec(endpoint, name, facts, wrong)
            found = FoundBackend(spec, endpoint.draining, endpoint.process, facts.about)
            known = MadeBackend((endpoint, name, facts), found, wrong)
        self._making[endpoint.host, endpoint.port] = known
        left_out += known.wrong
        return known.found

    def _spec(self, endpoint: EngineEndpoint, name: str, facts: PodFacts, left_out: list[str]) -> BackendSpec:
        """Return a backend with those of its own options that are right; the others are named."""
        common, own = self._target.common, dict(facts.options)
        scheme = own.pop("scheme", common.scheme)
        if scheme in SCHEMES:
            common = Common(scheme, common.options)
        good: dict[str, str] = {"name": name if len(name) <= NAME_CHARS_MAX else ""}
        for option, value in own.items():
            if option == "api_key_file":
                left_out.append(f"pod {endpoint.pod}: ranvier.io/{option} is not used: {OWN_FILES_ONLY}")
                continue
            try:
                if option not in OPTIONS:
                    raise ValueError("it is no option")
                common.spec(endpoint.host, endpoint.port, **good, **{option: value})
                good[option] = value
            except ValueError:
                left_out.append(f"pod {endpoint.pod}: ranvier.io/{option} is not used: {value[:40]!r} is wrong there")
        return common.spec(endpoint.host, endpoint.port, **good)
