"""Notifies whoever waits for the connections' sockets, from one epoll set, without a system call or task for each wait.

Every socket is registered once, edge-triggered; one task takes the events and calls the waiting steps (`Watch.call`),
which continue within that very call (`driver`). Rule: a callback must neither wait nor raise; it is called for one
event, and must be set again for the next. The same events show who hung up, even while nobody reads; a client that
closes only its sending side counts as gone, as for nginx and Go's net/http.
Invariant: a socket is in the set from `watch` to the `close` of its Watch, which comes before its own (test_driver.py).
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass

import trio
from trio.lowlevel import wait_readable

from ranvier_py.supervision import Faults

READABLE = select.EPOLLIN
HUNG_UP = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR

EVENTS_MAX = 256
"""Events taken from the kernel in one call; the rest come with the next."""

TURN_S = 0.001
"""Events that come meanwhile are taken without a turn of trio's loop in between, which takes as long as a fourth of a
request; then other tasks have their turn."""


@dataclass(slots=True, eq=False)
class Watch:
    """One socket in the set."""

    readiness: Readiness
    fd: int
    ready: bool = True  # there may be something to read, including what came before the socket was registered
    ended: bool = False  # the peer closed at least its sending side
    call: Callable[[], object] | None = None  # called once, at the next event
    hung_up: Callable[[], object] | None = None  # called when the peer closed

    def hang_up(self) -> None:
        self.ended = True
        if self.hung_up is not None:
            self.hung_up()

    async def wait(self) -> None:
        """Wait as the steps do, for who has a task of its own."""
        if self.ready:
            await trio.lowlevel.checkpoint()
            return
        event = trio.Event()
        self.call = event.set
        try:
            await event.wait()
        finally:
            self.call = None

    def close(self) -> None:
        """Remove the socket before it is closed; nobody is called any more. May be called twice."""
        self.call = self.hung_up = None  # they refer back to this object
        self.readiness.forget(self.fd, self)


class Readiness:
    """The epoll set. Nobody is called unless `run` runs."""

    def __init__(self, faults: Faults | None = None) -> None:
        self._faults = faults or Faults()
        self._epoll = select.epoll()
        self._watches: dict[int, Watch] = {}

    def watch(self, fd: int, *, readable: bool = True) -> Watch:
        """Register a socket. If not `readable`, somebody else waits to read it, and only its end is noticed."""
        watch = self._watches[fd] = Watch(self, fd)
        wanted = READABLE | select.EPOLLRDHUP if readable else select.EPOLLRDHUP
        self._epoll.register(fd, wanted | select.EPOLLET)
        return watch

    def forget(self, fd: int, watch: Watch) -> None:
        if self._watches.get(fd) is watch:
            del self._watches[fd]
            self._epoll.unregister(fd)

    async def run(self) -> None:
        """Call the waiting steps, for ever."""
        epoll, watches = self._epoll, self._watches
        while True:
            await wait_readable(epoll.fileno())
            until = time.monotonic() + TURN_S
            while found := epoll.poll(0, EVENTS_MAX):
                for fd, events in found:
                    watch = watches.get(fd)
                    if watch is None:
                        continue
                    watch.ready = True
                    try:
                        if events & HUNG_UP:
                            watch.hang_up()
                        call, watch.call = watch.call, None
                        if call is not None:
                            call()
                    except Exception as error:  # else the events after this one would be lost for ever
                        self._faults.note("readiness", error)
                if time.monotonic() >= until:
                    break

    def close(self) -> None:
        """Close the set; nobody is called any more."""
        self._watches.clear()
        trio.lowlevel.notify_closing(self._epoll.fileno())
        self._epoll.close()
