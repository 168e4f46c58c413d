"""What the response cache has in Redis, and how nothing that was invalidated comes back. Pure.

P being the operator's prefix:

    P<generation>:<key>   text: 8 moment of writing in ms of Redis's clock | 8 number of the last invalidation that the
                          writer knew | the answer as bytes (`answer_frames`). Expires with the answer
    Pgeneration           text: msgpack [version, generation, number, [[number, model, tenant, before in ms], …]]
    Pprobe                text that shows whether one may write

Who clears all writes another generation, at random, so that all keys of before are nobody's; they expire by themselves.
Who invalidates a model, a tenant or an age adds that to the list: an entry is void if its writer did not know of it and
it fits. So nothing is ever searched for; a look-up reads the generation, which holds the list, together with the entry,
and an invalidation counts from the moment that Redis has it. All in one value: where that is lost, by eviction or
otherwise, the generation is lost with it and a new one is made.
Bounds: INVALIDATIONS_MAX and GENERATION_BYTES_MAX; beyond them all is cleared, which is never too little.
Source: Continuum Router, tier 3; its outages bring answers back (CX20).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from struct import Struct
from typing import NamedTuple

import msgpack  # type: ignore[import-untyped]

from ranvier_py.core.response_cache.answer_frames import decoded, encoded
from ranvier_py.core.response_cache.stored_answers import StoredAnswer

VERSION = 1
INVALIDATIONS_MAX = 64
GENERATION_BYTES_MAX = 8192
GENERATION_DIGITS = 16
SPANS = 32  # in which a sum that expires is kept

ENVELOPE = Struct(">QQ")

SWAP = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2]) return 1 else return 0 end"
"""Lua: write a value unless another node has written one since it was read."""


class Invalidation(NamedTuple):
    """Answers of this model and tenant, stored before: None of each means any."""

    number: int
    model: str | None
    tenant: bytes | None
    before_ms: int | None


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation, and what was invalidated in it. `raw` is what Redis has."""

    id: str
    invalidations: tuple[Invalidation, ...] = ()
    raw: bytes = b""

    @property
    def number(self) -> int:
        """Of the last invalidation."""
        return self.invalidations[-1].number if self.invalidations else 0

    def voids(self, answer: StoredAnswer, known: int, stored_ms: float) -> bool:
        """Whether this answer was invalidated since the invalidation that its writer knew."""
        return any(
            each.number > known
            and each.model in (None, answer.model)
            and each.tenant in (None, answer.tenant)
            and (each.before_ms is None or stored_ms < each.before_ms)
            for each in self.invalidations
        )

    def without(self, model: str | None, tenant: bytes | None, before_ms: int | None) -> Generation | None:
        """This generation with one more invalidation; None where there is no room for it."""
        more = Invalidation(self.number + 1, model, tenant, before_ms)
        found = packed(replace(self, invalidations=(*self.invalidations, more)))
        fits = len(found.invalidations) <= INVALIDATIONS_MAX and len(found.raw) <= GENERATION_BYTES_MAX
        return found if fits else None


def packed(generation: Generation) -> Generation:
    """With its bytes."""
    rows = [list(each) for each in generation.invalidations]
    raw: bytes = msgpack.packb([VERSION, generation.id, rows], unicode_errors="surrogatepass")
    return replace(generation, raw=raw)


def new_generation(rng: Random) -> Generation:
    return packed(Generation(f"{rng.getrandbits(4 * GENERATION_DIGITS):0{GENERATION_DIGITS}x}"))


def generation_in(raw: object) -> Generation | None:
    """What stands in Redis; None for nothing and for garbage."""
    if not isinstance(raw, bytes) or not 0 < len(raw) <= GENERATION_BYTES_MAX:
        return None
    try:
        version, name, rows = msgpack.unpackb(
            raw, max_array_len=INVALIDATIONS_MAX, max_map_len=0, max_ext_len=0, unicode_errors="surrogatepass"
        )
        found = tuple(Invalidation(*row) for row in rows)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    is_sound = version == VERSION and type(name) is str and len(name) == GENERATION_DIGITS and name.isalnum()
    return Generation(name, found, raw) if is_sound and name.isascii() and are_sound(found) else None


def are_sound(invalidations: Sequence[Invalidation]) -> bool:
    """Whether they are of the right types, and numbered."""
    return all(
        type(each.number) is int
        and each.number == index
        and (each.model is None or type(each.model) is str)
        and (each.tenant is None or type(each.tenant) is bytes)
        and (each.before_ms is None or type(each.before_ms) is int)
        for index, each in enumerate(invalidations, 1)
    )


# --- entries ----------------------------------------------------------------------------------------------------------


def entry_name(prefix: str, generation: Generation, key: bytes) -> str:
    return f"{prefix}{generation.id}:{key.hex()}"


def entry_of(key: bytes, answer: StoredAnswer, generation: Generation, now: float, server_ms: float) -> bytes:
    """`server_ms` is `now` by Redis's clock, of which `answer.stored_at` knows nothing."""
    envelope = ENVELOPE.pack(max(0, round(server_ms)), generation.number)
    return envelope + encoded(envelope + key, answer, now)


def answer_in(
    key: bytes, data: bytes, generation: Generation, now: float, server_ms: float, bytes_max: int
) -> StoredAnswer | None:
    """The answer in an entry of this generation; None for one that is void, and for garbage."""
    if len(data) <= ENVELOPE.size:
        return None
    envelope = data[: ENVELOPE.size]
    written_ms, known = ENVELOPE.unpack(envelope)
    since_s = max(0.0, server_ms - written_ms) / 1000
    found = decoded(envelope + key, data[ENVELOPE.size :], now - since_s, bytes_max)
    if found is None or generation.voids(found, known, server_ms - 1000 * (now - found.stored_at)):
        return None
    return found


# --- how much there is ------------------------------------------------------------------------------------------------


class ExpiringSum:
    """Number and bytes of what was written and has not expired, to a part in SPANS of the time to live."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._spans: deque[list[float]] = deque()  # [from, number, bytes]

    def add(self, size: int, now: float) -> None:
        if not self._spans or now - self._spans[-1][0] >= self._ttl_s / SPANS:
            self._spans.append([now, 0, 0])
        self._spans[-1][1] += 1
        self._spans[-1][2] += size

    def total(self, now: float) -> tuple[int, int]:
        while self._spans and now - self._spans[0][0] >= self._ttl_s:
            self._spans.popleft()
        return int(sum(span[1] for span in self._spans)), int(sum(span[2] for span in self._spans))

    def clear(self) -> None:
        self._spans.clear()
