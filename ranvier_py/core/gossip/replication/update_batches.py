"""Update batches: further turns of many chats as one route update, in columns. Under full load most of what is told.

    backend key u64 | boot u8 | 0x80 | 1 … ROWS_MAX: parent u64 of each | text u64 of each | depth u32 of each

Each row says that the backend holds one more stop, known by its text alone, below a row that is known by `parent`. The
second number of other route updates, with a parent and no stops, tells them apart.
They are numbered, told and repaired like all route updates of their origin. A row that is the parent of another comes
before it. Cost: 20 bytes a row, of which a route update alone takes 33; 0.1 us a row, either way.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ranvier_py.core.gossip.replication.route_updates import (
    HAS_PARENT,
    ROUTE_UPDATE_BYTES_MAX,
    TOKENS_MAX,
    BadRouteUpdate,
)

HEAD = Struct("<QBB")
COUNT_AT = 9
ROW_BYTES = 20
ROWS_MAX = (ROUTE_UPDATE_BYTES_MAX - HEAD.size) // ROW_BYTES


class UpdateBatch(NamedTuple):
    backend_key: int  # u64, not 0
    boot: int  # low 8 bits of the backend's boot
    parents: npt.NDArray[np.uint64]  # not 0
    texts: npt.NDArray[np.uint64]  # not 0, and not the parent
    tokens: npt.NDArray[np.uint32]  # 1 … TOKENS_MAX


def is_batch(data: bytes) -> bool:
    """Whether a route update is one of these."""
    return len(data) > HEAD.size and data[COUNT_AT] == HAS_PARENT


def rows_of(data: bytes) -> int:
    """How many things a route update tells: for limits."""
    return (len(data) - HEAD.size) // ROW_BYTES or 1 if is_batch(data) else 1


def encode_batch(
    key: int, boot: int, parents: npt.NDArray[np.uint64], texts: npt.NDArray[np.uint64], tokens: npt.NDArray[np.uint32]
) -> bytes:
    """Of columns of one length. Raises BadLesson for a number of rows, or a key, that a update batch has no place
    for."""
    count = len(texts)
    if not key or not 0 < count <= ROWS_MAX:
        raise BadRouteUpdate(f"a sheaf names a backend and 1 … {ROWS_MAX} rows, not {count}")
    columns = (parents.astype("<u8"), texts.astype("<u8"), tokens.astype("<u4"))
    return HEAD.pack(key, boot, HAS_PARENT) + b"".join(column.tobytes() for column in columns)


def decode_batch(data: bytes) -> UpdateBatch:
    """Raises BadLesson for bytes that `encode_batch` does not make of sound rows."""
    count, over = divmod(len(data) - HEAD.size, ROW_BYTES)
    if over or not 0 < count <= ROWS_MAX:
        raise BadRouteUpdate(f"{len(data)} bytes are no sheaf")
    key, boot, mark = HEAD.unpack_from(data)
    names = np.frombuffer(data, "<u8", 2 * count, HEAD.size)
    tokens = np.frombuffer(data, "<u4", count, HEAD.size + 16 * count)
    parents, texts = names[:count], names[count:]
    sound = names.all() and tokens.all() and int(tokens.max()) <= TOKENS_MAX and bool((parents != texts).all())
    if not (sound and key and mark == HAS_PARENT):
        raise BadRouteUpdate("a row without a name, a place or a depth")
    return UpdateBatch(key, boot, parents, texts, tokens)
