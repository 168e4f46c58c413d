"""How long a prompt each backend takes, by `max_model_len` in its model cards, and who may take one that it refused.

Rules: a prompt avoids backends that are too short for the tokens of its deepest tokenized prefix; an estimate proves
nothing. It is a preference: if no backend is long enough, one that is not refuses. Invariant: what one refuses for its
length goes to those that are longer, or may be, and blames none (test_long_prompts.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backend import Backend

NO_END = 1 << 62
"""Tokens of a backend whose length is not known."""


def lengths_of(cards: Iterable[Mapping[str, Any]]) -> Mapping[str, int]:
    """Return the greatest length of a prompt with its answer, in tokens, by model; an adapter has its model's."""
    listed = list(cards)
    own = {card["id"]: card["max_model_len"] for card in listed if is_length(card.get("max_model_len"))}
    parents = {card["id"]: own.get(card.get("parent")) for card in listed if type(card.get("parent")) is str}
    return {**{model: length for model, length in parents.items() if length is not None}, **own}


def is_length(value: object) -> bool:
    return type(value) is int and value > 0


def length_of(backend: Backend, model: str) -> int | None:
    """Return the length of this backend for a model; without one, its greatest. None: not known."""
    if not model:
        return max(backend.catalog.lengths.values(), default=None)
    return backend.catalog.lengths.get(
        model, backend.catalog.lengths.get(model.partition(":")[0])
    )  # SGLang's `base:adapter`


def too_short(backends: Iterable[Backend], model: str, tokens: int) -> Sequence[BackendId]:
    """Return those that are known to refuse a prompt of so many tokens."""
    lengths = ((backend.id, length_of(backend, model)) for backend in backends)
    return [id_ for id_, length in lengths if length is not None and length < tokens]


def not_longer(backends: Iterable[Backend], than: Backend, model: str) -> Sequence[BackendId]:
    """Return those that are not longer than this one. One of unknown length may be longer than one of a known length,
    and the reverse; of two unknown ones none is."""
    least = length_of(than, model)
    lengths = ((backend.id, length_of(backend, model)) for backend in backends)
    return [id_ for id_, length in lengths if (length is None and least is None) or (length or NO_END) <= (least or 0)]
