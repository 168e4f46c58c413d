"""What a reporter knows of its engine: the hashes that it holds now, and which of them changed since they were told.

Hashes come as they are (the engine computes the report's prefix hashes itself), or from the events of an engine's
blocks, whose tokens are hashed here: into prefix hashes, or into a node's own fingerprints once its scheme is known.
The tokens of what is held are kept, because a node that was restarted may have another key: then all is hashed again.

Invariant: the table equals what the source holds, as far as `settle` has come.
Bounds: blocks kept; of what is beyond nothing is known after a change of scheme, and it is counted. Cost: that of
`Residency`, and 2 us and some 500 bytes for a block that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ranvier_py.core.engine_cache.prefixes import Change
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.residency_values import Lack, Scope
from ranvier_py.core.engine_cache.sources.event_values import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineHash,
    Event,
    Tier,
)
from ranvier_py.core.engine_cache.sources.push_keys import KeyedPrefix, KeyHasher
from ranvier_py.core.engine_cache.sources.push_messages import FINGERPRINT, PREFIX_HASH
from ranvier_py.core.engine_cache.sources.push_table import Entry, HashTable, tier_in, tokens_in
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher
from ranvier_py.core.prompts.namespaces import TokenNamespaces

BLOCKS_KEPT_MAX = 500_000
"""8 million tokens: the cache of a large engine."""

SOLITARY_KEY = b"a reporter's own, never told to anybody"
"""Fingerprints that only lead to prefix hashes need no secret."""


class Book:
    """Hashes held now. `take_changed` has those that came or went since it was last called."""

    def __init__(self) -> None:
        self.table = HashTable()
        self._parents: dict[int, int] = {}
        self._changed: dict[int, None] = {}

    def hold(self, entry: Entry) -> None:
        if self.table.put(entry.key, entry.packed) != entry.packed:
            self._changed[entry.key] = None
        if entry.parent:
            self._parents[entry.key] = entry.parent

    def lose(self, key: int) -> None:
        """Not held any more. Also told if it never was: the router may believe so."""
        self.table.pop(key)
        self._parents.pop(key, None)
        self._changed[key] = None

    def only(self, entries: Iterable[Entry]) -> None:
        """Exactly these are held."""
        wanted = {entry.key: entry for entry in entries}
        for key in [key for key in self.table if key not in wanted]:
            self.lose(key)
        for entry in wanted.values():
            self.hold(entry)

    def entry(self, key: int) -> Entry | None:
        packed = self.table.get(key)
        if packed is None:
            return None
        return Entry(key, tokens_in(packed), tier_in(packed), self._parents.get(key, 0))

    def take_changed(self) -> list[int]:
        changed, self._changed = list(self._changed), {}
        return changed


class BlockScheme(NamedTuple):
    """How the tokens of blocks become hashes. Without a `key` they become prefix hashes of `prefix_tokens`."""

    model: str  # base model, as clients name it
    prefix_tokens: int = 64
    key: bytes = b""
    identity: str = ""
    mark: str = ""
    block_tokens: int = 16

    @property
    def name(self) -> str:
        return FINGERPRINT + self.mark if self.key else PREFIX_HASH


class _Kept:
    """One block that the engine holds, as it was told of."""

    __slots__ = ("copies", "stored")

    def __init__(self, stored: BlocksStored) -> None:
        self.stored = stored
        self.copies: dict[str | None, int] = {}  # by medium


class BlockSource:
    """Events of blocks -> a Book. `settle` after events."""

    def __init__(
        self, book: Book, scheme: BlockScheme, *, kept_max: int = BLOCKS_KEPT_MAX, tells_again: bool = False
    ) -> None:
        """`tells_again`: events may tell of blocks that a request reuses as if they were stored, as in Residency."""
        self._tells_again = tells_again
        self._book = book
        self._kept: dict[EngineHash, _Kept] = {}
        self._kept_max = kept_max
        self.not_kept = 0
        self._links: dict[Fingerprint, int] = {}  # to the prefix hash, where that is the scheme
        self.scheme = scheme
        self.residency = self._made()

    @property
    def lacks(self) -> bool:
        """Whether less is known of what is held than was told."""
        return self.residency.lack is not Lack.NOTHING

    def apply(self, event: Event) -> None:
        if self._tells_again and isinstance(event, BlocksStored) and self.residency.is_repeated(event):
            event = event._replace(reused=True)
        self._keep(event)
        self.residency.apply(event)

    def lose(self, is_lost: Callable[[EngineHash], bool]) -> None:
        """Of these names nothing is held any more. Where not all blocks were kept, all of all names: who knows."""
        if self.not_kept:
            self.apply(CacheCleared())
            return
        for key in [key for key in self._kept if is_lost(key)]:
            for medium, copies in list(self._kept[key].copies.items()):
                for _ in range(copies):
                    self.apply(BlocksRemoved((key,), medium, self._kept[key].stored.group))

    def settle(self) -> bool:
        """Bring the book up to date, as far as one call goes. Returns whether that was all."""
        changes = self.residency.settle()
        if changes.cleared:
            self._book.only(())
            self._links.clear()
        for change in changes.changes:
            self._take(change)
        return changes.complete

    def use(self, scheme: BlockScheme) -> None:
        """Hash all that is held again, by another scheme. O(all): a second for 100,000 blocks."""
        self.scheme = scheme
        self._book.only(())
        self._book.take_changed()
        self._links.clear()
        self.residency = self._made()
        for kept in list(self._kept.values()):
            for medium, copies in kept.copies.items():
                for _ in range(copies):
                    self.residency.apply(kept.stored._replace(medium=medium))

    def _take(self, change: Change) -> None:
        fingerprint, tokens, tier, parent = change
        if not self.scheme.key:
            key = self._links.get(fingerprint)
            if key is None:
                return
            fingerprint, tokens, parent = Fingerprint(key), 0, Fingerprint(0)
        if tier is Tier.ABSENT:
            self._book.lose(fingerprint)
        else:
            self._book.hold(Entry(fingerprint, tokens, tier, parent))

    def _made(self) -> Residency:
        scheme = self.scheme
        if scheme.key:
            self._namespaces = TokenNamespaces(TextHasher(scheme.key), scheme.identity)
            hasher = TokenHasher(scheme.key, scheme.block_tokens)
            return Residency(hasher, self._namespace_of)
        lengths = (scheme.prefix_tokens,)
        keyed = KeyHasher(SOLITARY_KEY, scheme.block_tokens, told=self._link, lengths=lengths, shorter=False)
        return Residency(keyed, self._unsalted)

    def _link(self, found: KeyedPrefix) -> None:
        self._links[found.fingerprint] = found.key

    def _namespace_of(self, scope: Scope) -> Fingerprint | None:
        return self._namespaces.of(self.scheme.model, scope.lora_name or "", scope.salt or "")

    def _unsalted(self, scope: Scope) -> Fingerprint | None:
        """The report's key knows neither adapters nor salts: what has one is not told of."""
        return Fingerprint(1) if scope.lora_name is None and scope.salt is None else None

    # What is held, to be hashed again

    def _keep(self, event: Event) -> None:
        if isinstance(event, CacheCleared):
            self._kept.clear()
            self.not_kept = 0
        elif isinstance(event, BlocksStored):
            for key, stored in zip(event.hashes, singly(event), strict=True):
                kept = self._kept.get(key)
                if kept is None:
                    if len(self._kept) >= self._kept_max:
                        self.not_kept += 1
                        continue
                    kept = self._kept[key] = _Kept(stored)
                if not (event.reused and kept.copies.get(event.medium)):
                    kept.copies[event.medium] = kept.copies.get(event.medium, 0) + 1
        else:
            for key in event.hashes:
                self._let_go(key, event)

    def _let_go(self, key: EngineHash, event: BlocksRemoved) -> None:
        kept = self._kept.get(key)
        if kept is None or event.medium not in kept.copies:
            return
        kept.copies[event.medium] -= 1
        if not kept.copies[event.medium]:
            del kept.copies[event.medium]
        if not kept.copies:
            del self._kept[key]


def singly(event: BlocksStored) -> Iterable[BlocksStored]:
    """A run of blocks as one event for each."""
    width = 4 * event.block_tokens if event.token_bytes else 0
    parent = event.parent
    for place, key in enumerate(event.hashes):
        yield event._replace(
            hashes=(key,),
            parent=parent,
            token_bytes=event.token_bytes[place * width : (place + 1) * width],
            extra_keys=event.extra_keys[place : place + 1],
        )
        parent = key
