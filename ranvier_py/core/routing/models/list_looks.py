"""When engines are asked for their model lists out of turn: a request names a model that none lists, or one that its
engine has unloaded.

Rule: one look for all that wait, a second after the last one at least; that pause doubles while looks find nothing new,
and begins anew after a quiet while. A name that was looked for in vain is refused without a look for MISSING_S.
Invariant: whatever clients invent, engines are asked no more than that (test_list_looks.py). Bound: MISSING_MAX names.
"""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.metrics import counter
from ranvier_py.core.pauses import doubled

WAIT_S = 2.0  # of a request, and of a look for an engine's list
PAUSE_S, PAUSE_MAX_S = 1.0, 8.0  # between the beginnings of two looks
QUIET_S = 30.0  # without a look: then it pays again to look at once
MISSING_S = 30.0
MISSING_MAX = 1024  # names of 512 characters at most: 1 MB


@dataclass(slots=True)
class LookCounters:
    """What happened since the start."""

    looks: int = counter("Looks at the model lists of engines because a request named a model that none listed.")
    fruitful: int = counter("Looks at the model lists of engines out of turn that found a list not known before.")
    waited: int = counter("Requests that waited for a look at the model lists of engines.")
    refused: int = counter("Requests for a missing model refused without a look at lists, too soon after another.")
    dropped: int = counter("Names of models known to be missing that were forgotten for want of room.")


class ListLooks:
    """The looks of one node. `next_at`: when the next may begin; `ended`: how many have ended."""

    __slots__ = ("_began_at", "_fruitless", "_missing", "counters", "ended", "next_at")

    def __init__(self) -> None:
        self.counters = LookCounters()
        self.next_at = self._began_at = float("-inf")
        self.ended = self._fruitless = 0  # the latter in a row
        self._missing: BoundedDict[str, float] = BoundedDict(MISSING_MAX)  # until when

    def is_worth_it(self, model: str, now: float) -> bool:
        """Whether a request should wait for the look that goes on, or for the next one."""
        is_worth_it = self.next_at < now + WAIT_S and self._missing.get(model, now) <= now
        self.counters.waited += is_worth_it
        self.counters.refused += not is_worth_it
        return is_worth_it

    def begin(self, now: float) -> None:
        if now > self._began_at + QUIET_S:
            self._fruitless = 0
        self.counters.looks += 1
        self._began_at, self.next_at = now, now + PAUSE_S

    def end(self, *, found: bool) -> None:
        """`found`: whether any list was another one than before."""
        self.counters.fruitful += found
        self._fruitless = 0 if found else self._fruitless + 1
        self.ended += 1
        self.next_at = self._began_at + doubled(PAUSE_S, max(self._fruitless - 1, 0), PAUSE_MAX_S)

    def missed(self, model: str, since: float, now: float) -> None:
        """Note that a look did not find a model that was wanted `since` then. One that had begun before may have asked
        too early, and proves nothing."""
        if since > self._began_at:
            return
        self._missing[model] = now + MISSING_S
        self.counters.dropped = self._missing.dropped
