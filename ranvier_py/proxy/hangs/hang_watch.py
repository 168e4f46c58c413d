"""Watches for engines that hang, takes them out, and has the requests that wait there placed again.

A request is moved if nothing of its answer has come, it may be repeated by the rules of retries, was not moved before,
and a healthy engine has room for it; else it stays. Its connection to the engine that hangs is closed. The failed try
counts as any time-out does: it blames the engine once another one serves the request.

Cost: looks at every backend a few times a second, and at requests only while something is suspected.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import trio

from ranvier_py.core.errors import RanvierError, UpstreamHangs
from ranvier_py.core.findings import counted
from ranvier_py.core.ids import BackendId
from ranvier_py.core.log_events import event
from ranvier_py.core.routing.backends import Backend, Transition
from ranvier_py.core.routing.blame.hangs import SUSPICION_SHARE, Hangs, Silence
from ranvier_py.core.routing.retries import may_repeat
from ranvier_py.core.routing.router import Router
from ranvier_py.proxy.call import Call

log = logging.getLogger(__name__)

LOOKS = 4  # within the time after which an engine is suspected
MOVES_MAX = 64  # in one look: each is matched and placed twice, which takes a millisecond at most


class HangWatch:
    def __init__(
        self,
        router: Router,
        serving: Mapping[int, Call],
        hang_s: float,
        *,
        probe: Callable[[BackendId], object],
        changed: Callable[[Sequence[Transition]], object],
        reported_waiting: Callable[[BackendId], int],
        sent_event_at: Callable[[BackendId], float],
    ) -> None:
        self.hangs = Hangs(hang_s)
        self._router = router
        self._serving = serving  # the requests in flight, oldest first
        self._probe = probe  # has a backend probed at once
        self._changed = changed  # called with changes of health
        self._reported_waiting = reported_waiting  # how many requests wait in its queue, by its own count
        self._sent_event_at = sent_event_at  # when its last event came; 0 if never

    async def run(self) -> None:
        """Look again and again, for ever."""
        while True:
            await trio.sleep(self.hangs.hang_s * SUSPICION_SHARE / LOOKS)
            self.look()

    def look(self) -> None:
        """Judge every engine once, and move what may be moved."""
        now, registry = time.monotonic(), self._router.registry
        silent = [backend for backend in registry if backend.vitals.silent]
        quiet = self.hangs.quiet(registry, now)
        for backend in {each.id: each for each in (*silent, *quiet)}.values():
            backend.seen.received_at = max(backend.seen.received_at, self._sent_event_at(backend.id))
            self._changed(registry.changes.revive(backend, now))
        waiting = self._waiting(quiet) if quiet else {}
        for backend in quiet:
            if backend.id in waiting and self._hangs(backend, waiting[backend.id], now):
                self._move(backend, waiting[backend.id], now)

    def _waiting(self, quiet: Sequence[Backend]) -> dict[BackendId, list[Call]]:
        """Return the requests for inference in flight at these backends, by backend, in order of their arrival."""
        found: dict[BackendId, list[Call]] = {}
        ids = {backend.id for backend in quiet}
        for call in self._serving.values():
            attempt = call.attempt
            if attempt is not None and attempt.target.id in ids and not attempt.work.ended and attempt.judged:
                found.setdefault(attempt.target.id, []).append(call)
        return found

    def _hangs(self, backend: Backend, waiting: Sequence[Call], now: float) -> bool:
        sent_at = min(call.attempt.sent_at for call in waiting if call.attempt is not None)
        silence = self.hangs.judge(
            backend, sent_at, lambda: self._router.policy.learner.predicted_s(backend, 0, now), now
        )
        if silence is Silence.SUSPECTED:
            self._probe(backend.id)
        if silence is Silence.HANGS and not backend.vitals.silent:
            self.hangs.counters.found += 1
            quiet_s = now - max(sent_at, backend.seen.received_at)
            why = f"hangs: not a byte for {quiet_s:.1f} s, {counted(len(waiting), 'request')} in flight"
            self._changed(self._router.registry.changes.hangs(backend, why, now))
        return silence is Silence.HANGS

    def _move(self, backend: Backend, waiting: Sequence[Call], now: float) -> None:
        """Have requests placed again for as long as others have room."""
        taken = Counter(each.attempt.target.id for each in self._serving.values() if each.attempt and waits_moved(each))
        moved = 0
        for call in [each for each in waiting if self._may_move(each)][:MOVES_MAX]:
            target = self._target(call, taken, now)
            if target is None:
                self.hangs.counters.without_room += 1
                continue
            call.moved = True
            moved += 1
            taken[target.id] += 1
            call.client.interrupt(UpstreamHangs("the backend hangs", target.id))
        self.hangs.counters.moved += moved
        if moved:
            log.warning(event("engine.hangs", engine=backend.name, moved=moved, in_flight=len(waiting)))

    def _may_move(self, call: Call) -> bool:
        if call.moved or call.stays or call.first_byte_at or call.is_decided:
            return False
        request, failed = call.request, call.failed_tries
        if not may_repeat(request.method, request.path, request.body) or (failed is not None and failed.is_over):
            call.stays = True  # never looked at again: reading a body for its `store` takes a while
            return False
        return True

    def _target(self, call: Call, taken: Counter[BackendId], now: float) -> Backend | None:
        """Return where the policy would place it among those that have room; None if none has."""
        router, attempt = self._router, call.attempt
        assert attempt is not None
        has_room = {each.id for each in router.registry if self._has_room(each, taken[each.id], now)}
        without = [each.id for each in router.registry if each.id == attempt.target.id or each.id not in has_room]
        try:
            found = router.find(attempt.prompt, now, without)
        except RanvierError:
            return None
        return router.registry[router.place(attempt.prompt, found).backend]

    def _has_room(self, backend: Backend, moved: int, now: float) -> bool:
        predicted_s = self._router.policy.learner.predicted_s(backend, 0, now)
        return self.hangs.has_room(backend, moved, self._reported_waiting(backend.id), predicted_s, now)


def waits_moved(call: Call) -> bool:
    """Whether it was moved, and nothing of its answer has come."""
    return call.moved and not call.first_byte_at
