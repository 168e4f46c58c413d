"""The packet as it lies on the wire, its body as a flat list of fields, and BadFrame, the one error for other bytes.

    stream      4 length of the packet | packet        numbers are little-endian
    header      2 magic "RG" | 1 protocol version | 1 key id | 8 session | 1 plane | 8 counter
    ciphertext  8 receiver's session (0 = any) | 1 message kind | body, of FIELDS_MAX fields: nothing can nest | 16 tag
Rule: the header is clear text, authenticated with the cluster's label. Lengths are walked before msgpack sees them, so
no header can make the reader allocate for bytes that have not arrived.
Invariant: `seal` and `codec` raise BadFrame and nothing else, whatever bytes they get (test_wire.py, test_seal.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from struct import Struct
from typing import Any, Never

import msgpack  # type: ignore[import-untyped]

MAGIC = b"RG"
SPOKEN = (4, 5)  # the versions of the protocol that a node speaks: the previous one and its own
PROTOCOL_VERSION = SPOKEN[-1]
BASE_VERSION = 4  # as which all later versions seal packets and write what is about contact
HEADER = Struct("<2sBBQBQ")
INNER = Struct("<QB")
TAG_BYTES = 16
OVERHEAD_BYTES = HEADER.size + INNER.size + TAG_BYTES  # by how much a packet is longer than its body: 46
STREAM_HEAD = Struct("<I")  # before each packet on a stream: its length
FIELDS_MAX = 15


class Reason(StrEnum):
    """Why bytes were refused; the label of a counter."""

    SHORT = "short"
    MAGIC = "magic"
    VERSION = "version"
    PLANE = "plane"
    SIZE = "size"
    KEY = "key"
    TAG = "tag"
    BODY = "body"


class BadFrame(ValueError):
    """The bytes are no packet or no message of ours. They are dropped and counted under `reason`."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason


def bad(detail: str) -> Never:
    raise BadFrame(Reason.BODY, detail)


def _steps() -> bytes:
    """Return, by the first byte of a field, the bytes to the next one; 0 if more bytes decide, or if it is refused."""
    steps = bytearray(256)
    steps[0x00:0x80] = b"\x01" * 0x80  # small positive numbers
    steps[0xA0:0xC0] = bytes(range(1, 0x21))  # short texts
    steps[0xE0:0x100] = b"\x01" * 0x20  # small negative numbers
    for first, step in ((0xC0, 1), (0xC2, 1), (0xC3, 1), (0xCA, 5), (0xCB, 9)):  # nil, flags, floats
        steps[first] = step
    for first, width in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
        steps[first] = steps[first + 4] = 1 + width  # unsigned, signed
    return bytes(steps)


STEPS = _steps()
WIDTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # of the length before a byte string or a text


def fields_of(body: bytes) -> tuple[Any, ...]:
    """Return the fields of a body, each int, float, bool, None, str or bytes. Raises BadFrame."""
    if not body or body[0] & 0xF0 != 0x90:
        bad("no array of fields")
    at, end = 1, len(body)
    for _ in range(body[0] & 0x0F):
        if at >= end:
            bad("cut off")
        at += STEPS[body[at]] or _long(body, at)
    if at != end:
        bad("length")
    try:
        fields: tuple[Any, ...] = msgpack.unpackb(
            body, use_list=False, raw=False, strict_map_key=True, max_array_len=FIELDS_MAX, max_map_len=0, max_ext_len=0
        )
    except ValueError as error:  # msgpack's own errors are ValueErrors, a text that is not UTF-8 is one too
        raise BadFrame(Reason.BODY, "msgpack") from error
    return fields


def _long(body: bytes, at: int) -> int:
    """Return the size of a field that has its length in front."""
    width = WIDTHS.get(body[at], 0)
    if not width:
        bad("a field that is no number, flag or string")
    return 1 + width + int.from_bytes(body[at + 1 : at + 1 + width], "big")


def pack(*fields: object) -> bytes:
    """Return the body of these fields: the inverse of `fields_of`. Raises OverflowError for a number beyond 64 bits."""
    body: bytes = msgpack.packb(fields, use_bin_type=True)
    return body


def unsigned(most: int) -> Callable[[object], int]:
    """Return a function that checks that a field is a number from 0 to `most`."""

    def check(value: object) -> int:
        if type(value) is not int or not 0 <= value <= most:
            bad("number")
        return value

    return check


u16, u32, u64 = (unsigned((1 << bits) - 1) for bits in (16, 32, 64))


def identity(value: object) -> int:
    """Check a session or a challenge: 64 bits, not 0."""
    return u64(value) or bad("0 where somebody is meant")


def common_version(one: int, other: int) -> int:
    """Return the highest version of two nodes that each speak this one and the one before; 0 if there is none."""
    return min(one, other) if abs(one - other) < len(SPOKEN) else 0


def flag(value: object) -> bool:
    if type(value) is not bool:
        bad("flag")
    return value


def column(value: object, width: int, rows_max: int) -> bytes:
    """Check a column of at most `rows_max` values of `width` bytes each."""
    if type(value) is not bytes:
        bad("column")
    if len(value) > width * rows_max or len(value) % width:
        bad("length of a column")
    return value


def text(value: bytes, bytes_max: int) -> str:
    """Decode printable UTF-8. What is shown to an operator can't forge a line of a log. Raises BadFrame."""
    if len(value) > bytes_max:
        bad("text too long")
    try:
        decoded = value.decode()
    except UnicodeDecodeError as error:
        raise BadFrame(Reason.BODY, "text is not UTF-8") from error
    if not decoded.isprintable():
        bad("text is not printable")
    return decoded


def amount(value: float) -> float:
    """Check a finite number, not below 0."""
    if not math.isfinite(value) or value < 0:
        bad("amount")
    return value
