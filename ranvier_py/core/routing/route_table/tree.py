"""The shape of the route table: this module finds or creates the row of a prefix key and links it into the tree.

Rule: a key with both fingerprints has one row; a text-only row joins the token row of the same key. A row that is new
between two linked ones splits their link. Two chains for one prompt become one where the order is certain: by the keys
themselves, or by exact depths. Else the rows stay unlinked and are counted: the tree decides which row is evicted
first, not what matches, so that costs nothing but order.
Invariant: a removed row is a leaf, or its only child takes its place, so every row keeps its ancestors
(test_routes_properties.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table.claims import Claims
from ranvier_py.core.routing.route_table.route_values import Claim, RouteTableCounters
from ranvier_py.core.routing.route_table.rows import WHOLE, LeafQueue, Rows

MERGE_CHILDREN_MAX = 64
"""A text-only row with more children than this is not merged, because each of them has to be moved."""


class Tree:
    """Rows in their places, at most `capacity` of them."""

    def __init__(self, rows: Rows, leaves: LeafQueue, claims: Claims, counters: RouteTableCounters) -> None:
        self.counters = counters
        self.rows = rows
        self.leaves = leaves
        self.claims = claims
        self._capacity = rows.rows_max - 1
        self._path: dict[int, None] = {}  # rows of the path that is being stored, deepest first
        self.pinned: dict[int, None] = {}  # these, and all other rows that the path's keys name
        self.moved: list[int] = []  # rows that got a new parent, which may lack their claims
        self.evicted = [0, 0, 0, 0]  # by best trust

    def add(self, chain: Sequence[PrefixKey], backend: int, claim: Claim, *, whole: bool) -> None:
        """Store a path, deepest first, and the claim on it. `whole`: the path reaches the top without a gap."""
        refused = self.counters.refused
        path, linked = self._store(chain, claim.evidence)
        for row in path[:1] if linked else path:
            self.claims.raise_from(row, backend, claim)
        if linked and whole and refused == self.counters.refused:
            flags = self.rows.flags
            for row in path:
                flags[row] |= WHOLE  # a walk that meets this row need not read on
        self._settle()

    def _store(self, chain: Sequence[PrefixKey], second: int) -> tuple[list[int], bool]:
        """Find or create the rows of a path (deepest first), pin them until `_settle`, and link them.

        Returns the rows, each once, and whether each is an ancestor of the one before.
        """
        path, pinned = self._path, self.pinned
        if self.rows.count + len(chain) > self._capacity:
            self._pin_known(chain)
        rows, index, used = self.rows, self.rows.index, self.rows.used
        for tokens, token, text in chain:
            if token in index or text in index:
                row = self._known(tokens, token, text, second)
            elif rows.count < self._capacity or self.evict():
                row = rows.create(tokens, token, text, second)
                self.counters.created += 1
            else:
                self.counters.refused += 1
                continue
            if row and row not in path:
                path[row] = pinned[row] = None
                if used[row] != second:
                    used[row] = max(used[row], second)
        created = list(path)
        return created, self._link(created)

    def extend(self, row: int, chain: Sequence[PrefixKey], backend: int, claim: Claim, *, whole: bool) -> bool:
        """Hang a chain of new rows (deepest first) under a row, and claim them: the shortcut for a chat that goes on.

        False, with nothing changed: a fingerprint is known or comes twice, or the chain is too long for the table.
        """
        rows, index, capacity = self.rows, self.rows.index, self._capacity
        if len(chain) == 1:  # the usual turn; 0 is nobody's name
            _, token, text = chain[0]
            if capacity == 1 or token in index or text in index or token == text:
                return False
        else:
            names = [name for _, token, text in chain for name in (token, text) if name]
            if len(chain) >= capacity or len(set(names)) < len(names) or any(name in index for name in names):
                return False
        if self.leaves.takes_inner or rows.count + len(chain) > capacity:
            self.pinned[row] = None  # it must not be evicted to make room, and may be queued afterwards
        second = claim.evidence
        rows.used[row] = max(rows.used[row], second)
        above = row
        between: list[int] = []  # new rows that have a child
        for tokens, token, text in reversed(chain):
            if rows.count >= capacity and not self.evict():
                self.counters.refused += 1
                break
            new = rows.create(tokens, token, text, second)
            self.counters.created += 1
            rows.place(new, above)
            if whole:
                rows.flags[new] = WHOLE
            if above != row:
                between.append(above)
            above = new
        self.claims.raise_from(above, backend, claim)
        self._settle()
        if above != row:
            self.tidy(above)
        if between and self.leaves.takes_inner:
            for new in between:
                self.tidy(new)
        return True

    def _settle(self) -> None:
        """Unpin the path, and queue its leaves for eviction."""
        pinned, children, lanes = self.pinned, self.rows.child, self.rows.lane
        if not pinned:
            return
        self._path, self.pinned = {}, {}
        inner = self.leaves.takes_inner
        for row in pinned:
            if not lanes[row] and (inner or not children[row]):
                self.tidy(row)

    def tidy(self, row: int) -> None:
        """Queue a row if it became a leaf. If it has no claims either, remove it, and do the same for its parent."""
        rows, leaves = self.rows, self.leaves
        while row > 0 and not rows.child[row] and row not in self.pinned:
            if rows.best[row]:
                if leaves.is_inner(row):
                    leaves.remove(row)
                if not rows.lane[row]:
                    leaves.push(row)
                return
            leaves.remove(row)
            row = rows.release(row)
        if leaves.takes_inner and row > 0 and not rows.lane[row] and row not in self.pinned:
            leaves.push(row)

    def evict(self) -> bool:
        """Remove the first row of the queue: a leaf, or a row with a single child, which takes its place.

        False: only rows of the path that is being stored are left.
        """
        rows = self.rows
        while row := self.leaves.pop():
            if row in self.pinned:
                continue  # `_settle` queues it again
            self.evicted[rows.best[row]] += 1
            self.claims.drop_all(row)
            self.tidy(rows.splice(row) if rows.child[row] else rows.release(row))
            return True
        return False

    def _pin_known(self, chain: Sequence[PrefixKey]) -> None:
        """Pin the rows that the path's keys find, so that none of them is evicted to make room for the others."""
        get = self.rows.index.get
        for _, token, text in chain:
            for row in (get(token), get(text)):
                if row:
                    self.pinned[row] = None

    def _known(self, tokens: int, token: int, text: int, second: int) -> int:
        """Return the row of a key with a known fingerprint; 0 when the key needs a new row and there is no room."""
        rows = self.rows
        by_token = rows.index.get(token, 0) if token else 0
        by_text = rows.index.get(text, 0) if text else 0
        if by_token:
            if text and not by_text:
                rows.add_text(by_token, text)
            elif by_text and by_text != by_token and not rows.token[by_text]:
                self._absorb(by_text, by_token)
            return by_token
        if by_text and not token:
            return by_text
        if by_text and not rows.token[by_text]:
            self.attach(by_text, tokens, token)
            return by_text
        if rows.count >= self._capacity and not self.evict():  # the text's row has other tokens
            self.counters.refused += 1
            return 0
        self.counters.created += 1
        return rows.create(tokens, token, 0, second)

    def attach(self, row: int, tokens: int, token: int) -> None:
        """Give a text-only row its token fingerprint, and its exact depth."""
        self.rows.token[row], self.rows.tokens[row] = token, tokens
        self.rows.index[token] = row
        self.counters.attached += 1

    def _absorb(self, source: int, target: int) -> None:
        """Merge a text-only row into the token row of the same prefix: move its children, live claims and texts."""
        rows, claims = self.rows, self.claims
        if (
            source in self._path
            or sum(1 for _ in islice(rows.children(source), MERGE_CHILDREN_MAX + 1)) > MERGE_CHILDREN_MAX
        ):
            return
        self.pinned[source] = self.pinned[target] = None  # without claims, either would go with its last child
        if rows.is_above(source, target):
            if rows.parent[target] != source:
                return
            self._hang(target, rows.parent[source])
        for child in list(rows.children(source)):
            self._hang(child, target)
        for backend, claim in claims.of(source):
            if claim.evidence > claims.horizon:
                claims.raise_from(target, backend, claim)
        rows.used[target] = max(rows.used[target], rows.used[source])
        rows.take_texts(source, target)
        claims.drop_all(source)
        self.leaves.remove(source)
        self.pinned.pop(source, None)
        self.moved.append(target)
        self.tidy(rows.release(source))
        self.counters.merged += 1

    def _link(self, path: Sequence[int]) -> bool:
        """Hang each row of the path under the next one, top first: new rows have no children yet. False: not all."""
        rows, parents, children = self.rows, self.rows.parent, self.rows.child
        linked = True
        upper = 0
        for lower in reversed(path):
            parent = parents[lower]
            if parent < 0 and not children[lower]:
                rows.place(lower, upper)
            elif parent != upper and upper and not self._lift(lower, upper):
                linked = False
                self.counters.unlinked += 1
            if parents[lower] < 0:
                rows.place(lower, 0)
            upper = lower
        if self.moved:
            self._hand_up(path)
        return linked

    def _lift(self, row: int, upper: int) -> bool:
        """Make `upper` an ancestor of `row`, as near as is certain to be right. False: nothing was changed."""
        rows, parents = self.rows, self.rows.parent
        below, above = row, parents[row]
        while above > 0 and above not in self.pinned and self._is_deeper(above, upper):
            below, above = above, parents[above]
        one, other = above, upper if above > 0 or rows.child[below] else 0  # a childless row closes no circle
        while one > 0 or other > 0:  # walk up both at once: as a rule they are near, and the top is far
            if one == upper:
                return True
            if other == below:
                return False
            if other == above:
                self._hang(below, upper)
                return True
            one, other = parents[one] if one > 0 else 0, parents[other] if other > 0 else 0
        if above > 0 and above not in self.pinned and not self._is_deeper(upper, above):
            return False
        if above > 0 and (parents[upper] <= 0 or rows.is_above(parents[upper], above)):
            self._hang(upper, above)
        self._hang(below, upper)
        return True

    def _is_deeper(self, row: int, other: int) -> bool:
        """Whether `row` is certainly deeper than `other`, given that both are prefixes of one prompt."""
        rows = self.rows
        return bool(rows.token[row] and rows.token[other]) and rows.tokens[row] > rows.tokens[other]

    def _hang(self, row: int, parent: int) -> None:
        """Move a row and its subtree under another parent; -1 leaves it unplaced."""
        old = self.rows.detach(row) if self.rows.parent[row] >= 0 else 0
        if parent >= 0:
            self.rows.place(row, parent)
        self.moved.append(row)
        self.tidy(old)

    def _hand_up(self, path: Sequence[int]) -> None:
        """Restore the monotone rule: give live claims of the path, and of moved rows, to their ancestors."""
        rows, claims = self.rows, self.claims
        for row in (*path, *self.moved):
            for backend, claim in list(claims.of(row)):
                if claim.evidence > claims.horizon:
                    claims.raise_from(rows.parent[row], backend, claim)
        self.moved.clear()
