"""Reading the whole route table with numpy, in steps of at most 2 ms: its bucket sums, or its claims as columns.

Rule: a scan reads only live claims of current generations whose remaining life exceeds a margin, so that it makes no
difference whether a node forgets a claim now or in a second. The table may change between steps: a row that moves
meanwhile may be read twice or not at all, which the sync that asked repairs by route updates or by the next sums.
Invariant: no view of a column outlives a step, since an array with views can't grow (test_routes_scan.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ranvier_py.core.routing.route_table.claims import Claims
from ranvier_py.core.routing.route_table.route_values import U64, BackendNames, Fingerprints, Numbers, RouteColumns
from ranvier_py.core.routing.route_table.rows import ALIASED, SHARED, Rows
from ranvier_py.core.splitmix import mix_array

BUCKET_BITS = 12
BUCKETS = 1 << BUCKET_BITS
BUCKET_SHIFT = np.uint64(64 - BUCKET_BITS)
"""Fingerprints are keyed hashes: their top bits are as good as any."""

SUMS_BYTES = 8 * BUCKETS

SUMS_ROWS = 16_384
"""Rows that one step of sums reads: about 1 ms."""

EXTRA_CLAIMS_MAX = 1000
"""Claims beyond the first of their row, and further texts, are read one by one: a step ends before it exceeds this."""

CHUNK_CLAIMS = 512
"""Claims of one chunk: what the receiver can merge within 2 ms. A single row may exceed it: one claim per backend."""

ROWS_MIN, ROWS_MAX = 64, 16_384
"""Limits of the rows looked at for one chunk; between them, as many as would have filled the last one."""

ROW_CLAIMS_MAX = 4096
"""Most claims and further texts of one row that are sent, enough for a claim of each backend. The others wait for
route updates."""

CLIMBS_MAX = 100
"""A chunk fetches the rows above its own up to so many levels; a row that hangs deeper arrives without a parent."""


class ScannedRows(NamedTuple):
    """Live claims of some rows, in the order of the rows."""

    row: Numbers
    backend: npt.NDArray[np.int16]
    evidence: npt.NDArray[np.int32]
    read: int  # how many of the rows asked for were looked at


class Chosen(NamedTuple):
    """Claims on their way into a chunk, in the order of their rows. `text` is one of the row's texts."""

    row: Numbers
    token: Fingerprints
    text: Fingerprints
    backend: npt.NDArray[np.int16]
    evidence: npt.NDArray[np.int32]

    def at(self, places: Numbers) -> Chosen:
        """The claims at these places."""
        return Chosen._make(column[places] for column in self)

    def plus(self, more: Chosen) -> Chosen:
        pairs: Iterable[Any] = zip(self, more, strict=True)
        return Chosen._make(map(np.concatenate, pairs))


class Chunk(NamedTuple):
    # parents before children
    columns: RouteColumns
    last: bool


NOTHING = np.array((), np.int64)


class ClaimReader:
    """Reads the live claims of given rows."""

    def __init__(self, rows: Rows, claims: Claims, names: BackendNames, margin_s: float) -> None:
        self.rows = rows
        self._claims = claims
        self.names = names
        self._margin_s = margin_s

    def read(self, ids: Numbers, now: float) -> ScannedRows:
        """Return the live claims of these rows (ascending), or of the first ones if they have many further claims."""
        claims = self._claims
        claims.now = max(claims.now, now)
        backends = np.frombuffer(self.rows.backend, np.int16)[ids]
        read, others = self._others(ids, backends)
        place, backends = np.arange(read), backends[:read]
        generations = np.frombuffer(self.rows.generation, np.int32)[ids[:read]]
        evidence = np.frombuffer(self.rows.evidence, np.int32)[ids[:read]]
        if others:
            more = np.array(others, np.int64)
            place = np.concatenate((place, more[:, 0]))
            backends = np.concatenate((backends, more[:, 1].astype(np.int16)))
            generations = np.concatenate((generations, more[:, 2].astype(np.int32)))
            evidence = np.concatenate((evidence, more[:, 3].astype(np.int32)))
        names = self.names
        shown = (backends >= 0) & (backends < len(names.key)) & (evidence > claims.horizon + self._margin_s)
        live = np.flatnonzero(shown)
        chosen = backends[live]
        live = live[(names.generation[chosen] == generations[live]) & (names.key[chosen] != 0)]
        if others:
            live = live[np.argsort(place[live], kind="stable")]
        return ScannedRows(ids[place[live]], backends[live], evidence[live], read)

    def texts(self, rows: Numbers) -> tuple[Numbers, Fingerprints]:
        """Return the further texts of rows: indices into `rows`, and the texts."""
        at = np.flatnonzero(np.frombuffer(self.rows.flags, np.uint8)[rows] & ALIASED)
        pairs = [(index, text) for index in at.tolist() for text in self.rows.aliases[int(rows[index])]]
        return np.array([index for index, _ in pairs], np.int64), np.array([text for _, text in pairs], U64)

    def _others(self, ids: Numbers, backends: npt.NDArray[np.int16]) -> tuple[int, list[tuple[int, int, int, int]]]:
        """Return how many rows fit one step, and (place, backend, generation, evidence) of their further claims."""
        flags = np.frombuffer(self.rows.flags, np.uint8)[ids]
        special = np.flatnonzero((flags & (SHARED | ALIASED) != 0) & (backends >= 0))
        found: list[tuple[int, int, int, int]] = []
        count = 0
        for place, row in zip(special.tolist(), ids[special].tolist(), strict=True):
            others = self._claims.others[row] if self.rows.flags[row] & SHARED else {}
            count += len(others) + len(self.rows.aliases.get(row, ())) * (1 + len(others))
            if count > EXTRA_CLAIMS_MAX and place:
                return place, found
            found += [(place, backend, claim[0], claim[2]) for backend, claim in others.items()]
        return len(ids), found


class SumsScan:
    """Computes the bucket sums, step by step: each (fingerprint, backend) with a live claim gives a pseudo-random
    number, which is XORed into its bucket. Nodes that know the same claims have equal sums, whatever their ids and row
    numbers are."""

    def __init__(self, reader: ClaimReader) -> None:
        self._reader = reader
        self._keys = reader.names.key ^ reader.names.shared_generation
        self._sums = np.zeros(BUCKETS, U64)
        self._next = 1

    def step(self, now: float) -> bytes | None:
        """Read some rows. Returns the sums, 8 little-endian bytes per bucket, once all rows are read; None before."""
        reader, rows = self._reader, self._reader.rows
        ids = np.arange(self._next, min(self._next + SUMS_ROWS, rows.top))
        if len(ids):
            found = reader.read(ids, now)
            keys = self._keys[found.backend]
            self._add(np.frombuffer(rows.token, U64)[found.row], keys)
            self._add(np.frombuffer(rows.text, U64)[found.row], keys)
            at, texts = reader.texts(found.row)
            self._add(texts, keys[at])
            self._next += found.read
        return self._sums.astype("<u8").tobytes() if self._next >= rows.top else None

    def _add(self, fingerprints: Fingerprints, keys: Fingerprints) -> None:
        known = fingerprints != 0
        fingerprints, keys = fingerprints[known], keys[known]
        np.bitwise_xor.at(self._sums, bucket_of(fingerprints), mix_array(fingerprints ^ keys))


class RowsScan:
    """Reads, in chunks, the claims of some buckets, or of all rows when no bucket is named."""

    def __init__(self, reader: ClaimReader, buckets: npt.NDArray[np.uint16]) -> None:
        self._reader = reader
        self._whole = not len(buckets)
        self._wanted = np.zeros(BUCKETS, np.bool_)
        self._wanted[buckets[buckets < BUCKETS]] = True
        self._next = 1
        self._end = self._reader.rows.top
        self._step_rows = CHUNK_CLAIMS // 8
        size = reader.rows.rows_max
        self._sent = np.zeros(size, np.bool_)  # rows fetched before their turn
        self._place = np.zeros(size, np.int32)  # scratch: 1 + index in the chunk

    def take(self, now: float) -> Chunk | None:
        """Read some rows. Returns their chunk; None: they had no wanted claims. The last chunk may be empty."""
        start, step = self._next, self._step_rows
        ids = np.arange(start, min(start + step, self._end))
        if self._whole:
            ids = ids[~self._sent[ids]]
        chosen, self._next = self._choose(ids, now)
        above = self._above(chosen.row) if self._whole else NOTHING
        if len(above):
            more, read = self._claims(above, now)
            self._sent[above[read:]] = False
            above = above[:read]
            chosen = chosen.plus(more)
        last = self._next >= self._end
        count = len(chosen.row)
        filling = (self._next - start) * CHUNK_CLAIMS // count if count else 2 * step
        self._step_rows = min(max(filling, ROWS_MIN), ROWS_MAX)
        if not count and not last:
            return None
        return Chunk(self._columns(chosen), last)

    def _choose(self, ids: Numbers, now: float) -> tuple[Chosen, int]:
        """Return the wanted claims of these rows that fit a chunk, and the first row that was not looked at."""
        following = min(self._next + self._step_rows, self._end)
        chosen, read = self._claims(ids, now)
        if read < len(ids):
            following = int(ids[read])
        if not self._whole:
            wanted = self._wanted
            named = wanted[bucket_of(chosen.text)] & (chosen.text != 0)
            chosen = chosen.at(np.flatnonzero(named | wanted[bucket_of(chosen.token)] & (chosen.token != 0)))
        if len(chosen.row) > CHUNK_CLAIMS:
            cut = int(np.searchsorted(chosen.row, chosen.row[CHUNK_CLAIMS]))
            cut = cut or int(np.searchsorted(chosen.row, chosen.row[0], side="right"))
            following = int(chosen.row[cut - 1]) + 1
            chosen = chosen.at(np.arange(min(cut, ROW_CLAIMS_MAX)))
        return chosen, following

    def _claims(self, ids: Numbers, now: float) -> tuple[Chosen, int]:
        """Return rows' live claims in order, further texts with a row's first claim, and how many rows were read."""
        rows = self._reader.rows
        found = self._reader.read(ids, now)
        token, text = (np.frombuffer(column, U64)[found.row] for column in (rows.token, rows.text))
        chosen = Chosen(found.row, token, text, found.backend, found.evidence)
        firsts = np.flatnonzero(np.diff(found.row, prepend=-1))
        at, texts = self._reader.texts(found.row[firsts])
        if len(at):
            chosen = chosen.plus(chosen.at(firsts[at])._replace(text=texts))
            chosen = chosen.at(np.argsort(chosen.row, kind="stable"))
        return chosen, found.read

    def _above(self, ids: Numbers) -> Numbers:
        """Return the ancestors of these rows that come later in the scan and were not sent: they go into this chunk."""
        parents = np.frombuffer(self._reader.rows.parent, np.int32)
        found = [NOTHING]
        room = CHUNK_CLAIMS
        above = ids
        for _ in range(CLIMBS_MAX):
            above = parents[above].astype(np.int64)
            above = above[above >= self._next]
            above = np.unique(above[~self._sent[above]])[:room]
            if not len(above):
                break
            self._sent[above] = True
            found.append(above)
            room -= len(above)
        return np.sort(np.concatenate(found))

    def _columns(self, chosen: Chosen) -> RouteColumns:
        rows = self._reader.rows
        parents = np.frombuffer(rows.parent, np.int32)[chosen.row]
        chosen_rows, index = np.unique(chosen.row, return_inverse=True)
        order = np.argsort(self._ranks(chosen_rows)[index], kind="stable")
        above = parents[order]
        token = np.frombuffer(rows.token, U64)[above]
        return RouteColumns(
            parent=np.where(token != 0, token, np.frombuffer(rows.text, U64)[above]),
            tokens=np.frombuffer(rows.tokens, np.uint32)[chosen.row[order]],
            token=chosen.token[order],
            text=chosen.text[order],
            backend=chosen.backend[order],
            evidence=chosen.evidence[order],
        )

    def _ranks(self, ids: Numbers) -> Numbers:
        """Return a rank for each of these rows, greater than that of its parent if that is among them."""
        count = len(ids)
        self._place[ids] = np.arange(1, count + 1)
        above = self._place[np.frombuffer(self._reader.rows.parent, np.int32)[ids]].astype(np.int64) - 1
        self._place[ids] = 0
        if bool((above < np.arange(count)).all()):
            return np.arange(count)
        levels = (above >= 0).astype(np.int64)
        while bool((above >= 0).any()):  # each round doubles the distance that `above` reaches
            there = above >= 0
            levels += np.where(there, levels[above], 0)
            above = np.where(there, above[above], -1)
        return levels


def bucket_of(fingerprints: Fingerprints) -> Numbers:
    return (fingerprints >> BUCKET_SHIFT).astype(np.int64)
