"""Route updates: what one node sends the others about routes, as bytes.

An update has rows, parents before children. Each means that one process of a backend holds one more prefix, below its
parent. Fingerprints are keyed, so an update shows nobody what a prompt contains.

    kinds u8 | backends u8 | for each backend: key u64, generation u8 | columns of the rows
    columns: parent u64 | tokens u32 | token u64, if TOKENS | text u64, if TEXTS | backend u8, if there are several

With PARENTS each row names its parent. Without it the update is a path: the first row names its parent, and each other
one hangs below the row before. A parent of 0 is the top, or not known. A *removal* has no kinds, one backend, and one
column of u64: fingerprints that this engine does not hold any more, nor what is longer. What is *owned* has the kinds
OWNED, one backend, and one column of u64: digests of what that process alone keeps. *Checkpoints* of hybrid models have
the kinds CHECKPOINTS, one backend, and three columns: fingerprint u64, position u32 in tokens, mark u8
(`routing.checkpoints.checkpoint_index`), where a mark without STATE takes a checkpoint back. Numbers are little-endian.

Rules: 1 … ROWS_MAX rows. A row has a depth and one fingerprint or two that differ, and is not its own parent. What
breaks a rule raises BadRouteUpdate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import eq
from struct import Struct, error, pack, unpack
from typing import NamedTuple

ROWS_MAX = 128
"""Rows of one update: more go as several."""

TOKENS, TEXTS, PARENTS = 1, 2, 4
OWNED = 8
CHECKPOINTS = 16
HEAD, BACKEND = Struct("<BB"), Struct("<QB")
FINGERPRINT_BYTES, DEPTH_BYTES = 8, 4
ROUTE_UPDATE_BYTES_MAX = HEAD.size + ROWS_MAX * (BACKEND.size + DEPTH_BYTES + 3 * FINGERPRINT_BYTES + 1)
REMOVED_MAX = (ROUTE_UPDATE_BYTES_MAX - HEAD.size - BACKEND.size) // FINGERPRINT_BYTES


MARK_BYTES = FINGERPRINT_BYTES + DEPTH_BYTES + 1
MARKS_MAX = (ROUTE_UPDATE_BYTES_MAX - HEAD.size - BACKEND.size) // MARK_BYTES

WIDTHS = tuple(
    (DEPTH_BYTES + FINGERPRINT_BYTES * kinds.bit_count(), 0 if kinds & PARENTS else FINGERPRINT_BYTES)
    if kinds
    else (FINGERPRINT_BYTES, 0)
    for kinds in range(2 * PARENTS)
)
"""By kinds: the bytes of a row but for its backend, and those before the columns."""


class BadRouteUpdate(ValueError):
    """These bytes, or these values, are no route update."""


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


class Removal(NamedTuple):
    """What an engine does not hold any more, by its own word."""

    backend: tuple[int, int]
    fingerprints: Sequence[int]


class Owned(NamedTuple):
    """Responses and sessions that one process keeps (`routing.owners`)."""

    backend: tuple[int, int]
    digests: Sequence[int]


class StateMarks(NamedTuple):
    """Checkpoints that one process keeps or has given up: prefix, position, mark."""

    backend: tuple[int, int]
    marks: Sequence[tuple[int, int, int]]


def encode_rows(rows: Sequence[UpdateRow]) -> bytes:
    """Raises BadRouteUpdate for what breaks a rule."""
    if not 0 < len(rows) <= ROWS_MAX:
        raise BadRouteUpdate(f"an update has 1 … {ROWS_MAX} rows, not {len(rows)}")
    check(rows)
    backend, parent, tokens, token, text = zip(*rows, strict=True)
    numbers = {each: number for number, each in enumerate(dict.fromkeys(backend))}
    kinds = TOKENS * any(token) | TEXTS * any(text)
    if len(numbers) > 1 or any(below.parent != (above.token or above.text) for above, below in pairwise(rows)):
        kinds |= PARENTS
    columns = [*(parent if kinds & PARENTS else parent[:1]), *tokens]
    columns += token if kinds & TOKENS else ()
    columns += text if kinds & TEXTS else ()
    columns += map(numbers.__getitem__, backend) if len(numbers) > 1 else ()
    try:
        head = HEAD.pack(kinds, len(numbers)) + b"".join([BACKEND.pack(*each) for each in numbers])
        return head + pack(layout(kinds, len(numbers), len(rows)), *columns)
    except error as problem:
        raise BadRouteUpdate(str(problem)) from problem


def decode_rows(data: bytes) -> Sequence[UpdateRow]:
    """Raises BadRouteUpdate for what breaks a rule."""
    backends, backend, *columns = decode_columns(data)
    return list(map(UpdateRow, map(backends.__getitem__, backend), *columns))


def decode_columns(data: bytes) -> UpdateColumns:
    """The same in columns. Raises BadRouteUpdate."""
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
    columns = UpdateColumns(backends, backend, parent, tokens, token, text)
    check_columns(columns)
    return columns


def check_columns(columns: UpdateColumns) -> None:
    """Whether its rows may stand in an update. Raises BadRouteUpdate."""
    backends, backend, parent, tokens, token, text = columns
    if max(backend) >= len(backends) or any(not key for key, _ in backends):
        raise BadRouteUpdate("a row without a backend")
    if not all(tokens) or any(map(eq, token, text)):  # two names of 0 are equal, too
        raise BadRouteUpdate("a row without a depth, or a name of its own")
    if any(map(eq, parent, token)) or any(map(eq, parent, text)):  # perhaps but two zeros
        check(map(UpdateRow, map(backends.__getitem__, backend), parent, tokens, token, text))


def check(rows: Iterable[UpdateRow]) -> None:
    for (key, _), parent, tokens, token, text in rows:
        if not (key and tokens and (token or text)) or token == text or (parent and parent in (token, text)):
            raise BadRouteUpdate("a row without a backend, a name, a place or a depth")


def row_count(data: bytes) -> int:
    """How many rows an update has, or fingerprints a removal: for limits. At least 1, whatever the bytes."""
    kinds, backends_count = data[:2] if len(data) > 1 else (0, 0)
    width, first = WIDTHS[kinds & 7]
    rows = (len(data) - HEAD.size - BACKEND.size * backends_count - first) // (width + (backends_count > 1))
    return rows if rows > 0 else 1


def layout(kinds: int, backends: int, rows: int) -> str:
    """Of the columns."""
    names = rows * (kinds & (TOKENS | TEXTS)).bit_count()
    return f"<{rows if kinds & PARENTS else 1}Q{rows}I{names}Q{rows if backends > 1 else 0}B"


def is_removal(data: bytes) -> bool:
    return data[:1] == b"\0"


def is_owned(data: bytes) -> bool:
    return data[:1] == bytes((OWNED,))


def encode_removal(removal: Removal) -> bytes:
    """Raises BadRouteUpdate for what breaks a rule."""
    return encode_names(0, *removal)


def encode_owned(owned: Owned) -> bytes:
    """The same."""
    return encode_names(OWNED, *owned)


def decode_removal(data: bytes) -> Removal:
    """Raises BadRouteUpdate for bytes that `encode_removal` does not make."""
    return Removal(*decode_names(0, data))


def decode_owned(data: bytes) -> Owned:
    """The same."""
    return Owned(*decode_names(OWNED, data))


def is_marks(data: bytes) -> bool:
    return data[:1] == bytes((CHECKPOINTS,))


def encode_marks(sent: StateMarks) -> bytes:
    """Raises BadRouteUpdate for what breaks a rule."""
    backend, marks = sent
    count = len(marks)
    if not backend[0] or not 0 < count <= MARKS_MAX or not all(name and position for name, position, _ in marks):
        raise BadRouteUpdate(f"an update of this kind names a backend and 1 … {MARKS_MAX} checkpoints, not {count}")
    names, positions, bits = zip(*marks, strict=True)
    try:
        columns = pack(f"<{count}Q{count}I{count}B", *names, *positions, *bits)
    except error as problem:
        raise BadRouteUpdate(str(problem)) from problem
    return HEAD.pack(CHECKPOINTS, 1) + BACKEND.pack(*backend) + columns


def decode_marks(data: bytes) -> StateMarks:
    """Raises BadRouteUpdate for bytes that `encode_marks` does not make."""
    start = HEAD.size + BACKEND.size
    count, left = divmod(len(data) - start, MARK_BYTES)
    if data[: HEAD.size] != HEAD.pack(CHECKPOINTS, 1) or left or not 0 < count <= MARKS_MAX:
        raise BadRouteUpdate(f"{len(data)} bytes are no checkpoints")
    backend, numbers = BACKEND.unpack_from(data, HEAD.size), unpack(f"<{count}Q{count}I{count}B", data[start:])
    if not backend[0] or not all(numbers[: 2 * count]):
        raise BadRouteUpdate("a checkpoint of nobody, of no prefix or at no position")
    columns = (numbers[:count], numbers[count : 2 * count], numbers[2 * count :])
    return StateMarks((backend[0], backend[1]), list(zip(*columns, strict=True)))


def encode_names(kinds: int, backend: tuple[int, int], names: Sequence[int]) -> bytes:
    """What one process does not hold, or keeps. Raises BadRouteUpdate."""
    if not backend[0] or not 0 < len(names) <= REMOVED_MAX or not all(names):
        raise BadRouteUpdate(f"an update of this kind names a backend and 1 … {REMOVED_MAX} numbers, not {len(names)}")
    return HEAD.pack(kinds, 1) + BACKEND.pack(*backend) + pack(f"<{len(names)}Q", *names)


def decode_names(kinds: int, data: bytes) -> tuple[tuple[int, int], Sequence[int]]:
    """Raises BadRouteUpdate for bytes that `encode_names` does not make."""
    start = HEAD.size + BACKEND.size
    count, left = divmod(len(data) - start, FINGERPRINT_BYTES)
    if data[: HEAD.size] != HEAD.pack(kinds, 1) or left or not 0 < count <= REMOVED_MAX:
        raise BadRouteUpdate(f"{len(data)} bytes are no update of kind {kinds}")
    backend, names = BACKEND.unpack_from(data, HEAD.size), unpack(f"<{count}Q", data[start:])
    if not backend[0] or not all(names):
        raise BadRouteUpdate("an update of nothing")
    return (backend[0], backend[1]), names
