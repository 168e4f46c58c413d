"""Fields of messages: numbers, and many rows as bounded byte strings of rows or of columns.

Rules: numbers are little-endian. The rows use up a byte string exactly. A function that makes a byte string raises
ValueError (or struct.error) for what its reader would refuse; a reader raises BadFrame. Tables are handed on as
columns, without a step for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from struct import Struct
from typing import Any, NamedTuple

from ranvier_py.core.mesh.mesh_values import FRAME_BYTES_MAX
from ranvier_py.core.mesh.wire.frame import bad, column, fields_of, flag, identity, pack, u16, u32, u64

SIGNATURE_BYTES = 32


class Field(NamedTuple):
    """How one member of a message becomes a field (None: as it is), and how a field is checked and read back.

    `since`: the version that added it behind all others; a message without it has its default. 0: it must be there.
    """

    pack: Callable[[Any], object] | None
    unpack: Callable[[Any], object]
    since: int = 0


U16, U32, U64, IDENTITY, FLAG = (Field(None, check) for check in (u16, u32, u64, identity, flag))


def rows_field(layout: str, rows_max: int, read: Callable[..., Any] | None = None) -> Field:
    """Return the field of tuples of one layout. `read` makes a row of its values, or raises BadFrame."""
    row = Struct(layout)

    def pack_rows(rows: Iterable[tuple[Any, ...]]) -> bytes:
        packed = [row.pack(*values) for values in rows]
        if len(packed) > rows_max:
            raise ValueError("too many rows")
        return b"".join(packed)

    def unpack_rows(field: object) -> tuple[Any, ...]:
        rows = row.iter_unpack(column(field, row.size, rows_max))
        return tuple(rows) if read is None else tuple([read(*values) for values in rows])

    return Field(pack_rows, unpack_rows)


def parts_field(what: str, layout: str, rows_max: int, read: Callable[..., Any]) -> Field:
    """Return the field of rows with members of one layout: «*B» and «*H» are a byte string or text with its length.

    Bytes of each row: all else and the lengths | the byte strings. `read` makes a row of its members, texts as bytes,
    or raises BadFrame; it checks what is written, too, so that nothing is sent that a receiver would refuse. What a row
    has beyond the layout is not written.
    """
    members = layout.split()
    parts = [index for index, member in enumerate(members) if member[0] == "*"]
    order = [*(index for index in range(len(members)) if index not in parts), *parts]
    head = Struct("<" + "".join([members[index].lstrip("*") for index in order]))

    def pack_rows(rows: Sequence[Sequence[Any]]) -> bytes:
        if len(rows) > rows_max:
            raise ValueError(f"more than {rows_max} times {what}")
        packed = []
        for row in rows:
            values = [value.encode() if isinstance(value, str) else value for value in row[: len(members)]]
            read(*values)
            numbers = [len(values[index]) if index in parts else values[index] for index in order]
            packed += [head.pack(*numbers), *[values[index] for index in parts]]
        return b"".join(packed)

    def unpack_rows(field: object) -> tuple[Any, ...]:
        if type(field) is not bytes:
            bad(what)
        rows: list[Any] = []
        at = 0
        while at < len(field):
            if len(rows) == rows_max or at + head.size > len(field):
                bad(f"{what} cut off, or more than {rows_max}")
            values = dict(zip(order, head.unpack_from(field, at), strict=True))
            at += head.size
            for index in parts:
                start, at = at, at + values[index]
                values[index] = field[start:at]
            if at > len(field):
                bad(f"{what} cut off")
            rows.append(read(*[values[index] for index in range(len(members))]))
        return tuple(rows)

    return Field(pack_rows, unpack_rows)


def column_field(width: int, rows_max: int) -> Field:
    """Return the field of one column of at most so many values of `width` bytes."""
    return Field(None, partial(column, width=width, rows_max=rows_max))


COLUMN = column_field(1, FRAME_BYTES_MAX)  # its length is checked with the message's others (`Kind.check`), if at all


def packed(fields: Sequence[Field], values: Iterable[Any]) -> bytes:
    """Return these values as one byte string, for a message that carries another layout than its own."""
    each = zip(fields, values, strict=True)
    return pack(*[value if field.pack is None else field.pack(value) for field, value in each])


def unpacked(fields: Sequence[Field], data: bytes) -> list[Any]:
    """Return the values in such a byte string; a later version may have added more behind them. Raises BadFrame."""
    found = fields_of(data)
    if len(found) < len(fields):
        bad("number of fields")
    return [field.unpack(value) for field, value in zip(fields, found, strict=False)]
