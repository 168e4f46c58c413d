"""What a node's status takes from its peers, and gives them: counts of engines by who reads their pages, and findings
that only the node that has them can see (`core/routing/backend_state/status_reports.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ranvier_py.core.findings import Dated, Finding, Severity
from ranvier_py.core.peer.router_peer import RouterPeer
from ranvier_py.core.routing.backend_state.status_reports import (
    NAME_BYTES_MAX,
    EngineReport,
    Trouble,
    count_of,
    known,
    words_of,
)
from ranvier_py.node.engine_cache.calibration_parts import CalibrationParts, hit_share

SEEN_BY_ALL = ("engine_", "peer_", "model_", "no_peer", "cache_level", "tables_differ")
"""How the kinds of findings begin that each node finds by itself, about what all of them see."""


def give(peer: RouterPeer, calibration: CalibrationParts, findings: Sequence[Dated], now: float) -> None:
    """Have the peers show what only this node knows."""
    own = [each for each in findings if not each.finding.kind.startswith(SEEN_BY_ALL)]
    peer.features.status_reports.show(engine_reports(peer, calibration), (trouble_of(each, now) for each in own))


def engine_reports(peer: RouterPeer, calibration: CalibrationParts) -> Iterator[EngineReport]:
    for backend, page, per_s in calibration.polled():
        key, share = peer.features.backends.key_of(backend), hit_share(page)
        if key is not None:
            permille = None if share is None else 1000 * share
            yield EngineReport(key, *map(count_of, (page.running, page.waiting, per_s, permille)))


def trouble_of(dated: Dated, now: float) -> Trouble:
    found = dated.finding
    kind, about = (words_of(each, NAME_BYTES_MAX) for each in (found.kind, found.about))
    since_s = count_of(now - dated.since)
    return Trouble(
        severity=int(found.severity),
        since_s=since_s,
        kind=kind,
        about=about,
        what=words_of(found.what),
        remedy=words_of(found.remedy),
    )


def engines_of_peers(peer: RouterPeer, now: float) -> dict[str, Mapping[str, Any]]:
    """Return counts of engines by their names, from whichever peer read their pages last."""
    found: dict[str, Mapping[str, Any]] = {}
    for _, report in peer.features.status_reports.of_peers(now):
        for row in report.engines:
            backend = peer.features.backends.find(row.backend)
            if backend is not None and backend.name not in found:
                permille = known(row.hit_permille)
                found[backend.name] = {
                    "running": known(row.running),
                    "waiting": known(row.waiting),
                    "generated_per_s": known(row.tokens_per_s),
                    "engine_hit_share": None if permille is None else permille / 1000,
                }
    return found


def findings_of_peers(peer: RouterPeer, now: float) -> list[tuple[str, Dated]]:
    """Return what peers find wrong with themselves, with their names. Who is down there only degrades here."""
    found = []
    for session, report in peer.features.status_reports.of_peers(now):
        name = peer.name_of(session)
        for severity, since_s, kind, about, what, remedy in report.troubles:
            grade = Severity.NOTICE if severity == Severity.NOTICE else Severity.DEGRADED
            finding = Finding(kind, grade, f"{name}: {what}", about=about or name, remedy=remedy)
            found.append((name, Dated(finding, now - since_s, now)))
    return found
