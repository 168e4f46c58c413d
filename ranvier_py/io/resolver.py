"""Resolves host names for everything that connects through trio: probes, event streams, requests, discovery.

Rule: each name has one lookup at a time, shared by all who want it. Its result counts as known for FRESH_S. The last
good addresses are used if a lookup fails or takes longer than PATIENCE_S; if the name is gone, for GONE_S at most.
Every failure is an AddressError; with an `errno` nothing was asked. Invariant: a lack of descriptors here, or a
resolver that hangs, counts against no backend (test_hanging_names.py, test_descriptors_shared.py).
Bounds: NAMES_MAX, of which the one unasked for longest is dropped; ADDRESSES_MAX of each; threads of its own,
SLOW_THREADS_MAX for names that were slow; a caller waits DEADLINE_S.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

import trio

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.errors import AddressError, is_exhaustion
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.supervision import Faults

log = logging.getLogger(__name__)

FRESH_S = 1.0  # so that a burst of connections asks once
PATIENCE_S = 0.5  # for new addresses of a name that has old ones: a fraction of any deadline of the callers
DEADLINE_S = 10.0  # glibc's two tries at one server; probes and requests give up earlier by themselves
GONE_S = 30.0  # enough to restart a name server, or whatever fills it
SLOW_S = 2.0
THREADS_MAX, SLOW_THREADS_MAX = 24, 8
NAMES_MAX = 8192  # twice as many as there can be backends
ADDRESSES_MAX = 4096  # more than a cluster has nodes

GONE = frozenset((socket.EAI_NONAME, socket.EAI_NODATA))
"""Errors by which a name server states that the name or its addresses do not exist. Others may be its own trouble."""


@dataclass(slots=True)
class ResolverCounters:
    names: int = gauge("Names of backends whose addresses are remembered.")
    lookups: int = counter("Lookups of backends' names in DNS begun.")
    failures: int = counter("Lookups of backends' names in DNS that failed.")
    stale: int = counter(
        "Times that older addresses were used because a lookup of a backend's name failed or took too long."
    )


@dataclass(slots=True)
class Lookup:
    """What is known of one name. Times are seconds of trio's clock."""

    host: bytes
    found: list[Any] = field(default_factory=list)  # entries of getaddrinfo's last good answer
    found_at: float = -inf
    ends_at: float = inf  # `found` must not be used any more
    began_at: float = -inf  # of the last lookup
    tried_at: float = -inf  # when the last lookup ended, with or without success
    took_s: float = 0.0  # the last lookup, in its thread
    trouble: str = ""
    exhausted: int = 0  # errno, if the lookup failed for lack of something on this machine
    running: trio.Event | None = None  # set when the lookup ends


class Resolver(trio.abc.HostnameResolver):
    """See the module. Without `run`, a lookup runs in its first caller's task, and is cancelled with it."""

    def __init__(self, faults: Faults) -> None:
        self.counters = ResolverCounters()
        self._faults = faults
        self._names: BoundedDict[bytes, Lookup] = BoundedDict(NAMES_MAX)
        self._threads = trio.CapacityLimiter(THREADS_MAX)
        self._slow_threads = trio.CapacityLimiter(SLOW_THREADS_MAX)
        self._before: trio.abc.HostnameResolver | None = None  # the one that trio asked before `installed`
        self._nursery: trio.Nursery | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make trio ask this resolver meanwhile."""
        self._before = trio.socket.set_custom_hostname_resolver(self)
        try:
            yield
        finally:
            current = trio.socket.set_custom_hostname_resolver(self._before)
            if current is not self:  # another node of this process has replaced it, and asks this one
                trio.socket.set_custom_hostname_resolver(current)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run lookups until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    async def getaddrinfo(
        self,
        host: bytes | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,  # noqa: A002  # the name is trio's
        proto: int = 0,
        flags: int = 0,  # noqa: ARG002  # none of those that are used concerns names
    ) -> list[Any]:
        """Return addresses of a name, perhaps old ones. Raises AddressError."""
        name = await self._known(host or b"")
        usable = name.found if trio.current_time() < name.ends_at else []
        self.counters.stale += bool(name.trouble and usable)
        kind = socket.SocketKind(type or socket.SOCK_STREAM)
        found = [
            (each, kind, proto, "", (address[0], int(port or 0), *address[2:]))
            for each, _, _, _, address in usable
            if family in (socket.AF_UNSPEC, each)
        ]
        if not found:
            error = AddressError(f"{name.host.decode()}: {name.trouble or 'no address of that family'}")
            error.errno = name.exhausted or None
            raise error
        return found

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        raise NotImplementedError

    async def _known(self, host: bytes) -> Lookup:
        """Return what is known of the name, after a lookup if one is due, or after PATIENCE_S or DEADLINE_S."""
        now, name = trio.current_time(), self._names.get(host) or Lookup(host)
        self._names[host] = name  # moves it to the end
        self.counters.names = len(self._names)
        if name.running is None and now >= name.tried_at + FRESH_S:
            name.running, name.began_at = trio.Event(), now
            if self._nursery is None:
                await self._look_up(name)
            else:
                self._nursery.start_soon(self._faults.once, "resolver", self._look_up, name)
        if name.running is not None:
            limit_s = PATIENCE_S if name.found and now < name.ends_at else DEADLINE_S
            with trio.move_on_at(name.began_at + limit_s) as patience:
                await name.running.wait()
            if patience.cancelled_caught:
                name.exhausted = 0
                self._note(name, "no answer in time")
        return name

    async def _look_up(self, name: Lookup) -> None:
        self.counters.lookups += 1
        trouble, found, is_gone, exhausted = "", [], True, 0
        try:
            found = await self._ask(name)
            trouble = "" if found else "no address"
        except (OSError, UnicodeError) as error:
            trouble = getattr(error, "strerror", None) or str(error) or type(error).__name__
            is_gone = getattr(error, "errno", None) in GONE
            exhausted = error.errno or 0 if isinstance(error, OSError) and is_exhaustion(error) else 0
        finally:  # a cancelled lookup, too, but that is no evidence about the name
            assert name.running is not None
            name.running.set()
            name.running = None
        name.tried_at, name.exhausted = trio.current_time(), exhausted
        if found:
            name.found, name.found_at, name.ends_at = found[:ADDRESSES_MAX], name.tried_at, inf
        elif is_gone:
            name.ends_at = name.found_at + GONE_S
        self.counters.failures += bool(trouble)
        self._note(name, trouble)

    async def _ask(self, name: Lookup) -> list[Any]:
        """Ask the resolver that was there before, or else the system. Raises OSError, UnicodeError."""
        if self._before is not None:
            return list(await self._before.getaddrinfo(name.host, 0, socket.AF_UNSPEC, socket.SOCK_STREAM))
        threads = self._slow_threads if name.took_s > SLOW_S else self._threads
        return await trio.to_thread.run_sync(ask_system, name, abandon_on_cancel=True, limiter=threads)

    def _note(self, name: Lookup, trouble: str) -> None:
        """Log when a name starts to fail, and when it works again."""
        if trouble and not name.trouble:
            log.warning(event("name.failed", host=name.host.decode(), why=str(trouble), known=len(name.found)))
        elif name.trouble and not trouble:
            log.info(event("name.found", host=name.host.decode(), found=len(name.found)))
        name.trouble = trouble


def ask_system(name: Lookup) -> list[Any]:
    """Look a name up, in a thread. Notes the time without the wait for a thread. Raises OSError, UnicodeError."""
    began = time.monotonic()
    try:
        return socket.getaddrinfo(name.host, 0, socket.AF_UNSPEC, socket.SOCK_STREAM)
    finally:
        name.took_s = time.monotonic() - began
