"""What a feature hands to the mesh: a state machine that shares some state with peers.

The mesh gives it the messages of its kinds, the peers whenever they change, and the time. It appends what it sends to
the outbox that it was made with. It never waits, and nothing that a peer sends makes it raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from math import inf
from typing import Any, ClassVar

from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Peer
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.metrics import Sample, samples, values


class Senders(Enum):
    """Whose messages a machine takes. All of them have proved that they are live and have the cluster's key. Whom it
    writes to it chooses itself, of those that `met` brings: it may be another set for each kind of message."""

    ANY = auto()
    MET_FIRST = auto()  # any; one that may share routes becomes a peer before its message is taken
    SHARING = auto()  # only peers that share routes, or become such now


class Machine:
    """Takes part in gossip; each method does nothing unless a feature overrides it."""

    kinds: ClassVar[Sequence[Kind]] = ()
    senders: ClassVar[Senders] = Senders.ANY

    @property
    def wake_at(self) -> float:
        """When `tick` must be called next; any call may bring it nearer. Read after each packet: keep it cheap."""
        return inf

    def tick(self, now: float) -> None:
        """Do what is due."""

    def receive(self, peer: Peer, message: Any, now: float) -> None:
        """Take a message of one of its kinds."""

    def met(self, peers: LivePeers, now: float) -> None:
        """Take the peers as they are now; each machine chooses whom of them it deals with."""

    def forgotten(self, session: int, now: float) -> None:
        """Drop what is kept of a member that is gone for good."""

    def counted(self) -> Mapping[str, Any]:
        """Return its counters by the prefix of their metrics."""
        return {}

    def view(self) -> dict[str, Any]:
        """Return what it shows, ready for JSON."""
        return {name.removeprefix("gossip_"): values(counters) for name, counters in self.counted().items()}

    def samples(self) -> Iterator[Sample]:
        """Yield its metrics."""
        for name, counters in self.counted().items():
            yield from samples(name, counters)


class Machines:
    """The machines of one node in the order in which they are `called`, and the one `taking` each type of message."""

    def __init__(self, called: Sequence[Machine]) -> None:
        self.called = called
        self.taking = {kind.make: machine for machine in called for kind in machine.kinds}
