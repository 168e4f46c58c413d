"""What operators order of a node itself: to be unready, so that whoever spreads clients over nodes sends it none.

Rules: a drained node goes on serving what comes, since its clients may know no other. All of its workers follow. It is
ready again at an order or a restart. Each change is a line of the log with who ordered it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ranvier_py.core.errors import BadRequest
from ranvier_py.core.log_events import event
from ranvier_py.core.routing.backend_state.signed_commands import NODE, Command
from ranvier_py.node.asked import YES_OR_NO, Asked, Route
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.part import Handler, Node, Part
from ranvier_py.node.shared_orders import SharedOrders, WantedBackend, without_gossip

log = logging.getLogger(__name__)


class NodeOrders(Part):
    """See the module. `drained_by`: who ordered that; "" if nobody did."""

    name = "node_orders"

    def __init__(self, node: Node, clustering: ClusterParts | None) -> None:
        self._node, self.drained_by = node, ""
        self._shared: SharedOrders | None = clustering.orders if clustering is not None else None

    def unready(self) -> str:
        caller, *place = self.drained_by.split(" ", 1)  # a sibling adds where that was
        who = " ".join(["an order without a key" if caller == "-" else caller, *place])
        return f"drained by {who}" if self.drained_by else ""

    def routes(self) -> Mapping[str, Handler]:
        what = "Make the node unready, or end that, on all of its workers"
        return {"POST /admin/node/drain": Route(self._ordered, what, {"draining": YES_OR_NO})}

    async def _ordered(self, asked: Asked) -> Mapping[str, Any]:
        """Drain this node, or end that, on all of its workers."""
        draining = (await asked.json("draining")).get("draining", True)
        if not isinstance(draining, bool):
            raise BadRequest("draining must be true or false")
        self._drain(draining, asked.caller)
        if self._shared is None:
            return {"draining": draining, "reached": without_gossip(self._node.config)}
        order = WantedBackend("drain" if draining else "undrain", NODE)
        reached = await self._shared.answers(self._shared.order(order, asked.caller, cluster=False))
        return {"draining": draining, "reached": reached}

    def follow(self, command: Command, by: str) -> str:
        """Carry out what another worker was ordered. It does not fail: returns ""."""
        self._drain(command.verb == "drain", by)
        return ""

    def _drain(self, draining: bool, by: str) -> None:
        before, self.drained_by = bool(self.drained_by), by if draining else ""
        if before is not draining:
            log.info(event("node.drained", before=before, after=draining, by=by))
