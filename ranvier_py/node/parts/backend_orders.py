"""What operators order of backends while a node runs, here or on a peer: add, remove, drain, set options.

Rules: an order is carried out whole or not at all. Each change is a line of the log, with who ordered it, the old and
the new value. A backend may be named by its name or its URL. Of options only the weight changes in place; for others
the backend is removed and added again, which voids its routes, as a reload does.
Peers that follow a command ask the engine where its events are: `kv_` options count for one node alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from ranvier_py.config.config_loader import read_backend
from ranvier_py.config.config_values import OWN_FILES_ONLY, BackendSpec
from ranvier_py.core.errors import BadRequest, ConfigError, RanvierError
from ranvier_py.core.log_events import event
from ranvier_py.core.routing.backend_state.order_notes import Given
from ranvier_py.core.routing.backend_state.signed_commands import HOSTED, Command, CommandOptions
from ranvier_py.core.routing.backends import Backend
from ranvier_py.node.asked import PLAIN, SCOPE, TEXT_SCHEMA, YES_OR_NO, Asked, ControlAnswer, Route, text_of
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.discovery.kept_orders import KeptOrders
from ranvier_py.node.name_parts import NameParts
from ranvier_py.node.part import Handler, Node, Part
from ranvier_py.node.parts.backend_views import shown_backend
from ranvier_py.node.shared_orders import SharedOrders, WantedBackend, without_gossip

log = logging.getLogger(__name__)

SETTABLE = ("weight", "kv_events", "kv_replay", "kv_ranks", "kv_profile", *CommandOptions._fields)
FIELDS = ("url", "weight", "name", *SETTABLE[1:])
REFUSED = {"api_key_file": OWN_FILES_ONLY}
OPTIONS: Mapping[str, Mapping[str, Any]] = {name: {} for name in FIELDS}
"""Checked as those of the configuration are, with all that is wrong in one answer."""
NAMED = dict.fromkeys(("url", "name"), TEXT_SCHEMA)
WORKER = {"url": TEXT_SCHEMA}
WEIGHT = {"weight": {"type": "number", "exclusiveMinimum": 0, "maximum": 1000}}


class CarriedOut(NamedTuple):
    """What was carried out here: the backend's view, and who is asked whether they obeyed; None without gossip."""

    view: Mapping[str, Any]
    asks: Sequence[Given] | None


class BackendOrders(Part):
    """See the module."""

    name = "backend_orders"

    def __init__(self, node: Node, names: NameParts, clustering: ClusterParts | None, kept: KeptOrders) -> None:
        self._node, self._registry, self._names, self._kept = node, node.registry, names, kept
        self._shared: SharedOrders | None = clustering.orders if clustering is not None else None

    def routes(self) -> Mapping[str, Handler]:
        """/…_worker answer as SGLang's router does."""
        return {
            "POST /admin/backends": Route(self._add, "Add a backend", {**OPTIONS, **SCOPE}, ("url",)),
            "DELETE /admin/backends": Route(
                self._remove, "Remove a backend", {**NAMED, **SCOPE}, query={**NAMED, **SCOPE}, may_lack_body=True
            ),
            "POST /admin/backends/drain": Route(
                self._drain,
                "Send a backend no more requests, or some again, on all nodes",
                {**NAMED, "draining": YES_OR_NO},
            ),
            "POST /admin/backends/set": Route(
                partial(self._set, SETTABLE), "Give a backend other options", {**NAMED, **OPTIONS, **SCOPE}
            ),
            "POST /admin/backends/weight": Route(
                partial(self._set, ("weight",)), "Give a backend another weight", {**NAMED, **WEIGHT, **SCOPE}
            ),
            "POST /add_worker": Route(self._add_worker, "Add a backend", query=WORKER, kinds=(PLAIN,)),
            "POST /remove_worker": Route(self._remove_worker, "Remove a backend", query=WORKER, kinds=(PLAIN,)),
        }

    async def _add(self, asked: Asked) -> Mapping[str, Any]:
        body = dict(await asked.json(*FIELDS, "cluster", others=True))
        scope = self._scope(body.pop("cluster", None))
        await self._names.refuse_twin(body.get("url"))
        return await self._answered(*self.add(body, asked.caller, scope))

    def add(self, fields: Mapping[str, Any], by: str = "", cluster: bool = True) -> CarriedOut:
        """Add a backend with the configuration's fields. Raises ConfigError with all that is wrong; nothing changes."""
        spec = read_backend(fields)
        if spec.kv_index:
            raise ConfigError(["kv_index: is read when a node starts, and can't be set here"])
        with ExitStack() as undo:
            backend = self._node.sources.add(spec, by)
            undo.callback(self._node.sources.withdraw, backend.url)
            done = CarriedOut(shown_backend(self._node, backend), self._give("add", spec, by, cluster))
            undo.pop_all()
        return done

    async def _remove(self, asked: Asked) -> Mapping[str, Any]:
        named = asked.query.get("name") or asked.query.get("url")
        body = {} if named else await asked.json("url", "name", "cluster")
        given = {"true": True, "false": False, None: None}.get(asked.query.get("cluster"), "")
        scope = self._scope(given if named else body.get("cluster"))
        return await self._answered(*self.remove(named or named_in(body), asked.caller, scope))

    def remove(self, named: str, by: str = "", cluster: bool = True) -> CarriedOut:
        backend = self._registry.ids.known(named)
        view, spec = shown_backend(self._node, backend), BackendSpec(url=backend.url)
        self._node.sources.remove(named, by)
        return CarriedOut(view, self._give("remove", spec, by, cluster))

    async def _set(self, settable: Sequence[str], asked: Asked) -> Mapping[str, Any]:
        body = await asked.json("url", "name", *settable, "cluster", refused=REFUSED)
        backend, scope = self._registry.ids.known(named_in(body)), self._scope(body.get("cluster"))
        wanted = {name: value for name, value in body.items() if name in settable}
        if not wanted:
            raise BadRequest(f"there is nothing to set: expected {' or '.join(settable)}")
        return await self._answered(*self.set(backend, wanted, asked.caller, scope))

    def set(self, backend: Backend, fields: Mapping[str, Any], by: str, cluster: bool) -> CarriedOut:
        """Give a backend other options. Raises ConfigError with all that is wrong; nothing changes."""
        before = self._spec(backend)
        wanted = read_backend({**before.model_dump(), **fields})
        changed = self._become(backend, before, wanted, by)
        return CarriedOut(shown_backend(self._node, changed), self._give("add", wanted, by, cluster))

    def _spec(self, backend: Backend) -> BackendSpec:
        spec = self._node.sources.spec_of(backend.url) or BackendSpec(
            url=backend.url, hosted=backend.catalog.hosted, any_model=backend.catalog.any_model
        )
        return spec.model_copy(update={"weight": backend.weight, "name": backend.name})

    def _become(self, backend: Backend, before: BackendSpec, wanted: BackendSpec, by: str) -> Backend:
        """Have a backend as it is wanted, and log what differs. Its name and place stay."""
        changed = [*differences(before, wanted)]
        if not changed:
            return backend
        backend = self._node.sources.change(backend, wanted, by)
        for field, old, new in changed:
            log.info(event("backend.set", engine=backend.name, field=field, before=old, after=new, by=by))
        return backend

    async def _drain(self, asked: Asked) -> Mapping[str, Any]:
        """Send a backend no more requests, or some again. Raises NotFound."""
        body = await asked.json("url", "name", "draining")
        named, draining = named_in(body), body.get("draining", True)
        if not isinstance(draining, bool):
            raise BadRequest("draining must be true or false")
        before = self._registry.ids.known(named).origin.drained
        backend = self._registry.drain(named, draining)
        if before is not draining:
            log.info(
                event("backend.draining", engine=backend.name, before=before, after=draining, by=asked.caller, why="")
            )
        asks = self._shared.drained(backend, asked.caller) if self._shared is not None else None
        return await self._answered(shown_backend(self._node, backend), asks)

    async def _answered(self, view: Mapping[str, Any], asks: Sequence[Given] | None) -> Mapping[str, Any]:
        """Return the answer to an order. `shared`: whether it is sent to others, if there is gossip; `reached`: to
        whom, and why these did not obey, if they did not; `kept`: whether it outlives a restart."""
        view, shared = {**view, "kept": await self._kept.save()}, self._shared
        if shared is None or asks is None:
            return {**view, "reached": without_gossip(self._node.config)}
        return {**view, "shared": bool(asks), "reached": await shared.answers(asks)}

    def _scope(self, cluster: object) -> bool:
        """Return whether an order goes to peers, too. Raises BadRequest where it is meant to and can't."""
        if cluster not in (None, True, False):
            raise BadRequest("cluster must be true or false")
        if cluster and (self._shared is None or not self._shared.signs):
            raise BadRequest("cluster: no order for other nodes without gossip and a gossip_admin_key, which signs it")
        return cluster is not False

    def _give(self, verb: str, spec: BackendSpec, by: str, cluster: bool) -> Sequence[Given] | None:
        """Share a command with the peers, or with the other workers. Returns who is asked to answer; None: nobody can
        be, without gossip."""
        if self._shared is None:
            return None
        options = CommandOptions(HOSTED.index(spec.hosted), spec.any_model, spec.tls_name, spec.base_path)
        given = (spec.weight, spec.name, options) if verb == "add" else ()
        wanted = WantedBackend(verb, spec.url, *given)
        return self._shared.order(wanted, by, cluster=cluster)

    async def _add_worker(self, asked: Asked) -> ControlAnswer:
        url = asked.worker_url()
        await self._names.refuse_twin(url)
        self.add({"url": url}, asked.caller)
        await self._kept.save()
        return ControlAnswer(f"Successfully added worker: {url}", kind=PLAIN)

    async def _remove_worker(self, asked: Asked) -> ControlAnswer:
        url = asked.worker_url()
        self.remove(url, asked.caller)
        await self._kept.save()
        return ControlAnswer(f"Successfully removed worker: {url}", kind=PLAIN)

    def follow(self, command: Command, by: str) -> str:
        """Carry out a command that was given elsewhere. Returns why that fails now; "" if it does not."""
        known = self._registry.ids.find(command.url)
        try:
            if command.verb == "remove" and known is not None:
                self._node.sources.remove(command.url, by)
            elif command.verb == "add":
                fields = {**command.options._asdict(), "hosted": HOSTED[command.options.hosted]}
                wanted = read_backend({"url": command.url, "weight": command.weight, "name": command.name, **fields})
                if known is None:
                    self._node.sources.add(wanted, by)
                else:  # its name and its events are this node's own
                    self._node.sources.join(known.url)
                    before = self._spec(known)
                    self._become(known, before, before.model_copy(update={"weight": wanted.weight, **fields}), by)
        except RanvierError as error:
            log.warning(event("backend.command_refused", verb=command.verb, url=command.url, why=str(error)))
            return str(error)
        return ""


def named_in(body: Mapping[str, Any]) -> str:
    """Return which backend an order names, by its URL or its name. Raises BadRequest."""
    return text_of(body, "name" if "name" in body else "url")


def differences(before: BackendSpec, after: BackendSpec) -> Iterator[tuple[str, Any, Any]]:
    for name in SETTABLE:
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield name, old, new
