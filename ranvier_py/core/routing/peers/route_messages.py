"""Messages of routes: eager updates, repair by version vectors, and tables by buckets, chunks and side state.

routes   RouteUpdates, Digest, Vector, Reset      eager updates, and repair by version vectors
rows     TotalSum, PartSums                       comparing whole tables by sums of buckets
         TableRows, entries of side state         parts of a `transfer`: what differs, a whole table, what no row has
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ranvier_py.core.mesh.budget import MESSAGE_BYTES
from ranvier_py.core.mesh.transfer import TransferTerms
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import (
    COLUMN,
    FLAG,
    IDENTITY,
    U16,
    U32,
    U64,
    Field,
    packed,
    rows_field,
    unpacked,
)
from ranvier_py.core.mesh.wire.frame import bad, column
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.routing.peers.route_updates import ENTRIES, ENTRY_BYTES, Entry

BACKENDS_MAX = 4096  # as many as a node's registry holds
VECTOR_ENTRIES_MAX = 8192  # sessions of 1000 nodes and of their earlier runs; 128 KiB
BUCKETS = 4096
SUM_BYTES = 8
GROUPS = 64  # of buckets, for two levels of comparison: 512 bytes for all groups, as many for the buckets of one
GROUP_BYTES = SUM_BYTES * BUCKETS // GROUPS
VECTOR_ENTRY_BYTES = 16

TABLES = TransferTerms(1, "table", share=4, one_each=True)
"""A table's rows in buckets, u16 each; in all, if none is named; or SIDE_STATE: what no row has, owners of responses
and sessions, checkpoints of hybrid models, as route updates without number and age."""

SIDE_STATE = b"s"  # no column of buckets has one byte


class RouteUpdates(NamedTuple):
    """Consecutive route updates of one origin: numbers after + 1 … after + len(entries)."""

    origin: int  # session that learned them; 0 = the sender, as in most messages: saves 8 bytes of 140
    after: int  # u64
    entries: tuple[Entry, ...]
    held_ms: int = 0  # u16: how long the newest of these was held by its senders so far; 65535 = that long or longer


class Digest(NamedTuple):
    """Hash of the sender's version vector: if it equals the receiver's, the exchange ends after these 8 bytes."""

    vector_hash: int  # u64
    schema: int  # u64


class Vector(NamedTuple):
    """The sender's version vector: for each origin the number up to which it has all updates."""

    entries: tuple[tuple[int, int], ...]  # (session, number)
    reply: bool  # asks for the receiver's vector in return


class Reset(NamedTuple):
    """Route updates of `origin` up to `base` can't be had from the sender's log: compare tables."""

    origin: int
    base: int


class TotalSum(NamedTuple):
    """All bucket sums of the sender's table in one number: if both are equal, a comparison ends after 8 bytes.

    With `reply` it is a question; `request` is chosen by the asker and comes back with the answer. A receiver with
    another total answers with the sums of its groups, too.
    """

    total: int  # u64
    groups: bytes  # empty, or 8 bytes for each group of buckets, little-endian
    reply: bool
    request: int  # u32


class PartSums(NamedTuple):
    """Bucket sums of the groups that were found to differ. `reply` asks for the receiver's sums of the same groups."""

    groups: bytes  # u8 each, ascending
    sums: bytes  # for each group the sums of its buckets, 8 bytes each, little-endian
    reply: bool
    request: int  # u32: of the TotalSum before


class TableRows(NamedTuple):
    """One part of a table, in columns, parents before children. Each column has one element for each claim."""

    backends: tuple[tuple[int, int], ...]  # (key, generation): what `backend` indexes
    parent: bytes  # u64 each: fingerprint of the row above, or 0
    tokens: bytes  # u32 each
    token: bytes  # u64 each: token fingerprint or 0
    text: bytes  # u64 each: text fingerprint or 0
    backend: bytes  # u16 each
    age_s: bytes  # u16 each


def unpack_group_sums(field: object) -> bytes:
    """Return the sums of all groups, or no bytes. Raises BadFrame for any other number of sums."""
    sums = column(field, SUM_BYTES, GROUPS)
    if sums and len(sums) != SUM_BYTES * GROUPS:
        bad("number of groups")
    return sums


def unpack_groups(field: object) -> bytes:
    """Return numbers of groups. Raises BadFrame if one does not exist or they do not ascend."""
    groups = column(field, 1, GROUPS)
    if any(low >= high for low, high in pairwise(groups)) or (groups and groups[-1] >= GROUPS):
        bad("no such group")
    return groups


def unpack_buckets(field: bytes) -> bytes:
    """Return a column of bucket numbers. Raises BadFrame if one does not exist."""
    buckets = column(field, 2, BUCKETS)
    if buckets and int(np.frombuffer(buckets, "<u2").max()) >= BUCKETS:
        bad("no such bucket")
    return buckets


def check_part(part: PartSums) -> None:
    """Raise BadFrame unless each group has all of its sums."""
    if len(part.sums) != GROUP_BYTES * len(part.groups):
        bad("sums of other groups")


def pack_rows(rows: TableRows) -> bytes:
    return packed(ROWS_FIELDS, rows)


def unpack_rows(data: bytes) -> TableRows:
    """Return a part of a table. Raises BadFrame unless all columns have a value for each claim, and each claim has one
    of the backends."""
    rows = TableRows(*unpacked(ROWS_FIELDS, data))
    count = len(rows.age_s) // 2
    widths = ((rows.parent, 8), (rows.tokens, 4), (rows.token, 8), (rows.text, 8), (rows.backend, 2), (rows.age_s, 2))
    if any(len(column) != width * count for column, width in widths):
        bad("columns of different length")
    if count and int(np.frombuffer(rows.backend, "<u2").max()) >= len(rows.backends):
        bad("no such backend")
    return rows


def wire_bytes(message: Message) -> int:
    """Return what a route message takes on the wire, at most some 40 bytes too many."""
    if isinstance(message, RouteUpdates):
        return MESSAGE_BYTES + sum([len(route_update) + ENTRY_BYTES for _, route_update in message.entries])
    if isinstance(message, Vector):
        return MESSAGE_BYTES + VECTOR_ENTRY_BYTES * len(message.entries)
    return MESSAGE_BYTES + sum([len(member) for member in message if isinstance(member, bytes)])


VECTOR = rows_field("<QQ", VECTOR_ENTRIES_MAX)
BACKENDS = rows_field("<QI", BACKENDS_MAX)
GROUP_NUMBERS, GROUP_SUMS = Field(None, unpack_groups), Field(None, unpack_group_sums)
ROWS_FIELDS = (BACKENDS, *(COLUMN,) * 6)

KINDS: Sequence[Kind] = (
    Kind("routes", 32, RouteUpdates, (U64, U64, ENTRIES, U16)),
    Kind("routes", 33, Digest, (U64, U64)),
    Kind("routes", 34, Vector, (VECTOR, FLAG)),
    Kind("routes", 35, Reset, (IDENTITY, U64)),
    Kind("rows", 40, TotalSum, (U64, GROUP_SUMS, FLAG, U32)),
    Kind("rows", 41, PartSums, (GROUP_NUMBERS, COLUMN, FLAG, U32), check_part),
)
