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
from typing import Any

from ranvier_py.core.gossip.gossip_values import FRAME_BYTES_MAX
from ranvier_py.core.gossip.wire import columns, records
from ranvier_py.core.gossip.wire import messages as m
from ranvier_py.core.gossip.wire.columns import COLUMN, Field
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
"""Makes the packet of a Hello 512 bytes or one more: longer than any Echo, and no longer than every path carries."""


def port(value: object) -> int:
    return u16(value) or bad("port 0")


def host(value: object) -> str:
    return records.unpack_host(value) if type(value) is bytes else bad("host")


U16, U32, U64, IDENTITY, FLAG, PORT = (Field(None, check) for check in (u16, u32, u64, identity, flag, port))
HOST = Field(records.pack_host, host)
RECORD = Field(records.pack_record, records.unpack_record)
RECORDS = Field(records.pack_records, records.unpack_records)
UPDATES = Field(records.pack_updates, records.unpack_updates)

LAYOUT: tuple[tuple[str, int, type[Any], tuple[Field, ...]], ...] = (
    ("contact", 1, m.Hello, (RECORD, IDENTITY)),
    ("contact", 2, m.Echo, (RECORD, IDENTITY, U64)),
    ("contact", 3, m.Challenge, (IDENTITY,)),
    ("membership", 16, m.Ping, (U32, UPDATES)),
    ("membership", 17, m.Ack, (U32, UPDATES)),
    ("membership", 18, m.PingRequest, (U32, IDENTITY, HOST, PORT, UPDATES)),
    ("membership", 19, m.Nack, (U32,)),
    ("membership", 20, m.Push, (UPDATES,)),
    ("membership", 21, m.Members, (RECORDS, FLAG)),
    ("routes", 32, m.RouteUpdates, (U64, U64, columns.ENTRIES, U16)),
    ("routes", 33, m.Digest, (U64, U64)),
    ("routes", 34, m.Vector, (columns.VECTOR, FLAG)),
    ("routes", 35, m.Reset, (IDENTITY, U64)),
    ("rows", 37, m.RowsWanted, (U32, U32, columns.BUCKET_NUMBERS, FLAG)),
    ("rows", 38, m.TableRows, (U32, U32, FLAG, columns.BACKENDS, *(COLUMN,) * 6)),
    ("rows", 39, m.Busy, (U32,)),
    ("rows", 40, m.TotalSum, (U64, columns.GROUP_SUMS, FLAG, U32)),
    ("rows", 41, m.PartSums, (columns.GROUP_NUMBERS, COLUMN, FLAG, U32)),
    ("rows", 43, m.SideState, (U32, U32, FLAG, columns.ENTRIES)),
    ("backends", 48, m.Loads, (U32, columns.LOADS)),
    ("backends", 49, m.Facts, (columns.FACTS,)),
    ("backends", 50, m.Commands, (columns.COMMANDS,)),
    ("streams", 51, m.ReaderClaims, (columns.READER_CLAIMS,)),
    ("backends", 52, m.Prefills, (columns.PREFILLS, columns.ENDED)),
    ("streams", 64, m.SnapshotWanted, (U32, U64, U16, U32)),
    ("streams", 65, m.SnapshotChunk, (U32, U32, FLAG, columns.SNAPSHOT_HEAD, *(COLUMN,) * 7)),
    ("streams", 66, m.SnapshotRefused, (U32, FLAG)),
    ("answers", 80, m.AnswerKeys, (U32, FLAG, columns.ANSWER_KEYS, COLUMN, columns.ANSWER_KEYS)),
    ("answers", 81, m.AnswerDigest, (U32, U64, FLAG)),
    ("answers", 82, m.AnswerWanted, (U32, columns.ANSWER_NAME, U32)),
    ("answers", 83, m.AnswerPart, (U32, U16, U16, COLUMN)),
    ("answers", 84, m.AnswerRefused, (U32, FLAG)),
    ("answers", 85, m.Voided, (columns.VOIDED,)),
    ("rules", 96, m.RuleVerdicts, (U64, columns.VERDICTS)),
)
"""The protocol: the topic of each message, its kind in a packet, its class, and its fields in their order."""

TOPIC_OF = {kind: topic for topic, kind, _, _ in LAYOUT}
KIND_OF = {make: kind for _, kind, make, _ in LAYOUT}
PACKERS = {make: tuple(field.pack for field in fields) for _, _, make, fields in LAYOUT}
UNPACKERS = {kind: (make, tuple(field.unpack for field in fields)) for _, kind, make, fields in LAYOUT}


def encode(message: m.Message) -> tuple[int, bytes]:
    """Return (kind, body). Raises ValueError for a message beyond the bounds, which is a bug of ours."""
    make = type(message)
    kind = KIND_OF[make]
    try:
        members = zip(PACKERS[make], message, strict=True)
        fields = [member if packer is None else packer(member) for packer, member in members]
        body = pack(*fields)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{make.__name__} has a number beyond its width") from error
    missing = (HELLO_BODY_BYTES_MIN if make is m.Hello else BODY_BYTES_MIN) - len(body)
    if missing > 0:  # one more field, which no receiver reads, of two bytes or three and these
        body = pack(*fields, bytes(max(0, missing - 2)))
    return kind, body


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
    message: m.Message = make(*[unpack(field) for unpack, field in zip(unpackers, fields, strict=False)])
    if check := columns.CHECKS.get(make):
        check(message)
    return message
