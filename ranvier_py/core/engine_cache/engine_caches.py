"""Where all that engines say of their caches ends: claims of trust CONFIRMED in the route table, and withdrawals.

Channels (KV events, pushes, indices) open a source for each engine or rank, say how well it is known (`levelled`) and
hand in what became of its prefixes (`changed`). There is no second map that placement asks: a change becomes a claim
where the table is asked at all, at anchors and at rows that traffic made; a removal withdraws the claim and what is
below it. `sweep` walks the rows a little at a time and puts right what events could not: rows that came after their
event, claims whose evidence ages, peers' claims that are wrong.

Rules: a backend is known as well as its best channel, a channel as its worst part. Only at EXACT is a claim withdrawn
for not being held, and only if its evidence is older than a grace, since events come a moment after the first token.
Invariant: at EXACT and after a whole sweep the claims of a backend at token stops are what it holds there.
Bounds: those of the table, of which one engine's events fill ROWS_SHARE at most, whatever they say; beyond that, only
rows that are known are confirmed, and the others counted.
Cost: 0.5 us for a change that is no stop, 6 us for one that is; that of a sweep is `routes.reconcile`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from ranvier_py.core.engine_cache.engine_cache_values import (
    EngineCacheCounters,
    EngineCacheView,
    Held,
    HeldMany,
    Source,
)
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.prefixes import Change
from ranvier_py.core.engine_cache.residency_values import Changes
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.ids import UNKNOWN, BackendId, Fingerprint
from ranvier_py.core.prompts.fingerprint import ANCHOR_BLOCKS_DENSE, ANCHOR_STEP_BLOCKS, anchor_below
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.routing.route_table.reconcile import Exact

__all__ = ["EngineCacheCounters", "EngineCacheView", "EngineCaches", "Held", "HeldMany", "Source"]

GRACE_S = 5.0
"""What was learned so lately is not withdrawn for not being held: an engine publishes a step at its end, and a batch of
events may wait for the next."""

RUN_MAX = 256
"""Stops of one run that are learned with one call: 64k tokens."""

ROWS_SHARE = 0.25
"""An engine of 4 M tokens has some 20,000 anchors, a fiftieth of a table of a million rows."""

LEVELS = (Level.EXACT, Level.DEGRADED, Level.REPAIRING, Level.ESTIMATED)
"""Best first. While a gap is repaired less is certain than after it was given up: more may be undone."""
RANK = {level: rank for rank, level in enumerate(LEVELS)}


class _Part:
    """One source."""

    __slots__ = (
        "changed_at",
        "changes",
        "cleared",
        "generation",
        "held",
        "level",
        "reason",
        "settled",
        "since",
        "source",
    )

    def __init__(self, source: Source, held: Held, generation: int, now: float) -> None:
        self.source = source
        self.held = held
        self.generation = generation  # of the registry, when it last spoke
        self.level = Level.ESTIMATED
        self.reason = "nothing heard yet"
        self.since = now
        self.settled = True  # its Changes were complete
        self.changed_at: float | None = None
        self.changes = 0
        self.cleared = 0


class _Engine:
    """One backend: its sources, and which of them can be believed."""

    __slots__ = ("parts", "rows", "void_before")

    def __init__(self) -> None:
        self.parts: dict[str, _Part] = {}
        self.rows = 0  # confirmed ones, as the sweep last counted, and what came and went since
        self.void_before = float("-inf")  # evidence before this has no grace

    def best(self) -> tuple[Level, list[_Part]]:
        """The level, and the parts of all channels at this level."""
        channels: dict[str, list[_Part]] = {}
        for part in self.parts.values():
            channels.setdefault(part.source.channel, []).append(part)
        ranks = {name: max(RANK[part.level] for part in parts) for name, parts in channels.items()}
        best = min(ranks.values(), default=RANK[Level.ESTIMATED])
        return LEVELS[best], [part for name, parts in channels.items() if ranks[name] == best for part in parts]


class EngineCaches:
    """The one sink of all channels.

    Args:
        epoch_of: the current generation of a backend; -1 when there is no such backend.
        restarted: a source said that its engine holds nothing of what it held. Returns the epoch that begins with it;
            the same epoch as before leaves it to the sweeps to withdraw claims.
        block_tokens: of our blocks.
    """

    def __init__(
        self,
        routes: RouteTable,
        generation_of: Callable[[BackendId], int],
        *,
        restarted: Callable[[BackendId, str, float], int] | None = None,
        block_tokens: int = 16,
        grace_s: float = GRACE_S,
    ) -> None:
        self.counts = EngineCacheCounters()
        self._routes = routes
        self._reconciler = routes.reconciler()
        self._generation_of = generation_of
        self._restarted = restarted
        self._block_tokens = block_tokens
        self._dense_anchors = tuple(block_tokens * blocks for blocks in ANCHOR_BLOCKS_DENSE)
        self._anchor_step = block_tokens * ANCHOR_STEP_BLOCKS
        self._known = routes.names()
        self._rows_max = int(routes.capacity * ROWS_SHARE)
        self._rounds = 0
        self._grace_s = grace_s
        self._engines: dict[BackendId, _Engine] = {}

    # What channels say

    def open(self, source: Source, held: Held, now: float) -> None:
        """There is a channel to this engine. Its level is ESTIMATED until it says more. Opening again begins anew."""
        engine = self._engines.setdefault(source.backend, _Engine())
        engine.parts[source.name] = _Part(source, held, self._generation_of(source.backend), now)

    def close(self, source: Source, now: float) -> None:  # noqa: ARG002  # said with the time, as everything is
        """The channel is gone. What it confirmed stays until it expires or somebody knows better."""
        engine = self._engines.get(source.backend)
        if engine is not None and engine.parts.pop(source.name, None) is not None and not engine.parts:
            del self._engines[source.backend]

    def levelled(self, source: Source, level: Level, reason: str, now: float) -> None:
        part = self._part(source)
        if part is not None:
            part.level, part.reason, part.since = level, reason, now

    def changed(self, source: Source, changes: Changes, now: float) -> None:
        """What became of the engine's prefixes: a Residency's `settle`, or the like."""
        part, generation = self._part(source), self._generation_of(source.backend)
        if part is None or generation < 0:
            self.counts.unknown += 1
            return
        part.settled = changes.complete
        if changes.cleared:
            generation = self._void(part, generation, now)
        part.generation = generation
        if changes.changes:
            part.changed_at = now
            part.changes += len(changes.changes)
            self._apply(source.backend, generation, changes.changes, now)

    def ranks(self, source: Source) -> int:
        """How many sources its channel has: the ranks of that engine, one of which can be gone while others stay."""
        engine = self._engines.get(source.backend)
        parts = engine.parts.values() if engine is not None else ()
        return sum([part.source.channel == source.channel for part in parts])

    # What is known

    def level(self, backend: BackendId) -> Level:
        """Of its best channel; ESTIMATED without any."""
        engine = self._engines.get(backend)
        return engine.best()[0] if engine is not None else Level.ESTIMATED

    def reason(self, backend: BackendId) -> str:
        """Of the level: that of the worst part of the best channel; empty without any."""
        engine = self._engines.get(backend)
        level, parts = engine.best() if engine is not None else (Level.ESTIMATED, [])
        return next((part.reason for part in parts if part.level is level), "")

    def tier(self, backend: BackendId, fingerprint: Fingerprint) -> Tier | None:
        """The nearest tier at which the engine holds this prefix. None: nobody knows."""
        engine = self._engines.get(backend)
        level, parts = engine.best() if engine is not None else (Level.ESTIMATED, [])
        return None if level is Level.ESTIMATED else nearest(parts, fingerprint)

    def sweep(self, now: float, rows_max: int) -> int:
        """Put right the next rows of the table by what engines at EXACT hold. Returns how many claims changed."""
        exact = [each for backend, engine in self._engines.items() if (each := self._exact(backend, engine, now))]
        affirmed, retracted = self._reconciler.walk(rows_max, exact, now)
        if self._rounds != self._reconciler.rounds:
            self._rounds = self._reconciler.rounds
            for backend, engine in self._engines.items():
                engine.rows = self._reconciler.confirmed.get(backend, 0)
        self.counts.affirmed += affirmed
        self.counts.retracted += retracted
        return affirmed + retracted

    def views(self, now: float) -> list[EngineCacheView]:
        """All sources, by backend."""
        return [view_of(part, now) for _, engine in sorted(self._engines.items()) for part in engine.parts.values()]

    # Inside

    def _part(self, source: Source) -> _Part | None:
        engine = self._engines.get(source.backend)
        return engine.parts.get(source.name) if engine is not None else None

    def _void(self, part: _Part, generation: int, now: float) -> int:
        """This source says that all it told is void. Returns the epoch that counts from now on."""
        engine, backend = self._engines[part.source.backend], part.source.backend
        part.cleared += 1
        self.counts.voided += 1
        engine.void_before = now
        engine.rows = 0
        if self._restarted is None or self.ranks(part.source) > 1 or part.generation != generation:
            return (
                generation  # other ranks may still hold theirs; or it was noticed before, and this is the new process
            )
        return self._restarted(backend, f"{part.source.name}: it holds nothing any more", now)

    def _exact(self, backend: BackendId, engine: _Engine, now: float) -> Exact | None:
        generation = self._generation_of(backend)
        level, parts = engine.best()
        if level is not Level.EXACT or generation < 0 or not all(part.settled for part in parts):
            return None
        return Exact(backend, generation, partial(held_among, parts), max(now - self._grace_s, engine.void_before))

    def _apply(self, backend: BackendId, generation: int, changes: Iterable[Change], now: float) -> None:
        routes, counts, known = self._routes, self.counts, self._known
        dense, step, engine = self._dense_anchors, self._anchor_step, self._engines[backend]
        full = engine.rows > self._rows_max
        passed = 0
        run: list[Change] = []  # consecutive anchors of one prompt
        for change in changes:
            fingerprint, tokens, tier, parent = change
            anchor = tokens in dense if tokens < step else not tokens % step
            if (full or not anchor) and fingerprint not in known:
                passed += 1
                counts.refused += anchor
            elif tier is Tier.ABSENT:
                if not self._is_held(backend, fingerprint) and routes.retract(fingerprint, backend, now):
                    counts.removed += 1
                    engine.rows -= 1
            elif anchor and run and parent == run[-1].fingerprint and len(run) < RUN_MAX:
                run.append(change)
            else:
                self._confirm(backend, generation, run, now)
                run = [change]
                if not anchor:
                    self._confirm(backend, generation, run, now)
                    run = []
        self._confirm(backend, generation, run, now)
        counts.passed += passed

    def _is_held(self, backend: BackendId, fingerprint: Fingerprint) -> bool:
        """By another source: a rank, or a channel that knows better."""
        engine = self._engines[backend]
        return len(engine.parts) > 1 and nearest(engine.best()[1], fingerprint) is not Tier.ABSENT

    def _confirm(self, backend: BackendId, generation: int, run: list[Change], now: float) -> None:
        """Learn prefixes of one prompt, each an anchor below the next."""
        if not run:
            return
        chain: list[PrefixKey] = [(change.tokens, change.fingerprint, 0) for change in reversed(run)]
        if run[0].parent != UNKNOWN:
            blocks = run[0].tokens // self._block_tokens
            chain.append((anchor_below(blocks) * self._block_tokens, run[0].parent, 0))
        self._engines[backend].rows += self._routes.learn(chain, backend, generation, Trust.CONFIRMED, now)
        self.counts.confirmed += len(run)
        for change in run:
            self._routes.set_tier(change.fingerprint, backend, change.tier)


def nearest(parts: Iterable[_Part], fingerprint: Fingerprint) -> Tier:
    return min((part.held.tier(fingerprint) for part in parts), default=Tier.ABSENT)


def held_among(parts: Sequence[_Part], fingerprints: Sequence[Fingerprint]) -> Mapping[Fingerprint, Tier]:
    """Those of these that one of the parts holds, each where it is nearest."""
    found: dict[Fingerprint, Tier] = {}
    for part in parts:
        held = part.held
        if isinstance(held, HeldMany):
            own = held.held_among(fingerprints)
        else:
            own = {name: tier for name in fingerprints if (tier := held.tier(name)) is not Tier.ABSENT}
        found = (
            {**own, **{name: min(tier, own.get(name, tier)) for name, tier in found.items()}} if found else dict(own)
        )
    return found


def view_of(part: _Part, now: float) -> EngineCacheView:
    return EngineCacheView(
        source=part.source,
        level=part.level,
        reason=part.reason,
        level_age_s=now - part.since,
        changed_age_s=None if part.changed_at is None else now - part.changed_at,
        changes=part.changes,
        cleared=part.cleared,
    )
