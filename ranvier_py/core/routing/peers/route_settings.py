"""Settings and counters of route gossip: how fast, how far and how much is sent. The defaults suit 3 to 100 nodes."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.routing.route_table.route_values import ROUTE_TTL_S

MIN_BYTES_PER_S = 64 * 1024
"""Twice the largest message under these budgets, all bucket sums. One transfer has a quarter of the budget for rows."""


@dataclass(frozen=True, slots=True)
class RouteGossipSettings:
    """`schema` names how fingerprints are made; `ttl_s` is the table's. Raises ValueError for unusable settings."""

    schema: int = 0
    ttl_s: float = ROUTE_TTL_S
    tick_s: float = 0.05  # the longest that a new route update waits for others on its way out
    mesh_nodes_max: int = 16  # up to this many nodes push to all others directly; with more, each pushes to `fan_out`
    fan_out: int = 3  # with three, 100 nodes are reached in about six hops
    digest_interval_s: float = 0.5  # the longest that a lost route update stays unnoticed by the peer that is asked
    audit_interval_s: float = 300.0  # between two comparisons of tables with a peer, though the numbers are the same
    quiet_interval_s: float = 20.0  # the same while hardly any updates come: an equal sum costs 200 bytes
    far_interval_s: float = 8.0  # the same after one that found tables far apart
    soon_interval_s: float = 0.6  # between the few comparisons after a member came or went
    node_bytes_per_s: int = 256 * 1024  # all route messages but rows, on the wire
    peer_bytes_per_s: int = 128 * 1024  # the same to one peer
    bulk_bytes_per_s: int = 64 * 1024 * 1024  # rows: a join on a local network takes a second
    log_entries_max: int = 65_536  # of all origins together: about 16 MB
    intake_per_s: int = 8192  # new rows taken from all peers: 10 % of a core. One peer may bring 4 fair shares
    forget_after_s: float = 60.0  # how long updates of a dead origin are passed on at least: two suspicions and digests

    def __post_init__(self) -> None:
        least = min(self.node_bytes_per_s, self.peer_bytes_per_s, self.bulk_bytes_per_s // 4)
        if least < MIN_BYTES_PER_S:
            raise ValueError(
                f"budgets are {MIN_BYTES_PER_S} bytes per second at least, that for rows four times as much"
            )
        if (
            min(self.ttl_s, self.tick_s, self.digest_interval_s, self.audit_interval_s, self.soon_interval_s) <= 0
            or min(self.quiet_interval_s, self.far_interval_s) <= 0
            or self.log_entries_max < 1
            or self.fan_out < 1
        ):
            raise ValueError("times, the log and the fan-out must be positive")


@dataclass(slots=True)
class RouteGossipCounters:
    synced: bool = gauge("1 once this node has joined: it has a peer's route table, or there was nobody to ask.")
    origins: int = gauge("Nodes whose route updates are known by number.")
    logged: int = gauge("Route updates kept in the logs that peers read.")
    lazy_peers: int = gauge("Peers to whom no route updates are pushed until repair has brought them up to date.")
    differing_buckets: int = gauge("Buckets of 4096 in which two route tables differed at their last comparison.")
    audits_differing: int = gauge("Audits in a row in which more than a sixteenth of the buckets differed.")
    own: int = counter("Route updates that this node made itself.")
    received: int = counter("Route updates that were new by their number.")
    new: int = counter("Route updates of peers that brought new rows.")
    duplicates: int = counter("Route updates received that were known already.")
    gaps: int = counter("Batches of route updates that left a gap behind what is known.")
    limited: int = counter("Route updates beyond what a peer may bring.")
    expired: int = counter("Route updates that came without life.")
    oversized: int = counter("Route updates too large to be sent or taken.")
    strangers: int = counter("Messages about routes from sessions that are no live peers.")
    foreign: int = counter("Digests of routes from nodes that make fingerprints in another way.")
    unwanted_origins: int = counter("Batches of route updates whose origin is forgotten, or one too many.")
    pushed: int = counter("Batches of this node's own route updates pushed to peers.")
    relayed: int = counter("Batches of other nodes' route updates passed on to peers.")
    held_back: int = counter("Times that new route updates waited because a peer had no room for them.")
    over_budget: int = counter("Messages about routes not sent for want of room in the budgets.")
    mismatches: int = counter("Digests of routes that found a difference between two nodes.")
    resets_sent: int = counter("Answers to peers that the log no longer has the route updates they asked for.")
    resets_received: int = counter("Answers of peers that their log no longer has the route updates asked for.")
    resets_deferred: int = counter(
        "Answers that a peer's log no longer has updates, put off: they came in or soon after a transfer."
    )
    trimmed: int = counter("Route updates that left the log before they expired.")
    joins: int = counter("Route tables taken over from a peer on joining.")
    repairs: int = counter("Route tables compared with a peer's after a log was trimmed.")
    audits: int = counter("Route tables compared with a peer's from time to time.")
    given_up: int = counter("Comparisons and transfers of route tables that this node gave up.")
    pulled_rows: int = counter("New rows taken from the route tables of peers.")
    sums_refused: int = counter("Requests of peers for sums of the route table not answered: too many waited.")
    sent_bytes: int = counter("Bytes of messages about routes without rows and sums, by estimate.")
    sent_sums_bytes: int = counter("Bytes of sums of route tables sent, by estimate.")
