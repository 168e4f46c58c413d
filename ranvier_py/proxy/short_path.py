"""The short path: a request is served by two calls, one when it comes and one when its answer does, without any task.

While a connection's task waits for the next request, its socket has a shortcut (`readiness`): a request that came whole
and has the head of the one before it is begun there, and the handler's own shortcut ends it when the backend answers.
Where anything comes up that has to wait, the task is woken and goes on (`resume`). So a shortcut never waits and never
decides what a request means; it only spares what a wait costs when there is none.

Rules: the task owns the connection all the time. If it is cancelled, by a missed deadline, a client that left or a
drain, then what was begun is abandoned before it ends. What is not begun is given back unread.
Invariant: `client.going` is set exactly from `begin` to `_over`, and counted in `admission` as long.
Cost: 20 us less than two waits of a task.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from ranvier_py.proxy.admission import Admission
from ranvier_py.proxy.client_connection import Client
from ranvier_py.proxy.error_answers import api_of
from ranvier_py.proxy.http_values import HttpRequest, Phase
from ranvier_py.proxy.transport import WatchedTransport

log = logging.getLogger(__name__)

Tell = Callable[[bool], None]
"""How a shortcut ends: with the whole answer (True), or where `resume` has to go on."""


class Going(Protocol):
    """A request that was begun. Not `waits`: it is to be resumed at once."""

    @property
    def waits(self) -> bool: ...


class ShortWay(Protocol):
    """A handler that never waits. It raises nothing but bugs."""

    def begin(self, request: HttpRequest, client: Client, tell: Tell) -> Going | None:
        """None: not this one, and nothing has been done with it. `tell` is called later, never at once."""

    async def resume(self, going: Any) -> None:
        """Do the rest as a handler does."""

    def abandon(self, going: Any) -> None:
        """Nobody waits for it any more."""


class Shortcuts:
    """Serves the connections of one server the short path, as far as it goes.

    Args:
        answered: waits for a handler and answers for it where it fails, as the server does for its own.
    """

    def __init__(
        self,
        short_way: ShortWay,
        admission: Admission,
        answered: Callable[[Client, Awaitable[None]], Awaitable[None]],
    ) -> None:
        self._short_way = short_way
        self._admission = admission
        self._answered = answered

    async def next(self, client: Client, transport: WatchedTransport) -> bytes:
        """The first bytes of a request that does not take the short path; b"" when the connection may end."""
        watch = transport.watch
        watch.shortcut = partial(self._came, client, transport)
        try:
            while True:
                await watch.wait()
                if client.going is None:
                    data = transport.receive_now()
                    if data is not None:
                        return data
                    continue
                await self._resume(client)
                if client.must_close:
                    return b""
                self.await_next(client)
        finally:
            watch.shortcut = None
            if client.going is not None:
                self._short_way.abandon(client.going)
                self._over(client)

    def await_next(self, client: Client) -> None:
        """From now on the connection is idle."""
        client.started = client.head_only = False
        client.must_close = self._admission.draining
        client.arm(Phase.IDLE, self._admission.limits.idle_s)

    def _came(self, client: Client, transport: WatchedTransport) -> bool:
        """Something came while the task waits. False: it is for the task."""
        if client.going is not None:  # early, the next request; or the end, which is seen to already
            transport.watch.ready = True
            return True
        try:
            data = transport.receive_now()
        except OSError:  # the task will meet it
            return False
        if data is None:
            return True
        going = self._begin(client, data) if data else None
        if going is None:
            transport.unread(data)
            return False
        return going.waits

    def _begin(self, client: Client, data: bytes) -> Going | None:
        """Begin the request that `data` is, if it may take the short path."""
        admission, head = self._admission, client.last_head
        end = data.find(b"\r\n\r\n") + 4
        if head is None or client.gone or not head.again(data[:end], admission.limits):
            return None
        request, length = head.request, head.length
        if end + length != len(data) or not admission.has_room(length):
            return None
        request.body = data[end:]
        client.api, client.request_id = api_of(request.target), b""
        client.must_close = admission.draining or not request.keep_alive
        going = None
        try:
            going = self._short_way.begin(request, client, partial(self._told, client))
        except Exception:
            log.exception("request.failed peer=%s", client.peer)
        if going is None:
            request.body = b""
            return None
        client.going = going
        admission.in_flight += 1
        admission.keep(client, length)
        admission.counters.requests += 1
        admission.counters.request_bytes += length
        client.handling = True
        return going

    def _told(self, client: Client, whole: bool) -> None:
        watch = client.transport.watch
        assert watch is not None, "it had a shortcut"
        if not whole or client.unsent is not None:
            watch.wake()
            return
        self._over(client)
        if client.must_close:
            client.cancel(None)
            return
        self.await_next(client)
        if watch.ready:
            watch.wake()

    async def _resume(self, client: Client) -> None:
        try:
            await self._answered(client, self._short_way.resume(client.going))
        finally:
            self._over(client)

    def _over(self, client: Client) -> None:
        client.going = None
        client.handling = False
        if client.last_head is not None:
            client.last_head.request.body = b""
        self._admission.ended(client)
