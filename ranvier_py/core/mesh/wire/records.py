"""Records and updates as rows of bytes, the part of gossip that is sent most.

    8 session | 8 epoch | 4 incarnation | 1 state and flags | 1 length of name | 1 length of public | 2 port
    | 8 schema | 4 or 16 host | name | public | 8 accuser, if the flag says so

A host travels as the bytes of its address, so that any spelling arrives in its canonical one. Rows follow each other
without a count. A row that a receiver would refuse is not made: ValueError. The same rows come again and again, so the
functions on one row remember their results. A usual row has 63 bytes, the longest 209.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from struct import Struct

from ranvier_py.core.mesh.wire.frame import bad, text
from ranvier_py.core.mesh.wire.messages import Record, State, Update

ROWS_MAX = 256  # in a message: as many as one part of a list of members has; a datagram has room for 28
NAME_BYTES_MAX = 64
PUBLIC_BYTES_MAX = 80
ROWS_REMEMBERED = 4096  # as many as 1000 members have in a storm of updates, 3 MiB; forgetting only costs time
HEAD = Struct("<QQIBBBHQ")
LENGTHS = Struct("<20xBBB")  # of a row: flags, length of name, length of public
ACCUSER = Struct("<Q")
HOST_BYTES_4, HOST_BYTES_6 = 4, 16
NOWHERE = (bytes(HOST_BYTES_4), bytes(HOST_BYTES_6))  # 0.0.0.0 and ::, which smg#883 gossiped
STATE_MASK, IS_IPV6, IS_ACCUSED = 0x03, 0x04, 0x08
FLAGS_KNOWN = STATE_MASK | IS_IPV6 | IS_ACCUSED
STATES = tuple(State)


def pack_host(host: str) -> bytes:
    """Return the 4 or 16 bytes of an IP literal. Raises ValueError for other text, a scope, 0.0.0.0 and ::."""
    packed = ip_address(host).packed if ":" in host else bytes(map(int, host.split(".")))
    if len(packed) not in (HOST_BYTES_4, HOST_BYTES_6) or packed in NOWHERE or "%" in host:
        raise ValueError("a host must be an IP address that others can reach")
    return packed


def unpack_host(packed: bytes) -> str:
    """Return the IP literal of 4 or 16 bytes. Raises BadFrame for other lengths, 0.0.0.0 and ::."""
    if packed in NOWHERE or len(packed) not in (HOST_BYTES_4, HOST_BYTES_6):
        bad("host")
    return ".".join(map(str, packed)) if len(packed) == HOST_BYTES_4 else str(IPv6Address(packed))


@lru_cache(ROWS_REMEMBERED)
def pack_record(record: Record, accuser: int = 0) -> bytes:
    """Return the row of a record. Raises ValueError (or struct.error) for one that breaks the bounds in `Record`."""
    host = pack_host(record.host)
    name, public = record.name.encode(), record.public.encode()
    flags = record.state | (IS_IPV6 if len(host) == HOST_BYTES_6 else 0) | (IS_ACCUSED if accuser else 0)
    numbers = record.session, record.epoch, record.incarnation, flags, len(name), len(public), record.port
    head = HEAD.pack(*numbers, record.schema)
    row = b"".join((head, host, name, public, ACCUSER.pack(accuser) if accuser else b""))
    unpack_row(row)  # raises what a receiver would
    return row


@lru_cache(ROWS_REMEMBERED)
def unpack_row(row: bytes) -> Update:
    """Return the update in exactly one row. Raises BadFrame."""
    session, epoch, incarnation, flags, name_bytes, public_bytes, port, schema = HEAD.unpack_from(row)
    name_at = HEAD.size + (HOST_BYTES_6 if flags & IS_IPV6 else HOST_BYTES_4)
    public_at = name_at + name_bytes
    accuser_at = public_at + public_bytes
    if flags & ~FLAGS_KNOWN or not (session and port and name_bytes):
        bad("record")
    record = Record(
        name=text(row[name_at:public_at], NAME_BYTES_MAX),
        session=session,
        epoch=epoch,
        incarnation=incarnation,
        state=STATES[flags & STATE_MASK],
        host=unpack_host(row[HEAD.size : name_at]),
        port=port,
        schema=schema,
        public=text(row[public_at:accuser_at], PUBLIC_BYTES_MAX),
    )
    accuser = int.from_bytes(row[accuser_at:], "little")
    if flags & IS_ACCUSED and not accuser:
        bad("accuser")
    return Update(record, accuser)


def unpack_record(row: object) -> Record:
    """Return the only record in a field. Raises BadFrame if there is another number of them."""
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
    """Return the updates in all rows of a field. Raises BadFrame."""
    if type(rows) is not bytes:
        bad("rows")
    updates: list[Update] = []
    at, end = 0, len(rows)
    while at < end:
        if end - at < HEAD.size or len(updates) == ROWS_MAX:
            bad("row cut off, or too many")
        flags, name_bytes, public_bytes = LENGTHS.unpack_from(rows, at)
        stop = at + HEAD.size + name_bytes + public_bytes
        stop += HOST_BYTES_6 if flags & IS_IPV6 else HOST_BYTES_4
        if flags & IS_ACCUSED:
            stop += ACCUSER.size
        if stop > end:
            bad("row cut off")
        updates.append(unpack_row(rows[at:stop]))
        at = stop
    return tuple(updates)


def size_of(update: Update) -> int:
    """Return the exact size of an update's row in bytes. Raises ValueError for one that can't be sent."""
    return len(pack_record(*update))
