"""Writing many claims of peers into the route table at once, column by column.

Rule: a merge does with each claim, parents before children, what `RouteTable.learn` would do; their trust is REMOTE.
Wholly new rows are appended with a few numpy calls and one update of the index; others are stored like a path.
Malformed and expired claims and those of no known backend are left out. A row hangs under the parent that its claim
names if that is known or came before it, else under the top: never in a circle. In a full table each new row evicts
one, as always. Invariants: those of the table (test_routes_bulk.py).
"""

from __future__ import annotations

from itertools import repeat

import numpy as np
import numpy.typing as npt

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table.route_values import U64, Claim, Numbers, RouteColumns, Trust
from ranvier_py.core.routing.route_table.rows import FORKED, Rows
from ranvier_py.core.routing.route_table.tree import Tree
from ranvier_py.core.routing.route_table.uses import PrefixUse

ONE = np.array([True])


class Merge:
    """One merge. `generations`: by backend id, the process that claims are of; -1 = leave out that backend's claims.
    `on_use`: called with what requests used; None if the claims do not come from requests just served."""

    def __init__(self, tree: Tree, generations: npt.NDArray[np.int32], now: float, on_use: PrefixUse | None) -> None:
        self._rows, self._leaves, self._claims = tree.rows, tree.leaves, tree.claims
        self._tree = tree
        self._generations = generations
        self._now = now
        self._on_use = on_use

    def run(self, columns: RouteColumns) -> None:
        columns = self._sound(columns)
        fresh, known = self._split(columns)
        if len(fresh):
            self._append(columns.at(fresh) if known else columns)
        if known:
            for claim in zip(*[column.tolist() for column in self._unsaid(columns.at(np.array(known)))], strict=True):
                self._merge_one(*claim)

    def _sound(self, columns: RouteColumns) -> RouteColumns:
        """Return these columns without malformed, expired and future claims, and those of unknown backends."""
        backend, evidence, generations = columns.backend, columns.evidence, self._generations
        good = (backend >= 0) & (backend < len(generations)) & (columns.tokens > 0)
        good &= (evidence > self._claims.horizon) & (evidence <= self._now)
        good &= (columns.token | columns.text) != 0
        good[good] = generations[backend[good]] >= 0
        columns = columns if bool(good.all()) else columns.at(np.flatnonzero(good))
        return columns._replace(text=np.where(columns.text == columns.token, U64(0), columns.text))

    def _split(self, columns: RouteColumns) -> tuple[Numbers, list[int]]:
        """Return the indices of claims on wholly new rows, one for each row, and those of all other claims. A new row
        whose parent gets its name from one of the latter is among these, since they are stored last."""
        known_names = self._rows.index.keys()
        tokens, texts = columns.token.tolist(), columns.text.tolist()
        names = [*filter(None, tokens), *filter(None, texts)]
        if known_names.isdisjoint(names) and len(set(names)) == len(names):
            return np.arange(len(tokens)), []
        seen: dict[int, None] = {}
        later: set[int] = set()  # names that are new with a claim on a known row
        fresh: list[int] = []
        known: list[int] = []
        for at, (above, token, text) in enumerate(zip(columns.parent.tolist(), tokens, texts, strict=True)):
            if token in known_names or text in known_names or token in seen or text in seen or above in later:
                known.append(at)
                later.update([name for name in (token, text) if name and name not in known_names and name not in seen])
                continue
            fresh.append(at)
            if token:
                seen[token] = None
            if text:
                seen[text] = None
        return np.array(fresh, np.int64), known

    def _unsaid(self, columns: RouteColumns) -> RouteColumns:
        """Return those of these claims that add something to what the rows' columns hold."""
        rows, get, zero = self._rows, self._rows.index.get, repeat(0)
        _, _, token, text, backend, evidence = columns
        by_text = np.array(list(map(get, text.tolist(), zero)), np.int64)
        row = np.where(token != 0, np.array(list(map(get, token.tolist(), zero)), np.int64), by_text)
        sent = (row > 0) & ((text == 0) | (by_text == row))
        sent &= np.frombuffer(rows.backend, np.int16)[row] == backend
        sent &= np.frombuffer(rows.generation, np.int32)[row] == self._generations[backend]
        sent &= np.frombuffer(rows.evidence, np.int32)[row] >= evidence
        sent &= (np.frombuffer(rows.parent, np.int32)[row] != 0) | (columns.parent == 0)
        return columns.at(np.flatnonzero(~sent))

    def _append(self, columns: RouteColumns) -> None:
        """Create rows with their claims, place them, and queue them for eviction."""
        rows, tree, claims = self._rows, self._tree, self._claims
        room = self._make_room(len(columns.token))
        if room < len(columns.token):
            tree.counters.refused += len(columns.token) - room
            columns = columns.at(np.arange(room))
        if not room:
            return
        ids = allot(rows, room)
        generations = self._generations[columns.backend]
        self._fill(ids, columns, generations)
        numbers = ids.tolist()
        for names in (columns.token, columns.text):
            rows.index.update(zip(names.tolist(), numbers, strict=True))
        rows.index.pop(0, None)  # 0 is no name
        parents = self._parents(ids, columns.parent)
        place(rows, ids, parents)
        rows.count += room
        tree.counters.created += room
        claims.counts[Trust.REMOTE] += room
        self._hand_up(columns, parents, generations)
        if not self._leaves.takes_inner:
            ids = ids[np.frombuffer(rows.child, np.int32)[ids] == 0]
        self._leaves.push_many(ids)

    def _make_room(self, wanted: int) -> int:
        """Evict rows until `wanted` new ones fit. Returns how many fit."""
        capacity = self._rows.rows_max - 1
        wanted = min(wanted, capacity)
        while self._rows.count + wanted > capacity:
            if not self._tree.evict():
                return capacity - self._rows.count
        return wanted

    def _fill(self, ids: Numbers, columns: RouteColumns, generations: npt.NDArray[np.int32]) -> None:
        """Write the columns of new rows, with their first claims. The rows are not in the tree yet."""
        rows = self._rows
        np.frombuffer(rows.tokens, np.uint32)[ids] = columns.tokens
        np.frombuffer(rows.token, U64)[ids] = columns.token
        np.frombuffer(rows.text, U64)[ids] = columns.text
        np.frombuffer(rows.used, np.int32)[ids] = columns.evidence
        np.frombuffer(rows.backend, np.int16)[ids] = columns.backend
        np.frombuffer(rows.generation, np.int32)[ids] = generations
        np.frombuffer(rows.evidence, np.int32)[ids] = columns.evidence
        np.frombuffer(rows.trust, np.uint8)[ids] = Trust.REMOTE
        np.frombuffer(rows.best, np.uint8)[ids] = Trust.REMOTE

    def _parents(self, ids: Numbers, names: npt.NDArray[np.uint64]) -> Numbers:
        """Return the parents of new rows; 0, the top, where the named one is unknown or a new row that comes later."""
        parents = np.array(list(map(self._rows.index.get, names.tolist(), repeat(0))), np.int64)
        unplaced = np.frombuffer(self._rows.parent, np.int32)[parents] < 0
        parents[unplaced & (parents >= ids)] = 0
        return parents

    def _hand_up(self, columns: RouteColumns, parents: Numbers, generations: npt.NDArray[np.int32]) -> None:
        """Keep the monotone rule: raise the claim of a new row from its parent, if that lacks it."""
        rows = self._rows
        lacking = parents > 0
        lacking &= (
            (np.frombuffer(rows.backend, np.int16)[parents] != columns.backend)
            | (np.frombuffer(rows.generation, np.int32)[parents] != generations)
            | (np.frombuffer(rows.evidence, np.int32)[parents] < columns.evidence)
        )
        if self._on_use is not None:
            self._note_uses(self._on_use, columns, parents, lacking)
        (of,) = lacking.nonzero()
        if len(of):
            self._claims.raise_many(parents[of], columns.backend[of], generations[of], columns.evidence[of])

    def _note_uses(
        self, on_use: PrefixUse, columns: RouteColumns, parents: Numbers, lacking: npt.NDArray[np.bool_]
    ) -> None:
        """Report uses before claims are raised: the tokens of new rows, which no backend had, and the prefixes above
        them where the parent lacks the claim."""
        rows = self._rows
        below = columns.tokens.astype(np.int64) - np.frombuffer(rows.tokens, np.uint32)[parents]
        first = int(columns.evidence.min())  # below 0 if it is older than this machine's clock
        places = (columns.backend.astype(np.int64) << 32) + (columns.evidence.astype(np.int64) - first)
        for place in np.unique(places).tolist():  # one report per backend and second
            of = places == place
            backend, second = BackendId(place >> 32), first + (place & 0xFFFF_FFFF)
            above = [(rows.key(row),) for row in np.unique(parents[of & lacking]).tolist()]
            tokens = int(below[of].clip(0).sum())
            on_use(above, backend, int(self._generations[backend]), second, tokens)

    def _merge_one(self, above: int, tokens: int, token: int, text: int, backend: int, evidence: int) -> None:
        """Store a claim on a row that is known by one name or both."""
        rows, index = self._rows, self._rows.index
        claim = Claim(int(self._generations[backend]), Trust.REMOTE, evidence)
        row, by_text, upper = index.get(token or text, 0), index.get(text, 0), index.get(above, 0)
        if self._on_use is not None:
            prompt = ((tokens, token, text), (0, 0, above))
            self._on_use((prompt,), BackendId(backend), claim.generation, evidence, 0)
        if not row and by_text and not rows.token[by_text] and upper in (0, rows.parent[by_text]):
            row = by_text  # peers send a new chat's texts at once; this claim brings its tokens
            self._tree.attach(row, tokens, token)
        if row and (not text or by_text == row) and (rows.parent[row] or not upper):
            self._claims.raise_from(row, backend, claim)
            rows.used[row] = max(rows.used[row], evidence)
            return
        chain: list[PrefixKey] = [(tokens, token, text)]
        if upper and above not in (token, text):
            chain.append(rows.key(upper))
        self._tree.add(chain, backend, claim, whole=False)


def allot(rows: Rows, count: int) -> Numbers:
    """Return the numbers of new rows, ascending. The rows are unplaced and have no claims or names yet."""
    kept = max(0, len(rows.free) - count)
    ids = rows.free[kept:]
    del rows.free[kept:]
    ids.sort()
    fresh = count - len(ids)
    while rows.top + fresh > len(rows.parent):
        rows.grow()
    ids.extend(range(rows.top, rows.top + fresh))
    rows.top += fresh
    return np.array(ids, np.int64)


def place(rows: Rows, ids: Numbers, parents: Numbers) -> None:
    """Hang each of these unplaced rows under its parent, as `Rows.place` would one by one."""
    parent, child, left, right = (
        np.frombuffer(column, np.int32) for column in (rows.parent, rows.child, rows.left, rows.right)
    )
    order = np.argsort(parents, kind="stable")
    lower, upper = ids[order], parents[order]
    differs = upper[1:] != upper[:-1]
    first = np.concatenate((ONE, differs))  # the first of each parent: left of the child that was there before
    last = np.concatenate((differs, ONE))  # the last of each parent: becomes its first child
    older = np.concatenate((lower[:1], lower[:-1]))
    older[first] = child[upper[first]]
    parent[lower] = upper
    right[lower] = older
    followed = older > 0
    left[older[followed]] = lower[followed]
    np.frombuffer(rows.flags, np.uint8)[upper[followed]] |= FORKED
    first_children = lower[last]
    left[first_children] = 0
    child[upper[last]] = first_children
