"""The models that this node serves, as a list or one by one: the union of its backends' lists, in the shape of either
API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from ranvier_py.core.routing.backend import Backend

NO_ALIASES: Mapping[str, str] = MappingProxyType({})


def model_list(
    backends: Iterable[Backend], aliases: Mapping[str, str] = NO_ALIASES, *, claude: bool
) -> Mapping[str, Any] | None:
    """Return the union of the backends' model lists; None if no backend has sent its list yet.

    `aliases`: further names, each with the model whose card it gets. `claude`: in the shape that Anthropic's clients
    expect.
    """
    cards: dict[str, Mapping[str, Any]] = {}
    for backend in backends:
        for card in backend.catalog.cards:
            cards.setdefault(str(card.get("id")), card)
    if not cards:
        return None
    cards |= {alias: {**cards[model], "id": alias} for alias, model in aliases.items() if model in cards}
    if not claude:
        return {"object": "list", "data": list(cards.values())}
    found = [claude_card(name, card) for name, card in cards.items()]
    return {"data": found, "has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}


def card_of(backends: Iterable[Backend], name: str, model: str = "", *, claude: bool) -> Mapping[str, Any] | None:
    """Return the card of one model, as `model_list` has it; None if no backend has listed it. `model`: the one whose
    card it is, if `name` is an alias."""
    for backend in backends:
        for card in backend.catalog.cards:
            if card.get("id") == (model or name):
                return claude_card(name, card) if claude else {**card, "id": name}
    return None


def claude_card(name: str, card: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model card in the shape of Anthropic's API (docs.anthropic.com/en/api/models)."""
    created = card.get("created")
    at = datetime.fromtimestamp(created if type(created) is int and 0 <= created < 1 << 35 else 0, UTC)
    return {"type": "model", "id": name, "display_name": name, "created_at": f"{at:%Y-%m-%dT%H:%M:%SZ}"}
