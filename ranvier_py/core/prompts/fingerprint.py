"""Computes fingerprints of whole prefixes, from messages (text) and from tokens.

Rule: equal prefixes under one namespace (`prompts.namespaces`) have equal fingerprints on every node that has the key.
A fingerprint can't be inverted, nor guessed without the key. 0 means «not known» and is never produced. A collision
costs one cache miss, never a wrong answer, so 64 bits are enough (2^20 routes: about 2^-25).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.body_json import exact_json
from ranvier_py.core.prompts.boundaries import Message, TokenIds
from ranvier_py.core.splitmix import GOLDEN, MASK, mix, mix_array, unmix

U64 = np.uint64

ANCHOR_BLOCKS_DENSE = (1, 2, 4, 8, 16)
ANCHOR_STEP_BLOCKS = 16
"""Anchors are 1, 2, 4, 8, 16, then every 16 blocks: dense where system prompts end, 256 tokens apart in documents."""

MEDIA_MARK = (1 << 24) - 1
"""The low bits of fingerprints of prefixes with media. The other 40 bits tell these apart; a collision costs a cache
miss. One in 2^24 of all other fingerprints ends so by chance, and is not withdrawn at once when it should be."""

UNCOMPUTED_TOKENS = 3
"""Tokens at the end of a message that an engine generated whose keys and values it computes only with the next turn:
the token sampled last, the end marker, and the line end that templates put behind it."""


def is_of_media(fingerprint: int) -> bool:
    """Whether this token fingerprint belongs to a prefix with media, which an engine's events never report."""
    return fingerprint & MEDIA_MARK == MEDIA_MARK


def anchors_between(low_blocks: int, high_blocks: int) -> list[int]:
    """Return the anchor depths d in blocks with low < d <= high, ascending."""
    found = [d for d in ANCHOR_BLOCKS_DENSE if low_blocks < d <= high_blocks]
    first = max(2 * ANCHOR_STEP_BLOCKS, (low_blocks // ANCHOR_STEP_BLOCKS + 1) * ANCHOR_STEP_BLOCKS)
    found.extend(range(first, high_blocks + 1, ANCHOR_STEP_BLOCKS))
    return found


def is_anchor(blocks: int) -> bool:
    """Whether this depth is an anchor."""
    return blocks > 0 and (blocks % ANCHOR_STEP_BLOCKS == 0 or blocks in ANCHOR_BLOCKS_DENSE)


def anchor_below(blocks: int) -> int:
    """Return the deepest anchor above this depth, in blocks; 0 for none."""
    if blocks > ANCHOR_STEP_BLOCKS:
        return (blocks - 1) // ANCHOR_STEP_BLOCKS * ANCHOR_STEP_BLOCKS
    return max((depth for depth in ANCHOR_BLOCKS_DENSE if depth < blocks), default=0)


def anchor_at(tokens: int, block_tokens: int) -> int:
    """Return the deepest anchor, in tokens, that is at most `tokens` deep; 0 for less than a block."""
    blocks = tokens // block_tokens
    return block_tokens * (blocks if is_anchor(blocks) else anchor_below(blocks))


def depths_of(dones: Sequence[int], counts: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return the depths of the `counts[i]` blocks after the first `dones[i]`, of all jobs one after another."""
    if len(counts) == 1:
        return np.arange(dones[0] + 1, dones[0] + counts[0] + 1, dtype=U64)
    ahead = [done - end + count for done, count, end in zip(dones, counts, accumulate(counts), strict=True)]
    found: npt.NDArray[np.int64] = np.arange(1, sum(counts) + 1) + np.repeat(ahead, counts)
    return found.view(U64)


class TextHasher:
    """Keyed hash of message prefixes: chains one keyed BLAKE2b per message, so it is known as soon as a body is parsed,
    at message boundaries only. `key` is 16 to 64 secret bytes, the same on all nodes of a cluster."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._begun = blake2b(digest_size=8, key=key)  # copied for each message, so that the key is taken in once

    def __reduce__(self) -> tuple[type[TextHasher], tuple[bytes]]:
        """Copy it by its key: a hash that has begun is not copied by others."""
        return TextHasher, (self._key,)

    def namespace(self, fields: Mapping[str, Any]) -> Fingerprint:
        """Return the fingerprint of the empty prefix. `fields`: what else decides the text or keeps caches apart.

        Raises TypeError (orjson) for values that are not JSON. Key order inside values counts: templates may print it.
        """
        return self._digest(b"namespace" + orjson.dumps(sorted(fields.items())))

    def extend(self, parent: Fingerprint, canonical: bytes) -> Fingerprint:
        """Return the fingerprint of the prefix that ends with a message, given `parent` and its `canonical_message`."""
        return self._digest(parent.to_bytes(8, "little") + canonical)

    def extend_bytes(self, parent: Fingerprint, data: bytes, *, ids: bool = False) -> Fingerprint:
        """As `extend`, for a prompt that is no chat: plain text, or token ids as little-endian 32-bit numbers."""
        return self._digest(parent.to_bytes(8, "little") + (b"\x03" if ids else b"\x02") + data)

    def digest(self, data: bytes) -> bytes:
        """Return a keyed 16-byte digest of a value that is part of a namespace."""
        return blake2b(data, digest_size=16, key=self._key).digest()

    def _digest(self, data: bytes) -> Fingerprint:
        hasher = self._begun.copy()
        hasher.update(data)
        return Fingerprint(int.from_bytes(hasher.digest(), "little") or 1)


def canonical_message(message: Message) -> bytes:
    """Return bytes that are equal for messages that render equally, however a client spells them.

    Empty and null members are dropped (an SDK that echoes an answer adds `"refusal": null`), key order does not count,
    and a single text part equals its text. Otherwise injective: the first byte tells the two encodings apart. Arguments
    of tool calls, and tools, keep key order, since templates print them as JSON. Raises TypeError as `exact_json`.
    """
    if len(message) == 2:
        role, content = message.get("role"), message.get("content")
        if type(role) is str and type(content) is str and content:
            return b"\x00%d:%b%b" % (len(role), role.encode(), content.encode())
    kept = {key: value for key, value in message.items() if value}
    content = kept.get("content")
    if type(content) is list and len(content) == 1:
        kept["content"] = content = plain_text(content[0])
    if kept.keys() == {"role", "content"} and type(content) is str and type(kept["role"]) is str:
        return canonical_message(kept)
    if type(calls := kept.get("tool_calls")) is list:
        kept["tool_calls"] = [call_in_order(call) for call in calls]
    if "tools" in kept:
        kept["tools"] = in_order(kept["tools"])
    return b"\x01" + exact_json(kept, orjson.OPT_SORT_KEYS)


def call_in_order(call: object) -> object:
    """Return a tool call whose arguments, if they are an object, keep their key order in sorted JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or type(function) is not dict or type(function.get("arguments")) is not dict:
        return call
    return {**call, "function": {**function, "arguments": in_order(function["arguments"])}}


def in_order(value: object) -> object:
    """Wrap a value as its JSON text in an object, which keeps its key order where keys are sorted."""
    return {"": exact_json(value).decode()}


def plain_text(part: object) -> object:
    """Return the text of a bare text part, or the part itself."""
    if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text":
        return part["text"]
    return part


def media_of(message: Message) -> bytes:
    """Return the parts of a message that are not text, as bytes; empty for most messages."""
    content = message.get("content")
    if type(content) is not list:
        return b""
    parts = [part for part in content if isinstance(part, dict) and part.get("type") != "text"]
    return orjson.dumps(parts, option=orjson.OPT_SORT_KEYS) if parts else b""


class TokenState(NamedTuple):
    """Where token hashing stands at one depth: enough to continue. Only the rest can be read back."""

    tokens: int
    total: int  # running sum over the whole blocks, modulo 2^64
    rest: tuple[int, ...]  # tokens after the last whole block, fewer than a block
    veil: int = 0  # keyed sum of the rest's tokens, where `TokenHasher.veiled` has replaced those by 0


class MediaState(TokenState):
    """A TokenState behind media, whose tokens are mere placeholders. An engine's events do not report prefixes from
    here on, and their fingerprints are marked (`is_of_media`)."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """Fingerprints of one stretch of new tokens.

    `anchors` are ascending (tokens, fingerprint) pairs at anchor depths inside the stretch. `end` is the pair at its
    last whole block, `short` tokens before its end (tokens 0 if no block is full). `state` continues from its very end.
    """

    anchors: tuple[tuple[int, Fingerprint], ...]
    end: tuple[int, Fingerprint]
    state: TokenState


class TokenHasher:
    """Keyed hash of token prefixes at block depths. Equal on all nodes with equal `key` and `block_tokens`.

    A block's digest is a keyed multilinear hash of its tokens; digests are summed under positional keys, and the
    running sum is mixed at each depth. So a few vectorised calls yield all depths of a prompt, and turn N+1 continues
    from three numbers and less than a block of tokens.

    `short`: the `end` of a segment is computed as if the stretch ended so many tokens earlier. The engine has not
    computed the last tokens of its answer (UNCOMPUTED_TOKENS), so it may not hold the last block of that message.
    """

    def __init__(self, key: bytes, block_tokens: int = 16, *, short: int = 0) -> None:
        """A `short` of a whole block or more counts as one token less than a block."""
        self.block_tokens = block_tokens
        self.short = min(short, block_tokens - 1)
        self._key = key
        seed = blake2b(b"tokens", digest_size=32, key=key).digest()
        words = [int.from_bytes(seed[i : i + 8], "little") for i in range(0, 32, 8)]
        self._token_seed, self._position_seed, self._final_seed, self._start_seed = words
        indices = np.arange(1, block_tokens + 1, dtype=U64)
        self._token_keys = mix_array(indices * U64(GOLDEN) + U64(self._token_seed)) | U64(1)
        self._pad_key = blake2b(b"pads", digest_size=32, key=key).digest()

    def plain(self) -> TokenHasher:
        """Return a hasher with `short` 0, for what an engine itself reports."""
        return TokenHasher(self._key, self.block_tokens)

    def start(self, namespace: Fingerprint) -> TokenState:
        return TokenState(0, (namespace + self._start_seed) & MASK, ())

    def renamed(self, fingerprint: Fingerprint, step: int) -> Fingerprint:
        """Return the fingerprint of the same tokens under another namespace, which is `step` greater modulo 2^64."""
        return Fingerprint(mix(((unmix(fingerprint) ^ self._final_seed) + step) & MASK ^ self._final_seed) or 1)

    def salted(self, state: TokenState, salt: bytes) -> MediaState:
        """Return the state for the same tokens when media came with them; `salt` identifies the media."""
        number = int.from_bytes(blake2b(salt, digest_size=8).digest(), "little")
        return MediaState(state.tokens, mix(state.total ^ number), state.rest, state.veil)

    def veiled(self, state: TokenState) -> TokenState:
        """Return an equivalent state that contains no token ids: hashing continues from it with the same results."""
        if not state.rest:
            return state
        hidden = np.array(state.rest, dtype=U64) @ self._token_keys[: len(state.rest)]
        return state._replace(rest=(0,) * len(state.rest), veil=(int(hidden) + state.veil) & MASK)

    def fingerprint(self, state: TokenState) -> Fingerprint:
        """Return the fingerprint of the whole blocks of the state's prefix; 0 if there is none."""
        mark = MEDIA_MARK if isinstance(state, MediaState) else 0
        return self._pair(state.tokens // self.block_tokens, state.total, mark)[1]

    def pad(self, name: bytes) -> int:
        """Return 64 bits that hide a number by exclusive or from all who lack the key. Each `name` has another pad."""
        return int.from_bytes(blake2b(name, digest_size=8, key=self._pad_key).digest(), "little")

    def extend(self, state: TokenState, ids: TokenIds, ends: Sequence[int]) -> list[Segment]:
        """Return a segment for each stretch: stretch i is ids[ends[i-1]:ends[i]], the first one follows `state`.

        Args:
            ids: uint32, the new tokens.
            ends: ascending; each <= len(ids).
        """
        return self.extend_many([(state, ids, ends)])[0]

    def extend_many(self, jobs: Sequence[tuple[TokenState, TokenIds, Sequence[int]]]) -> list[list[Segment]]:
        """Call `extend` for each job, but hash the blocks of all jobs in the same few calls."""
        size = self.block_tokens
        pieces: list[TokenIds] = []
        counts: list[int] = []
        veils: list[tuple[int, int]] = []  # block, veil to add to its sum of tokens
        for state, ids, _ in jobs:
            count = (len(state.rest) + len(ids)) // size
            counts.append(count)
            if count:
                if state.veil:
                    veils.append((sum(counts[:-1]), state.veil))
                if state.rest:
                    pieces.append(np.array(state.rest, dtype=np.uint32))
                pieces.append(ids[: count * size - len(state.rest)])
        running = self._running(pieces, [state.tokens // size for state, _, _ in jobs], counts, veils)
        results = []
        start = 0
        for (state, ids, ends), count in zip(jobs, counts, strict=True):
            before = running[start]
            totals = [(value - before + state.total) & MASK for value in running[start : start + count + 1]]
            results.append(self._segments(state, ids, ends, totals))
            start += count
        return results

    def every_block(self, jobs: Sequence[tuple[TokenState, int]], ids: TokenIds) -> tuple[list[int], list[Fingerprint]]:
        """Return the running sum and the fingerprint after each of our blocks, for all jobs one after another.

        Args:
            jobs: (state, number of whole blocks after it); no state has a rest.
            ids: the tokens of all jobs.
        """
        counts = [count for _, count in jobs]
        places = depths_of([state.tokens // self.block_tokens for state, _ in jobs], counts) * U64(GOLDEN)
        sums = self._sums(ids, places, ())
        starts = list(accumulate(counts, initial=0))[:-1]
        before = np.concatenate((np.zeros(1, dtype=U64), sums))[starts]
        sums += np.repeat(np.array([state.total for state, _ in jobs], dtype=U64) - before, counts)
        prints = mix_array((sums + places) ^ U64(self._final_seed))
        if not prints.all():
            prints[prints == 0] = 1
        fingerprints: list[Fingerprint] = prints.tolist()
        return sums.tolist(), fingerprints

    def _running(
        self, pieces: list[TokenIds], dones: list[int], counts: list[int], veils: Sequence[tuple[int, int]]
    ) -> list[int]:
        """Return 0, then the running sum after each block, over all jobs one after another, modulo 2^64."""
        if not pieces:
            return [0]
        places = depths_of(dones, counts) * U64(GOLDEN)
        return [0, *self._sums(np.concatenate(pieces), places, veils).tolist()]

    def _sums(
        self, ids: TokenIds, places: npt.NDArray[np.uint64], veils: Sequence[tuple[int, int]]
    ) -> npt.NDArray[np.uint64]:
        """Return the running sums over all blocks. `places`: the depth of each block, times GOLDEN."""
        sums = (ids.reshape(-1, self.block_tokens).astype(U64) + U64(1)) @ self._token_keys
        for place, veil in veils:
            sums[place] = (int(sums[place]) + veil) & MASK
        return np.cumsum(mix_array(sums) * (mix_array(places + U64(self._position_seed)) | U64(1)), dtype=U64)

    def _segments(self, state: TokenState, ids: TokenIds, ends: Sequence[int], totals: list[int]) -> list[Segment]:
        """Return the segments of one job. `totals[i]` is the running sum i blocks after those of `state`."""
        size, short = self.block_tokens, self.short
        done, low = state.tokens // size, max(0, state.tokens - short) // size
        settled = done  # blocks before this stretch: no answer's last ones
        segments, kind = [], type(state)
        mark = MEDIA_MARK if kind is MediaState else 0
        for end in ends:
            tokens = state.tokens + end
            blocks = tokens // size
            until = max((tokens - short) // size, settled) if short else blocks
            wanted = anchors_between(low, until)
            if not wanted or wanted[-1] != until:
                wanted.append(until)
            pairs = [self._pair(depth, totals[depth - done], mark) for depth in wanted]
            veil = state.veil if blocks == done else 0
            after = kind(tokens, totals[blocks - done], self._rest(state, ids, end, blocks), veil)
            segments.append(Segment(tuple(pairs[:-1]), pairs[-1], after))
            low, settled = until, blocks
        return segments

    def _pair(self, depth: int, total: int, mark: int = 0) -> tuple[int, Fingerprint]:
        if depth == 0:
            return 0, Fingerprint(0)
        name = mix((total + depth * GOLDEN) & MASK ^ self._final_seed)
        return depth * self.block_tokens, Fingerprint(name | mark or 1)

    def _rest(self, state: TokenState, ids: TokenIds, end: int, blocks: int) -> tuple[int, ...]:
        """Return the tokens after the last whole block of the prefix that ends at `end`."""
        start = blocks * self.block_tokens - state.tokens  # as an index into ids; negative: still inside state.rest
        if start >= 0:
            return tuple(ids[start:end].tolist())
        return state.rest[len(state.rest) + start :] + tuple(ids[:end].tolist())
