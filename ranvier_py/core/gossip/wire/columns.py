"""Fields of many rows: route updates, tables, loads, facts, commands, keys of answers, as bounded byte strings.

Rules: numbers are little-endian. The rows use up a byte string exactly. A function that makes a byte string raises
ValueError (or struct.error) for what its reader would refuse; a reader raises BadFrame. Tables are handed on as
columns, without a step for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from struct import Struct, pack, unpack
from typing import Any, NamedTuple

import numpy as np

from ranvier_py.core.clients.body_mender import DECIDED, MODEL_BYTES_MAX, TrialResult
from ranvier_py.core.gossip.gossip_values import FRAME_BYTES_MAX
from ranvier_py.core.gossip.replication.route_updates import ROUTE_UPDATE_BYTES_MAX
from ranvier_py.core.gossip.wire.frame import amount, bad, column, text
from ranvier_py.core.gossip.wire.messages import (
    AnswerKeys,
    Command,
    Entry,
    Fact,
    PartSums,
    ReaderClaim,
    SharedPrefill,
    TableRows,
    VoidedAnswers,
)
from ranvier_py.core.routing.backend import NAME_CHARS_MAX

ENTRIES_MAX = 4096  # route updates, or numbers of ended prefills, in a message
ENTRY_BYTES = 4  # what an entry takes beside its route update
BACKENDS_MAX = 4096  # as many as a node's registry holds
VECTOR_ENTRIES_MAX = 8192  # sessions of 1000 nodes and of their earlier runs; 128 KiB
BUCKETS = 4096
SUM_BYTES = 8
GROUPS = 64  # of buckets, for two levels of comparison: 512 bytes for all groups, as many for the buckets of one
GROUP_BYTES = SUM_BYTES * BUCKETS // GROUPS
VERDICT_MAX = 3
READER_STATE_MAX = 5
FACTS_MAX = 512  # in a message, 24 kB: taking in one takes some 20 µs
READER_CLAIMS_MAX = 2048  # in a message, 43 kB
PREFILLS_MAX = 128  # in a message: 130 KiB at most
PREFILL_FINGERPRINTS_MAX = 128
COMMANDS_MAX = 64
COMMAND_BYTES_MAX = (16, 512, NAME_CHARS_MAX)
"""The most bytes of a command's verb, URL and name."""

SIGNATURE_BYTES = 32
ANSWER_KEYS_MAX = 16_384  # of one node, in one message: 160 KiB
ANSWER_PARTS_MAX = 8
VOIDED_MAX = 128  # in a message
TENANT_BYTES = 16
VERDICTS_MAX = 128  # in a message
VERDICT_BYTES_MAX = (60, 32, MODEL_BYTES_MAX, 8, 255, 64)
"""The most bytes of the names of a rule, a client and a model, of the state and the reason, and of a node's name."""


class Field(NamedTuple):
    """How one member of a message becomes a field (None: as it is), and how a field is checked and read back."""

    pack: Callable[[Any], object] | None
    unpack: Callable[[Any], object]


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


def read_fact(  # one for each column
    backend: int, generation: int, started_at: float, verdict: int, draining: int, clock: int, idle_s: int, *marks: int
) -> Fact:
    if verdict > VERDICT_MAX or draining > 1:
        bad("fact")
    return Fact(backend, generation, amount(started_at), verdict, draining == 1, clock, idle_s, *marks)


def read_reader_claim(backend: int, member: int, clock: int, state: int) -> ReaderClaim:
    if state > READER_STATE_MAX or not member:
        bad("reader claim")
    return ReaderClaim(backend, member, clock, state)


VECTOR = rows_field("<QQ", VECTOR_ENTRIES_MAX)
BACKENDS = rows_field("<QI", BACKENDS_MAX)
LOADS = rows_field("<QHHI", BACKENDS_MAX)
FACTS = rows_field("<QIdBBIHQQH", FACTS_MAX, read_fact)
READER_CLAIMS = rows_field("<QQIB", READER_CLAIMS_MAX, read_reader_claim)


def parts_field(what: str, layout: str, rows_max: int, read: Callable[..., Any]) -> Field:
    """Return the field of rows with members of one layout: «*B» and «*H» are a byte string or text with its length.

    Bytes of each row: all else and the lengths | the byte strings. `read` makes a row of its members, texts as bytes,
    or raises BadFrame; it checks what is written, too, so that nothing is sent that a receiver would refuse.
    """
    members = layout.split()
    parts = [index for index, member in enumerate(members) if member[0] == "*"]
    order = [*(index for index in range(len(members)) if index not in parts), *parts]
    head = Struct("<" + "".join([members[index].lstrip("*") for index in order]))

    def pack_rows(rows: Sequence[Iterable[Any]]) -> bytes:
        if len(rows) > rows_max:
            raise ValueError(f"more than {rows_max} times {what}")
        packed = []
        for row in rows:
            values = [value.encode() if isinstance(value, str) else value for value in row]
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


def read_command(
    clock: int, signed_ms: int, verb: bytes, url: bytes, weight: float, name: bytes, signature: bytes
) -> Command:
    if len(signature) != SIGNATURE_BYTES:
        bad("signature of a command")
    texts = map(text, (verb, url, name), COMMAND_BYTES_MAX)
    return Command(clock, signed_ms, next(texts), next(texts), amount(weight), next(texts), signature)


def read_voided(number: int, older_ms: int, model: bytes, tenant: bytes, signature: bytes) -> VoidedAnswers:
    if len(tenant) not in (0, TENANT_BYTES) or len(signature) not in (0, SIGNATURE_BYTES):
        bad("tenant or signature of an invalidation")
    if not number:
        bad("an invalidation without a number")
    return VoidedAnswers(number, older_ms, text(model, MODEL_BYTES_MAX), tenant, signature)


def read_verdict(*texts: bytes) -> TrialResult:
    verdict = TrialResult(*map(text, texts, VERDICT_BYTES_MAX))
    if verdict.state not in DECIDED:
        bad("state of a verdict")
    return verdict


def read_prefill(number: int, backend: int, generation: int, fingerprints: bytes) -> SharedPrefill:
    if not fingerprints:
        bad("a prefill without a prefix")
    return SharedPrefill(number, backend, generation, column(fingerprints, 8, PREFILL_FINGERPRINTS_MAX))


COMMANDS = parts_field("command", "Q Q *B *H d *B 32s", COMMANDS_MAX, read_command)
VOIDED = parts_field("invalidation", "Q I *H *B *B", VOIDED_MAX, read_voided)
VERDICTS = parts_field("verdict", "*B *B *H *B *B *B", VERDICTS_MAX, read_verdict)
PREFILLS = parts_field("prefill", "I Q B *H", PREFILLS_MAX, read_prefill)


def pack_entries(entries: tuple[Entry, ...]) -> bytes:
    """Bytes: 2 count | 2 age of each | 2 length of each | the route updates."""
    count = len(entries)
    if count > ENTRIES_MAX:
        raise ValueError("too many route updates for a message")
    ages, route_updates = zip(*entries, strict=True) if entries else ((), ())
    lengths = list(map(len, route_updates))
    if entries and max(lengths) > ROUTE_UPDATE_BYTES_MAX:
        raise ValueError("a route update is too long")
    return pack(f"<H{2 * count}H", count, *ages, *lengths) + b"".join(route_updates)


def unpack_entries(field: object) -> tuple[Entry, ...]:
    if type(field) is not bytes or len(field) < 2:
        bad("route updates")
    count = int.from_bytes(field[:2], "little")
    at = 2 + ENTRY_BYTES * count
    if count > ENTRIES_MAX or len(field) < at:
        bad("count of route updates")
    numbers = unpack(f"<{2 * count}H", field[2:at])
    entries = []
    for age_s, length in zip(numbers[:count], numbers[count:], strict=True):
        if length > ROUTE_UPDATE_BYTES_MAX:
            bad("length of a route update")
        entries.append(Entry(age_s, field[at : at + length]))
        at += length
    if at != len(field):
        bad("length of route updates")
    return tuple(entries)


ENTRIES = Field(pack_entries, unpack_entries)


def column_field(width: int, rows_max: int) -> Field:
    """Return the field of one column of at most so many values of `width` bytes."""
    return Field(None, partial(column, width=width, rows_max=rows_max))


def bytes_field(size: int, what: str) -> Field:
    """Return the field of a byte string of exactly this size."""
    return Field(None, lambda field: field if type(field) is bytes and len(field) == size else bad(what))


def unpack_group_sums(field: object) -> bytes:
    """Return the sums of all groups, or no bytes. Raises BadFrame for any other number of sums."""
    sums = column(field, SUM_BYTES, GROUPS)
    if sums and len(sums) != SUM_BYTES * GROUPS:
        bad("number of groups")
    return sums


def unpack_groups(field: object) -> bytes:
    """Return numbers of groups. Raises BadFrame if one does not exist or they do not ascend."""
    groups = column(field, 1, GROUPS)
    if any(low >= high for low, high in pairwise(groups)) or (groups and groups[-1] >= GROUPS):
        bad("no such group")
    return groups


def unpack_buckets(field: object) -> bytes:
    """Return a column of bucket numbers. Raises BadFrame if one does not exist."""
    buckets = column(field, 2, BUCKETS)
    if buckets and int(np.frombuffer(buckets, "<u2").max()) >= BUCKETS:
        bad("no such bucket")
    return buckets


COLUMN = column_field(1, FRAME_BYTES_MAX)  # its length is checked with the message's others (CHECKS), if at all
GROUP_NUMBERS, GROUP_SUMS = Field(None, unpack_groups), Field(None, unpack_group_sums)
BUCKET_NUMBERS = Field(None, unpack_buckets)
ENDED = column_field(4, ENTRIES_MAX)
ANSWER_KEYS, ANSWER_NAME = column_field(8, ANSWER_KEYS_MAX), bytes_field(32, "name of an answer")
SNAPSHOT_HEAD = bytes_field(24, "head of a copy")


def check_part(part: PartSums) -> None:
    """Raise BadFrame unless each group has all of its sums."""
    if len(part.sums) != GROUP_BYTES * len(part.groups):
        bad("sums of other groups")


def check_rows(rows: TableRows) -> None:
    """Raise BadFrame unless all columns have a value for each claim, and each claim has one of the backends."""
    count = len(rows.age_s) // 2
    widths = ((rows.parent, 8), (rows.tokens, 4), (rows.token, 8), (rows.text, 8), (rows.backend, 2), (rows.age_s, 2))
    if any(len(data) != width * count for data, width in widths):
        bad("columns of different length")
    if count and int(np.frombuffer(rows.backend, "<u2").max()) >= len(rows.backends):
        bad("no such backend")


def check_answer_keys(keys: AnswerKeys) -> None:
    """Raise BadFrame unless each added answer has its age."""
    if 4 * len(keys.ages) != len(keys.added):
        bad("columns of different length")


CHECKS: dict[type, Callable[[Any], None]] = {
    PartSums: check_part,
    TableRows: check_rows,
    AnswerKeys: check_answer_keys,
}
"""What is checked of a message when all of its fields have been read."""
