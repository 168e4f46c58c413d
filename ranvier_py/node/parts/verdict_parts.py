"""The verdict of a node: what its parts find wrong, the worst first, each with the time since when.

Once a second every part is asked (`Part.findings`). A finding is logged once when it begins and once when it ends, is
one of the metric `ranvier_finding`, and stands in /readyz?verbose and /admin/status, from which `ranvier status` is
drawn. Peers are told what is wrong with this node alone, and the counts of engines whose pages it reads, so that any
node shows the whole cluster. Rule: a part that raises is counted as a fault, and is itself a finding.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import trio

from ranvier_py import __version__
from ranvier_py.core.findings import Dated, Finding, Findings, Severity, worst_of
from ranvier_py.core.log_events import event
from ranvier_py.core.mesh.wire.frame import PROTOCOL_VERSION
from ranvier_py.core.metrics import Sample
from ranvier_py.node.asked import VERBOSE, Asked, ControlAnswer, Route
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.engine_cache.calibration_parts import CalibrationParts
from ranvier_py.node.part import Handler, Node, Part
from ranvier_py.node.parts.status_shares import findings_of_peers, give
from ranvier_py.node.parts.status_views import status_view

log = logging.getLogger(__name__)

LOOK_S = 1.0

FAILED_S = 600.0
"""So long a fault of ours is named after it happened: its loop goes on, and nothing else shows that it was there."""

BUILD = "Always 1: the labels are the release of this node and the highest gossip protocol that it speaks."
HELP = "Findings of this kind now: what `ranvier status` names as wrong."


class VerdictParts(Part):
    """See the module."""

    name = "verdict"

    def __init__(self, node: Node, clustering: ClusterParts | None, calibration: CalibrationParts) -> None:
        self._node, self._clustering, self._calibration, self._findings = node, clustering, calibration, Findings()
        self._kinds: dict[str, None] = {}  # ever found, so that their metrics go back to 0

    async def loop(self) -> None:
        while True:
            self.look(time.monotonic())
            await trio.sleep(LOOK_S)

    def look(self, now: float) -> None:
        """Ask all parts, and log what has begun and what has ended."""
        found: list[Finding] = []
        for part in self._node.parts:
            with self._node.faults.caught("findings"):
                found += part.findings(now)
        begun, ended = self._findings.look(found, now)
        self._kinds |= dict.fromkeys(each.kind for each in found)
        for each in begun:
            level = logging.INFO if each.finding.severity is Severity.NOTICE else logging.WARNING
            log.log(
                level,
                event(
                    "finding.began",
                    kind=each.finding.kind,
                    severity=each.finding.severity.label,
                    what=each.finding.what,
                ),
            )
        if self._clustering is not None:
            give(self._clustering.peer, self._calibration, self._findings.verdict(), now)
        for each in ended:
            log.info(event("finding.ended", kind=each.finding.kind, seconds=now - each.since, what=each.finding.what))

    def findings(self, now: float) -> Iterator[Finding]:
        for place, kind in self._node.faults.lately(FAILED_S):
            what = f"{place} failed with {kind}, a bug of this node; it goes on"
            remedy = "Report it with the lines of the log (unexpected.error), and restart the node if it comes again."
            yield Finding("loop_failed", Severity.DEGRADED, what, about=place, whom=f"what {place} does", remedy=remedy)

    def view(self) -> Mapping[str, Any]:
        """Return the verdict on this node alone."""
        return self._shown([], time.monotonic())

    def _shown(self, of_peers: Sequence[tuple[str, Dated]], now: float) -> dict[str, Any]:
        found = sorted([*(("", each) for each in self._findings.verdict()), *of_peers], key=lambda pair: pair[1].order)
        worst = worst_of(each.finding for _, each in found)
        return {
            "severity": worst.label if worst is not None else "well",
            "findings": [finding_view(each, name, now) for name, each in found],
            "dropped": self._findings.dropped,
        }

    def _status(self, now: float) -> dict[str, Any]:
        cluster = self._clustering
        of_peers = findings_of_peers(cluster.peer, now) if cluster is not None else []
        return status_view(self._node, cluster, self._shown(of_peers, now), now)

    def panes(self, now: float, *, watched: bool) -> Mapping[str, Any]:
        status = self._status(now)
        engines = status.pop("engines")
        del status["peers"], status["requests"]  # they have panes of their own
        return {"verdict": status, "engines": engines}

    def metrics(self) -> Iterator[Sample]:
        yield Sample("build_info", "gauge", BUILD, 1, {"version": __version__, "protocol": str(PROTOCOL_VERSION)})
        counts = Counter(each.finding.kind for each in self._findings.verdict())
        for kind in self._kinds:
            yield Sample("finding", "gauge", HELP, counts[kind], {"kind": kind})
        yield Sample("finding", "gauge", HELP, None, {"kind": ""})

    def routes(self) -> Mapping[str, Handler]:
        what = "What is wrong, the worst first, with engines and peers"
        return {
            "GET /readyz": Route(self._readyz, "Whether the node should get requests, and why not", statuses=(503,)),
            "GET /admin/status": Route(lambda _: self._status(time.monotonic()), what),
        }

    def _readyz(self, asked: Asked) -> ControlAnswer:
        reason = self._node.unready()
        verdict = self.view() if VERBOSE in asked.query else {}
        return ControlAnswer({"ready": not reason, "reason": reason, **verdict}, 503 if reason else 200)


def finding_view(dated: Dated, name: str, now: float) -> dict[str, Any]:
    """Return a finding of this node, or of the peer with this name."""
    found = dated.finding
    return {
        "node": name,
        "kind": found.kind,
        "severity": found.severity.label,
        "what": found.what,
        "about": found.about,
        "since_s": round(now - dated.since, 1),
        "whom": found.whom,
        "remedy": found.remedy,
        "command": found.command,
    }
