"""Asks engines for their model lists out of turn, when `core/routing/models/list_looks.py` says so; names the tables of
models that lead to what no engine serves."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.config.model_tables import table_of
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.findings import Finding
from ranvier_py.core.ids import BackendId
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import Sample, samples, values
from ranvier_py.core.routing.backend import Card
from ranvier_py.core.routing.engine_findings import unserved
from ranvier_py.core.routing.models.list_looks import WAIT_S, ListLooks
from ranvier_py.io.engine_poller import EnginePoller
from ranvier_py.node.part import Node, Part, log_transitions

log = logging.getLogger(__name__)


class ModelLooks(Part):
    """See the module."""

    name = "model_looks"
    keys = ("model",)

    def __init__(self, node: Node, poller: EnginePoller) -> None:
        self._table, self._unknown = table_of(node.config.model), dict[str, Sequence[str]]()
        self._seen: object = None  # the lists of engines as they were last compared with the tables
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

    def sweep(self, now: float) -> None:
        """Compare the tables of models with what engines list, once either is new."""
        if self._table is None or self._seen is (listed := self._registry.pools.names.listed):
            return
        self._seen, before = listed, self._unknown
        self._unknown = dict(self._table.unknown(self._lacks))
        for name, models in self._unknown.items():
            if before.get(name) != models:
                log.warning(event("model.unknown", model=name, models=models))

    def _lacks(self, model: str) -> bool:
        return self._registry.pools.names.lacks(self._registry, model)

    def check(self, before: Config, after: Config) -> bool:
        """Refuse new tables that lead to what no engine serves, unless one comes with them."""
        if after.model != before.model and {spec.url for spec in after.backend} <= {
            spec.url for spec in before.backend
        }:
            table = table_of(after.model)
            unknown = table.unknown(self._lacks) if table is not None else {}
            known = self._table.unknown(self._lacks) if self._table is not None else {}
            new = [(name, models) for name, models in unknown.items() if known.get(name) != models]
            if new:
                words = "leads to {}, which no engine serves"
                raise ConfigError([f"model: {name} {words.format(', '.join(models))}" for name, models in new])
        return False

    def reload(self, before: Config, after: Config) -> None:
        self._table, self._seen, self._unknown = table_of(after.model), None, {}

    def findings(self, now: float) -> Iterator[Finding]:
        yield from unserved(self._unknown)

    def view(self) -> Any:
        return {**values(self._looks.counters), "unknown": self._unknown}

    def metrics(self) -> Iterator[Sample]:
        yield from samples("model_looks", self._looks.counters)
        words = "Names of models whose table leads to what no engine serves."
        yield Sample("models_unknown", "gauge", words, len(self._unknown))
