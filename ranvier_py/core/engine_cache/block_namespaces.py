"""Maps the model names in requests to the namespaces in which an engine's blocks are hashed.

Rule: events name adapters and salts, never the base model, and an engine may serve that under several names (vLLM's
`--served-model-name a b`) with one cache. So blocks are hashed once, under the first name, and every change is
reported under all: a fingerprint is converted by arithmetic (`TokenHasher.renamed`). Nodes and engines need not agree
on a preferred name, and nothing changes when an engine with other names joins.
Bound: NAMES_MAX names; requests by other names match what traffic taught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ranvier_py.core.engine_cache.engine_caches import Held, HeldStates
from ranvier_py.core.engine_cache.prefixes import Change
from ranvier_py.core.engine_cache.residency_values import Changes, Scope
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.engine_cache.states import StateMoved
from ranvier_py.core.ids import UNKNOWN, Fingerprint
from ranvier_py.core.prompts.fingerprint import TokenHasher

NAMES_MAX = 8
TOPIC_PARTS = 2  # parts of an llm-d topic before the model


def base_models(cards: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> tuple[tuple[str, ...], ...]:
    """Return the names of each base model of an engine, in the order in which the engine lists them: the cards without
    a parent, those of one root together. Without cards each of `names` is a model."""
    by_root: dict[str, dict[str, None]] = {}
    for card in cards:
        if isinstance(card.get("id"), str) and not card.get("parent"):
            by_root.setdefault(str(card.get("root") or card["id"]), {})[card["id"]] = None
    return tuple([tuple(same)[:NAMES_MAX] for same in by_root.values()]) or tuple([(name,) for name in names])


def names_by_topic(models: Sequence[tuple[str, ...]], topics: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the names under which each stream of an engine is read, by its topic; empty if not all can be known.

    An engine with one model needs no topics. With several, each must have a stream, and each topic must name one
    (llm-d's `kv@HOST:PORT@MODEL`): whatever is not reported would be taken for not held.
    """
    if len(models) == 1:
        return tuple(models) * len(topics)
    reported = [next((names for names in models if model_in(topic) in names), ()) for topic in topics]
    return tuple(reported) if all(reported) and set(reported) == set(models) else ()


def model_in(topic: str) -> str:
    """ "kv@10.0.0.1:8000@model" -> "model"; any other topic is itself a name, or empty."""
    kind, *place = topic.split("@", TOPIC_PARTS)
    return place[-1] if kind == "kv" and len(place) == TOPIC_PARTS else topic


class Names:
    """The names of one engine's base model.

    Args:
        namespace_of: called with (model, adapter, salt): `PromptReader.namespace_of`.
        base: one of those that `base_models` found.
    """

    def __init__(
        self, hasher: TokenHasher, namespace_of: Callable[[str, str, str], Fingerprint], base: Sequence[str]
    ) -> None:
        self.base = tuple(base)
        self._namespace_of = namespace_of
        self._renamed = hasher.renamed
        first = namespace_of(base[0], "", "") if base else 0
        self._steps = [namespace_of(name, "", "") - first for name in base[1:]]
        self.several = bool(self._steps)

    def namespace(self, scope: Scope) -> Fingerprint | None:
        """Return the fingerprint under which a scope's blocks are hashed; None: no request of ours can mean them."""
        if scope.lora_name is None and (scope.lora_id is not None or not self.base):
            return None  # older engines name adapters by their own numbers
        return self._namespace_of(self.base[0] if self.base else "", scope.lora_name or "", scope.salt or "")

    def reported(self, changes: Changes) -> Changes:
        """Return the changes under all names."""
        more = [self._under(change, step) for step in self._steps for change in changes.changes]
        states = changes.states and tuple(under_names(changes.states, self._steps, self._renamed))
        return changes._replace(changes=(*changes.changes, *more), states=states)

    def held(self, held: Held) -> Held:
        """Wrap what is held, so that it can be asked for under any name."""
        return UnderNames(held, self._steps, self._renamed) if self._steps else held

    def _under(self, change: Change, step: int) -> Change:
        fingerprint, tokens, tier, parent = change
        above = self._renamed(parent, step) if parent != UNKNOWN else UNKNOWN
        return Change(self._renamed(fingerprint, step), tokens, tier, above)


def under_names(
    states: Iterable[StateMoved], steps: Sequence[int], renamed: Callable[[Fingerprint, int], Fingerprint]
) -> Iterator[StateMoved]:
    """Yield each state under all names."""
    for change in states:
        yield change
        yield from (change._replace(fingerprint=renamed(change.fingerprint, step)) for step in steps)


class UnderNames:
    """A Held that finds a prefix by its fingerprint under any of the names."""

    def __init__(self, held: Held, steps: Sequence[int], renamed: Callable[[Fingerprint, int], Fingerprint]) -> None:
        self._held = held
        self._steps = steps
        self._renamed = renamed

    def held_among(self, fingerprints: Sequence[Fingerprint]) -> Mapping[Fingerprint, Tier]:
        found = dict(self._held.held_among(fingerprints))
        for step in self._steps:
            first_names = {self._renamed(name, -step): name for name in fingerprints}
            own = self._held.held_among(list(first_names))
            found.update({first_names[name]: tier for name, tier in own.items()})
        return found

    def states(self) -> Iterator[StateMoved]:
        """Where recurrent states are, under all names."""
        held = self._held.states() if isinstance(self._held, HeldStates) else ()
        return under_names(held, self._steps, self._renamed)
