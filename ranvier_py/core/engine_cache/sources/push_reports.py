"""What a pushing worker said, as the sink of the truth asks for it, and under which names it said it."""

from __future__ import annotations

from ranvier_py.core.engine_cache.block_namespaces import base_names
from ranvier_py.core.engine_cache.engine_caches import Source
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.engine_cache.sources.push_links import Links
from ranvier_py.core.engine_cache.sources.push_state import Worker
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.routing.backends import Backend


class Said:
    """A Held: what a worker holds by the report's keys, asked for by our fingerprints."""

    def __init__(self, links: Links, worker: Worker) -> None:
        self._links = links
        self._worker = worker

    def tier(self, fingerprint: Fingerprint) -> Tier:
        links = self._links.of_fingerprint(fingerprint)
        return min((self._worker.table.tier(link.key) for link in links), default=Tier.ABSENT)


def names_of(backend: Backend, worker: Worker) -> tuple[str, ...]:
    """Names of the model that a worker's fingerprints are of: first the one that they were made under."""
    bases = base_names(backend.cards)
    return tuple(dict.fromkeys((worker.model, *bases) if worker.model else bases))


def source_of(backend: BackendId) -> Source:
    return Source(backend, "push")
