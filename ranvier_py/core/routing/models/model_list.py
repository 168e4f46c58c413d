"""The models that this node serves, as a list or one by one: the union of its backends' lists, in the shape of either
API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from ranvier_py.core.routing.backend import Backend

NO_ALIASES: Mapping[str, str] = MappingProxyType({})


def model_list(
    backends: Iterable[Backend],
    aliases: Mapping[str, str] = NO_ALIASES,
    *,
    claude: bool,
    may_use: Callable[[str], bool] | None = None,
) -> Mapping[str, Any] | None:
    """Return the union of the backends' model lists, or of what a client `may_use` of it; None if no backend has sent
    its list yet, which a client may be shown who may use all.

    `aliases`: further names, each with the model whose card it gets. `claude`: in the shape that Anthropic's clients
    expect.
    """
    cards: dict[str, Mapping[str, Any]] = {}
    for backend in backends:
        for card in backend.catalog.cards:
            cards.setdefault(str(card.get("id")), card)
    if not cards and may_use is None:
        return None
    found_aliases = {alias: model for alias, model in aliases.items() if model in cards}
    if may_use is not None:
        found_aliases = {alias: model for alias, model in found_aliases.items() if may_use(alias) or may_use(model)}
    cards |= {alias: {**cards[model], "id": alias} for alias, model in found_aliases.items()}
    if may_use is not None:
        cards = {name: card for name, card in cards.items() if may_use(name) or name in found_aliases}
    if not claude:
        return {"object": "list", "data": list(cards.values())}
    found = [claude_card(name, card) for name, card in cards.items()]
    first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return {"data": found, "has_more": False, "first_id": first, "last_id": last}


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
