"""Writes what one engine holds as columns of bytes for a peer, and reads them there, without token ids or salts.

Rule: each block travels as the engine's name of it, its parent, its copies by tier, and the keyed sum from which
hashing continues; where it ends inside one of ours, the sum of the remaining tokens travels under a pad
(`TokenHasher.veiled`). A root travels as its sum, recognised when an event names that adapter and salt. Blocks that
hang from no root are left out and counted; at EXACT none of those matter. What breaks the format raises BadSnapshot,
and nothing of it is taken.
Bounds: those of the residency, and the reader's `entries_max`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from ranvier_py.core.engine_cache.blocks import COPIES_BITS, Block, BlockIndex, KnownBlock, Print, root
from ranvier_py.core.engine_cache.prefixes import HeldPrefixes
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.residency_values import ROOTS_MAX, SnapshotState
from ranvier_py.core.engine_cache.sources.event_values import HASH_BYTES_MAX, HELD_TIERS, EngineHash, Tier
from ranvier_py.core.errors import RanvierError
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import TokenHasher, TokenState, is_anchor

Item = TypeVar("Item")

CHUNK_BLOCKS = 256
"""Blocks in one chunk: 6 kB."""

CHUNK_EXTRAS = 8192
"""Extras in one chunk, but for those of its last block: 64 kB. A frame has room for them, whatever the engine's blocks
are: one of 65,535 tokens has 4096 fingerprints inside it."""

BLOCK_EXTRAS_MAX = 4096 + 2  # of one block: fingerprints inside it, its copies, its veil

ROOT, READY, OPAQUE = range(3)
WIDE = 255
"""Value in the column of copies: the number is among the extras. Smaller values count copies at the GPU tier."""

NUMBER_BYTES = 8  # of a name that is a number
WIDTHS_END = 1 << 16
DEPTH_MAX = 2**32 - 1
COPIES_END = 1 << (COPIES_BITS * len(HELD_TIERS))


class BadSnapshot(RanvierError):
    """These columns are no valid copy of what an engine holds."""

    code = "bad_snapshot"


class BlockRows(NamedTuple):
    """One chunk. Each column but `names` and `extras` has one element for each block or root."""

    group: int  # number of the cache group that counts, + 1; 0 = none yet
    block_tokens: int
    names: bytes  # length and bytes of each engine name; length 0: a number of 8 bytes
    kinds: bytes  # u8
    above: bytes  # u32: place of its parent, over all chunks; 0 is the root of blocks without a fingerprint
    widths: bytes  # u16, tokens; 0 for a root or an opaque block
    totals: bytes  # u64
    copies: bytes  # u8
    extras: bytes  # u64: of each block in turn its copies if WIDE, its veil, the fingerprints inside it


class Snapshot(NamedTuple):
    """A whole snapshot, with number and digest of the message of the engine's stream after which it was taken."""

    seq: int
    digest: int
    state: SnapshotState


class SnapshotWriter:
    """Writes a residency, which stays frozen meanwhile, as chunks, as of message `seq`. Call `step` until it is `done`,
    or `broken`: then there is no snapshot this time."""

    def __init__(self, residency: Residency, hasher: TokenHasher, seq: int, digest: int) -> None:
        self.seq = seq
        self.digest = digest
        self.chunks: list[BlockRows] = []
        self.done = self.broken = False
        self.written = 0  # blocks
        self.left_out = 0  # blocks that hang from no root
        self._residency = residency
        self._hasher = hasher
        self._freeze = residency.freeze()
        nameless, roots, group = residency.parts()
        self._head = (0 if group is None else group + 1, residency.block_tokens)
        self._todo: list[tuple[Block, int]] = [(block, 0) for block in (*nameless.children(), *roots)]
        self._places = 1

    def step(self) -> None:
        """Write one chunk."""
        if self.done or self.broken:
            return
        if self._residency.frozen != self._freeze:
            self.stop()
            return
        rows, todo = RowsMade(), self._todo
        while todo and len(rows.kinds) < CHUNK_BLOCKS and len(rows.extras) < CHUNK_EXTRAS:
            block, above = todo.pop()
            if rows.write(self._hasher, block, above):
                self.written += block.parent is not None
                todo.extend([(child, self._places) for child in block.children()])
                self._places += 1
        self.chunks.append(rows.packed(*self._head))
        if not todo:
            self.done = True
            self.left_out = self._residency.view().blocks - self.written
            self._residency.thaw()

    def stop(self) -> None:
        """Give up the snapshot, because it is no longer wanted."""
        if self._residency.frozen == self._freeze:
            self._residency.thaw()
        self.broken = not self.done
        self._todo.clear()


class RowsMade:
    """The columns of one chunk while it is written."""

    def __init__(self) -> None:
        self.names = bytearray()
        self.kinds = bytearray()
        self.copies = bytearray()
        self.above: list[int] = []
        self.widths: list[int] = []
        self.totals: list[int] = []
        self.extras: list[int] = []

    def add(self, kind: int, above: int, width: int, total: int, copies: int) -> None:
        self.kinds.append(kind)
        self.above.append(above)
        self.widths.append(width)
        self.totals.append(total)
        self.copies.append(min(copies, WIDE))
        if copies >= WIDE:
            self.extras.append(copies)

    def write(self, hasher: TokenHasher, block: Block, above: int) -> bool:
        """Write a root, or a block below the place of its parent. False: it hangs from no root, nor do those below."""
        state, parent = block.state, block.parent
        if parent is None:
            self.add(ROOT, 0, 0, state.total if state is not None else 0, 0)
            return True
        if block.known is KnownBlock.READY and state is not None and parent.state is not None:
            width = state.tokens - parent.state.tokens
            if width >= WIDTHS_END:
                return False
            self.add(READY, above, width, state.total, block.copies)
            if state.rest:
                self.extras.append(hasher.veiled(state).veil ^ hasher.pad(pad_name(block.key, state.total)))
            self.extras.extend([each.fingerprint for each in block.prints[:-1]])
        elif block.known is KnownBlock.OPAQUE:
            self.add(OPAQUE, above, 0, 0, block.copies)
        else:
            return False
        self.names += written_name(block.key)
        return True

    def packed(self, group: int, block_tokens: int) -> BlockRows:
        return BlockRows(
            group=group,
            block_tokens=block_tokens,
            names=bytes(self.names),
            kinds=bytes(self.kinds),
            above=np.array(self.above, "<u4").tobytes(),
            widths=np.array(self.widths, "<u2").tobytes(),
            totals=np.array(self.totals, "<u8").tobytes(),
            copies=bytes(self.copies),
            extras=np.array(self.extras, "<u8").tobytes(),
        )


class SnapshotReader:
    """Builds the state that chunks describe, in their order, for `Residency.install`. It must not be used after
    BadSnapshot."""

    def __init__(self, hasher: TokenHasher, *, entries_max: int = 2_000_000) -> None:
        nameless = root(None)
        self._hasher = hasher
        self._entries_max = entries_max
        self._places: list[Block] = [nameless]
        self._state = SnapshotState(BlockIndex(), HeldPrefixes(), nameless, {})
        self._names: Iterator[EngineHash] = iter(())
        self._extras: Iterator[int] = iter(())

    def add(self, rows: BlockRows) -> None:
        """Add one chunk. Raises BadSnapshot."""
        each, self._extras = read_columns(rows)
        self._state.group = rows.group - 1 if rows.group else None
        self._state.block_tokens = rows.block_tokens
        self._names = names_in(rows.names)
        for kind, above, width, total, copies in each:
            self._read(kind, above, width, total, copies)
        if next(self._names, None) is not None or next(self._extras, None) is not None:
            raise BadSnapshot("something is left over")

    def finish(self) -> SnapshotState:
        """Return the state once all chunks were added, without the blocks that nobody holds or continues."""
        for block in reversed(self._places):  # children first: of those below the GPU they can make room first
            if not block.copies and block.child is None:
                self._state.index.release(block)
            else:
                self._state.index.moved(block)
        self._places = []
        return self._state

    def _read(self, kind: int, above: int, width: int, total: int, copies: int) -> None:
        if above >= len(self._places) or kind > OPAQUE:
            raise BadSnapshot("a block that hangs nowhere")
        if kind == ROOT:
            block = root(TokenState(0, total, ()))
            self._state.roots[total] = block
            if len(self._state.roots) > ROOTS_MAX:
                raise BadSnapshot("too many roots")
            self._places.append(block)
            return
        parent, index = self._places[above], self._state.index
        if copies == WIDE:
            copies = next_of(self._extras)
        key = next_of(self._names)
        if copies >= COPIES_END or key in index.blocks:
            raise BadSnapshot("a block twice, or held too often")
        block = index.add(key)
        block.attach(parent)
        block.copies = copies
        if kind == READY:
            self._ready(block, parent, width, total)
        index.settled(block, KnownBlock.READY if kind == READY else KnownBlock.OPAQUE)
        self._places.append(block)
        if index.weight > self._entries_max:
            raise BadSnapshot("more than there is room for")

    def _ready(self, block: Block, parent: Block, width: int, total: int) -> None:
        before, size, extras = parent.state, self._hasher.block_tokens, self._extras
        if before is None or not width or before.tokens + width > DEPTH_MAX:
            raise BadSnapshot("tokens after none that are known")
        tokens = before.tokens + width
        rest, veil = tokens % size, 0
        if rest:
            veil = next_of(extras) ^ self._hasher.pad(pad_name(block.key, total))
        block.state = state = TokenState(tokens, total, (0,) * rest, veil)
        depths = range((before.tokens // size + 1) * size, tokens + 1, size)
        block.prints = tuple(
            Print(self._hasher.fingerprint(state) if depth > tokens - size else Fingerprint(next_of(extras)), depth)
            for depth in depths
        )
        self._state.index.weigh(block, 1 - width // -size)
        block.reach = max(block.nearest, parent.reach)
        above = parent.anchor
        for fingerprint, depth in block.prints:
            if block.reach is not Tier.ABSENT:
                self._state.held.move(fingerprint, depth, above, Tier.ABSENT, block.reach)
            if is_anchor(depth // size):
                above = fingerprint
        block.anchor = above


def read_columns(rows: BlockRows) -> tuple[Iterator[tuple[int, int, int, int, int]], Iterator[int]]:
    """Return (kind, above, width, total, copies) of each block or root, and the extras. Raises BadSnapshot."""
    count = len(rows.kinds)
    if count > CHUNK_BLOCKS or len(rows.extras) > NUMBER_BYTES * (CHUNK_EXTRAS + BLOCK_EXTRAS_MAX):
        raise BadSnapshot("more in one chunk than is written into one")
    widths = ((rows.above, 4), (rows.widths, 2), (rows.totals, 8), (rows.copies, 1))
    if any(len(column) != width * count for column, width in widths) or len(rows.extras) % 8:
        raise BadSnapshot("columns of different length")
    columns = (
        np.frombuffer(rows.above, "<u4"),
        np.frombuffer(rows.widths, "<u2"),
        np.frombuffer(rows.totals, "<u8"),
    )
    each = zip(rows.kinds, *(column.tolist() for column in columns), rows.copies, strict=True)
    return each, iter(np.frombuffer(rows.extras, "<u8").tolist())


def next_of(column: Iterator[Item]) -> Item:
    """Return the next element. Raises BadSnapshot at the end of the column."""
    for found in column:
        return found
    raise BadSnapshot("it ends too early")


def names_in(data: bytes) -> Iterator[EngineHash]:
    """Yield the engine's block names from their column. Raises BadSnapshot if one is too long."""
    at = 0
    while at < len(data):
        length = data[at]
        start, at = at + 1, at + 1 + (length or NUMBER_BYTES)
        if length > HASH_BYTES_MAX or at > len(data):
            raise BadSnapshot("names")
        yield data[start:at] if length else int.from_bytes(data[start:at], "little")


def written_name(key: EngineHash) -> bytes:
    return bytes((len(key),)) + key if isinstance(key, bytes) else b"\0" + key.to_bytes(NUMBER_BYTES, "little")


def pad_name(key: EngineHash, total: int) -> bytes:
    """Return a name that no two veils share."""
    return total.to_bytes(8, "little") + (key if isinstance(key, bytes) else written_name(key))
