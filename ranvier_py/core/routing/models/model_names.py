"""Which backends serve a model, by the names that they list.

Rule: a name that backends list goes to those; else `base:adapter` and `default` go to SGLang's engines of that base,
of these to those that list the adapter; any other name goes to backends that take any. One whose list is not known yet
may serve each. Invariant: names that clients invent take no memory (test_model_names.py).
Bound: COMPARED_MAX names, and as many aliases, are compared with a missing one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from math import sqrt

from ranvier_py.core.errors import ModelNotFound, NoBackend
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backend import Backend, Catalog, Pool
from ranvier_py.core.routing.models.model_list import NO_ALIASES

COMPARED_MAX, NEAREST_MAX = 256, 3
LIKE_LEAST = 0.4
"""Cosine of the pairs of letters of two names that are near: `qwen` and `Qwen2.5-7B-Instruct` have 0.45."""


class ModelNames:
    """The names that the backends of a node list."""

    __slots__ = ("_pairs", "lacking", "listed")

    def __init__(self) -> None:
        self.listed: dict[str, None] = {}  # names that some backend lists: bounds the cache of pools
        self.lacking: dict[bytes, list[BackendId]] = {}  # by path, those that do not serve it
        self._pairs: dict[str, frozenset[str]] = {}  # made when a name is missing

    def relist(self, backends: Iterable[Backend]) -> None:
        """Take what the backends list and lack now."""
        backends = list(backends)
        self.listed = dict.fromkeys(model for backend in backends for model in backend.catalog.models or ())
        self._pairs, self.lacking = {}, {}
        for backend in backends:
            for path in backend.seen.lacks:
                self.lacking.setdefault(path, []).append(backend.id)

    def pool_of(self, model: str) -> str | None:
        """Return the name of the pool for a model: there are no more of them than models that backends list."""
        if not model or model in self.listed:
            return model
        base, colon, adapter = model.partition(":")
        if base not in self.listed and base != "default":
            return None
        return model if adapter in self.listed else f"{base}{colon}*"

    def unfit(self, path: bytes, model: str) -> Sequence[BackendId]:
        """Return the backends that do not serve this path. A model that is listed finds its own."""
        return () if model in self.listed else self.lacking.get(path, ())

    def serving(self, backends: Iterable[Backend], model: str) -> Sequence[Backend]:
        """Return those of these backends that may serve `model` ("" = any)."""
        if model in self.listed:  # under its whole name, so that it is nobody's adapter
            return [b for b in backends if b.catalog.models is None or model in b.catalog.models]
        able = [b for b in backends if b.catalog.serves(model)]
        if model:
            for is_surer in (Catalog.lists_adapter, Catalog.has_adapter):
                if any(is_surer(b.catalog, model) for b in able):
                    return [b for b in able if b.catalog.models is None or is_surer(b.catalog, model)]
        return able

    def lacks(self, backends: Iterable[Backend], model: str) -> bool:
        """Whether the lists of all backends are known, and none may serve `model`; not without any backend."""
        if not model or model in self.listed:
            return False
        base, catalog = model.partition(":")[0], None
        may_be_adapter = base in self.listed or base == "default"  # else no long list is looked through
        for catalog in [backend.catalog for backend in backends]:
            if catalog.models is None or catalog.any_model or (may_be_adapter and catalog.has_adapter(model)):
                return False
        return catalog is not None

    def error(self, pool: Pool, model: str) -> ModelNotFound | NoBackend:
        """Return the error that a client gets for an empty pool."""
        return self.missing(model) if pool.unknown else NoBackend("No backend is available to serve this request")

    def missing(
        self, model: str, may_use: Callable[[str], bool] = lambda _: True, aliases: Mapping[str, str] = NO_ALIASES
    ) -> ModelNotFound:
        """Return the error for a model that nobody serves; its first words are OpenAI's. `may_use`: which names it may
        show; `aliases`: further ones, each with the model that it stands for."""
        near = ", ".join(f"`{name}`" for name in self.nearest(model, may_use, aliases))
        return ModelNotFound(
            f"The model `{model}` does not exist" + (f"; the nearest names are {near}" if near else "")
        )

    def nearest(
        self, model: str, may_use: Callable[[str], bool] = lambda _: True, aliases: Mapping[str, str] = NO_ALIASES
    ) -> Sequence[str]:
        """Return up to NEAREST_MAX names that come near this one, the nearest first."""
        if not self._pairs:
            self._pairs = {name: pairs_of(name) for name in islice(self.listed, COMPARED_MAX)}
        wanted = pairs_of(model)
        known = ((name, own) for name, own in self._pairs.items() if name not in aliases and may_use(name))
        also = (
            (alias, pairs_of(alias))
            for alias, served in islice(aliases.items(), COMPARED_MAX)
            if may_use(alias) or may_use(served)
        )
        likeness = {name: len(wanted & own) / sqrt(len(wanted) * len(own)) for name, own in chain(known, also)}
        near = [name for name, share in likeness.items() if share >= LIKE_LEAST]
        return sorted(near, key=likeness.__getitem__, reverse=True)[:NEAREST_MAX]


def pairs_of(name: str) -> frozenset[str]:
    """Return the pairs of letters and digits that follow each other in the last part of a path, without case."""
    plain = "".join(char for char in name.rpartition("/")[2].lower() if char.isalnum())
    return frozenset(plain[at : at + 2] for at in range(max(len(plain) - 1, 1)))
