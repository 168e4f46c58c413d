"""Runs the steps of connections: generators that decide synchronously, and yield each `Wait`.

A `Watch` waits until its socket has something to read, without a system call or a task for each wait: every socket is
registered once in one epoll set, edge-triggered, and the steps go on within the call that takes its event
(`Readiness`). An async function is awaited by the connection's task; steps that are yielded are run to their end, and
the yield returns or raises their result. Invariants: the connection's task owns it all the while; a socket is in the
set from `watch` to the `close` of its Watch, which comes before its own (test_driver.py).
"""

from __future__ import annotations

import select
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, Generic, TypeAlias, TypeVar

import trio
from trio.lowlevel import Abort, Task, checkpoint, current_task, reschedule, wait_readable, wait_task_rescheduled

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
    """One socket in the set. `call` must neither wait nor raise; it is called for one event, and must be set again for
    the next."""

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
    """The epoll set. Nobody is called unless `run` runs. Its events show who hung up, even while nobody reads; a client
    that closes only its sending side counts as gone, as for nginx and Go's net/http."""

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


Result = TypeVar("Result")
Wait: TypeAlias = Watch | Callable[[], Awaitable[Any]]
Steps: TypeAlias = Generator[Wait | Generator[Any, Any, Any], Any, Result]


class Driver(Generic[Result]):
    """Runs the steps of one connection. A cancelled task closes them, so their `finally` clauses run, which must not
    yield."""

    __slots__ = ("_callers", "_error", "_failure", "_result", "_scope", "_steps", "_task", "_wait")

    def __init__(self, steps: Steps[Result]) -> None:
        self._steps: Steps[Any] = steps
        self._callers: list[Steps[Any]] = []  # steps that wait for the end of others
        self._wait: Wait | None = None
        self._error: Exception | None = None  # to be raised where the steps wait
        self._scope: trio.CancelScope | None = None  # around what the task awaits
        self._task: Task | None = None  # set while the task sleeps, since the steps wait for a socket
        self._result: Result
        self._failure: BaseException | None = None

    async def run(self) -> Result:
        """Run the steps to their end; return or raise what they do. The connection's task calls this once."""
        try:
            self._advance(self._steps.send, None)
            while self._wait is not None:
                error, self._error = self._error, None
                if error is not None:
                    self._advance(self._steps.throw, error)
                    error = None  # since its traceback holds this frame
                elif type(self._wait) is not Watch:
                    await self._perform(self._wait)  # type: ignore[arg-type]
                elif self._wait.ready:  # something may be left to read: other tasks run first
                    await self._perform(checkpoint)
                else:
                    self._task = current_task()
                    await wait_task_rescheduled(self._abort)
            if self._failure is not None:
                raise self._failure
            return self._result
        finally:
            self._unwatch()
            self._steps.close()
            while self._callers:
                self._callers.pop().close()
            self._failure = None  # since its traceback holds this frame

    def interrupt(self, error: Exception) -> None:
        """Raise this error where the steps wait now, or at their next wait: a missed deadline, a client that left, a
        drain. The first of several counts."""
        if self._error is None:
            self._error = error
        self._unwatch()
        if self._scope is not None:
            self._scope.cancel()
        self._wake()

    async def _perform(self, wait: Callable[[], Awaitable[Any]]) -> None:
        self._scope = trio.CancelScope()
        try:
            with self._scope:
                value = await wait()
        except Exception as error:
            self._scope = None
            self._advance(self._steps.throw, error)
        else:
            cancelled, self._scope = self._scope.cancelled_caught, None
            if not cancelled:  # if cancelled, `run` raises the error that was the reason
                self._advance(self._steps.send, value)

    def _advance(self, go_on: Callable[[Any], Any], value: Any) -> bool:
        """Run the steps up to their next wait. Returns True if that wait needs no task."""
        while True:
            try:
                wait = go_on(value)
            except StopIteration as end:
                if not self._callers:
                    self._wait, self._result = None, end.value
                    return False
                self._steps = self._callers.pop()
                go_on, value = self._steps.send, end.value
            except BaseException as failure:
                if not self._callers:
                    self._wait, self._failure = None, failure
                    value = None  # may be an error that was thrown, whose traceback holds this frame
                    return False
                self._steps = self._callers.pop()
                go_on, value = self._steps.throw, failure
            else:
                value = None  # for the same reason
                if type(wait) is GeneratorType:
                    self._callers.append(self._steps)
                    self._steps, go_on = wait, wait.send
                    continue
                self._wait = wait
                if type(wait) is not Watch or wait.ready:
                    return False
                wait.call = self._happened
                return True

    def _happened(self) -> None:
        if not self._advance(self._steps.send, None):
            self._wake()

    def _wake(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            reschedule(task)

    def _unwatch(self) -> None:
        if type(self._wait) is Watch:
            self._wait.call = None

    def _abort(self, _: object) -> Abort:
        self._task = None
        return Abort.SUCCEEDED


def in_portions(making: Generator[None, None, Result]) -> Steps[Result]:
    """Run work that yields after each portion; other tasks have their turn in between."""
    while True:
        try:
            next(making)
        except StopIteration as end:
            made: Result = end.value
            return made
        yield checkpoint
