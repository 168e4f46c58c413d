"""Under which names an engine's blocks are asked for.

Events name adapters and salts, never the base model: an engine has one. Requests name a model, and an engine may serve
its base model under several names (vLLM's `--served-model-name a b`), all of one cache. So blocks are hashed once,
under the first of them, and every change is reported under all: a fingerprint is carried over by arithmetic
(`TokenHasher.renamed`), so that other names cost neither memory nor a second hash. No name is preferred over another
between nodes or engines, hence nothing has to be agreed upon, and nothing moves when an engine with other names joins.

Rules: base names are the cards of /v1/models without a parent. Two of them with different roots are two models, whose
blocks no event distinguishes. Where each stream's topic names the one it is of (llm-d's `kv@HOST:PORT@MODEL`), each
is read under its own names; else none is read, for what is not reported would be taken for not held. An adapter has one
name, and what of its blocks is reported under another base name matches nothing.
Bound: NAMES_MAX names; requests by others match what traffic taught.
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
TOPIC_PARTS = 2  # before the model, in a topic of llm-d's


def base_models(cards: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """The names of each base model of an engine, as it lists them."""
    by_root: dict[str, dict[str, None]] = {}
    for card in cards:
        if isinstance(card.get("id"), str) and not card.get("parent"):
            by_root.setdefault(str(card.get("root") or card["id"]), {})[card["id"]] = None
    return tuple([tuple(names)[:NAMES_MAX] for names in by_root.values()])


def base_names(cards: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of the one base model of an engine. None where it lists none, or several models."""
    models = base_models(cards)
    return models[0] if len(models) == 1 else ()


def names_by_topic(models: Sequence[tuple[str, ...]], topics: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Under which names each stream of an engine is read, by its topic; none where not all of it can be known.

    An engine with one model needs no topics. Of several each must have a stream, and each stream must say whose it is.
    """
    if len(models) == 1:
        return tuple(models) * len(topics)
    reported = [next((names for names in models if model_in(topic) in names), ()) for topic in topics]
    return tuple(reported) if all(reported) and set(reported) == set(models) else ()


def model_in(topic: str) -> str:
    """ "kv@10.0.0.1:8000@model" -> "model"; any other topic is a name itself, or nothing."""
    kind, *place = topic.split("@", TOPIC_PARTS)
    return place[-1] if kind == "kv" and len(place) == TOPIC_PARTS else topic


class Names:
    """The names of one engine.

    Args:
        namespace_of: of (model, adapter, salt): `PromptReader.namespace_of`.
        base: as `base_names` found them.
    """

    def __init__(
        self, hasher: TokenHasher, namespace_of: Callable[[str, str, str], Fingerprint], base: Sequence[str]
    ) -> None:
        self.base = tuple(base)
        self._namespace_of = namespace_of
        self._renamed = hasher.renamed
        first = namespace_of(base[0], "", "") if base else 0
        self._steps = [namespace_of(name, "", "") - first for name in base[1:]]

    def namespace(self, scope: Scope) -> Fingerprint | None:
        """For Residency: under what the blocks of this scope are hashed. None: no request of ours can mean them."""
        if scope.lora_name is None and (scope.lora_id is not None or not self.base):
            return None  # older engines name adapters by numbers of their own
        return self._namespace_of(self.base[0] if self.base else "", scope.lora_name or "", scope.salt or "")

    def reported(self, changes: Changes) -> Changes:
        """The same under all names."""
        if not self._steps:
            return changes
        more = [self._under(change, step) for step in self._steps for change in changes.changes]
        states = changes.states and tuple(under_names(changes.states, self._steps, self._renamed))
        return changes._replace(changes=(*changes.changes, *more), states=states)

    def held(self, held: Held) -> Held:
        """What is held, asked for under any name."""
        return UnderNames(held, self._steps, self._renamed) if self._steps else held

    def _under(self, change: Change, step: int) -> Change:
        fingerprint, tokens, tier, parent = change
        above = self._renamed(parent, step) if parent != UNKNOWN else UNKNOWN
        return Change(self._renamed(fingerprint, step), tokens, tier, above)


def under_names(
    states: Iterable[StateMoved], steps: Sequence[int], renamed: Callable[[Fingerprint, int], Fingerprint]
) -> Iterator[StateMoved]:
    """The same under each name."""
    for change in states:
        yield change
        yield from (change._replace(fingerprint=renamed(change.fingerprint, step)) for step in steps)


class UnderNames:
    """A Held that knows a prefix by its fingerprint under each name."""

    def __init__(self, held: Held, steps: Sequence[int], renamed: Callable[[Fingerprint, int], Fingerprint]) -> None:
        self._held = held
        self._steps = steps
        self._renamed = renamed

    def tier(self, fingerprint: Fingerprint) -> Tier:
        tier = self._held.tier(fingerprint)
        for step in self._steps:
            if tier is not Tier.ABSENT:
                break
            tier = self._held.tier(self._renamed(fingerprint, -step))
        return tier

    def states(self) -> Iterator[StateMoved]:
        """Where recurrent states are."""
        held = self._held.states() if isinstance(self._held, HeldStates) else ()
        return under_names(held, self._steps, self._renamed)
