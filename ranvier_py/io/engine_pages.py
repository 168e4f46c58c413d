"""One page of an engine, read no further than wanted. What probes, discovery and the scraper ask engines for.

Rule: a body is cut at its bound, and its connection closed. The caller sets the deadline.
"""

from __future__ import annotations

from dataclasses import dataclass

import httpx


@dataclass(frozen=True, slots=True)
class Page:
    """An answer to one GET. `body` is cut at its bound; `cut` says so."""

    status: int
    body: bytes
    cut: bool


async def page_of(transport: httpx.AsyncHTTPTransport, request: httpx.Request, bytes_max: int) -> Page:
    """Raises httpx.RequestError."""
    response = await transport.handle_async_request(request)
    body, cut = bytearray(), False
    try:
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > bytes_max and not cut:
                cut = True
                await response.aclose()  # the next read fails, which ends httpx's chain of generators in order
    except httpx.ReadError:
        if not cut:
            raise
    finally:
        await response.aclose()
    return Page(response.status_code, bytes(body[:bytes_max]), cut)
