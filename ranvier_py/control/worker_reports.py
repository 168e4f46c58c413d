"""`/internal/*` of the control port: what workers report of their caches, and what they need to know for it.

    POST /internal/eviction   POST /internal/sync      see core/engine_cache/sources/push_messages.py
    GET  /internal/scheme                              how this node names prefixes
    GET  /internal/workers    ?hash=…                  who reports, how well it is known, who holds this

The routes need the control key, or a worker's own credential (core/engine_cache/sources/push_credentials.py), which
opens nothing else and speaks for that worker alone. Bad input is a 4xx that says what is wrong: 400 for its shape, 404
for a worker that is no backend, 422 for hashes of an unknown scheme, 403 for another worker's name.

`/internal/scheme` may hold the key of the fingerprints. Whoever has it can compute the fingerprint of a text that he
guesses, and so find out from a route table, a recording or a dump of this port whether somebody asked it; he can't read
a prompt, nor open gossip, nor administrate. A reporter needs it to name what its engine holds, and sees all of that
engine's tokens anyway. So it is given only to who shows a key, hence never where there is none, and only where nobody
can listen: over TLS or to this machine itself. Others are told the rest, with the reason; they give the reporter the
cluster secret as a file, and it makes the same key from it without it ever being sent.

Rules: bodies are bounded by the control port; large ones are read in a thread. Nothing of a body is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson
import trio
from quart import Response, request

from ranvier_py.control.control_input import raw_body
from ranvier_py.core.addresses import is_loopback
from ranvier_py.core.engine_cache.sources.push_credentials import worker_of
from ranvier_py.core.engine_cache.sources.push_messages import (
    FINGERPRINT,
    PREFIX_HASH,
    Eviction,
    Sync,
    read_eviction,
    read_prefix_hash,
    read_sync,
)
from ranvier_py.core.errors import BadRequest, Forbidden

INTERNAL = "/internal/"

INLINE_BYTES_MAX = 32 * 1024
"""Larger bodies are read in a thread: from here on that takes longer than the hop."""

FINGERPRINT_DIGITS_MAX = 20  # 2^64

READERS_MAX = 2
"""Large bodies read at one time: more would fight the event loop for its core."""


class PushScheme(Protocol):
    """How this node names prefixes."""

    @property
    def identity(self) -> str: ...
    @property
    def mark(self) -> str: ...
    @property
    def key(self) -> bytes: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def prefix_tokens(self) -> int: ...


class InternalPort(Protocol):
    """What these routes need of a node."""

    @property
    def scheme(self) -> Any:
        """A PushScheme."""
        ...

    async def evicted(self, message: Eviction) -> Mapping[str, Any]: ...
    async def synced(self, message: Sync) -> Mapping[str, Any]: ...
    def views(self, key: int | None) -> Sequence[Mapping[str, Any]]:
        """All workers that report; with a hash, whether each holds it."""
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
            ("GET", "/internal/scheme", self.scheme),
            ("GET", "/internal/workers", self.workers),
        )

    async def eviction(self) -> Response:
        message: Eviction = await self._read(read_eviction)
        self._check(message.worker)
        return answer(await self._port.evicted(message))

    async def sync(self) -> Response:
        message: Sync = await self._read(read_sync)
        self._check(message.worker)
        return answer(await self._port.synced(message))

    async def workers(self) -> Response:
        """?hash=5f30… or ?hash=1234567 asks who holds that."""
        text = request.args.get("hash", "")
        return answer({"workers": self._port.views(key_in(text) if text else None)})

    async def scheme(self) -> Response:
        scheme: PushScheme = self._port.scheme
        withheld = self._withheld()
        return answer(
            {
                "hash_schemes": [PREFIX_HASH, FINGERPRINT + scheme.mark],
                "mark": scheme.mark,
                "identity": scheme.identity,
                "block_tokens": scheme.block_tokens,
                "prefix_tokens": scheme.prefix_tokens,
                "key": None if withheld else scheme.key.hex(),
                "withheld": withheld,
            }
        )

    def _withheld(self) -> str:
        """Why the key of the fingerprints is not told; empty where it may be."""
        if self._key is None:
            return "this control port has no key, so anybody could ask"
        if request.scheme != "https" and not is_loopback(request.remote_addr or ""):
            return "this connection can be listened to: use TLS or the same machine, or give the reporter the secret"
        return ""

    def _check(self, worker: str) -> None:
        """A worker's credential speaks for that worker. Raises Forbidden."""
        if self._key is None:
            return
        own = worker_of(bearer(request.headers.get("authorization", "")), self._key)
        if own is not None and own != worker:
            raise Forbidden("worker_id: this credential is another worker's")

    async def _read(self, read: Callable[[Mapping[str, Any], str], Any]) -> Any:
        data, mark = await raw_body(), self._port.scheme.mark
        if len(data) <= INLINE_BYTES_MAX:
            return parsed(data, read, mark)
        return await trio.to_thread.run_sync(parsed, data, read, mark, limiter=self._readers)


def parsed(data: bytes, read: Callable[[Mapping[str, Any], str], Any], mark: str) -> Any:
    """Raises BadRequest and what `read` raises."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return read(body, mark)


def key_in(text: str) -> int:
    """A prefix hash as hexadecimal digits, or a fingerprint as a number."""
    if text.isascii() and text.isdigit() and len(text) <= FINGERPRINT_DIGITS_MAX:
        return int(text)
    return read_prefix_hash(text, "hash")


def answer(value: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(value), content_type="application/json")
