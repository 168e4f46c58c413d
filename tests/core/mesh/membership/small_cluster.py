"""Several `Membership` on the fake network: enough around them to tell the stories of membership.

What travels is what its receiver then does. A message to another session than the one that lives at the address, or
from a session that is not proved there, is dropped and leads to a handshake, as `sessions` does it. Packets of a paused
host wait and are received before its timers run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from random import Random
from typing import Any

from cluster.network.fake_network import Network
from cluster.network.links import CUT, Link, Rule
from cluster.network.virtual_time import VirtualTime
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
        self.backlog: list[Callable[[Host], None]] = []
        self.scheduled = inf

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
    """The hosts and the network between them. Streams deliver late what datagrams lose, unless `streams_lose`."""

    def __init__(
        self,
        seed: int = 1,
        *,
        profile: Profile = LAN,
        loss: float = 0.0,
        streams_lose: bool = False,
        delay_s: float = 0.001,
        datagrams: bool = True,
    ) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.profile = profile
        self.streams_lose = streams_lose
        self.datagrams = datagrams
        self.time = VirtualTime(100.0)
        self.network = Network(self.time, self.rng, Link(loss, delay_s / 2, delay_s / 2))
        self.later = self.time.after
        self.until = self.time.run_until
        self.hosts: list[Host] = []
        self.at: dict[Address, Host] = {}
        self.delivered = 0
        self.sent: dict[str, int] = {}
        self.watch: Callable[[Host, Peer, Message], None] | None = None

    @property
    def now(self) -> float:
        return self.time.now

    def start(self, name: str, *, epoch: int = 1, session: int = 0, host: str = "", join: Iterable[Host] = ()) -> Host:
        session = session or self.rng.getrandbits(64) | 1
        new = Host(self, record_of(name, session, epoch, host))
        self.hosts.append(new)
        self.at[new.address] = new
        self.network.attach(new.address, lambda data, source, plane: data[0](new), partial(self._unreachable, new))
        for other in join:
            self.greet(new, other.address)
        self.after_call(new)
        return new

    def grow(self, size: int, settle_s: float = 5.0) -> list[Host]:
        """A cluster of so many, joined through the first, all alive in each other's eyes."""
        loss = self.network.links.base.loss
        self.lose(0.0)
        first = self.start("n0")
        hosts = [first, *(self.start(f"n{number}", join=[first]) for number in range(1, size))]
        self.run(settle_s)
        self.lose(loss)
        assert self.agree(hosts), "a quiet cluster must form"
        for each in hosts:
            each.changes.clear()
        return hosts

    def crash(self, host: Host) -> None:
        host.up = False
        if self.at.get(host.address) is host:
            del self.at[host.address]
            self.network.detach(host.address)

    def restart(self, host: Host, *, epoch: int, join: Iterable[Host] = (), name: str = "") -> Host:
        self.crash(host)
        return self.start(name or host.name, epoch=epoch, host=host.address[0], join=join)

    def pause(self, host: Host, seconds: float) -> None:
        host.paused_until = self.now + seconds
        self.later(seconds, lambda: self.resume(host))

    def resume(self, host: Host) -> None:
        backlog, host.backlog = host.backlog, []
        for take in backlog:
            take(host)
        host.scheduled = inf
        self._tick(host)

    def cut(self, *sides: Sequence[Host]) -> None:
        """No packet passes between hosts of different sides."""
        for number, side in enumerate(sides):
            self.block(side, [host for other in sides[number + 1 :] for host in other])

    def block(self, sources: Iterable[Host], targets: Iterable[Host], link: Link = CUT, **more: Any) -> None:
        self.network.links.add(Rule([a.address for a in sources], [b.address for b in targets], link, **more))

    def heal(self) -> None:
        self.network.links.heal()

    def lose(self, share: float) -> None:
        self.network.links.base = self.network.links.base._replace(loss=share)

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

    # --- time

    def run(self, seconds: float) -> None:
        self.time.run(self.now + seconds)

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
            host.scheduled = inf
            self._tick(host)

    def _tick(self, host: Host) -> None:
        host.members.tick(self.now)
        for address in host.members.needs_greeting(self.now):
            self.greet(host, address)
        self.after_call(host)

    # --- the network

    def carry(self, host: Host, out: Outgoing) -> None:
        self._count(type(out.message).__name__)
        self.send(host, out.to, out.plane, self.take(Peer(host.session, host.address), out))

    def _count(self, name: str) -> None:
        self.sent[name] = self.sent.get(name, 0) + 1

    def send(self, host: Host, to: Address, plane: Plane, take: Callable[[Host], None]) -> None:
        """Have it taken by whoever is there when it arrives. What is cut off is lost, on streams too."""
        link = self.network.links.link(host.address, to, plane)
        if link.refuse or not link.cut:
            self.network.send(host.address, to, Plane.DATAGRAM if self.streams_lose else plane, (take,))

    def _unreachable(self, host: Host, to: Address, plane: Plane) -> None:
        if self.network.links.link(host.address, to, plane).refuse:
            host.members.unreachable(to, self.now, plane)
            self.after_call(host)

    def take(self, peer: Peer, out: Outgoing) -> Callable[[Host], None]:
        def take(host: Host) -> None:
            if self.now < host.paused_until:
                host.backlog.append(take)
            else:
                self._hand_over(host, peer, out)

        return take

    def _hand_over(self, host: Host, peer: Peer, out: Outgoing) -> None:
        if out.session != host.session or peer.session not in host.known:
            source = self.at.get(peer.address)
            if source is not None and source.session == peer.session:
                self.greet(source, host.address)  # challenged: prove yourself
            return
        self.delivered += 1
        if self.watch is not None:
            self.watch(host, peer, out.message)
        host.members.receive(peer, out.message, self.now, out.plane)
        self.after_call(host)

    def greet(self, host: Host, address: Address) -> None:
        """Hello, Echo, Echo: each may be lost, and who is paused answers none."""
        self._count("Hello")

        def hello(other: Host) -> None:
            if self.now >= other.paused_until:
                self.send(other, host.address, Plane.DATAGRAM, partial(echo, other, other.members.me))

        def echo(other: Host, record: Record, back: Host) -> None:
            if back is host and self.now >= host.paused_until:
                self._prove(host, record)
                self.send(host, address, Plane.DATAGRAM, partial(last, other))

        def last(other: Host, there: Host) -> None:
            if there is other and self.now >= other.paused_until:
                self._prove(other, host.members.me)

        if address != host.address:
            self.send(host, address, Plane.DATAGRAM, hello)

    def _prove(self, host: Host, record: Record) -> None:
        host.known[record.session] = None
        host.members.proved(record, self.now)
        self.after_call(host)


def grown(size: int, seed: int = 1, **options: Any) -> tuple[Cluster, list[Host]]:
    """A cluster and its hosts, who all know each other."""
    cluster = Cluster(seed, **options)
    return cluster, cluster.grow(size)
