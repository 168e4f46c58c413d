"""The codec: by it alone a message gets into a packet and out of it.

A body is a flat msgpack array (`frame`); a field of many rows is one byte string of rows (`records`) or of columns.
Features declare their kinds; every width, length and bound is checked here, so that no code behind it has to. A change
of a kind changes PROTOCOL_VERSION. Rules: decode(*encode(message)) is the message, with hosts in canonical spelling;
arbitrary bytes raise BadFrame and nothing else. No body is shorter than a Challenge and no Hello shorter than an Echo,
so that no answer to a stranger is longer than what it sent. Memory: less than 4 x the input for bytes that are no
well-formed body; otherwise the objects, up to 16 x, and 1 MiB for 4096 empty route updates.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ranvier_py.core.mesh.mesh_values import FRAME_BYTES_MAX
from ranvier_py.core.mesh.wire import messages as m
from ranvier_py.core.mesh.wire import records
from ranvier_py.core.mesh.wire.columns import FLAG, IDENTITY, U32, U64, Field
from ranvier_py.core.mesh.wire.frame import OVERHEAD_BYTES, BadFrame, Reason, bad, fields_of, pack, u16

BODY_BYTES_MIN = 10  # a Challenge
HELLO_BODY_BYTES_MIN = 512 - OVERHEAD_BYTES
"""Makes the packet of a Hello 512 bytes or one more: longer than any Echo, and no longer than every path carries."""


class Kind(NamedTuple):
    """One kind of message. `topic` groups kinds in metrics; `check` sees a message whose fields have all been read, and
    raises BadFrame."""

    topic: str
    number: int  # in a packet
    make: type[Any]
    fields: tuple[Field, ...]
    check: Callable[[Any], None] | None = None
    bytes_min: int = BODY_BYTES_MIN


def port(value: object) -> int:
    return u16(value) or bad("port 0")


def host(value: object) -> str:
    return records.unpack_host(value) if type(value) is bytes else bad("host")


PORT = Field(None, port)
HOST = Field(records.pack_host, host)
RECORD = Field(records.pack_record, records.unpack_record)
RECORDS = Field(records.pack_records, records.unpack_records)
UPDATES = Field(records.pack_updates, records.unpack_updates)

HELLO = Kind("contact", 1, m.Hello, (RECORD, IDENTITY), bytes_min=HELLO_BODY_BYTES_MIN)
MESH_KINDS = (
    HELLO,
    Kind("contact", 2, m.Echo, (RECORD, IDENTITY, U64)),
    Kind("contact", 3, m.Challenge, (IDENTITY,)),
    Kind("membership", 16, m.Ping, (U32, UPDATES)),
    Kind("membership", 17, m.Ack, (U32, UPDATES)),
    Kind("membership", 18, m.PingRequest, (U32, IDENTITY, HOST, PORT, UPDATES)),
    Kind("membership", 19, m.Nack, (U32,)),
    Kind("membership", 20, m.Push, (UPDATES,)),
    Kind("membership", 21, m.Members, (RECORDS, FLAG)),
)


class Codec:
    """Encodes and decodes messages of the mesh itself and of these kinds."""

    def __init__(self, kinds: Iterable[Kind] = ()) -> None:
        self.kinds = (*MESH_KINDS, *kinds)
        self.topic_of = {kind.number: kind.topic for kind in self.kinds}
        self.number_of = {kind.make: kind.number for kind in self.kinds}
        assert len(self.topic_of) == len(self.number_of) == len(self.kinds), "each kind has a number and a class"
        self._packers = {
            kind.make: (kind.number, kind.bytes_min, [field.pack for field in kind.fields]) for kind in self.kinds
        }
        self._unpackers = {
            kind.number: (kind.make, [field.unpack for field in kind.fields], kind.check) for kind in self.kinds
        }

    def encode(self, message: m.Message) -> tuple[int, bytes]:
        """Return (kind, body). Raises ValueError for a message beyond the bounds, which is a bug of ours."""
        number, bytes_min, packers = self._packers[type(message)]
        try:
            members = zip(packers, message, strict=True)
            fields = [member if packer is None else packer(member) for packer, member in members]
            body = pack(*fields)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"{type(message).__name__} has a number beyond its width") from error
        missing = bytes_min - len(body)
        if missing > 0:  # one more field, which no receiver reads, of two bytes or three and these
            body = pack(*fields, bytes(max(0, missing - 2)))
        return number, body

    def decode(self, number: int, body: bytes) -> Any:
        """Return the message in a body. Raises BadFrame for everything that is wrong."""
        form = self._unpackers.get(number)
        if form is None:
            bad("kind")
        if len(body) > FRAME_BYTES_MAX:
            raise BadFrame(Reason.SIZE, "body")
        make, unpackers, check = form
        fields = fields_of(body)
        if len(fields) < len(unpackers):
            bad("too few fields")
        message = make(*[unpack(field) for unpack, field in zip(unpackers, fields, strict=False)])
        if check is not None:
            check(message)
        return message
