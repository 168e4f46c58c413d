"""The nouns of gossip: who is who, and what is sent where.

A *session* is one run of one node: a random number that names the sender of every packet and the origin of every route
update. A *name* outlives restarts; of two sessions with one name the higher epoch is the later one. A `Record` is all
that is said about one member; of two records about one member `(epoch, incarnation, state)` decides, the greater wins.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ranvier_py.core.gossip.wire.messages import Message, Record

Address = tuple[str, int]  # an IP literal and a port, where a node receives gossip. Never the address of a backend.


class Plane(IntEnum):
    """How a packet travels. Each has its own replay window in a session, so that one can't hold up another."""

    DATAGRAM = 0  # probes and membership; at most DATAGRAM_BYTES_MAX, may be lost, doubled or reordered
    PROBE = 1  # the same over a stream of its own, where datagrams do not pass
    BULK = 2  # routes, facts, whole tables: a stream that may be busy
    ANSWERS = 3  # stored answers and their keys, a stream of their own: routes don't wait for them


DATAGRAM_BYTES_MAX = 1200
"""Fits the smallest IPv6 packet (1280) with its headers, so it is never fragmented: at 10 % loss a fragmented one would
hardly ever arrive whole."""

FRAME_BYTES_MAX = 256 * 1024  # the largest packet on a stream: what a receiver must be ready to hold


class Peer(NamedTuple):
    """A live member as the planes above membership see it."""

    session: int
    address: Address


class Outgoing(NamedTuple):
    """A message on its way out, before it is sealed. `session` 0: whoever is there (only for first contacts)."""

    to: Address
    session: int
    plane: Plane
    message: Message


class Send(NamedTuple):
    """Effect: these bytes to that address. What can't be sent now is dropped and counted by the edge."""

    to: Address
    plane: Plane
    data: bytes


class MemberChange(NamedTuple):
    """Something the operator wants to see.

    `what` is joined, suspected, refuted, died, left, returned, renamed, or flooding: the member changes more of others
    than it may, and what is too much is ignored (`merge_rules`).
    """

    what: str
    record: Record
    why: str
