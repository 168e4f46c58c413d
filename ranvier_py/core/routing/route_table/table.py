"""The route table: which backend is believed to hold which prefix.

A radix tree of prefixes, found by fingerprint. A claim is live while its generation is the backend's current one and
its last evidence is younger than the TTL; a lookup is no evidence. Rule: a use of a row counts for its ancestors,
which inherit the last use of each child that is removed: a system prompt in use survives, and the deepest rows of an
idle chat go first. Bound: `capacity` rows; one more evicts the first of the queue. Invariants: those of `rows`,
`claims`, `tree`; a match equals brute force, and a withdrawal takes what hangs below it and no other
(test_routes_properties.py, test_routes_uses.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.placement import Holder
from ranvier_py.core.routing.route_table.bulk_writes import Merge
from ranvier_py.core.routing.route_table.claims import BEFORE_ALL, Claims, Hidden
from ranvier_py.core.routing.route_table.outgoing import OutgoingRoutes
from ranvier_py.core.routing.route_table.route_values import (
    BACKENDS_MAX,
    ROUTE_TTL_S,
    STANDARD,
    Claim,
    ClaimView,
    RouteColumns,
    RouteTableCounters,
    RouteTableOptions,
    RouteView,
    Trust,
    Unheld,
)
from ranvier_py.core.routing.route_table.rows import SHARED, WHOLE, Rows
from ranvier_py.core.routing.route_table.tree import Tree
from ranvier_py.core.routing.route_table.uses import PrefixUse, RouteUses
from ranvier_py.core.routing.route_table.utility_queue import make_queue

WITHDRAW_ROWS_MAX = 2000
"""Most rows that one call of `withdraw` looks at, some milliseconds of work. The next sweeps go on."""

WITHDRAWING_MAX = 16_384
"""Rows below which withdrawals are unfinished; of more the oldest is given up: claims stay there until they expire."""

REFUTE_ROWS_MAX = 2000
"""Most rows that `refute` looks at for one answer. Claims beyond these stay until they expire or are refuted."""

NOT_BY_ENGINE = -1.0

CHILDREN_COUNTED_MAX = 10_000  # the admin page does not count further

NO_DEPTHS: Mapping[int, int] = MappingProxyType({})

TOKENS_MAX = 2**32 - 1
FINGERPRINT_BITS = 64
GENERATION_MAX = 2**31 - 1
"""The greatest values that the columns hold."""


class RouteTable:
    """Prefix -> backends, learned from traffic, bounded in rows and in time.

    Args:
        capacity: most rows; there is one for each known prefix.
        ttl_s: life of a claim after its last evidence. Evidence is cut to whole seconds, so it is never longer.

    `now` is monotonic seconds, not negative, given by the caller. Generations of one backend only grow.
    `outgoing` has what peers must learn, `uses` reads from claims when prefixes were used. `on_use`, if set, is called
    before claims are raised. Only this package uses `rows`, `claims` and `tree`, except that the Router reads
    `rows.known_chain` and `rows.branches`."""

    def __init__(
        self, *, capacity: int = 1_000_000, ttl_s: float = ROUTE_TTL_S, options: RouteTableOptions = STANDARD
    ) -> None:
        if capacity < 1 or ttl_s <= 0:
            raise ValueError("capacity and ttl_s must be positive")
        self._counters = RouteTableCounters(capacity=capacity)
        self.rows = Rows(capacity)
        self.leaves = make_queue(self.rows, options)
        self.claims = Claims(self.rows, self.leaves, ttl_s)
        self.tree = Tree(self.rows, self.leaves, self.claims, self._counters)
        self._cursor = 1
        # by row and backend: the child to look at next, and when its engine said so or NOT_BY_ENGINE
        self.withdrawing: BoundedDict[tuple[int, int], tuple[int, float]] = BoundedDict(WITHDRAWING_MAX)
        self.capacity = capacity  # the most rows
        self.outgoing = OutgoingRoutes(self.rows, self.claims, self._counters, ttl_s)
        self.uses = RouteUses(self.rows, self.claims, self.outgoing)
        self.on_use: PrefixUse | None = None

    @property
    def ttl_s(self) -> float:
        return self.claims.ttl_s

    @ttl_s.setter
    def ttl_s(self, ttl_s: float) -> None:
        """Set it from now on, for all claims: those that are older already have expired."""
        self.claims.ttl_s = ttl_s
        self.outgoing.set_ttl(ttl_s)

    def __len__(self) -> int:
        """Rows."""
        return self.rows.count

    def __repr__(self) -> str:
        return f"<RouteTable {self.rows.count}/{self.capacity} rows, {sum(self.claims.counts)} claims>"

    def match(
        self,
        chain: Iterable[PrefixKey],
        generations: Sequence[int],
        now: float,
        *,
        wanted: int = 1,
        touch: bool = True,
        unheld: Unheld | None = None,
    ) -> list[Holder]:
        """Return the backends that hold a prefix of the prompt, each at its deepest: `wanted` or more if there are.

        Deepest first. The holders of one depth are returned all or none, so that load can decide among equals; they are
        in the order of trust, then freshness of evidence, then id.

        Args:
            chain: the prompt, deepest first; read no further than needed.
            generations: by backend id the current one, or -1 while it is not eligible. Ids beyond the end are not.
            touch: whether this counts as a use of the rows that it finds. False: a dry run, which changes nothing.
            unheld: gets the keys deeper than the first holder's, or all of them, so that no caller walks them again.
        """
        rows, claims = self.rows, self.claims
        before = claims.now
        claims.now = max(before, now)
        index = rows.index
        found: list[Holder] = []
        passed = Unheld() if unheld is None else unheld
        for key in chain:
            if key[1] in index or key[2] in index:
                if row := self._add_holders(key, generations, found):
                    if touch and rows.used[row] < now:
                        rows.used[row] = int(now)
                    passed.end = key
                    if len(found) >= wanted:
                        break
                    passed = Unheld()  # keys passed from here on are shallower than the first holder
                    continue
                passed.known = True
            passed.append(key)
        if touch:
            if found:
                self._counters.matched += 1
            else:
                self._counters.missed += 1
        else:
            claims.now = before
        return found

    def learn(self, chain: Iterable[PrefixKey], backend: BackendId, generation: int, trust: Trust, now: float) -> int:
        """Store evidence that the backend holds each prefix of a prompt. Returns the number of new rows.

        Reading ends at the first key whose row all of the key's fingerprints find and whose ancestors are known to be
        complete (a LOCAL chain went through it). From there the claim climbs the tree to the first row that has it
        already. A key with both fingerprints adds that of the tokens, and the exact depth, to a row known by text only.

        Args:
            chain: all keys of the prompt, deepest first; or single keys, as peers send them.
            now: when the evidence was seen; may lie in the past. Evidence older than the TTL is ignored.

        Raises ValueError for ids, generations, depths or fingerprints out of range, and stores nothing then.
        """
        if not (0 <= backend < BACKENDS_MAX and 0 <= generation <= GENERATION_MAX):
            limits = f"a backend id is 0 … {BACKENDS_MAX - 1}, a generation 0 … {GENERATION_MAX}"
            raise ValueError(f"{limits}: {backend}, {generation}")
        claims, tree = self.claims, self.tree
        claims.now = max(claims.now, now)
        second = int(now)
        unread, known = self._read(chain)
        if not unread or second <= claims.horizon:
            return 0
        counters, before = self._counters, self._counters.created
        claim = Claim(generation, int(trust), second)
        if self.outgoing.collecting and trust >= Trust.LOCAL:
            self.outgoing.learned(unread, known, backend, claim, now)
        if self.on_use is not None:
            self.on_use((unread,), backend, generation, second, 0)
        whole = trust == Trust.LOCAL
        if not known or not tree.extend(known, unread[:-1], backend, claim, whole=whole):
            tree.add(unread, backend, claim, whole=whole)
        return counters.created - before

    def merge(
        self, columns: RouteColumns, generations: npt.NDArray[np.int32], now: float, *, used: bool = False
    ) -> int:
        """Learn many claims of peers at once (`Merge`). `used`: requests made them. Returns the number of new rows."""
        claims, before = self.claims, self._counters.created
        claims.now = max(claims.now, now)
        Merge(self.tree, generations, now, self.on_use if used else None).run(columns)
        return self._counters.created - before

    def withdraw(self, fingerprint: int, backend: BackendId, at: float = NOT_BY_ENGINE) -> bool:
        """Forget that a backend holds a prefix, and every longer one, which it can't use without. False: no such claim.

        One call looks at WITHDRAW_ROWS_MAX rows; `sweep` goes on, which may cost cache misses until then. `at`: when
        the engine reported it; peers then get each removed claim, since their trees may differ.
        """
        row = self.rows.index.get(fingerprint)
        if row is None or self.claims.get(row, backend) is None:
            return False
        self._withdraw_at(row, backend, at)
        self._withdraw_more(WITHDRAW_ROWS_MAX)
        return True

    def refute(self, key: PrefixKey, backend: BackendId, before: int) -> int:
        """Withdraw a backend's old claims below this prefix, beyond which its engine found nothing cached.

        An engine loses its least recently used blocks, deeper ones first: so the claims with evidence before `before`,
        the second when the request was sent, go as if the engine had withdrawn them. What was served since then stays,
        and so does every other prefix. Looks at REFUTE_ROWS_MAX rows at most. Returns how many subtrees went.
        """
        rows, claims = self.rows, self.claims
        top = rows.index.get(key[1]) or rows.index.get(key[2])
        if top is None or claims.get(top, backend) is None:
            return 0
        old: list[int] = []
        seen, pending = 0, [top]
        while pending and seen < REFUTE_ROWS_MAX:
            for child in islice(rows.children(pending.pop()), REFUTE_ROWS_MAX - seen):
                seen += 1
                claim = claims.get(child, backend)
                if claim is None:
                    continue
                if claim.evidence < before:
                    old.append(child)
                else:
                    pending.append(child)
        for row in old:
            self._withdraw_at(row, backend, before)
        self._withdraw_more(WITHDRAW_ROWS_MAX)
        return len(old)

    def set_tier(self, fingerprint: int, backend: BackendId, tier: int) -> None:
        """Note at which tier a backend holds a prefix that it has a claim for: 0 is the GPU, above 0 is below it."""
        row = self.rows.index.get(fingerprint) if tier or self.claims.lowered else None
        if row is not None and self.claims.get(row, backend) is not None:
            self.claims.set_tier(row, backend, tier)

    def hide(self, backend: BackendId, second: int, left: Mapping[int, int] = NO_DEPTHS) -> None:
        """Match no claims of this backend with evidence up to `second` from now on; -1 hides none by age.

        Where `left` names a later second, claims of that second are matched down to so many tokens only. Hidden claims
        stay until they expire: new evidence, or a call with an earlier second, makes them match again.
        """
        if second >= 0 or left:
            self.claims.hidden[backend] = Hidden(second if second >= 0 else BEFORE_ALL, left)
        else:
            self.claims.hidden.pop(backend, None)

    def sweep(self, now: float, generations: Sequence[int], limit: int = 2000) -> int:
        """Remove expired claims, and void ones (of another than the backend's current generation), from `limit` rows.

        Each call goes on where the last one ended: call it often enough to come round within the TTL. A backend that is
        merely not eligible now (-1) keeps its claims. Returns the number of claims removed.
        """
        rows, claims = self.rows, self.claims
        claims.now = max(claims.now, now)
        removed = self._withdraw_more(limit)
        end, known, horizon = rows.top, len(generations), claims.horizon
        for _ in range(min(limit, end - 1)):
            row = self._cursor
            self._cursor = row + 1 if row + 1 < end else 1
            backend = rows.backend[row]
            alone = backend >= 0 and not rows.flags[row] & SHARED
            if (
                alone
                and rows.evidence[row] > horizon
                and backend < known
                and generations[backend] == rows.generation[row]
            ):
                continue  # the usual row, without a call
            if rows.parent[row] >= 0:
                removed += self._sweep_row(row, generations, horizon)
        return removed

    @property
    def counters(self) -> RouteTableCounters:
        """The counters, with gauges as of now."""
        counters, names = self._counters, [trust.name.lower() for trust in Trust]
        counters.rows, counters.fingerprints = self.rows.count, len(self.rows.index)
        counters.claims = dict(zip(names, self.claims.counts[1:], strict=True))
        counters.evicted = dict(zip(names, self.tree.evicted[1:], strict=True))
        counters.withdrawals_given_up, counters.texts_dropped = self.withdrawing.dropped, self.rows.texts_dropped
        counters.overtaken = self.outgoing.removals.refused
        counters.removals_forgotten = self.outgoing.removals.forgotten
        return counters

    def claim(self, fingerprint: int, backend: BackendId) -> Claim | None:
        """Return a backend's claim for a prefix, expired or not; None: there is none."""
        row = self.rows.index.get(fingerprint)
        return None if row is None else self.claims.get(row, backend)

    def holds(self, fingerprint: int, backend: BackendId) -> bool:
        """Whether the backend has a claim for the prefix, expired or not."""
        row = self.rows.index.get(fingerprint, 0)
        return self.rows.backend[row] == backend or self.claims.get(row, backend) is not None

    def prefix_key_of(self, fingerprint: int) -> PrefixKey | None:
        """Return the whole prefix key of a known fingerprint; None for others."""
        row = self.rows.index.get(fingerprint)
        return None if row is None else self.rows.key(row)

    def exact_depth(self, fingerprint: int) -> int:
        """Return the depth in tokens of a known prefix if its token fingerprint is known, else 0."""
        row = self.rows.index.get(fingerprint)
        return 0 if row is None or not self.rows.token[row] else self.rows.tokens[row]

    def subtree(self, fingerprint: int, *, limit: int = 200) -> list[RouteView]:
        """Return at most `limit` rows of the tree from a fingerprint's row down, or of all (0), parents first.

        Empty when the fingerprint is not known. Ages are counted from the latest `now` that the table has seen.
        """
        rows = self.rows
        if fingerprint == 0:
            walks = [rows.children(0)]
        elif (row := rows.index.get(fingerprint)) is not None:
            walks = [iter((row,))]
        else:
            return []
        views: list[RouteView] = []
        while walks and len(views) < limit:
            row = next(walks[-1], 0)
            if row:
                views.append(view_of(rows, self.claims, row, len(walks) - 1))
                walks.append(rows.children(row))
            else:
                walks.pop()
        return views

    def _read(self, chain: Iterable[PrefixKey]) -> tuple[list[PrefixKey], int]:
        """Return the keys up to the one that ends the walk, and its row, or 0. Skips keys of no tokens or no name."""
        get, flags = self.rows.index.get, self.rows.flags
        taken: list[PrefixKey] = []
        texts = False  # equal tokens can come from other messages: an anchor's row does not prove the texts above it
        for key in chain:
            tokens, token, text = key
            if tokens <= 0 or not (token or text):
                continue
            if tokens > TOKENS_MAX or (token | text) >> FINGERPRINT_BITS:  # a negative one leaves -1
                raise ValueError(f"not a prefix key: {key}")
            taken.append(key)
            row = get(token or text)
            if row is not None and flags[row] & WHOLE and (get(text) == row if text else not texts):
                return taken, row
            if text:
                texts = True
        return taken, 0

    def _add_holders(self, key: PrefixKey, generations: Sequence[int], found: list[Holder]) -> int:
        """Add the backends that hold the prompt down to `key` to `found`. Returns the key's row; 0: none was new."""
        rows = self.rows
        _, token, text = key
        row, twin = rows.index.get(token), rows.index.get(text)  # 0 is nobody's name
        row = twin if row is None else row
        if row is None:
            return 0
        if rows.flags[row] & SHARED or (twin is not None and twin != row):
            before = len(found)
            if not self._add_several((row,) if twin in (None, row) else (row, twin), generations, found):
                return 0
            if self.claims.lowered:
                found[before:] = self.claims.tiered((row, twin or row), found[before:])
            return row
        backend = rows.backend[row]
        for holder in found:
            if holder[0] == backend:
                return 0
        live = 0 <= backend < len(generations) and generations[backend] == rows.generation[row]
        live = live and rows.evidence[row] > self.claims.horizon
        if live and self.claims.hidden:
            live = not self.claims.is_hidden(backend, rows.evidence[row], rows.tokens[row])
        if not live:
            return 0
        found.append(Holder(BackendId(backend), rows.tokens[row], rows.trust[row]))
        if self.claims.lowered:
            found[-1:] = self.claims.tiered((row,), found[-1:])
        return row

    def _add_several(self, among: Sequence[int], generations: Sequence[int], found: list[Holder]) -> bool:
        """Add the holders of the one or two rows that stand for one key. False: none was new."""
        rows, claims, known = self.rows, self.claims, len(generations)
        horizon = claims.horizon
        ranked: list[tuple[int, int, int, int]] = []
        for row in among:
            tokens = rows.tokens[row]
            backend = rows.backend[row]
            if 0 <= backend < known and generations[backend] == rows.generation[row] and rows.evidence[row] > horizon:
                ranked.append((-rows.trust[row], -rows.evidence[row], backend, tokens))
            if rows.flags[row] & SHARED:
                for backend, (generation, trust, evidence) in claims.others[row].items():
                    if backend < known and generations[backend] == generation and evidence > horizon:
                        ranked.append((-trust, -evidence, backend, tokens))
        if claims.hidden:
            ranked = [each for each in ranked if not claims.is_hidden(each[2], -each[1], each[3])]
        ranked.sort()
        if len(among) == 1 and not found:  # the usual case: one row, in which no backend comes twice
            new = tuple.__new__  # `Holder(…)` takes twice as long, and a system prompt may have one for each backend
            found += [new(Holder, (number, tokens, -trust, 0)) for trust, _, number, tokens in ranked]
            return bool(found)
        before = len(found)
        seen = {holder.backend for holder in found}
        for trust, _, number, tokens in ranked:
            holder = BackendId(number)
            if holder not in seen:
                seen.add(holder)
                found.append(Holder(holder, tokens, -trust))
        return len(found) > before

    def _withdraw_at(self, row: int, backend: int, at: float) -> None:
        rows, claims = self.rows, self.claims
        if at != NOT_BY_ENGINE and self.outgoing.collecting and (claim := claims.get(row, backend)) is not None:
            self.outgoing.dropped(row, backend, claim.generation, at)
        claims.drop(row, backend)
        self._counters.withdrawn += 1
        if rows.child[row]:
            self.withdrawing[row, backend] = rows.child[row], at
        self.tree.tidy(row)

    def _withdraw_more(self, limit: int) -> int:
        """Go on with withdrawals below rows whose claim has not come anew. Returns how many claims went."""
        rows, claims, pending = self.rows, self.claims, self.withdrawing
        before = self._counters.withdrawn
        while pending and limit > 0:
            limit -= 1
            (row, backend), (child, at) = pending.popitem()
            if claims.get(row, backend) is not None:
                continue
            if rows.parent[child] != row:  # it went elsewhere meanwhile: begin with the first one again
                child = rows.child[row]
            if not child:
                continue
            if rows.right[child]:
                pending[row, backend] = rows.right[child], at
            if claims.get(child, backend) is not None:
                self._withdraw_at(child, backend, at)
        return self._counters.withdrawn - before

    def _sweep_row(self, row: int, generations: Sequence[int], horizon: float) -> int:
        claims = self.claims
        removed = 0
        for backend, claim in list(claims.of(row)):
            expired = claim.evidence <= horizon
            if not expired and (backend >= len(generations) or generations[backend] in (-1, claim.generation)):
                continue
            claims.drop(row, backend)
            self._counters.expired += expired
            self._counters.voided += not expired
            removed += 1
        if removed:
            self.tree.tidy(row)
        return removed


def view_of(rows: Rows, claims: Claims, row: int, level: int) -> RouteView:
    now = claims.now
    holders = sorted(claims.of(row), key=lambda item: (-item[1].trust, -item[1].evidence, item[0]))
    return RouteView(
        level=level,
        tokens=rows.tokens[row],
        exact=rows.token[row] != 0,
        token_fingerprint=Fingerprint(rows.token[row]),
        text_fingerprints=tuple(Fingerprint(text) for text in rows.texts(row)),
        parent=Fingerprint(rows.name(rows.parent[row])),
        children=sum(1 for _ in islice(rows.children(row), CHILDREN_COUNTED_MAX)),
        holders=tuple(
            ClaimView(BackendId(backend), Trust(claim.trust), claim.generation, max(0.0, now - claim.evidence))
            for backend, claim in holders
        ),
        idle_s=max(0.0, now - max(rows.used[row], *(claim.evidence for _, claim in holders), 0)),
    )
