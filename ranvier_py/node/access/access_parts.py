"""The keys of a node's clients: read when it starts, and again when their file changes or at a reload.

Rule: a file with an error changes nothing; the log names its lines once, and the view for as long as they stand.
Whether keys are needed at all is decided at the start: no reload opens the port for all.
Invariant: reading keys holds up no request (test_keys_read.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.metrics import Sample, counter, gauge, samples
from ranvier_py.core.prompts.tenants import HEADER
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.io.keys import FollowedFile
from ranvier_py.node.access.key_reader import read_keys
from ranvier_py.node.access.request_counts import RequestCounts
from ranvier_py.node.asked import Asked
from ranvier_py.node.part import Handler, Node, Part
from ranvier_py.proxy.stages.identify import Gate, Network

log = logging.getLogger(__name__)

LISTED_MAX = 1000  # keys in one answer


@dataclass(slots=True)
class KeysFileCounters:
    keys: int = gauge("Keys of clients that this node knows.")
    tenants: int = gauge("Tenants in the file of clients' keys.")
    file_changes: int = counter("Times that the file of clients' keys was read and taken.")
    file_failures: int = counter("Times that the file of clients' keys could not be used.")


class ClientKeys(FollowedFile):
    """Gives the keys of a file to a gate."""

    def __init__(self, gate: Gate, config: Config) -> None:
        assert config.keys_file is not None
        super().__init__(config.keys_file)
        self.counters = KeysFileCounters()
        self._gate = gate

    async def read(self) -> None:
        table = await read_keys(self.path, "keys_file")
        counters, self._gate.table = self.counters, table
        counters.keys, counters.tenants = len(table), len(table.tenants)
        counters.file_changes += 1
        log.info("access.keys_read %s: %d keys, %d tenants", self.path, counters.keys, counters.tenants)

    def refused(self, error: ConfigError, *, is_new: bool) -> None:
        self.counters.file_failures += 1
        if is_new:
            log.error("access.keys_refused, going on as before: %s", "; ".join(error.problems))


class Access(Part):
    """See the module. `gate` is None where nobody needs a key and every proxy is believed."""

    name = "access"
    keys = ("keys_file", "trusted_proxies")

    def __init__(self, node: Node) -> None:
        config = node.config
        needs_key = config.keys_file is not None
        isolation = config.tenant_isolation
        field = isolation.removeprefix(HEADER).lower().encode() if isolation.startswith(HEADER) else b""
        has_gate = needs_key or bool(config.trusted_proxies)
        self.gate = Gate(needs_key=needs_key, trusted=trusted(config), tenant_field=field) if has_gate else None
        self._counts, self._listed = RequestCounts(), node.registry.pools.names
        self._file = ClientKeys(self.gate, config) if self.gate is not None and needs_key else None

    def counted(self, line: Callable[[RequestSummary], object] | None) -> Callable[[RequestSummary], object] | None:
        """Return what is called with each request that is over: it is logged, and counted if there is a gate."""
        if self.gate is None:
            return line

        def count(request: RequestSummary) -> None:
            self._counts.add(request, self._listed.listed)
            if line is not None:
                line(request)

        return count

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the keys before the public port opens. Raises ConfigError for a file with an error."""
        if self._file is not None:
            await self._file.read()
        task_status.started()

    async def loop(self) -> None:
        if self._file is not None:
            await self._file.run()

    def reread(self) -> None:
        if self._file is not None:
            self._file.look_soon()

    def held(self, before: Config, after: Config) -> Iterable[str]:
        """Whether there is a gate can't change: what else tells tenants apart was made for that."""
        if (before.keys_file is None) != (after.keys_file is None):
            yield "keys_file"
        if self._file is None and bool(before.trusted_proxies) != bool(after.trusted_proxies):
            yield "trusted_proxies"

    def reload(self, before: Config, after: Config) -> None:
        if self.gate is not None:
            self.gate.trusted = trusted(after)
        if self._file is not None and after.keys_file is not None:
            self._file.path = after.keys_file
            self._file.look_soon()

    def metrics(self) -> Iterator[Sample]:
        if self.gate is not None:
            yield from samples("access", self.gate.counters)
            yield from self._counts.samples()
        if self._file is not None:
            yield from samples("access", self._file.counters)

    def routes(self) -> Mapping[str, Handler]:
        return {"GET /admin/access": self.show}

    def show(self, asked: Asked) -> Mapping[str, Any]:
        """Return what is known of keys and tenants; of the keys, `limit` from `first` on, in the order of the file."""
        if self._file is None or self.gate is None:
            return {"needs_key": False}
        first, table = asked.number("first", 0), self.gate.table
        keys = [
            {"id": key.id, "tenant": key.tenant, "models": list(key.models), "disabled": key.disabled}
            for each in table.identities(first, asked.limit(LISTED_MAX))
            if (key := each.key) is not None
        ]
        counters = self._file.counters
        return {
            "needs_key": True,
            "file": str(self._file.path),
            "trouble": self._file.trouble,
            "keys": {"count": counters.keys, "first": first, "listed": keys},
            "tenants": counters.tenants,
            "refused": dict(self.gate.counters.refused),
            "claims": dict(self.gate.counters.claims),
        }


def trusted(config: Config) -> list[Network]:
    return [ip_network(text) for text in config.trusted_proxies]
