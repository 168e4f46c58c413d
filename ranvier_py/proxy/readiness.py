"""Who waits for the connections' sockets, so that a request's waits cost no system call and no trip to trio's poller.

trio asks the kernel anew for each wait: one epoll_ctl and 10 us. Here every socket is registered once, edge-triggered,
in one epoll set, which is the only thing that trio waits for; one task takes what happened from the kernel and wakes
whoever waits for it. Waiting stays a wait of trio's: it can be cancelled, and deadlines are as ever.

Rules: one task waits for one socket. Whoever reads says whether that was all (`Watch.read`); a wait returns without
parking only where something may be left, and even then lets others run. An end stays: nothing is waited for behind it.
What needs no wait of its own may be done in a `shortcut`, without any task: such a call is short, and never waits.
The same events tell who hung up, also while nobody reads: a client that closes is noticed at once, and pipelined bytes
are not mistaken for an end. A client that closes only its sending side counts as gone, as it does for nginx
(ngx_http_upstream_check_broken_connection) and Go's net/http.
Invariant: a socket is in the set exactly from `watch` to the `close` of what that gave, which comes before its own.
"""

from __future__ import annotations

import select
from collections.abc import Callable

import trio
from trio.lowlevel import Abort, Task, checkpoint, current_task, reschedule, wait_readable, wait_task_rescheduled

READABLE = select.EPOLLIN
HUNG_UP = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR

EVENTS_MAX = 256
"""Taken from the kernel in one call; the rest come with the next."""


class Watch:
    """One socket in the set. What it calls must not raise.

    Attributes:
        hung_up: called when the peer closed at least its sending side.
        shortcut: called when something came, instead of waking who waits; who waits is woken if it returns False.
    """

    __slots__ = ("_ended", "_fd", "_readiness", "_task", "hung_up", "ready", "shortcut")

    def __init__(self, readiness: Readiness, fd: int) -> None:
        self.hung_up: Callable[[], object] | None = None
        self.shortcut: Callable[[], bool] | None = None
        self.ready = True  # something may be left to read; what came before the set knew the socket, too
        self._readiness = readiness
        self._fd = fd
        self._ended = False
        self._task: Task | None = None

    async def wait(self) -> None:
        """Until there may be something to read, or somebody wakes us."""
        if self.ready:
            await checkpoint()
            return
        self._task = current_task()
        await wait_task_rescheduled(self._abort)

    def read(self, *, all_of_it: bool) -> None:
        """What had come was read, or some of it. An end stays."""
        self.ready = self._ended or not all_of_it

    def wake(self) -> None:
        """Whoever waits looks for himself."""
        self.ready = True
        task, self._task = self._task, None
        if task is not None:
            reschedule(task)

    def _abort(self, _: object) -> Abort:
        self._task = None
        return Abort.SUCCEEDED

    def happened(self, events: int) -> None:
        if events & HUNG_UP:
            self._ended = self.ready = True
            if self.hung_up is not None:
                self.hung_up()
        if self.shortcut is None or not self.shortcut():
            self.wake()

    def close(self) -> None:
        """Before the socket is closed. May be called twice."""
        self._readiness.forget(self._fd, self)


class Readiness:
    """The set. Nobody is woken unless `run` runs."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watches: dict[int, Watch] = {}

    def watch(self, fd: int, *, readable: bool = True) -> Watch:
        """Take a socket in. Not `readable`: somebody else reads it, and only its end is told."""
        watch = self._watches[fd] = Watch(self, fd)
        wanted = READABLE | select.EPOLLRDHUP if readable else select.EPOLLRDHUP
        self._epoll.register(fd, wanted | select.EPOLLET)
        return watch

    def forget(self, fd: int, watch: Watch) -> None:
        if self._watches.get(fd) is watch:
            del self._watches[fd]
            self._epoll.unregister(fd)

    async def run(self) -> None:
        """Wake who waits, for ever."""
        epoll, watches = self._epoll, self._watches
        while True:
            await wait_readable(epoll.fileno())
            for fd, events in epoll.poll(0, EVENTS_MAX):
                watch = watches.get(fd)
                if watch is not None:
                    watch.happened(events)

    def close(self) -> None:
        """Nobody is woken any more."""
        self._watches.clear()
        trio.lowlevel.notify_closing(self._epoll.fileno())
        self._epoll.close()
