"""The latest decisions of a node: a list, as they come on the page, and one of them with its candidates."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from ranvier_py.core.errors import NotFound
from ranvier_py.core.history.joined_panes import newest
from ranvier_py.core.routing.placement import Decision
from ranvier_py.core.routing.route_table import Trust
from ranvier_py.core.routing.router import Router
from ranvier_py.node.asked import JSON, LIMIT, Asked, ControlAnswer, Route
from ranvier_py.node.part import Handler, Node, Part
from ranvier_py.node.parts.siblings import OWN, answers_of

LISTED_MAX = 1000
SHOWN = 100  # on the page

WEIGHED_S = 5.0
"""So long after the page asked, what policies weigh is kept."""


class DecisionParts(Part):
    """See the module."""

    name = "decisions"
    joins = MappingProxyType({"decisions": partial(newest, most=SHOWN)})

    def __init__(self, node: Node) -> None:
        self._node, self._router = node, node.router

    def routes(self) -> Mapping[str, Handler]:
        return {
            "GET /admin/decisions": Route(
                lambda asked: {"decisions": self.decisions(asked.limit(LISTED_MAX))},
                "The last decisions",
                query=LIMIT,
            ),
            "GET /admin/decisions/<request>": Route(
                self.decision,
                "The decision about a request, by any worker of the node, with its candidates",
                query={OWN: {"type": "string"}},
            ),
        }

    def panes(self, now: float, *, watched: bool) -> Mapping[str, Any]:
        if watched:
            self._router.recent.weighed_until = now + WEIGHED_S
        wall = time.time() - now
        newest = islice(reversed(self._router.recent.made), SHOWN)
        return {"decisions": [{"at": round(wall + at, 1), **facts_of(each, request)} for at, request, each in newest]}

    def decisions(self, limit: int) -> Sequence[Mapping[str, Any]]:
        now = time.monotonic()
        newest = islice(reversed(self._router.recent.made), limit)
        return [decision_view(decision, request_id, now - at) for at, request_id, decision in newest]

    async def decision(self, asked: Asked) -> Any:
        """Return what is kept of one decision, here or by another worker of this node. Raises NotFound."""
        request = asked.path["request"]
        found = self._router.recent.find(request.encode("latin-1", "replace"))
        if found is not None:
            return self._decision_view(request, *found)
        path = f"/admin/decisions/{quote(request, safe='')}?{OWN}"
        others = {} if OWN in asked.query else await answers_of(self._node.config, path, asked.bearer())
        for answer in others.values():
            if answer:
                return ControlAnswer(answer, kind=JSON)
        raise NotFound("no decision about this request is kept any more: see recent_decisions")

    def _decision_view(self, request: str, at: float, decision: Decision) -> Mapping[str, Any]:
        terms = self._router.recent.terms_of(decision)
        facts = facts_of(decision, request.encode("latin-1", "replace"))
        return {
            **facts,
            "age_s": round(time.monotonic() - at, 3),
            "chosen": decision.backend_name,
            "weighed": terms is not None,
            "candidates": candidates_of(self._router, decision, terms or ()),
        }


def candidates_of(
    router: Router, decision: Decision, terms: Sequence[Mapping[str, float]]
) -> Sequence[Mapping[str, Any]]:
    """Return the candidates of a decision as they were then, in the members that an explanation has."""
    names = {backend.id: backend.name for backend in router.registry}
    held = {holder.backend: holder for holder in decision.holders}
    rows = []
    for place, (backend, load) in enumerate(zip(decision.candidates, decision.loads, strict=True)):
        holder = held.get(backend)
        row = {
            "backend": names.get(backend, f"#{backend}"),
            "load": load,
            "matched_tokens": holder.tokens if holder is not None else 0,
            "trust": Trust(holder.trust).name if holder is not None else None,
        }
        rows.append({**row, "terms": dict(terms[place])} if place < len(terms) else row)
    return rows


def decision_view(decision: Decision, request_id: bytes, age_s: float) -> dict[str, Any]:
    loads = dict(zip(decision.candidates, decision.loads, strict=True))
    return {"age_s": round(age_s, 3), **facts_of(decision, request_id), "loads": loads}


def facts_of(decision: Decision, request_id: bytes) -> dict[str, Any]:
    """Return what was decided, without the candidates."""
    return {
        "request_id": request_id.decode("latin-1"),
        "backend": decision.backend_name,
        "reason": decision.reason,
        "policy": decision.policy,
        "source": decision.source,
        "matched_tokens": decision.matched_tokens,
        "prompt_tokens": decision.prompt_tokens,
    }
