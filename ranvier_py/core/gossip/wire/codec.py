"""The codec: `encode` and `decode`, by which alone a message gets into a packet and out of it.

A body is a flat msgpack array (`frame`); a field of many rows is one byte string of rows (`records`) or of columns
(`columns`). Every width, length and bound is checked here, so that no code behind it has to.

Rules: decode(*encode(message)) is the message, with hosts in canonical spelling. Arbitrary bytes raise BadFrame and
nothing else. A change of LAYOUT changes PROTOCOL_VERSION. No body is shorter than a Challenge and no Hello shorter than
an Echo, so that the answer to a stranger is never longer than what it sent. Memory: less than 4 x the input for bytes
that are no well-formed body; otherwise the objects, up to 16 x, and 1 MiB for 4096 empty route updates.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum

from ranvier_py.core.gossip.gossip_values import FRAME_BYTES_MAX
from ranvier_py.core.gossip.wire import columns, records
from ranvier_py.core.gossip.wire import messages as m
from ranvier_py.core.gossip.wire.columns import BACKENDS, FACTS, LOADS, READER_CLAIMS, VECTOR, WAITS, Field
from ranvier_py.core.gossip.wire.frame import (
    OVERHEAD_BYTES,
    BadFrame,
    Reason,
    bad,
    fields_of,
    flag,
    identity,
    pack,
    u16,
    u32,
    u64,
)

BODY_BYTES_MIN = 10  # a Challenge
HELLO_BODY_BYTES_MIN = 512 - OVERHEAD_BYTES
"""Makes the packet of a Hello 512 bytes: more than any Echo, and no more than every path carries."""


class Kind(IntEnum):
    """The number of each message in a packet."""

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
    ROWS_WANTED = 37
    ROWS = 38
    BUSY = 39
    TOTAL_SUM = 40
    PART_SUMS = 41
    SIDE_STATE_WANTED = 42
    SIDE_STATE = 43
    LOADS = 48
    FACTS = 49
    COMMANDS = 50
    READER_CLAIMS = 51
    PREFILLS = 52
    SNAPSHOT_WANTED = 64
    SNAPSHOT_CHUNK = 65
    SNAPSHOT_REFUSED = 66
    ANSWER_KEYS = 80
    ANSWER_DIGEST = 81
    ANSWER_WANTED = 82
    ANSWER_PART = 83
    ANSWER_REFUSED = 84
    VOIDED = 85
    RULE_VERDICTS = 96


def port(value: object) -> int:
    return u16(value) or bad("port 0")


def host(value: object) -> str:
    return records.unpack_host(value) if type(value) is bytes else bad("host")


U16, U32, U64, IDENTITY, FLAG, PORT = (Field(None, check) for check in (u16, u32, u64, identity, flag, port))
HOST = Field(records.pack_host, host)
RECORD = Field(records.pack_record, records.unpack_record)
RECORDS = Field(records.pack_records, records.unpack_records)
UPDATES = Field(records.pack_updates, records.unpack_updates)
ENTRIES = Field(columns.pack_entries, columns.unpack_entries)
COMMANDS = Field(columns.pack_commands, columns.unpack_commands)
BUCKETS, COLUMN = Field(None, columns.unpack_buckets), Field(None, columns.rows_column)
GROUPS, GROUP_SUMS = Field(None, columns.unpack_groups), Field(None, columns.unpack_group_sums)
SNAPSHOT_HEAD = Field(None, columns.unpack_snapshot_head)
ANSWER_KEYS, ANSWER_NAME = Field(None, columns.unpack_answer_keys), Field(None, columns.unpack_answer_name)
VOIDED = Field(columns.pack_voided, columns.unpack_voided)
PREFILLS, ENDED = Field(columns.pack_prefills, columns.unpack_prefills), Field(None, columns.unpack_ended)
VERDICTS = Field(columns.pack_verdicts, columns.unpack_verdicts)

LAYOUT: tuple[tuple[Kind, Callable[..., m.Message], tuple[Field, ...]], ...] = (
    (Kind.HELLO, m.Hello, (RECORD, IDENTITY)),
    (Kind.ECHO, m.Echo, (RECORD, IDENTITY, U64)),
    (Kind.CHALLENGE, m.Challenge, (IDENTITY,)),
    (Kind.PING, m.Ping, (U32, UPDATES)),
    (Kind.ACK, m.Ack, (U32, UPDATES)),
    (Kind.PING_REQUEST, m.PingRequest, (U32, IDENTITY, HOST, PORT, UPDATES)),
    (Kind.NACK, m.Nack, (U32,)),
    (Kind.PUSH, m.Push, (UPDATES,)),
    (Kind.MEMBERS, m.Members, (RECORDS, FLAG)),
    (Kind.ROUTE_UPDATES, m.RouteUpdates, (U64, U64, ENTRIES, U16)),
    (Kind.DIGEST, m.Digest, (U64, U64)),
    (Kind.VECTOR, m.Vector, (VECTOR, FLAG)),
    (Kind.RESET, m.Reset, (IDENTITY, U64)),
    (Kind.ROWS_WANTED, m.RowsWanted, (U32, U32, BUCKETS)),
    (Kind.ROWS, m.TableRows, (U32, U32, FLAG, BACKENDS, *(COLUMN,) * 6)),
    (Kind.BUSY, m.Busy, (U32,)),
    (Kind.TOTAL_SUM, m.TotalSum, (U64, GROUP_SUMS, FLAG, U32)),
    (Kind.PART_SUMS, m.PartSums, (GROUPS, COLUMN, FLAG, U32)),
    (Kind.SIDE_STATE_WANTED, m.SideStateWanted, (U32,)),
    (Kind.SIDE_STATE, m.SideState, (U32, FLAG, ENTRIES)),
    (Kind.LOADS, m.Loads, (U32, LOADS, WAITS)),
    (Kind.FACTS, m.Facts, (IDENTITY, U32, FACTS)),
    (Kind.COMMANDS, m.Commands, (COMMANDS,)),
    (Kind.READER_CLAIMS, m.ReaderClaims, (READER_CLAIMS,)),
    (Kind.PREFILLS, m.Prefills, (PREFILLS, ENDED)),
    (Kind.SNAPSHOT_WANTED, m.SnapshotWanted, (U32, U64, U16, U32)),
    (Kind.SNAPSHOT_CHUNK, m.SnapshotChunk, (U32, U32, FLAG, SNAPSHOT_HEAD, *(COLUMN,) * 7)),
    (Kind.SNAPSHOT_REFUSED, m.SnapshotRefused, (U32, FLAG)),
    (Kind.ANSWER_KEYS, m.AnswerKeys, (U32, FLAG, ANSWER_KEYS, COLUMN, ANSWER_KEYS)),
    (Kind.ANSWER_DIGEST, m.AnswerDigest, (U32, U64, FLAG)),
    (Kind.ANSWER_WANTED, m.AnswerWanted, (U32, ANSWER_NAME, U32)),
    (Kind.ANSWER_PART, m.AnswerPart, (U32, U16, U16, COLUMN)),
    (Kind.ANSWER_REFUSED, m.AnswerRefused, (U32, FLAG)),
    (Kind.VOIDED, m.Voided, (VOIDED,)),
    (Kind.RULE_VERDICTS, m.RuleVerdicts, (U64, VERDICTS)),
)
"""The protocol: the kind of each message, its class, and its fields in their order."""

KIND_OF = {make: kind for kind, make, _ in LAYOUT}
PACKERS = {make: tuple(field.pack for field in fields) for _, make, fields in LAYOUT}
UNPACKERS = {int(kind): (make, tuple(field.unpack for field in fields)) for kind, make, fields in LAYOUT}


def encode(message: m.Message) -> tuple[int, bytes]:
    """Return (kind, body). Raises ValueError for a message beyond the bounds, which is a bug of ours."""
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
    """Return the body with one more field, which no receiver reads, so that it has `least` bytes."""
    missing = least - len(body)
    if missing == 1:
        field = b"\xc0"
    elif missing < 258:
        field = b"\xc4%c" % (missing - 2) + bytes(missing - 2)
    else:
        field = b"\xc5" + (missing - 3).to_bytes(2, "big") + bytes(missing - 3)
    return bytes((body[0] + 1,)) + body[1:] + field


def decode(kind: int, body: bytes) -> m.Message:
    """Return the message in a body. Raises BadFrame for everything that is wrong."""
    form = UNPACKERS.get(kind)
    if form is None:
        bad("kind")
    if len(body) > FRAME_BYTES_MAX:
        raise BadFrame(Reason.SIZE, "body")
    make, unpackers = form
    fields = fields_of(body)
    if len(fields) < len(unpackers):
        bad("too few fields")
    message = make(*[unpack(field) for unpack, field in zip(unpackers, fields, strict=False)])
    if type(message) is m.TableRows:
        columns.check_rows(message)
    elif type(message) is m.PartSums:
        columns.check_part(message)
    elif type(message) is m.AnswerKeys:
        columns.check_answer_keys(message)
    return message
