"""Replay of a text trace over several engines in virtual time, placed by the router's real core.

The clock, the engines and the books are those of `ranvier replay` (`ranvier_py.replay.replay_run`). What is different
here is that requests have text: a Placement reads, tokenizes and teaches as a node does, at once, so a route update is
learned before the next request comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from benchmarks.hit_rate_traces import Prepared
from ranvier_py.core.routing.backends import Outcome as HowEnded
from ranvier_py.replay.engine.model import EngineLimits, EngineModel
from ranvier_py.replay.replay_nodes import Placed
from ranvier_py.replay.replay_run import Plan, Run


class Placement(Protocol):
    """The router under test. `route` names an engine by its index and returns what is handed back later."""

    def route(self, item: Prepared, now: float) -> tuple[int, Any]: ...
    def first_token(self, attempt: Any, now: float) -> None: ...
    def finished(self, attempt: Any, item: Prepared, cached_tokens: int, now: float) -> None: ...


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
class Sent(Placed):
    """With what the placement wants back."""

    own: Any = None


class TextPlacer:
    """A placement and what goes on beside it, as a run drives them."""

    def __init__(self, placement: Placement, background: Background) -> None:
        self._placement = placement
        self.next_at = background.next_at
        self.advance = background.advance

    def place(self, item: Prepared, now: float) -> Sent:
        engine, attempt = self._placement.route(item, now)
        return Sent(engine, "", 0, own=attempt)

    def first_token(self, placed: Sent, now: float) -> None:
        self._placement.first_token(placed.own, now)

    def finished(self, placed: Sent, item: Prepared, cached_tokens: int, now: float) -> None:
        self._placement.finished(placed.own, item, cached_tokens, now)

    def failed(self, placed: Sent, outcome: HowEnded, now: float) -> None:  # noqa: ARG002  # see Placer
        raise AssertionError("every prompt fits, every queue is long enough, and no engine restarts")

    def restarted(self, engine: int, now: float) -> None:  # noqa: ARG002  # see Placer
        raise AssertionError("no engine restarts")


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
        plan = Plan("", 1, (limits,) * engines, regret=False)
        models = [EngineModel(limits) for _ in range(engines)]
        arrivals = [item.request.at for item in items]
        self._run = Run(plan, items, arrivals, models, TextPlacer(placement, background or Nothing()))

    def run(self) -> Outcome:
        """Serve every request to its end."""
        self._run.go()
        tally = self._run.tally
        return Outcome(
            requests=tally.requests,
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=tally.cached_tokens,
            first_token_s=tally.ttft_s,
            requests_by_engine=tally.requests_by_engine,
            computed_by_engine=tally.computed_by_engine,
            ended_at_s=tally.ended_at,
        )
