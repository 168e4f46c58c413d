"""Worker processes: one node each, on one public port.

The parent serves nothing. It forks the workers before any thread or event loop exists, passes SIGTERM, SIGINT and,
where somebody handles it, SIGHUP on,
and restarts a worker that dies on its own. The kernel spreads new connections over the workers that listen
(SO_REUSEPORT), so a dead one takes only its own connections with it.

Rules: the wait before a restart doubles from 1 s to 30 s, and starts over once a worker has lived for a minute. A
worker that ends with one of the `fatal` codes can't be helped by a restart: the others are stopped and that code is
returned. After a signal nothing is restarted; who has not ended `stop_timeout_s` later is killed.
Workers have a process group of their own, so that Ctrl-C reaches them once, through the parent, and on Linux they are
stopped should the parent vanish.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ranvier_py.core.pauses import doubled

log = logging.getLogger(__name__)

RESTART_DELAY_S = 1.0
RESTART_DELAY_S_MAX = 30.0
STABLE_S = 60.0
"""A worker that lived this long was fine; its next death is a new story."""

PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
WATCHED = (*STOP_SIGNALS, signal.SIGCHLD, signal.SIGHUP)  # blocked, and waited for
IDLE_S = 3600.0  # with nothing to do but to wait for them


@dataclass(slots=True)
class Worker:
    """One slot. `pid` is 0 while it waits for its restart at `restart_at`, in seconds of the monotonic clock."""

    index: int
    pid: int = 0
    started_at: float = 0.0
    restart_at: float = 0.0
    deaths: int = 0


@dataclass(slots=True)
class Supervisor:
    """Keeps `count` workers alive until a signal. `start(index)` runs in the child and returns its exit code."""

    count: int
    start: Callable[[int], int]
    stop_timeout_s: float
    fatal: Collection[int] = ()
    restart_delay_s: float = RESTART_DELAY_S
    restarts: int = 0
    hang_ups: int = 0  # that were passed on
    workers: list[Worker] = field(default_factory=list)
    stopping_until: float | None = None
    exit_code: int = 0

    def run(self) -> int:
        """Returns the exit code: 0 when all workers ended well after a signal. For the main thread, the only one."""
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        self.workers = [Worker(index) for index in range(self.count)]
        while self.stopping_until is None or any(worker.pid for worker in self.workers):
            self._start_due()
            came = signal.sigtimedwait(WATCHED, self._pause_s())
            if came is not None and came.si_signo in STOP_SIGNALS:
                self._stop(came.si_signo)
            elif came is not None and came.si_signo == signal.SIGHUP:
                self._hang_up()
            self._reap()
        return self.exit_code

    def _start_due(self) -> None:
        now = time.monotonic()
        if self.stopping_until is not None:
            if now >= self.stopping_until:
                self._signal_all(signal.SIGKILL)
            return
        for worker in self.workers:
            if worker.pid == 0 and now >= worker.restart_at:
                worker.pid = fork(lambda index=worker.index: self.start(index))  # type: ignore[misc]
                worker.started_at = now
                log.info("worker.started %d, process %d", worker.index, worker.pid)

    def _pause_s(self) -> float:
        """Until the next thing to do without a signal."""
        due = [worker.restart_at for worker in self.workers if worker.pid == 0]
        if self.stopping_until is not None:
            due = [self.stopping_until]
        return max(0.05, min(due) - time.monotonic()) if due else IDLE_S

    def _stop(self, number: int) -> None:
        if self.stopping_until is None:
            self.stopping_until = time.monotonic() + self.stop_timeout_s
        self._signal_all(number)

    def _hang_up(self) -> None:
        """Workers read their configuration again; where a hang-up is to end the process, it does."""
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            self._stop(signal.SIGTERM)
        else:
            self.hang_ups += 1
            self._signal_all(signal.SIGHUP)

    def _signal_all(self, number: int) -> None:
        for worker in self.workers:
            if worker.pid:
                os.kill(worker.pid, number)

    def _reap(self) -> None:
        for worker in self.workers:
            if worker.pid:
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
                if pid:
                    self._ended(worker, os.waitstatus_to_exitcode(status))

    def _ended(self, worker: Worker, code: int) -> None:
        pid, worker.pid = worker.pid, 0
        if self.stopping_until is not None:
            expected = code in (0, *(-number for number in STOP_SIGNALS))  # negative: before it could handle the signal
            self.exit_code = self.exit_code or (0 if expected else abs(code))
            return
        if code in self.fatal:
            log.error("worker.failed %d ended with code %d: stopping all", worker.index, code)
            self.exit_code = code
            self._stop(signal.SIGTERM)
            return
        now = time.monotonic()
        worker.deaths = 1 if now - worker.started_at >= STABLE_S else worker.deaths + 1
        delay_s = doubled(self.restart_delay_s, worker.deaths - 1, RESTART_DELAY_S_MAX)
        worker.restart_at = now + delay_s
        self.restarts += 1
        log.error("worker.ended %d (process %d) with code %d; next in %.1f s", worker.index, pid, code, delay_s)


def fork(body: Callable[[], int]) -> int:
    """Run `body` in a child that takes signals. Returns the child's pid; never returns in the child."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        end_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)  # one that came before the child was ready is not lost
        code = body()
    except KeyboardInterrupt:
        code = 0
    except BaseException:
        log.critical("worker.crashed", exc_info=True)
    finally:
        sys.stdout.flush()
        logging.shutdown()  # what waits to be written
        os._exit(code)


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent dies. Linux only; elsewhere the workers would outlive it."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGTERM)
