"""Replay of a trace over several engines in virtual time, placed by the router's real core.

One heap of nothing: the next moment is the earliest of the next arrival, the engines' next steps and what goes on
beside them, so a run of ten minutes takes seconds and is the same every time. The router's own time counts as zero.
What it would tokenize off the path, it tokenizes here between two moments: a lesson is learned before the next request
comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from benchmarks.hit_rate_traces import Prepared
from ranvier_py.replay.engine.model import EngineEvent, EngineEventKind, EngineLimits, EngineModel


class Placement(Protocol):
    """The router under test. `route` names an engine by its index and returns what is handed back later."""

    def route(self, item: Prepared, now: float) -> tuple[int, Any]: ...
    def first_token(self, flight: Any, now: float) -> None: ...
    def finished(self, flight: Any, item: Prepared, cached_tokens: int, now: float) -> None: ...


class Background(Protocol):
    """What happens beside the requests, such as packets between nodes. It alone never keeps a run going."""

    def next_at(self) -> float: ...
    def advance(self, now: float) -> None: ...


class Nothing:
    """A Background in which nothing happens."""

    def next_at(self) -> float:
        return inf

    def advance(self, now: float) -> None:
        """Nothing is ever due."""


@dataclass(slots=True)
class Outcome:
    """What came of one replay."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    requests_by_engine: list[int] = field(default_factory=list)
    computed_by_engine: list[int] = field(default_factory=list)  # prompt tokens that were not cached
    ended_at_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens the engines did not compute."""
        return self.cached_tokens / max(1, self.prompt_tokens)


@dataclass(slots=True)
class Open:
    """A request at an engine."""

    item: Prepared
    engine: int
    flight: Any
    at: float


class Replay:
    """One run. `run` may be called once."""

    def __init__(
        self,
        items: Sequence[Prepared],
        placement: Placement,
        engines: int,
        limits: EngineLimits,
        background: Background | None = None,
    ) -> None:
        self._items = items
        self._background = background or Nothing()
        self._placement = placement
        self._engines = [EngineModel(limits) for _ in range(engines)]
        self._open: dict[str, Open] = {}
        self.outcome = Outcome(requests_by_engine=[0] * engines, computed_by_engine=[0] * engines)

    def run(self) -> Outcome:
        """Serve every request to its end."""
        arrived = 0
        due = [inf] * len(self._engines)
        while True:
            step_at = min(due)
            arrival_at = self._items[arrived].request.at if arrived < len(self._items) else inf
            now = min(step_at, arrival_at)
            if now == inf:
                break
            background_at = self._background.next_at()
            if background_at < now:
                self._background.advance(background_at)
                continue
            if step_at <= arrival_at:
                index = due.index(step_at)
                for event in self._engines[index].advance(now):
                    self._take(event)
            else:
                index = self._arrive(str(arrived), self._items[arrived], now)
                arrived += 1
            next_at = self._engines[index].next_event_at()
            due[index] = inf if next_at is None else next_at
            self.outcome.ended_at_s = now
        assert not self._open, "every request ends"
        return self.outcome

    def _arrive(self, request_id: str, item: Prepared, now: float) -> int:
        engine, flight = self._placement.route(item, now)
        self._open[request_id] = Open(item, engine, flight, now)
        self.outcome.requests_by_engine[engine] += 1
        self._engines[engine].submit(request_id, item.job, now)
        return engine

    def _take(self, event: EngineEvent) -> None:
        request, outcome = self._open[event.request_id], self.outcome
        if event.kind is EngineEventKind.STARTED:
            outcome.requests += 1
            outcome.prompt_tokens += request.item.job.prompt_tokens
            outcome.cached_tokens += event.cached_tokens
            outcome.computed_by_engine[request.engine] += request.item.job.prompt_tokens - event.cached_tokens
        elif event.kind is EngineEventKind.FINISHED:
            del self._open[event.request_id]
            self._placement.finished(request.flight, request.item, event.cached_tokens, event.at)
        elif event.tokens == 1:
            outcome.first_token_s.append(event.at - request.at)
            self._placement.first_token(request.flight, event.at)
