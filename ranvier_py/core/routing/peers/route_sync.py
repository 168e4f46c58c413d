"""The route table among peers: what this node learns becomes route updates, peers' updates become REMOTE claims.

*Out*: new routes, each with the generation of the process that served it; removals go first, so peers end with what is
true here. *In*: rows of backends that this node has, at the age that the update gives; a later generation is first
started in the registry, an earlier one is dropped. A removal withdraws the claim and all below it, unless its evidence
is younger. *Side state* is what no row has: owners (`routing.owners`) and checkpoints, in updates of its own.
Bound: HELD_MAX rows of each kind are held back; beyond, the oldest leave at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from math import ceil, inf
from types import MappingProxyType
from typing import NamedTuple, cast

from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync
from ranvier_py.core.routing.checkpoints.checkpoints import Checkpoints, NewMark
from ranvier_py.core.routing.owners import NewOwner, Owners
from ranvier_py.core.routing.peers.route_updates import (
    CHECKPOINTS,
    ENTRIES_MAX,
    OWNED,
    REMOVED,
    ROWS_MAX,
    BadRouteUpdate,
    ProcessUpdate,
    UpdateColumns,
    UpdateRow,
    decode_columns,
    decode_process,
    encode_process,
    encode_rows,
    kind_of,
)
from ranvier_py.core.routing.peers.table_copy import TableCopy
from ranvier_py.core.routing.route_table import NewRoutes, RouteTable, Trust, WithdrawnRoute
from ranvier_py.core.routing.route_table.orphans import Orphans, PeerRows
from ranvier_py.core.routing.route_table.recent_removals import ROUNDING_S

TEXTS_WAIT_S = 2.0
"""How long the texts of a continued chat wait for their tokens. Peers know the engine of the earlier turns, so they can
place the next turn. A new chat is sent at once: with a burst at all nodes, each must learn where the first one went."""

GATHER_S = 0.5
"""Texts whose tokens did not come leave together, this far apart: many rows at once cost a receiver less for each."""

CONFIRMED_WAIT_S = 1.0  # how long a row that only the engine reported waits for the update of the node that served it
HELD_MAX = 16_384

MERGED_MIN = 16
"""From this many rows in one message they are merged into the table column by column; fewer are learned one by one."""

KIND_NAMES = MappingProxyType({REMOVED: "removed", OWNED: "owned", CHECKPOINTS: "checkpoints"})

PeerNames = Mapping[tuple[BackendId, int], tuple[int, int] | None]  # what peers call a process; None: it is gone

PATH_MIN = 4
"""A path of at least this many rows is an update of its own, which names one parent only."""

ALIKE_S = 1.0
"""An update gives all its rows the oldest evidence among them, so their evidence is no further apart than this."""

PIECE_MAX = 1024
"""Entries of side state that are encoded at a time: in about 2 ms, to 20 kB, like a chunk of rows."""

Process = tuple[BackendId, int]  # a backend and its generation


class SidePiece(NamedTuple):
    """Some side state of this node."""

    owners: Iterable[NewOwner] = ()
    marks: Iterable[NewMark] = ()


@dataclass(slots=True)
class RouteSyncCounters:
    """What happens to routes on their way between a table and its peers."""

    sent: int = counter("Route updates made of what this node learned.")
    received: int = counter("Route updates of peers that were applied.")
    rows: int = counter("New rows by route updates of peers.")
    bad: int = counter("Messages of peers that should hold a route update and do not.")
    void: int = counter("Route updates of an earlier generation, or of a backend that this node does not have.")
    outdated: int = counter("Route rows and removals not sent: their process or backend was gone.")
    spared: int = counter("Route rows not sent by themselves because a longer update has them.")
    gone: int = counter("Route rows withdrawn before they were sent.")
    entries_sent: dict[str, int] = counter("Entries of route updates sent to peers, by kind.", label="kind")
    entries_received: dict[str, int] = counter("Entries of route updates received from peers, by kind.", label="kind")
    removals_withdrawn: int = counter("Claims of routes withdrawn by peers' removals, each with what was below it.")
    removals_younger: int = counter("Claims of routes that a peer's removal left alone for their younger evidence.")

    def __post_init__(self) -> None:
        for by_kind in (self.entries_sent, self.entries_received):
            by_kind.update(dict.fromkeys(KIND_NAMES.values(), 0))


class PendingRow(NamedTuple):
    """One route that is still to be sent: a prefix that a backend holds."""

    holder: tuple[BackendId, int]  # the backend and its generation
    parent: int  # a fingerprint of the row above, or 0
    tokens: int
    token: int
    text: int
    at: float  # of the evidence


class HeldRows:
    """Rows that are held back until the same row comes with more in it, or for `wait_s`; oldest first."""

    def __init__(self, wait_s: float, gather_s: float = 0.0) -> None:
        self._wait_s = wait_s
        self._gather_s = gather_s
        self._rows: dict[tuple[BackendId, int], PendingRow] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def hold(self, rows: Iterable[PendingRow]) -> None:
        for row in rows:
            self._rows.setdefault((row.holder[0], row.token or row.text), row)

    def drop(self, backend: BackendId, name: int) -> bool:
        """Drop a held row, since it was sent with more in it. Returns whether it was held."""
        return self._rows.pop((backend, name), None) is not None

    def release(self, now: float, *, everything: bool) -> Sequence[PendingRow]:
        """Take out the rows that have waited long enough, those beyond HELD_MAX, or `everything`."""
        rows = self._rows
        before = inf if everything else now - self._wait_s
        excess = len(rows) - HELD_MAX
        if not rows or (excess <= 0 and next(iter(rows.values())).at > before - self._gather_s):
            return ()
        found: list[PendingRow] = []
        for row in rows.values():
            if row.at > before and len(found) >= excess:
                break
            found.append(row)
        for row in found:
            del rows[row.holder[0], row.token or row.text]
        return found


class RouteSync:
    """Turns the routes of one table into updates and back (see the module). `copy` is the table as peers see it."""

    def __init__(
        self,
        table: RouteTable,
        registry: RegistrySync,
        owners: Owners,
        checkpoints: Checkpoints,
    ) -> None:
        self.counters = RouteSyncCounters()
        self._owners = owners
        self._checkpoints = checkpoints
        self.copy = TableCopy(table, registry)
        self._table = table
        self._registry = registry
        self._known = table.rows.index
        self._orphans = Orphans(table)
        self._texts = HeldRows(TEXTS_WAIT_S, GATHER_S)
        self._confirmed = HeldRows(CONFIRMED_WAIT_S)

    @property
    def waiting(self) -> int:
        """How many rows are held back."""
        return len(self._texts) + len(self._confirmed)

    @property
    def orphans(self) -> int:
        """How many pieces of peers' paths wait for the rows above them."""
        return len(self._orphans)

    # --- out --------------------------------------------------------------------------------------------------------

    def updates(self, now: float, *, everything: bool = False) -> Iterator[tuple[bytes, float]]:
        """Yield what may be sent now, each update with the time of its evidence, once. `everything`: hold nothing, as
        before a peer reads the table: what only that peer has, and no log, would be lost to the others when we die."""
        yield from self._removals()
        for update in self.side_updates(SidePiece(self._owners.new.taken(), self._checkpoints.new.taken()), now):
            yield update, now
        fresh = self._fresh(everything=everything)
        for rows in (self._texts.release(now, everything=everything), fresh):
            yield from self._packed(rows)
        yield from self._packed(list(map(self._with_text, self._confirmed.release(now, everything=everything))))

    def _fresh(self, *, everything: bool) -> Sequence[PendingRow]:
        """Return the new rows that need not wait, and hold the others back, as an update with more mostly follows."""
        new, found = self._table.outgoing.new, list[PendingRow]()
        while new:
            routes = new.popleft()
            rows = rows_of(routes)
            tokens, texts = [row.token for row in rows], [row.text for row in rows]
            if not everything and routes.parent and not any(tokens):
                self._texts.hold(rows)
            elif not everything and not any(texts) and self._is_confirmed(rows[-1]):
                self._confirmed.hold(rows)
            else:
                for token, text in zip(tokens, texts, strict=True) if len(self._texts) else ():
                    if token and text:
                        self.counters.spared += self._texts.drop(routes.backend, text)
                found += rows
        return found

    def _is_confirmed(self, row: PendingRow) -> bool:
        """Whether the engine reported this row, and this node did not serve it."""
        claim = self._table.claim(row.token, row.holder[0])
        return claim is not None and claim.trust == Trust.CONFIRMED

    def _with_text(self, row: PendingRow) -> PendingRow:
        """Add the text fingerprint: engines report tokens alone, and a peer may have evicted the row meanwhile."""
        known = self._table.prefix_key_of(row.token)
        return row._replace(text=known[2]) if known is not None else row

    def _packed(self, rows: Sequence[PendingRow]) -> Iterator[tuple[bytes, float]]:
        """Encode rows: each path of PATH_MIN rows or more by itself, the rest together."""
        if not rows:
            return
        names = {holder: self._registry.name_of(*holder) for holder in dict.fromkeys([row.holder for row in rows])}
        loose: list[PendingRow] = []
        for path in paths_of(self._believed(rows, names)):
            if len(path) >= PATH_MIN:
                for start in range(0, len(path), ROWS_MAX):
                    yield self._encoded(path[start : start + ROWS_MAX], names)
                continue
            if loose and (len(loose) + len(path) > ROWS_MAX or abs(path[0].at - loose[0].at) > ALIKE_S):
                yield self._encoded(loose, names)
                loose = []
            loose += path
        if loose:
            yield self._encoded(loose, names)

    def _believed(self, rows: Sequence[PendingRow], names: PeerNames) -> list[PendingRow]:
        """Return the rows without those whose process is gone or whose claim was withdrawn."""
        named = [row for row in rows if names[row.holder] is not None]
        holds = self._table.holds
        found = [row for row in named if holds(row.token or row.text, row.holder[0])]
        self.counters.outdated += len(rows) - len(named)
        self.counters.gone += len(named) - len(found)
        return found

    def _encoded(self, rows: Sequence[PendingRow], names: PeerNames) -> tuple[bytes, float]:
        self.counters.sent += 1
        sent = [UpdateRow(cast("tuple[int, int]", names[row.holder]), *row[1:5]) for row in rows]
        return encode_rows(sent), min([row.at for row in rows])

    def _removals(self) -> Iterator[tuple[bytes, float]]:
        withdrawn = self._table.outgoing.withdrawn
        waiting: dict[int, list[WithdrawnRoute]] = {}
        while withdrawn:
            gone = withdrawn.popleft()
            # of one second only, since peers keep claims that are younger than a removal
            waiting.setdefault(int(gone.at), []).append(gone)
        for routes in waiting.values():
            entries = [((route.backend, route.generation), (route.fingerprint,)) for route in routes]
            for update in self._by_process(REMOVED, entries):
                yield update, min([route.at for route in routes])

    def side_state(self) -> Iterator[SidePiece]:
        """Yield all side state that a peer may lack, PIECE_MAX entries at a time; only the latest entries of many."""
        owners, marks = self._owners.latest(), self._checkpoints.latest()
        while owned := list(islice(owners, PIECE_MAX)):
            yield SidePiece(owned)
        while states := list(islice(marks, PIECE_MAX)):
            yield SidePiece(marks=states)

    def side_updates(self, piece: SidePiece, now: float) -> Iterator[bytes]:
        """Yield updates in which each entry has its own age: a response lives longer than the update that names it."""
        owners, marks = piece
        owned = [((owner.backend, owner.generation), (digest, age(owner.at, now))) for digest, owner in owners]
        yield from self._by_process(OWNED, owned)
        states = [
            ((mark.backend, mark.generation), (mark.name, mark.position, mark.mark, age(mark.at, now)))
            for mark in marks
        ]
        yield from self._by_process(CHECKPOINTS, states)

    def _by_process(self, kind: int, entries: Iterable[tuple[Process, tuple[int, ...]]]) -> Iterator[bytes]:
        """Yield updates of these entries, in their order, without those of processes that are gone."""
        waiting: dict[Process, list[tuple[int, ...]]] = {}
        for process, entry in entries:
            waiting.setdefault(process, []).append(entry)
        sent = self.counters.entries_sent
        for process, found in waiting.items():
            name = self._registry.name_of(*process)
            if name is None:
                self.counters.outdated += len(found) * (kind == REMOVED)
                continue
            sent[KIND_NAMES[kind]] += len(found)
            for start in range(0, len(found), ENTRIES_MAX[kind]):
                columns = list(zip(*found[start : start + ENTRIES_MAX[kind]], strict=True))
                yield encode_process(ProcessUpdate(kind, name, columns))

    # --- in ---------------------------------------------------------------------------------------------------------

    def receive(self, updates: Iterable[tuple[float, bytes]], now: float) -> int:
        """Learn a peer's updates, given as (age in seconds, bytes). Never raises: bytes that are no update are counted.

        Returns how many updates brought something new. Their rows are learned together, which is cheapest for each.
        """
        pieces: list[PeerRows] = []
        generations: dict[BackendId, int] = {}
        brought = 0
        for age_s, data in updates:
            self.counters.received += 1
            piece = None
            try:
                if kind_of(data) is None:
                    piece = self._piece(decode_columns(data), now - age_s, now)
                else:
                    update = decode_process(data)
            except BadRouteUpdate:
                self.counters.bad += 1
                continue
            if piece is None and update.kind != REMOVED:
                brought += self._take_side_state(update, now - age_s, now)
                continue
            if piece is None or any(generations.get(*each) != each[1] for each in piece.generations.items()):
                self._learn(pieces, generations, now)  # before a removal, and before rows of another generation
                pieces, generations = [], {}
            if piece is None:
                self._follow(update, now - age_s, now)
            elif piece.backend:
                brought += not all(map(self._known.__contains__, piece.names()))
                pieces.append(piece)
                generations |= piece.generations
        self._learn(pieces, generations, now)
        return brought

    def _piece(self, columns: UpdateColumns, at: float, now: float) -> PeerRows:
        """Return the rows of an update whose holders are known here, and release rows held back for them."""
        holders = [self._registry.holder(*name, now) for name in columns.backends]
        ids = [BackendId(-1) if holder is None else holder[0] for holder in holders]
        rows: Sequence[Sequence[int]] = (list(map(ids.__getitem__, columns.backend)), *columns[2:])
        removals = self._table.outgoing.removals
        dropped = removals.at.keys()
        if None in holders or not (dropped.isdisjoint(rows[3]) and dropped.isdisjoint(rows[4])):
            self.counters.void += None in holders
            here = [
                backend >= 0 and not removals.refuse(token, text, BackendId(backend), at, now)
                for backend, _, _, token, text in zip(*rows, strict=True)
            ]
            rows = [list(compress(column, here)) for column in rows]
        backends, parent, tokens, token, text = rows
        if len(self._confirmed):
            for backend, name in zip(backends, token, strict=True):
                self.counters.spared += self._confirmed.drop(BackendId(backend), name)
        generations = dict([holder for holder in holders if holder is not None])
        return PeerRows(
            backend=cast("Sequence[BackendId]", backends),
            parent=parent,
            tokens=tokens,
            token=token,
            text=text,
            generations=generations,
            at=at,
        )

    def _learn(self, pieces: Sequence[PeerRows], generations: Mapping[BackendId, int], now: float) -> None:
        if sum([len(piece.backend) for piece in pieces]) >= MERGED_MIN:
            self.counters.rows += self._orphans.merge(pieces, generations, now)
            return
        for piece in pieces:
            for top, path in piece.paths():
                backend, parent = piece.backend[top], piece.parent[top]
                self.counters.rows += self._orphans.learn(path, parent, backend, generations[backend], piece.at)

    def take_side_state(self, updates: Iterable[bytes], at: float, now: float) -> None:
        """Learn a peer's answer, written at `at` or later. Never raises: updates that are no side state are counted."""
        for data in updates:
            try:
                update = decode_process(data)
            except BadRouteUpdate:
                update = None
            if update is None or update.kind == REMOVED:
                self.counters.bad += 1
            else:
                self._take_side_state(update, at, now)

    def _take_side_state(self, update: ProcessUpdate, at: float, now: float) -> bool:
        """Take over entries written at `at`. Returns whether any of them is new here."""
        process = self._process(update, now)
        if process is None:
            return False
        if update.kind == OWNED:
            entries = zip(*update.columns, strict=True)
            return sum([self._owners.take(digest, *process, at - age_s) for digest, age_s in entries]) > 0
        return self._checkpoints.take(
            *process, [(*mark, at - age_s) for *mark, age_s in zip(*update.columns, strict=True)]
        )

    def _follow(self, removal: ProcessUpdate, at: float, now: float) -> None:
        process = self._process(removal, now)
        if process is None:
            return
        backend, counters = process[0], self.counters
        for fingerprint in removal.columns[0]:
            self._table.outgoing.removals.note(fingerprint, backend, at + ROUNDING_S)
            claim = self._table.claim(fingerprint, backend)
            if claim is not None and claim.evidence > at:
                counters.removals_younger += 1
                self._table.outgoing.insist(fingerprint, backend)
            elif claim is not None:
                counters.removals_withdrawn += self._table.withdraw(fingerprint, backend)

    def _process(self, update: ProcessUpdate, now: float) -> Process | None:
        """Return the process that this update names; None if it is gone, or this node does not have its backend."""
        process = self._registry.holder(*update.backend, now)
        if process is None:
            self.counters.void += 1
        else:
            self.counters.entries_received[KIND_NAMES[update.kind]] += len(update.columns[0])
        return process


def age(at: float, now: float) -> int:
    """Return an age in whole seconds, rounded up, so that nothing gets younger on its way."""
    return max(0, ceil(now - at))


def rows_of(routes: NewRoutes) -> list[PendingRow]:
    """Split what one call of `learn` added into rows, parents before children."""
    backend, generation, chain, parent, at = routes
    holder = (backend, generation)
    rows: list[PendingRow] = []
    last = 0  # the name of the row before, which may be the same row: several texts may end in one block
    for tokens, token, text in reversed(chain):
        name = token or text
        if last and name != last:
            parent = last
        above = 0 if parent in (token, text) else parent
        rows.append(
            PendingRow(
                holder=holder, parent=above, tokens=tokens, token=token, text=text if text != token else 0, at=at
            )
        )
        last = name
    return rows


def paths_of(rows: Sequence[PendingRow]) -> Iterator[Sequence[PendingRow]]:
    """Cut rows into paths: runs of rows of one holder, each row the child of the row before it."""
    start, above, last = 0, 0, None
    for at, (holder, parent, _, token, text, evidence) in enumerate(rows):
        if holder != last or parent != above or abs(evidence - rows[start].at) > ALIKE_S:
            if at:
                yield rows[start:at]
            start, last = at, holder
        above = token or text
    if rows:
        yield rows[start:]
