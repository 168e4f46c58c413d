"""Looks the host names of backends up again and again, so that a name that moves is noticed under steady traffic.

A connection that is always in use never asks where its name leads now, but probes do: they would judge one process
while requests reach another. Numeric addresses are not looked up.

Rules: each name is looked up every INTERVAL_S; with more than LOOKUPS_PER_S_MAX in a second the interval grows. No name
waits for another, and each has one lookup at a time. A lookup that fails or hangs leaves what is known; the resolver
(`io/resolver.py`) logs it. Bound: one entry for each name of a backend.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping

import trio

from ranvier_py.core.addresses import is_address
from ranvier_py.core.routing.processes.name_addresses import NameAddresses
from ranvier_py.supervision import Faults

INTERVAL_S = 5.0  # the default interval of probes, which follow the name at once
LOOKUPS_PER_S_MAX = 20.0  # of one node: the name server's other clients need it as well
DEADLINE_S = 10.0  # the resolver's own
ASKED_S = 2.0  # for what an operator waits for; an answer of a resolver takes milliseconds


class HostNames:
    """See the module.

    Args:
        hosts: returns the hosts of all backends as they are now.
        answered: called with a name, its addresses, and whether it has moved (`NameAddresses.answered`).
    """

    def __init__(
        self,
        hosts: Callable[[], Iterable[str]],
        answered: Callable[[str, frozenset[str], bool], object],
    ) -> None:
        self._hosts, self._answered = hosts, answered
        self._names: dict[str, NameAddresses] = {}
        self._running: set[str] = set()  # names that are being looked up

    @property
    def names(self) -> Mapping[str, NameAddresses]:
        return self._names

    async def run(self, faults: Faults) -> None:
        """Run until cancelled."""
        async with trio.open_nursery() as nursery:
            await faults.keep("host_names", self._repeat, nursery, faults)

    async def _repeat(self, nursery: trio.Nursery, faults: Faults) -> None:
        while True:
            began = trio.current_time()
            names = {host for host in self._hosts() if not is_address(host)}
            self._names = {host: self._names.get(host) or NameAddresses() for host in names}
            for host in sorted(names - self._running):
                self._running.add(host)
                nursery.start_soon(faults.once, "host_names", self._look_up, host)
                await trio.sleep(1 / LOOKUPS_PER_S_MAX)
            await trio.sleep_until(began + INTERVAL_S)

    async def addresses(self, hosts: Iterable[str]) -> Mapping[str, frozenset[str]]:
        """Return the addresses of these hosts: those that are known, else as they are found within ASKED_S."""
        found: dict[str, frozenset[str]] = {}

        async def look_up(host: str) -> None:
            known = self._names.get(host)
            found[host] = known.addresses if known is not None else frozenset()
            if not found[host]:
                found[host] = frozenset([host] if is_address(host) else await addresses_of(host, ASKED_S))

        async with trio.open_nursery() as nursery:
            for host in set(hosts):
                nursery.start_soon(look_up, host)
        return found

    async def _look_up(self, host: str) -> None:
        try:
            found = await addresses_of(host, DEADLINE_S)
        finally:
            self._running.discard(host)
        name = self._names.get(host)
        if name is not None and found:
            moved = name.answered(found)
            self._answered(host, name.addresses, moved)


async def addresses_of(host: str, deadline_s: float) -> list[str]:
    """Look a name up. Returns nothing if that fails, which the resolver logs, or takes too long."""
    try:
        with trio.move_on_after(deadline_s):
            infos = await trio.socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            return [str(address[0]).partition("%")[0] for *_, address in infos]
    except OSError:
        pass
    return []
