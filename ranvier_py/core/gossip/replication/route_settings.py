"""How fast, how far and how much routes are told. The defaults suit 3 to 100 nodes on one network."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.core.routing.route_table.route_values import ROUTE_TTL_S


@dataclass(frozen=True, slots=True)
class RouteGossipSettings:
    """`schema` tells how fingerprints are made; `ttl_s` is the table's. Raises ValueError for what can't work."""

    schema: int = 0
    ttl_s: float = ROUTE_TTL_S
    tick_s: float = 0.05  # the longest that something learned waits for company on its way out
    mesh_nodes_max: int = 16  # up to so many nodes tell each other everything directly; of more, each tells `fan_out`
    fan_out: int = 3  # three of 100 nodes reach all others in about six hops
    digest_interval_s: float = 0.5  # the longest that a lost route update stays unnoticed by the peer that is asked
    audit_interval_s: float = 300.0  # tables of nodes that have the same numbers are compared so often
    soon_interval_s: float = 0.6  # after somebody went or came back they are compared so often, a few times
    node_bytes_per_s: int = 256 * 1024  # all route messages but rows, on the wire
    peer_bytes_per_s: int = 128 * 1024  # the same to one peer
    bulk_bytes_per_s: int = 64 * 1024 * 1024  # rows: a join on a local network takes a second
    log_entries_max: int = 65_536  # of all origins together: about 16 MB
    intake_per_s: int = 8192  # new route updates heard from everybody: 10 % of a core. One peer may bring 4 fair shares
    forget_after_s: float = 60.0  # at least so long what a dead origin taught is passed on: two suspicions and digests

    def __post_init__(self) -> None:
        least = min(self.node_bytes_per_s, self.peer_bytes_per_s, self.bulk_bytes_per_s // 4)
        if least < MIN_BYTES_PER_S:
            raise ValueError(
                f"budgets are {MIN_BYTES_PER_S} bytes per second at least, that for rows four times as much"
            )
        if (
            min(self.ttl_s, self.tick_s, self.digest_interval_s, self.audit_interval_s, self.soon_interval_s) <= 0
            or self.log_entries_max < 1
            or self.fan_out < 1
        ):
            raise ValueError("times, the log and the fan-out must be positive")


MIN_BYTES_PER_S = 64 * 1024
"""Twice the largest single message under these budgets, the bucket sums. A transfer of rows has a quarter of its."""
