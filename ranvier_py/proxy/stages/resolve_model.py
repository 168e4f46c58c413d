"""Gives a request the name of the model that serves it, before anything reads it: prompt, caches, routes and metrics
are those of that model.

Rule: where no table concerns the name, nothing changes. Of several models the first is taken that has engines which may
be asked; where none has, the first. A model is named in a JSON body, in a form, or in the query of a WebSocket; in a
compressed body nobody finds it, in one too large to be walked it is found near its ends (`outer_values`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from urllib.parse import quote

from trio.lowlevel import checkpoint

from ranvier_py.core.access.identity import ANYBODY, Identity
from ranvier_py.core.errors import ModelNotFound
from ranvier_py.core.metrics import counter
from ranvier_py.core.prompts.body_json import NAME_CHARACTERS_MAX, UNCOUNTED_BYTES_MAX, spliced
from ranvier_py.core.prompts.form_model import FormModel, form_model
from ranvier_py.core.prompts.outer_values import OuterValues, Scalar
from ranvier_py.core.routing.attempt import PoolMatch
from ranvier_py.core.routing.blame.judgements import Judgement
from ranvier_py.core.routing.health import Outcome
from ranvier_py.core.routing.models.body_edits import body_splices
from ranvier_py.core.routing.models.chat_key import chat_key
from ranvier_py.core.routing.models.model_list import NO_ALIASES
from ranvier_py.core.routing.models.model_rules import EMPTY, ERROR, OVERLOADED, TIMEOUT, TOO_LONG, ModelTable, Served
from ranvier_py.core.routing.router import Router
from ranvier_py.proxy.answers.renamed_answer import RenamedAnswer
from ranvier_py.proxy.call import Call, Edited, Editing, NamedModel, PipelineLimits
from ranvier_py.proxy.driver import Steps, in_portions
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.proxy.realtime import QUERY_MODEL, model_of, upgrades
from ranvier_py.proxy.stages.match import ModelStage

KIND_OF = {
    Outcome.OVERLOADED: OVERLOADED,
    Outcome.TIMEOUT: TIMEOUT,
    **dict.fromkeys((Outcome.SERVER_ERROR, Outcome.CONNECT_ERROR, Outcome.BROKEN), ERROR),
}

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
        "Requests whose model has a table, and fallbacks of such, by the model that they were sent to.", label="model"
    )
    fallbacks: dict[str, int] = counter("Requests sent to another model instead, by why.", label="kind")


@dataclass(slots=True, eq=False)
class ResolveStage:
    router: Router
    models: ModelStage
    limits: PipelineLimits
    again: Sequence[Callable[[Call], Steps[None] | None]]  # the stages that a request of another model passes again
    table: ModelTable | None = None  # without one this is not called
    counters: ModelCounters = field(default_factory=ModelCounters)
    _limits: dict[tuple[object, ...], PipelineLimits] = field(default_factory=dict)  # of models: few, by what differs

    def __call__(self, call: Call) -> Steps[None] | None:
        request = call.request
        if request.method == b"POST" and request.body and request.fields.readable:
            return self._form(call) if request.fields.multipart else self._body(call)
        return self._query(call) if upgrades(request) else None

    def _body(self, call: Call) -> Steps[None]:
        call.named = yield from self.of_body(call.request, call.identity)
        yield from self._begin(call)

    def _form(self, call: Call) -> Steps[None]:
        request = call.request
        found = yield from in_portions(form_model(request.body))
        call.named = self._named(request, found.name, partial(form_for, request, found), call.identity)
        yield from self._begin(call)

    def _query(self, call: Call) -> Steps[None]:
        request = call.request
        call.named = self._named(request, model_of(request.target), partial(query_for, request), call.identity)
        yield from self._begin(call)

    def resolved(self, request: HttpRequest) -> Steps[HttpRequest]:
        """Return a request with a JSON body as it would be sent first, for a dry run."""
        named = (yield from self.of_body(request)) if self.table is not None else None
        return request if named is None else (yield from in_portions(named.edited(named.served)))

    def of_body(self, request: HttpRequest, identity: Identity | None = None) -> Steps[NamedModel | None]:
        """Return the models for the one that a JSON body names; None without a table."""
        values = OuterValues(request.body)
        model = yield from in_portions(values.find("model"))
        if model is None or not isinstance(model.value, str) or len(model.value) > NAME_CHARACTERS_MAX:
            return None
        if len(request.body) > UNCOUNTED_BYTES_MAX:
            yield checkpoint  # what tells chats apart may parse as much as a turn of the event loop has time for
        return self._named(request, model.value, partial(body_for, request, values, model), identity)

    def _named(self, request: HttpRequest, asked: str, edited: Editing, identity: Identity | None) -> NamedModel | None:
        if self.table is None or not asked:
            return None
        key: Callable[[], bytes] = partial(chat_key, request.fields.session, request.body)
        chain = self.table.chain(asked, tenant_of(identity), self.router.registry.pools.names.listed, key)
        if not chain:
            return None
        if identity is not None and not (identity.may_use(asked) or identity.may_use(chain[0].model)):
            chain = self._permitted(asked, chain, identity)
        named = NamedModel(asked, chain, edited)
        if len(chain) > 1 and EMPTY in fallback_on(named) and not self._is_able(chain[0].model):
            named.at = self._next_able(named, identity)
        return named

    def _permitted(self, asked: str, chain: Sequence[Served], identity: Identity) -> Sequence[Served]:
        """Return the models for a client who may not use the one of its share, but may another one's: that with the
        greatest share, else a part of its chats would find no model under a name that others do."""
        assert self.table is not None
        listed = self.router.registry.pools.names.listed
        shares = [each for each in self.table.reachable(asked, tenant_of(identity), listed) if each.is_own]
        first = next((each for each in shares if identity.may_use(each.model)), None)
        return chain if first is None else (first, *[each for each in chain[1:] if each.model != first.model])

    def _begin(self, call: Call) -> Steps[None]:
        named = call.named
        if named is None:
            return
        yield from self._take(call, named)
        if named.at:
            self.counters.fallbacks[EMPTY] += 1
        if len(call.request.body) > UNCOUNTED_BYTES_MAX:
            yield checkpoint  # before it is read

    def _take(self, call: Call, named: NamedModel) -> Steps[None]:
        call.request = yield from in_portions(named.edited(named.served))
        call.limits = self._limits_of(named.served)
        self.counters.served[self._label(named.served)] += 1
        if any(rule.names_asked for rule in named.served.rules):
            call.client.renamed = call.client.renamed or RenamedAnswer(named.asked)

    def missing(self, model: str, identity: Identity | None) -> ModelNotFound:
        """Return the error for a model that nobody serves. It names only those that this client may use."""
        names, may_use = self.router.registry.pools.names, (identity or ANYBODY).may_use
        aliases = self.table.shown(names.listed, tenant_of(identity)) if self.table is not None else NO_ALIASES
        return names.missing(model, may_use, aliases)

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

    def _next_able(self, named: NamedModel, identity: Identity | None) -> int:
        """Return which model of the chain is to be asked next: the first that the key may use by its own name, and that
        has engines for it; 0 if there is none."""
        for at in range(named.at + 1, len(named.chain)):
            model = named.chain[at].model
            if (identity is None or identity.may_use(model)) and self._is_able(model):
                return at
        return 0

    def _is_able(self, model: str) -> bool:
        """Whether engines of this model may be asked, other than as a last resort."""
        pool = self.router.registry.pools.pool(model, time.monotonic())
        return bool(pool.ids) and not pool.last_resort

    def following(self, call: Call, named: NamedModel, judgement: Judgement) -> int:
        """Return which model of the chain is asked once all tries with one have failed so; 0 if the client is to have
        what came. What an engine keeps only that one has."""
        kind = kind_of(judgement)
        if kind not in fallback_on(named) or call.read.prompt.response_key:
            return 0
        following = self._next_able(named, call.identity)
        if following:
            self.counters.fallbacks[kind] += 1
        return following

    def fallen_back(self, call: Call) -> Steps[PoolMatch | None]:
        """Have the next model asked, if it is to be. Returns the match of the request for that."""
        named = call.named
        if named is None or not named.following:
            return None
        named.at, named.following, named.fell_back = named.following, 0, True
        named.kept = call.failed_tries.kept if call.failed_tries is not None else None
        call.failed_tries = None
        yield from self._take(call, named)
        for stage in self.again:
            steps = stage(call)
            if steps is not None:
                yield from steps
        return call.match

    def at_keeper(self, call: Call, named: NamedModel) -> Steps[None]:
        """Name the model as the engine does that keeps the response which the request continues, whichever share the
        request is of."""
        catalog = call.match.pool.backends[0].catalog
        if self.table is None or not call.read.prompt.response_key or catalog.serves(named.served.model):
            return
        listed = self.router.registry.pools.names.listed
        reachable = self.table.reachable(named.asked, tenant_of(call.identity), listed)
        if kept := [each for each in reachable if catalog.serves(each.model)]:
            named.chain, named.at = kept[:1], 0
            yield from self._take(call, named)
            yield from self.again[0](call) or ()

    def _label(self, served: Served) -> str:
        """Return the model as metrics name it: names that clients invent are counted by their table."""
        is_bounded = self.table is not None and served.model in self.table.targets
        return served.model if is_bounded else served.rules[-1].name


def tenant_of(identity: Identity | None) -> str:
    return identity.tenant.name if identity is not None else ""


def fallback_on(named: NamedModel) -> Collection[str]:
    """Return for what the table of a name lets another model be asked."""
    return next((rule.fallback_on for rule in named.chain[0].rules if rule.fallback), ())


def kind_of(judgement: Judgement) -> str:
    """Return why another model may be asked; "" for what no other would mend."""
    if judgement.is_too_long:
        return TOO_LONG
    return EMPTY if judgement.lacks_model else KIND_OF.get(judgement.outcome, "")


def body_for(request: HttpRequest, values: OuterValues, model: Scalar, served: Served) -> Edited:
    splices = yield from body_splices(request.path, values, model, served)
    return request.with_body(spliced(request.body, splices)) if splices else request


def form_for(request: HttpRequest, model: FormModel, served: Served) -> Edited:
    yield from ()
    if served.model == model.name:
        return request
    return request.with_body(spliced(request.body, [(model.start, model.end, served.model.encode())]))


def query_for(request: HttpRequest, served: Served) -> Edited:
    """Return the request with another `model` in its query, and all else as it was written."""
    yield from ()
    target, found = request.target, QUERY_MODEL.search(request.target)
    if found is None or served.model == model_of(target):
        return request
    name = quote(served.model, safe="").encode()
    target = target[: found.start(1)] + name + target[found.end(1) :]
    known = request.body, request.http_minor, request.keep_alive, request.fields, request.path
    return HttpRequest(request.method, target, request.headers, *known)
