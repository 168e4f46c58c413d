"""The status of a node in one answer: its verdict, a line for each engine, a line for each peer, and totals.

`GET /admin/status` returns it, and `ranvier status --json` prints it. Rule: members may be added to it, and none is
renamed or taken away (docs/operating.md lists them). None stands for what is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ranvier_py import __version__
from ranvier_py.core.metrics import values
from ranvier_py.core.routing.backends import Circuit, Health
from ranvier_py.node.engine_cache.calibration_parts import CalibrationParts
from ranvier_py.node.engine_cache.engine_event_views import EngineEventViews
from ranvier_py.node.part import Node
from ranvier_py.node.parts.backend_parts import BackendParts
from ranvier_py.node.parts.status_shares import cluster_of, engines_of_peers

Row = Mapping[str, Any]

WELL = "ok"
UNHEARD = ("down", "hangs")  # states in which nothing comes from an engine
ORDERED = ("draining", "leaving")  # states that somebody wants
OF_ENGINES = "engine_"  # kinds of findings that are an engine's state


def status_view(node: Node, verdict: Row, now: float) -> dict[str, Any]:
    why = node.unready()
    cluster = cluster_of(node)
    shown = cluster.view() if cluster is not None else None
    return {
        "node": shown["name"] if shown else node.config.node_name or "",
        "release": __version__,
        "ready": not why,
        "reason": why,
        **verdict,
        "engines": [*engine_rows(node, verdict["findings"], engines_of_peers(cluster, now))],
        "peers": [peer_row(each) for each in shown["members"]] if shown else [],
        "requests": totals(node),
    }


def engine_rows(node: Node, findings: Iterable[Row], of_peers: Mapping[str, Row]) -> Iterator[dict[str, Any]]:
    """Yield a row for each engine, those with findings first, then by load."""
    about = [each for each in findings if each["kind"].startswith(OF_ENGINES) and each["about"]]  # the worst first
    troubles: dict[str, list[str]] = {}
    for each in about:
        troubles.setdefault(each["about"], []).append(each["kind"].removeprefix(OF_ENGINES))
    known = by_name(node.part(CalibrationParts).view()["backends"])
    caches = by_name(node.part(EngineEventViews).view()["engines"])
    rows = []
    for each in node.part(BackendParts).view():
        name = each["name"]
        own = {member: value for member, value in known.get(name, {}).items() if value is not None}
        counts = {**of_peers.get(name, {}), **own}
        rows.append(engine_row(each, counts, caches.get(name, {}), troubles.get(name, [])))
    order = {name: place for place, name in enumerate(troubles)}
    yield from sorted(rows, key=lambda row: (order.get(row["name"], len(order)), -row["load"], natural(row["name"])))


def natural(name: str) -> tuple[Any, ...]:
    """Return by what names are sorted as people do: w2 before w10."""
    return tuple((1, int(part)) if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name))


def by_name(rows: Iterable[Row]) -> dict[str, Row]:
    return {row["name"]: row for row in rows}


def engine_row(backend: Row, known: Row, cache: Row, troubles: Sequence[str]) -> dict[str, Any]:
    """`troubles`: the kinds of what is wrong with it, the worst first."""
    asked = not any(each in UNHEARD for each in troubles)  # else its counts are those of before
    never = backend["health"] == Health.UNKNOWN.value and backend["circuit"] == Circuit.CLOSED.value
    worst = troubles[0] if troubles else "unknown" if never else WELL
    by_order = [each for each in troubles if each in ORDERED]
    return {
        "name": backend["name"],
        "url": backend["url"],
        "state": worst,
        "states": [*by_order, *[each for each in troubles if each not in ORDERED]] or [worst],
        "models": backend["models"],
        "level": cache.get("level"),
        "why": cache.get("why", ""),
        "load": backend["in_flight"] + backend["peer_load"],
        "in_flight": backend["in_flight"],
        "running": known.get("running") if asked else None,
        "waiting": known.get("waiting") if asked else None,
        "tokens_per_s": known.get("generated_per_s") if asked else None,
        "hit_share": known.get("engine_hit_share"),
        "predicted_tokens": known.get("predicted_tokens", 0),
        "cached_tokens": known.get("cached_tokens", 0),
        "weight": backend["weight"],
        "draining": backend["draining"],
    }


def peer_row(member: Row) -> dict[str, Any]:
    names = ("name", "state", "address", "public", "release", "rtt_ms", "silent_s", "since_s", "routes")
    return {name: member[name] for name in names}


def totals(node: Node) -> dict[str, Any]:
    router = node.router
    counters, routes = router.counters, values(router.routes.counters)
    prompt, counted = counters.prompt_tokens, counters.engine_prompt_tokens
    return {
        "policy": router.policy.name,
        "outcomes": dict(counters.outcomes),
        "prompt_tokens": prompt,
        "predicted_share": counters.predicted_tokens / prompt if prompt else None,
        "cached_share": counters.engine_cached_tokens / counted if counted else None,
        "routes": routes["rows"],
    }
