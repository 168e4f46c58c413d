"""Several `Membership` on one seeded event heap: enough of a network to tell the stories of membership.

Messages arrive after a delay, or not. Streams do not lose but deliver late. A message to another session than the one
that lives at the address, or from a session that is not proved there, is dropped and leads to a handshake, as
`sessions` does it. Packets of a paused host wait and are received before its timers run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from ranvier_py.core.mesh.membership.members import Membership
from ranvier_py.core.mesh.membership.profile import LAN, Profile
from ranvier_py.core.mesh.membership.roster import Member, Roster
from ranvier_py.core.mesh.mesh_values import Address, MemberChange, Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.messages import Message, Record, State

PORT = 7946
ROOM_BYTES = 1100


def record_of(name: str, session: int, epoch: int = 1, host: str = "", incarnation: int = 0, **more: object) -> Record:
    number = int("".join(filter(str.isdigit, name)) or 0)
    host = host or f"10.0.{number >> 8}.{number & 255}"
    record = Record(name, session, epoch, incarnation, State.ALIVE, host, PORT, 7)
    return record._replace(**more)  # type: ignore[arg-type]


def roster_of(count: int) -> Roster:
    roster = Roster()
    for number in range(1, count + 1):
        roster.add(record_of(f"n{number}", number), 0.0)
    return roster


def named(members: Membership, name: str) -> Member | None:
    """The member of this name, perhaps dead."""
    return next((member for member in members.everybody() if member.record.name == name), None)


class Host:
    """One node, and what the composition around it would keep."""

    def __init__(self, cluster: Cluster, me: Record) -> None:
        self.cluster = cluster
        self.outbox: list[Outgoing] = []
        self.members = Membership(
            me,
            cluster.profile,
            self.outbox,
            Random(f"{cluster.seed}/{me.session}"),
            cluster.now,
            room_bytes=ROOM_BYTES,
            datagrams=cluster.datagrams,
        )
        self.address: Address = (me.host, me.port)
        self.known: dict[int, None] = {}  # proved sessions
        self.changes: list[tuple[float, MemberChange]] = []
        self.up = True
        self.paused_until = 0.0
        self.backlog: list[tuple[Peer, int, Message, Plane]] = []
        self.scheduled = float("inf")

    @property
    def session(self) -> int:
        return self.members.me.session

    @property
    def name(self) -> str:
        return self.members.me.name

    def view(self, other: Host) -> Member | None:
        return self.members.member(other.session)

    def state_of(self, other: Host) -> State | None:
        member = self.view(other)
        return None if member is None else member.state

    def saw(self, what: str, name: str | None = None) -> list[float]:
        """When the operator was shown this."""
        return [at for at, change in self.changes if change.what == what and name in (None, change.record.name)]


class Cluster:
    """The hosts and everything in flight between them."""

    def __init__(
        self,
        seed: int = 1,
        *,
        profile: Profile = LAN,
        loss: float = 0.0,
        stream_loss: float | None = None,
        delay_s: float = 0.001,
        datagrams: bool = True,
    ) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.profile = profile
        self.loss = loss
        self.stream_loss = stream_loss  # None: streams deliver late instead of losing
        self.delay_s = delay_s
        self.datagrams = datagrams
        self.now = 100.0
        self.hosts: list[Host] = []
        self.at: dict[Address, Host] = {}
        self.blocked: Callable[[Address, Address, Plane], bool] = lambda *_: False
        self.refuses = False  # nobody at an address: the sender learns of it
        self.delivered = 0
        self.sent: dict[str, int] = {}
        self.watch: Callable[[Host, Peer, Message], None] | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def start(self, name: str, *, epoch: int = 1, session: int = 0, host: str = "", join: Iterable[Host] = ()) -> Host:
        session = session or self.rng.getrandbits(64) | 1
        new = Host(self, record_of(name, session, epoch, host))
        self.hosts.append(new)
        self.at[new.address] = new
        for other in join:
            self.greet(new, other.address)
        self.after_call(new)
        return new

    def grow(self, size: int, settle_s: float = 5.0) -> list[Host]:
        """A cluster of so many, joined through the first, all alive in each other's eyes."""
        losses, self.loss, self.stream_loss = (self.loss, self.stream_loss), 0.0, None
        first = self.start("n0")
        hosts = [first, *(self.start(f"n{number}", join=[first]) for number in range(1, size))]
        self.run(settle_s)
        self.loss, self.stream_loss = losses
        assert self.agree(hosts), "a quiet cluster must form"
        for each in hosts:
            each.changes.clear()
        return hosts

    def crash(self, host: Host) -> None:
        host.up = False
        if self.at.get(host.address) is host:
            del self.at[host.address]

    def restart(self, host: Host, *, epoch: int, join: Iterable[Host] = (), name: str = "") -> Host:
        self.crash(host)
        return self.start(name or host.name, epoch=epoch, host=host.address[0], join=join)

    def pause(self, host: Host, seconds: float) -> None:
        host.paused_until = self.now + seconds
        self.later(seconds, lambda: self.resume(host))

    def resume(self, host: Host) -> None:
        backlog, host.backlog = host.backlog, []
        for peer, session, message, plane in backlog:
            self._hand_over(host, peer, session, message, plane)
        host.scheduled = float("inf")
        self._tick(host)

    def cut(self, *sides: Sequence[Host]) -> None:
        """No packet passes between hosts of different sides."""
        side = {host.address: number for number, hosts in enumerate(sides) for host in hosts}
        self.blocked = lambda a, b, _: side.get(a) != side.get(b)

    def heal(self) -> None:
        self.blocked = lambda *_: False

    # --- judging

    def up(self) -> list[Host]:
        return [host for host in self.hosts if host.up]

    def agree(self, hosts: Sequence[Host]) -> bool:
        """Whether each of these sees exactly the others, alive."""
        wanted = {host.session for host in hosts}
        return all(
            {member.session for member in host.members.alive() if member.state is State.ALIVE} | {host.session}
            == wanted
            for host in hosts
        )

    def until(self, condition: Callable[[], bool], limit_s: float, step_s: float = 0.1) -> float:
        """Seconds until this holds. Fails after `limit_s`."""
        start = self.now
        while not condition():
            assert self.now - start < limit_s, f"not within {limit_s} s"
            self.run(step_s)
        return self.now - start

    # --- the heap

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heappush(self._events, (self.now + seconds, next(self._order), what))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, what = heappop(self._events)
            what()
        self.now = end

    def after_call(self, host: Host) -> None:
        """What the composition does after every call."""
        members = host.members
        if host.up:
            for out in host.outbox:
                self.carry(host, out)
        host.outbox.clear()
        host.changes += [(self.now, change) for change in members.changes]
        members.changes.clear()
        for session in members.gone:
            host.known.pop(session, None)
        members.gone.clear()
        wake_at = max(members.wake_at, self.now)
        if host.up and wake_at < host.scheduled:
            host.scheduled = wake_at
            self.later(wake_at - self.now, lambda: self._wake(host, wake_at))

    def _wake(self, host: Host, at: float) -> None:
        if host.up and host.scheduled == at and self.now >= host.paused_until:
            host.scheduled = float("inf")
            self._tick(host)

    def _tick(self, host: Host) -> None:
        host.members.tick(self.now)
        for address in host.members.needs_greeting(self.now):
            self.greet(host, address)
        self.after_call(host)

    # --- the network

    def carry(self, host: Host, out: Outgoing) -> None:
        peer = Peer(host.session, host.address)
        self.sent[type(out.message).__name__] = self.sent.get(type(out.message).__name__, 0) + 1
        delay_s = self._delay(host.address, out.to, out.plane)
        if delay_s is None:
            return
        self.later(delay_s, lambda: self.arrive(host, peer, out))

    def _delay(self, source: Address, to: Address, plane: Plane) -> float | None:
        """None: lost."""
        if self.blocked(source, to, plane):
            return None
        delay_s = self.delay_s * self.rng.uniform(0.5, 1.5)
        if plane is Plane.DATAGRAM:
            return None if self.rng.random() < self.loss else delay_s
        if self.stream_loss is not None:
            return None if self.rng.random() < self.stream_loss else delay_s
        wait_s = 0.2
        while self.rng.random() < self.loss:
            delay_s += wait_s
            wait_s *= 2
        return delay_s

    def arrive(self, source: Host, peer: Peer, out: Outgoing) -> None:
        host = self.at.get(out.to)
        if host is None:
            if self.refuses and source.up:
                source.members.unreachable(out.to, self.now, out.plane)
                self.after_call(source)
            return
        if self.now < host.paused_until:
            host.backlog.append((peer, out.session, out.message, out.plane))
        else:
            self._hand_over(host, peer, out.session, out.message, out.plane)

    def _hand_over(self, host: Host, peer: Peer, session: int, message: Message, plane: Plane) -> None:
        if session != host.session or peer.session not in host.known:
            source = self.at.get(peer.address)
            if source is not None and source.session == peer.session:
                self.greet(source, host.address)  # challenged: prove yourself
            return
        self.delivered += 1
        if self.watch is not None:
            self.watch(host, peer, message)
        host.members.receive(peer, message, self.now, plane)
        self.after_call(host)

    def greet(self, host: Host, address: Address) -> None:
        """Hello, Echo, Echo: each may be lost."""
        there, back = (
            self._delay(*path, Plane.DATAGRAM) for path in ((host.address, address), (address, host.address))
        )
        self.sent["Hello"] = self.sent.get("Hello", 0) + 1
        if there is None or address == host.address:
            return

        def answer() -> None:
            other = self.at.get(address)
            if other is not None and other.up and self.now >= other.paused_until and back is not None:
                record = other.members.me
                self.later(back, lambda: self._prove(host, record, other))

        self.later(there, answer)

    def _prove(self, host: Host, record: Record, other: Host) -> None:
        if not host.up or self.now < host.paused_until:
            return
        host.known[record.session] = None
        host.members.proved(record, self.now)
        self.after_call(host)
        third = self._delay(host.address, other.address, Plane.DATAGRAM)
        if third is not None:
            self.later(third, lambda: self._proved_back(host, other))

    def _proved_back(self, host: Host, other: Host) -> None:
        if other.up and self.now >= other.paused_until:
            other.known[host.session] = None
            other.members.proved(host.members.me, self.now)
            self.after_call(other)


def grown(size: int, seed: int = 1, **options: Any) -> tuple[Cluster, list[Host]]:
    """A cluster and its hosts, who all know each other."""
    cluster = Cluster(seed, **options)
    return cluster, cluster.grow(size)
