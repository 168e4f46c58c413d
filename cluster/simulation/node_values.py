"""What the simulator drives and what it looks at: the gossip of one running node, and the parts it is bound to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, Protocol

from cluster.scenario import Cluster
from cluster.simulation.node_streams import SimEngineCaches
from ranvier_py.core.gossip.gossip_values import Address, MemberChange, Plane, Send
from ranvier_py.core.gossip.wire.messages import State
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.backends import ProbeResult


class Node(Protocol):
    """Bytes in, effects out."""

    @property
    def wake_at(self) -> float: ...

    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> None: ...

    def contact(self, addresses: Sequence[Address], now: float) -> None: ...

    def unreachable(self, address: Address, plane: Plane, now: float) -> None: ...

    def tick(self, now: float) -> None: ...

    def take(self) -> list[Send]: ...

    def changes(self) -> list[MemberChange]: ...

    def leave(self, now: float) -> None: ...

    def state(self) -> bytes: ...


class Seen(NamedTuple):
    """One member as another sees it."""

    name: str
    state: State
    epoch: int
    incarnation: int


class Bounded(NamedTuple):
    """A buffer and the most it may ever hold."""

    size: int
    bound: int


@dataclass(frozen=True, slots=True)
class Look:
    """What the checkers compare, at one instant."""

    session: int
    name: str
    epoch: int
    incarnation: int
    state: State
    members: Mapping[int, Seen]  # by session, others only
    vector: Mapping[int, int]  # by origin's session: all up to this number
    tables: Mapping[str, Bounded] = field(default_factory=dict)


class Trip(NamedTuple):
    """One chat turn under way to an engine."""

    engine: int
    attempt: Any  # what the router made of it


class SimNode(Protocol):
    """One process: gossip, routes, registry."""

    @property
    def peer(self) -> Node: ...

    @property
    def session(self) -> int: ...

    @property
    def engine_caches(self) -> SimEngineCaches | None:
        """What it does about engines' event streams, where the scenario has any."""
        ...

    def start_attempt(self, end: Boundary, tried: Sequence[int], now: float) -> Trip | None:
        """Place one chat turn, but not at engines that were tried. None: the node knows of no engine. Never waits."""
        ...

    def finish_attempt(self, trip: Trip, served: bool, now: float) -> None:
        """It came back. If it was served, the engine holds the prompt: learn and tell."""
        ...

    def holds(self, fingerprint: int, engine: int, now: float) -> bool:
        """Whether the route table would send a prompt that ends here to this engine now."""
        ...

    def probed(self, engine: int, result: ProbeResult, now: float) -> None: ...

    def alone(self) -> bool:
        """Whether it sees no other live member."""
        ...

    def look(self, now: float) -> Look: ...

    def living(self, now: float) -> Mapping[int, State]:
        """The others that it holds for ALIVE or SUSPECT, by session: the part of `look` that is asked of everybody."""
        ...

    def told(self) -> int:
        """Route updates of its own since the start."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Whatever it counts, by name."""
        ...

    def route_bytes(self) -> int:
        """What it has sent about routes, but for whole tables, since the start."""
        ...

    def sums(self, now: float) -> Sequence[int]:
        """Bucket fingerprints of the table: equal at two nodes that know the same routes."""
        ...

    def claims(self, fingerprint: int, now: float) -> Sequence[tuple[int, int, int, float]]:
        """(fingerprint, engine, boot, age in seconds) of some live claims below a fingerprint, or of all (0)."""
        ...

    def rekey(self, keys: Sequence[int], now: float) -> None: ...


class Birth(NamedTuple):
    """What a process is started with."""

    number: int
    name: str
    address: Address
    seed: str  # of its own random numbers
    now: float
    wall_ms: int  # what the host's clock on the wall says: a first guess for the epoch
    state: bytes  # the state file, empty if there is none
    keys: tuple[int, ...]
    label: str
    cluster: Cluster
    engines: tuple[str, ...]  # URLs

    def rng(self) -> Random:
        return Random(self.seed)


Maker = Callable[[Birth], SimNode]
