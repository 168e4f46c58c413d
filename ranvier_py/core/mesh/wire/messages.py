"""The messages of contact and membership, as plain values. `codec` turns them into bytes and back, checked.

    contact     Hello, Echo, Challenge                        two sessions prove to each other that they are live
    membership  Ping, Ack, PingRequest, Nack, Push, Members   SWIM with Lifeguard, and push-pull of the whole list

Each feature declares its own messages where it uses them. Numbers are unsigned unless stated otherwise; u16, u32 and
u64 name their width. The sessions of the sender and of the intended receiver are in the envelope (`seal`), not in the
messages. Invariant: no message has prompts, tokens or secrets; `TransferPart` alone has answers (test_processes.py).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from ranvier_py.core.mesh.wire.frame import BASE_VERSION

Message = tuple[Any, ...]
"""A named tuple of one of the kinds that the codec knows."""


class State(IntEnum):
    """The state of a member in a record. At equal epoch and incarnation the greater one holds."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


class Record(NamedTuple):
    """All that is said about one member. `host` is an IP literal."""

    name: str  # at most 64 bytes of UTF-8
    session: int  # u64, not 0
    epoch: int  # u64: of two sessions with one name the higher is the later
    incarnation: int  # u32: raised by the member itself, to refute
    state: State
    host: str  # at most 45 bytes
    port: int  # u16, not 0
    schema: int  # u64: how fingerprints are made; routes of another schema are ignored
    public: str = ""  # host:port of the public port, for display; at most 80 bytes


class Update(NamedTuple):
    """One record on its way through the cluster. `accuser` is the session that suspects a SUSPECT; otherwise 0."""

    record: Record
    accuser: int = 0


class Hello(NamedTuple):
    """The first message to an address, padded: the answer to a stranger is never longer than the question."""

    record: Record
    challenge: int  # u64, not 0: to be echoed
    speaks: int = BASE_VERSION  # the highest version; the sender speaks the one before it as well
    release: str = ""  # of the sender's software, to be shown; at most 32 bytes


class Echo(NamedTuple):
    """Proof that the sender is live: `nonce` repeats a challenge. `challenge` asks in turn; 0 asks for no proof."""

    record: Record
    nonce: int
    challenge: int
    speaks: int = BASE_VERSION  # as in Hello
    release: str = ""


class Challenge(NamedTuple):
    """Asks a session that is not known yet, whatever it sent, to prove that it is live."""

    challenge: int


class Ping(NamedTuple):
    seq: int  # u32
    updates: tuple[Update, ...] = ()


class Ack(NamedTuple):
    seq: int
    updates: tuple[Update, ...] = ()


class PingRequest(NamedTuple):
    """Asks the receiver to ping this session on behalf of the sender: an indirect probe."""

    seq: int
    session: int
    host: str
    port: int
    updates: tuple[Update, ...] = ()


class Nack(NamedTuple):
    """The relay is well, but the target has not answered it in time."""

    seq: int


class Push(NamedTuple):
    """Updates alone: of the gossip tick, an accusation, a correction or a leave."""

    updates: tuple[Update, ...]


class Members(NamedTuple):
    """The sender's whole list, in one or several parts. `reply` asks for the receiver's list in return."""

    records: tuple[Record, ...]
    reply: bool
