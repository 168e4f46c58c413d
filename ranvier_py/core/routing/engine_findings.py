"""What is wrong with engines, as the findings of one node: pure, from the registry alone.

Rule: an engine has one finding, the one that explains the others: who does not answer is not blamed for its circuit.
That it is drained stands beside that.
Severity: DOWN if no engine can be asked; what takes requests or hits from the fleet is DEGRADED; what an operator has
ordered, or a provider does by nature, is a NOTICE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.routing.backend import Backend
from ranvier_py.core.routing.backends import Registry
from ranvier_py.core.routing.blame.refusals import BLANK_STATUS
from ranvier_py.core.routing.health import Circuit, Outcome

DETAIL_CHARACTERS_MAX = 160  # of what an engine answered: what names the cause comes first
MODELS_SHOWN = 3

SOURCES = "curl http://CONTROL/admin/sources"

SUCCESS_RATE_MIN = 0.9
"""Below it an engine has failed about ten of its last hundred requests (`SUCCESS_WINDOW`)."""

FAULTS_MAX = 1
"""Failures in a row, of what others served, that may be chance: who fails is asked so seldom that few more come."""

FAILED = (Outcome.SERVER_ERROR, Outcome.CONNECT_ERROR, Outcome.TIMEOUT, Outcome.BROKEN)


def engine_findings(registry: Registry, now: float) -> Iterator[Finding]:
    """Yield the findings of all engines, and of the fleet as a whole."""
    fleet = [each for each in registry if not each.behind.as_ranks]
    yield from of_fleet(registry, fleet, now)
    for backend in fleet:
        found = trouble(backend, registry, now)
        if found is not None:
            yield found
        if backend.draining and (other := ailment(backend, registry, now)) is not None:  # it costs nobody anything now
            yield replace(other, severity=Severity.NOTICE, whom="")
        if backend.advice:
            what = f"engine {backend.name}: {backend.advice}"
            remedy = "Give each engine one URL, the same on all nodes, with one process behind it."
            yield of_engine("engine_url", Severity.DEGRADED, backend, what, "hits: its prefixes are split", remedy)


def of_fleet(registry: Registry, fleet: Sequence[Backend], now: float) -> Iterator[Finding]:
    """Yield that nobody serves: no request, or none for a model that engines list."""
    pool = registry.pools.pool("", now)
    if not fleet:
        what, remedy = "this node has no engine", "Add one, here or as backend in the configuration."
        command = "ranvier backend add http://HOST:PORT"
        yield Finding("no_engine", Severity.DOWN, what, whom="all requests: 503", remedy=remedy, command=command)
        return
    if not pool.ids or pool.last_resort or pool.silent:
        states = {(found.kind if (found := trouble(each, registry, now)) else "engine_fails") for each in fleet}
        what = f"none of {len(fleet)} engines serves ({', '.join(sorted(states))})"
        remedy = "Start one of the engines below, or mend what each says."
        yield Finding(
            "no_engine", Severity.DOWN, what, whom="all requests", remedy=remedy, command="ranvier status --all"
        )
        return
    serving = {model for each in pool.backends for model in each.catalog.models or ()}
    lost = {model for each in fleet for model in each.catalog.models or ()} - serving
    if lost and all(each.catalog.models is not None and not each.catalog.any_model for each in pool.backends):
        names = sorted(lost)
        what = f"no engine serves {', '.join(names[:MODELS_SHOWN])} any more"
        what += f" and {len(names) - MODELS_SHOWN} more models" if len(names) > MODELS_SHOWN else ""
        remedy = "Start an engine with it; the ones that list it are below."
        yield Finding(
            "model_down", Severity.DEGRADED, what, about=names[0], whom="all requests for it: 503", remedy=remedy
        )


def trouble(backend: Backend, registry: Registry, now: float) -> Finding | None:
    """Return the one finding that explains an engine's state best; None if it is well."""
    return draining(backend) or ailment(backend, registry, now)


def ailment(backend: Backend, registry: Registry, now: float) -> Finding | None:
    """Return the worst that is wrong with an engine, drained or not."""
    return (
        silence(backend)
        or failures(backend)
        or refusals(backend, registry)
        or pause(backend, registry, now)
        or reuse(backend)
    )


def draining(backend: Backend) -> Finding | None:
    if not backend.draining:
        return None
    left = backend.work.own.inflight
    if backend.origin.leaving:  # by its sources, each node for itself: nobody can undrain it
        what = f"engine {backend.name} gets no new requests, {left} of this node are running: {backend.origin.leaving}"
        return of_engine("engine_leaving", Severity.NOTICE, backend, what, "", "Leave it, or see its sources.", SOURCES)
    what = f"engine {backend.name} is drained: it gets no new requests, {left} of this node are running"
    command = f"ranvier backend undrain {backend.name}"
    return of_engine("engine_draining", Severity.NOTICE, backend, what, "", "Take it out, or undrain it.", command)


def silence(backend: Backend) -> Finding | None:
    """Return what probes say: dead, or hanging."""
    vitals, probe = backend.vitals, backend.seen.last_probe
    look = f"curl -m 5 {backend.url.partition('#')[0]}/health"
    if vitals.silent and not vitals.by_report:
        what = f"engine {backend.name} hangs: it takes requests and answers nothing, nor its probes"
        remedy = "Look at its log and its GPU; restart it. Requests go there only if no other engine is left."
        return of_engine("engine_hangs", Severity.DEGRADED, backend, what, served_by_others(backend), remedy, look)
    if vitals.dead or vitals.silent:
        why = "as peers report" if vitals.by_report else (probe.detail if probe is not None else "")
        why = "its port refuses connections" if probe is not None and probe.refused else why
        what = f"engine {backend.name} does not answer" + (f": {why[:DETAIL_CHARACTERS_MAX]}" if why else "")
        remedy = "See whether its process runs and its port is open from here; it is asked again by itself."
        if probe is not None and probe.loops:
            remedy = "Name the engine's own address instead: requests would come back until this node is full."
        return of_engine("engine_down", Severity.DEGRADED, backend, what, served_by_others(backend), remedy, look)
    return key_refused(backend)


def key_refused(backend: Backend) -> Finding | None:
    if not backend.seen.key_refused:
        return None
    what = f"engine {backend.name} refuses this node's key: {backend.seen.key_refused}"
    remedy = "Set backend_api_key_file, or its own api_key_file, to the engine's --api-key; a reload takes it."
    whom = "what its pages would show, and requests without a key of their own"
    command = "ranvier config --check"
    return of_engine("engine_key_refused", Severity.DEGRADED, backend, what, whom, remedy, command)


def failures(backend: Backend) -> Finding | None:
    """Return that it fails requests: its circuit opened, or some lately failed."""
    seen, is_open = backend.seen, backend.circuit is not Circuit.CLOSED
    most = FAULTS_MAX if seen.outcomes[Outcome.SUCCESS] else 0  # one that has served nothing has no credit
    if not is_open and seen.success_rate >= SUCCESS_RATE_MIN and backend.vitals.faults <= most:
        return None
    counts = [f"{seen.outcomes[outcome]} {outcome.value}" for outcome in FAILED if seen.outcomes[outcome]]
    what = f"engine {backend.name} fails requests ({', '.join(counts) or 'as others show'}"
    what += f"; last: {seen.complaint[:DETAIL_CHARACTERS_MAX]})" if seen.complaint else ")"
    what += ": its circuit is open" if is_open else ""
    whom = served_by_others(backend) if is_open else "some of its requests"
    remedy = "Its log has why. It gets a request now and then, and all again once that succeeds."
    return of_engine("engine_fails", Severity.DEGRADED, backend, what, whom, remedy, shown_by(backend))


def refusals(backend: Backend, registry: Registry) -> Finding | None:
    status = registry.refusals.status_of(backend.id)
    if not status:
        return None
    whom, command = served_by_others(backend), shown_by(backend)
    if status == BLANK_STATUS:
        what = f"engine {backend.name} answers without a word where others have words"
        remedy = "Compare its weights, chat template and stop words with those of the others."
        return of_engine("engine_answers_nothing", Severity.DEGRADED, backend, what, whom, remedy, command)
    what = f"engine {backend.name} refuses with {status} what others serve"
    remedy = "Compare its model, key and version with those of the others."
    return of_engine("engine_refuses", Severity.DEGRADED, backend, what, whom, remedy, command)


def pause(backend: Backend, registry: Registry, now: float) -> Finding | None:
    left_s = registry.pauses.left_s(backend.id, now)
    if not left_s:
        return None
    what = f"engine {backend.name} has no room (429, 529 or a full queue): it wants a pause, {left_s:.0f} s are left"
    remedy = "Add engines, lower limits of tenants, or raise what it takes (--max-num-seqs)."
    return of_engine("engine_busy", Severity.DEGRADED, backend, what, "it is asked last", remedy, "ranvier access")


def reuse(backend: Backend) -> Finding | None:
    why_not = backend.reuse.why_not
    if not why_not:
        return None
    hosted = backend.catalog.hosted
    what = f"engine {backend.name} reuses no prefixes: {why_not}"
    remedy = "Start it with prefix caching (vLLM: --enable-prefix-caching, SGLang: without --disable-radix-cache)."
    severity = Severity.NOTICE if hosted else Severity.DEGRADED  # of a provider nobody can change it
    return of_engine("engine_reuses_nothing", severity, backend, what, "its requests are placed by load alone", remedy)


def served_by_others(backend: Backend) -> str:
    models = backend.catalog.models
    return f"requests for {', '.join(models[:3])} go to other engines" if models else "its requests go to other engines"


def shown_by(backend: Backend) -> str:
    return f"ranvier status --engine {backend.name}"


def of_engine(
    kind: str, severity: Severity, backend: Backend, what: str, whom: str, remedy: str, command: str = ""
) -> Finding:
    return Finding(kind, severity, what, about=backend.name, whom=whom, remedy=remedy, command=command)


def unserved(tables: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Yield the tables of models that lead to what no engine serves: the models by the table's name."""
    for name, models in tables.items():
        what = f"model {name} leads to {', '.join(models)}, which no engine serves"
        whom, remedy = f"who asks for {name}", "Correct its targets, or start an engine that serves them."
        yield Finding("model", Severity.DEGRADED, what, about=f"model {name}", whom=whom, remedy=remedy)
