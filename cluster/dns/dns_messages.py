"""DNS messages of the lab (RFC 1035, 6891): what a resolver asks and what a small server answers. Pure.

Only what names and addresses need: one question, class IN, types A and AAAA answered, SOA in negative answers. Reading
is strict: a message that is not exactly a query with one question is a BadQuery, which carries the code to answer
with, or None where silence is right. Nothing here reads beyond the message, follows a compression pointer, or
allocates more than the message holds.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import ip_address

HEADER = struct.Struct("!6H")
QUESTION_END = struct.Struct("!2H")
RECORD_HEAD = struct.Struct("!2HIH")
CLASS_IN = 1
UDP_BYTES_DEFAULT = 512
"""Largest answer over UDP to an asker that says nothing else (RFC 1035)."""

UDP_BYTES_MAX = 1232
"""Largest that we send whatever the asker allows: fits IPv6's smallest packet."""

NAME_BYTES_MAX = 255
LABEL_BYTES_MAX = 63
QUESTION_POINTER = b"\xc0\x0c"
"""The name of every record of ours is the name of the question, which stands right after the header."""

FLAG_REPLY, FLAG_AUTHORITATIVE, FLAG_TRUNCATED, FLAG_RECURSION_WANTED = 0x8000, 0x0400, 0x0200, 0x0100


class Kind(IntEnum):
    """Types of records (RFC 1035, 3596, 6891)."""

    A = 1
    SOA = 6
    AAAA = 28
    OPT = 41


class Code(IntEnum):
    """Response codes."""

    NOERROR = 0
    FORMERR = 1
    SERVFAIL = 2
    NXDOMAIN = 3
    NOTIMP = 4
    REFUSED = 5


class BadQuery(ValueError):
    """Not a query we take. `code` None: answer nothing."""

    def __init__(self, code: Code | None, why: str) -> None:
        super().__init__(why)
        self.code = code


class BadReply(ValueError):
    """Not an answer to what was asked."""


@dataclass(frozen=True, slots=True)
class Query:
    """A question. `question` are its bytes as they came: the answer repeats them, with the asker's capitals."""

    number: int
    flags: int
    name: str
    kind: int
    question: bytes
    udp_bytes_max: int = UDP_BYTES_DEFAULT
    has_options: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What an answer says. `addresses` in the order in which they came."""

    code: int
    truncated: bool
    addresses: tuple[str, ...]
    ttl_s: int


# --- names ----------------------------------------------------------------------------------------------------------


def write_name(name: str) -> bytes:
    """Labels with their lengths. Raises ValueError for a name that DNS cannot say."""
    labels = [label.encode("ascii") for label in name.rstrip(".").split(".")] if name.rstrip(".") else []
    if any(not 0 < len(label) <= LABEL_BYTES_MAX for label in labels):
        raise ValueError(f"{name!r}: a label has 1 … {LABEL_BYTES_MAX} bytes")
    written = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    if len(written) > NAME_BYTES_MAX:
        raise ValueError(f"{name!r}: a name has at most {NAME_BYTES_MAX} bytes")
    return written


def read_name(data: bytes, start: int) -> tuple[str, int]:
    """An uncompressed name and where it ends, in lower case. Raises ValueError."""
    labels: list[str] = []
    place = start
    while place < len(data) and place - start < NAME_BYTES_MAX:
        length = data[place]
        place += 1
        if length == 0:
            return ".".join(labels), place
        if length > LABEL_BYTES_MAX or place + length > len(data):
            break
        labels.append(data[place : place + length].decode("latin-1").lower())
        place += length
    raise ValueError("a name that does not end, or is compressed")


def skip_name(data: bytes, start: int) -> int:
    """Where a name ends that may be compressed. Raises ValueError."""
    place = start
    while place < len(data):
        length = data[place]
        if length >= 0xC0:
            return place + 2
        place += 1 + length
        if length == 0:
            return place
    raise ValueError("a name that does not end")


# --- the server's side ----------------------------------------------------------------------------------------------


def read_query(data: bytes) -> Query:
    """Raises BadQuery."""
    if len(data) < HEADER.size:
        raise BadQuery(None, "shorter than a header")
    number, flags, questions, answers, authorities, extras = HEADER.unpack_from(data)
    if flags & FLAG_REPLY:
        raise BadQuery(None, "an answer, not a question")
    if flags & 0x7800:
        raise BadQuery(Code.NOTIMP, "not a plain query")
    if questions != 1 or answers or authorities or extras > 1:
        raise BadQuery(Code.FORMERR, "want one question and nothing else")
    try:
        name, end = read_name(data, HEADER.size)
        kind, name_class = QUESTION_END.unpack_from(data, end)
        end += QUESTION_END.size
        udp_bytes = read_options(data, end) if extras else 0
    except (ValueError, struct.error) as error:
        raise BadQuery(Code.FORMERR, str(error)) from error
    if name_class != CLASS_IN:
        raise BadQuery(Code.REFUSED, "a class other than IN")
    size = min(max(udp_bytes, UDP_BYTES_DEFAULT), UDP_BYTES_MAX)
    return Query(number, flags, name, kind, data[HEADER.size : end], size, bool(extras))


def read_options(data: bytes, start: int) -> int:
    """The size of UDP answers that an OPT record allows; the record must end the message. Raises ValueError."""
    if data[start : start + 1] != b"\0" or len(data) < start + 1 + RECORD_HEAD.size:
        raise ValueError("what follows the question is no OPT record")
    kind, udp_bytes, _, length = RECORD_HEAD.unpack_from(data, start + 1)
    if kind != Kind.OPT or start + 1 + RECORD_HEAD.size + length != len(data):
        raise ValueError("what follows the question is no OPT record, or more than it")
    return int(udp_bytes)


def write_answer(
    query: Query, code: Code, addresses: Sequence[str], ttl_s: int, *, zone: str = "", bytes_max: int = 65_535
) -> bytes:
    """The answer with as many addresses as fit; TC says that some did not. An empty one names the zone's SOA."""
    records = [QUESTION_POINTER + address_record(address, ttl_s) for address in addresses]
    negative = [soa_record(zone, ttl_s)] if zone and not records and code in (Code.NOERROR, Code.NXDOMAIN) else []
    options = [b"\0" + RECORD_HEAD.pack(Kind.OPT, UDP_BYTES_MAX, 0, 0)] if query.has_options else []
    room = bytes_max - HEADER.size - len(query.question) - sum(map(len, negative)) - sum(map(len, options))
    fitting: list[bytes] = []
    for record in records:
        room -= len(record)
        if room < 0:
            break
        fitting.append(record)
    flags = FLAG_REPLY | FLAG_AUTHORITATIVE | (query.flags & FLAG_RECURSION_WANTED) | code
    if len(fitting) < len(records):
        flags |= FLAG_TRUNCATED
    head = HEADER.pack(query.number, flags, 1, len(fitting), len(negative), len(options))
    return b"".join((head, query.question, *fitting, *negative, *options))


def write_error(data: bytes, code: Code) -> bytes:
    """The answer to what could not be read: a header alone. `data` has at least a header."""
    number, flags, *_ = HEADER.unpack_from(data)
    kept = FLAG_REPLY | (flags & (0x7800 | FLAG_RECURSION_WANTED)) | code
    return HEADER.pack(number, kept, 0, 0, 0, 0)


def address_record(address: str, ttl_s: int) -> bytes:
    packed = ip_address(address).packed
    return RECORD_HEAD.pack(Kind.A if len(packed) == 4 else Kind.AAAA, CLASS_IN, ttl_s, len(packed)) + packed


def soa_record(zone: str, ttl_s: int) -> bytes:
    """How long a resolver may remember that there is nothing (RFC 2308): the last of the numbers."""
    data = write_name(f"ns.{zone}") + write_name(f"lab.{zone}") + struct.pack("!5I", 1, 60, 60, 60, ttl_s)
    return write_name(zone) + RECORD_HEAD.pack(Kind.SOA, CLASS_IN, ttl_s, len(data)) + data


# --- the asker's side -----------------------------------------------------------------------------------------------


def write_query(number: int, name: str, kind: Kind) -> bytes:
    """Raises ValueError for a name that DNS cannot say."""
    head = HEADER.pack(number, FLAG_RECURSION_WANTED, 1, 0, 0, 0)
    return head + write_name(name) + QUESTION_END.pack(kind, CLASS_IN)


def read_reply(data: bytes, asked: bytes) -> Reply:
    """The answer to the query `asked`, which is compared with it. Raises BadReply."""
    question = asked[HEADER.size :]
    end = HEADER.size + len(question)
    if len(data) < HEADER.size or data[:2] != asked[:2]:
        raise BadReply("an answer to something else")
    _, flags, questions, answers, _, _ = HEADER.unpack_from(data)
    if not flags & FLAG_REPLY:
        raise BadReply("not an answer")
    if questions and data[HEADER.size : end].lower() != question.lower():
        raise BadReply("an answer to another question")
    try:
        found = list(read_records(data, end if questions else HEADER.size, answers))
    except (ValueError, struct.error) as error:
        raise BadReply(str(error)) from error
    addresses = tuple(address for address, _ in found)
    return Reply(flags & 0xF, bool(flags & FLAG_TRUNCATED), addresses, min((ttl for _, ttl in found), default=0))


def read_records(data: bytes, start: int, count: int) -> list[tuple[str, int]]:
    """(address, TTL in seconds) of the A and AAAA records among the next `count`. Raises ValueError, struct.error."""
    found: list[tuple[str, int]] = []
    place = start
    for _ in range(count):
        place = skip_name(data, place)
        kind, name_class, ttl_s, length = RECORD_HEAD.unpack_from(data, place)
        place += RECORD_HEAD.size
        packed = data[place : place + length]
        place += length
        if place > len(data):
            raise ValueError("a record that is cut off")
        if name_class == CLASS_IN and (kind, length) in ((Kind.A, 4), (Kind.AAAA, 16)):
            found.append((str(ip_address(packed)), ttl_s))
    return found
