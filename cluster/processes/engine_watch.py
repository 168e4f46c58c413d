"""Watches what the engines of a chaos run could do, and what each had to do, for the bounds on those that work.

An engine is *odd* while a step keeps it from serving, or from finding prefixes again. From the end of such a step nodes
have BACK_S to notice that it serves again. An engine that serves is *idle* without any request, and has a *queue* when
requests wait there for longer than a step can take: who comes in mid-step waits for its end at every busy engine, and
that is no queue. Each data-parallel rank counts as an engine. What engines had to do is their own record of changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import inf
from time import monotonic
from typing import NamedTuple

import orjson

from cluster.load.http_client import fetch
from cluster.processes.fleet import Member

BACK_S = 5.0
"""How long an engine may go without work after it serves again: nodes ask about its health every few seconds."""

PAIRS_SHOWN = 5
NOBODY, NOTHING = -1, (False, False)


@dataclass(slots=True)
class Oddity:
    """What an engine did not do for a time."""

    engine: str
    serves: bool
    caches: bool
    from_s: float
    until_s: float = inf


@dataclass(frozen=True, slots=True)
class Track:
    """What one engine, or one of its ranks, had over time: from when on, requests that run, requests that wait."""

    engine: str
    changes: Sequence[tuple[float, int, int]]

    def states(self, step_s: float) -> Iterator[tuple[float, bool, bool]]:
        """Yield from when on it is idle, and has a queue, if no step takes longer than `step_s`."""
        waits_since_s = inf
        for (at_s, running, waiting), (next_s, *_) in pairwise([*self.changes, (inf, 0, 0)]):
            waits_since_s = min(waits_since_s, at_s) if waiting else inf
            queues_s = waits_since_s + step_s
            yield at_s, not running + waiting, queues_s <= at_s
            if at_s < queues_s < next_s:
                yield queues_s, False, True


class Unevenness(NamedTuple):
    """The share of the time in which a working engine was idle while another had a queue, and which ones; None without
    any record."""

    share: float | None
    text: str


class EngineWatch:
    """The oddities and the loads of one run's engines. `clock` is the run's; `step_s`: their longest step."""

    def __init__(self, clock: Callable[[], float], step_s: float) -> None:
        self.clock = clock
        self.step_s = step_s
        self.oddities: list[Oddity] = []
        self.tracks: list[Track] = []

    def odd(self, engine: str, *, serves: bool = False, caches: bool = True) -> Callable[[], None]:
        """Note that an engine is odd from now on. The result notes that it is well again."""
        oddity = Oddity(engine, serves, caches, self.clock())
        self.oddities.append(oddity)

        def well() -> None:
            oddity.until_s = self.clock()

        return well

    def caches(self, engine: str, from_s: float, until_s: float) -> bool:
        """Whether an engine could find prefixes again in all of that span."""
        return not any(
            one.engine == engine and not one.caches and one.from_s <= until_s and from_s <= one.until_s
            for one in self.oddities
        )

    def serves(self, engine: str, at_s: float) -> bool:
        """Whether an engine serves, and has for so long that nodes may know."""
        return not any(
            one.engine == engine and not one.serves and one.from_s <= at_s < one.until_s + BACK_S
            for one in self.oddities
        )

    async def take(self, member: Member) -> None:
        """Take over an engine's own record of its load, before it ends. Raises ExchangeFailed, ValueError."""
        address, ahead_s = member.command(), monotonic() - self.clock()
        _, body = await fetch(address.ready_host, address.ready_port, "/admin/occupancy")
        for rank in orjson.loads(body):
            if rank["dropped"]:
                raise ValueError(f"{member.name}: the run was too long for its record of loads")
            changes = [(at_s - ahead_s, running, waiting) for at_s, running, waiting in rank["changes"]]
            self.tracks.append(Track(member.name, changes))

    def unevenness(self, until_s: float) -> Unevenness:
        """Judge the run's time up to then."""
        if not self.tracks:
            return Unevenness(None, "")
        seconds, pairs = 0.0, defaultdict[tuple[str, str], float](float)
        for lasts_s, idle, queues in self.spans(until_s):
            seconds += lasts_s
            for pair in product(idle, queues):
                pairs[pair] += lasts_s
        worst = sorted(pairs.items(), key=lambda item: -item[1])[:PAIRS_SHOWN]
        words = [f"{one} idle for {lost_s:.2f} s while {other} had a queue" for (one, other), lost_s in worst]
        return Unevenness(seconds / until_s, "; ".join(words))

    def spans(self, until_s: float) -> Iterator[tuple[float, list[str], list[str]]]:
        """Yield each span in which working engines were idle while others had a queue: how long it was, and which."""
        turns = {0.0, *(at_s for one in self.oddities for at_s in (one.from_s, one.until_s + BACK_S))}
        moments = [(at_s, NOBODY, *NOTHING) for at_s in (*turns, until_s)]
        for number, track in enumerate(self.tracks):
            moments += [(at_s, number, idles, queues) for at_s, idles, queues in track.states(self.step_s)]
        states: dict[int, tuple[bool, bool]] = {}
        for (at_s, number, idles, queues), (next_s, *_) in pairwise(sorted(moments)):
            states[number] = idles, queues
            if at_s >= until_s:
                return
            if 0 <= at_s < next_s and any(queues for _, queues in states.values()):
                serving = [one for one, track in enumerate(self.tracks) if self.serves(track.engine, at_s)]
                idle = [self.tracks[one].engine for one in serving if states.get(one, NOTHING)[0]]
                queued = [self.tracks[one].engine for one in serving if states.get(one, NOTHING)[1]]
                if idle and queued:
                    yield next_s - at_s, idle, queued
