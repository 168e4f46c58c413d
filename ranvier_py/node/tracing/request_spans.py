"""The spans of one request, made from its Call once it has ended.

One SERVER span; in it, for each attempt, `ranvier.place`, from what came before it to the decision, and a CLIENT span
with GenAI's attributes, below which the engine's own spans hang. A request that reached no engine has the first alone.
Rule: attributes are counts, names and ids; no text, no header, no query (test_spans_of_requests.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ranvier_py.core.errors import RanvierError
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.health import FAULTS, Outcome
from ranvier_py.core.routing.request_paths import PATHS
from ranvier_py.core.tracing.span import CLIENT, INTERNAL, SERVER, Attribute, TraceSpan
from ranvier_py.core.tracing.span_names import OPERATIONS
from ranvier_py.core.tracing.trace_context import RequestTrace
from ranvier_py.proxy.call import Call
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.proxy.transport import TlsTransport

METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"CONNECT", b"OPTIONS", b"TRACE", b"PATCH", b"QUERY"))
"""Of spans' names; any other one is HTTP there (HTTP conventions)."""

ENGINES = ("sglang", "vllm")  # as their model cards call them, and GenAI's providers

COMPLETE = ("", *(each.value for each in (Outcome.SUCCESS, Outcome.REFUSED, Outcome.SERVER_ERROR, Outcome.OVERLOADED)))
FAILED = 500  # statuses from here on are errors of a server; those below are its clients' own


def codes_of(kind: type[RanvierError]) -> Iterator[str]:
    """Yield the codes of errors that are not the client's."""
    if kind.status >= FAILED:
        yield kind.code
    for each in kind.__subclasses__():
        yield from codes_of(each)


OUR_FAULTS = frozenset((*(outcome.value for outcome in FAULTS), *codes_of(RanvierError)))
"""Outcomes of requests that went wrong, also behind a status of 200."""


def has_failed(call: Call) -> bool:
    """Whether a request is kept though it is not sampled: it failed, or one of its tries did. What a client did wrong
    is not: whoever sends many such requests would fill the collector."""
    if call.status >= FAILED or call.outcome in OUR_FAULTS:
        return True
    if call.attempt is not None and call.attempt.reply.outcome in FAULTS:
        return True
    return bool(call.earlier) and any(each.reply.outcome in FAULTS for each in call.earlier)


def spans_of(
    call: Call, trace: RequestTrace, now: float, wall_s: float, names: Mapping[str, str]
) -> Iterator[TraceSpan]:
    """Yield the spans of a request that has ended now. `wall_s`: the time of day at 0 of the clock of `now`."""
    request = call.request
    attempts = call.earlier if call.attempt is None else (*call.earlier, call.attempt)
    error = call.outcome if call.status >= FAILED or call.outcome in OUR_FAULTS else ""
    yield TraceSpan(
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        parent_id=trace.parent_id,
        name=name_of(request),
        kind=SERVER,
        begin=call.started_at + wall_s,
        end=now + wall_s,
        attributes={
            **of_request(request, call.client, call.status),
            "error.type": error_type(call.status, call.outcome),
            "ranvier.request_id": call.id.decode("latin-1"),
            "ranvier.outcome": call.outcome,
            "ranvier.cache": call.cached.decode(),
            "ranvier.tries": call.tries,
            "ranvier.key_id": call.identity.key_id if call.identity is not None else "",
            "ranvier.tenant": call.identity.tenant.name if call.identity is not None else "",
            "ranvier.model_asked": call.named.asked if call.named is not None else "",
        },
        error=error,
        state=trace.state.decode(),
        is_sampled=trace.is_sampled,
        is_remote=trace.parent_id != "",
    )
    since = call.started_at
    for number, attempt in enumerate(attempts, start=1):
        ended_at = attempt.reply.ended_at or now
        yield from spans_of_attempt(call, trace, attempt, number, (since, ended_at, wall_s), names)
        since = ended_at


def spans_of_attempt(
    call: Call,
    trace: RequestTrace,
    attempt: Attempt,
    number: int,
    times: tuple[float, float, float],
    names: Mapping[str, str],
) -> Iterator[TraceSpan]:
    """Yield the placement of an attempt, and the attempt. `times`: when what came before it ended, when it ended
    itself, and the time of day at 0 of their clock."""
    since, ended_at, wall_s = times
    decision, reply, counts, state = attempt.decision, attempt.reply, attempt.reply.counts, trace.state.decode()
    yield TraceSpan(
        trace_id=trace.trace_id,
        span_id=trace.placing(number),
        parent_id=trace.span_id,
        name="ranvier.place",
        kind=INTERNAL,
        begin=since + wall_s,
        end=max(since, attempt.sent_at) + wall_s,
        attributes={
            "ranvier.engine": decision.backend_name,
            "ranvier.policy": decision.policy,
            "ranvier.reason": decision.reason,
            "ranvier.source": decision.source,
            "ranvier.candidates": len(decision.candidates),
            "ranvier.prompt_tokens": decision.prompt_tokens,
            "ranvier.matched_tokens": decision.matched_tokens,
        },
        state=state,
        is_sampled=trace.is_sampled,
    )
    operation, model = operation_of(call.request), attempt.prompt.model
    has_faults, first_at = reply.outcome in FAULTS or reply.status >= 400, attempt.first_at
    host, _, port = attempt.target.url.partition("://")[2].rpartition(":")
    yield TraceSpan(
        trace_id=trace.trace_id,
        span_id=trace.asking(number),
        parent_id=trace.span_id,
        name=f"{operation} {model}".rstrip(),
        kind=CLIENT,
        begin=attempt.sent_at + wall_s,
        end=ended_at + wall_s,
        attributes={
            names["operation"]: operation,
            names["provider"]: next((each for each in ENGINES if each in attempt.target.catalog.owned_by), ""),
            names["request_model"]: model,
            names["stream"]: attempt.prompt.stream,
            names["input_tokens"]: counts.prompt,
            names["output_tokens"]: counts.answer,
            names["cached_tokens"]: counts.cached,
            names["written_tokens"]: counts.written,
            names["first_chunk_s"]: first_at - attempt.sent_at if first_at and attempt.prompt.stream else None,
            "http.request.method": call.request.method.decode("latin-1"),
            "http.response.status_code": reply.status or None,
            "server.address": host,
            "server.port": int(port) if port.isdigit() else None,
            "error.type": error_type(reply.status, reply.outcome.value if reply.outcome is not None else ""),
            "ranvier.engine": decision.backend_name,
            "ranvier.try": number,
        },
        error=(reply.complaint or outcome_of(attempt)) if has_faults else "",
        state=state,
        is_sampled=trace.is_sampled,
    )


def span_of_refused(
    request: HttpRequest, client: Client, trace: RequestTrace, error: RanvierError, now_s: float
) -> TraceSpan:
    """Return the span of a request that was refused by its head, at this time of day."""
    return TraceSpan(
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        parent_id=trace.parent_id,
        name=name_of(request),
        kind=SERVER,
        begin=now_s,
        end=now_s,
        attributes={
            **of_request(request, client, error.status),
            "error.type": error_type(error.status, error.code),
            "ranvier.request_id": client.request_id.decode("latin-1"),
            "ranvier.outcome": error.code,
        },
        error=error.code if error.status >= FAILED else "",
        state=trace.state.decode(),
        is_sampled=trace.is_sampled,
        is_remote=trace.parent_id != "",
    )


def of_request(request: HttpRequest, client: Client, status: int) -> Mapping[str, Attribute | None]:
    """Return the attributes of HTTP's conventions."""
    seen = client.seen_head
    address = (seen.client if seen is not None else "") or client.peer.rpartition(":")[0].strip("[]")
    path = request.path.decode("latin-1")
    return {
        "http.request.method": method_of(request),
        "http.route": path if request.path in PATHS else "",
        "url.path": path,
        "url.scheme": "https" if isinstance(client.transport, TlsTransport) else "http",
        "http.response.status_code": status or None,
        "client.address": address,
    }


def name_of(request: HttpRequest) -> str:
    """Return the name of a SERVER span: few, whatever clients ask for."""
    method = method_of(request) if request.method in METHODS else "HTTP"
    return f"{method} {request.path.decode()}" if request.path in PATHS else method


def method_of(request: HttpRequest) -> str:
    return request.method.decode("latin-1") if request.method in METHODS else "_OTHER"


def operation_of(request: HttpRequest) -> str:
    rule = PATHS.get(request.path)
    if rule is None:
        return "request"
    return OPERATIONS.get(rule.reader) or request.path.rpartition(b"/")[2].decode()


def error_type(status: int, outcome: str) -> str:
    """Return what went wrong: of a complete answer its status."""
    if outcome in COMPLETE:
        return str(status) if status >= 400 else ""
    return outcome


def outcome_of(attempt: Attempt) -> str:
    return attempt.reply.outcome.value if attempt.reply.outcome is not None else ""
