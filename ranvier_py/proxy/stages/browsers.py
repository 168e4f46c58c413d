"""Answers browsers that ask whether a page may send a request, and learns what pages of an origin may read.

Rules: a preflight needs no key: it is passed to an engine and ends here, or is answered by what is known if no engine
answers, or if the operator names origins. Before the first other request from an origin an engine is asked, so that
whatever the node answers by itself can be read as an engine's answer could. Bounds: ENGINES_MAX, ASK_S, BYTES_MAX.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ranvier_py.core.answers.chunked import payload_of
from ranvier_py.core.errors import Forbidden, NoBackend, NodeExhausted, UpstreamError
from ranvier_py.core.routing.backends import Registry
from ranvier_py.core.routing.health import outcome_of
from ranvier_py.core.routing.request_paths import PATHS
from ranvier_py.proxy.admission.request_target import misleads
from ranvier_py.proxy.answers.cors import MAX_AGE, METHODS, ORIGIN, PREFIX, Cors
from ranvier_py.proxy.call import Call
from ranvier_py.proxy.connection_pool import BackendAddress
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.http_values import HttpRequest, HttpResponseHead, WaitPhase
from ranvier_py.proxy.stages.own_answer import MODELS_PATH
from ranvier_py.proxy.upstream import Upstream

ENGINES_MAX, ASK_S, BYTES_MAX = 2, 2.0, 4096
"""Engines asked one after another, how long each has, and how much of an answer is passed on: engines say «OK»."""

METHOD, HEADERS = PREFIX + b"request-method", PREFIX + b"request-headers"


@dataclass(slots=True, eq=False, repr=False)
class BrowserStage:
    registry: Registry
    upstream: Upstream
    address_of: Callable[[str], BackendAddress]

    def __call__(self, call: Call) -> Steps[bool]:
        """Return whether this was a preflight, which is answered then. Raises RanvierError for one that can't be."""
        request, cors = call.request, call.client.cors
        origin, method = request.fields.origin, asked_method(request)
        if request.method == b"OPTIONS" and method:
            yield from self._preflight(call, cors, origin)
            return True
        if request.method != b"OPTIONS" and not request.fields.upgrades and cors.is_due(origin, time.monotonic()):
            headers = [(b"origin", origin), (METHOD, request.method)]
            yield from self._ask(call, cors, HttpRequest(b"OPTIONS", target_of(request), headers), origin)
        return False

    def _preflight(self, call: Call, cors: Cors, origin: bytes) -> Steps[None]:
        request, answer = call.request, None
        if not cors.origins:
            fields = request.fields
            passed = HttpRequest(
                method=b"OPTIONS",
                target=target_of(request),
                headers=request.headers,
                body=b"",
                http_minor=request.http_minor,
                keep_alive=True,
                fields=fields,
            )
            answer = yield from self._ask(call, cors, passed, origin)
        own = cors.fields(origin)
        if answer is not None:
            head, body = answer
            names = {name for name, _ in own}
            more = [
                each for each in head.headers if each[0].lower().startswith(PREFIX) and each[0].lower() not in names
            ]
            status = head.status
        elif own:
            named = [(PREFIX + b"allow-headers", value) for name, value in request.headers if name.lower() == HEADERS]
            status, body, more = 200, b"OK", [METHODS, MAX_AGE, *named]
        else:
            raise (
                Forbidden("cors_origins does not have this origin") if cors.origins else NoBackend("no engine answers")
            )
        call.status, call.outcome = status, outcome_of(status).value
        call.client.respond(status, body, more, b"text/plain; charset=utf-8")

    def _ask(
        self, call: Call, cors: Cors, request: HttpRequest, origin: bytes
    ) -> Steps[tuple[HttpResponseHead, bytes] | None]:
        """Return an engine's answer to a preflight, if there is one that allows anything; else any."""
        found = None
        for backend in self.registry.pools.pool("", time.monotonic()).backends[:ENGINES_MAX]:
            answer = yield from self._exchange(call, self.address_of(backend.url), request)
            found = answer or found
            if answer is not None and any(name.lower() == ORIGIN for name, _ in answer[0].headers):
                break
        cors.asked(origin, None if found is None else found[0], time.monotonic())
        return found

    def _exchange(
        self, call: Call, address: BackendAddress, request: HttpRequest
    ) -> Steps[tuple[HttpResponseHead, bytes] | None]:
        exchange = None
        call.client.arm(WaitPhase.FIRST_BYTE, ASK_S)
        try:
            exchange = yield from self.upstream.open(address, request)
            body = exchange.take()
            while not exchange.complete and len(body) < BYTES_MAX:
                yield exchange.readable
                body += exchange.receive() or b""
        except (UpstreamError, NodeExhausted):  # a page's request must not fail by this
            return None
        finally:
            call.client.work()
            if exchange is not None:
                exchange.release()
        head = exchange.head
        return head, b"" if not head.fields.readable else payload_of(body) if head.framing == "chunked" else body


def asked_method(request: HttpRequest) -> bytes:
    """Return the method that a preflight asks for; empty if this is none (Fetch 3.2.2)."""
    return next((value for name, value in request.headers if name.lower() == METHOD), b"")


def target_of(request: HttpRequest) -> bytes:
    """Return the path that an engine is asked about: it may see no other one of this node's clients either."""
    path = request.path
    return path if (path.startswith(b"/v1/") or path in PATHS) and not misleads(path) else MODELS_PATH
