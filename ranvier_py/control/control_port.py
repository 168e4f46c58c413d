"""The control port: health, metrics and administration of one node, by quart-trio on hypercorn.

Rules: it never touches a proxied request, and none of its answers blocks for long: each is one synchronous call, or
yields to other tasks. With keys, everything but /healthz and /readyz needs one as bearer key (/metrics unless it is
public), whose role allows it (`role_for`); each order is a line of the log that names the key by its id. Without any,
web pages from elsewhere that a browser on this machine shows are refused. Errors have OpenAI's shape. Bad input is a
4xx, never a 500. Quart's limits are set here: none on the time of an answer, some on bodies.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from inspect import isawaitable
from typing import Any
from urllib.parse import urlsplit

import orjson
import trio
from quart import Response, g, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from ranvier_py.config.control_settings import ControlSettings, control_settings
from ranvier_py.control.control_server import serve_app
from ranvier_py.control.exposition import of_process, render
from ranvier_py.control.openapi import document
from ranvier_py.control.pages.page import OPEN, WebPage
from ranvier_py.control.worker_pages import joined
from ranvier_py.core.access.key_table import digest_of
from ranvier_py.core.access.keys_file import ROLES
from ranvier_py.core.addresses import is_address, is_loopback
from ranvier_py.core.engine_cache.sources.push_credentials import worker_of
from ranvier_py.core.errors import BadRequest, ConfigError, Forbidden, RanvierError, Unauthorized, listening_on
from ranvier_py.core.log_events import event
from ranvier_py.core.log_limit import LogLimit
from ranvier_py.core.metrics import Sample
from ranvier_py.node.access.keys_files import KeyedPart
from ranvier_py.node.asked import PLAIN, VERBOSE, Asked, ControlAnswer, Route, bearer_of
from ranvier_py.node.part import Handler, Node
from ranvier_py.node.parts.siblings import OWN, answers_of
from ranvier_py.node.parts.tls_parts import CONTROL, tls_context

log = logging.getLogger(__name__)

BODY_TIMEOUT_S = 30
"""Enough for a prompt of 16 MiB, to be explained, at 5 Mbit/s."""

INTERNAL = "/internal/"
"""Below it workers report what they hold: a worker's own credential opens these paths."""

READ, OPERATE, ADMIN = ROLES
OPERATING = (
    *("/admin/backends/drain", "/admin/backends/weight", "/admin/node/drain"),
    *("/admin/kv-index/clear", "/admin/response-cache/invalidate", INTERNAL),
)
"""What changes how a node works, but neither whom it trusts nor where it sends prompts; what only shows takes less."""

OPEN_METRICS = "application/openmetrics-text"

OPEN_PATHS = ("/healthz", "/readyz", *OPEN)
"""Paths that need no key: orchestrators ask them, and they reveal no more than a connection attempt would. And the
files of the page, which are the same everywhere."""


class ControlPort(KeyedPart):
    """The control port of one node: health, metrics, and what each part serves."""

    name = "control"
    keys = ("control_key", "control_key_file", "metrics_public", "metric_names", "control_keys_file", *CONTROL)

    def __init__(self, node: Node) -> None:
        self._node, config = node, node.config
        self._settings = control_settings(config)
        self._settings.tls = self._tls = tls_context(config, CONTROL)
        super().__init__(config.ports.control_keys_file, "control_keys_file", self._settings.take_keys)
        self._files = WebPage(node)
        self._shutdown = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve as `serve_app` does. Raises ListenError, and ConfigError for a file of keys with an error."""
        node = self._node
        await self.read()
        routes = {route: handler for part in node.parts for route, handler in part.routes().items()}
        app = make_app(routes, self._settings)
        serve = partial(serve_app, app, self._settings, shutdown=self._shutdown, faults=node.faults)
        async with trio.open_nursery() as nursery:
            with listening_on(node.config.control):
                url = await nursery.start(serve)
            nursery.start_soon(node.faults.keep, "page", self._files.feed.loop)
            task_status.started(url)

    def stop(self) -> None:
        self._shutdown.set()

    def held(self, before: Any, after: Any) -> Iterable[str]:
        """The port can't change between plain HTTP and TLS, nor between one key and several."""
        for names in (CONTROL[:2], ("control_keys_file",)):
            if (getattr(before.ports, names[0]) is None) != (getattr(after.ports, names[0]) is None):
                yield from names

    def check(self, _: Any, after: Any) -> bool:
        self._tls = tls_context(after, CONTROL)
        return self._tls is not None

    def reload(self, _: Any, after: Any) -> None:
        new, settings = control_settings(after), self._settings
        settings.key, settings.metrics_public, settings.tls = new.key, new.metrics_public, self._tls
        self.move(after.ports.control_keys_file)

    def routes(self) -> Mapping[str, Handler]:
        return {
            "GET /healthz": Route(lambda _: {"status": "ok"}, "Whether the process lives"),
            "GET /metrics": Route(
                self._page,
                "All metrics, for Prometheus, of all workers",
                query={OWN: {"type": "string"}},
                kinds=(PLAIN, OPEN_METRICS),
            ),
            "GET /openapi.json": Route(self._document, "This document"),
            **self._files.routes(),
        }

    def _document(self, _: Asked) -> Mapping[str, Any]:
        return document(self._node, role_for, OPEN_PATHS)

    async def _page(self, asked: Asked) -> ControlAnswer:
        config, accept = self._node.config, asked.field("accept")
        of_all = config.workers > 1 and OWN not in asked.query
        others = await answers_of(config, f"/metrics?{OWN}", bearer(), accept=accept) if of_all else {}
        body, kind = render([*self._node.metrics()], accept, config.metric_names, of_process())
        if of_all:
            found = {**others, config.worker_index: body}
            body = await joined({index: page.decode() for index, page in found.items() if page})
        return ControlAnswer(body, kind=kind)

    def metrics(self) -> Iterator[Sample]:
        yield from super().metrics()
        words = "Always 1: this worker has answered the scrape; a worker that did not has none of its metrics there."
        yield Sample("worker_up", "gauge", words, 1)
        words = "Workers that share the public port, by the configuration; each has this metric."
        yield Sample("workers", "gauge", words, self._node.config.workers)


def make_app(routes: Mapping[str, Handler], settings: ControlSettings) -> QuartTrio:
    """Return the app of one control port; `routes` has what answers each method and path."""
    app = QuartTrio(__name__, static_folder=None)
    app.config.update(
        RESPONSE_TIMEOUT=None,  # the default is 60 s for a whole streamed answer; here each send has its own deadline
        BODY_TIMEOUT=BODY_TIMEOUT_S,
        MAX_CONTENT_LENGTH=settings.body_bytes_max,
        PROVIDE_AUTOMATIC_OPTIONS=False,
    )
    guard = Guard(settings)
    app.before_request(guard.check)
    app.after_request(guard.note)
    app.register_error_handler(RanvierError, refused)
    app.register_error_handler(HTTPException, refused_by_framework)
    app.register_error_handler(Exception, failed)
    for route, handler in routes.items():
        method, path = route.split(" ")
        app.add_url_rule(path, route, view_of(handler, settings), methods=[method])
    return app


class Guard:
    """Decides who may use the control port."""

    def __init__(self, settings: ControlSettings) -> None:
        self._settings, self._log_limit = settings, LogLimit()

    async def check(self) -> None:
        """Check the key, or the browser's fields if there is none. Raises Unauthorized, Forbidden or BadRequest."""
        settings = self._settings
        g.caller, g.role, rule = "", ADMIN, request.url_rule
        is_open = rule is not None and rule.rule in OPEN_PATHS and VERBOSE not in request.args
        if is_open or (request.path == "/metrics" and settings.metrics_public):
            return
        if settings.needs_key:
            g.caller, g.role = caller_of(settings, bearer())
            needed = role_for(request.method, request.path)
            if ROLES.index(g.role) < ROLES.index(needed):
                raise Forbidden(f"this needs a key of role {needed}, and {g.caller} has role {g.role}")
            return
        try:
            self._check_browser(request.headers.get("host", ""), request.headers.get("origin"))
        except ValueError as error:  # urlsplit refuses some brackets
            raise BadRequest(str(error)) from error

    async def note(self, response: Response) -> Response:
        """Log what was ordered and by whom, and who was refused: that once in LOG_INTERVAL_S for each key."""
        method, path, status, by = request.method, request.path, response.status_code, g.get("caller")
        if status in (401, 403):
            asked = self._log_limit.refused(f"{status} {by}", method, path, time.monotonic())
            if asked is not None:
                log.warning(event("control.refused", status=status, by=by, client=request.remote_addr, **asked))
        elif role_for(method, path) != READ and not path.startswith(INTERNAL):
            log.info(event("control.ordered", method=method, path=path, by=by, status=status))
        return response

    def _check_browser(self, host_field: str, origin: str | None) -> None:
        """Refuse a page from elsewhere that uses the browser of someone on this machine, if there is no key.

        The page's own requests carry an Origin; a name that it points at this machine (DNS rebinding) shows in Host.
        """
        host = urlsplit(f"//{host_field}").hostname or ""
        if host and host != self._settings.host and not is_loopback(host) and not is_address(host):
            raise Forbidden("without a control key, use an address or localhost, not a name")
        if origin is not None and urlsplit(origin).netloc != host_field:
            raise Forbidden("without a control key, pages from elsewhere may not ask")


def caller_of(settings: ControlSettings, given: str) -> tuple[str, str]:
    """Return the id of a key and its role. Raises Unauthorized."""
    key, shown = settings.key, given.encode("utf-8", "surrogateescape")
    if key and hmac.compare_digest(shown, key.encode()):
        return "control_key", ADMIN
    found = settings.keys.find(digest_of(shown))
    if found is not None and found.key is not None and not found.key.refusal(time.time()):
        return found.key.id, found.key.role
    if key and request.path.startswith(INTERNAL) and (worker := worker_of(given, key)) is not None:
        return worker, OPERATE
    if given:
        raise Unauthorized("the control port does not know this key, or it is not valid now")
    raise Unauthorized("the control port needs its key: Authorization: Bearer KEY")


async def while_allowed(
    lines: AsyncGenerator[bytes, None], settings: ControlSettings, given: str
) -> AsyncGenerator[bytes, None]:
    """Pass an answer without an end on for as long as the key of who takes it is good."""
    async with aclosing(lines):
        async for line in lines:
            if settings.needs_key:
                try:
                    caller_of(settings, given)
                except Unauthorized:
                    return
            yield line


def role_for(method: str, path: str) -> str:
    """Return the least role that may ask for this."""
    if method in ("GET", "HEAD") or (method, path) == ("POST", "/explain"):
        return READ
    return OPERATE if path.startswith(OPERATING) else ADMIN


def view_of(handler: Handler, settings: ControlSettings) -> Callable[..., Any]:
    """Return Quart's view for a route."""
    handle = handler.handle if isinstance(handler, Route) else handler

    async def view(**path: str) -> Response:
        key = settings.key
        worker = worker_of(bearer(), key) if key is not None else None
        caller, role = g.get("caller") or "-", g.get("role") or ""
        made = handle(
            Asked(
                path=path,
                query=request.args,
                headers=list(request.headers),
                body=raw_body,
                worker=worker,
                caller=caller,
                role=role,
            )
        )
        answer = await made if isawaitable(made) else made
        if not isinstance(answer, ControlAnswer):
            return json_response(answer)
        if answer.kind:
            content = answer.content
            if isinstance(content, AsyncGenerator):
                content = while_allowed(content, settings, bearer())
            return Response(content, answer.status, dict(answer.fields), content_type=answer.kind)
        return json_response(answer.content, answer.status)

    return view


async def raw_body() -> bytes:
    data = await request.get_data()
    assert isinstance(data, bytes), "text only comes on request"
    return data


def bearer() -> str:
    return bearer_of(request.headers.get("authorization", ""))


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
    log.error(event("control.failed", method=request.method, path=request.path), exc_info=error)
    return error_response(500, "internal error; the log of the node says more", "api_error", "internal_error")
