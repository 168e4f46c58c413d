"""Asks an engine, a peer's public port or another worker one thing over HTTP, with httpx.

Rule: as in `engine_poller`: a connection of its own, no redirects, nothing from the environment, and always a deadline.
Bound: BYTES_MAX of an answer.
"""

from __future__ import annotations

import ssl
from typing import NamedTuple

import httpx
import trio

from ranvier_py.core.engine_cache.sources.engine_polls import Page
from ranvier_py.core.errors import words_of

BYTES_MAX = 4 << 20
CLOSE_S = 1.0  # to close a TLS connection while being cancelled
LIMITS = httpx.Limits(max_connections=1, max_keepalive_connections=1)


class EngineReply(NamedTuple):
    """An answer and its Date field, or why there is none."""

    page: Page
    date: str = ""
    why: str = ""


class EngineAsker:
    """Asks with one key. `context`: for https; None: the system's authorities are trusted."""

    def __init__(self, api_key: str, context: ssl.SSLContext | None, timeout_s: float, *, accept: str = "*/*") -> None:
        self._headers = {"accept": accept, "user-agent": "ranvier"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._context, self._timeout_s = context, timeout_s

    async def ask(
        self, url: str, path: str, sent: bytes | None = None, *, tls_name: str = "", timeout_s: float | None = None
    ) -> EngineReply:
        """Get a page, or post JSON."""
        limit_s = timeout_s or self._timeout_s
        try:
            with trio.fail_after(limit_s):
                return await self._asked(httpx.URL(url + path), sent, tls_name)
        except trio.TooSlowError:
            return EngineReply(Page(0, b""), why=f"no answer within {limit_s:g} s")
        except httpx.HTTPError as error:
            return EngineReply(Page(0, b""), why=words_of(error))

    async def _asked(self, url: httpx.URL, sent: bytes | None, tls_name: str) -> EngineReply:
        context = self._context
        if url.scheme == "http":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used, and cheaper than httpx's own
        elif context is None:
            context = self._context = ssl.create_default_context()
        transport = httpx.AsyncHTTPTransport(verify=context, trust_env=False, limits=LIMITS, retries=0)
        headers = {"host": url.netloc.decode("ascii"), **self._headers}
        if sent is not None:
            headers["content-type"] = "application/json"
        request = httpx.Request(
            *("GET" if sent is None else "POST", url),
            headers=headers,
            content=sent,
            extensions={"sni_hostname": tls_name} if tls_name else {},
        )
        try:
            response = await transport.handle_async_request(request)
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > BYTES_MAX:
                    break
            is_cut = len(body) > BYTES_MAX
            return EngineReply(
                Page(response.status_code, bytes(body[:BYTES_MAX]), is_cut), response.headers.get("date", "")
            )
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_S):
                await transport.aclose()
