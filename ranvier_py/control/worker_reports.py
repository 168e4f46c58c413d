"""`/internal/*` of the control port: what workers report of their caches.

    POST /internal/eviction   POST /internal/sync   POST /internal/events   see engine_cache/sources/push_messages.py
    GET  /internal/workers    ?hash=…               who reports, how well it is known, who holds this prefix hash

The routes need the control key, or a worker's own credential (engine_cache/sources/push_credentials.py), which opens
nothing else and speaks for that worker alone. Bad input is a 4xx that says what is wrong: 400 for its shape, 404 for a
worker that is no backend, 403 for another worker's name.

Rules: bodies are bounded by the control port; large ones are read in a thread. Nothing of a body is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson
import trio
from quart import Response, request

from ranvier_py.control.control_input import raw_body
from ranvier_py.core.engine_cache.sources.push_credentials import worker_of
from ranvier_py.core.engine_cache.sources.push_messages import (
    EventReport,
    PrefixReport,
    hash_in,
    read_events,
    read_eviction,
    read_sync,
)
from ranvier_py.core.errors import BadRequest, Forbidden

INTERNAL = "/internal/"

INLINE_BYTES_MAX = 32 * 1024
"""Larger bodies are read in a thread: from here on that takes longer than the hop."""

READERS_MAX = 2
"""Large bodies read at one time: more would fight the event loop for its core."""


class InternalPort(Protocol):
    """What these routes need of a node."""

    async def evicted(self, report: PrefixReport) -> Mapping[str, Any]: ...
    async def synced(self, report: PrefixReport) -> Mapping[str, Any]: ...
    async def batched(self, report: EventReport) -> Mapping[str, Any]: ...
    def views(self, key: int | None) -> Sequence[Mapping[str, Any]]:
        """All workers that report; with a prefix hash, whether each holds it."""
        ...


def bearer(authorization: str) -> str:
    """The key in an Authorization field; empty where there is none."""
    kind, _, key = authorization.partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def admitted(path: str, authorization: str, control_key: str) -> bool:
    """Whether a worker's credential opens this path."""
    return path.startswith(INTERNAL) and worker_of(bearer(authorization), control_key) is not None


class InternalHandlers:
    """One method for each route."""

    def __init__(self, port: InternalPort, control_key: str | None) -> None:
        self._port = port
        self._key = control_key
        self._readers = trio.CapacityLimiter(READERS_MAX)

    def table(self) -> Sequence[tuple[str, str, Callable[..., Any]]]:
        """(method, path, handler)"""
        return (
            ("POST", "/internal/eviction", self.eviction),
            ("POST", "/internal/sync", self.sync),
            ("POST", "/internal/events", self.events),
            ("GET", "/internal/workers", self.workers),
        )

    async def eviction(self) -> Response:
        return answer(await self._port.evicted(await self._read(read_eviction)))

    async def sync(self) -> Response:
        return answer(await self._port.synced(await self._read(read_sync)))

    async def events(self) -> Response:
        return answer(await self._port.batched(await self._read(read_events)))

    async def workers(self) -> Response:
        """?hash=5f30… asks who holds that."""
        text = request.args.get("hash", "")
        return answer({"workers": self._port.views(hash_in(text, "hash") if text else None)})

    async def _read(self, read: Callable[[Mapping[str, Any]], Any]) -> Any:
        """The report in the body. Raises BadRequest, and Forbidden for a credential of another worker."""
        data = await raw_body()
        if len(data) <= INLINE_BYTES_MAX:
            report = parsed(data, read)
        else:
            report = await trio.to_thread.run_sync(parsed, data, read, limiter=self._readers)
        if self._key is not None:
            own = worker_of(bearer(request.headers.get("authorization", "")), self._key)
            if own is not None and own != report.worker:
                raise Forbidden("worker_id: this credential is another worker's")
        return report


def parsed(data: bytes, read: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Raises BadRequest."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return read(body)


def answer(value: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(value), content_type="application/json")
