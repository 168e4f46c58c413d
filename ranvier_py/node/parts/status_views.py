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
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.part import Node
from ranvier_py.node.parts.backend_views import shown_backend

Row = Mapping[str, Any]

WELL = "ok"
UNHEARD = ("down", "hangs")  # states in which nothing comes from an engine
ORDERED = ("draining", "leaving")  # states that somebody wants
OF_ENGINES = "engine_"  # kinds of findings that are an engine's state


def status_view(node: Node, cluster: ClusterParts | None, verdict: Row, now: float) -> dict[str, Any]:
    why = node.unready()
    shown = cluster.view() if cluster is not None else None
    return {
        "node": shown["name"] if shown else node.config.node_name or "",
        "release": __version__,
        "ready": not why,
        "reason": why,
        **verdict,
        "engines": [*engine_rows(node, verdict["findings"], now)],
        "peers": [peer_row(each) for each in shown["members"]] if shown else [],
        "requests": totals(node),
    }


def engine_rows(node: Node, findings: Iterable[Row], now: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each engine, those with findings first, then by load."""
    about = [each for each in findings if each["kind"].startswith(OF_ENGINES) and each["about"]]  # the worst first
    troubles: dict[str, list[str]] = {}
    for each in about:
        troubles.setdefault(each["about"], []).append(each["kind"].removeprefix(OF_ENGINES))
    known = {backend.name: shown_backend(node, backend) for backend in node.registry}
    for part in node.parts:
        for name, facts in part.of_engines(now).items():
            if name in known:
                known[name] |= {member: value for member, value in facts.items() if value is not None}
    rows = [engine_row(each, troubles.get(name, [])) for name, each in known.items()]
    order = {name: place for place, name in enumerate(troubles)}
    yield from sorted(rows, key=lambda row: (order.get(row["name"], len(order)), -row["load"], natural(row["name"])))


def natural(name: str) -> tuple[Any, ...]:
    """Return by what names are sorted as people do: w2 before w10."""
    return tuple((1, int(part)) if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name))


def engine_row(known: Row, troubles: Sequence[str]) -> dict[str, Any]:
    """`known`: what the parts know of it. `troubles`: the kinds of what is wrong with it, the worst first."""
    asked = not any(each in UNHEARD for each in troubles)  # else its counts are those of before
    never = known["health"] == Health.UNKNOWN.value and known["circuit"] == Circuit.CLOSED.value
    worst = troubles[0] if troubles else "unknown" if never else WELL
    by_order = [each for each in troubles if each in ORDERED]
    return {
        "name": known["name"],
        "url": known["url"],
        "state": worst,
        "states": [*by_order, *[each for each in troubles if each not in ORDERED]] or [worst],
        "models": known["models"],
        "level": known.get("level"),
        "why": known.get("why", ""),
        "load": known["in_flight"] + known["peer_load"],
        "in_flight": known["in_flight"],
        "running": known.get("running") if asked else None,
        "waiting": known.get("waiting") if asked else None,
        "tokens_per_s": known.get("generated_per_s") if asked else None,
        "hit_share": known.get("engine_hit_share"),
        "predicted_tokens": known.get("predicted_tokens", 0),
        "cached_tokens": known.get("cached_tokens", 0),
        "weight": known["weight"],
        "draining": known["draining"],
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
