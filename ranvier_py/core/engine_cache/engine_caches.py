"""Turns what engines report of their caches into routes of trust CONFIRMED, and withdrawals.

Rule: a backend has the level of its best channel, a channel that of its worst source. A change becomes a route where
the table is asked; a removal withdraws the route and those below it, and `sweep` corrects what events could not. Only
at EXACT is a route withdrawn for not being held. What a hybrid engine stores proves no reuse: it is ESTIMATED, unless
its events report recurrent states, too, which become its only checkpoints.
Invariant: at EXACT a swept table has at token depths what the engine holds (test_engine_caches_properties.py).
Bounds: those of the table; beyond ROWS_SHARE of it, changes at existing rows alone are confirmed, others counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.prefixes import Change
from ranvier_py.core.engine_cache.residency_values import Changes, Lack
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.engine_cache.states import StateMoved
from ranvier_py.core.ids import UNKNOWN, BackendId, Fingerprint
from ranvier_py.core.metrics import counter
from ranvier_py.core.prompts.fingerprint import ANCHOR_BLOCKS_DENSE, ANCHOR_STEP_BLOCKS, anchor_below
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.checkpoints.checkpoints import Checkpoints
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.routing.route_table.reconcile import Exact, Reconciler

GRACE_S = 5.0
"""Younger routes are not withdrawn for not being held: an engine publishes a step's events at the step's end, and a
batch of events may wait for the next."""

RUN_MAX = 256
"""Anchors of one run that are learned with one call: 64k tokens."""

ROWS_SHARE = 0.25
"""Share of the table for one engine. One of 4 M tokens has some 20,000 anchors, a fiftieth of a million rows."""

LEVELS = (Level.EXACT, Level.DEGRADED, Level.REPAIRING, Level.ESTIMATED)
"""Best first. REPAIRING ranks below DEGRADED: during a repair more may be undone than after it was given up."""
RANK = {level: rank for rank, level in enumerate(LEVELS)}


class Held(Protocol):
    """What a source keeps for one engine, or for one data-parallel rank of it. A Residency is one."""

    def held_among(self, fingerprints: Sequence[Fingerprint]) -> Mapping[Fingerprint, Tier]:
        """Return those of these prefixes that are held, each at its nearest tier, as of the last Changes handed in."""
        ...


class Source(NamedTuple):
    """Names who reports about a backend: a channel, or a part of one.

    The name is `channel` or `channel/part`: "push", "zmq/0" (rank 0). The parts of one channel report one engine
    together; several channels report the whole of it each.
    """

    backend: BackendId
    name: str

    @property
    def channel(self) -> str:
        return self.name.partition("/")[0]


@runtime_checkable
class HeldStates(Protocol):
    """A Held that also knows where recurrent states are."""

    def states(self) -> Iterable[StateMoved]: ...


@dataclass(slots=True, eq=False)
class SourceState:
    """What is known of one source. Times are of the caller's clock, None where there is none."""

    source: Source
    held: Held
    generation: int  # the registry's number when this source last reported
    since: float  # of the level
    level: Level = Level.ESTIMATED
    reason: str = "nothing received yet"
    mixed: bool = False  # its events show that the engine is a hybrid
    states: bool = False  # its events report recurrent states
    settled: bool = True  # its Changes were complete
    changed_at: float | None = None
    changes: int = 0  # prefixes that came, moved or went, since it was opened
    cleared: int = 0  # times that it reported that all is void


@dataclass(slots=True)
class EngineCacheCounters:
    confirmed: int = counter("Prefixes that an engine reported and that became routes.")
    removed: int = counter("Routes withdrawn because an engine dropped the prefix.")
    passed: int = counter("Reported prefixes at depths where the route table is never asked.")
    refused: int = counter("Reported prefixes refused because their engine already has its share of the route table.")
    voided: int = counter("Times that everything of one engine became void.")
    affirmed: int = counter("Routes that a sweep raised or refreshed.")
    retracted: int = counter("Routes that a sweep withdrew because the engine does not hold the prefix.")
    unknown: int = counter("Reports of a source that is not open, or of a backend that is gone.")


class _Engine:
    """The sources of one backend, and which of them count."""

    __slots__ = ("mixed_at", "mixed_round", "rows", "sources", "void_before")

    def __init__(self) -> None:
        self.sources: dict[str, SourceState] = {}
        self.rows = 0  # CONFIRMED: as the last sweep counted, plus and minus changes since
        self.void_before = float("-inf")  # evidence before this has no grace
        self.mixed_at: float | None = None  # when it became known as a hybrid
        self.mixed_round = 0  # number of the sweep's round at that time

    def best(self) -> tuple[Level, list[SourceState]]:
        """Return the backend's level, and all sources of the channels at this level."""
        channels: dict[str, list[SourceState]] = {}
        for state in self.sources.values():
            channels.setdefault(state.source.channel, []).append(state)
        ranks = {name: max(RANK[state.level] for state in sources) for name, sources in channels.items()}
        best = min(ranks.values(), default=RANK[Level.ESTIMATED])
        return LEVELS[best], [state for name, sources in channels.items() if ranks[name] == best for state in sources]


class EngineCaches:
    """Receives the reports of all channels.

    Args:
        generation_of: the current generation of a backend; -1 when there is no such backend.
        is_hybrid: whether a backend's metrics page shows caches beside those of attention.
        restarted: called when a source reports that its engine lost all that it held. Returns the generation that
            begins with that; if that is the current one, the routes are left to the sweeps.
        block_tokens: tokens of one of our blocks.
        checkpoints: receives the recurrent states that events report.
    """

    def __init__(
        self,
        routes: RouteTable,
        generation_of: Callable[[BackendId], int],
        *,
        is_hybrid: Callable[[BackendId], bool] = lambda _: False,
        restarted: Callable[[BackendId, str, float], int] | None = None,
        block_tokens: int = 16,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.counters = EngineCacheCounters()
        self._routes = routes
        self._reconciler = Reconciler(routes)
        self._generation_of = generation_of
        self._is_hybrid = is_hybrid
        self._restarted = restarted
        self._block_tokens = block_tokens
        self._checkpoints = checkpoints
        self._dense_anchors = tuple(block_tokens * blocks for blocks in ANCHOR_BLOCKS_DENSE)
        self._anchor_step = block_tokens * ANCHOR_STEP_BLOCKS
        self._known = routes.rows.index
        self._rows_max = int(routes.capacity * ROWS_SHARE)
        self._rounds = 0
        self._engines: dict[BackendId, _Engine] = {}

    # What channels report

    def open(self, source: Source, held: Held, now: float) -> None:
        """Register a source, or begin it anew. It is at ESTIMATED until `set_level` is called."""
        engine = self._engines.setdefault(source.backend, _Engine())
        engine.sources[source.name] = SourceState(source, held, self._generation_of(source.backend), now)

    def close(self, source: Source, now: float) -> None:  # noqa: ARG002  # given with the time, as everything is
        """Forget a source. The routes that it confirmed stay until they expire or another source corrects them."""
        engine = self._engines.get(source.backend)
        if engine is not None and engine.sources.pop(source.name, None) is not None and not engine.sources:
            del self._engines[source.backend]

    def set_level(self, source: Source, level: Level, reason: str, now: float, *, mixed: bool = False) -> None:
        """Set the level of a source. `mixed`: its events show that the engine is a hybrid."""
        state = self._state(source)
        if state is not None:
            state.level, state.reason, state.since, state.mixed = level, reason, now, mixed

    def changed(self, source: Source, changes: Changes, now: float) -> None:
        """Apply changes of the engine's prefixes, such as those that `Residency.settle` returns."""
        state, generation = self._state(source), self._generation_of(source.backend)
        if state is None or generation < 0:
            self.counters.unknown += 1
            return
        state.settled, state.states = changes.complete, changes.states is not None
        if changes.cleared:
            generation = self._void(state, generation, now)
        state.generation = generation
        found = changes.changes
        if self._is_mixed(source.backend, state):
            found = tuple([change for change in found if change.tier is Tier.ABSENT])
        if found:
            state.changed_at = now
            state.changes += len(found)
            self._apply(source.backend, generation, found, now)
        if changes.states and self._checkpoints is not None:
            self._checkpoints.states_changed(source.backend, generation, changes.states, now)

    def ranks(self, source: Source) -> int:
        """Return how many sources this source's channel has: the ranks of the engine, which may go one by one."""
        engine = self._engines.get(source.backend)
        sources = engine.sources.values() if engine is not None else ()
        return sum([state.source.channel == source.channel for state in sources])

    # What is known

    def level(self, backend: BackendId) -> Level:
        """The level of the backend's best channel; ESTIMATED without any, and for a hybrid of unknown states."""
        return self._best(backend)[0]

    def reason(self, backend: BackendId) -> str:
        """The reason for the level, as the worst source of the best channel gave it; empty without any source."""
        level, sources = self._best(backend)
        if sources and self._is_mixed(backend):
            return Lack.MIXED.value
        return next((state.reason for state in sources if state.level is level), "")

    def sweep(self, now: float, rows_max: int) -> int:
        """Correct the next rows of the table by what engines at EXACT hold: rows that came after their event, routes
        whose evidence ages, and peers' routes that are wrong. Returns how many routes changed."""
        exact = [each for backend, engine in self._engines.items() if (each := self._exact(backend, engine, now))]
        affirmed, retracted = self._reconciler.walk(rows_max, exact, now)
        if self._rounds != self._reconciler.rounds:
            self._rounds = self._reconciler.rounds
            for backend, engine in self._engines.items():
                engine.rows = self._reconciler.confirmed.get(backend, 0)
        self._follow_states(now)
        self.counters.affirmed += affirmed
        self.counters.retracted += retracted
        return affirmed + retracted

    def sources(self) -> list[SourceState]:
        """All sources, by backend."""
        return [state for _, engine in sorted(self._engines.items()) for state in engine.sources.values()]

    # Inside

    def _best(self, backend: BackendId) -> tuple[Level, list[SourceState]]:
        engine = self._engines.get(backend)
        level, sources = engine.best() if engine is not None else (Level.ESTIMATED, [])
        return Level.ESTIMATED if self._is_mixed(backend) else level, sources

    def _is_mixed(self, backend: BackendId, reporting: SourceState | None = None) -> bool:
        """Whether nothing is certain because the backend is a hybrid. The `reporting` source's own mark is ignored: it
        filters its changes itself, and its level may follow a moment later."""
        engine = self._engines.get(backend)
        sources = engine.sources.values() if engine is not None else ()
        is_blind = self._is_hybrid(backend) and not any(state.states for state in sources)
        return is_blind or any(state.mixed and state is not reporting for state in sources)

    def _follow_states(self, now: float) -> None:
        """Give `checkpoints` the states of the hybrids whose events report them all; the others' are unknown."""
        if self._checkpoints is None:
            return
        for backend in list(self._checkpoints.known):
            level, sources = self._best(backend)
            generation = self._generation_of(backend)
            if level is Level.EXACT and generation >= 0 and (states := states_of(sources)) is not None:
                self._checkpoints.states_known(backend, generation, states, now)
            else:
                self._checkpoints.states_unknown(backend, now)

    def _state(self, source: Source) -> SourceState | None:
        engine = self._engines.get(source.backend)
        return engine.sources.get(source.name) if engine is not None else None

    def _void(self, state: SourceState, generation: int, now: float) -> int:
        """Handle a report that all before is void. Returns the generation that counts from now on."""
        engine, backend = self._engines[state.source.backend], state.source.backend
        state.cleared += 1
        self.counters.voided += 1
        engine.void_before = now
        engine.rows = 0
        if self._restarted is None or self.ranks(state.source) > 1 or state.generation != generation:
            return (
                generation  # other ranks may still hold theirs; or it was noticed before, and this is the new process
            )
        return self._restarted(backend, f"{state.source.name}: it holds nothing any more", now)

    def _exact(self, backend: BackendId, engine: _Engine, now: float) -> Exact | None:
        generation = self._generation_of(backend)
        level, sources = self._best(backend)
        if self._is_mixed(backend):
            return self._doubted(backend, generation, engine, now)
        engine.mixed_at = None
        if level is not Level.EXACT or generation < 0 or not all(state.settled for state in sources):
            return None
        return Exact(backend, generation, partial(held_among, sources), max(now - GRACE_S, engine.void_before))

    def _doubted(self, backend: BackendId, generation: int, engine: _Engine, now: float) -> Exact | None:
        """For one whole round, an Exact that holds nothing: sweeps withdraw what a hybrid's events had confirmed."""
        if engine.mixed_at is None:
            engine.mixed_at, engine.mixed_round = now, self._reconciler.rounds
        if generation < 0 or self._reconciler.rounds > engine.mixed_round + 1:
            return None
        return Exact(backend, generation, lambda _: {}, engine.mixed_at + 1, Trust.CONFIRMED)  # evidence: whole seconds

    def _apply(self, backend: BackendId, generation: int, changes: Sequence[Change], now: float) -> None:
        routes, counters, known = self._routes, self.counters, self._known
        dense, step, engine = self._dense_anchors, self._anchor_step, self._engines[backend]
        full = engine.rows > self._rows_max
        held: Mapping[Fingerprint, Tier] = {}  # what is gone here, and another rank or a better channel holds
        if len(engine.sources) > 1:
            gone = [change.fingerprint for change in changes if change.tier is Tier.ABSENT]
            held = held_among(engine.best()[1], gone)
        passed = 0
        run: list[Change] = []  # consecutive anchors of one prompt
        for change in changes:
            fingerprint, tokens, tier, parent = change
            anchor = tokens in dense if tokens < step else not tokens % step
            if (full or not anchor) and fingerprint not in known:
                passed += 1
                counters.refused += anchor
            elif tier is Tier.ABSENT:
                if fingerprint not in held and routes.withdraw(fingerprint, backend, now):
                    counters.removed += 1
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
        counters.passed += passed

    def _confirm(self, backend: BackendId, generation: int, run: list[Change], now: float) -> None:
        """Learn one run of anchors of one prompt, shortest first, as CONFIRMED routes."""
        if not run:
            return
        chain: list[PrefixKey] = [(change.tokens, change.fingerprint, 0) for change in reversed(run)]
        if run[0].parent != UNKNOWN:
            blocks = run[0].tokens // self._block_tokens
            chain.append((anchor_below(blocks) * self._block_tokens, run[0].parent, 0))
        self._engines[backend].rows += self._routes.learn(chain, backend, generation, Trust.CONFIRMED, now)
        self.counters.confirmed += len(run)
        for change in run:
            self._routes.set_tier(change.fingerprint, backend, change.tier)


def states_of(sources: Sequence[SourceState]) -> Callable[[], Iterable[StateMoved]] | None:
    """Return what lists the engine's recurrent states, if a single source knows them all; else None."""
    if len(sources) == 1 and sources[0].states and sources[0].settled:
        held = sources[0].held
        return held.states if isinstance(held, HeldStates) else None
    return None


def held_among(sources: Sequence[SourceState], fingerprints: Sequence[Fingerprint]) -> Mapping[Fingerprint, Tier]:
    """Return those of the prefixes that any of the sources holds, each at its nearest tier."""
    found: dict[Fingerprint, Tier] = {}
    for state in sources:
        own = state.held.held_among(fingerprints)
        found = {**own, **{name: min(tier, own.get(name, tier)) for name, tier in found.items()}}
    return found
