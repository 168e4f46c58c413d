"""`/internal/*` of the control port: workers report what their caches hold.

The routes need the control key, or a worker's own credential (engine_cache/sources/push_credentials.py), which opens no
other route and speaks for that worker alone. push_messages.py beside it defines the bodies. Bad input is a 4xx that
names what is wrong: 400 for its shape, 404 for a worker that is no backend, 403 for another worker's name.

Rules: the control port bounds bodies, and what a body would build is counted before it is parsed; large ones are parsed
in a thread. A credential of a worker that is no backend is refused before that. Nothing of a body is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import trio
from quart import request

from ranvier_py.config.control_settings import ControlSettings
from ranvier_py.control.control_input import bearer, object_of, raw_body
from ranvier_py.core.engine_cache.sources.push_credentials import worker_of
from ranvier_py.core.engine_cache.sources.push_messages import (
    EVENTS,
    PREFIXES,
    Structure,
    check_structure,
    hash_in,
    read_events,
    read_eviction,
    read_sync,
)
from ranvier_py.core.errors import Forbidden
from ranvier_py.node.push_parts import WorkerReports

INTERNAL = "/internal/"

INLINE_BYTES_MAX = 32 * 1024
"""Larger bodies are parsed in a thread: parsing them takes longer than the hop to a thread."""

READERS_MAX = 2
"""Large bodies parsed at one time: more would compete with the event loop for its core."""


def admitted(path: str, bearer_key: str, control_key: str) -> bool:
    """Whether a worker's credential opens this path."""
    return path.startswith(INTERNAL) and worker_of(bearer_key, control_key) is not None


class ReportHandlers:
    """The handlers of the routes."""

    def __init__(self, reports: WorkerReports, settings: ControlSettings) -> None:
        self._reports = reports
        self._settings = settings
        self._readers = trio.CapacityLimiter(READERS_MAX)

    def table(self) -> Mapping[str, Callable[[], Any]]:
        """Return the handlers by method and path."""
        return {
            "POST /internal/eviction": self.eviction,
            "POST /internal/sync": self.sync,
            "POST /internal/events": self.events,
            "GET /internal/workers": self.workers,
        }

    async def eviction(self) -> Mapping[str, Any]:
        return await self._reports.evicted(await self._read(read_eviction, PREFIXES))

    async def sync(self) -> Mapping[str, Any]:
        return await self._reports.synced(await self._read(read_sync, PREFIXES))

    async def events(self) -> Mapping[str, Any]:
        return await self._reports.batched(await self._read(read_events, EVENTS))

    def workers(self) -> Mapping[str, Any]:
        """Answer the list of workers; with ?hash=5f30… which of them hold that."""
        text = request.args.get("hash", "")
        return {"workers": self._reports.views(hash_in(text, "hash") if text else None)}

    async def _read(self, read: Callable[[Mapping[str, Any]], Any], most: Structure) -> Any:
        """Return the report in the body. Raises BadRequest; NotFound for a credential of a worker that is no backend,
        Forbidden for one of another worker."""
        key = self._settings.key
        own = worker_of(bearer(), key) if key is not None else None
        if own is not None:
            self._reports.backend_of(own)
        data = await raw_body()
        check_structure(data, most)
        if len(data) <= INLINE_BYTES_MAX:
            report = read(object_of(data))
        else:
            report = await trio.to_thread.run_sync(lambda: read(object_of(data)), limiter=self._readers)
        if own is not None and own != report.worker:
            raise Forbidden("worker_id: this credential is another worker's")
        return report
