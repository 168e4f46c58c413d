"""Which row stands for which prefix key, and where it hangs: the part of the route table that changes its shape.

One path (the keys of one prompt, deepest first) is stored in three steps: find or create the row of each key; hang
each row under the next one; raise the claim from the deepest row. Meanwhile the rows of the path are pinned: they are
neither evicted nor queued.

Rules: a key with both fingerprints has one row; a text-only row joins the token row of the same key. A row that is
new between two linked ones splits their link. Two chains for one prompt become one where the order is certain: by the
keys themselves, or by exact depths. Where it is not certain, or would close a circle, the rows stay unlinked and are
counted: the tree decides who is evicted first, not what matches, so a missing link costs nothing but order.
Invariant: who is removed is a leaf, or its only child takes its place, so every row keeps the ancestors that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table.claims import Claims
from ranvier_py.core.routing.route_table.leaves import LeafQueue
from ranvier_py.core.routing.route_table.route_values import Claim, RouteTableCounters
from ranvier_py.core.routing.route_table.rows import WHOLE, Rows

MERGE_CHILDREN_MAX = 64
"""A text-only row with more children than this is not merged: each has to be hung elsewhere."""


class Tree:
    """Rows in their places, at most `capacity` of them."""

    def __init__(self, rows: Rows, leaves: LeafQueue, claims: Claims, counters: RouteTableCounters) -> None:
        self.counters = counters
        self.rows = rows
        self.leaves = leaves
        self.claims = claims
        self._capacity = rows.rows_max - 1
        self._path: dict[int, None] = {}  # rows of the path at hand, deepest first
        self.pinned: dict[int, None] = {}  # these, and what else its keys name
        self.moved: list[int] = []  # rows that got another parent, which may lack their claims
        self.evicted = [0, 0, 0, 0]  # by best trust

    def add(self, chain: Sequence[PrefixKey], backend: int, claim: Claim, *, whole: bool) -> None:
        """Store a path, deepest first, and the claim. `whole`: it reaches the top without a gap."""
        refused = self.counters.refused
        path, linked = self._store(chain, claim.evidence)
        for row in path[:1] if linked else path:
            self.claims.raise_from(row, backend, claim)
        if linked and whole and refused == self.counters.refused:
            flags = self.rows.flags
            for row in path:
                flags[row] |= WHOLE  # a walk that meets it need not read on
        self._settle()

    def _store(self, chain: Sequence[PrefixKey], second: int) -> tuple[list[int], bool]:
        """The rows of a path, deepest first, created where missing and pinned until `_settle`.

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
        """The short path of a chat that goes on: hang a chain of new rows (deepest first) under a row, claims included.

        False, and nothing changed: a fingerprint is known or comes twice, or the chain does not fit.
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
        self.pinned[row] = None
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
        """Unpin the path: its leaves queue for eviction."""
        pinned, children, lanes = self.pinned, self.rows.child, self.rows.lane
        self._path, self.pinned = {}, {}
        inner = self.leaves.takes_inner
        for row in pinned:
            if not lanes[row] and (inner or not children[row]):
                self.tidy(row)

    def tidy(self, row: int) -> None:
        """Queue a row that became a leaf; remove it if it has no claims either, and then look at its parent."""
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
        """Remove the row that is first in order: a leaf, or one with a single child, which takes its place.

        False: there is none but those of the path at hand.
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
        """Pin what the path has already before anything is evicted for the rest of it."""
        get = self.rows.index.get
        for _, token, text in chain:
            for row in (get(token), get(text)):
                if row:
                    self.pinned[row] = None

    def _known(self, tokens: int, token: int, text: int, second: int) -> int:
        """The row of a key of which one fingerprint is known; 0 when it needs another row and there is no room."""
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
        if rows.count >= self._capacity and not self.evict():  # these tokens under a text that has other tokens
            self.counters.refused += 1
            return 0
        self.counters.created += 1
        return rows.create(tokens, token, 0, second)

    def attach(self, row: int, tokens: int, token: int) -> None:
        """Give a row that is known by its text the name and the depth of its tokens."""
        self.rows.token[row], self.rows.tokens[row] = token, tokens
        self.rows.index[token] = row
        self.counters.attached += 1

    def _absorb(self, source: int, target: int) -> None:
        """A text-only row is the same prefix as a token row: the latter takes its children, claims and names."""
        rows, claims = self.rows, self.claims
        if (
            source in self._path
            or sum(1 for _ in islice(rows.children(source), MERGE_CHILDREN_MAX + 1)) > MERGE_CHILDREN_MAX
        ):
            return
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
        """Hang each row of the path under the next one, from the top down: what is new has no children yet."""
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
        """Make `upper` an ancestor of `row`, as near to it as certain order allows. False: left as they were."""
        rows, parents = self.rows, self.rows.parent
        below, above = row, parents[row]
        while above > 0 and above not in self.pinned and self._is_deeper(above, upper):
            below, above = above, parents[above]
        one, other = above, upper if above > 0 or rows.child[below] else 0  # who has no children closes no circle
        while one > 0 or other > 0:  # both walk up at once: as a rule they are near, and the top is not
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
        """Whether it is certain that one row is the longer prefix of one prompt."""
        rows = self.rows
        return bool(rows.token[row] and rows.token[other]) and rows.tokens[row] > rows.tokens[other]

    def _hang(self, row: int, parent: int) -> None:
        """Move a row, with all below it, under another parent; -1 leaves it unplaced."""
        old = self.rows.detach(row) if self.rows.parent[row] >= 0 else 0
        if parent >= 0:
            self.rows.place(row, parent)
        self.moved.append(row)
        self.tidy(old)

    def _hand_up(self, path: Sequence[int]) -> None:
        """Restore the monotone rule: what was moved gives its live claims to its new ancestors."""
        rows, claims = self.rows, self.claims
        for row in (*path, *self.moved):
            for backend, claim in list(claims.of(row)):
                if claim.evidence > claims.horizon:
                    claims.raise_from(rows.parent[row], backend, claim)
        self.moved.clear()
