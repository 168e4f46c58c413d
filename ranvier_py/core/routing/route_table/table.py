"""The route table: which backend is believed to hold which prefix.

A radix tree of prefixes, found by fingerprint. A prompt comes as its stops, deepest first; `match` returns the backends
with the deepest live claims, `learn` stores a claim for each stop. A claim lives while its generation is the backend's
current one and its last evidence is younger than the TTL; being looked up is no evidence.

Rules: at most `capacity` rows; a new row beyond that evicts the leaf that comes first in `leaves.LeafQueue`. A use of a
row is a use of its ancestors: they are not touched, they inherit the time when a child goes. So an idle chat loses its
deep rows first, and a system prompt that others use survives. Every call is synchronous, hence atomic.
Invariants: those of `rows`, `leaves`, `claims` and `tree`; tests/core/routing/route_table/test_routes_properties.py
holds them. Cost: `benchmarks/decision.py` measures it (results/decision.json).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.placement import Holder
from ranvier_py.core.routing.route_table.claims import Claim, Claims, Hidden
from ranvier_py.core.routing.route_table.leaves import LeafQueue
from ranvier_py.core.routing.route_table.outgoing import Telling
from ranvier_py.core.routing.route_table.route_values import (
    BACKENDS_MAX,
    ROUTE_TTL_S,
    ClaimView,
    RouteStatistics,
    RouteView,
    Trust,
    TrustCounts,
    Withdrawn,
)
from ranvier_py.core.routing.route_table.rows import SHARED, WHOLE, Rows
from ranvier_py.core.routing.route_table.tree import Tree

WITHDRAW_CLAIMS_MAX = 2000
"""Claims one call of `withdraw` removes, some milliseconds; what is left below goes with the next sweeps."""

NOT_TOLD = -1.0

Hearing = Callable[[Iterable[Sequence[PrefixKey]], BackendId, int, int], object]
"""Told what peers' requests used, before it is learned: prompts, of which process, in which second (`routes.uses`)."""

CHILDREN_COUNTED_MAX = 10_000
"""The admin page does not count further: about 1 ms."""

NO_DEPTHS: Mapping[int, int] = MappingProxyType({})

TOKENS_MAX = 2**32 - 1
FINGERPRINT_BITS = 64
EPOCH_MAX = 2**31 - 1
"""What the columns hold."""


class RouteTable:
    """Prefix -> backends, learned from traffic, bounded in rows and in time.

    Args:
        capacity: rows, one for each known prefix.
        ttl_s: life of a claim after its last evidence; to the second, and never longer.

    `now` is monotonic seconds, not negative, given by the caller. Epochs of one backend only grow.
    `news` collects what we served and what engines said, for peers, once `collect_news` was called. A claim that is
    only refreshed is news again when its evidence enters another half of the TTL, each row at a time of its own: so
    peers hold what is in use for ever, and one route costs at most two messages in a TTL. `withdrawn_news` has what
    engines dropped.
    """

    def __init__(self, *, capacity: int = 1_000_000, ttl_s: float = ROUTE_TTL_S) -> None:
        if capacity < 1 or ttl_s <= 0:
            raise ValueError("capacity and ttl_s must be positive")
        self._capacity = capacity
        self._rows = Rows(capacity)
        self._leaves = LeafQueue(self._rows)
        self._claims = Claims(self._rows, self._leaves, ttl_s)
        self._tree = Tree(self._rows, self._leaves, self._claims, capacity)
        self._cursor = 1
        self._withdrawing: list[tuple[int, int, float]] = []  # row, backend, when its engine said so or NOT_TOLD
        self._matched = self._missed = 0
        self._expired = self._voided = self._withdrawn = 0
        self.ttl_s = ttl_s
        self._telling = Telling(self._rows, self._claims, ttl_s)
        self.hearing: Hearing | None = None
        self.news = self._telling.news
        self.withdrawn_news = self._telling.withdrawn

    def collect_news(self, came: Callable[[], object] = lambda: None) -> None:
        """From now on `news` and `withdrawn_news` are filled; their owner empties them. `came` is called when the first
        one comes."""
        self._telling.begin(came)

    @property
    def news_dropped(self) -> int:
        return self._telling.news_dropped

    @property
    def withdrawn_news_dropped(self) -> int:
        return self._telling.withdrawn_dropped

    @property
    def capacity(self) -> int:
        """The most rows."""
        return self._capacity

    def parts(self) -> tuple[Rows, LeafQueue, Claims, Tree]:
        """For `scan` and `bulk`, which belong to the table and read and write its columns."""
        return self._rows, self._leaves, self._claims, self._tree

    def names(self) -> Container[int]:
        """All fingerprints that are known, now and later."""
        return self._rows.index

    def __len__(self) -> int:
        """Rows."""
        return self._rows.count

    def __repr__(self) -> str:
        return f"<RouteTable {self._rows.count}/{self._capacity} rows, {sum(self._claims.counts)} claims>"

    def match(
        self,
        chain: Iterable[PrefixKey],
        generations: Sequence[int],
        now: float,
        *,
        wanted: int = 1,
        touch: bool = True,
        unheld: list[PrefixKey] | None = None,
    ) -> list[Holder]:
        """At least `wanted` backends that hold a prefix of the prompt, if there are so many: each at its deepest depth.

        Deepest first; those of one depth come together, all of them, so that load can decide among equals. They come
        by trust, then by freshness of evidence, then by id.

        Args:
            stops: the prompt, deepest first; read no further than needed.
            epochs: by backend id, its current generation, or -1 while it is not eligible. Ids beyond the end are not.
            touch: whether this counts as a use of what it finds (False: a dry run).
            unheld: gets the stops deeper than the first holder's, or all, so that nobody walks the prompt again.
        """
        rows, claims = self._rows, self._claims
        claims.now = max(claims.now, now)
        index = rows.index
        found: list[Holder] = []
        passed = [] if unheld is None else unheld
        for key in chain:
            _, token, text = key
            row = self._add_holders(key, generations, found) if token in index or (text and text in index) else 0
            if not row:
                passed.append(key)
                continue
            if touch and rows.used[row] < now:
                rows.used[row] = int(now)
            if len(found) >= wanted:
                break
            passed = []  # what follows is shallower
        if touch:
            self._matched += bool(found)
            self._missed += not found
        return found

    def learn(self, chain: Iterable[PrefixKey], backend: BackendId, generation: int, trust: Trust, now: float) -> int:
        """Store evidence that the backend holds each stop of a prompt. Returns the number of new rows.

        Reading ends at the first stop whose row is found by all fingerprints it brings and whose ancestors are known to
        be complete (a LOCAL chain went through it). From there the claim climbs the tree, up to the first row that has
        it already with evidence of this second. So a continuing chat costs its new stops, and once a second 0.5 us for
        each older one. A stop that brings the token fingerprint of a text-only row attaches it, with the exact depth.

        Args:
            stops: deepest first, down to the first of the prompt; or single ones, as peers send them.
            now: when it was seen; may lie in the past. Evidence older than the TTL is ignored.

        Raises ValueError for ids, epochs, depths or fingerprints out of range; nothing is changed then.
        """
        if not (0 <= backend < BACKENDS_MAX and 0 <= generation <= EPOCH_MAX):
            raise ValueError(
                f"a backend id is 0 … {BACKENDS_MAX - 1}, an epoch 0 … {EPOCH_MAX}: {backend}, {generation}"
            )
        claims, tree = self._claims, self._tree
        claims.now = max(claims.now, now)
        second = int(now)
        unread, known = self._read(chain)
        if not unread or second <= claims.horizon:
            return 0
        created, refused = tree.created, tree.refused
        claim = Claim(generation, int(trust), second)
        if self._telling.collecting and trust >= Trust.LOCAL:
            self._telling.learned(unread, known, backend, claim, now)
        if trust == Trust.REMOTE and self.hearing is not None:
            self.hearing((unread,), backend, generation, second)
        if known and tree.extend(known, unread[:-1], backend, claim, whole=trust == Trust.LOCAL):
            return tree.created - created
        path, linked = tree.store(unread, second)
        for row in path[:1] if linked else path:
            claims.raise_from(row, backend, claim)
        if linked and trust == Trust.LOCAL and refused == tree.refused:
            tree.mark_whole(path)
        tree.settle()
        return tree.created - created

    def withdraw(self, key_or_fp: PrefixKey | int, backend: BackendId) -> bool:
        """Forget that a backend holds a prefix, and every longer prefix below it. False: no such claim.

        The longer ones go too: an engine that lacks the beginning cannot use the rest, and with the shorter claim gone
        the monotone rule would be broken. Children without the claim have nothing below them that has it, so the cost
        is one step for each claim removed: each was paid for when it was learned. One call removes at most
        WITHDRAW_CLAIMS_MAX; `sweep` does the rest, and until then what is left is a hint that costs a cache miss.
        """
        _, token, text = key_or_fp if isinstance(key_or_fp, tuple) else (0, key_or_fp, 0)
        row = self._rows.index.get(token or text) or self._rows.index.get(text)
        if row is None or self._claims.get(row, backend) is None:
            return False
        self._withdraw_at(row, backend)
        self._withdraw_more(WITHDRAW_CLAIMS_MAX)
        return True

    def retract(self, fingerprint: int, backend: BackendId, now: float) -> bool:
        """`withdraw` by order of the engine itself, which peers are told: each claim, for their trees may differ."""
        row = self._rows.index.get(fingerprint)
        if row is None or self._claims.get(row, backend) is None:
            return False
        self._withdraw_at(row, backend, now)
        self._withdraw_more(WITHDRAW_CLAIMS_MAX)
        return True

    def affirm(self, row: int, backend: BackendId, generation: int, now: float) -> None:
        """The engine itself holds the prefix of this row, and all before it. No use of the row."""
        rows, claims = self._rows, self._claims
        claims.now = max(claims.now, now)
        claim = Claim(generation, int(Trust.CONFIRMED), int(now))
        if self._telling.collecting:
            self._telling.learned([(rows.tokens[row], rows.token[row], rows.text[row])], row, backend, claim, now)
        claims.raise_from(row, backend, claim)

    def set_tier(self, fingerprint: int, backend: BackendId, tier: int) -> None:
        """At which tier the backend holds a prefix that it has a claim for: 0 the GPU, above 0 below it."""
        row = self._rows.index.get(fingerprint) if tier or self._claims.lowered else None
        if row is not None and self._claims.get(row, backend) is not None:
            self._claims.set_tier(row, backend, tier)

    def hide(self, backend: BackendId, second: int, left: Mapping[int, int] = NO_DEPTHS) -> None:
        """From now on claims of this backend whose evidence is not after this second are not matched; -1: all are.

        Of later seconds that `left` names, claims up to so many tokens deep are. What is not matched stays, to be
        matched again after new evidence, or when this moves back, until it expires.
        """
        if second >= 0 or left:
            self._claims.hidden[backend] = Hidden(second, left)
        else:
            self._claims.hidden.pop(backend, None)

    def sweep(self, now: float, generations: Sequence[int], limit: int = 2000) -> int:
        """Remove expired claims, and void ones (not of the backend's current epoch), from the next `limit` rows.

        A backend that is only not eligible now (-1) keeps its claims. Returns the number of claims removed.
        Costs about 0.5 us for a row that stays. Call it often enough to come round within the TTL.
        """
        rows, claims = self._rows, self._claims
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

    def statistics(self) -> RouteStatistics:
        tree, rows = self._tree, self._rows
        return RouteStatistics(
            rows=rows.count,
            fingerprints=len(rows.index),
            claims=TrustCounts(*self._claims.counts[1:]),
            capacity=self._capacity,
            created=tree.created,
            matched=self._matched,
            missed=self._missed,
            attached=tree.attached,
            merged=tree.merged,
            unlinked=tree.unlinked,
            evicted=TrustCounts(*tree.evicted[1:]),
            refused=tree.refused,
            expired=self._expired,
            voided=self._voided,
            withdrawn=self._withdrawn,
        )

    def subtree(self, fingerprint: int, *, limit: int = 200) -> list[RouteView]:
        """The tree under a fingerprint (itself included) or the whole (0): parents before children, `limit` rows.

        Empty when the fingerprint is not known. Ages are counted from the latest `now` the table has seen.
        """
        rows = self._rows
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
                views.append(self._view(row, len(walks) - 1))
                walks.append(rows.children(row))
            else:
                walks.pop()
        return views

    def prefix_key_of(self, fingerprint: int) -> PrefixKey | None:
        """The whole stop of a known fingerprint."""
        rows = self._rows
        row = rows.index.get(fingerprint)
        return None if row is None else (rows.tokens[row], rows.token[row], rows.text[row])

    def _read(self, chain: Iterable[PrefixKey]) -> tuple[list[PrefixKey], int]:
        """The stops up to the one that ends the walk, and its row, or 0. A stop of no tokens is no prefix."""
        get, flags = self._rows.index.get, self._rows.flags
        taken: list[PrefixKey] = []
        texts = False  # an anchor tells nothing of the texts above it: equal tokens can come from other messages
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
        """Add those that hold the prompt down to `stop` to the deeper ones. Returns its row, or 0: nobody new."""
        rows, known, horizon = self._rows, len(generations), self._claims.horizon
        _, token, text = key
        row, twin = rows.index.get(token), rows.index.get(text)  # 0 is nobody's name
        row = twin if row is None else row
        if row is None:
            return 0
        if rows.flags[row] & SHARED or (twin is not None and twin != row):
            before = len(found)
            if not self._add_several((row,) if twin in (None, row) else (row, twin), generations, found):
                return 0
            if self._claims.lowered:
                found[before:] = self._claims.tiered((row, twin or row), found[before:])
            return row
        backend = rows.backend[row]
        live = 0 <= backend < known and generations[backend] == rows.generation[row] and rows.evidence[row] > horizon
        if live and self._claims.hidden:
            live = not self._claims.is_hidden(backend, rows.evidence[row], rows.tokens[row])
        if not live or (found and any(holder.backend == backend for holder in found)):
            return 0
        found.append(Holder(BackendId(backend), rows.tokens[row], rows.trust[row]))
        if self._claims.lowered:
            found[-1:] = self._claims.tiered((row,), found[-1:])
        return row

    def _add_several(self, among: Sequence[int], generations: Sequence[int], found: list[Holder]) -> bool:
        """Add the holders of the rows that stand for one stop. False: it has none that are new."""
        rows, claims, known = self._rows, self._claims, len(generations)
        horizon = claims.horizon
        ranked: list[tuple[int, int, int, int]] = []
        for row in among:
            tokens = rows.tokens[row]
            backend = rows.backend[row]
            if 0 <= backend < known and generations[backend] == rows.generation[row] and rows.evidence[row] > horizon:
                ranked.append((-rows.trust[row], -rows.evidence[row], backend, tokens))
            if rows.flags[row] & SHARED:
                for backend, (generation, trust, evidence) in claims.others(row).items():
                    if backend < known and generations[backend] == generation and evidence > horizon:
                        ranked.append((-trust, -evidence, backend, tokens))
        if claims.hidden:
            ranked = [each for each in ranked if not claims.is_hidden(each[2], -each[1], each[3])]
        ranked.sort()
        if len(among) == 1 and not found:  # the usual row, in which nobody comes twice
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

    def _withdraw_at(self, row: int, backend: int, told_at: float = NOT_TOLD) -> None:
        rows, claims = self._rows, self._claims
        claim = claims.get(row, backend)
        if told_at != NOT_TOLD and claim is not None and self._telling.collecting:
            name = Fingerprint(rows.token[row] or rows.text[row])
            self._telling.dropped(Withdrawn(BackendId(backend), claim.generation, name, told_at))
        claims.drop(row, backend)
        self._withdrawn += 1
        for child in rows.children(row):
            if claims.get(child, backend) is not None:
                self._withdrawing.append((child, backend, told_at))
        self._tree.tidy(row)

    def _withdraw_more(self, limit: int) -> int:
        """Go on with withdrawals. What was learned or evicted meanwhile shows by the claim or by the parent's."""
        rows, claims, pending = self._rows, self._claims, self._withdrawing
        done = 0
        while pending and done < limit:
            row, backend, told_at = pending.pop()
            done += 1
            parent = rows.parent[row]
            if parent > 0 and claims.get(parent, backend) is None and claims.get(row, backend) is not None:
                self._withdraw_at(row, backend, told_at)
        return done

    def _sweep_row(self, row: int, generations: Sequence[int], horizon: float) -> int:
        claims = self._claims
        removed = 0
        for backend, claim in list(claims.of(row)):
            expired = claim.evidence <= horizon
            if not expired and (backend >= len(generations) or generations[backend] in (-1, claim.generation)):
                continue
            claims.drop(row, backend)
            self._expired += expired
            self._voided += not expired
            removed += 1
        if removed:
            self._tree.tidy(row)
        return removed

    def _view(self, row: int, level: int) -> RouteView:
        rows, now = self._rows, self._claims.now
        holders = sorted(self._claims.of(row), key=lambda item: (-item[1].trust, -item[1].evidence, item[0]))
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
