"""Fields of many rows: route updates, tables, loads, facts, commands, keys of answers, as bounded byte strings.

Rules: numbers are little-endian. The rows use up a byte string exactly. A function that makes a byte string raises
ValueError (or struct.error) for what its reader would refuse; a reader raises BadFrame. Tables are handed on as
columns, without a step for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from struct import Struct, pack, unpack
from typing import Any, NamedTuple

import numpy as np

from ranvier_py.core.clients.body_mender import DECIDED, MODEL_BYTES_MAX, TrialResult
from ranvier_py.core.gossip.gossip_values import FRAME_BYTES_MAX
from ranvier_py.core.gossip.replication.route_updates import ROUTE_UPDATE_BYTES_MAX
from ranvier_py.core.gossip.wire.frame import amount, bad, column, encoded, text
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
COMMANDS_MAX = 64

COMMAND = Struct("<QQdBHB32s")
VERDICT_MAX = 3
READER_STATE_MAX = 5
READER_CLAIMS_MAX = 8192  # in a message: every engine's reader, and members that can't read
SNAPSHOT_HEAD_BYTES = 24
PREFILLS_MAX = 128  # in a message: 130 KiB at most
PREFILL_FINGERPRINTS_MAX = 128
PREFILL = Struct("<IQBH")
VERB_BYTES_MAX, URL_BYTES_MAX, COMMAND_NAME_BYTES_MAX, SIGNATURE_BYTES = 16, 512, NAME_CHARS_MAX, 32

ANSWER_KEYS_MAX = 16_384  # of one node, in one message: 160 KiB
ANSWER_NAME_BYTES = 32
ANSWER_PARTS_MAX = 8
VOIDED_MAX = 128  # in a message
VOIDED = Struct("<QIHBB")
TENANT_BYTES = 16
VERDICTS_MAX = 128  # in a message
VERDICT = Struct("<BBBHBB")
VERDICT_BYTES_MAX = (60, 32, MODEL_BYTES_MAX, 255, 64)
"""The most bytes of a rule's, a client's and a model's name, of the reason, and of a node's name."""


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


def read_fact(
    backend: int, generation: int, started_at: float, verdict: int, draining: int, clock: int, idle_s: int
) -> Fact:
    if verdict > VERDICT_MAX or draining > 1:
        bad("fact")
    return Fact(backend, generation, amount(started_at), verdict, draining == 1, clock, idle_s)


def read_reader_claim(backend: int, member: int, clock: int, state: int) -> ReaderClaim:
    if state > READER_STATE_MAX or not member:
        bad("reader claim")
    return ReaderClaim(backend, member, clock, state)


VECTOR = rows_field("<QQ", VECTOR_ENTRIES_MAX)
BACKENDS = rows_field("<QI", BACKENDS_MAX)
LOADS = rows_field("<QH", BACKENDS_MAX)
WAITS = rows_field("<HI", BACKENDS_MAX)
FACTS = rows_field("<QIdBBIH", BACKENDS_MAX, read_fact)
READER_CLAIMS = rows_field("<QQIB", READER_CLAIMS_MAX, read_reader_claim)


def rows_with_parts(
    field: object, head: Struct, lengths: slice, rows_max: int, what: str
) -> Iterator[tuple[tuple[Any, ...], list[bytes]]]:
    """Yield (the head's values, byte strings) of rows that are a head and byte strings, with their lengths in it."""
    if type(field) is not bytes:
        bad(what)
    at = count = 0
    while at < len(field):
        count += 1
        if count > rows_max:
            bad(f"more than {rows_max} times {what}")
        if at + head.size > len(field):
            bad(f"{what} cut off")
        values = head.unpack_from(field, at)
        at += head.size
        parts = []
        for length in values[lengths]:
            parts.append(field[at : at + length])
            at += length
        if at > len(field):
            bad(f"{what} cut off")
        yield values, parts


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


def pack_commands(commands: tuple[Command, ...]) -> bytes:
    """Bytes of each: 8 clock | 8 time | 8 weight | 1 length of verb | 2 of url | 1 of name | 32 signature | these."""
    if len(commands) > COMMANDS_MAX:
        raise ValueError("too many commands")
    return b"".join(map(_pack_command, commands))


def _pack_command(command: Command) -> bytes:
    verb, url = encoded(command.verb, VERB_BYTES_MAX), encoded(command.url, URL_BYTES_MAX)
    name = encoded(command.name, COMMAND_NAME_BYTES_MAX)
    if len(command.signature) != SIGNATURE_BYTES:
        raise ValueError("a signature has 32 bytes")
    head = COMMAND.pack(*command[:2], command.weight, len(verb), len(url), len(name), command.signature)
    return head + verb + url + name


def unpack_commands(field: object) -> tuple[Command, ...]:
    commands = []
    for (clock, signed_ms, weight, *_, signature), (verb, url, name) in rows_with_parts(
        field, COMMAND, slice(3, 6), COMMANDS_MAX, "command"
    ):
        verb_text, url_text = text(verb, VERB_BYTES_MAX), text(url, URL_BYTES_MAX)
        name_text = text(name, COMMAND_NAME_BYTES_MAX)
        commands.append(Command(clock, signed_ms, verb_text, url_text, amount(weight), name_text, signature))
    return tuple(commands)


def pack_voided(voided: tuple[VoidedAnswers, ...]) -> bytes:
    """Bytes of each: 8 number | 4 age | 2 length of model | 1 of tenant | 1 of signature | the three."""
    if len(voided) > VOIDED_MAX:
        raise ValueError("too many invalidations for a message")
    return b"".join(map(_pack_voided, voided))


def _pack_voided(one: VoidedAnswers) -> bytes:
    model, tenant, signature = encoded(one.model, MODEL_BYTES_MAX), one.tenant, one.signature
    if len(tenant) not in (0, TENANT_BYTES) or len(signature) not in (0, SIGNATURE_BYTES):
        raise ValueError("a tenant has 16 bytes, a signature 32")
    return VOIDED.pack(one.number, one.older_ms, len(model), len(tenant), len(signature)) + model + tenant + signature


def unpack_voided(field: object) -> tuple[VoidedAnswers, ...]:
    found = []
    for (number, older_ms, *_), (model, tenant, signature) in rows_with_parts(
        field, VOIDED, slice(2, 5), VOIDED_MAX, "invalidation"
    ):
        if len(tenant) not in (0, TENANT_BYTES) or len(signature) not in (0, SIGNATURE_BYTES):
            bad("tenant or signature of an invalidation")
        if not number:
            bad("an invalidation without a number")
        found.append(VoidedAnswers(number, older_ms, text(model, MODEL_BYTES_MAX), tenant, signature))
    return tuple(found)


def pack_verdicts(verdicts: tuple[TrialResult, ...]) -> bytes:
    """Bytes of each: 1 state | 1 length of rule | 1 of client | 2 of model | 1 of reason | 1 of node | the five."""
    if len(verdicts) > VERDICTS_MAX:
        raise ValueError("too many verdicts for a message")
    return b"".join(map(_pack_verdict, verdicts))


def _pack_verdict(verdict: TrialResult) -> bytes:
    rule, client, model, state, why, node = verdict
    parts = list(map(encoded, (rule, client, model, why, node), VERDICT_BYTES_MAX))
    return b"".join([VERDICT.pack(DECIDED.index(state), *map(len, parts)), *parts])


def unpack_verdicts(field: object) -> tuple[TrialResult, ...]:
    found = []
    for (state, *_), parts in rows_with_parts(field, VERDICT, slice(1, 6), VERDICTS_MAX, "verdict"):
        if state >= len(DECIDED):
            bad("state of a verdict")
        rule, client, model, why, node = map(text, parts, VERDICT_BYTES_MAX)
        found.append(TrialResult(rule, client, model, DECIDED[state], why, node))
    return tuple(found)


def pack_prefills(prefills: tuple[SharedPrefill, ...]) -> bytes:
    """Bytes of each: 4 number | 8 backend | 1 generation | 2 length of fingerprints | the fingerprints."""
    if len(prefills) > PREFILLS_MAX:
        raise ValueError("too many prefills for a message")
    return b"".join(map(_pack_prefill, prefills))


def _pack_prefill(prefill: SharedPrefill) -> bytes:
    *head, fingerprints = prefill
    if not 0 < len(fingerprints) <= 8 * PREFILL_FINGERPRINTS_MAX or len(fingerprints) % 8:
        raise ValueError(f"a prefill has 1 … {PREFILL_FINGERPRINTS_MAX} fingerprints")
    return PREFILL.pack(*head, len(fingerprints)) + fingerprints


def unpack_prefills(field: object) -> tuple[SharedPrefill, ...]:
    found = []
    for (*head, _), (names,) in rows_with_parts(field, PREFILL, slice(3, 4), PREFILLS_MAX, "prefill"):
        number, backend, generation = head
        found.append(SharedPrefill(number, backend, generation, column(names, 8, PREFILL_FINGERPRINTS_MAX)))
        if not names:
            bad("a prefill without a prefix")
    return tuple(found)


def unpack_ended(field: object) -> bytes:
    return column(field, 4, ENTRIES_MAX)


def unpack_answer_keys(field: object) -> bytes:
    return column(field, 8, ANSWER_KEYS_MAX)


def unpack_answer_name(field: object) -> bytes:
    return field if type(field) is bytes and len(field) == ANSWER_NAME_BYTES else bad("name of an answer")


def check_answer_keys(keys: AnswerKeys) -> None:
    """Raise BadFrame unless each added answer has its age."""
    if 4 * len(keys.ages) != len(keys.added):
        bad("columns of different length")


def unpack_snapshot_head(field: object) -> bytes:
    return field if type(field) is bytes and len(field) == SNAPSHOT_HEAD_BYTES else bad("head of a copy")


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


def check_part(part: PartSums) -> None:
    """Raise BadFrame unless each group has all of its sums."""
    if len(part.sums) != GROUP_BYTES * len(part.groups):
        bad("sums of other groups")


def unpack_buckets(field: object) -> bytes:
    """Return a column of bucket numbers. Raises BadFrame if one does not exist."""
    buckets = column(field, 2, BUCKETS)
    if buckets and int(np.frombuffer(buckets, "<u2").max()) >= BUCKETS:
        bad("no such bucket")
    return buckets


def check_rows(rows: TableRows) -> None:
    """Raise BadFrame unless all columns have a value for each claim, and each claim has one of the backends."""
    count = len(rows.age_s) // 2
    widths = ((rows.parent, 8), (rows.tokens, 4), (rows.token, 8), (rows.text, 8), (rows.backend, 2), (rows.age_s, 2))
    if any(len(data) != width * count for data, width in widths):
        bad("columns of different length")
    if count and int(np.frombuffer(rows.backend, "<u2").max()) >= len(rows.backends):
        bad("no such backend")


def rows_column(field: object) -> bytes:
    """Return one of the columns of a message, whose length is checked with the others (`check_rows`), if at all."""
    return column(field, 1, FRAME_BYTES_MAX)
