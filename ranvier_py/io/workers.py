"""Runs worker processes: one node each, on one public port.

Rule: the parent serves nothing. It forks the workers before any thread or event loop exists, passes signals on, and
restarts those that die on their own, after a wait from 1 s to 30 s that is reset once one has lived for STABLE_S. The
kernel spreads new connections over the workers that listen (SO_REUSEPORT), so a worker that dies loses only its own.
If one ends with a `fatal` code, a restart can't help: the others are stopped and that code is returned. Each has its
own process group, so that Ctrl-C reaches it once, through the parent. Workers of two parents never share a port.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ranvier_py.core.log_events import event
from ranvier_py.core.pauses import doubled

log = logging.getLogger(__name__)

RESTART_DELAY_S = 1.0
RESTART_DELAY_S_MAX = 30.0
STABLE_S = 60.0
"""After a worker has lived this long, its death counts as the first in a row."""

PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
WATCHED = (*STOP_SIGNALS, signal.SIGCHLD, signal.SIGHUP)  # blocked, and taken by sigtimedwait
IDLE_S = 3600.0  # longest wait for a signal when nothing else is due


@dataclass(slots=True)
class Worker:
    """One slot. `pid` is 0 until its restart at `restart_at`, in seconds of the monotonic clock."""

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
    claims: Sequence[socket.socket] = ()  # of the port; only this process has them, until it stops
    restart_delay_s: float = RESTART_DELAY_S
    restarts: int = 0
    hang_ups: int = 0  # SIGHUPs passed on
    workers: list[Worker] = field(default_factory=list)
    stopping_until: float | None = None
    exit_code: int = 0

    def run(self) -> int:
        """Returns the exit code, 0 if all workers ended well after a signal. Call it in the main and only thread."""
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
                worker.started_at = now
                try:
                    worker.pid = fork(partial(self._begin, worker.index))
                except OSError as error:  # for lack of memory or processes just now; the other workers go on
                    log.error(
                        event("worker.not_started", index=worker.index, why=str(error), delay_s=self._delay(worker))
                    )
                else:
                    log.info(event("worker.started", index=worker.index, pid=worker.pid))

    def _begin(self, index: int) -> int:
        self._give_up_claims()
        return self.start(index)

    def _give_up_claims(self) -> None:
        for claim in self.claims:
            claim.close()

    def _pause_s(self) -> float:
        """Return the seconds until something is due without a signal."""
        due = [worker.restart_at for worker in self.workers if worker.pid == 0]
        if self.stopping_until is not None:
            due = [self.stopping_until]
        return max(0.05, min(due) - time.monotonic()) if due else IDLE_S

    def _stop(self, number: int) -> None:
        self._give_up_claims()  # others may begin while the workers drain
        if self.stopping_until is None:
            self.stopping_until = time.monotonic() + self.stop_timeout_s
        self._signal_all(number)

    def _hang_up(self) -> None:
        """Have the workers reload their configuration; if nothing handles SIGHUP, stop them."""
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
            expected = code in (0, *(-number for number in STOP_SIGNALS))  # negative: killed before it had a handler
            self.exit_code = self.exit_code or (0 if expected else abs(code))
            return
        if code in self.fatal:
            log.error(event("worker.failed", index=worker.index, code=code))
            self.exit_code = code
            self._stop(signal.SIGTERM)
            return
        self.restarts += 1
        delay_s = self._delay(worker)
        log.error(event("worker.ended", index=worker.index, pid=pid, code=code, delay_s=delay_s))

    def _delay(self, worker: Worker) -> float:
        """Put off the worker's next start. Returns the seconds until then."""
        now = time.monotonic()
        worker.deaths = 1 if now - worker.started_at >= STABLE_S else worker.deaths + 1
        delay_s = doubled(self.restart_delay_s, worker.deaths - 1, RESTART_DELAY_S_MAX)
        worker.restart_at = now + delay_s
        return delay_s


def claimed(host: str, port: int) -> Sequence[socket.socket]:
    """Return sockets that keep a port for workers of this process. Raises OSError if somebody else has it.

    Of two that claim it in the same moment the kernel lets one listen. What stays open does not listen, so that no
    connection comes there, and shares the port (SO_REUSEPORT) with nobody who does not. Elsewhere than on Linux it
    could not be bound; there the port is only looked at.
    """
    places = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with ExitStack() as undo:
        claims = [undo.enter_context(claim_of(family, address)) for family, _, _, _, address in places]
        undo.pop_all()
    return claims


def claim_of(family: int, address: Any) -> socket.socket:
    claim = socket.socket(family, socket.SOCK_STREAM)
    with ExitStack() as undo, socket.socket(family, socket.SOCK_STREAM) as first:
        undo.callback(claim.close)
        for sock in (first, claim):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        first.bind(address)
        first.listen(1)
        if sys.platform == "linux":
            for sock in (first, claim):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            claim.bind(first.getsockname())
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # else others could be bound beside it
        undo.pop_all()
    return claim


def fork(body: Callable[[], int]) -> int:
    """Run `body` in a child that receives signals. Returns the child's pid; never returns in the child."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        end_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)  # delivers one that came before the child was ready
        code = body()
    except KeyboardInterrupt:
        code = 0
    except BaseException:
        log.critical(event("worker.crashed"), exc_info=True)
    finally:
        sys.stdout.flush()
        logging.shutdown()  # writes the lines that wait
        os._exit(code)


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent dies. Linux only; elsewhere the workers would outlive it."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before prctl
        os.kill(os.getpid(), signal.SIGTERM)
