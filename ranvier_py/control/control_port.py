"""The control port: health, metrics and administration of one node, by quart-trio on hypercorn.

    GET  /healthz  /readyz  /metrics
    GET POST DELETE /admin/backends      POST /admin/backends/drain      GET /admin/routes  /admin/routes/FINGERPRINT
    GET  /admin/kv-index/stats  /admin/kv-index/backends       POST /admin/kv-index/clear
    GET  /admin/decisions  /admin/config  /admin/cluster  /admin/cluster/sums      POST /explain
    POST /add_worker?url=  /remove_worker?url=   GET /list_workers       as SGLang's router answers them
    POST /internal/eviction  /internal/sync  /internal/events     GET /internal/workers        control/worker_reports.py

Rules: it never touches a proxied request, and no answer of its own takes long: a method of the port it serves is one
synchronous call, or gives way meanwhile. With a key, everything but /healthz and /readyz needs it as bearer key
(/metrics unless it is public). Without one, only what comes from this machine on purpose is served: a web page in its
browser can't command the node. Errors have OpenAI's shape. Bad input is a 4xx, never a 500.

Quart's limits are chosen on purpose here: none on the time of an answer, some on bodies. The other traps of the stack
are the business of control/control_server.py.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson
import trio
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from ranvier_py.control.control_input import (
    fingerprint_of,
    input_errors,
    json_body,
    limit_of,
    raw_body,
    text_of,
    worker_url,
)
from ranvier_py.control.control_server import ControlSettings, serve_app
from ranvier_py.control.operations import Admin
from ranvier_py.control.worker_reports import InternalHandlers, InternalPort, admitted
from ranvier_py.core.addresses import is_address, is_loopback
from ranvier_py.core.errors import BadRequest, Forbidden, NotFound, RanvierError, Unauthorized
from ranvier_py.core.metrics import Sample

log = logging.getLogger(__name__)

BODY_TIMEOUT_S = 30
"""A prompt of 16 MiB, to be explained, at 5 Mbit/s."""

TREE_ROUTES_MAX = 1000
DECISIONS_MAX = 1000

OPEN_PATHS = ("/healthz", "/readyz")
"""Need no key: orchestrators ask them, and they say nothing that a connection attempt would not."""


Render = Callable[[Sequence[Sample], str], tuple[bytes, str]]
"""(samples, Accept header) -> (body, content type); control/exposition.py has it."""


# --- serving --------------------------------------------------------------------------------------------------------


async def serve(
    port: Admin,
    settings: ControlSettings,
    render: Render,
    *,
    internal: InternalPort | None = None,
    shutdown: trio.Event,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `shutdown` is set or the task cancelled, then end within `close_grace_s`, whatever clients do.

    Reports the URL it listens on through `task_status`. Raises OSError when the address can't be bound.
    """
    app = make_app(port, settings, render, internal)
    await serve_app(app, settings, shutdown=shutdown, task_status=task_status)


# --- the application ------------------------------------------------------------------------------------------------


def make_app(port: Admin, settings: ControlSettings, render: Render, internal: InternalPort | None = None) -> QuartTrio:
    """The routes of one control port."""
    app = QuartTrio(__name__, static_folder=None)
    app.config.update(
        RESPONSE_TIMEOUT=None,  # else 60 s over the whole of a streamed answer; each send has a deadline of its own
        BODY_TIMEOUT=BODY_TIMEOUT_S,
        MAX_CONTENT_LENGTH=settings.body_bytes_max,
        PROVIDE_AUTOMATIC_OPTIONS=False,
    )
    guard = Guard(settings)
    app.before_request(guard.check)
    app.register_error_handler(RanvierError, refused)
    app.register_error_handler(HTTPException, refused_by_framework)
    app.register_error_handler(Exception, failed)
    handlers = Handlers(port, render)
    pushes = InternalHandlers(internal, settings.key).table() if internal is not None else ()
    for method, path, view in (*handlers.table(), *pushes):
        app.add_url_rule(path, f"{method} {path}", view, methods=[method])
    return app


class Guard:
    """Decides who may ask."""

    def __init__(self, settings: ControlSettings) -> None:
        self._key = settings.key
        self._expected = f"Bearer {settings.key}".encode() if settings.key else None
        self._host = settings.host
        self._open = (*OPEN_PATHS, "/metrics") if settings.metrics_public else OPEN_PATHS

    async def check(self) -> None:
        """Raises Unauthorized or Forbidden."""
        if request.path in self._open:
            return
        if self._key and self._expected is not None:
            field = spelled_usually(request.headers.get("authorization", ""))
            given = field.encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, self._expected) and not admitted(request.path, field, self._key):
                raise Unauthorized("the control port needs its key: Authorization: Bearer KEY")
            return
        self._check_browser(request.headers.get("host", ""), request.headers.get("origin"))

    def _check_browser(self, host_field: str, origin: str | None) -> None:
        """Without a key, a page from elsewhere may not use the browser of someone on this machine.

        Its own requests carry an Origin; a name of its own that it makes point here (DNS rebinding) shows in Host.
        """
        host = urlsplit(f"//{host_field}").hostname or ""
        if host and host != self._host and not is_loopback(host) and not is_address(host):
            raise Forbidden("without a control key, use an address or localhost, not a name")
        if origin is not None and urlsplit(origin).netloc != host_field:
            raise Forbidden("without a control key, pages from elsewhere may not ask")


def spelled_usually(field: str) -> str:
    """The same field with its scheme as «Bearer», which may be written in any case (RFC 9110, 11.1)."""
    scheme, space, key = field.partition(" ")
    return f"Bearer{space}{key}" if scheme.lower() == "bearer" else field


def view_of(make: Callable[[], Mapping[str, Any]]) -> Callable[[], Awaitable[Response]]:
    """A handler that answers with what this makes."""

    async def view() -> Response:
        with input_errors():
            return json_response(make())

    return view


class Handlers:
    """One method for each route that does more than to show something."""

    def __init__(self, port: Admin, render: Render) -> None:
        self._port = port
        self._render = render

    def table(self) -> Sequence[tuple[str, str, Callable[..., Any]]]:
        """(method, path, handler)"""
        port = self._port
        views = {
            "/healthz": lambda: {"status": "ok"},
            "/admin/routes": port.routes,
            "/admin/config": port.config,
            "/admin/engine-cache": port.engine_caches,
            "/admin/calibration": port.calibration,
            "/admin/cluster": port.cluster,
            "/admin/kv-index/stats": lambda: port.kv_index.stats(),  # noqa: PLW0108  # which is there once the node is
            "/admin/kv-index/backends": lambda: port.kv_index.backends(),  # noqa: PLW0108
        }
        return (
            *(("GET", path, view_of(make)) for path, make in views.items()),
            ("POST", "/admin/kv-index/clear", view_of(lambda: port.kv_index.clear())),  # noqa: PLW0108
            ("GET", "/readyz", self.readyz),
            ("GET", "/metrics", self.metrics),
            ("GET", "/admin/backends", self.backends),
            ("POST", "/admin/backends", self.add_backend),
            ("DELETE", "/admin/backends", self.remove_backend),
            ("POST", "/admin/backends/drain", self.drain_backend),
            ("GET", "/admin/routes/<fingerprint>", self.route_tree),
            ("GET", "/admin/decisions", self.decisions),
            ("GET", "/admin/cluster/sums", self.route_sums),
            ("POST", "/explain", self.explain),
            ("POST", "/add_worker", self.add_worker),
            ("POST", "/remove_worker", self.remove_worker),
            ("GET", "/list_workers", self.list_workers),
        )

    async def readyz(self) -> Response:
        ready, reason = self._port.ready()
        return json_response({"ready": ready, "reason": reason}, 200 if ready else 503)

    async def metrics(self) -> Response:
        body, content_type = self._render(self._port.metrics(), request.headers.get("accept", ""))
        return Response(body, content_type=content_type)

    async def backends(self) -> Response:
        return json_response({"backends": self._port.backends()})

    async def add_backend(self) -> Response:
        body = await json_body("url", "weight", "name", "kv_events", "kv_replay", "kv_ranks", others=True)
        with input_errors():
            return json_response(self._port.add_backend(body))

    async def remove_backend(self) -> Response:
        url = request.args.get("url") or text_of(await json_body("url"), "url")
        with input_errors():
            return json_response(self._port.remove_backend(url))

    async def drain_backend(self) -> Response:
        body = await json_body("url", "draining")
        url, draining = text_of(body, "url"), body.get("draining", True)
        if not isinstance(draining, bool):
            raise BadRequest("draining must be true or false")
        with input_errors():
            return json_response(self._port.drain_backend(url, draining))

    async def route_tree(self, fingerprint: str) -> Response:
        number = fingerprint_of(fingerprint)
        found = self._port.route_tree(number, limit_of(TREE_ROUTES_MAX))
        if not found:
            raise NotFound(f"no route has the fingerprint {number:016x}")
        return json_response({"fingerprint": f"{number:016x}", "routes": found})

    async def decisions(self) -> Response:
        return json_response({"decisions": self._port.decisions(limit_of(DECISIONS_MAX))})

    async def route_sums(self) -> Response:
        with input_errors():
            return Response(await self._port.route_sums(), content_type="application/octet-stream")

    async def explain(self) -> Response:
        body = await raw_body()
        with input_errors():
            return json_response(await self._port.explain(body))

    async def add_worker(self) -> Response:
        url = worker_url()
        with input_errors():
            self._port.add_backend({"url": url})
        return Response(f"Successfully added worker: {url}", content_type="text/plain; charset=utf-8")

    async def remove_worker(self) -> Response:
        url = worker_url()
        with input_errors():
            self._port.remove_backend(url)
        return Response(f"Successfully removed worker: {url}", content_type="text/plain; charset=utf-8")

    async def list_workers(self) -> Response:
        return json_response({"urls": [backend["url"] for backend in self._port.backends()]})


# --- output ---------------------------------------------------------------------------------------------------------


def json_response(value: Any, status: int = 200) -> Response:
    body = orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status=status, content_type="application/json")


def error_response(status: int, message: str, kind: str, code: str) -> Response:
    """OpenAI's shape of an error."""
    response = json_response({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)
    if status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def refused(error: RanvierError) -> Response:
    return error_response(error.status, str(error), error.kind, error.code)


async def refused_by_framework(error: HTTPException) -> Response:
    """Unknown paths and methods, bodies that are too large or too slow."""
    status = error.code or 500
    kind = "invalid_request_error" if status < 500 else "api_error"
    code = (error.name or "error").lower().replace(" ", "_")
    response = error_response(status, f"{request.method} {request.path}: {error.name}", kind, code)
    for name, value in error.get_headers():
        if name.lower() == "allow":
            response.headers[name] = value
    return response


async def failed(error: Exception) -> Response:
    """A bug of ours. The log has it; the client learns no more than that."""
    log.error("control.failed %s %s", request.method, request.path, exc_info=error)
    return error_response(500, "internal error; the log of the node says more", "api_error", "internal_error")
