"""A gossip of fifty lines for the tests of the simulator itself: right while the network is, and wrong on request.

Every half second a node sends all it knows to all it knows: members by datagram, routes by stream. Who has been silent
for two seconds is dead. No keys, no bounds, no cleverness.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random

from cluster.simulation.node_values import Birth, Bounded, Look, Seen, Trip
from cluster.simulation.sim_parts import Parts
from ranvier_py.core.gossip.gossip_values import Address, MemberChange, Plane, Send
from ranvier_py.core.gossip.wire.messages import Record, State
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import Boundary, PrefixKey
from ranvier_py.core.routing.backends import ProbeResult
from ranvier_py.core.routing.route_table import Trust

INTERVAL_S, SILENCE_S = 0.5, 2.0


class FakeNode:
    def __init__(self, birth: Birth, session: int, rng: Random) -> None:
        self.me = (birth.name, session, birth.address)
        self.label = birth.label
        self.rng = rng
        self.members: dict[int, tuple[str, Address, float]] = {}
        self.dead: dict[int, str] = {}
        self.routes: dict[tuple[int, int], tuple[float, list[PrefixKey]]] = {}
        self.learn: Callable[[list[PrefixKey], int, float], None] = lambda *_: None
        self.outbox: list[Send] = []
        self.news: list[MemberChange] = []
        self.next_at = birth.now + rng.random() * INTERVAL_S

    @property
    def wake_at(self) -> float:
        return self.next_at

    def body(self, now: float, kind: str) -> bytes:
        told = self.routes.items() if kind == "routes" else ()
        routes = [[engine, now - at, path] for (_, engine), (at, path) in told]
        known = [[name, session, address] for session, (name, address, _) in self.members.items()]
        said = {"kind": kind, "from": self.me, "label": self.label, "known": known, "routes": routes}
        return json.dumps(said).encode()

    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> None:
        try:
            said = json.loads(data)
            name, session, address = said["from"]
        except (ValueError, KeyError, TypeError, UnicodeDecodeError):
            return
        if said["label"] != self.label or session == self.me[1]:
            return
        if said["kind"] == "bye":
            self.lose(session, now, "left")
            return
        if session not in self.members and session not in self.dead:
            self.tell("joined", name, session)
        self.members[session] = (name, tuple(address), now)
        self.dead.pop(session, None)
        for engine, age, path in said["routes"]:
            at, key = now - age, (path[0][1] or path[0][2], engine)
            if key not in self.routes or at > self.routes[key][0] + 0.9:
                self.routes[key] = (at, path)
                self.learn([tuple(stop) for stop in path], engine, at)

    def tell(self, what: str, name: str, session: int) -> None:
        record = Record(name, session, 1, 0, State.ALIVE, "10.0.0.1", 1, 1, 1, 0)
        self.news.append(MemberChange(what, record, "silence"))

    def lose(self, session: int, now: float, what: str) -> None:
        if session in self.members:
            name = self.members.pop(session)[0]
            self.dead[session] = name
            self.tell(what, name, session)

    def contact(self, addresses: Sequence[Address], now: float) -> None:
        for address in addresses:
            if address != self.me[2]:
                self.outbox.append(Send(address, Plane.DATAGRAM, self.body(now, "members")))

    def unreachable(self, address: Address, plane: Plane, now: float) -> None:
        pass

    def tick(self, now: float) -> None:
        if now < self.next_at:
            return
        self.next_at = now + INTERVAL_S
        for session, (_, address, heard_at) in list(self.members.items()):
            if now - heard_at > SILENCE_S:
                self.lose(session, now, "died")
            else:
                self.outbox.append(Send(address, Plane.DATAGRAM, self.body(now, "members")))
                self.outbox.append(Send(address, Plane.BULK, self.body(now, "routes")))

    def take(self) -> list[Send]:
        found, self.outbox = self.outbox, []
        return found

    def changes(self) -> list[MemberChange]:
        found, self.news = self.news, []
        return found

    def leave(self, now: float) -> None:
        for _, address, _ in self.members.values():
            self.outbox.append(Send(address, Plane.DATAGRAM, self.body(now, "bye")))

    def state(self) -> bytes:
        return b"state"


class FakeMind:
    engine_caches = None
    """A SimNode with that gossip and the real router."""

    def __init__(self, birth: Birth) -> None:
        rng = birth.rng()
        self.session = rng.getrandbits(63) | 1
        self.peer = FakeNode(birth, self.session, rng)
        self.parts = Parts(birth, rng)
        self.peer.learn = self.heard
        self.name = birth.name

    def heard(self, path: list[PrefixKey], engine: int, at: float) -> None:
        backend = self.parts.registry[BackendId(engine)]
        self.parts.routes.learn(path, backend.id, backend.generation, Trust.REMOTE, at)

    def start_attempt(self, end: Boundary, tried: Sequence[int], now: float) -> Trip | None:
        return self.parts.start_attempt(end, tried, now)

    def finish_attempt(self, trip: Trip, served: bool, now: float) -> None:
        self.parts.finish_attempt(trip, served, now)
        if served:
            path = list(trip.attempt.prompt.end.chain())
            self.peer.routes[path[0][1] or path[0][2], trip.engine] = (now, path)

    def holds(self, fingerprint: int, engine: int, now: float) -> bool:
        return self.parts.holds(fingerprint, engine, now)

    def probed(self, engine: int, result: ProbeResult, now: float) -> None:
        self.parts.probed(engine, result, now)

    def alone(self) -> bool:
        return not self.peer.members

    def look(self, now: float) -> Look:
        members = {session: Seen(name, State.ALIVE, 1, 0) for session, (name, _, _) in self.peer.members.items()}
        tables = {"members": Bounded(len(members), 1000)}
        return Look(self.session, self.name, 1, 0, State.ALIVE, members, {}, tables)

    def living(self, now: float) -> Mapping[int, State]:
        members = self.look(now).members
        return {session: seen.state for session, seen in members.items() if seen.state <= State.SUSPECT}

    def told(self) -> int:
        return 0

    def counters(self) -> Mapping[str, int]:
        return {}

    def route_bytes(self) -> int:
        return 0

    def sums(self, now: float) -> Sequence[int]:
        sums = [0] * 16
        for name, engine in self.peer.routes:
            sums[name % 16] ^= name + engine
        return sums

    def claims(self, fingerprint: int, now: float) -> Sequence[tuple[int, int, int, float]]:
        return self.parts.claims(fingerprint, now)

    def rekey(self, keys: Sequence[int], now: float) -> None:
        pass
