"""Route updates: what one node sends the others about routes, as bytes, alone and in batches.

    kinds u8 | backends u8 | for each backend: key u64, generation u8 | columns of the rows, or of one process
    columns of rows: parent u64 | tokens u32 | token u64, if TOKENS | text u64, if TEXTS | backend u8, if several
Rule: each row, parents before children, means that one process of a backend holds one more prefix, below its parent
(0: the top, or not known). Without PARENTS the update is a path: the first row names its parent, each other row hangs
below the row before. Numbers are little-endian, ages in seconds when encoded. Bound: 1 … ROWS_MAX rows; else
BadRouteUpdate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import eq
from struct import Struct, calcsize, error, pack, unpack
from types import MappingProxyType
from typing import NamedTuple

from ranvier_py.core.mesh.wire.columns import Field
from ranvier_py.core.mesh.wire.frame import bad

ROWS_MAX = 128
"""Rows of one update: more are sent as several updates."""

TOKENS, TEXTS, PARENTS = 1, 2, 4
REMOVED, OWNED, CHECKPOINTS = 0, 8, 16
HEAD, BACKEND = Struct("<BB"), Struct("<QB")
FINGERPRINT_BYTES, DEPTH_BYTES = 8, 4
ROUTE_UPDATE_BYTES_MAX = HEAD.size + ROWS_MAX * (BACKEND.size + DEPTH_BYTES + 3 * FINGERPRINT_BYTES + 1)

COLUMNS_OF: Mapping[int, tuple[str, int]] = MappingProxyType(
    {REMOVED: ("Q", 1), OWNED: ("QI", 1), CHECKPOINTS: ("QIBI", 2)}
)
"""Columns of updates about one process, as codes of `struct`, and how many of the first columns never have a 0."""

UPDATES_MAX = 4096  # in a message
ENTRY_BYTES = 4  # what a route update takes in a message beside its own bytes

ENTRIES_MAX: Mapping[int, int] = MappingProxyType(
    {
        kind: (ROUTE_UPDATE_BYTES_MAX - HEAD.size - BACKEND.size) // calcsize(f"<{codes}")
        for kind, (codes, _) in COLUMNS_OF.items()
    }
)
"""Most entries of one update, by its kind."""

WIDTHS = tuple(
    (DEPTH_BYTES + FINGERPRINT_BYTES * kinds.bit_count(), 0 if kinds & PARENTS else FINGERPRINT_BYTES)
    if kinds
    else (FINGERPRINT_BYTES, 0)
    for kinds in range(2 * PARENTS)
)
"""By kinds (of rows and removals): bytes of a row without its backend, and bytes of the only parent of a path."""


class BadRouteUpdate(ValueError):
    """The bytes or values are no route update."""


class UpdateRow(NamedTuple):
    """One prefix that a backend holds."""

    backend: tuple[int, int]  # key u64, not 0; low 8 bits of the generation
    parent: int  # a fingerprint of the row above; 0 = none, or not known
    tokens: int
    token: int
    text: int


class UpdateColumns(NamedTuple):
    """The rows of an update, column by column."""

    backends: Sequence[tuple[int, int]]
    backend: Sequence[int]  # of each row: its place among the backends
    parent: Sequence[int]
    tokens: Sequence[int]
    token: Sequence[int]
    text: Sequence[int]


class ProcessUpdate(NamedTuple):
    """What one process of a backend dropped, keeps, or has checkpoints of, column by column (COLUMNS_OF).

    REMOVED      fingerprint u64: the engine has dropped this prefix, and all longer ones
    OWNED        digest u64, age u32: a response or session that this process alone keeps (`routing.owners`)
    CHECKPOINTS  fingerprint u64, position u32 in tokens, mark u8, age u32: a checkpoint of a hybrid model; a mark
                 without STATE says that it is gone (`routing.checkpoints.checkpoint_index`)
    """

    kind: int
    backend: tuple[int, int]  # as in UpdateRow
    columns: Sequence[Sequence[int]]


def encode_rows(rows: Sequence[UpdateRow]) -> bytes:
    """Encode an update of rows. Raises BadRouteUpdate for rows that break a rule."""
    if not 0 < len(rows) <= ROWS_MAX:
        raise BadRouteUpdate(f"an update has 1 … {ROWS_MAX} rows, not {len(rows)}")
    names, parent, tokens, token, text = zip(*rows, strict=True)
    numbers = {each: number for number, each in enumerate(dict.fromkeys(names))}
    backend = list(map(numbers.__getitem__, names))
    check_columns(
        UpdateColumns(backends=list(numbers), backend=backend, parent=parent, tokens=tokens, token=token, text=text)
    )
    kinds = TOKENS * any(token) | TEXTS * any(text)
    if len(numbers) > 1 or any(below.parent != (above.token or above.text) for above, below in pairwise(rows)):
        kinds |= PARENTS
    columns = [*(parent if kinds & PARENTS else parent[:1]), *tokens]
    columns += token if kinds & TOKENS else ()
    columns += text if kinds & TEXTS else ()
    columns += backend if len(numbers) > 1 else ()
    try:
        head = HEAD.pack(kinds, len(numbers)) + b"".join([BACKEND.pack(*each) for each in numbers])
        return head + pack(layout(kinds, len(numbers), len(rows)), *columns)
    except error as problem:
        raise BadRouteUpdate(str(problem)) from problem


def decode_rows(data: bytes) -> Sequence[UpdateRow]:
    """Decode an update of rows. Raises BadRouteUpdate for bytes that break a rule."""
    backends, backend, *columns = decode_columns(data)
    return list(map(UpdateRow, map(backends.__getitem__, backend), *columns))


def decode_columns(data: bytes) -> UpdateColumns:
    """Decode an update of rows into columns. Raises BadRouteUpdate for bytes that break a rule."""
    count = row_count(data)
    try:
        kinds, backends_count = data[0], data[1]
        at = HEAD.size + backends_count * BACKEND.size
        if not backends_count or count > ROWS_MAX or not 0 < kinds & (TOKENS | TEXTS) <= kinds < 2 * PARENTS:
            raise BadRouteUpdate(f"{count} rows of kinds {kinds}")
        backends = tuple(BACKEND.iter_unpack(data[HEAD.size : at]))
        numbers = unpack(layout(kinds, backends_count, count), data[at:])
    except (error, IndexError) as problem:
        raise BadRouteUpdate("bytes that are no rows") from problem
    end = count if kinds & PARENTS else 1
    parent, tokens = numbers[:end], numbers[end : end + count]
    end += count
    token = text = (0,) * count
    if kinds & TOKENS:
        token, end = numbers[end : end + count], end + count
    if kinds & TEXTS:
        text, end = numbers[end : end + count], end + count
    backend = numbers[end:] if backends_count > 1 else (0,) * count
    if len(parent) < count:
        parent += tuple([own or other for own, other in zip(token[:-1], text[:-1], strict=True)])
    columns = UpdateColumns(backends=backends, backend=backend, parent=parent, tokens=tokens, token=token, text=text)
    check_columns(columns)
    return columns


def check_columns(columns: UpdateColumns) -> None:
    """Raise BadRouteUpdate for columns whose rows break a rule."""
    backends, backend, parent, tokens, token, text = columns
    if max(backend) >= len(backends) or any(not key for key, _ in backends):
        raise BadRouteUpdate("a row without a backend")
    if not all(tokens) or any(map(eq, token, text)):  # a row without a name has two equal ones, 0
        raise BadRouteUpdate("a row without a depth, or a name of its own")
    is_like_its_parent = any(map(eq, parent, token)) or any(map(eq, parent, text))  # perhaps only zeros are
    if is_like_its_parent and any(above and above in names for above, *names in zip(parent, token, text, strict=True)):
        raise BadRouteUpdate("a row that is its own parent")


def row_count(data: bytes) -> int:
    """Return how many rows an update or fingerprints a removal has, for limits. At least 1, whatever the bytes."""
    kinds, backends_count = data[:2] if len(data) > 1 else (0, 0)
    width, first = WIDTHS[kinds & 7]
    rows = (len(data) - HEAD.size - BACKEND.size * backends_count - first) // (width + (backends_count > 1))
    return rows if rows > 0 else 1


def layout(kinds: int, backends: int, rows: int) -> str:
    """Return the `struct` format of the columns of an update of rows."""
    names = rows * (kinds & (TOKENS | TEXTS)).bit_count()
    return f"<{rows if kinds & PARENTS else 1}Q{rows}I{names}Q{rows if backends > 1 else 0}B"


def kind_of(data: bytes) -> int | None:
    """Return REMOVED, OWNED or CHECKPOINTS; None if the bytes can only be rows."""
    return data[0] if data and data[0] in COLUMNS_OF else None


def encode_process(update: ProcessUpdate) -> bytes:
    """Raises BadRouteUpdate for what breaks a rule."""
    kind, backend, columns = update
    codes, never_zero = COLUMNS_OF[kind]
    count = len(columns[0])
    if not backend[0] or not 0 < count <= ENTRIES_MAX[kind] or not all(map(all, columns[:never_zero])):
        raise BadRouteUpdate(
            f"an update of kind {kind} names a backend and 1 … {ENTRIES_MAX[kind]} entries, not {count}"
        )
    try:
        body = b"".join([pack(f"<{count}{code}", *column) for code, column in zip(codes, columns, strict=True)])
        return HEAD.pack(kind, 1) + BACKEND.pack(*backend) + body
    except error as problem:
        raise BadRouteUpdate(str(problem)) from problem


def decode_process(data: bytes) -> ProcessUpdate:
    """Decode an update about one process. Raises BadRouteUpdate for bytes that `encode_process` does not make."""
    kind, start = kind_of(data), HEAD.size + BACKEND.size
    if kind is None:
        raise BadRouteUpdate("no update of one process")
    codes, never_zero = COLUMNS_OF[kind]
    count, left = divmod(len(data) - start, calcsize(f"<{codes}"))
    if data[1:2] != b"\1" or left or not 0 < count <= ENTRIES_MAX[kind]:
        raise BadRouteUpdate(f"{len(data)} bytes are no update of kind {kind}")
    backend = BACKEND.unpack_from(data, HEAD.size)
    numbers = unpack("<" + "".join([f"{count}{code}" for code in codes]), data[start:])
    columns = [numbers[first : first + count] for first in range(0, len(numbers), count)]
    if not backend[0] or not all(map(all, columns[:never_zero])):
        raise BadRouteUpdate("an entry of nobody, without a name or a place")
    return ProcessUpdate(kind, (backend[0], backend[1]), columns)


class Entry(NamedTuple):
    """One route update in a batch. `age_s` is the age of its evidence when sent: durations travel, never times of
    day."""

    age_s: int  # u16, whole seconds, rounded up: nothing gets younger on its way
    route_update: bytes  # opaque to the log. Empty: it expired, only its number counts


def pack_entries(entries: tuple[Entry, ...]) -> bytes:
    """Bytes: 2 count | 2 age of each | 2 length of each | the route updates."""
    count = len(entries)
    if count > UPDATES_MAX:
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
    if count > UPDATES_MAX or len(field) < at:
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
