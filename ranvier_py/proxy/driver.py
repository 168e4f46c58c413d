"""The driver that runs a connection's steps: a generator that decides synchronously, and yields each `Wait`.

A `Watch` waits until its socket has something to read: no task is woken, the steps go on within `readiness`' call. An
async function is awaited by the connection's task; steps are run to their end, without the frames of their callers at
each wait; the yield returns or raises their result.
Rule: `interrupt` raises an error where the steps wait: a missed deadline, a client that left, a drain; the first of
several counts. A cancelled task closes its steps, so their `finally` clauses run, which must not yield.
Invariant: the connection's task owns it all the while (test_driver.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import GeneratorType
from typing import Any, Generic, TypeAlias, TypeVar

import trio
from trio.lowlevel import Abort, Task, checkpoint, current_task, reschedule, wait_task_rescheduled

from ranvier_py.proxy.readiness import Watch

Result = TypeVar("Result")
Wait: TypeAlias = Watch | Callable[[], Awaitable[Any]]
Steps: TypeAlias = Generator[Wait | Generator[Any, Any, Any], Any, Result]


class Driver(Generic[Result]):
    """Runs the steps of one connection."""

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
        """Raise this error where the steps wait now, or at their next wait."""
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
