"""Asks engines for their model lists out of turn, when `core/routing/models/list_looks.py` says so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import trio

from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import Sample, samples, values
from ranvier_py.core.routing.backend import Card
from ranvier_py.core.routing.models.list_looks import WAIT_S, ListLooks
from ranvier_py.io.engine_poller import EnginePoller
from ranvier_py.node.part import Node, Part, log_transitions


class ModelLooks(Part):
    """See the module."""

    name = "model_looks"

    def __init__(self, node: Node, poller: EnginePoller) -> None:
        self._registry, self._poller, self._looks = node.registry, poller, ListLooks()
        self._wanted, self._changed = trio.Event(), trio.Event()  # `_changed`: a list has changed, or a look has ended
        self._lacking: dict[BackendId, None] = {}  # engines that lack a model that they listed
        self._is_sought = self._has_found = False

    async def look_for(self, model: str) -> None:
        """Return once a backend lists this model, or once that is not to be expected, after WAIT_S at most."""
        looks, since = self._looks, time.monotonic()
        if not looks.is_worth_it(model, since):
            return
        ended, self._is_sought = looks.ended, True
        self._wanted.set()
        with trio.move_on_after(WAIT_S):
            while self._registry.pools.names.lacks(self._registry, model):
                if looks.ended > ended:
                    looks.missed(model, since, time.monotonic())
                    return
                await self._changed.wait()

    def lacks(self, backend: BackendId) -> None:
        """Ask this engine again: it answered that it lacks a model."""
        self._lacking[backend] = None
        self._wanted.set()

    async def loop(self) -> None:
        while True:
            await self._wanted.wait()
            await trio.sleep(max(0.0, self._looks.next_at - time.monotonic()))
            asked, self._lacking, self._wanted = self._lacking, {}, trio.Event()
            if self._is_sought:
                asked = dict.fromkeys(backend.id for backend in self._registry)
            self._is_sought = self._has_found = False
            self._looks.begin(time.monotonic())
            try:
                await self._poller.list_models(asked, WAIT_S, self._listed)
            finally:
                self._looks.end(found=self._has_found)
                self._change()

    def _listed(self, id: BackendId, names: tuple[str, ...], cards: tuple[Card, ...]) -> None:  # noqa: A002
        backend = self._registry.ids.current(id)
        changes = self._registry.changes.set_models(backend, names, cards) if backend is not None else ()
        log_transitions(changes)
        if changes:
            self._has_found = True
            self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    def view(self) -> Any:
        return values(self._looks.counters)

    def metrics(self) -> Iterator[Sample]:
        return samples("model_looks", self._looks.counters)
