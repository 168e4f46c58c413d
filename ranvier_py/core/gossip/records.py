"""Records and updates as rows of bytes: the part of gossip that is sent most.

    8 session | 8 epoch | 4 incarnation | 1 state and flags | 2 port | 1 version_min | 1 version_max | 8 schema
    | 1 length of name | 1 length of public | 4 or 16 host | name | public | 8 accuser, if the flag says so

A host travels as the bytes of its address, so that any spelling arrives in its canonical one. Rows follow each other
without a count; a later version adds to them in a column of its own, beside the rows. Rows that a receiver would refuse
are not made: ValueError. Cost: about 2 us to make or read a row; 65 bytes for a usual one, 203 at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address
from struct import Struct, error

from ranvier_py.core.gossip.fields import bad, encoded, text
from ranvier_py.core.gossip.messages import Record, State, Update

NAME_BYTES_MAX = 64
PUBLIC_BYTES_MAX = 80

HEAD = Struct("<QQIBHBBQBB")
ACCUSER = Struct("<Q")
HOST_BYTES_4, HOST_BYTES_6 = 4, 16
NOWHERE = (bytes(HOST_BYTES_4), bytes(HOST_BYTES_6))
"""0.0.0.0 and ::, which nobody can be reached at (smg#883 gossiped it)."""

STATE_MASK, IS_IPV6, IS_ACCUSED = 0x03, 0x04, 0x08
FLAGS_KNOWN = STATE_MASK | IS_IPV6 | IS_ACCUSED
STATES = tuple(State)

RECORD_BYTES_MAX = HEAD.size + HOST_BYTES_6 + NAME_BYTES_MAX + PUBLIC_BYTES_MAX
UPDATE_BYTES_MAX = RECORD_BYTES_MAX + ACCUSER.size


def pack_host(host: str) -> bytes:
    """4 or 16 bytes of an IP literal. Raises ValueError for anything else, for a scope, and for 0.0.0.0 and ::."""
    packed = ip_address(host).packed if ":" in host else bytes(map(int, host.split(".")))
    if len(packed) not in (HOST_BYTES_4, HOST_BYTES_6) or packed in NOWHERE or "%" in host:
        raise ValueError("a host must be an IP address that others can reach")
    return packed


def unpack_host(packed: bytes) -> str:
    """The literal of 4 or 16 bytes. Raises BadFrame."""
    if packed in NOWHERE or len(packed) not in (HOST_BYTES_4, HOST_BYTES_6):
        bad("host")
    return ".".join(map(str, packed)) if len(packed) == HOST_BYTES_4 else str(IPv6Address(packed))


def pack_record(record: Record, accuser: int = 0) -> bytes:
    """One row. Raises ValueError (or struct.error) for a record that breaks the bounds that `Record` tells."""
    host = pack_host(record.host)
    name, public = encoded(record.name, NAME_BYTES_MAX), encoded(record.public, PUBLIC_BYTES_MAX)
    if not (name and record.session and record.port and record.version_min <= record.version_max):
        raise ValueError("a record needs a name, a session, a port and versions in order")
    flags = record.state | (IS_IPV6 if len(host) == HOST_BYTES_6 else 0) | (IS_ACCUSED if accuser else 0)
    head = HEAD.pack(
        record.session,
        record.epoch,
        record.incarnation,
        flags,
        record.port,
        record.version_min,
        record.version_max,
        record.schema,
        len(name),
        len(public),
    )
    return b"".join((head, host, name, public, ACCUSER.pack(accuser) if accuser else b""))


def unpack_row(rows: bytes, at: int) -> tuple[Record, int, int]:
    """(record, accuser, where the next row starts) of the row at `at`. Raises BadFrame."""
    try:
        head = HEAD.unpack_from(rows, at)
    except error:
        bad("row cut off")
    session, epoch, incarnation, flags, port, low, high, schema, name_bytes, public_bytes = head
    name_at = at + HEAD.size + (HOST_BYTES_6 if flags & IS_IPV6 else HOST_BYTES_4)
    public_at = name_at + name_bytes
    end = public_at + public_bytes
    accuser_bytes = ACCUSER.size if flags & IS_ACCUSED else 0
    if end + accuser_bytes > len(rows):
        bad("row cut off")
    if flags & ~FLAGS_KNOWN or low > high or not (session and port and name_bytes):
        bad("record")
    record = Record(
        text(rows[name_at:public_at], NAME_BYTES_MAX),
        session,
        epoch,
        incarnation,
        STATES[flags & STATE_MASK],
        unpack_host(rows[at + HEAD.size : name_at]),
        port,
        low,
        high,
        schema,
        text(rows[public_at:end], PUBLIC_BYTES_MAX) if public_bytes else "",
    )
    if not accuser_bytes:
        return record, 0, end
    accuser = int.from_bytes(rows[end : end + accuser_bytes], "little")
    if not accuser:
        bad("accuser")
    return record, accuser, end + accuser_bytes


def unpack_record(row: object) -> Record:
    """The only record in a field. Raises BadFrame."""
    records = unpack_records(row)
    if len(records) != 1:
        bad("one record")
    return records[0]


def pack_records(records: Iterable[Record]) -> bytes:
    return b"".join([pack_record(record) for record in records])


def unpack_records(rows: object) -> tuple[Record, ...]:
    updates = unpack_updates(rows)
    if any(update.accuser for update in updates):
        bad("accuser")
    return tuple([update.record for update in updates])


def pack_updates(updates: Iterable[Update]) -> bytes:
    return b"".join([pack_record(record, accuser) for record, accuser in updates])


def unpack_updates(rows: object) -> tuple[Update, ...]:
    """All rows of a field. Raises BadFrame."""
    if type(rows) is not bytes:
        bad("rows")
    updates = []
    at, end = 0, len(rows)
    while at < end:
        record, accuser, at = unpack_row(rows, at)
        updates.append(Update(record, accuser))
    return tuple(updates)


def size_of(update: Update) -> int:
    """Exact bytes of an update's row."""
    record = update.record
    return (
        HEAD.size
        + (HOST_BYTES_6 if ":" in record.host else HOST_BYTES_4)
        + len(record.name.encode())
        + len(record.public.encode())
        + (ACCUSER.size if update.accuser else 0)
    )


def updates_that_fit(updates: Iterable[Update], room_bytes: int) -> tuple[Update, ...]:
    """The updates in their order, without those that do not fit in what is left of the room.

    Looks no further once there is not even room for the smallest row.
    """
    taken = []
    for update in updates:
        if room_bytes < HEAD.size + HOST_BYTES_4:
            break
        size = size_of(update)
        if size <= room_bytes:
            taken.append(update)
            room_bytes -= size
    return tuple(taken)
