"""What is wrong, in the words of an operator: one Finding each, from the parts of a node, or of a check.

Rule: a finding is the same as long as its kind and what it is `about` are, whatever its words. It has ended once it
was missing for GONE_S, so that what comes and goes is one finding and two lines of the log.
Bounds: FINDINGS_MAX at once; of more the least severe are counted and not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum

FINDINGS_MAX = 256
"""Four times as many as the largest fleet in use has engines."""

GONE_S = 5.0
"""As long as a probe of an engine and gossip's word of it take to agree."""


def counted(number: int, thing: str) -> str:
    """Return "1 engine", "1,024 engines"."""
    return f"{number:,} {thing}" + "s" * (number != 1)


class Severity(IntEnum):
    """How bad a finding is: it takes nothing from requests, something, or all."""

    NOTICE = 0
    DEGRADED = 1
    DOWN = 2

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    `kind`: one of a short list, as a label of metrics. `about`: which engine, peer or file, "" for the node itself.
    `what` is a sentence without a period, `whom` names what it touches, `remedy` says what to do, `command` how.
    """

    kind: str
    severity: Severity
    what: str
    _: KW_ONLY
    about: str = ""
    whom: str = ""
    remedy: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class Dated:
    """A finding with the time at which it began, and the last one at which it was there."""

    finding: Finding
    since: float
    seen_at: float

    @property
    def order(self) -> tuple[int, float]:
        """Sort by this: the worst first, and of equals the one that began first."""
        return -self.finding.severity, self.since


class Findings:
    """The findings of one node, each with the time at which it began."""

    def __init__(self) -> None:
        self.dropped = 0  # findings that had no room, by the last look
        self._known: dict[tuple[str, str], Dated] = {}  # those that were missing lately, too
        self._looked_at = 0.0

    def look(self, found: Iterable[Finding], now: float) -> tuple[Sequence[Dated], Sequence[Dated]]:
        """Take what is wrong now. Returns what has begun and what has ended."""
        worst = {(each.kind, each.about): each for each in sorted(found, key=badness)}
        self.dropped = max(0, len(worst) - FINDINGS_MAX)
        before, self._known = self._known, {}
        for key in [*worst][self.dropped :]:
            since = before[key].since if key in before else now
            self._known[key] = Dated(worst[key], since, now)
        begun, ended = [self._known[key] for key in self._known if key not in before], []
        for key in [key for key in before if key not in self._known]:
            if now - before[key].seen_at < GONE_S and len(self._known) < FINDINGS_MAX:
                self._known[key] = before[key]
            else:
                ended.append(before[key])
        self._looked_at = now
        return begun, ended

    def verdict(self) -> list[Dated]:
        """Return what was wrong at the last look, the worst first, and of equals the one that began first."""
        present = [each for each in self._known.values() if each.seen_at == self._looked_at]
        return sorted(present, key=lambda each: each.order)


def badness(finding: Finding) -> tuple[int, str, str]:
    """Sort by this, and the worst comes last."""
    return finding.severity, finding.kind, finding.about


def worst_of(findings: Iterable[Finding]) -> Severity | None:
    """Return how bad the worst is; None if nothing is wrong."""
    return max((each.severity for each in findings), default=None)
