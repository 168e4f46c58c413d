"""POSTs a reporter's reports to one router's control port, each with a deadline and a bound of the reply.

Routers are independent: one that is slow or gone delays no other. A report without an answer is made anew after a
pause, which doubles; after a refusal (a 4xx but 429) the pause is REFUSED_S. No reply of a router ever raises; trouble
is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import httpx
import orjson
import trio

from ranvier_py.core.log_events import event
from ranvier_py.reporter.event_relay import RouterPost

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0  # of one exchange: a router that is busy for longer is tried again later
REPLY_BYTES_MAX = 64 * 1024
IDLE_S = 0.02  # between two checks for something to send
RETRY_S, RETRY_MAX_S = 0.1, 2.5  # so that a router that came back has everything within one sync
REFUSED_S = 5.0  # after a 4xx, which does not change at once


class Sender(Protocol):
    """What decides what to send: an EventRelay or a PrefixSender."""

    def next(self, now: float) -> RouterPost | None: ...
    def answered(self, reply: Mapping[str, Any], now: float) -> None: ...


class RouterLink:
    """The connection to one router."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self.failures = 0
        self._headers = {b"user-agent": b"ranvier-reporter", b"accept-encoding": b"identity"}
        if key:
            self._headers[b"authorization"] = f"Bearer {key}".encode()
        self._trouble = "not asked yet"

    async def run(self, sender: Sender) -> None:
        """Send the sender's reports, for ever."""
        pause_s = RETRY_S
        async with httpx.AsyncClient(
            base_url=self.url, headers=self._headers, timeout=TIMEOUT_S, trust_env=False, follow_redirects=False
        ) as client:
            while True:
                posting = sender.next(trio.current_time())
                if posting is None:
                    await trio.sleep(IDLE_S)
                    continue
                status, reply, trouble = await ask(client, posting)
                self._note(trouble)
                if not trouble:
                    sender.answered(reply, trio.current_time())
                    pause_s = RETRY_S
                    continue
                self.failures += 1
                await trio.sleep(
                    REFUSED_S if 400 <= status < 500 and status != httpx.codes.TOO_MANY_REQUESTS else pause_s
                )
                pause_s = min(2 * pause_s, RETRY_MAX_S)

    def _note(self, trouble: str) -> None:
        """Log trouble when it changes or ends."""
        if trouble != self._trouble:
            self._trouble = trouble
            level = logging.WARNING if trouble else logging.INFO
            log.log(level, event("reporter.router", router=self.url, why=trouble))


async def ask(client: httpx.AsyncClient, posting: RouterPost) -> tuple[int, Mapping[str, Any], str]:
    """POST a report. Returns the status (0: no answer), the reply, and what is wrong, in the router's words."""
    content = b""
    try:
        with trio.fail_after(TIMEOUT_S):
            async with client.stream("POST", posting.path, content=orjson.dumps(posting.body)) as response:
                async for piece in response.aiter_raw():
                    content += piece[: REPLY_BYTES_MAX + 1 - len(content)]  # the rest is read and dropped
    except Exception as error:  # whatever it is, from the router or the resolver, it fails only this report
        return 0, {}, f"{type(error).__name__}: {error}"[:200]
    try:
        reply = orjson.loads(content) if len(content) <= REPLY_BYTES_MAX else None
    except orjson.JSONDecodeError:
        reply = None
    reply = reply if isinstance(reply, dict) else {}
    if response.status_code == httpx.codes.OK:
        return httpx.codes.OK, reply, ""
    refusal = reply.get("error")
    words = refusal.get("message") if isinstance(refusal, dict) else ""
    return response.status_code, reply, f"{response.status_code}: {words}"[:200]
