"""Executes the runs of one command: each in its own process, several at a time, with results in the order of the tasks.

Processes are forked, so all share the trace that was prepared once. With one job or one task nothing is forked.

Rules: a run that fails ends the command with the run's traceback; no process outlives the command, however that ends.
Bound: `jobs` processes, each with its own engines, nodes and routes; the trace is shared copy-on-write.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from multiprocessing import connection, sharedctypes
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkProcess
from typing import NamedTuple

import orjson

from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.engine.model import EngineModel
from ranvier_py.replay.knowledge import EVENTS_MAX
from ranvier_py.replay.oracles import ORACLES
from ranvier_py.replay.replay_nodes import Nodes
from ranvier_py.replay.replay_plan import Plan, Prepared, prepare
from ranvier_py.replay.replay_run import Run
from ranvier_py.replay.results import RunResult, TraceSummary
from ranvier_py.replay.traces.trace import Trace

POLL_S = 0.2
"""Seconds between two reports of progress: five per second look smooth."""

EXIT_GRACE_S = 5.0
"""Seconds that the command waits for a process that it asked to end."""

Clock = Callable[[], float]
"""Returns seconds of wall time since any fixed moment."""

Watcher = Callable[[int, int], object]
"""Called with the number of arrivals in all runs together, and the number of runs that have ended."""


class RunFailed(Exception):
    """A run failed, or its process was killed. The message names the run and has its traceback, if it sent one."""


class Ready(NamedTuple):
    """A trace that has been prepared once for all runs."""

    summary: TraceSummary
    items: Sequence[Prepared]


class Task(NamedTuple):
    """One run: its trace and its plan."""

    ready: Ready
    plan: Plan


class Done(NamedTuple):
    """The outcome of a task. `lines`: a line of JSON for each request, if the plan asks for them."""

    result: RunResult
    lines: bytes


def make_ready(trace: Trace, *, stream: bool = True) -> Ready:
    requests = trace.requests
    summary = TraceSummary(
        name=trace.name,
        requests=len(requests),
        prompt_tokens=sum(request.prompt_tokens for request in requests),
        answer_tokens=sum(request.answer_tokens for request in requests),
        block_tokens=trace.block_tokens,
        span_s=round(requests[-1].at - requests[0].at, 3) if requests else 0.0,
        timed=trace.timed,
    )
    return Ready(summary, prepare(trace, stream=stream))


def make_run(task: Task) -> Run:
    """Make the engines, the nodes or oracle, and the run of a task."""
    (summary, items), plan = task
    events_max = EVENTS_MAX if plan.knowledge in ("events", "attention") else 0
    engines = [EngineModel(replace(limits, cache_events_max=events_max)) for limits in plan.engines]
    oracle = ORACLES.get(plan.policy)
    placer = oracle(engines) if oracle else Nodes(plan, engines, summary.block_tokens)
    return Run(plan, items, engines, placer)


def execute(task: Task, clock: Clock, report: Callable[[int], object] = lambda _: None) -> Done:
    """Execute one run in this process. Calls `report` with the number of arrivals so far."""
    began = clock()
    run = make_run(task)
    run.go(report)
    summary, plan, network = task.ready.summary, task.plan, run.placer.network
    result = RunResult(
        trace=summary.name,
        policy=plan.policy,
        nodes=plan.nodes,
        engines=len(plan.engines),
        rate=plan.speed,
        seed=plan.seed,
        gossip_packets=network.packets if network else 0,
        gossip_bytes=network.bytes_sent if network else 0,
        caches=tuple(dict.fromkeys(limits.cache for limits in plan.engines)),
        wall_s=round(clock() - began, 3),
        **run.tally.measures(run.span_s),
    )
    named = {"trace": summary.name, "policy": plan.policy, "nodes": plan.nodes, "rate": plan.speed}
    return Done(result, b"".join(orjson.dumps({**named, **row}) + b"\n" for row in run.rows))


def execute_all(tasks: Sequence[Task], jobs: int, clock: Clock, watch: Watcher = lambda *_: None) -> list[Done]:
    """Execute all tasks, `jobs` at a time. Raises RunFailed if a run fails or a process dies."""
    if jobs > 1 and len(tasks) > 1:
        return Workers(tasks, jobs, clock, watch).work()
    done: list[Done] = []
    before = 0
    for task in tasks:
        try:
            found = execute(task, clock, lambda count: watch(before + count, len(done)))  # noqa: B023  # called at once
        except Exception as error:
            raise RunFailed(failure(task.plan, traceback.format_exc())) from error
        done.append(found)
        before += len(task.ready.items)
        watch(before, len(done))
    return done


def failure(plan: Plan, why: str) -> str:
    return f"the run of {plan.policy} on {plan.nodes} nodes at rate {plan.speed:g} died: {why}"


class Workers:
    """Runs tasks in forked processes. `work` may be called once. Raises RunFailed."""

    def __init__(self, tasks: Sequence[Task], jobs: int, clock: Clock, watch: Watcher) -> None:
        self._context: ForkContext = multiprocessing.get_context("fork")
        self._tasks, self._jobs, self._clock = tasks, jobs, clock
        self._watch = watch
        self._counts = sharedctypes.RawArray("q", len(tasks))  # arrivals by task, written by its process and read here
        self._running: dict[Connection, tuple[int, ForkProcess]] = {}
        self._done: list[Done | None] = [None] * len(tasks)

    def work(self) -> list[Done]:
        waiting = deque(range(len(self._tasks)))
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._jobs:
                    self._start(waiting.popleft())
                for each in connection.wait(list(self._running), POLL_S):
                    assert isinstance(each, Connection)
                    self._collect(each)
                self._watch(sum(self._counts), sum(done is not None for done in self._done))
        finally:
            for _, process in self._running.values():
                process.terminate()
            for _, process in self._running.values():
                process.join(EXIT_GRACE_S)
        return [done for done in self._done if done is not None]

    def _start(self, index: int) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=self._serve, args=(index, theirs), daemon=True)
        process.start()
        theirs.close()
        self._running[ours] = (index, process)

    def _serve(self, index: int, to: Connection) -> None:
        """Run one task in the new process. It ignores Ctrl-C: the parent gets it, too, and ends this process."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parent = multiprocessing.parent_process()

        def report(count: int) -> None:
            self._counts[index] = count
            if parent is not None and not parent.is_alive():
                raise SystemExit  # the parent was killed: nobody waits for this run

        try:
            to.send(execute(self._tasks[index], self._clock, report))
        except Exception:  # the parent reports any error
            to.send(traceback.format_exc())
        to.close()

    def _collect(self, source: Connection) -> None:
        index, process = self._running.pop(source)
        try:
            answer = source.recv()
        except (EOFError, OSError):  # it died before or while it sent its result
            answer = "its process was killed"
        source.close()
        process.join()
        if not isinstance(answer, Done):
            raise RunFailed(failure(self._tasks[index].plan, answer))
        self._done[index] = answer


def plain(plan: Plan) -> dict[str, object]:
    """Return what all runs of a command have in common, as JSON-ready values."""
    return {
        "engines": [{"count": count, **shown(limits)} for limits, count in Counter(plan.engines).items()],
        "policy_options": dict(plan.options.named),
        "gossip_delay_s": plan.gossip_delay_s,
        "knowledge": plan.knowledge,
        "routes": {"capacity": plan.routes_max, "eviction": plan.routes.eviction},
        "restarts": [list(restart) for restart in plan.restarts],
        "seed": plan.seed,
    }


def shown(limits: EngineLimits) -> dict[str, float]:
    """Return an engine's limits without the block size, which is the trace's, and without the bound of cache events."""
    return {name: value for name, value in asdict(limits).items() if name not in ("block_size", "cache_events_max")}
