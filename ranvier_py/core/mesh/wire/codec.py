"""The codec: by it alone a message gets into a packet and out of it.

A body is a flat msgpack array (`frame`); a field of many rows is one byte string of rows (`records`) or of columns.
Features declare their kinds; widths, lengths and bounds are checked here. Rules: messages grow by fields behind all
others (`Field.since`), unknown ones are passed over, and each version is written as it always was. decode(*encode(m))
is m, with hosts in canonical spelling; arbitrary bytes raise BadFrame alone. No body is shorter than a Challenge, no
Hello shorter than an Echo: no answer to a stranger is longer than what it sent. Memory: less than 4 x the input for
bytes that are no well-formed body; otherwise the objects, up to 16 x, and 1 MiB for 4096 empty route updates.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ranvier_py.core.mesh.mesh_values import FRAME_BYTES_MAX
from ranvier_py.core.mesh.wire import messages as m
from ranvier_py.core.mesh.wire import records
from ranvier_py.core.mesh.wire.columns import FLAG, IDENTITY, U32, U64, Field
from ranvier_py.core.mesh.wire.frame import (
    BASE_VERSION,
    OVERHEAD_BYTES,
    PROTOCOL_VERSION,
    SPOKEN,
    BadFrame,
    Reason,
    bad,
    fields_of,
    pack,
    text,
    u16,
    unsigned,
)

BODY_BYTES_MIN = 10  # a Challenge
VERSION_MAX = 255
RELEASE_BYTES_MAX = 32
HELLO_BODY_BYTES_MIN = 512 - OVERHEAD_BYTES
"""Makes the packet of a Hello 512 bytes or one more: longer than any Echo, and no longer than every path carries."""


class Kind(NamedTuple):
    """One kind of message. `topic` groups kinds in metrics; `check` sees a message whose fields have all been read, and
    raises BadFrame; `since`: the version that added it, before which it is neither sent nor read."""

    topic: str
    number: int  # in a packet
    make: type[Any]
    fields: tuple[Field, ...]
    check: Callable[[Any], None] | None = None
    bytes_min: int = BODY_BYTES_MIN
    since: int = 0


def port(value: object) -> int:
    return u16(value) or bad("port 0")


def host(value: object) -> str:
    return records.unpack_host(value) if type(value) is bytes else bad("host")


def highest_version(value: object) -> int:
    """Read the version that a node speaks; in version 4 the padding of a Hello stands in its place."""
    is_padding = type(value) is bytes and not any(value)
    highest = BASE_VERSION if is_padding else unsigned(VERSION_MAX)(value)
    return highest if highest >= BASE_VERSION else bad("version")


def release(value: object) -> str:
    return text(value.encode(), RELEASE_BYTES_MAX) if type(value) is str else bad("release")


PORT = Field(None, port)
HOST = Field(records.pack_host, host)
RECORD = Field(records.pack_record, records.unpack_record)
RECORDS = Field(records.pack_records, records.unpack_records)
UPDATES = Field(records.pack_updates, records.unpack_updates)
ABOUT = (Field(None, highest_version, BASE_VERSION), Field(release, release, BASE_VERSION))

HELLO = Kind("contact", 1, m.Hello, (RECORD, IDENTITY, *ABOUT), bytes_min=HELLO_BODY_BYTES_MIN)
MESH_KINDS = (
    HELLO,
    Kind("contact", 2, m.Echo, (RECORD, IDENTITY, U64, *ABOUT)),
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
        self.written = {version: dict(self._forms(version)) for version in SPOKEN}
        self._unpackers = {version: dict(self._read(version)) for version in SPOKEN}

    def _forms(self, version: int) -> Iterator[tuple[type[Any], tuple[int, int, list[Any]]]]:
        for kind in self.kinds:
            packers = [field.pack for field in kind.fields if field.since <= version]
            if kind.since <= version:
                yield kind.make, (kind.number, kind.bytes_min, packers)

    def _read(self, version: int) -> Iterator[tuple[int, tuple[type[Any], list[Any], int, Any]]]:
        for kind in self.kinds:
            unpackers = [field.unpack for field in kind.fields if field.since <= version]
            required = sum(not field.since for field in kind.fields)
            if kind.since <= version:
                yield kind.number, (kind.make, unpackers, required, kind.check)

    def speaks(self, message: m.Message, version: int) -> bool:
        """Whether this version has messages of this kind."""
        return type(message) in self.written[version]

    def encode(self, message: m.Message, version: int = PROTOCOL_VERSION) -> tuple[int, bytes]:
        """Return (kind, body) of this version, which must have the kind. Raises ValueError for a message beyond the
        bounds, which is a bug of ours."""
        number, bytes_min, packers = self.written[version][type(message)]
        try:
            members = zip(packers, message, strict=False)
            fields = [member if packer is None else packer(member) for packer, member in members]
            body = pack(*fields)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"{type(message).__name__} has a number beyond its width") from error
        missing = bytes_min - len(body)
        if missing > 0:  # one more field, which no receiver reads, of two bytes or three and these
            body = pack(*fields, bytes(max(0, missing - 2)))
        return number, body

    def decode(self, number: int, body: bytes, version: int = PROTOCOL_VERSION) -> Any:
        """Return the message in a body of this version. Raises BadFrame for everything that is wrong."""
        form = self._unpackers[version].get(number)
        if form is None:
            bad("kind")
        if len(body) > FRAME_BYTES_MAX:
            raise BadFrame(Reason.SIZE, "body")
        make, unpackers, required, check = form
        fields = fields_of(body)
        if len(fields) < required:
            bad("too few fields")
        message = make(*[unpack(field) for unpack, field in zip(unpackers, fields, strict=False)])
        if check is not None:
            check(message)
        return message
