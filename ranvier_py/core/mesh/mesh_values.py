"""The values that all of gossip shares: addresses, planes, peers, and messages on their way out.

A *session* is one run of one node: a random number that names the sender of every packet and the origin of every route
update. A *name* outlives restarts; of two sessions with one name the one with the higher epoch is the later. A `Record`
is all that is said about one member; of two records about one member the greater `(epoch, incarnation, state)` wins.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ranvier_py.core.mesh.wire.messages import Message, Record

Address = tuple[str, int]  # an IP literal and a port where a node receives gossip. Never the address of a backend.


class Plane(IntEnum):
    """How a packet travels. Each plane has its own replay window in a session, so that one can't hold up another."""

    DATAGRAM = 0  # probes and membership; at most DATAGRAM_BYTES_MAX, may be lost, doubled or reordered
    PROBE = 1  # probes and membership over a stream of their own, where datagrams do not pass
    BULK = 2  # routes, facts and whole tables: a stream that may be busy
    ANSWERS = 3  # stored answers and their keys: a stream of their own, so that routes don't wait for them


DATAGRAM_BYTES_MAX = 1200
"""Fits the smallest IPv6 packet (1280) with its headers, so it is never fragmented: at 10 % loss a fragmented one would
hardly ever arrive whole."""

FRAME_BYTES_MAX = 256 * 1024  # the largest packet on a stream, which a receiver must be ready to hold


class Peer(NamedTuple):
    """A live member as the planes above membership see it."""

    session: int
    address: Address


class Outgoing(NamedTuple):
    """A message on its way out, before it is sealed. `session` 0 means any session there (only for first contacts)."""

    to: Address
    session: int
    plane: Plane
    message: Message


class Send(NamedTuple):
    """Effect: send these bytes to that address. What can't be sent now the edge drops and counts."""

    to: Address
    plane: Plane
    data: bytes


class MemberChange(NamedTuple):
    """A change of a member, or of this node's name, that the operator wants to see.

    `what` is joined, suspected, refuted, died, left, returned, renamed or flooding. Flooding means that the member
    changes more than its allowance covers; what exceeds it is ignored (`merge_rules`).
    """

    what: str
    record: Record
    why: str
