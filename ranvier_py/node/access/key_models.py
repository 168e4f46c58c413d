"""Names what a file of keys says of models that no engine serves: a typing error there locks a client out of its model,
or leaves a model without its limit."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice

from ranvier_py.config.config_model import Config
from ranvier_py.core.access.key_table import KeyTable
from ranvier_py.core.access.model_patterns import unmatched
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.log_events import event
from ranvier_py.core.routing.backends import Registry

log = logging.getLogger(__name__)

FOUND_MAX = 16  # of which there is a finding each, and a line in the log


class KeyModels:
    """See the module. `unmatched`: by pattern where it stands."""

    def __init__(self, registry: Registry, config: Config) -> None:
        self.unmatched: Mapping[str, str] = {}
        self._registry = registry
        self._listed: object = None  # what engines listed, and the file, at the last look
        self._table: KeyTable | None = None
        self.take(config)

    def take(self, config: Config) -> None:
        """Take the tables of models."""
        self._named = [name for spec in config.model for name in (spec.name, *spec.to, *spec.fallback)]
        self._table = None

    def look(self, table: KeyTable) -> None:
        """Compare the file with what engines list and tables of models name, once one of these is new."""
        names = self._registry.pools.names
        if names.listed is self._listed and table is self._table:
            return
        before, self._listed, self._table = self.unmatched, names.listed, table
        self.unmatched = unmatched(
            table.patterns, names.listed, self._named, lambda name: names.lacks(self._registry, name)
        )
        for pattern, place in islice(self.unmatched.items(), FOUND_MAX):
            if before.get(pattern) != place:
                log.warning(event("access.model_unknown", model=pattern, place=place))

    def findings(self) -> Iterator[Finding]:
        for pattern, place in islice(self.unmatched.items(), FOUND_MAX):
            what = f"{place} names the model {pattern}, which no engine serves and no table of models has"
            whom, remedy = "who has this key or limit", "Correct it, or start an engine that serves such a model."
            yield Finding("key_models", Severity.NOTICE, what, about=f"models {pattern}", whom=whom, remedy=remedy)
