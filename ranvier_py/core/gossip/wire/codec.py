"""Messages <-> bytes: `encode` and `decode`, the only way a message gets into a packet and out of it.

A body is a flat msgpack array (`fields`); what has many rows is one byte string of rows (`records`) or of columns
(`columns`). Every width, length and bound is checked here, so that nobody behind has to.

Rules: decode(*encode(message)) is the message, with hosts in canonical spelling. Arbitrary bytes raise BadFrame and
nothing else; a kind that is not known raises UnknownKind. Kinds keep their numbers for ever and only ever get fields
appended, which older versions ignore; a new state or verdict is a new protocol version. No body is shorter than a
Challenge and no Hello shorter than an Echo, so that the answer to a stranger is never longer than what it sent. The
order of rows is kept; whether they repeat each other is for the machines behind to see.
Cost: 2 us each way for a Ping, 0.1 to 2 us more for each update (`records`), 11 and 36 us for 100 route updates.
Memory: less than 4 x the input for what is no well-formed body; else the objects, up to 16 x, and 1 MiB for 4096 empty
route updates.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from ranvier_py.core.gossip.gossip_values import DATAGRAM_BYTES_MAX, FRAME_BYTES_MAX
from ranvier_py.core.gossip.wire.columns import (
    check_part,
    check_rows,
    pack_backends,
    pack_commands,
    pack_entries,
    pack_facts,
    pack_loads,
    pack_reader_claims,
    pack_vector,
    pack_waits,
    rows_column,
    unpack_backends,
    unpack_buckets,
    unpack_commands,
    unpack_entries,
    unpack_facts,
    unpack_group_sums,
    unpack_groups,
    unpack_loads,
    unpack_reader_claims,
    unpack_snapshot_head,
    unpack_sums,
    unpack_vector,
    unpack_waits,
)
from ranvier_py.core.gossip.wire.fields import bad, fields_of, flag, identity, pack, u16, u32, u64
from ranvier_py.core.gossip.wire.frame import OVERHEAD_BYTES, BadFrame, Reason, UnknownKind
from ranvier_py.core.gossip.wire.messages import (
    Ack,
    Busy,
    Challenge,
    Commands,
    Digest,
    Echo,
    Facts,
    Hello,
    Loads,
    Members,
    Message,
    Nack,
    PartSums,
    Ping,
    PingRequest,
    Push,
    ReaderClaims,
    Reset,
    RouteUpdates,
    Rows,
    RowsWanted,
    SnapshotChunk,
    SnapshotRefused,
    SnapshotWanted,
    Sums,
    TotalSum,
    Vector,
)
from ranvier_py.core.gossip.wire.records import (
    pack_host,
    pack_record,
    pack_records,
    pack_updates,
    unpack_host,
    unpack_record,
    unpack_records,
    unpack_updates,
)

BODY_BYTES_MIN = 10
"""A Challenge."""

HELLO_BODY_BYTES_MIN = 512 - OVERHEAD_BYTES
"""Makes the packet 512 bytes: more than any Echo, less than every path carries."""

UPDATES_ROOM_BYTES = DATAGRAM_BYTES_MAX - OVERHEAD_BYTES - 40
"""What updates may take in any message that fits a datagram. The 40 bytes are a PingRequest without updates."""


class Kind(IntEnum):
    """The number of each message in a packet. Never reused."""

    HELLO = 1
    ECHO = 2
    CHALLENGE = 3
    PING = 16
    ACK = 17
    PING_REQUEST = 18
    NACK = 19
    PUSH = 20
    MEMBERS = 21
    ROUTE_UPDATES = 32
    DIGEST = 33
    VECTOR = 34
    RESET = 35
    SUMS = 36
    ROWS_WANTED = 37
    ROWS = 38
    BUSY = 39
    TOTAL_SUM = 40
    PART_SUMS = 41
    LOADS = 48
    FACTS = 49
    COMMANDS = 50
    READER_CLAIMS = 51
    SNAPSHOT_WANTED = 64
    SNAPSHOT_CHUNK = 65
    SNAPSHOT_REFUSED = 66


class Field(NamedTuple):
    """How one member of a message becomes a field (None: as it is), and how a field becomes it, checked."""

    pack: Callable[[Any], object] | None
    unpack: Callable[[Any], object]


def port(value: object) -> int:
    return u16(value) or bad("port 0")


def host(value: object) -> str:
    return unpack_host(value) if type(value) is bytes else bad("host")


U16, U32, U64, IDENTITY, FLAG, PORT = (Field(None, check) for check in (u16, u32, u64, identity, flag, port))
SUMS, BUCKETS, COLUMN = (Field(None, check) for check in (unpack_sums, unpack_buckets, rows_column))
HOST = Field(pack_host, host)
RECORD = Field(pack_record, unpack_record)
RECORDS = Field(pack_records, unpack_records)
UPDATES = Field(pack_updates, unpack_updates)
ENTRIES = Field(pack_entries, unpack_entries)
VECTOR = Field(pack_vector, unpack_vector)
BACKENDS = Field(pack_backends, unpack_backends)
LOADS = Field(pack_loads, unpack_loads)
WAITS = Field(pack_waits, unpack_waits)
FACTS = Field(pack_facts, unpack_facts)
COMMANDS = Field(pack_commands, unpack_commands)
READER_CLAIMS = Field(pack_reader_claims, unpack_reader_claims)
SNAPSHOT_HEAD = Field(None, unpack_snapshot_head)
GROUPS, GROUP_SUMS = Field(None, unpack_groups), Field(None, unpack_group_sums)

LAYOUT: tuple[tuple[Kind, Callable[..., Message], tuple[Field, ...]], ...] = (
    (Kind.HELLO, Hello, (RECORD, IDENTITY)),
    (Kind.ECHO, Echo, (RECORD, IDENTITY, U64)),
    (Kind.CHALLENGE, Challenge, (IDENTITY,)),
    (Kind.PING, Ping, (U32, UPDATES)),
    (Kind.ACK, Ack, (U32, UPDATES)),
    (Kind.PING_REQUEST, PingRequest, (U32, IDENTITY, HOST, PORT, UPDATES)),
    (Kind.NACK, Nack, (U32,)),
    (Kind.PUSH, Push, (UPDATES,)),
    (Kind.MEMBERS, Members, (RECORDS, FLAG)),
    (Kind.ROUTE_UPDATES, RouteUpdates, (U64, U64, ENTRIES, U16)),
    (Kind.DIGEST, Digest, (U64, U64)),
    (Kind.VECTOR, Vector, (VECTOR, FLAG)),
    (Kind.RESET, Reset, (IDENTITY, U64)),
    (Kind.SUMS, Sums, (SUMS, FLAG, U32)),
    (Kind.ROWS_WANTED, RowsWanted, (U32, U32, BUCKETS)),
    (Kind.ROWS, Rows, (U32, U32, FLAG, BACKENDS, COLUMN, COLUMN, COLUMN, COLUMN, COLUMN, COLUMN)),
    (Kind.BUSY, Busy, (U32,)),
    (Kind.TOTAL_SUM, TotalSum, (U64, GROUP_SUMS, FLAG, U32)),
    (Kind.PART_SUMS, PartSums, (GROUPS, COLUMN, FLAG, U32)),
    (Kind.LOADS, Loads, (U32, LOADS, WAITS)),
    (Kind.FACTS, Facts, (IDENTITY, U32, FACTS)),
    (Kind.COMMANDS, Commands, (COMMANDS,)),
    (Kind.READER_CLAIMS, ReaderClaims, (READER_CLAIMS,)),
    (Kind.SNAPSHOT_WANTED, SnapshotWanted, (U32, U64, U16, U32)),
    (Kind.SNAPSHOT_CHUNK, SnapshotChunk, (U32, U32, FLAG, SNAPSHOT_HEAD, *(COLUMN,) * 7)),
    (Kind.SNAPSHOT_REFUSED, SnapshotRefused, (U32, FLAG)),
)
"""Each message's fields in their order: the protocol. New fields are appended, never taken away."""

KIND_OF = {make: kind for kind, make, _ in LAYOUT}
PACKERS = {make: tuple(field.pack for field in fields) for _, make, fields in LAYOUT}
UNPACKERS = {int(kind): (make, tuple(field.unpack for field in fields)) for kind, make, fields in LAYOUT}


def encode(message: Message) -> tuple[int, bytes]:
    """(kind, body). Raises ValueError for a message beyond the bounds, which is a mistake of ours."""
    make = type(message)
    kind = KIND_OF[make]
    try:
        members = zip(PACKERS[make], message, strict=True)
        body = pack(*[member if packer is None else packer(member) for packer, member in members])
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{make.__name__} has a number beyond its width") from error
    least = HELLO_BODY_BYTES_MIN if kind is Kind.HELLO else BODY_BYTES_MIN
    return kind, body if len(body) >= least else padded(body, least)


def padded(body: bytes, least: int) -> bytes:
    """The body with one more field, which nobody reads, so that it has `least` bytes."""
    missing = least - len(body)
    if missing == 1:
        field = b"\xc0"
    elif missing < 258:
        field = b"\xc4%c" % (missing - 2) + bytes(missing - 2)
    else:
        field = b"\xc5" + (missing - 3).to_bytes(2, "big") + bytes(missing - 3)
    return bytes((body[0] + 1,)) + body[1:] + field


def decode(kind: int, body: bytes) -> Message:
    """The message. Raises UnknownKind for a kind of a later version, BadFrame for everything else that is wrong."""
    form = UNPACKERS.get(kind)
    if form is None:
        raise UnknownKind(kind)
    if len(body) > FRAME_BYTES_MAX:
        raise BadFrame(Reason.SIZE, "body")
    make, unpackers = form
    fields = fields_of(body)
    if len(fields) < len(unpackers):
        bad("too few fields")
    message = make(*[unpack(field) for unpack, field in zip(unpackers, fields, strict=False)])
    if type(message) is Rows:
        check_rows(message)
    elif type(message) is PartSums:
        check_part(message)
    return message
