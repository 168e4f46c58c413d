"""What follows one source of backends: it gives whole sets, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.routing.wanted.found_backend import FoundBackend, SourceName
from ranvier_py.node.discovery.backend_sources import BackendSources


class Sink(NamedTuple):
    """Where one source gives its sets."""

    sources: BackendSources
    name: SourceName

    def take(self, found: Iterable[FoundBackend[BackendSpec]], left_out: Sequence[str] = ()) -> None:
        """Give the whole set as it is now. `left_out`: what of it can't be used, in words."""
        self.sources.take(self.name, found, left_out)

    def fail(self, why: str) -> None:
        """Note that there is no set: the last one holds."""
        self.sources.fail(self.name, why)

    def doubt(self, why: str) -> None:
        """Note that the set seems to be empty, which is asked again before it counts."""
        self.sources.doubt(self.name, why)


class SourceFollower:
    """Follows one source. Two with the same `settings` do the same."""

    def __init__(self, name: SourceName, settings: object) -> None:
        self.name, self.settings = name, settings

    async def run(self, sink: Sink) -> None:
        """Give sets until cancelled. What fails is given to the sink, and tried again."""
        raise NotImplementedError

    def look_soon(self) -> None:
        """Look again soon: an operator asked for that."""
