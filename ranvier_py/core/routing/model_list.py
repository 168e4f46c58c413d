"""The list of models that this node serves: the union of its backends' lists, in the shape of either API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from ranvier_py.core.routing.backend import Backend


def model_list(backends: Iterable[Backend], *, claude: bool) -> Mapping[str, Any] | None:
    """Return the union of the backends' model lists; None if no backend has sent its list yet.

    `claude`: in the shape that Anthropic's clients expect.
    """
    cards: dict[str, Mapping[str, Any]] = {}
    for backend in backends:
        for card in backend.cards:
            cards.setdefault(str(card.get("id")), card)
    if not cards:
        return None
    return claude_models(cards) if claude else {"object": "list", "data": list(cards.values())}


def claude_models(cards: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return model cards in the shape of Anthropic's API (docs.anthropic.com/en/api/models-list)."""
    found = []
    for name, card in cards.items():
        created = card.get("created")
        at = datetime.fromtimestamp(created if type(created) is int and 0 <= created < 1 << 35 else 0, UTC)
        found.append({"type": "model", "id": name, "display_name": name, "created_at": f"{at:%Y-%m-%dT%H:%M:%SZ}"})
    return {"data": found, "has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}
