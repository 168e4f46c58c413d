"""The control port: health, metrics and administration of one node, by quart-trio on hypercorn.

Rules: it never touches a proxied request, and none of its answers blocks for long: each method of Admin that it calls
is one synchronous call, or yields to other tasks. With a key, everything but /healthz and /readyz needs it as bearer
key (/metrics unless it is public). Without a key, web pages from elsewhere that a browser on this machine shows are
refused. Errors have OpenAI's shape. Bad input is a 4xx, never a 500.

Quart's limits are set here on purpose: none on the time of an answer, some on bodies. control/control_server.py handles
the other pitfalls of the stack.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping
from inspect import isawaitable
from typing import Any
from urllib.parse import urlsplit

import orjson
import trio
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from ranvier_py.config.control_settings import ControlSettings
from ranvier_py.control.control_input import (
    bearer,
    field_lines,
    fingerprint_of,
    json_body,
    limit_of,
    raw_body,
    text_of,
    worker_url,
)
from ranvier_py.control.control_server import serve_app
from ranvier_py.control.exposition import render
from ranvier_py.control.operations import Admin
from ranvier_py.control.prefix_admin import prefix_routing_view
from ranvier_py.control.response_admin import CHOICES, invalidate_responses, response_cache_view
from ranvier_py.control.worker_reports import ReportHandlers, admitted
from ranvier_py.core.addresses import is_address, is_loopback
from ranvier_py.core.errors import BadRequest, ConfigError, Forbidden, NotFound, RanvierError, Unauthorized
from ranvier_py.node.node import Node
from ranvier_py.node.reload import Reloads

log = logging.getLogger(__name__)

BODY_TIMEOUT_S = 30
"""Enough for a prompt of 16 MiB, to be explained, at 5 Mbit/s."""

TREE_ROUTES_MAX = 1000
DECISIONS_MAX = 1000

OPEN_PATHS = ("/healthz", "/readyz")
"""Paths that need no key: orchestrators ask them, and they reveal no more than a connection attempt would."""


async def serve_node(
    node: Node,
    reloads: Reloads | None,
    *,
    shutdown: trio.Event,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the control port of a node as `serve_app` does; `reloads` reads its configuration again."""
    settings, reports = node.control, ReportHandlers(node.worker_reports, node.control)
    app = make_app({**Handlers(node, reloads).table(), **reports.table()}, settings)
    await serve_app(app, settings, shutdown=shutdown, faults=node.faults, task_status=task_status)


def make_app(routes: Mapping[str, Callable[..., Any]], settings: ControlSettings) -> QuartTrio:
    """Return the app of one control port; `routes` has what answers each method and path, see `view_of`."""
    app = QuartTrio(__name__, static_folder=None)
    app.config.update(
        RESPONSE_TIMEOUT=None,  # the default is 60 s for a whole streamed answer; here each send has its own deadline
        BODY_TIMEOUT=BODY_TIMEOUT_S,
        MAX_CONTENT_LENGTH=settings.body_bytes_max,
        PROVIDE_AUTOMATIC_OPTIONS=False,
    )
    guard = Guard(settings)
    app.before_request(guard.check)
    app.register_error_handler(RanvierError, refused)
    app.register_error_handler(HTTPException, refused_by_framework)
    app.register_error_handler(Exception, failed)
    for route, handler in routes.items():
        method, path = route.split(" ")
        app.add_url_rule(path, route, view_of(handler), methods=[method])
    return app


class Guard:
    """Decides who may use the control port."""

    def __init__(self, settings: ControlSettings) -> None:
        self._settings = settings

    async def check(self) -> None:
        """Check the key, or the browser's fields if there is none. Raises Unauthorized, Forbidden or BadRequest."""
        key = self._settings.key
        if request.path in OPEN_PATHS or (request.path == "/metrics" and self._settings.metrics_public):
            return
        if key:
            given = bearer()
            is_key = hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode())
            if not is_key and not admitted(request.path, given, key):
                raise Unauthorized("the control port needs its key: Authorization: Bearer KEY")
            return
        try:
            self._check_browser(request.headers.get("host", ""), request.headers.get("origin"))
        except ValueError as error:  # urlsplit refuses some brackets
            raise BadRequest(str(error)) from error

    def _check_browser(self, host_field: str, origin: str | None) -> None:
        """Refuse a page from elsewhere that uses the browser of someone on this machine, if there is no key.

        The page's own requests carry an Origin; a name that it points at this machine (DNS rebinding) shows in Host.
        """
        host = urlsplit(f"//{host_field}").hostname or ""
        if host and host != self._settings.host and not is_loopback(host) and not is_address(host):
            raise Forbidden("without a control key, use an address or localhost, not a name")
        if origin is not None and urlsplit(origin).netloc != host_field:
            raise Forbidden("without a control key, pages from elsewhere may not ask")


def view_of(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return Quart's view for a route: `handler` returns a JSON value or a Response, or an awaitable of one."""

    async def view(**path: str) -> Response:
        made = handler(**path)
        answer = await made if isawaitable(made) else made
        return answer if isinstance(answer, Response) else json_response(answer)

    return view


class Handlers:
    """The handlers of the routes."""

    def __init__(self, node: Node, reloads: Reloads | None = None) -> None:
        self._node, self._port = node, Admin(node, reloads)

    def table(self) -> Mapping[str, Callable[..., Any]]:
        """Return the handlers by method and path. /…_worker answer as SGLang's router does."""
        node, port = self._node, self._port
        return {
            "GET /healthz": lambda: {"status": "ok"},
            "GET /readyz": self.readyz,
            "GET /metrics": self.metrics,
            "GET /admin/backends": lambda: {"backends": port.backends()},
            "POST /admin/backends": self.add_backend,
            "DELETE /admin/backends": self.remove_backend,
            "POST /admin/backends/drain": self.drain_backend,
            "GET /admin/routes": port.routes,
            "GET /admin/routes/<fingerprint>": self.route_tree,
            "GET /admin/decisions": lambda: {"decisions": port.decisions(limit_of(DECISIONS_MAX))},
            "GET /admin/config": lambda: node.config.shown(),  # noqa: PLW0108  # a reload replaces it
            "POST /admin/reload": port.reload,
            "GET /admin/engine-cache": node.engine_events.view,
            "GET /admin/calibration": port.calibration,
            "GET /admin/cluster": lambda: port.clustering.view(),  # noqa: PLW0108  # not every node gossips
            "GET /admin/cluster/sums": self.route_sums,
            "GET /admin/kv-index/stats": node.index_parts.stats,
            "GET /admin/kv-index/backends": node.index_parts.backends,
            "POST /admin/kv-index/clear": node.index_parts.clear,
            "GET /admin/clients": node.clients.view,
            "GET /admin/prefix-routing/stats": lambda: prefix_routing_view(node),
            "GET /admin/response-cache/stats": lambda: response_cache_view(node.pipeline.responses),
            "POST /admin/response-cache/invalidate": self.invalidate_responses,
            "POST /explain": self.explain,
            "POST /add_worker": self.add_worker,
            "POST /remove_worker": self.remove_worker,
            "GET /list_workers": lambda: {"urls": [backend["url"] for backend in port.backends()]},
        }

    def readyz(self) -> Response:
        ready, reason = self._port.ready()
        return json_response({"ready": ready, "reason": reason}, 200 if ready else 503)

    def metrics(self) -> Response:
        accept, names = request.headers.get("accept", ""), self._node.config.metric_names
        body, content_type = render(self._port.metrics(), accept, names)
        return Response(body, content_type=content_type)

    async def add_backend(self) -> Mapping[str, Any]:
        fields = await json_body(
            "url", "weight", "name", "kv_events", "kv_replay", "kv_ranks", "kv_profile", "hosted", others=True
        )
        await self._node.names.refuse_twin(fields.get("url"))
        return self._port.add_backend(fields)

    async def remove_backend(self) -> Mapping[str, Any]:
        return self._port.remove_backend(request.args.get("url") or text_of(await json_body("url"), "url"))

    async def drain_backend(self) -> Mapping[str, Any]:
        body = await json_body("url", "draining")
        url, draining = text_of(body, "url"), body.get("draining", True)
        if not isinstance(draining, bool):
            raise BadRequest("draining must be true or false")
        return self._port.drain_backend(url, draining)

    def route_tree(self, fingerprint: str) -> Mapping[str, Any]:
        number = fingerprint_of(fingerprint)
        found = self._port.route_tree(number, limit_of(TREE_ROUTES_MAX))
        if not found:
            raise NotFound(f"no route has the fingerprint {number:016x}")
        return {"fingerprint": f"{number:016x}", "routes": found}

    async def route_sums(self) -> Response:
        return Response(await self._port.clustering.route_sums(), content_type="application/octet-stream")

    async def explain(self) -> Mapping[str, Any]:
        return await self._port.explain(await raw_body(), field_lines())

    async def invalidate_responses(self) -> Mapping[str, Any]:
        return await invalidate_responses(self._node.pipeline.responses, await json_body("clear_all", *CHOICES))

    async def add_worker(self) -> Response:
        url = worker_url()
        await self._node.names.refuse_twin(url)
        self._port.add_backend({"url": url})
        return Response(f"Successfully added worker: {url}", content_type="text/plain; charset=utf-8")

    def remove_worker(self) -> Response:
        url = worker_url()
        self._port.remove_backend(url)
        return Response(f"Successfully removed worker: {url}", content_type="text/plain; charset=utf-8")


# --- output ---------------------------------------------------------------------------------------------------------


def json_response(value: Any, status: int = 200) -> Response:
    body = orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status=status, content_type="application/json")


def error_response(status: int, message: str, kind: str, code: str) -> Response:
    """Return an error in OpenAI's shape."""
    response = json_response({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)
    if status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def refused(error: RanvierError) -> Response:
    if isinstance(error, ConfigError):  # about a backend, or a configuration, that an operator gave
        error = BadRequest(str(error))
    return error_response(error.status, str(error), error.kind, error.code)


async def refused_by_framework(error: HTTPException) -> Response:
    """Answer for unknown paths and methods, and for bodies that are too large or too slow."""
    status = error.code or 500
    kind = "invalid_request_error" if status < 500 else "api_error"
    code = (error.name or "error").lower().replace(" ", "_")
    response = error_response(status, f"{request.method} {request.path}: {error.name}", kind, code)
    for name, value in error.get_headers():
        if name.lower() == "allow":
            response.headers[name] = value
    return response


async def failed(error: Exception) -> Response:
    """Answer for a bug of ours. The log has the exception; the client learns only that there was one."""
    log.error("control.failed %s %s", request.method, request.path, exc_info=error)
    return error_response(500, "internal error; the log of the node says more", "api_error", "internal_error")
