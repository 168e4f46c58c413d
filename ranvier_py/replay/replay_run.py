"""One run of a replay: it handles arrivals, engines, restarts, probes and gossip on one clock of virtual time.

The router's own time counts as zero. Order at one moment: probes and gossip, engines by index, restarts, arrivals.

Rules: every request ends once: not placed, refused by its engine, aborted by a restart, or finished. It is repeatable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf, isfinite
from typing import Any

from ranvier_py.core.errors import NoBackend
from ranvier_py.core.routing.backends import Outcome
from ranvier_py.replay.engine.engine_values import EngineError, EngineEvent, EngineEventKind, PromptTooLongError
from ranvier_py.replay.engine.model import EngineModel
from ranvier_py.replay.oracles import regret
from ranvier_py.replay.replay_plan import Placed, Placer, Plan, Prepared, Restart
from ranvier_py.replay.results import DIGITS, Tally

START_S = 10.0
"""Virtual time of the first request. By then the peers have found each other."""

REPORT_EVERY = 200
"""Requests between two reports of progress."""

QUEUE_FULL, TOO_LONG, RESTARTED, NO_ENGINE = "queue_full", "prompt_too_long", "engine_restarted", "no_engine"


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request in flight. `row` is its line of the per-request file; unused if the plan does not ask for that file."""

    item: Prepared
    placed: Placed
    at: float
    row: dict[str, Any] = field(default_factory=dict)


class Run:
    """One run. `go` may be called once; then `tally` has the counts and `rows` a row per request, if the plan asks."""

    def __init__(self, plan: Plan, items: Sequence[Prepared], engines: Sequence[EngineModel], placer: Placer) -> None:
        first = items[0].request.at if items else 0.0
        self._items = items
        self._arrivals = [(START_S + (item.request.at - first) / plan.speed, index) for index, item in enumerate(items)]
        self._last_at = max((at for at, _ in self._arrivals), default=START_S)
        self._think_s = plan.think_s
        self._turns: dict[str, deque[int]] = {}  # by session, those that wait for the answer before them
        self._engines, self.placer = engines, placer
        self._regret = plan.regret
        self._restarts = sorted(Restart(START_S + at, engine) for at, engine in plan.restarts)
        self._per_request = plan.per_request
        self._due = [inf] * len(engines)
        self._pending: dict[str, PendingRequest] = {}
        self.rows: list[dict[str, Any]] = []
        self.tally = Tally(len(engines), START_S)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self._last_at - START_S

    def go(self, report: Callable[[int], object] = lambda _: None) -> None:
        """Serve every request to its end. Calls `report` with the number of arrivals: every REPORT_EVERY, and last."""
        placer, due, samples = self.placer, self._due, self.tally.samples
        self._hold_turns()
        arrivals, arrived, restarted = self._arrivals, 0, 0
        restarts = [*self._restarts, Restart(inf, 0)]
        while True:
            step_at, arrival_at, restart_at = min(due), arrivals[0][0] if arrivals else inf, restarts[restarted].at
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
                index = heappop(arrivals)[1]
                self._arrive(str(index), self._items[index], now)
                arrived += 1
                if arrived % REPORT_EVERY == 0:
                    report(arrived)
        assert not self._pending, "every request ends"
        report(arrived)

    def _hold_turns(self) -> None:
        """Where turns wait for answers, keep all but the first of each session back."""
        if self._think_s is None:
            return
        for _, index in self._arrivals:
            self._turns.setdefault(self._items[index].request.session or str(index), deque()).append(index)
        firsts = {turns.popleft() for turns in self._turns.values()}
        self._arrivals = [each for each in self._arrivals if each[1] in firsts]
        heapify(self._arrivals)

    def _answered(self, session: str, now: float) -> None:
        """Let the session's next turn come, if turns wait for answers."""
        if self._think_s is not None and (turns := self._turns.get(session)):
            heappush(self._arrivals, (now + self._think_s, turns.popleft()))
            self._last_at = max(self._last_at, now + self._think_s)

    def _arrive(self, request_id: str, item: Prepared, now: float) -> None:
        tally = self.tally
        tally.requests += 1
        try:
            placed = self.placer.place(item, now)
        except NoBackend:
            tally.failed(NO_ENGINE)
            self._answered(item.request.session, now)
            if self._per_request:
                self.rows.append({**row_of(item, now - START_S), "failed": NO_ENGINE})
            return
        engine, job = placed.engine, item.job
        tally.placed(engine, placed.reason, job.prompt_tokens, placed.predicted_tokens)
        request = self._pending[request_id] = PendingRequest(item, placed, now)
        if self._per_request:
            request.row = {**row_of(item, now - START_S), **placement_of(placed)}
            self.rows.append(request.row)
        if self._regret:
            self._note_regret(request, now)
        try:
            self._engines[engine].submit(request_id, job, now)
        except EngineError as refused:
            too_long = isinstance(refused, PromptTooLongError)
            outcome = Outcome.REFUSED if too_long else Outcome.OVERLOADED  # 400 or 429
            self._fail(request_id, TOO_LONG if too_long else QUEUE_FULL, outcome, now)
        self._note_due(engine, now)

    def _note_regret(self, request: PendingRequest, now: float) -> None:
        """Before the request is submitted, note its regret, unless only the chosen engine would refuse the request."""
        lost_s = regret(request.item.job, self._engines, request.placed.engine, now)
        if isfinite(lost_s):
            self.tally.times.regret_s.append(lost_s)
            request.row["regret_s"] = round(lost_s, DIGITS)

    def _step(self, engine: int, now: float) -> None:
        for event in self._engines[engine].advance(now):
            self._take(event)
        self._note_due(engine, now)

    def _restart(self, engine: int, now: float) -> None:
        self._engines[engine].restart(now)
        self.placer.restarted(engine, now)
        self._step(engine, now)

    def _note_due(self, engine: int, now: float) -> None:
        model = self._engines[engine]
        next_at = model.next_event_at()
        self._due[engine] = inf if next_at is None else next_at
        self.tally.unevenness.note(engine, model.running, model.waiting, now)

    def _take(self, event: EngineEvent) -> None:
        kind = event.kind
        if kind is EngineEventKind.TOKEN:
            if event.tokens == 1:
                self._first_token(self._pending[event.request_id], event.at)
        elif kind is EngineEventKind.STARTED:
            request = self._pending[event.request_id]
            self.tally.started(request.placed.engine, request.item.job.prompt_tokens, event.cached_tokens)
            request.row["cached"] = event.cached_tokens
        elif kind is EngineEventKind.FINISHED:
            request = self._end(event.request_id, event.at)
            self.tally.times.e2e_s.append(event.at - request.at)
            if not request.item.prompt.stream:  # all of the answer came at once
                self.placer.first_token(request.placed, event.at)
            self.placer.finished(request.placed, request.item, event.cached_tokens, event.at)
        else:
            self._fail(event.request_id, RESTARTED, Outcome.BROKEN, event.at)

    def _first_token(self, request: PendingRequest, at: float) -> None:
        self.tally.times.ttft_s.append(at - request.at)
        request.row["ttft_s"] = round(at - request.at, DIGITS)
        if request.item.prompt.stream:
            self.placer.first_token(request.placed, at)

    def _fail(self, request_id: str, reason: str, outcome: Outcome, now: float) -> None:
        request = self._end(request_id, now)
        self.tally.failed(reason)
        request.row["failed"] = reason
        self.placer.failed(request.placed, outcome, now)

    def _end(self, request_id: str, now: float) -> PendingRequest:
        request = self._pending.pop(request_id)
        self.tally.inflight[request.placed.engine] -= 1
        self.tally.ended_at = max(self.tally.ended_at, now)
        self._answered(request.item.request.session, now)
        return request


def row_of(item: Prepared, at: float) -> dict[str, Any]:
    """Return what is known of a request when it arrives. Later events add its placement, cached tokens and times,
    or why it failed."""
    return {"at": round(at, DIGITS), "session": item.request.session, "prompt": item.job.prompt_tokens}


def placement_of(placed: Placed) -> dict[str, Any]:
    return {
        "node": placed.node,
        "engine": placed.engine,
        "reason": placed.reason,
        "matched": placed.predicted_tokens,
        "terms": [dict(each) for each in placed.terms],
    }
