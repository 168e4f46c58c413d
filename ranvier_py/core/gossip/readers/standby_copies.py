"""Standing by: copies of what engines hold that other nodes read, kept up while those live.

For each stream whose reader this node would follow, whoever reads it is asked for a copy, and then, every second while
the engine does something, for what changed. `take` hands the copy over when this node is to read the stream itself.

Rules: nothing is asked of who does not know the engine exactly; the copy stays as it was meanwhile, for KEEP_S. A copy
that contradicts what comes is thrown away, and a whole one asked for.
Bounds: ROWS_MAX blocks over all copies: a stream that would exceed them is not followed, and counted; AT_ONCE questions
at a time. Cost: 300 bytes a second for an engine that is busy, 40 for one that is not, and 34 for each block that it
stores or drops; 5 us for each such block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from ranvier_py.core.engine_cache.snapshot import BadSnapshot
from ranvier_py.core.engine_cache.standby import StandbyCopy
from ranvier_py.core.gossip.readers.snapshot_transfer import Subject, Transfers

INTERVAL_S, IDLE_INTERVAL_S = 1.0, 8.0
"""Between two questions: what is missing is had from the engine's replay, which goes back minutes."""

FAILED_INTERVAL_S = 10.0  # after a question without an answer: a node of an earlier version knows none
KEEP_S = 120.0  # without word of it a copy is of no use any more
ROWS_MAX = 1_000_000  # 190 MB
REFUSED_INTERVAL_S = 300.0  # for a stream that found no room
AT_ONCE = 4  # questions: as many of the transfers are left to who lost his place


@dataclass(slots=True)
class FollowCounts:
    """Counters since start."""

    asked: int = 0
    came: int = 0
    failed: int = 0  # no answer, or none that fits
    broken: int = 0  # copies that contradicted what came
    refused: int = 0  # copies for which there was no room
    taken: int = 0  # handed over to read on


@dataclass(slots=True)
class _Followed:
    copy: StandbyCopy
    snapshot_sources: Sequence[int]
    ask_at: float
    heard_at: float
    interval_s: float = INTERVAL_S
    asking: bool = False


class Following:
    """One node's. `wake_at` is when `tick` has something to do."""

    def __init__(self, transfers: Transfers, rng: Random, *, rows_max: int = ROWS_MAX) -> None:
        self.counts = FollowCounts()
        self._transfers = transfers
        self._rng = rng
        self._rows_max = rows_max
        self._followed: dict[Subject, _Followed] = {}

    @property
    def wake_at(self) -> float:
        if self._transfers.followed:
            return -inf
        asking, at = 0, inf
        for one in self._followed.values():
            if one.copy.is_behind:
                return -inf
            if one.asking:
                asking += 1
            elif one.snapshot_sources and one.ask_at < at:
                at = one.ask_at
        return at if asking < AT_ONCE else inf

    @property
    def rows(self) -> int:
        """Blocks of all copies."""
        return sum([len(one.copy) for one in self._followed.values()])

    def want(self, wanted: Mapping[Subject, Sequence[int]], now: float) -> None:
        """Follow these streams and no others, each by asking one of its donors; nobody is asked where there is none."""
        for subject in [subject for subject in self._followed if subject not in wanted]:
            self._drop(subject)
        for subject, snapshot_sources in wanted.items():
            known = self._followed.get(subject)
            if known is not None:
                known.snapshot_sources = snapshot_sources
            elif snapshot_sources:
                ask_at = now + self._rng.uniform(0, INTERVAL_S)
                copy = StandbyCopy(self._transfers.hasher.block_tokens, self._transfers.entries_max)
                self._followed[subject] = _Followed(copy, snapshot_sources, ask_at, now)

    def tick(self, now: float) -> None:
        if not (self._followed or self._transfers.followed):
            return
        answers, self._transfers.followed = self._transfers.followed, []
        for subject, copy in answers:
            one = self._followed.get(subject)
            if one is not None and one.asking:
                self._answered(one, copy, now)
        for one in self._followed.values():
            if one.copy.is_behind:
                self._apply(one, now)
                break
        self._ask(now)

    def has(self, subject: Subject) -> bool:
        """Whether there is a copy that `take` would hand over."""
        one = self._followed.get(subject)
        return one is not None and one.copy.place is not None

    def take(self, subject: Subject, now: float) -> StandbyCopy | None:
        """The copy, to read on from; it is not followed from then on. None: there is none, or a stale one."""
        one = self._followed.get(subject)
        if one is None:
            return None
        self._drop(subject)
        if one.copy.place is None or now > one.heard_at + KEEP_S:
            return None
        self.counts.taken += 1
        return one.copy

    # --- inside -----------------------------------------------------------------------------------------------------

    def _drop(self, subject: Subject) -> None:
        if self._followed.pop(subject).asking:
            self._transfers.forget(subject)

    def _anew(self, one: _Followed) -> None:
        one.copy = one.copy.another()

    def _ask(self, now: float) -> None:
        asking = sum([one.asking for one in self._followed.values()])
        for subject, one in self._followed.items():
            if one.copy.place is not None and now > one.heard_at + KEEP_S:
                self._anew(one)
            if asking >= AT_ONCE:
                return
            if one.asking or not one.snapshot_sources or now < one.ask_at or one.copy.is_behind:
                continue
            asking += 1
            one.asking = True
            self.counts.asked += 1
            self._transfers.follow(subject, one.copy, one.snapshot_sources, now)

    def _answered(self, one: _Followed, copy: StandbyCopy | None, now: float) -> None:
        one.asking = False
        if copy is None:
            self.counts.failed += 1
            one.ask_at = now + FAILED_INTERVAL_S * self._rng.uniform(0.8, 1.2)
            return
        self.counts.came += 1
        one.heard_at = now
        whole, one.copy = copy is not one.copy, copy
        idle = not (whole or copy.is_busy)
        one.interval_s = min(2 * one.interval_s, IDLE_INTERVAL_S) if idle else INTERVAL_S
        one.ask_at = now + one.interval_s * self._rng.uniform(0.8, 1.2)
        if self.rows > self._rows_max:
            self.counts.refused += 1
            self._anew(one)
            one.ask_at = now + REFUSED_INTERVAL_S

    def _apply(self, one: _Followed, now: float) -> None:
        try:
            one.copy.step()
        except BadSnapshot:
            self.counts.broken += 1
            self._anew(one)
            one.ask_at = now + INTERVAL_S
