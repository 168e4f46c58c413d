"""Revocations of clients' keys, which an operator gives on one node and all nodes follow (`join_table`).

Rules: a revocation is signed with the admin key, else anybody in the cluster could shut clients out; without that key a
node gives, takes and passes on none. Of one id that with the greatest clock holds. Each ends by the time of day that it
names, since nothing else outlives all nodes, and is forgotten then: what was recorded returns no later. One that was
taken back is kept until then, or it would return. Rows stay as they were signed, so that a file may bring them back.
Bounds: REVOKED_MAX ids, of which the STORED_MAX latest outlive a restart of all nodes at once.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from heapq import nlargest
from random import Random
from struct import pack
from typing import Any, NamedTuple

from ranvier_py.core.mesh.join_table import ClockedTable
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import SIGNATURE_BYTES, packed, parts_field, unpacked
from ranvier_py.core.mesh.wire.frame import BadFrame, bad, text
from ranvier_py.core.metrics import counter, gauge

REVOKED_MAX = 4096
STORED_MAX = 256  # 32 KiB
ROWS_PER_MESSAGE = 256
ID_BYTES_MAX = 64
YEAR_MS = 366 * 86_400_000  # the longest: a key that is to stay out has its line taken from the file
CLOCK_AHEAD_MS = 86_400_000  # for a wrong clock where it was given


class Revocation(NamedTuple):
    """One id, and until when its key is refused; `holds` is 0 once that was taken back."""

    clock: int  # u64
    until_ms: int  # u64: time of day
    holds: int  # u8
    id: str
    signature: bytes  # 32 bytes, HMAC-SHA256


class Revoked(NamedTuple):
    rows: tuple[Revocation, ...]


def read_revocation(clock: int, until_ms: int, holds: int, key_id: bytes, signature: bytes) -> Revocation:
    if len(signature) != SIGNATURE_BYTES or holds > 1:
        bad("revocation")
    return Revocation(clock, until_ms, holds, text(key_id, ID_BYTES_MAX), signature)


ROWS = parts_field("revocation", "Q Q B *B 32s", ROWS_PER_MESSAGE, read_revocation)


UNSIGNED = (
    "revoking needs a keys_file, and gossip with a gossip_admin_key; without, set disabled = true in each node's file"
)


@dataclass(slots=True)
class RevocationCounters:
    ids: int = gauge("Ids of clients' keys that are revoked, or were, and whose time is not over.")
    refused: dict[str, int] = counter("Revocations that were not taken, by reason.", label="reason")

    def __post_init__(self) -> None:
        self.refused.update(dict.fromkeys(("signature", "time", "full"), 0))


class Revocations(ClockedTable[str, Revocation]):
    """The revocations that one node knows."""

    kinds = (Kind("access", 110, Revoked, (ROWS,), since=5),)
    ROWS_MAX = ROWS_PER_MESSAGE
    REPEAT_S = 30.0

    def __init__(
        self,
        admin_key: bytes,
        outbox: list[Outgoing],
        rng: Random,
        now: float,
        *,
        wall_ms: int = 0,
        stored: bytes = b"",
    ) -> None:
        super().__init__(outbox, rng, now, wall_ms)
        self.counters = RevocationCounters()
        self._key = admin_key
        self._known: dict[str, Revocation] = {}
        self._load(stored, now)

    def counted(self) -> Mapping[str, Any]:
        return {"gossip_revocations": self.counters}

    def is_revoked(self, key_id: str, wall_ms: float) -> bool:
        row = self._known.get(key_id)
        return row is not None and row.holds == 1 and wall_ms < row.until_ms

    def held(self, now: float) -> Sequence[Revocation]:
        """Return the revocations that hold, the latest first."""
        wall_ms = self._wall_ms(now)
        rows = [row for row in self._known.values() if row.holds and wall_ms < row.until_ms]
        return sorted(rows, key=by_clock, reverse=True)

    def give(self, key_id: str, until_ms: int, now: float) -> str:
        """Revoke a key until that time; 0 takes a revocation back. Returns why not: it is not shared then, and so does
        not hold."""
        wall_ms, before = self._wall_ms(now), self._known.get(key_id)
        if not self._key:
            return UNSIGNED
        if before is None and not until_ms:
            return f"{key_id} is not revoked"
        if before is None and not self._has_room(now):
            return f"{REVOKED_MAX} keys are revoked, and no more can be: take keys out of the file"
        clock = max(wall_ms, before.clock + 1 if before is not None else 0)
        ends = max(until_ms, before.until_ms if before is not None and not until_ms else 0)
        row = Revocation(clock, min(ends, wall_ms + YEAR_MS), int(until_ms > 0), key_id, bytes(SIGNATURE_BYTES))
        row = row._replace(signature=signature_of(self._key, row))
        read_revocation(*row[:3], key_id.encode(), row.signature)
        self._take(row)
        return ""

    def receive(self, _peer: Peer, message: Revoked, now: float) -> None:
        for row in message.rows:
            self._receive(row, now)

    def _receive(self, row: Revocation, now: float) -> None:
        wall_ms, before = self._wall_ms(now), self._known.get(row.id)
        if before is not None and by_clock(row) <= by_clock(before):
            return
        reason = ""
        if not self._key or not hmac.compare_digest(signature_of(self._key, row), row.signature):
            reason = "signature"
        elif not wall_ms < row.until_ms <= wall_ms + YEAR_MS + CLOCK_AHEAD_MS or row.clock > wall_ms + CLOCK_AHEAD_MS:
            reason = "time"
        elif before is None and not self._has_room(now):
            reason = "full"
        if reason:
            self.counters.refused[reason] += 1
        else:
            self._take(row)

    def _take(self, row: Revocation) -> None:
        self._known[row.id] = row
        self._changed[row.id] = None
        self.counters.ids = len(self._known)

    def _has_room(self, now: float) -> bool:
        if len(self._known) >= REVOKED_MAX:
            self._forget(now)
        return len(self._known) < REVOKED_MAX

    def _forget(self, now: float) -> None:
        """Forget what is over."""
        wall_ms = self._wall_ms(now)
        self._known = {key_id: row for key_id, row in self._known.items() if wall_ms < row.until_ms}
        self._changed = {key_id: None for key_id in self._changed if key_id in self._known}
        self.counters.ids = len(self._known)

    def stored(self) -> bytes:
        """Return what is to outlive a restart."""
        return packed([ROWS], [nlargest(STORED_MAX, self._known.values(), by_clock)])

    def _load(self, stored: bytes, now: float) -> None:
        with suppress(BadFrame):  # damaged, or there is none
            for row in unpacked([ROWS], stored)[0]:
                self._receive(row, now)

    def _rows(self, keys: dict[str, None] | None, now: float) -> Sequence[Revocation]:
        self._forget(now)
        return [*self._known.values()] if keys is None else [self._known[each] for each in keys if each in self._known]

    def _message(self, rows: Sequence[Revocation]) -> Revoked:
        return Revoked(tuple(rows))


def by_clock(row: Revocation) -> tuple[int, int, int, str]:
    return row.clock, row.holds, row.until_ms, row.id


def signature_of(key: bytes, row: Revocation) -> bytes:
    """Return the HMAC-SHA256 over all of a revocation but the signature."""
    numbers = pack("<QQB", row.clock, row.until_ms, row.holds)
    return hmac.new(key, b"revocation of a key" + numbers + row.id.encode(), sha256).digest()
