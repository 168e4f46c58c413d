"""One run of a replay: arrivals, engines, restarts, and what passes between nodes, on one clock of virtual time.

The next moment is the earliest of the next arrival, the engines' next steps, the next restart and what goes on beside
them; nothing waits. The router's own time counts as zero. The nodes have START_S to find each other before the first
request. What happens at one moment happens in this order: beside, engines (by index), restarts, arrivals.

Rules: every request ends once: finished, refused by its engine, or aborted by a restart. Runs of one plan are equal.
Cost: about 50 us for a request, and what engines and gossip take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ranvier_py.core.errors import RequestError
from ranvier_py.core.routing.backends import Outcome
from ranvier_py.core.routing.placement.policies import PlacementOptions
from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.model import (
    EngineError,
    EngineEvent,
    EngineEventKind,
    EngineLimits,
    EngineModel,
    PromptTooLongError,
)
from ranvier_py.replay.knowledge import KnowledgeName
from ranvier_py.replay.regret import regret
from ranvier_py.replay.replay_nodes import Placed
from ranvier_py.replay.results import DIGITS, Tally

START_S = 10.0
"""Before the first request: the peers have found each other by then."""

TOLD_EVERY = 200
"""Requests between two words about progress: ten a second at 2,000 requests/s."""

QUEUE_FULL, TOO_LONG, RESTARTED, NO_ENGINE = "queue_full", "prompt_too_long", "engine_restarted", "no_engine"


class Restart(NamedTuple):
    """A new process of an engine, so many seconds after the first arrival."""

    at: float
    engine: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All that decides a run but the trace. `nodes` 0: an oracle places. `speed` divides the gaps between arrivals."""

    policy: str
    nodes: int
    engines: tuple[EngineLimits, ...]
    speed: float = 1.0
    seed: int = 1
    options: PlacementOptions = field(default_factory=PlacementOptions)
    gossip_delay_s: float | None = None
    restarts: tuple[Restart, ...] = ()
    regret: bool = True
    per_request: bool = False
    knowledge: KnowledgeName = "calibrated"


class Arrival(Protocol):
    """When a request comes, and in which conversation."""

    @property
    def at(self) -> float: ...
    @property
    def session(self) -> str: ...


class Item(Protocol):
    """A request as a run takes it; a placer may want more of it."""

    @property
    def request(self) -> Arrival: ...
    @property
    def job(self) -> Job: ...


AnyItem = TypeVar("AnyItem", bound=Item)
Item_contra = TypeVar("Item_contra", bound=Item, contravariant=True)
AnyPlaced = TypeVar("AnyPlaced", bound=Placed)


class Placer(Protocol[Item_contra, AnyPlaced]):
    """Who places requests: nodes, or an oracle."""

    def place(self, item: Item_contra, now: float) -> AnyPlaced: ...
    def first_token(self, placed: AnyPlaced, now: float) -> None: ...
    def finished(self, placed: AnyPlaced, item: Item_contra, cached_tokens: int, now: float) -> None: ...
    def failed(self, placed: AnyPlaced, outcome: Outcome, now: float) -> None: ...
    def restarted(self, engine: int, now: float) -> None: ...
    def next_at(self) -> float: ...
    def advance(self, now: float) -> None: ...


class Open(Generic[AnyItem, AnyPlaced]):
    """A request at an engine. `row` is what is told of it alone, where that is wanted."""

    __slots__ = ("at", "item", "placed", "row")

    def __init__(self, item: AnyItem, placed: AnyPlaced, at: float) -> None:
        self.item = item
        self.placed = placed
        self.at = at
        self.row: dict[str, Any] = {}


def arrivals_of(items: Sequence[Item], speed: float) -> list[float]:
    """When the requests come: the first at START_S, the others after gaps that `speed` divides."""
    first = items[0].request.at if items else 0.0
    return [START_S + (item.request.at - first) / speed for item in items]


class Run(Generic[AnyItem, AnyPlaced]):
    """One run. `arrivals` are times of virtual time, ascending, one for each of `items`. `go` may be called once."""

    def __init__(
        self,
        plan: Plan,
        items: Sequence[AnyItem],
        arrivals: Sequence[float],
        engines: Sequence[EngineModel],
        placer: Placer[AnyItem, AnyPlaced],
    ) -> None:
        self._items = items
        self._arrivals = arrivals
        self._started_at = arrivals[0] if arrivals else START_S
        self._engines = engines
        self._placer = placer
        self._regret = plan.regret
        self._restarts = sorted(Restart(self._started_at + at, engine) for at, engine in plan.restarts)
        self._per_request = plan.per_request
        self._due = [inf] * len(engines)
        self._open: dict[str, Open[AnyItem, AnyPlaced]] = {}
        self.rows: list[dict[str, Any]] = []
        self.tally = Tally(len(engines), self._started_at)

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return self._arrivals[-1] - self._started_at if self._arrivals else 0.0

    def go(self, told: Callable[[int], object] = lambda _: None) -> None:
        """Serve every request to its end. `told` hears now and then how many have come."""
        placer, due, samples = self._placer, self._due, self.tally.samples
        arrivals, arrived, restarted = [*self._arrivals, inf], 0, 0
        restarts = [*self._restarts, Restart(inf, 0)]
        while True:
            step_at, arrival_at, restart_at = min(due), arrivals[arrived], restarts[restarted].at
            now = min(step_at, arrival_at)
            if now == inf:
                break
            now = min(now, restart_at)
            while (beside_at := placer.next_at()) <= now:
                placer.advance(beside_at)
            if now >= samples.due_at:
                samples.take(now, self.tally.inflight)
            if step_at <= now:
                self._step(due.index(step_at), now)
            elif restart_at <= now:
                self._restart(restarts[restarted].engine, now)
                restarted += 1
            else:
                self._arrive(str(arrived), self._items[arrived], now)
                arrived += 1
                if arrived % TOLD_EVERY == 0:
                    told(arrived)
        assert not self._open, "every request ends"
        told(arrived)

    # --- what happens -----------------------------------------------------------------------------------------------

    def _arrive(self, request_id: str, item: AnyItem, now: float) -> None:
        tally = self.tally
        tally.requests += 1
        try:
            placed = self._placer.place(item, now)
        except RequestError:
            tally.failed(NO_ENGINE)
            return
        engine, job = placed.engine, item.job
        tally.placed(engine, placed.reason, job.prompt_tokens, placed.predicted_tokens)
        request = self._open[request_id] = Open(item, placed, now)
        if self._per_request:
            request.row = row_of(item, placed, now - self._started_at)
            self.rows.append(request.row)
        if self._regret:
            self._note_regret(request, now)
        try:
            self._engines[engine].submit(request_id, job, now)
        except EngineError as refused:
            too_long = isinstance(refused, PromptTooLongError)
            outcome = Outcome.SUCCESS if too_long else Outcome.OVERLOADED  # 400: the engine did its work
            self._fail(request_id, TOO_LONG if too_long else QUEUE_FULL, outcome, now)
        self._note_due(engine)

    def _note_regret(self, request: Open[AnyItem, AnyPlaced], now: float) -> None:
        """Before it is submitted. What the chosen engine will refuse has no time that could be lost."""
        lost_s = regret(request.item.job, self._engines, range(len(self._engines)), request.placed.engine, now)
        if isfinite(lost_s):
            self.tally.regret_s.append(lost_s)
            request.row["regret_s"] = round(lost_s, DIGITS)

    def _step(self, engine: int, now: float) -> None:
        for event in self._engines[engine].advance(now):
            self._take(event)
        self._note_due(engine)

    def _restart(self, engine: int, now: float) -> None:
        self._engines[engine].restart(now)
        self._placer.restarted(engine, now)
        self._step(engine, now)

    def _note_due(self, engine: int) -> None:
        next_at = self._engines[engine].next_event_at()
        self._due[engine] = inf if next_at is None else next_at

    def _take(self, event: EngineEvent) -> None:
        kind = event.kind
        if kind is EngineEventKind.TOKEN:
            if event.tokens == 1:
                self._first_token(self._open[event.request_id], event.at)
        elif kind is EngineEventKind.STARTED:
            request = self._open[event.request_id]
            self.tally.started(request.placed.engine, request.item.job.prompt_tokens, event.cached_tokens)
            request.row["cached"] = event.cached_tokens
        elif kind is EngineEventKind.FINISHED:
            request = self._close(event.request_id, event.at)
            self.tally.e2e_s.append(event.at - request.at)
            self._placer.finished(request.placed, request.item, event.cached_tokens, event.at)
        else:
            self._fail(event.request_id, RESTARTED, Outcome.BROKEN, event.at)

    def _first_token(self, request: Open[AnyItem, AnyPlaced], at: float) -> None:
        self.tally.ttft_s.append(at - request.at)
        request.row["ttft_s"] = round(at - request.at, DIGITS)
        self._placer.first_token(request.placed, at)

    def _fail(self, request_id: str, reason: str, outcome: Outcome, now: float) -> None:
        request = self._close(request_id, now)
        self.tally.failed(reason)
        request.row["failed"] = reason
        self._placer.failed(request.placed, outcome, now)

    def _close(self, request_id: str, now: float) -> Open[AnyItem, AnyPlaced]:
        request = self._open.pop(request_id)
        self.tally.inflight[request.placed.engine] -= 1
        self.tally.ended_at = max(self.tally.ended_at, now)
        return request


def row_of(item: Item, placed: Placed, at: float) -> dict[str, Any]:
    """What is told of one request alone; the rest comes as it is known."""
    return {
        "at": round(at, DIGITS),
        "session": item.request.session,
        "node": placed.node,
        "engine": placed.engine,
        "reason": placed.reason,
        "matched": placed.predicted_tokens,
        "prompt": item.job.prompt_tokens,
        "terms": [dict(each) for each in placed.terms],
    }
