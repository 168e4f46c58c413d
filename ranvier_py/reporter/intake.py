"""From what an engine's threads (or its event stream) said to the book of what it holds.

Rules: calls are taken in their order. What makes no sense is counted and passed over: nothing is raised at an engine.
Cost: 2 us for a given hash, 20 us for a block with tokens; a turn takes TURN_CALLS at most.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ranvier_py.core.engine_cache.sources.event_values import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineHash,
    Event,
)
from ranvier_py.core.engine_cache.sources.push_book import BlockSource, Book
from ranvier_py.core.engine_cache.sources.push_table import Entry
from ranvier_py.reporter.ranks import is_of

TURN_CALLS = 20_000
"""Calls taken in before what they changed is sent: a cache's worth of removals at once."""

HEX_DIGITS = 64


class Stored(NamedTuple):
    block: str | EngineHash
    token_ids: Sequence[int] = ()
    parent: EngineHash | None = None
    salt: str | None = None
    adapter: str | None = None


class Freed(NamedTuple):
    block: str | EngineHash


class Cleared(NamedTuple):
    """Nothing is held any more; by this rank, where there are several."""

    rank: int | None = None


class Heard(NamedTuple):
    """Events of a stream."""

    events: Sequence[Event]


Call = Stored | Freed | Cleared | Heard


class Intake:
    """Takes calls from a deque that other threads fill.

    Args:
        dropped: how many calls found no room since it was last asked.
        scan: all given hashes that are held.
    """

    def __init__(
        self,
        waiting: deque[Call],
        dropped: Callable[[], int] = lambda: 0,
        scan: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        self.waiting = waiting
        self.scan = scan
        self.odd = 0  # calls that made no sense
        self.scans_failed = 0
        self._dropped = dropped

    def take(self, book: Book, source: BlockSource | None) -> bool:
        """Bring the book up to date; without a source the hashes are given ones. Returns whether that was all."""
        if self._dropped():
            self._one(Cleared(), book, source)
        left = TURN_CALLS
        while self.waiting and left:
            left -= 1
            try:
                self._one(self.waiting.popleft(), book, source)
            except (TypeError, ValueError, OverflowError):
                self.odd += 1
        return source.settle() and not self.waiting if source is not None else not self.waiting

    def look(self, book: Book) -> None:
        """Compare the book with what a scan of the engine says."""
        if self.scan is None:
            return
        try:
            book.only([Entry(given_key(name)) for name in self.scan()])
        except Exception:  # the engine's own code: whatever it raises costs this look
            self.scans_failed += 1

    def _one(self, call: Call, book: Book, source: BlockSource | None) -> None:
        if isinstance(call, Heard):
            for event in call.events if source is not None else ():
                assert source is not None
                source.apply(event)
        elif isinstance(call, Cleared) and call.rank is not None and source is not None:
            source.lose(partial(is_of, rank=call.rank))
        elif source is not None:
            source.apply(event_of(call))
        elif isinstance(call, Stored):
            book.hold(Entry(given_key(call.block)))
        elif isinstance(call, Freed):
            book.lose(given_key(call.block))
        else:
            book.only(())


def given_key(name: str | EngineHash) -> int:
    """A prefix hash of the report, as text. Raises ValueError, TypeError."""
    if not isinstance(name, str) or len(name) != HEX_DIGITS:
        raise ValueError("a given hash is 64 hexadecimal digits")
    return int(name, 16)


def event_of(call: Stored | Freed | Cleared) -> Event:
    """The same as an event of a stream has it."""
    if isinstance(call, Cleared):
        return CacheCleared()
    if isinstance(call, Freed):
        return BlocksRemoved((engine_hash(call.block),))
    data = array("I", call.token_ids).tobytes()
    return BlocksStored(
        hashes=(engine_hash(call.block),),
        parent=None if call.parent is None else engine_hash(call.parent),
        token_bytes=data,
        block_tokens=len(call.token_ids),
        lora_name=call.adapter,
        salt=call.salt,
    )


def engine_hash(name: object) -> EngineHash:
    if isinstance(name, bytes):
        return name
    if isinstance(name, int):
        return name % (1 << 64)
    raise TypeError("an engine's hash is a number or bytes")
