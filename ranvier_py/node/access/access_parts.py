"""Who may ask a node, by the keys of its clients and what proxies say, and the orders to refuse a key on all nodes.

Rule: whether keys are needed at all is decided at the start: no reload opens the port for all.
Invariant: reading keys holds up no request (test_keys_read.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from ipaddress import ip_network
from itertools import islice
from types import MappingProxyType
from typing import Any

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.core.access.key_table import KeyTable
from ranvier_py.core.access.keys_file import label
from ranvier_py.core.access.revocations import UNSIGNED
from ranvier_py.core.errors import BadRequest, RanvierError
from ranvier_py.core.findings import Finding
from ranvier_py.core.history.joined_panes import limited
from ranvier_py.core.log_events import event
from ranvier_py.core.log_limit import LogLimit
from ranvier_py.core.metrics import Sample, samples
from ranvier_py.core.prompts.tenants import HEADER
from ranvier_py.node.access.key_models import KeyModels
from ranvier_py.node.access.keys_files import KeyedPart
from ranvier_py.node.access.limit_parts import LimitParts
from ranvier_py.node.asked import LIMIT, TEXT_SCHEMA, Asked, Route
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.part import Handler, Node
from ranvier_py.proxy.admission.seen_head import SeenHead
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.proxy.realtime import OTHER_MODELS, Realtime
from ranvier_py.proxy.stages.admit import may_go_on
from ranvier_py.proxy.stages.identify import Gate, Network
from ranvier_py.proxy.stages.reserve import UNCOUNTED

log = logging.getLogger(__name__)

LISTED_MAX = 1000  # keys in one answer
SCOPES_SHOWN = 200  # on the page of the control port

REVOKED_HOURS, REVOKED_HOURS_MAX = 30 * 24, 365 * 24
"""How long a revocation holds: time to take the key's line out of all files."""

HeadCheck = Callable[[HttpRequest, Client], object]
"""Raises a RanvierError if the head of a request is reason enough to refuse it."""


class Access(KeyedPart):
    """See the module. `gate` is None where nobody needs a key and every proxy is believed."""

    name = "access"
    joins = MappingProxyType({"tenants": limited})
    keys = ("keys_file", "trusted_proxies", "model")

    def __init__(self, node: Node, clustering: ClusterParts | None, limits: LimitParts, realtime: Realtime) -> None:
        config, self._clustering, self._limits, self._realtime = node.config, clustering, limits, realtime
        needs_key = config.keys_file is not None
        isolation = config.tenant_isolation
        field = isolation.removeprefix(HEADER).lower().encode() if isolation.startswith(HEADER) else b""
        self.gate: Gate | None = None
        if needs_key or config.ports.trusted_proxies:
            self.gate = Gate(
                needs_key=needs_key,
                trusted=trusted(config),
                tenant_field=field,
                is_revoked=clustering.peer.features.revocations.is_revoked if clustering is not None else None,
                known=limits.reserve.known if limits.reserve is not None else None,
            )
        self._listed, self._models = node.registry.pools.names, KeyModels(node.registry, config)
        self._log_limit = LogLimit()
        self.by_head: HeadCheck | None = self._let_in if self.gate is not None else None
        self.before_body: HeadCheck | None = self._check if limits.reserve is not None else None
        super().__init__(config.keys_file, "keys_file", self._take)

    def _let_in(self, request: HttpRequest, client: Client) -> None:
        """Find out who sends a head, and show what is left of its limits. Raises InvalidKey."""
        assert self.gate is not None
        client.limit_lines = None
        client.limit_lines = self.gate.check(request, client).limit_lines

    def _check(self, request: HttpRequest, client: Client) -> None:
        """Refuse a request whose body is yet to come, if it can't fit. Raises LimitReached."""
        reserve, seen = self._limits.reserve, client.seen_head
        if reserve is not None and request.method == b"POST" and seen is not None and seen.identity is not None:
            reserve.check(seen.identity)

    def denied(self, client: Client, error: RanvierError) -> None:
        """Log who was refused, once in LOG_INTERVAL_S for each reason."""
        request, seen = client.request, client.seen_head
        method, path = request.method.decode("latin-1"), request.path.decode("latin-1")
        asked = self._log_limit.refused(error.code, method, path, time.monotonic())
        if asked is not None:
            identity, address = (seen.identity, seen.client) if seen is not None else (None, "")
            key_id, address = identity.key_id if identity is not None else "", address or client.peer
            who = {"client": address, "key_id": key_id}
            log.warning(event("access.refused", status=error.status, code=error.code, **who, **asked))

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the keys before the public port opens. Raises ConfigError for a file with an error."""
        await self.read()
        task_status.started()

    def sweep(self, now: float) -> None:
        self._part()
        if self.gate is not None:
            self._models.look(self.gate.table)

    def _take(self, table: KeyTable) -> None:
        if self.gate is not None:
            self.gate.take(table)
        self._part()

    def _part(self) -> None:
        """Close the WebSockets of clients that would not be let in now: each was asked for its key, its model and its
        limits when it was opened alone."""
        if self.gate is not None and self.gate.needs_key:
            self._realtime.part(self._refusal)

    def _refusal(self, seen: SeenHead, models: Sequence[str]) -> str:
        if self.gate is None or seen.identity is None or seen.identity.key is None:
            return ""
        found, why = self.gate.still(seen)
        if found is None:
            return why
        seen.identity = found  # what a WebSocket names from now on is judged by that
        if not may_go_on(found, models, self._listed):
            return OTHER_MODELS
        return UNCOUNTED if self._limits.reserve is not None and self._limits.reserve.needs_counts(found) else ""

    def held(self, before: Config, after: Config) -> Iterable[str]:
        """Whether there is a gate can't change: what else tells tenants apart was made for that."""
        if (before.keys_file is None) != (after.keys_file is None):
            yield "keys_file"
        if self.file is None and bool(before.ports.trusted_proxies) != bool(after.ports.trusted_proxies):
            yield "trusted_proxies"

    def reload(self, before: Config, after: Config) -> None:
        if self.gate is not None:
            self.gate.trusted = trusted(after)
        self._models.take(after)
        self.move(after.keys_file)

    def findings(self, now: float) -> Iterator[Finding]:
        yield from super().findings(now)
        yield from self._models.findings()

    def panes(self, now: float, *, watched: bool) -> Mapping[str, Any]:
        """Show the limits of tenants and keys, those first of which least is left."""
        limits = self._limits.view() if self.gate is not None else {}
        shown = dict(islice(limits.get("limits", {}).items(), SCOPES_SHOWN))
        needs_key = self.gate is not None and self.gate.needs_key
        return {"tenants": {"needs_key": needs_key, "limited": limits.get("limited", 0), "limits": shown}}

    def metrics(self) -> Iterator[Sample]:
        if self.gate is not None:
            yield from samples("access", self.gate.counters)
        yield from super().metrics()

    def routes(self) -> Mapping[str, Handler]:
        return {
            "GET /admin/access": Route(
                self.show,
                "Keys, tenants and what is left of limits",
                query={**LIMIT, "first": {"type": "integer", "minimum": 0}},
            ),
            "POST /admin/access/revoke": Route(
                self.revoke, "Refuse a key on all nodes", {"id": TEXT_SCHEMA, "hours": {"type": "number"}}, ("id",)
            ),
            "POST /admin/access/restore": Route(self.restore, "Take a revocation back", {"id": TEXT_SCHEMA}, ("id",)),
        }

    async def revoke(self, asked: Asked) -> Mapping[str, Any]:
        """Refuse a key by its id, on all nodes, for some hours."""
        wanted = await asked.json("id", "hours")
        hours = wanted.get("hours", REVOKED_HOURS)
        if type(hours) not in (int, float) or not 0 < hours <= REVOKED_HOURS_MAX:
            raise BadRequest(f"hours must be a number above 0, at most {REVOKED_HOURS_MAX}")
        return await self._order(id_of(wanted), time.time() + 3600 * hours, asked.caller)

    async def restore(self, asked: Asked) -> Mapping[str, Any]:
        """Take a revocation back."""
        return await self._order(id_of(await asked.json("id")), 0.0, asked.caller)

    async def _order(self, key_id: str, until: float, by: str) -> Mapping[str, Any]:
        clustering = self._clustering
        if clustering is None or self.file is None or self.gate is None:
            raise BadRequest(UNSIGNED)
        if why_not := await clustering.revoke(key_id, int(1000 * until)):
            raise BadRequest(why_not)
        log.warning(event("access.revoked" if until else "access.restored", key_id=key_id, by=by))
        self._part()
        return {"id": key_id, "until": moment(until) if until else None, "known": self.gate.table.has_id(key_id)}

    def _revoked(self) -> Sequence[Mapping[str, Any]]:
        if self._clustering is None:
            return ()
        rows = self._clustering.peer.features.revocations.held(time.monotonic())
        return [{"id": row.id, "until": moment(row.until_ms / 1000)} for row in rows[:LISTED_MAX]]

    def show(self, asked: Asked) -> Mapping[str, Any]:
        """Return what is known of keys and tenants; of the keys, `limit` from `first` on, in the order of the file."""
        if self.file is None or self.gate is None:
            return {"needs_key": False}
        first, table = asked.number("first", 0), self.gate.table
        keys = [
            {"id": key.id, "tenant": key.tenant, "models": list(key.models), "disabled": key.disabled}
            for each in table.identities(first, asked.limit(LISTED_MAX))
            if (key := each.key) is not None
        ]
        counters = self.file.counters
        return {
            "needs_key": True,
            "file": str(self.file.path),
            "trouble": self.file.trouble,
            "keys": {"count": counters.keys, "first": first, "listed": keys},
            "tenants": counters.tenants,
            "unknown_models": dict(self._models.unmatched),
            "revoked": self._revoked(),
            "refused": dict(self.gate.counters.refused),
            **self._limits.view(),
            "claims": dict(self.gate.counters.claims),
        }


def id_of(body: Mapping[str, Any]) -> str:
    try:
        return label(body.get("id"))
    except ValueError as error:
        raise BadRequest(f"id {error}") from error


def moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def trusted(config: Config) -> list[Network]:
    return [ip_network(text) for text in config.ports.trusted_proxies]
