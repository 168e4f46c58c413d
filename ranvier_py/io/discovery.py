"""Resolves the peers' names to addresses, again and again as long as the node lives.

A node that resolves its peers only once stays alone after their addresses change (grafana/mimir#16254: unnoticed for
11 h). Rule: each entry of `join` is looked up every half minute; by a node that is alone every INTERVAL_ALONE_MAX_S at
least. Addresses are only hints: the core greets them and finds out who is there. No name waits for another. If a lookup
fails, or finds nothing or only this node, the name keeps its last addresses: stale ones cost a greeting. The own
address is the one that faces the first peers known, be it later than the start; until then it is the default route's.
Bounds: NAMES_MAX, KNOWN_MAX; ADDRESSES_MAX of a name are tried in one round, chosen anew each time.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from random import Random

import trio

from ranvier_py.core.addresses import HostPort, is_address, is_loopback, is_wildcard, spelled
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.supervision import Faults

log = logging.getLogger(__name__)

ADDRESSES_MAX = 64
"""Addresses of one name to try in one round. One that answers is enough: it knows the other members."""

KNOWN_MAX = 4096  # addresses to keep of one name; more than a cluster has
NAMES_MAX = 16  # names to look up, each of which may stand for a whole cluster; more entries are ignored

ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation (RFC 5737, RFC 3849): routed by the default route, and nothing is ever sent to them."""

OWN_LOOKUP_S = 5.0  # at the start, for all names of peers; after that the default route has to do


INTERVAL_S = 30.0  # DNS answers are cached for about as long
INTERVAL_ALONE_S = 1.0  # the first interval while alone
INTERVAL_ALONE_MAX_S = 5.0  # twelve questions a minute are nothing to a resolver
JITTER = 0.2  # share of the interval, either way, so that nodes that start together drift apart
STEP_S = 1.0  # between two checks whether the node has become alone
LONELY_S = 10.0  # alone for so long, with addresses to try, an operator should look


@dataclass(slots=True)
class DiscoveryCounters:
    addresses: int = gauge("Addresses of peers that discovery knows now.")
    lookups: int = counter("Lookups of peers in DNS begun.")
    failures: int = counter("Lookups of peers in DNS that failed: NXDOMAIN, SERVFAIL, no resolver.")
    empty: int = counter("Answers of DNS without an address of a peer that can be used.")
    ignored: int = counter("Addresses of peers in DNS left out: of a family that this node lacks, or unable to answer.")


@dataclass(slots=True)
class Name:
    """One entry of `join`. `known` has the last useful addresses; failed lookups keep them."""

    endpoint: HostPort
    known: tuple[HostPort, ...] = ()
    has_record: bool = True  # by the last lookup


class Discovery:
    """Gives `contact` addresses of possible peers, for ever.

    Args:
        alone: returns whether this node has no peer.
        own: the address that this node advertises.
        family: address family of the socket that will send.
    """

    def __init__(
        self,
        join: Sequence[HostPort],
        contact: Callable[[Sequence[HostPort]], object],
        alone: Callable[[], bool],
        rng: Random,
        own: HostPort,
        family: int,
        faults: Faults | None = None,
    ) -> None:
        self._faults = faults or Faults()
        self.moved: Callable[[HostPort], object] | None = (
            None  # where `own` is a guess: takes what faces the first peers
        )
        self.contact, self.alone, self.rng = contact, alone, rng
        self.own, self.family = own, family
        self.counters = DiscoveryCounters()
        self._warned = False
        self._alone_since: float | None = None
        self._warned_alone: bool | None = None  # whether addresses were known when it was warned
        self._wait_s = INTERVAL_S  # until the next round
        entries = list(dict.fromkeys(join))
        self.literals = tuple(self._useful(where for where in entries if is_address(where[0])))
        self.names = [Name(where) for where in entries if not is_address(where[0])]
        if len(self.names) > NAMES_MAX:
            log.warning(event("gossip.names_ignored", names=len(self.names), most=NAMES_MAX))
            del self.names[NAMES_MAX:]
        self._count()

    def _count(self) -> None:
        self.counters.addresses = len(self.literals) + sum(len(name.known) for name in self.names)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. A failing resolver raises nothing here."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            await self._faults.keep("discovery", self._ask, nursery)

    async def _ask(self, nursery: trio.Nursery) -> None:
        self._wait_s = INTERVAL_ALONE_S if self.alone() else INTERVAL_S
        while True:
            self._try(self.literals)
            for name in self.names:
                nursery.start_soon(self._faults.once, "discovery", self._look_up, name)
            await self._pause()

    async def _pause(self) -> None:
        """Wait for the next round. A node that becomes alone begins it at once."""
        alone = self.alone()
        wait_s = min(self._wait_s, INTERVAL_ALONE_MAX_S) if alone else self._wait_s
        self._wait_s = min(2 * wait_s, INTERVAL_S)  # also once it has a peer: others may still form groups of their own
        until = trio.current_time() + wait_s * (1 + JITTER * (2 * self.rng.random() - 1))
        while (left_s := until - trio.current_time()) > 0:
            await trio.sleep(min(left_s, STEP_S))
            self._watch_loneliness()
            if not alone and self.alone():
                self._wait_s = INTERVAL_ALONE_S
                return

    def _watch_loneliness(self) -> None:
        """Log once if nobody answers: from outside, a wrong key looks like a cluster of one."""
        now = trio.current_time()
        if not self.alone():
            self._alone_since, self._warned_alone = None, None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since >= LONELY_S:
            asked = [*self.literals, *(where for name in self.names for where in name.known)]
            if (asked or not all(name.has_record for name in self.names)) and self._warned_alone is not bool(asked):
                self._warned_alone = bool(asked)
                log.warning(event("gossip.alone", why=self._why_alone(asked), advertised=self._guess()))

    def _why_alone(self, asked: Sequence[HostPort]) -> str:
        if not asked:
            names = ", ".join(spelled(name.endpoint) for name in self.names if not name.has_record)
            return f"no address of a peer is known: DNS has none for {names}"
        more = f" and {len(asked) - 1} more" if len(asked) > 1 else ""
        why = "not started, another key or cluster_name, or UDP and TCP are blocked"
        return f"nobody answers at {spelled(asked[0])}{more}: {why}"

    def _guess(self) -> str:
        return spelled(self.own) if self.moved else ""

    def _choose_again(self, found: Sequence[HostPort]) -> None:
        """Take the own address that faces the first peers, if it was a guess, before any of them is greeted."""
        host = face_of([host for host, _ in found], self.family)
        if self.moved is None or not host or is_loopback(host):
            return
        moved, self.moved = self.moved, None
        if host != self.own[0]:
            self.own = host, self.own[1]
            moved(self.own)

    def _try(self, addresses: Sequence[HostPort]) -> None:
        if addresses:
            self.contact(self.rng.sample(addresses, min(len(addresses), ADDRESSES_MAX)))

    async def _look_up(self, name: Name) -> None:
        self.counters.lookups += 1
        try:
            found = await resolved(name.endpoint, self.family)
            name.has_record = bool(found)
            self._choose_again(found)
            useful = tuple(self._useful(found))
            if useful:
                name.known = useful[:KNOWN_MAX]
                self._count()
            self.counters.empty += not useful
        except OSError:  # the resolver logs it
            self.counters.failures += 1
            name.has_record = False
        self._try(name.known)

    def _useful(self, addresses: Iterable[HostPort]) -> Iterator[HostPort]:
        """Yield the addresses that a peer may have, and from which it could answer us. Counts those of no use."""
        for where in addresses:
            if where == self.own:
                continue
            if not fits(where[0], self.family):
                self.counters.ignored += 1
            elif is_loopback(self.own[0]) and not is_loopback(where[0]):
                self.counters.ignored += 1
                if not self._warned:
                    log.error(event("gossip.loopback", address=spelled(where)))
                self._warned = True
            else:
                yield where


async def resolved(where: HostPort, family: int) -> list[HostPort]:
    """Return the addresses of a name, each once. Raises OSError."""
    found = await trio.socket.getaddrinfo(*where, family=family, type=socket.SOCK_DGRAM)
    return list(dict.fromkeys((str(address[0]), where[1]) for *_, address in found if is_address(str(address[0]))))


def family_of(host: str) -> int:
    return socket.AF_INET if ip_address(host).version == 4 else socket.AF_INET6


def fits(host: str, family: int) -> bool:
    return family in (socket.AF_UNSPEC, family_of(host))


async def own_host(join: Sequence[HostPort], family: int) -> tuple[str, bool]:
    """Return this machine's address that faces the peers, for a node that listens on all addresses; and whether this is
    a guess, since no address of a peer is known.

    The routes to the peers are tried first, then the default routes; a loopback address is taken only if there is no
    other: then all peers are on this machine. Raises ConfigError if there is none.
    """
    targets = [host for host, _ in join if is_address(host)]
    with trio.move_on_after(OWN_LOOKUP_S):
        for where in join[:NAMES_MAX]:
            if not is_address(where[0]):
                targets += [host for host, _ in await resolved_or_nothing(where, family)]
    families = ELSEWHERE if family == socket.AF_UNSPEC else {family: ELSEWHERE[socket.AddressFamily(family)]}
    if host := face_of((*targets[:ADDRESSES_MAX], *families.values()), family):
        return host, not targets
    raise ConfigError(["advertise: the address that faces the peers can't be found out: set it"])


def face_of(targets: Sequence[str], family: int) -> str:
    """Return our address that faces the first of these that shows one, loopback only if none shows another; or ""."""
    usable = [host for host in map(facing, targets) if host and not is_wildcard(host) and fits(host, family)]
    return next((host for host in usable if not is_loopback(host)), usable[0] if usable else "")


async def resolved_or_nothing(where: HostPort, family: int) -> list[HostPort]:
    try:
        return await resolved(where, family)
    except OSError:
        return []


def facing(host: str) -> str:
    """Return our address on the route to `host`, "" if there is none. Connecting a datagram socket sends nothing."""
    try:
        with socket.socket(family_of(host), socket.SOCK_DGRAM) as sock:
            sock.connect((host, 9))  # any port: the kernel only looks for a route
            return str(sock.getsockname()[0])
    except OSError:
        return ""
