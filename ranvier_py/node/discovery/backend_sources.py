"""Carries out what the reconciler of a node's sources decides: adds, changes, drains and removes backends.

Rule: no backend comes or goes but through here, except the ranks that a node finds itself. What fails is tried again
with the next look, and logged once. Invariant: each node finds backends itself; gossip adds no address
(test_backend_sources.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import trio

from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.errors import Conflict, NotFound, RanvierError
from ranvier_py.core.log_events import event
from ranvier_py.core.routing.backend import Backend
from ranvier_py.core.routing.backends import Registry
from ranvier_py.core.routing.wanted.backend_reconciler import (
    BackendReconciler,
    Effect,
    ToAdd,
    ToChange,
    ToDrain,
    ToRemove,
    Want,
)
from ranvier_py.core.routing.wanted.found_backend import (
    OF_OPERATORS,
    STATIC,
    EngineKey,
    FoundBackend,
    SourceName,
    own_key,
)

PORTION = 32  # backends that come or go in one call: with all that a part notes of one, a fraction of 50 ms
BETWEEN_PORTIONS_S = 0.005

log = logging.getLogger(__name__)


class BackendSources:
    """The sources of one node. `add` and `remove` have every part of the node take and forget a backend."""

    def __init__(self, registry: Registry, add: Callable[..., Any], remove: Callable[..., object]) -> None:
        self.reconciler: BackendReconciler[BackendSpec] = BackendReconciler(registry.ids.backends_max)
        self._registry, self._add, self._remove = registry, add, remove
        self.keys: dict[str, EngineKey] = {}  # engines' own, by URL, also of those that are gone (`_take_key`)
        self.more = trio.Event()  # set: `settle` left something for its next call

    def take(
        self, name: SourceName, found: Iterable[FoundBackend[BackendSpec]], left_out: Sequence[str] = ()
    ) -> Mapping[str, RanvierError]:
        """Take what a source wants. Returns what of it could not be done, by URL."""
        if not self.reconciler.take(name, found, time.monotonic(), left_out):
            log.warning(event("backends.empty_ignored", source=name, why=self.reconciler.sources[name].why))
            return {}
        return self.settle()

    def configure(self, specs: Iterable[BackendSpec]) -> None:
        """Take the backends of the configuration. Raises RanvierError for the first that can't be added."""
        for error in self.take(STATIC, [spec.found for spec in specs]).values():
            raise error

    def spec_of(self, url: str) -> BackendSpec | None:
        """Return the configuration of a backend that a source wants."""
        placed = self.reconciler.placed.get(url)
        return placed.want.found.spec if placed is not None else None

    def add(self, spec: BackendSpec, by: str = "") -> Backend:
        """Add a backend by an operator's order. Raises RanvierError, with nothing changed."""
        known = self._registry.ids.find(spec.url) if spec.url in self.reconciler.placed else None
        if known is not None and not known.origin.leaving:  # else this is why it shall stay
            raise Conflict(f"backend {known.name!r} at {spec.url} is there already")
        return self._order(self.reconciler.add, spec, by)

    def change(self, backend: Backend, spec: BackendSpec, by: str) -> Backend:
        """Give a backend other options by an operator's order. Raises RanvierError, with nothing changed."""
        known, drained = self.spec_of(backend.url), backend.origin.drained
        if known is not None and spec.name == backend.name:
            spec = spec.model_copy(update={"name": known.name})
        if known is None and backend.behind.rank is not None:  # one that the node found itself
            self._registry.reweigh(backend.url, spec.weight)
            if spec.model_copy(update={"weight": 1.0, "name": ""}) == BackendSpec(url=backend.url):
                return backend
        changed = self._order(self.reconciler.change, spec, by)
        self._registry.drain(changed.name, drained)
        return changed

    def _order(self, give: Callable[[BackendSpec, float], object], spec: BackendSpec, by: str) -> Backend:
        before = self.reconciler.ordered(spec.url)
        try:
            give(spec, time.monotonic())
            if (error := self.settle({spec.url: by}).get(spec.url)) is not None:
                raise error
            return self._registry.ids.known(spec.url)
        except BaseException:
            self.reconciler.restore(spec.url, before, time.monotonic())
            self.settle({spec.url: "what it was before"})
            raise

    def join(self, url: str) -> None:
        """Let an operator's order be one more that wants this backend, as it is."""
        if (spec := self.spec_of(url)) is not None:
            self.reconciler.add(spec, time.monotonic())
            self.settle()

    def withdraw(self, url: str) -> None:
        """Take back that an operator's order wants it; others may."""
        self.reconciler.withdraw(url, time.monotonic())
        self.settle()

    def remove(self, name_or_url: str, by: str = "") -> None:
        """Remove a backend by an operator's order, whoever wants it. Raises NotFound."""
        backend = self._registry.ids.known(name_or_url)
        if backend.url not in self.reconciler.placed:  # a rank that the node found itself
            self._remove(backend.name, by=by)
            return
        self.reconciler.remove(backend.url, time.monotonic())
        self.settle({backend.url: by})

    def fail(self, name: SourceName, why: str) -> None:
        """Note that a source can't be read: its last good set holds."""
        if self.reconciler.source(name, time.monotonic()).fail(why, time.monotonic()):
            log.warning(event("backends.source_failing", source=name, why=why))

    def doubt(self, name: SourceName, why: str) -> None:
        """Note that a source seems to have nothing any more, which is asked again."""
        self.reconciler.source(name, time.monotonic()).doubt(why, time.monotonic())

    def give_up(self, name: SourceName) -> None:
        """Forget a source that is no longer configured."""
        self.reconciler.give_up(name)
        self.settle()

    def restarted(self, backend: Backend) -> None:
        """Take that another process answers at a backend's address."""
        if (drain := self.reconciler.restarted(backend.url)) is not None:
            self._drain(drain)
            self.reconciler.done(drain)

    def key_of(self, url: str) -> EngineKey | None:
        """Return the key of the engine's own at this URL, if it has one."""
        return own_key(self.keys, url)

    def settle(self, ordered: Mapping[str, str] = {}) -> Mapping[str, RanvierError]:
        """Do what is to be done now. `ordered`: by whom, by URL. Returns what could not be done."""
        errors: dict[str, RanvierError] = {}
        before = [*self.reconciler.overrides]
        effects = self.reconciler.effects(time.monotonic(), self._is_busy)
        for url in before:
            if url not in self.reconciler.overrides:
                log.warning(event("orders.outdated", url=url, order="", source="what its sources want"))
        left = PORTION
        try:
            for effect in effects:
                if isinstance(effect, ToAdd | ToRemove) and not self._is_ordered(effect, ordered):
                    left -= 1
                    if left < 0:  # requests come first: the rest is done in a moment
                        self.reconciler.changed = True
                        self.more.set()
                        continue
                try:
                    self._carry_out(effect, ordered.get(effect.url, ""))
                except RanvierError as error:
                    errors[effect.url] = error
                    if self.reconciler.refused(effect, str(error)):
                        log.warning(event("backends.not_added", url=effect.url, why=str(error)))
                else:
                    self.reconciler.done(effect)
        except BaseException:
            self.reconciler.changed = True  # what is left is done with the next look
            raise
        return errors

    def _is_ordered(self, effect: ToAdd | ToRemove, ordered: Mapping[str, str]) -> bool:
        """Whether an operator waits for it, here or as the node starts."""
        want = effect.want if isinstance(effect, ToAdd) else self.reconciler.placed[effect.url].want
        return effect.url in ordered or not OF_OPERATORS.isdisjoint(want.kinds)

    async def settle_rest(self) -> None:
        """Do what `settle` leaves, until cancelled, a portion at a time."""
        while True:
            await self.more.wait()
            self.more = trio.Event()
            self.settle()
            await trio.sleep(BETWEEN_PORTIONS_S)

    def _is_busy(self, url: str) -> bool:
        backend = self._registry.ids.by_url.get(url)
        if backend is None:
            return False
        return any(each.work.own.inflight for each in (backend, *backend.behind.as_ranks))

    def _carry_out(self, effect: Effect, by: str) -> None:
        if isinstance(effect, ToRemove):
            try:
                self._remove(effect.url, by=by, why=effect.why)
            except NotFound:
                log.info(event("backends.gone_already", url=effect.url))
        elif isinstance(effect, ToAdd):
            self._place(effect.want, by)
        elif isinstance(effect, ToDrain):
            self._drain(effect)
        else:
            self._change(effect)

    def _place(self, want: Want[BackendSpec], by: str) -> None:
        spec = want.found.spec
        is_found = OF_OPERATORS.isdisjoint(want.kinds)
        self._take_key(spec.url, want.found.key)
        name = "" if is_found and spec.name in self._registry.ids.by_name else spec.name  # a pod's may have a successor
        backend = self._registry[self._add(spec.url, spec.weight, name, spec, by=by)]
        backend.origin.wanted_by = want.kinds

    def _change(self, change: ToChange) -> None:
        backend, spec = self._registry.ids.known(change.url), change.want.found.spec
        backend.origin.wanted_by = change.want.kinds
        key, before = change.want.found.key, self.keys.get(change.url)
        if key != before:
            files = [each.file if each is not None else "" for each in (before, key)]
            log.info(event("backend.key_changed", engine=backend.name, before=files[0], after=files[1]))
        self._take_key(change.url, key)
        if backend.weight != spec.weight:
            self._registry.reweigh(backend.url, spec.weight)

    def _take_key(self, url: str, key: EngineKey | None) -> None:
        """Note the key of a backend that comes or changes. One that is gone keeps its own: what is still on its way
        there, such as a stream of events, must not get the key of all instead. Of these the oldest goes."""
        self.keys.pop(url, None)
        if key is not None:
            self.keys[url] = key
        if len(self.keys) > self.reconciler.backends_max:
            del self.keys[next(each for each in self.keys if each not in self.reconciler.placed)]

    def _drain(self, drain: ToDrain) -> None:
        backend = self._registry.ids.known(drain.url)
        log.info(event("backend.leaving", engine=backend.name, why=drain.why))
        self._registry.leave(backend, drain.why)
