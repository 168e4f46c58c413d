"""The log of a chaos run: every request of every client, every death, and the counts that follow. Pure.

A request is *ok*, *excused* or *failed*, `cancelled` if the end of the run cut it, or *refused* if it is poisonous and
got the error that every engine answers it with. It is excused only if its answer had begun and the node or engine that
was answering was killed before the answer ended. A try that gets no first byte is repeated at the next address; a
request that ends well after such retries is ok.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.engine.engine_faults import UNKNOWN_ERROR
from cluster.scenario import Expect

RECOVERED_SHARE = 0.95
WINDOW_S = 5.0
"""Hit rates are compared over spans of this length; in shorter ones they depend on which chats happen to begin."""

DEATH_MARGIN_S = 1.0
"""A broken answer is noticed a little before or after its process is known to be dead."""

FAILURES_SHOWN_MAX = 50


@dataclass(slots=True)
class Entry:
    """One request. Times are in seconds of the run; `ended_s` is None while the request is in flight."""

    number: int
    began_s: float
    ended_s: float | None = None
    node: str = ""  # IP of the node that was tried last
    engine: str = ""  # its name, if the answer has it
    retries: list[str] = field(default_factory=list)  # why each earlier try got no first byte
    first_byte: bool = False
    reason: str = ""  # why it failed; empty if it did not
    detail: str = ""
    cancelled: bool = False
    poisonous: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ok(self) -> bool:
        return self.ended_s is not None and not self.reason and not self.cancelled

    @property
    def refused(self) -> bool:
        """Whether it is poisonous, and got the engines' own words."""
        return self.poisonous and self.reason.startswith("HTTP 500") and self.detail == UNKNOWN_ERROR[1]


@dataclass(frozen=True, slots=True)
class Death:
    """A process that was killed. `who` is the IP of a node or the name of an engine."""

    at_s: float
    who: str


@dataclass(frozen=True, slots=True)
class Event:
    """A line of the run's diary."""

    at_s: float
    text: str


class RequestLog:
    """All requests, deaths, crashes and events of one run."""

    def __init__(self, caches: Callable[[str, float, float], bool] = lambda *_: True) -> None:
        """`caches`: whether an engine could find prefixes again between two moments; if not, no hit rate has it."""
        self.caches = caches
        self.entries: list[Entry] = []
        self.deaths: list[Death] = []
        self.diary: list[Event] = []
        self.crashes: list[str] = []
        """Processes that ended unasked: then the run has failed, whatever the clients saw."""

    def begin(self, now_s: float) -> Entry:
        entry = Entry(len(self.entries), now_s)
        self.entries.append(entry)
        return entry

    def died(self, now_s: float, who: str) -> None:
        self.deaths.append(Death(now_s, who))

    def note(self, now_s: float, text: str) -> None:
        self.diary.append(Event(now_s, text))

    def excused(self, entry: Entry) -> bool:
        """Whether the answer was streaming from a process that was killed before it ended."""
        if not (entry.reason and entry.first_byte and entry.ended_s is not None):
            return False
        whom = {entry.node, entry.engine} - {""}
        return any(
            death.who in whom and entry.began_s <= death.at_s <= entry.ended_s + DEATH_MARGIN_S for death in self.deaths
        )

    @property
    def failed(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.reason and not entry.refused and not self.excused(entry)]

    def hit_rate(self, from_s: float, until_s: float) -> float | None:
        """Return the hit rate of good requests that began in that span, at engines that cache; None without any."""
        chosen = [
            entry
            for entry in self.entries
            if entry.ok
            and from_s <= entry.began_s < until_s
            and self.caches(entry.engine, entry.began_s, entry.ended_s or entry.began_s)
        ]
        prompt = sum(entry.prompt_tokens for entry in chosen)
        return sum(entry.cached_tokens for entry in chosen) / prompt if prompt else None

    def recovered_s(self, before: float, from_s: float, until_s: float) -> float | None:
        """Return how long after `from_s` the first span of WINDOW_S begins that has 95 % of the hit rate `before`."""
        start_s = from_s
        while start_s + WINDOW_S <= until_s:
            rate = self.hit_rate(start_s, start_s + WINDOW_S)
            if rate is not None and rate >= RECOVERED_SHARE * before:
                return start_s - from_s
            start_s += WINDOW_S / 10
        return None

    def counts(self) -> dict[str, int]:
        """Return the number of requests by outcome, each request once, and the numbers of retries."""
        excused = sum(1 for entry in self.entries if self.excused(entry))
        return {
            "sent": len(self.entries),
            "ok": sum(1 for entry in self.entries if entry.ok),
            "was_streaming_on_a_killed_process": excused,
            "failed": len(self.failed),
            "refused_as_poisonous": sum(1 for entry in self.entries if entry.refused),
            "cancelled": sum(1 for entry in self.entries if entry.cancelled),
            "in_flight": sum(1 for entry in self.entries if entry.ended_s is None),
            "ok_after_retry": sum(1 for entry in self.entries if entry.ok and entry.retries),
            "retries": sum(len(entry.retries) for entry in self.entries),
        }

    def reasons(self) -> dict[str, int]:
        """Return why tries got no first byte, and how often."""
        return dict(Counter(reason for entry in self.entries for reason in entry.retries).most_common())

    def failures(self) -> list[dict[str, Any]]:
        """Return the first failed requests in full; each is a defect of the cluster until shown otherwise."""
        shown = ("node", "engine", "first_byte", "reason", "detail", "retries")
        return [
            {"began_s": round(entry.began_s, 3), "ended_s": round(entry.ended_s or 0.0, 3)}
            | {name: getattr(entry, name) for name in shown}
            for entry in self.failed[:FAILURES_SHOWN_MAX]
        ]


def hits_back_s(
    hits: Mapping[str, float | None], expect: Expect, quiet_s: float, for_s: float
) -> dict[str, float | None]:
    """Return the measured value for that bound; {} if steps ended too late for the traffic to show it."""
    back_s = hits["recovered_after_last_step_s"]
    if back_s is None and quiet_s + (expect.hits_back_s or 0.0) + WINDOW_S > for_s:
        return {}
    return {"hits_back_s": back_s}


def points_lost(rate: float | None, without_faults: float | None) -> float | None:
    """Return how many percentage points a hit rate is below that of the same load without faults."""
    return None if rate is None or without_faults is None else 100 * max(0.0, without_faults - rate)


def hit_report(log: RequestLog, first_step_s: float, quiet_s: float, for_s: float) -> dict[str, float | None]:
    """Return hit rates before, after and in between. `quiet_s`: when the last step has happened and was undone."""
    before = log.hit_rate(0.0, first_step_s)
    last = log.hit_rate(for_s * 2 / 3, for_s)
    disturbed = first_step_s < for_s
    return {
        "before": before,
        "last_third": last,
        "whole": log.hit_rate(0.0, for_s),
        "share": last / before if last is not None and before else None,
        "recovered_after_first_step_s": log.recovered_s(before, first_step_s, for_s) if before and disturbed else None,
        "recovered_after_last_step_s": log.recovered_s(before, quiet_s, for_s) if before and disturbed else None,
    }
