"""Runs the engine model in real time: one task advances it, and requests wait at their mailboxes.

Invariant: every mailbox ends exactly once, as finished, aborted (by a restart) or cancelled (its owner left).
Cost: one wake-up per step of the engine, and one per waiting request and step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from cluster.engine.occupancy import Occupancy
from ranvier_py.core.metrics import LATENCY_BUCKETS_S, Histogram
from ranvier_py.replay.engine.block_cache import CacheEvent, Job
from ranvier_py.replay.engine.engine_values import EngineEvent, EngineEventKind, EngineLimits, EngineStatistics
from ranvier_py.replay.engine.model import EngineModel


@dataclass(slots=True, eq=False)
class Mailbox:
    """The progress of one request, for the task that waits for it."""

    request_id: str
    job: Job
    arrived_at: float
    tokens: int = 0  # answer tokens that are out
    cached_tokens: int = 0
    started: bool = False
    ended: bool = False
    aborted: bool = False
    changed: trio.Event = field(default_factory=trio.Event)

    async def wait_tokens(self, more_than: int) -> int:
        """Wait until more answer tokens are out than this, or the request has ended. Returns how many are out."""
        while self.tokens <= more_than and not self.ended:
            await self.changed.wait()
        return self.tokens

    def wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class LiveEngine:
    """Drives one EngineModel by trio's clock. `run` must be running.

    `changed` gets the cache's changes step by step, if the limits let the model record them.
    """

    def __init__(
        self, limits: EngineLimits, changed: Callable[[Sequence[CacheEvent]], object] = lambda _: None
    ) -> None:
        self._changed = changed
        self.model = EngineModel(limits, every_token=True)
        self.started_at = time.time()
        self.first_token_s = Histogram(LATENCY_BUCKETS_S)
        self.duration_s = Histogram(LATENCY_BUCKETS_S)
        self._occupancy = Occupancy()
        self._mailboxes: dict[str, Mailbox] = {}
        self._wake = trio.Event()
        self._held_until = -math.inf
        self._hold_changed = trio.Event()

    async def run(self) -> None:
        """Advance the model at each event that is due, for ever."""
        self._occupancy.note(trio.current_time(), 0, 0)
        while True:
            due = self.model.next_event_at()
            with trio.move_on_at(math.inf if due is None else due):
                await self._wake.wait()
            await self.wait_released()
            self._wake = trio.Event()
            self._deliver()

    def hold(self, until: float) -> None:
        """Deliver nothing until then, by trio's clock, as a process that was stopped; the past ends that at once."""
        self._held_until = until
        self._hold_changed.set()
        self._hold_changed = trio.Event()

    async def wait_released(self) -> None:
        while trio.current_time() < self._held_until:
            with trio.move_on_at(self._held_until):
                await self._hold_changed.wait()

    def submit(self, request_id: str, job: Job) -> Mailbox:
        """Queue a request. Raises EngineError, or ValueError for an id that is in use."""
        now = trio.current_time()
        self.model.submit(request_id, job, now)
        mailbox = self._mailboxes[request_id] = Mailbox(request_id, job, now)
        self._occupancy.note(now, 0, 1)
        self._wake.set()
        return mailbox

    def leave(self, mailbox: Mailbox) -> None:
        """Give up a mailbox, which cancels its request unless it has ended."""
        if self._mailboxes.pop(mailbox.request_id, None) is not None and not mailbox.ended:
            now = trio.current_time()
            self.model.cancel(mailbox.request_id, now)
            mailbox.ended = True
            self._note_gone(mailbox, now)
            self._wake.set()

    def restart(self) -> None:
        """Become a new process: empty cache, all requests aborted, totals at zero."""
        self._deliver()
        self.model.restart(trio.current_time())
        self.model.cache.drain_events()  # a new process has nothing to clear
        self.started_at = max(time.time(), self.started_at + 0.001)  # the page shows milliseconds
        self.first_token_s = Histogram(LATENCY_BUCKETS_S)
        self.duration_s = Histogram(LATENCY_BUCKETS_S)
        self._deliver()

    def clear_cache(self) -> None:
        self.model.clear_cache(trio.current_time())
        self._publish_changes()

    def statistics(self) -> EngineStatistics:
        return self.model.statistics()

    def _deliver(self) -> None:
        touched: dict[str, Mailbox] = {}
        for event in self.model.advance(trio.current_time()):
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is not None:
                self._note(mailbox, event)
                touched[event.request_id] = mailbox
        self._publish_changes()
        for mailbox in touched.values():
            mailbox.wake()

    def occupancy(self) -> dict[str, Any]:
        """Return since when how many requests ran and waited, by the clock that all processes of a machine share."""
        return self._occupancy.record(time.monotonic() - trio.current_time())

    def _note_gone(self, mailbox: Mailbox, at: float) -> None:
        self._occupancy.note(at, *((-1, 0) if mailbox.started else (0, -1)))

    def _publish_changes(self) -> None:
        changes = self.model.cache.drain_events()
        if changes:
            self._changed(changes)

    def _note(self, mailbox: Mailbox, event: EngineEvent) -> None:
        mailbox.cached_tokens = event.cached_tokens
        mailbox.tokens = event.tokens
        if event.kind is EngineEventKind.STARTED:
            mailbox.started = True
            self._occupancy.note(event.at, 1, -1)
        elif event.kind is EngineEventKind.ABORTED:
            mailbox.ended = mailbox.aborted = True
            self._note_gone(mailbox, event.at)
        elif event.kind is EngineEventKind.FINISHED:
            mailbox.ended = True
            self._note_gone(mailbox, event.at)
            self.duration_s.observe(event.at - mailbox.arrived_at)
        elif event.tokens == 1:
            self.first_token_s.observe(event.at - mailbox.arrived_at)
