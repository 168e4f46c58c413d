"""The response cache's values in Redis, and how invalidated answers are kept from coming back. Pure.

Rule: to clear everything, a node writes another, random generation: no key of the old one is read again. An
invalidation is added to the generation's list: an entry is void if it fits and its writer did not know it. A look-up
reads the generation together with the entry, so an invalidation takes effect once Redis has it; if the value is lost,
by eviction or otherwise, the generation is lost with it.
Bounds: INVALIDATIONS_MAX and GENERATION_BYTES_MAX; beyond them everything is cleared, which voids enough in any case.
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
from ranvier_py.core.response_cache.invalidations import parts_of
from ranvier_py.core.response_cache.stored_answers import StoredAnswer

VERSION = 1
INVALIDATIONS_MAX = 64
GENERATION_BYTES_MAX = 8192
GENERATION_DIGITS = 16
SPANS = 32  # spans of time in which an expiring sum is kept

ENVELOPE = Struct(">QQ")

SWAP = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2]) return 1 else return 0 end"
"""Lua: write a value unless another node has written one since it was read."""


class Invalidation(NamedTuple):
    """Voids answers of this model and tenant that were stored at `before_ms` or earlier. None means any."""

    number: int
    model: str | None
    tenant: bytes | None
    before_ms: int | None


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation, and its invalidations. `raw` is its value in Redis. P being the operator's prefix:

    P<generation>:<key>   text: 8 moment of writing in ms of Redis's clock | 8 number of the last invalidation that the
                          writer knew | the answer as bytes (`answer_frames`). Expires with the answer
    Pgeneration           text: msgpack [version, generation, [[number, model, tenant, before in ms], …]]
    Pprobe                text that shows whether one may write
    """

    id: str
    invalidations: tuple[Invalidation, ...] = ()
    raw: bytes = b""

    @property
    def number(self) -> int:
        """The number of the last invalidation; 0 if there is none."""
        return self.invalidations[-1].number if self.invalidations else 0

    def voids(self, answer: StoredAnswer, known: int, stored_ms: float) -> bool:
        """Whether this answer was invalidated after the invalidation `known` to its writer."""
        return any(
            each.number > known
            and each.model in (None, answer.model)
            and (each.tenant is None or each.tenant in parts_of(answer.tenant))
            and (each.before_ms is None or stored_ms <= each.before_ms)
            for each in self.invalidations
        )

    def without(self, model: str | None, tenant: bytes | None, before_ms: int | None) -> Generation | None:
        """Return this generation with one more invalidation; None if there is no room for it."""
        more = Invalidation(self.number + 1, model, tenant, before_ms)
        found = packed(replace(self, invalidations=(*self.invalidations, more)))
        fits = len(found.invalidations) <= INVALIDATIONS_MAX and len(found.raw) <= GENERATION_BYTES_MAX
        return found if fits else None


def packed(generation: Generation) -> Generation:
    """Return the generation with its bytes."""
    rows = [list(each) for each in generation.invalidations]
    raw: bytes = msgpack.packb([VERSION, generation.id, rows], unicode_errors="surrogatepass")
    return replace(generation, raw=raw)


def new_generation(rng: Random) -> Generation:
    return packed(Generation(f"{rng.getrandbits(4 * GENERATION_DIGITS):0{GENERATION_DIGITS}x}"))


def generation_in(raw: object) -> Generation | None:
    """Read the value in Redis; None if there is none, or garbage."""
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
    """Whether they have the right types and consecutive numbers."""
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
    """Return the entry of an answer. `server_ms` is `now` on Redis's clock, which `answer.stored_at` does not use."""
    envelope = ENVELOPE.pack(max(0, round(server_ms)), generation.number)
    return envelope + encoded(envelope + key, answer, now)


def answer_in(
    key: bytes, data: bytes, generation: Generation, now: float, server_ms: float, bytes_max: int
) -> StoredAnswer | None:
    """Read an entry of this generation; None if it is void, or garbage."""
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
    """Number and bytes of entries that were written and have not expired, to within a SPANS-th of the time to live."""

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
