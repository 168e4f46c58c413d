"""One router's control port, as a reporter sees it: two POSTs and a GET, each with a deadline and a bounded answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import httpx
import orjson
import trio

from ranvier_py.core.engine_cache.sources.push_sender import Posting

TIMEOUT_S = 5.0  # of one exchange: a router that is busy for longer is asked again later
REPLY_BYTES_MAX = 64 * 1024  # a list of all buckets is 6 kB
NO_ANSWER = 0


class RouterLink:
    """Use it as an async context manager."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        headers = {"user-agent": "ranvier-reporter", **({"authorization": f"Bearer {key}"} if key else {})}
        self._client = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=TIMEOUT_S, trust_env=False, follow_redirects=False
        )
        self.why = ""  # the last failure or refusal, in the router's words

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with trio.move_on_after(1.0, shield=True):
            await self._client.aclose()

    async def post(self, posting: Posting) -> tuple[int, Mapping[str, Any]]:
        """(status, reply); status 0: no answer."""
        return await self._ask("POST", posting.path, orjson.dumps(posting.body))

    async def scheme(self) -> Mapping[str, Any] | None:
        """How the router names prefixes; None while it does not say."""
        status, reply = await self._ask("GET", "/internal/scheme", b"")
        return reply if status == httpx.codes.OK else None

    async def _ask(self, method: str, path: str, content: bytes) -> tuple[int, Mapping[str, Any]]:
        try:
            with trio.fail_after(TIMEOUT_S):
                response = await self._client.request(method, path, content=content)
        except (httpx.HTTPError, httpx.InvalidURL, trio.TooSlowError) as error:
            self.why = f"{type(error).__name__}: {error}"[:200]
            return NO_ANSWER, {}
        reply = read_reply(response.content)
        if response.status_code != httpx.codes.OK:
            said = reply.get("error")
            words = said.get("message") if isinstance(said, dict) else ""
            self.why = f"{response.status_code}: {words}"[:200]
        return response.status_code, reply


async def models_of(engine: str) -> Mapping[str, Any]:
    """What an engine lists at /v1/models; nothing where it does not answer."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        try:
            response = await client.get(f"{engine.rstrip('/')}/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL):
            return {}
    return read_reply(response.content)


def read_reply(content: bytes) -> Mapping[str, Any]:
    try:
        found = orjson.loads(content) if len(content) <= REPLY_BYTES_MAX else None
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
