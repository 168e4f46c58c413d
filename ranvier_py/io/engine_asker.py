"""Asks an engine, a peer's public port or another worker one thing over HTTP, with httpcore.

Rule: as in `engine_poller`: a connection of its own, no redirects, nothing from the environment, and always a deadline.
Bound: BYTES_MAX of an answer.
"""

from __future__ import annotations

import ssl
from typing import NamedTuple

import httpcore
import trio

from ranvier_py.core.addresses import parts_of_url
from ranvier_py.core.engine_cache.sources.engine_polls import Page
from ranvier_py.core.errors import words_of
from ranvier_py.core.routing.wanted.found_backend import authorization_of

BYTES_MAX = 4 << 20
CLOSE_S = 1.0  # to close a TLS connection while being cancelled
FAILURES = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)


class EngineReply(NamedTuple):
    """An answer and its Date field, or why there is none."""

    page: Page
    date: str = ""
    why: str = ""


class EngineAsker:
    """Asks with one key. `context`: for https; None: the system's authorities are trusted."""

    def __init__(self, api_key: str, context: ssl.SSLContext | None, timeout_s: float, *, accept: str = "*/*") -> None:
        self._headers: dict[bytes | str, bytes | str] = {"accept": accept, "user-agent": "ranvier"}
        if api_key:
            self._headers["authorization"] = authorization_of(api_key)
        self._context, self._timeout_s = context, timeout_s

    async def ask(
        self, url: str, path: str, sent: bytes | None = None, *, tls_name: str = "", timeout_s: float | None = None
    ) -> EngineReply:
        """Get a page, or post JSON."""
        limit_s = timeout_s or self._timeout_s
        try:
            with trio.fail_after(limit_s):
                return await self._asked(url + path, sent, tls_name)
        except trio.TooSlowError:
            return EngineReply(Page(0, b""), why=f"no answer within {limit_s:g} s")
        except FAILURES as error:
            return EngineReply(Page(0, b""), why=words_of(error))

    async def _asked(self, url: str, sent: bytes | None, tls_name: str) -> EngineReply:
        context = self._context
        parts = parts_of_url(url)
        if not parts.is_secure:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used, and cheaper than httpcore's own
        elif context is None:
            context = self._context = ssl.create_default_context()
        transport = httpcore.AsyncConnectionPool(context, max_connections=1)
        headers: dict[bytes | str, bytes | str] = {"host": parts.authority}
        headers.update(self._headers)
        if sent is not None:
            headers |= {"content-type": "application/json", "content-length": str(len(sent))}
        method, named = "GET" if sent is None else "POST", {"sni_hostname": tls_name} if tls_name else {}
        request = httpcore.Request(method, url, headers=headers, content=sent, extensions=named)
        try:
            response = await transport.handle_async_request(request)
            body = bytearray()
            async for chunk in response.aiter_stream():
                body += chunk
                if len(body) > BYTES_MAX:
                    break
            is_cut = len(body) > BYTES_MAX
            date = dict(response.headers).get(b"date", b"").decode("latin-1")
            return EngineReply(Page(response.status, bytes(body[:BYTES_MAX]), is_cut), date)
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_S):
                await transport.aclose()
