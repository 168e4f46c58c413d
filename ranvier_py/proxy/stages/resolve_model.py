"""Gives a request the name of the model that serves it, before anything reads it: prompt, caches, routes and metrics
are those of that model.

Rule: where no table concerns the name, nothing changes. Of several models the first is taken that has engines which may
be asked; where none has, the first. A model is named in a JSON body, in a form, or in the query of a WebSocket; in a
compressed body nobody finds it, in one too large to be read it is found near its ends (`outer_members.scalar_of`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from urllib.parse import quote

from ranvier_py.core.metrics import counter, increment
from ranvier_py.core.prompts.body_json import spliced
from ranvier_py.core.prompts.form_model import FormModel, form_model
from ranvier_py.core.prompts.outer_members import Scalar, scalar_of
from ranvier_py.core.routing.models.body_edits import body_splices
from ranvier_py.core.routing.models.chat_key import chat_key
from ranvier_py.core.routing.models.model_rules import ModelTable, Served
from ranvier_py.core.routing.router import Router
from ranvier_py.proxy.call import Call, NamedModel, PipelineLimits
from ranvier_py.proxy.driver import Steps, in_portions
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.proxy.realtime import QUERY_MODEL, model_of, upgrades
from ranvier_py.proxy.stages.find_model import ModelStage

TIMES = ("first_event_s", "stall_s")
RETRIES = {
    "worker_retries_max": "worker_retries_max",
    "total_retries_max": "total_retries_max",
    "statuses": "retry_statuses",
}
"""Limits that a table may have: of a request, and of its retries, by their names there."""


@dataclass(slots=True)
class ModelCounters:
    """What became of requests whose model has a table."""

    served: dict[str, int] = counter(
        "Requests whose model has a table, by the model that they were sent to first.", label="model"
    )


@dataclass(slots=True, eq=False)
class ResolveStage:
    router: Router
    models: ModelStage
    limits: PipelineLimits
    table: ModelTable | None = None  # without one this is not called
    counters: ModelCounters = field(default_factory=ModelCounters)
    _limits: dict[tuple[object, ...], PipelineLimits] = field(default_factory=dict)  # of models: few, by what differs

    def __call__(self, call: Call) -> Steps[None] | None:
        request = call.request
        if request.method == b"POST" and request.body and request.fields.readable:
            if request.fields.multipart:
                return self._form(call)
            call.named = self.of_body(request)
        elif upgrades(request):
            call.named = self._named(request, model_of(request.target), partial(query_for, request))
        if call.named is not None:
            self._begin(call, call.named)
        return None

    def _form(self, call: Call) -> Steps[None]:
        request = call.request
        found = yield from in_portions(form_model(request.body))
        call.named = self._named(request, found.name, partial(form_for, request, found))
        if call.named is not None:
            self._begin(call, call.named)

    def resolved(self, request: HttpRequest) -> HttpRequest:
        """Return a request with a JSON body as it would be sent first, for a dry run."""
        named = self.of_body(request)
        return request if named is None else named.edited(named.served)

    def of_body(self, request: HttpRequest) -> NamedModel | None:
        """Return the models for the one that a JSON body names; None without a table."""
        model = scalar_of(request.body, "model") if self.table is not None else None
        if model is None or not isinstance(model.value, str):
            return None
        return self._named(request, model.value, partial(body_for, request, model))

    def _named(self, request: HttpRequest, asked: str, edited: Callable[[Served], HttpRequest]) -> NamedModel | None:
        key: Callable[[], bytes] = partial(chat_key, request.fields.session, request.body)
        if self.table is None or not asked:
            return None
        chain = self.table.chain(asked, "", self.router.registry.pools.names.listed, key)
        if not chain:
            return None
        able = (at for at, each in enumerate(chain) if len(chain) == 1 or self.is_able(each.model))
        return NamedModel(asked, chain, edited, next(able, 0))

    def _begin(self, call: Call, named: NamedModel) -> None:
        call.request, call.limits = named.edited(named.served), self._limits_of(named.served)
        increment(self.counters.served, self._label(named.served))

    def set_limits(self, limits: PipelineLimits) -> None:
        self.limits, self._limits = limits, {}

    def _limits_of(self, served: Served) -> PipelineLimits | None:
        """Return the limits of requests to a model; None if they are everybody's."""
        own = {name: served.first(name) for name in (*TIMES, *RETRIES.values())}
        key = tuple(own.values())
        if set(key) == {None}:
            return None
        if key not in self._limits:
            given = {name: value for name, value in own.items() if value is not None}
            retries = {name: given[ours] for name, ours in RETRIES.items() if ours in given}
            times = {name: given[name] for name in TIMES if name in given}
            self._limits[key] = replace(self.limits, **times, retries=replace(self.limits.retries, **retries))
        return self._limits[key]

    def is_able(self, model: str) -> bool:
        """Whether engines of this model may be asked, other than as a last resort."""
        pool = self.router.registry.pools.pool(model, time.monotonic())
        return bool(pool.ids) and not pool.last_resort

    def _label(self, served: Served) -> str:
        """Return the model as metrics name it: names that clients invent are counted by their table."""
        is_bounded = self.table is not None and served.model in self.table.targets
        return served.model if is_bounded else served.rules[-1].name


def body_for(request: HttpRequest, model: Scalar, served: Served) -> HttpRequest:
    splices = body_splices(request.path, request.body, model, served)
    return request.with_body(spliced(request.body, splices)) if splices else request


def form_for(request: HttpRequest, model: FormModel, served: Served) -> HttpRequest:
    if served.model == model.name:
        return request
    return request.with_body(spliced(request.body, [(model.start, model.end, served.model.encode())]))


def query_for(request: HttpRequest, served: Served) -> HttpRequest:
    """Return the request with another `model` in its query, and all else as it was written."""
    target, found = request.target, QUERY_MODEL.search(request.target)
    if found is None or served.model == model_of(target):
        return request
    name = quote(served.model, safe="").encode()
    target = target[: found.start(1)] + name + target[found.end(1) :]
    known = request.body, request.http_minor, request.keep_alive, request.fields, request.path
    return HttpRequest(request.method, target, request.headers, *known)
