"""Places an engine that has data-parallel ranks as these: each becomes a backend of its own, with `#rank=N` in its URL.

The backend of the URL itself stays, since operators, reloads and peers name it, but it gets no requests (`as_ranks`).
Invariant: no client sees that an engine refuses a rank, or can feign it (test_rank_parts.py). Rules: the first look
decides at once; afterwards two looks in a row must show another number. A look without ranks changes nothing. A rank
that the engine refuses ends it, until another process answers or another number is shown. Ranks that an operator lists
go first. Where several processes answer nothing is split. Bound: `ranks.PLACED_MAX` ranks of each configured backend.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.engine_cache.sources.publishers import Publisher
from ranvier_py.core.errors import RanvierError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import Sample, counter, samples
from ranvier_py.core.routing.backend import Backend, ProbeResult
from ranvier_py.core.routing.processes.ranks import entries_of, rank_of, without_rank
from ranvier_py.node.part import Node, Part

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RankCounters:
    """What was done about ranks that nobody listed."""

    split: int = counter("Times that an engine was placed as its data-parallel ranks, or as another number of them.")
    joined: int = counter("Times that an engine with data-parallel ranks was placed as one backend again.")
    refused: int = counter("Requests whose data-parallel rank the engine refused, sent again without.")


@dataclass(slots=True)
class Whole:
    """A backend whose URL names no rank. `count`: as how many backends it is placed."""

    spec: BackendSpec | None
    count: int = 1
    shown: int | None = None  # by its last page that named any: as how many it could be placed
    published: Sequence[int] = ()  # the ranks that publish events
    doubted: int = 0  # another number than `count`, that the last look showed
    refused: tuple[int, int] = (-1, 0)  # generation and number of ranks of which one was refused


class RankParts(Part):
    """See the module."""

    name = "ranks"
    keys = ("ranks",)

    def __init__(self, node: Node) -> None:
        self.counters = RankCounters()
        self._node = node
        self._registry = node.registry
        self._wholes: dict[BackendId, Whole] = {}

    def metrics(self) -> Iterator[Sample]:
        return samples("ranks", self.counters)

    def reload(self, before: Config, after: Config) -> None:
        for id_, whole in list(self._wholes.items()):
            whole.refused = (-1, 0)
            if not after.ranks.split_ranks:
                self._place(self._registry[id_], whole, 1, "split_ranks is off")
            else:
                self._look(id_, whole)

    def added(self, backend: Backend, spec: BackendSpec | None) -> None:
        """Of a backend with an index by URL the ranks have none."""
        if backend.behind.rank is None and (spec is None or not spec.kv_index):
            self._wholes[backend.id] = Whole(spec)

    def removed(self, backend: Backend) -> None:
        """It may be one rank of several, if an operator removes that."""
        self._wholes.pop(backend.id, None)
        whole = self._whole_of(backend.url)
        if whole is not None and backend in whole.behind.as_ranks:
            self._registry.place_as(whole, tuple(each for each in whole.behind.as_ranks if each is not backend))

    def adding(self, url: str) -> None:
        """End what stands at the URL of a rank that is being added by somebody else."""
        whole, at = self._whole_of(url), self._registry.ids.find(url)
        if whole is not None and at is not None and at in whole.behind.as_ranks:
            self._place(whole, self._wholes[whole.id], 1, f"{at.url} is listed")

    def is_placed(self, backend: Backend) -> bool:
        """Whether this stands for a rank that nobody listed."""
        whole = self._whole_of(backend.url)
        return whole is not None and backend in whole.behind.as_ranks

    def probed(self, backend: BackendId, result: ProbeResult) -> None:
        """Take a probe's result, before the registry does."""
        whole = self._wholes.get(backend)
        if whole is None or not result.ok or (whole.shown is not None and result.placeable is None):
            return
        whole.shown = result.placeable
        self._look(backend, whole, result)

    def found(self, backend: BackendId, publishers: Sequence[Publisher]) -> None:
        if (whole := self._wholes.get(backend)) is not None:
            whole.published = [each.rank for each in publishers]
            self._look(backend, whole)

    def _look(self, id_: BackendId, whole: Whole, result: ProbeResult | None = None) -> None:
        backend = self._registry[id_]
        owned_by = backend.catalog.owned_by | {
            str(card.get("owned_by")) for card in (result.cards if result is not None else ())
        }
        wanted = entries_of(whole.shown, whole.published, is_vllm="vllm" in owned_by)
        if backend.behind.processes > 1:
            wanted = 1
        is_refused = whole.refused == (backend.generation, wanted)
        if wanted in (None, whole.count) or is_refused or not self._node.config.ranks.split_ranks:
            whole.doubted = 0
            return
        assert wanted is not None
        if whole.count > 1 and whole.doubted != wanted:
            whole.doubted = wanted
            return
        self._place(backend, whole, wanted, "its pages show one rank", result)

    def rank_refused(self, rank: Backend) -> bool:
        """Place an engine as one backend, since it refuses a rank that was chosen here. Returns whether the request may
        be sent elsewhere: not if an operator listed the rank."""
        backend = self._whole_of(rank.url)
        if backend is None or not (rank.removed or rank in backend.behind.as_ranks):
            return False
        self.counters.refused += 1
        if rank in backend.behind.as_ranks:
            whole = self._wholes[backend.id]
            whole.refused = (backend.generation, whole.count)
            self._place(backend, whole, 1, f"it refuses rank {rank.behind.rank}")
        return True

    def _place(self, backend: Backend, whole: Whole, count: int, why: str, result: ProbeResult | None = None) -> None:
        """Place a backend as so many ranks, or as itself; `why`, in the latter case."""
        if count == whole.count or (count > 1 and self._is_listed(backend)):
            return
        before, whole.count, whole.doubted = whole.count, count, 0
        known = {each.behind.rank: each for each in backend.behind.as_ranks}
        self._registry.place_as(backend, ())  # its requests go there if a rank can't be added
        for rank, each in known.items():
            if count == 1 or (rank or 0) >= count:
                self._node.remove_backend(each.name)
        if count == 1:
            self.counters.joined += 1
            log.warning(event("backend.placed_whole", engine=backend.name, ranks=before, why=why))
            return
        ranks: list[Backend] = []
        try:
            for rank in range(count):
                ranks += (known.get(rank) or self._added(backend, whole, rank, result),)
        except RanvierError as error:
            for each in [*ranks, *(each for each in known.values() if not each.removed and each not in ranks)]:
                self._node.remove_backend(each.name)
            whole.count, whole.refused = 1, (backend.generation, count)
            log.warning(event("backend.placed_whole", engine=backend.name, ranks=count, why=str(error)))
            return
        self._registry.place_as(backend, tuple(ranks))
        self.counters.split += 1
        log.info(event("backend.placed_as_ranks", engine=backend.name, ranks=count))

    def _added(self, backend: Backend, whole: Whole, rank: int, result: ProbeResult | None) -> Backend:
        """Return the backend of one rank. Its engine's models are known, so that no other request finds it first."""
        url, name = f"{backend.url}#rank={rank}", f"{backend.name}#rank={rank}"
        added = self._registry[self._node.add_backend(url, backend.weight, name, whole.spec)]
        self._registry.drain(name, backend.origin.drained)
        self._registry.leave(added, backend.origin.leaving)
        listed = result if result is not None and result.models is not None else None
        models, cards = (
            (backend.catalog.models, backend.catalog.cards) if listed is None else (listed.models, listed.cards)
        )
        if models is not None:
            self._registry.changes.set_models(added, models, cards)
        return added

    def _is_listed(self, backend: Backend) -> bool:
        """Whether somebody listed ranks of this backend."""
        of_it = (
            each for each in self._registry if each.behind.rank is not None and without_rank(each.url) == backend.url
        )
        return any(each not in backend.behind.as_ranks for each in of_it)

    def _whole_of(self, url: str) -> Backend | None:
        """Return the backend of whose ranks this URL may be one; None if there is none."""
        try:
            return self._registry.ids.find(without_rank(url)) if rank_of(url) is not None else None
        except ValueError:
            return None
