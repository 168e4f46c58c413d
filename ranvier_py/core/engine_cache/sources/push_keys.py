"""Computes the prefix hash of the Purdue report beside our own fingerprints, wherever prompts are hashed.

Rule: it is the SHA-256 of a prompt's first 64 token ids, written as a Python tuple (`prefix_hash`), and no fingerprint
shows it. So it is computed while tokens are hashed anyway (`KeyHasher`); `Links` turns reports about it into routes. A
hash of `length` tokens belongs to the deepest anchor up to that length. A shorter prompt has the hash of all its
tokens, of its last whole block, which never becomes the hash of a longer prompt. Bounds: HEADS_MAX beginnings of
HEAD_IDS_MAX tokens; without one the hash of what continues it stays unknown. `links_max` links: the oldest is
forgotten and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.boundaries import TokenIds
from ranvier_py.core.prompts.fingerprint import Segment, TokenHasher, TokenState, anchor_at

PREFIX_TOKENS = 64
"""The report's «smart default»."""

HEADS_MAX = 65_536
HEAD_IDS_MAX = HEADS_MAX * PREFIX_TOKENS
"""Token ids of all heads together, if each is as long as the longest length: there are fewer heads where a request has
named a longer one. 40 bytes each, if no two heads share any."""

LENGTHS_MAX = 8
"""Lengths that one node hashes: each needs one hash of every new prompt."""

LINKS_MAX = 262_144
FORGOTTEN_SHARE = 256  # of the oldest fingerprints, one in so many is forgotten at once


class KeyedPrefix(NamedTuple):
    """One prefix by both names. `root` is the running sum of the empty prefix, which identifies the namespace."""

    root: int
    key: int
    fingerprint: Fingerprint
    tokens: int  # depth of the fingerprint


class _Head(NamedTuple):
    """The beginning of a prompt that is still too short for its key."""

    root: int
    ids: tuple[int, ...]
    anchors: tuple[tuple[int, Fingerprint], ...]


def prefix_hash(token_ids: Sequence[int], length: int = 0) -> str:
    """Return the paper's key: SHA-256 in hex of the first `length` (0: all) token ids as Python writes their tuple."""
    kept = tuple(token_ids[:length] if length else token_ids)
    return sha256(str(kept).encode()).hexdigest()


def key_of(token_ids: Sequence[int], length: int = 0) -> int:
    """Return the report's prefix hash as a number. The ids must be Python's own integers."""
    return int(prefix_hash(token_ids, length), 16)


class KeyHasher(TokenHasher):
    """Hashes tokens as TokenHasher does, and calls `notify`, in any thread that hashes, with the prefix hashes of
    prompts seen from the start."""

    def __init__(
        self,
        key: bytes,
        block_tokens: int = 16,
        *,
        notify: Callable[[KeyedPrefix], object],
        lengths: Sequence[int] = (PREFIX_TOKENS,),
        short: int = 0,
    ) -> None:
        super().__init__(key, block_tokens, short=short)
        self._notify = notify
        self.heads: BoundedDict[TokenState, _Head] = BoundedDict(HEADS_MAX)
        self.lengths: tuple[int, ...] = ()
        self.keep(lengths)

    def keep(self, lengths: Iterable[int]) -> None:
        """Compute hashes of these lengths, in tokens, from now on."""
        kept = tuple(sorted(dict.fromkeys(lengths)))[:LENGTHS_MAX]
        if kept != self.lengths:
            self.lengths, self.heads = kept, BoundedDict(HEAD_IDS_MAX // max((PREFIX_TOKENS, *kept)))

    def extend_many(self, jobs: Sequence[tuple[TokenState, TokenIds, Sequence[int]]]) -> list[list[Segment]]:
        found = super().extend_many(jobs)
        reach = self.lengths[-1] + self.short if self.lengths else 0  # the fingerprint for the longest may come later
        for (state, ids, _), segments in zip(jobs, found, strict=True):
            if segments and state.tokens < reach:
                self._look(state, ids, segments, reach)
        return found

    def _look(self, state: TokenState, ids: TokenIds, segments: Sequence[Segment], reach: int) -> None:
        head = self.heads.get(state) if state.tokens else _Head(state.total, (), ())
        if head is None:
            return
        longest, before, seen = self.lengths[-1], dict(head.anchors), segments[-1].state.tokens
        ids_seen = head.ids + tuple(ids[: max(0, longest - state.tokens)].tolist())
        anchors = dict(before)
        for segment in segments:
            anchors.update((*segment.anchors, segment.end))
        for length in self.lengths:
            depth = anchor_at(length, self.block_tokens)
            if length <= seen and not (length <= state.tokens and depth in before):
                self._found(head.root, key_of(ids_seen, length), anchors, depth)
        if seen < longest:
            self._found(head.root, key_of(ids_seen[:seen]), anchors, segments[-1].end[0])
        for segment in segments:
            tokens = segment.state.tokens
            if tokens < reach:
                kept = tuple((depth, name) for depth, name in anchors.items() if 0 < depth <= tokens)
                with suppress(RuntimeError, StopIteration, KeyError):  # another thread was quicker
                    self.heads[segment.state] = _Head(head.root, ids_seen[:tokens], kept)

    def _found(self, root: int, key: int, anchors: dict[int, Fingerprint], depth: int) -> None:
        fingerprint = anchors.get(depth)
        if depth and fingerprint:
            self._notify(KeyedPrefix(root, key, fingerprint, depth))


class Link(NamedTuple):
    key: int
    fingerprint: Fingerprint
    tokens: int  # depth of the fingerprint
    model: str


class Links:
    """Maps prefix hashes to fingerprints, and back. Several, if the same tokens were asked of several models."""

    def __init__(self, links_max: int = LINKS_MAX) -> None:
        self._links_max = links_max
        self._by_key: dict[int, dict[Fingerprint, Link]] = {}
        self._by_print: dict[Fingerprint, dict[int, Link]] = {}  # oldest first
        self._count = 0
        self.forgotten = 0

    def __len__(self) -> int:
        return self._count

    def add(self, link: Link) -> None:
        """Add a link. One fingerprint may have several keys: those of 64 and of 70 tokens belong to one anchor."""
        links = self._by_print.pop(link.fingerprint, {})
        self._count += link.key not in links
        links[link.key] = link
        self._by_print[link.fingerprint] = links  # now the newest
        self._by_key.setdefault(link.key, {})[link.fingerprint] = link
        if self._count > self._links_max:  # several, since the oldest has to be looked for
            for fingerprint in list(islice(self._by_print, max(1, self._links_max // FORGOTTEN_SHARE))):
                self._forget(fingerprint)

    def of_key(self, key: int, model: str = "") -> list[Link]:
        """Return the links of this key, for one model or for all."""
        found = self._by_key.get(key)
        return [link for link in found.values() if model in ("", link.model)] if found else []

    def of_fingerprint(self, fingerprint: Fingerprint) -> Sequence[Link]:
        found = self._by_print.get(fingerprint)
        return tuple(found.values()) if found else ()

    def part(self, start: int, most: int) -> list[Link]:
        """Return the links of `most` fingerprints from place `start` on, oldest first; empty at the end."""
        return [link for links in islice(self._by_print.values(), start, start + most) for link in links.values()]

    def _forget(self, fingerprint: Fingerprint) -> None:
        links = self._by_print.pop(fingerprint)
        self.forgotten += len(links)
        self._count -= len(links)
        for key in links:
            prints = self._by_key[key]
            del prints[fingerprint]
            if not prints:
                del self._by_key[key]
