"""The route table among peers: what is learned here becomes route updates, peers' updates become REMOTE claims.

*Out*: a route is sent with the generation of the process that served it; not when that process is gone, nor when the
claim was withdrawn meanwhile. Removals go first, so peers end with what is true here, those of one second together:
what an answer refutes was gone when its request was sent, and what was used since is not. Two kinds of new routes wait
a moment, since mostly the same is sent with more in it: texts of a chat that goes on wait for their tokens, and what an
engine reported itself for the update of the node that served the prompt. Nothing waits once the table is shown to a
peer: what only one peer has and no log holds would be lost to the others when we die.

*In*: an update is learned for backends of this node alone, at the age it came with. Of an earlier generation it is
dropped; a later one starts in the registry first. A removal withdraws the claims of that engine and what is below them,
unless their evidence is younger: then the engine stored it again, and whoever served that sends it once more. Whoever
follows a removal does not send it: that is for the reader of the engine's events.

What an engine alone keeps (`routing.owners`) goes the same way, as updates of their own: no row knows of it. So do
checkpoints of hybrid models' backends, which come and go apart from the keys and values of their rows.

Bound: HELD_MAX rows of each kind wait; of more, the oldest leave at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from math import inf
from typing import NamedTuple, cast

from ranvier_py.core.gossip.backend_state.registry_sync import RegistrySync
from ranvier_py.core.gossip.replication.route_updates import (
    MARKS_MAX,
    REMOVED_MAX,
    ROWS_MAX,
    BadRouteUpdate,
    Owned,
    Removal,
    StateMarks,
    UpdateColumns,
    UpdateRow,
    decode_columns,
    decode_marks,
    decode_owned,
    decode_removal,
    encode_marks,
    encode_owned,
    encode_removal,
    encode_rows,
    is_marks,
    is_owned,
    is_removal,
)
from ranvier_py.core.gossip.replication.table_copy import TableCopy
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter
from ranvier_py.core.routing.checkpoints.checkpoints import Checkpoints, NewMark
from ranvier_py.core.routing.owners import Owners
from ranvier_py.core.routing.route_table import NewRoutes, RouteTable, Trust, WithdrawnRoute
from ranvier_py.core.routing.route_table.orphans import Orphans, PeerRows

TEXTS_WAIT_S = 2.0
"""So long the texts of a chat that goes on wait for their tokens. Its next turn goes to the engine of the turns before,
which peers know. A new chat is sent at once: a crowd at all nodes must find out where the first one went."""

GATHER_S = 0.5
"""Texts whose tokens did not come leave together so often: many rows at once cost a receiver less than one by one."""

CONFIRMED_WAIT_S = 1.0
HELD_MAX = 16_384

MERGED_MIN = 16
"""Rows of one message that are written into the table column by column; fewer are learned one by one."""

PeerNames = Mapping[tuple[BackendId, int], tuple[int, int] | None]  # what peers call a process; None: it is gone

PATH_MIN = 4
"""A path of so many rows is an update of its own, which names one parent only."""


@dataclass(slots=True)
class RouteSyncCounters:
    """What happens to routes on their way between a table and its peers."""

    sent: int = counter("Route updates made of what this node learned.")
    received: int = counter("Route updates of peers.")
    rows: int = counter("New rows by route updates of peers.")
    bad: int = counter("Bytes of peers that are no route update.")
    void: int = counter("Route updates of an earlier generation, or of a backend that this node does not have.")
    outdated: int = counter("Rows and removals not sent: their process or backend was gone.")
    spared: int = counter("Rows not sent for themselves: the same was sent with more in it.")
    gone: int = counter("Rows withdrawn before they were sent.")
    removals_sent: int = counter("Fingerprints that an engine dropped, sent.")
    marks_sent: int = counter("Checkpoints of hybrid models that were learned or given up, sent.")
    marks_received: int = counter("Checkpoints of hybrid models that were learned or given up, received.")
    removals_received: int = counter("Fingerprints that an engine dropped, received.")
    removals_withdrawn: int = counter("Claims withdrawn by removals, each with what was below it.")
    removals_younger: int = counter("Claims that a removal left for their younger evidence.")


class PendingRow(NamedTuple):
    """A prefix that a backend holds, still to be sent."""

    holder: tuple[BackendId, int]  # and its generation
    parent: int  # a fingerprint of the row above, or 0
    tokens: int
    token: int
    text: int
    at: float  # of the evidence


class HeldRows:
    """Rows that wait for the same with more in it, oldest first."""

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
        """It was sent with more in it. Whether it waited."""
        return self._rows.pop((backend, name), None) is not None

    def release(self, now: float, *, everything: bool) -> Sequence[PendingRow]:
        """What waits no longer."""
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
    """See the module. `copy` is the table as peers see it."""

    def __init__(
        self,
        table: RouteTable,
        registry: RegistrySync,
        owners: Owners | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.counters = RouteSyncCounters()
        self._owners = owners
        self._checkpoints = checkpoints
        self.copy = TableCopy(table, registry)
        self._table = table
        self._registry = registry
        self._known = table.names()
        self._orphans = Orphans(table)
        self._texts = HeldRows(TEXTS_WAIT_S, GATHER_S)
        self._confirmed = HeldRows(CONFIRMED_WAIT_S)

    @property
    def waiting(self) -> int:
        """Rows that are held back."""
        return len(self._texts) + len(self._confirmed)

    @property
    def orphans(self) -> int:
        """Pieces of peers' paths that wait for the rows above them."""
        return len(self._orphans)

    # --- out --------------------------------------------------------------------------------------------------------

    def updates(self, now: float, *, everything: bool = False) -> Iterator[tuple[bytes, float]]:
        """What may be sent now, each with the time of its evidence; it is used up. `everything`: nothing waits on."""
        yield from self._removals()
        yield from self._owned()
        yield from self._marks()
        fresh = self._fresh(everything=everything)
        for rows in (self._texts.release(now, everything=everything), fresh):
            yield from self._packed(rows)
        yield from self._packed(list(map(self._with_text, self._confirmed.release(now, everything=everything))))

    def _fresh(self, *, everything: bool) -> Sequence[PendingRow]:
        """Of what came since the last time, what need not wait."""
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
        """Whether the engine reported it, and nobody here served it."""
        claim = self._table.claim(row.token, row.holder[0])
        return claim is not None and claim.trust == Trust.CONFIRMED

    def _with_text(self, row: PendingRow) -> PendingRow:
        """Engines name tokens alone, and a peer may have let go of the row meanwhile."""
        known = self._table.prefix_key_of(row.token)
        return row._replace(text=known[2]) if known is not None else row

    def _packed(self, rows: Sequence[PendingRow]) -> Iterator[tuple[bytes, float]]:
        """Long paths by themselves, what is left together."""
        if not rows:
            return
        names = {holder: self._registry.name_of(*holder) for holder in dict.fromkeys([row.holder for row in rows])}
        loose: list[PendingRow] = []
        for path in paths_of(self._believed(rows, names)):
            if len(path) >= PATH_MIN:
                for start in range(0, len(path), ROWS_MAX):
                    yield self._encoded(path[start : start + ROWS_MAX], names)
                continue
            if len(loose) + len(path) > ROWS_MAX:
                yield self._encoded(loose, names)
                loose = []
            loose += path
        if loose:
            yield self._encoded(loose, names)

    def _believed(self, rows: Sequence[PendingRow], names: PeerNames) -> list[PendingRow]:
        """Without those whose process is gone or whose claim was withdrawn."""
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
        waiting: dict[tuple[BackendId, int, int], list[WithdrawnRoute]] = {}
        while withdrawn:
            gone = withdrawn.popleft()
            waiting.setdefault((gone.backend, gone.generation, int(gone.at)), []).append(gone)
        for (backend, generation, _), routes in waiting.items():
            name = self._registry.name_of(backend, generation)
            if name is None:
                self.counters.outdated += len(routes)
                continue
            self.counters.removals_sent += len(routes)
            for start in range(0, len(routes), REMOVED_MAX):
                sent = routes[start : start + REMOVED_MAX]
                fingerprints = [route.fingerprint for route in sent]
                yield encode_removal(Removal(name, fingerprints)), min([route.at for route in sent])

    def _owned(self) -> Iterator[tuple[bytes, float]]:
        """What was learned of who keeps what."""
        waiting: dict[tuple[BackendId, int], dict[int, float]] = {}
        for digest, owner in self._owners.outgoing() if self._owners is not None else ():
            waiting.setdefault((owner.backend, owner.generation), {})[digest] = owner.at
        for (backend, generation), digests in waiting.items():
            name = self._registry.name_of(backend, generation)
            if name is None:
                self.counters.outdated += len(digests)
                continue
            names = list(digests)
            for start in range(0, len(names), REMOVED_MAX):
                sent = names[start : start + REMOVED_MAX]
                self.counters.sent += 1
                yield encode_owned(Owned(name, sent)), min(map(digests.__getitem__, sent))

    def _marks(self) -> Iterator[tuple[bytes, float]]:
        """Checkpoints that were learned, proved or given up, in the order in which that happened."""
        waiting: dict[tuple[BackendId, int], list[NewMark]] = {}
        for mark in self._checkpoints.outgoing() if self._checkpoints is not None else ():
            waiting.setdefault((mark.backend, mark.generation), []).append(mark)
        for (backend, generation), marks in waiting.items():
            name = self._registry.name_of(backend, generation)
            if name is None:
                self.counters.outdated += len(marks)
                continue
            for start in range(0, len(marks), MARKS_MAX):
                sent = marks[start : start + MARKS_MAX]
                self.counters.marks_sent += len(sent)
                found = [(mark.name, mark.position, mark.mark) for mark in sent]
                yield encode_marks(StateMarks(name, found)), min([mark.at for mark in sent])

    # --- in ---------------------------------------------------------------------------------------------------------

    def receive(self, updates: Iterable[tuple[float, bytes]], now: float) -> int:
        """Learn what a peer sent: updates, each after its age in seconds. Never raises: what is none is counted.

        Returns how many brought what was new here. Their rows are learned together, which costs least for each.
        """
        pieces: list[PeerRows] = []
        generations: dict[BackendId, int] = {}
        brought = 0
        for age_s, data in updates:
            self.counters.received += 1
            try:
                if is_owned(data):
                    brought += self._take_owned(decode_owned(data), now - age_s, now)
                    continue
                if is_marks(data):
                    brought += self._take_marks(decode_marks(data), now - age_s, now)
                    continue
                removal = decode_removal(data) if is_removal(data) else None
                piece = self._piece(decode_columns(data), now - age_s, now) if removal is None else None
            except BadRouteUpdate:
                self.counters.bad += 1
                continue
            if piece is None or any(generations.get(*each) != each[1] for each in piece.generations.items()):
                self._learn(pieces, generations, now)  # before a removal, and before what another process holds
                pieces, generations = [], {}
            if removal is not None:
                self._follow(removal, now - age_s, now)
            elif piece is not None and piece.backend:
                brought += not all(map(self._known.__contains__, piece.names()))
                pieces.append(piece)
                generations |= piece.generations
        self._learn(pieces, generations, now)
        return brought

    def _piece(self, columns: UpdateColumns, at: float, now: float) -> PeerRows:
        """The rows of an update whose holders are known."""
        holders = [self._registry.holder(*name, now) for name in columns.backends]
        ids = [BackendId(-1) if holder is None else holder[0] for holder in holders]
        rows: Sequence[Sequence[int]] = (list(map(ids.__getitem__, columns.backend)), *columns[2:])
        if None in holders:
            self.counters.void += 1
            here = [backend >= 0 for backend in rows[0]]
            rows = [list(compress(column, here)) for column in rows]
        backends, parent, tokens, token, text = rows
        if len(self._confirmed):
            for backend, name in zip(backends, token, strict=True):
                self.counters.spared += self._confirmed.drop(BackendId(backend), name)
        generations = dict([holder for holder in holders if holder is not None])
        return PeerRows(cast("Sequence[BackendId]", backends), parent, tokens, token, text, generations, at)

    def _learn(self, pieces: Sequence[PeerRows], generations: Mapping[BackendId, int], now: float) -> None:
        if sum([len(piece.backend) for piece in pieces]) >= MERGED_MIN:
            self.counters.rows += self._orphans.merge(pieces, generations, now)
            return
        for piece in pieces:
            for top, path in piece.paths():
                backend, parent = piece.backend[top], piece.parent[top]
                self.counters.rows += self._orphans.learn(path, parent, backend, generations[backend], piece.at)

    def _take_owned(self, owned: Owned, at: float, now: float) -> bool:
        """Whether any of it is new here."""
        holder = self._registry.holder(*owned.backend, now)
        if holder is None or self._owners is None:
            self.counters.void += 1
            return False
        return sum(self._owners.take(digest, *holder, at) for digest in owned.digests) > 0

    def _take_marks(self, received: StateMarks, at: float, now: float) -> bool:
        """Whether any of it is new here."""
        holder = self._registry.holder(*received.backend, now)
        if holder is None or self._checkpoints is None:
            self.counters.void += 1
            return False
        self.counters.marks_received += len(received.marks)
        return self._checkpoints.take(*holder, received.marks, at)

    def _follow(self, removal: Removal, at: float, now: float) -> None:
        holder = self._registry.holder(*removal.backend, now)
        if holder is None:
            self.counters.void += 1
            return
        backend, counters = holder[0], self.counters
        counters.removals_received += len(removal.fingerprints)
        for fingerprint in removal.fingerprints:
            claim = self._table.claim(fingerprint, backend)
            if claim is not None and claim.evidence > at:
                counters.removals_younger += 1
                self._table.outgoing.insist(fingerprint, backend)
            elif claim is not None:
                counters.removals_withdrawn += self._table.withdraw(fingerprint, backend)


def rows_of(routes: NewRoutes) -> list[PendingRow]:
    """One by one, parents before children."""
    backend, generation, chain, parent, at = routes
    holder = (backend, generation)
    rows: list[PendingRow] = []
    last = 0  # the name of the row before; several texts may end in one block
    for tokens, token, text in reversed(chain):
        name = token or text
        if last and name != last:
            parent = last
        above = 0 if parent in (token, text) else parent
        rows.append(PendingRow(holder, above, tokens, token, text if text != token else 0, at))
        last = name
    return rows


def paths_of(rows: Sequence[PendingRow]) -> Iterator[Sequence[PendingRow]]:
    """Runs of rows of one holder, each below the one before."""
    start, above, last = 0, 0, None
    for at, (holder, parent, _, token, text, _) in enumerate(rows):
        if holder != last or parent != above:
            if at:
                yield rows[start:at]
            start, last = at, holder
        above = token or text
    if rows:
        yield rows[start:]
