"""Route updates, tables, loads, facts and commands as byte strings of columns or rows, within their bounds.

Rules: numbers are little-endian; a byte string is used up exactly by its rows; a function that makes one raises
ValueError (or struct.error) for what its reader would refuse, and a reader raises BadFrame. Cost: 0.1 us for a route
update made and 0.2 us for one read; tables are handed on as columns, without a step for each row.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from struct import Struct, error, pack, unpack

import numpy as np

from ranvier_py.core.gossip.replication.route_updates import ROUTE_UPDATE_BYTES_MAX
from ranvier_py.core.gossip.wire.fields import U16_MAX, amount, bad, column, encoded, text
from ranvier_py.core.gossip.wire.messages import Command, Entry, Fact, PartSums, Rows, Stand

ENTRIES_MAX = 4096
"""Route updates in a batch: what an eager queue holds."""

ENTRY_BYTES = 4
"""What an entry takes beside its route update."""

BACKENDS_MAX = 4096
"""As many as a node's registry holds."""

VECTOR_ENTRIES_MAX = 8192
"""Sessions of 1000 nodes and of their earlier runs; 128 KiB."""

BUCKETS = 4096
SUM_BYTES = 8
GROUPS = 64
"""Of buckets, for comparing them in two levels: 512 bytes for all groups, and as many for the buckets of one."""

GROUP_BYTES = SUM_BYTES * BUCKETS // GROUPS
COMMANDS_MAX = 64

ROW_BYTES = 34
"""What a claim takes in `Rows`, over all columns."""

PAIR = Struct("<QQ")
BACKEND = Struct("<QI")
LOAD = Struct("<QH")
WAIT = Struct("<HI")
FACT = Struct("<QIdBBI")
STAND = Struct("<QQIB")
COMMAND = Struct("<QdBHB32s")
VERDICT_MAX = 3
STANDING_MAX = 5
STANDINGS_MAX = 8192
"""Of one message: every engine's reader, and those that can't."""

HOLDINGS_HEAD_BYTES = 24
VERB_BYTES_MAX, URL_BYTES_MAX, COMMAND_NAME_BYTES_MAX, SIGNATURE_BYTES = 16, 512, 64, 32

Pairs = tuple[tuple[int, int], ...]


def pack_entries(entries: tuple[Entry, ...]) -> bytes:
    """2 count | 2 age of each | 2 length of each | the route updates."""
    count = len(entries)
    if count > ENTRIES_MAX:
        raise ValueError("too many route updates for a batch")
    ages, route_updates = zip(*entries, strict=True) if entries else ((), ())
    lengths = list(map(len, route_updates))
    if entries and max(lengths) > ROUTE_UPDATE_BYTES_MAX:
        raise ValueError("a route update is too long")
    return pack(f"<H{2 * count}H", count, *ages, *lengths) + b"".join(route_updates)


def unpack_entries(field: object) -> tuple[Entry, ...]:
    if type(field) is not bytes or len(field) < 2:
        bad("route_updates")
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


def pack_vector(pairs: Pairs) -> bytes:
    return _pack_rows(PAIR, pairs, VECTOR_ENTRIES_MAX)


def unpack_vector(field: object) -> Pairs:
    return tuple(PAIR.iter_unpack(column(field, PAIR.size, VECTOR_ENTRIES_MAX)))


def pack_backends(pairs: Pairs) -> bytes:
    return _pack_rows(BACKEND, pairs, BACKENDS_MAX)


def unpack_backends(field: object) -> Pairs:
    return tuple(BACKEND.iter_unpack(column(field, BACKEND.size, BACKENDS_MAX)))


def pack_loads(pairs: Pairs) -> bytes:
    return _pack_rows(LOAD, pairs, BACKENDS_MAX)


def unpack_loads(field: object) -> Pairs:
    return tuple(LOAD.iter_unpack(column(field, LOAD.size, BACKENDS_MAX)))


def pack_waits(pairs: Pairs) -> bytes:
    return _pack_rows(WAIT, pairs, BACKENDS_MAX)


def unpack_waits(field: object) -> Pairs:
    return tuple(WAIT.iter_unpack(column(field, WAIT.size, BACKENDS_MAX)))


def _pack_rows(row: Struct, rows: Iterable[tuple[int, int]], rows_max: int) -> bytes:
    packed = [row.pack(*values) for values in rows]
    if len(packed) > rows_max:
        raise ValueError("too many rows")
    return b"".join(packed)


def pack_facts(facts: tuple[Fact, ...]) -> bytes:
    if len(facts) > BACKENDS_MAX:
        raise ValueError("too many facts")
    return b"".join([FACT.pack(*fact) for fact in facts])


def unpack_facts(field: object) -> tuple[Fact, ...]:
    facts = []
    for backend, generation, started_at, verdict, draining, clock in FACT.iter_unpack(
        column(field, FACT.size, BACKENDS_MAX)
    ):
        if verdict > VERDICT_MAX or draining > 1:
            bad("fact")
        facts.append(Fact(backend, generation, amount(started_at), verdict, draining == 1, clock))
    return tuple(facts)


def pack_standings(standings: tuple[Stand, ...]) -> bytes:
    if len(standings) > STANDINGS_MAX:
        raise ValueError("too many standings")
    return b"".join([STAND.pack(*stand) for stand in standings])


def unpack_standings(field: object) -> tuple[Stand, ...]:
    standings = tuple(map(Stand._make, STAND.iter_unpack(column(field, STAND.size, STANDINGS_MAX))))
    if any(stand.standing > STANDING_MAX or not stand.member for stand in standings):
        bad("standing")
    return standings


def unpack_holdings_head(field: object) -> bytes:
    if type(field) is not bytes or len(field) != HOLDINGS_HEAD_BYTES:
        bad("head of a copy")
    return field


def pack_commands(commands: tuple[Command, ...]) -> bytes:
    """Each: 8 clock | 8 weight | 1 length of verb | 2 of url | 1 of name | 32 signature | verb | url | name."""
    if len(commands) > COMMANDS_MAX:
        raise ValueError("too many commands")
    return b"".join(map(_pack_command, commands))


def _pack_command(command: Command) -> bytes:
    verb, url = encoded(command.verb, VERB_BYTES_MAX), encoded(command.url, URL_BYTES_MAX)
    name = encoded(command.name, COMMAND_NAME_BYTES_MAX)
    if len(command.signature) != SIGNATURE_BYTES:
        raise ValueError("a signature has 32 bytes")
    head = COMMAND.pack(command.clock, command.weight, len(verb), len(url), len(name), command.signature)
    return head + verb + url + name


def unpack_commands(field: object) -> tuple[Command, ...]:
    if type(field) is not bytes:
        bad("commands")
    commands: list[Command] = []
    at = 0
    while at < len(field):
        if len(commands) == COMMANDS_MAX:
            bad("too many commands")
        try:
            clock, weight, verb_bytes, url_bytes, name_bytes, signature = COMMAND.unpack_from(field, at)
        except error:
            bad("command cut off")
        url_at = at + COMMAND.size + verb_bytes
        name_at = url_at + url_bytes
        end = name_at + name_bytes
        if end > len(field):
            bad("command cut off")
        verb = text(field[at + COMMAND.size : url_at], VERB_BYTES_MAX)
        url = text(field[url_at:name_at], URL_BYTES_MAX)
        name = text(field[name_at:end], COMMAND_NAME_BYTES_MAX)
        commands.append(Command(clock, verb, url, amount(weight), name, signature))
        at = end
    return tuple(commands)


def unpack_sums(field: object) -> bytes:
    sums = column(field, SUM_BYTES, BUCKETS)
    if len(sums) != SUM_BYTES * BUCKETS:
        bad("number of buckets")
    return sums


def unpack_group_sums(field: object) -> bytes:
    """The sums of all groups, or nothing."""
    sums = column(field, SUM_BYTES, GROUPS)
    if sums and len(sums) != SUM_BYTES * GROUPS:
        bad("number of groups")
    return sums


def unpack_groups(field: object) -> bytes:
    """Numbers of groups, ascending. Raises BadFrame for one that does not exist."""
    groups = column(field, 1, GROUPS)
    if any(low >= high for low, high in pairwise(groups)) or (groups and groups[-1] >= GROUPS):
        bad("no such group")
    return groups


def check_part(part: PartSums) -> None:
    """Whether each group has all of its sums. Raises BadFrame."""
    if len(part.sums) != GROUP_BYTES * len(part.groups):
        bad("sums of other groups")


def unpack_buckets(field: object) -> bytes:
    """A column of bucket numbers. Raises BadFrame for one that does not exist."""
    buckets = column(field, 2, BUCKETS)
    if buckets and int(np.frombuffer(buckets, "<u2").max()) >= BUCKETS:
        bad("no such bucket")
    return buckets


def check_rows(rows: Rows) -> None:
    """Whether all columns have a value for each claim, and each claim one of the backends. Raises BadFrame."""
    count = len(rows.age_s) // 2
    widths = ((rows.parent, 8), (rows.tokens, 4), (rows.token, 8), (rows.text, 8), (rows.backend, 2), (rows.age_s, 2))
    if any(len(data) != width * count for data, width in widths):
        bad("columns of different length")
    if count and int(np.frombuffer(rows.backend, "<u2").max()) >= len(rows.backends):
        bad("no such backend")


def rows_column(field: object) -> bytes:
    """One of the columns of `Rows`: `check_rows` sees to its length, the frame to its bound."""
    return column(field, 1, 8 * U16_MAX)
