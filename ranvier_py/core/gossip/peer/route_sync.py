"""The route table among peers: its news become route updates, route updates become REMOTE claims.

Rules: what this node served is told with the boot of the process that served it; served by a process that is gone, it
is not told. What is heard is learned for backends of this node alone, at the age it came with, for the boot it names:
an earlier boot is dropped, a later one makes the registry start that boot first. Before the table itself is shown to a
peer, everything in it is told: what only one peer has and no log holds is lost to the others when we die.

What an engine said itself is held back for a moment: mostly the node that served the prompt tells the same. Removals
go first, and what was withdrawn meanwhile is not told: so peers end with what is true here, in whatever order it came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from ranvier_py.core.gossip.backend_state.facts import BOOT_BITS
from ranvier_py.core.gossip.peer.coalescing_buffer import Company
from ranvier_py.core.gossip.peer.held_updates import HELD_MAX, HOLD_S, HeldTurns, Turns, batches_of
from ranvier_py.core.gossip.peer.received_batches import Pieces, ReceivedBatches
from ranvier_py.core.gossip.peer.registry_sync import SharedBackends
from ranvier_py.core.gossip.peer.removal_sync import SharedRemovals
from ranvier_py.core.gossip.peer.route_counters import SharedRouteCounters
from ranvier_py.core.gossip.replication.removals import is_removal
from ranvier_py.core.gossip.replication.route_store import RowsWalk
from ranvier_py.core.gossip.replication.route_updates import (
    TOKENS_MAX,
    BadRouteUpdate,
    RouteUpdate,
    decode,
    encode,
    pieces,
)
from ranvier_py.core.gossip.replication.table_copy import TableCopy
from ranvier_py.core.gossip.replication.update_batches import decode_batch, encode_batch, is_batch
from ranvier_py.core.gossip.wire.messages import Rows
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table import News, RouteTable, Trust
from ranvier_py.core.routing.route_table.claims import Claim

BOUND_LEAST = 4
"""Fewer turns are told one by one: that takes no more bytes or time, and all versions understand it."""

COMPLETE_MAX = HELD_MAX
"""Texts that are remembered as told with their tokens."""

CONFIRMED_MAX = 4096

CONFIRMED_HOLD_S = 1.0
"""News of what an engine said wait so long for the route update of the node that served it."""

NOBODY = (BackendId(-1), 0.0, 0)

HEARD_MAX = 8192
"""Tokens of peers' route updates that are remembered, for as long."""


class SharedRoutes:
    """Satisfies gossip.routes.route_memory.RouteMemory."""

    def __init__(self, routes: RouteTable, backends: SharedBackends) -> None:
        self.routes = routes
        self.counters = SharedRouteCounters()
        self._backends = backends
        self._copy = TableCopy(routes, backends)
        self._orphans = Pieces(routes)
        self.understood = False  # whether further turns are sent as update batches
        self.turns = HeldTurns(routes, self._is_complete, self.counters)
        self._complete: dict[int, tuple[BackendId, float]] = {}
        self._confirmed: deque[News] = deque()  # held back
        self._heard: dict[int, tuple[BackendId, float, int]] = {}  # token -> whose, when, and its text
        self._company = Company()
        self.removals = SharedRemovals(routes, backends)
        self.batches = ReceivedBatches(routes, self._orphans)
        self._rows, _, self._claims, _ = routes.parts()
        self.asked: Callable[[], object] = lambda: None  # a peer is about to get what is in the table; set by the owner

    # --- down -------------------------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float:
        """When `route updates` has something that waited for company."""
        return self._company.wake_at

    @property
    def waiting(self) -> int:
        """News that are held back, for any reason."""
        return len(self.turns) + len(self._confirmed) + len(self._company)

    @property
    def orphans(self) -> int:
        """Pieces of peers' paths that wait for the rows above them."""
        return len(self._orphans)

    def route_updates(self, now: float, hold_s: float = HOLD_S) -> Iterator[tuple[bytes, float]]:
        """What may be told now as route updates, each with the time of its evidence; it is used up."""
        yield from self.removals.route_updates()
        fresh = list(self._fresh(hold_s))
        turns = self.turns.leave(now, hold_s, bound=self.understood)
        for news in self._due(fresh, now, hold_s, leaves=bool(turns)):
            yield from self._told(news)
        for each in turns:
            yield from self._bound(each)

    def _due(self, fresh: Sequence[News], now: float, hold_s: float, *, leaves: bool) -> Iterator[News]:
        """What waits no longer. Whatever leaves takes along who waits for company."""
        leaves = leaves or not hold_s
        for each in chain(fresh, self._ripe(now, hold_s)):
            leaves = True
            yield each
        if leaves or self._company.is_due(now):
            for each in self._company.leave():
                yield self._untold(each)

    def _fresh(self, hold_s: float) -> Iterator[News]:
        """Of what came since the last time, what need not wait."""
        news = self.routes.news
        while news:
            each = news.popleft()
            if hold_s and each.parent and not has_token(each.chain):
                self.turns.hold(each)
            elif hold_s and len(self._confirmed) < CONFIRMED_MAX and self._is_confirmed(each):
                self._confirmed.append(each)
            else:
                self._note_complete(each)
                if not (hold_s and self._company.takes(each)):
                    yield each

    def _ripe(self, now: float, hold_s: float) -> Iterator[News]:
        """Of what engines said, what has waited long enough, and is not told yet."""
        confirmed = self._confirmed
        while confirmed and (not hold_s or confirmed[0].at + CONFIRMED_HOLD_S <= now):
            yield self._named(self._untold(confirmed.popleft()))

    def _is_confirmed(self, news: News) -> bool:
        """Whether the engine told us of it, and nobody here served it."""
        if has_text(news.chain):
            return False
        claim = self._claim(news.chain[0][1], news.backend)
        return claim is not None and claim.trust == Trust.CONFIRMED

    def _untold(self, news: News) -> News:
        """Without the stops that a peer told meanwhile. What is left below them names the nearest as its parent."""
        heard, chain, parent = self._heard, list(news.chain), news.parent
        while chain:
            _, token, own_text = chain[-1]
            backend, at, text = heard.get(token, NOBODY)
            if backend != news.backend or at < news.at or own_text not in (0, text):
                break
            parent = chain.pop()[1]
        self.counters.keys_spared += len(news.chain) - len(chain)
        return news._replace(chain=chain, parent=parent)

    def _named(self, news: News) -> News:
        """With the texts that are known here: engines tell tokens, and a peer may have let go of the row meanwhile."""
        rows = self._rows
        found = ((key, rows.index.get(key[1])) for key in news.chain)
        chain = [(key[0], key[1], key[2] or rows.text[row]) if row is not None else key for key, row in found]
        return news._replace(chain=chain)

    def _claim(self, name: int, backend: BackendId) -> Claim | None:
        row = self._rows.index.get(name)
        return self._claims.get(row, backend) if row is not None else None

    def _is_claimed(self, key: PrefixKey, backend: BackendId) -> bool:
        row = self._rows.index.get(key[1] or key[2])
        return row is not None and (self._rows.backend[row] == backend or self._claims.get(row, backend) is not None)

    def _note_heard(self, chain: Iterable[PrefixKey], backend: BackendId, now: float) -> None:
        heard = self._heard
        for _, token, text in chain:
            if token:
                heard.pop(token, None)
                heard[token] = (backend, now, text)
        while heard and (len(heard) > HEARD_MAX or next(iter(heard.values()))[1] < now - 2 * CONFIRMED_HOLD_S):
            del heard[next(iter(heard))]

    def _note_complete(self, news: News) -> None:
        """Which texts were told together with their tokens, for as long as the same texts alone may be held."""
        complete, horizon = self._complete, news.at - HOLD_S
        for _, token, text in news.chain:
            if token and text:
                complete[text] = (news.backend, news.at)
        while complete and (len(complete) > COMPLETE_MAX or next(iter(complete.values()))[1] < horizon):
            del complete[next(iter(complete))]

    def _is_complete(self, text: int, backend: int) -> bool:
        """Whether it was told with its tokens meanwhile, of the same backend."""
        told = self._complete.get(text)
        return told is not None and told[0] == backend

    def _told(self, news: News) -> Iterator[tuple[bytes, float]]:
        if not news.chain:
            return
        route_update = self._update_of(news)
        if route_update is None:
            self.counters.outdated += 1
            return
        for piece in pieces(route_update):
            self.counters.told += 1
            yield encode(piece), news.at

    def _bound(self, turns: Turns) -> Iterator[tuple[bytes, float]]:
        """Further turns of one backend's process."""
        count = len(turns.texts)
        if count < BOUND_LEAST or not self.understood:
            for news in turns.news():
                yield from self._told(news)
            return
        named = self._name(turns.backend, turns.generation)
        if named is None:
            self.counters.outdated += count
            return
        self.counters.bound += count
        for batch in batches_of(turns):
            self.counters.told += 1
            yield encode_batch(*named, batch.parents, batch.texts, batch.tokens), float(batch.at.min())

    def _name(self, backend: BackendId, generation: int) -> tuple[int, int] | None:
        """What peers call this backend and its process. None: it is gone."""
        key = self._backends.key_of(backend)
        found = self._backends.find(key) if key is not None else None
        if key is None or found is None or found.generation != generation:
            return None
        return key, self._backends.facts.boot(key) % (1 << BOOT_BITS)

    def _update_of(self, news: News) -> RouteUpdate | None:
        """None: by whom it was served is gone, or what it said is withdrawn."""
        chain = news.chain
        if chain[0][0] > TOKENS_MAX:
            chain = [key for key in chain if key[0] <= TOKENS_MAX]
        if chain and not self._is_claimed(chain[0], news.backend):  # what holds the deepest holds all
            chain = [key for key in chain if self._is_claimed(key, news.backend)]
            self.counters.keys_gone += len(news.chain) - len(chain)
        named = self._name(news.backend, news.generation)
        return RouteUpdate(*named, news.parent, tuple(chain)) if named is not None and chain else None

    # --- up ---------------------------------------------------------------------------------------------------------

    def hear(self, route_update: bytes, age_s: float, now: float) -> bool:
        """Learn what a peer told. Returns whether any of it was new here."""
        self.counters.heard += 1
        if is_removal(route_update):
            self.removals.hear(route_update, age_s, now)
            return False
        if is_batch(route_update):
            return self._receive_batch(route_update, age_s, now)
        try:
            key, boot, parent, chain = decode(route_update)
        except BadRouteUpdate:
            self.counters.bad += 1
            return False
        holder = self._backends.holder(key, boot, now)
        if holder is None:
            self.counters.void += 1
            return False
        backend, generation = holder
        if self._confirmed or self._company:
            self._note_heard(chain, BackendId(backend), now)
        created = self._orphans.learn(chain, parent, BackendId(backend), generation, now - age_s)
        self.counters.rows += created
        return created > 0

    def _receive_batch(self, route_update: bytes, age_s: float, now: float) -> bool:
        try:
            batch = decode_batch(route_update)
        except BadRouteUpdate:
            self.counters.bad += 1
            return False
        holder = self._backends.holder(batch.backend_key, batch.boot, now)
        if holder is None:
            self.counters.void += 1
            return False
        created = self.batches.learn(batch, BackendId(holder[0]), holder[1], now - age_s, now)
        self.counters.rows += created
        return created > 0

    def merge(self, rows: Rows, since: float, now: float) -> int:
        """Learn a chunk of a peer's table. See RouteMemory."""
        return self._copy.merge(rows, since, now)

    # --- the whole table --------------------------------------------------------------------------------------------

    def sums(self, now: float) -> Iterator[bytes | None]:
        """See RouteMemory."""
        self.asked()
        return self._copy.sums(now)

    def rows(self, buckets: bytes) -> RowsWalk:
        """See RouteMemory."""
        self.asked()
        return self._copy.rows(buckets)


def has_token(chain: Sequence[PrefixKey]) -> bool:
    return bool(chain[0][1]) or (len(chain) > 1 and any(key[1] for key in chain))


def has_text(chain: Sequence[PrefixKey]) -> bool:
    return bool(chain[0][2]) or (len(chain) > 1 and any(key[2] for key in chain))
