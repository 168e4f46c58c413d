"""What goes into the route table and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.prompt import PrefixKey

ROUTE_TTL_S = 3600.0
"""A route is forgotten this long after it was last served or confirmed, unless the operator says otherwise."""

BACKENDS_MAX = 4096
"""Backend ids are 0 … 4095 (core.ids): they fit a 16-bit column with room for «none»."""

QUANTUM_S = 1
"""Evidence and use are kept as whole seconds: 4 bytes each, and a second is nothing against a TTL of an hour."""


class Trust(IntEnum):
    """Who says that a prefix is warm. A higher one outlives a lower one under capacity pressure."""

    REMOTE = 1  # a peer says so
    LOCAL = 2  # we served it
    CONFIRMED = 3  # the engine says so


class News(NamedTuple):
    """What one call of `learn` added to what peers may know. Deepest first; `parent` names the row above, or is 0."""

    backend: BackendId
    generation: int
    chain: Sequence[PrefixKey]
    parent: int
    at: float  # of the evidence


class Withdrawn(NamedTuple):
    """An engine dropped a prefix, and all that is longer: what peers have to be told, if they believe otherwise."""

    backend: BackendId
    generation: int
    fingerprint: Fingerprint
    at: float  # seconds, monotonic


@dataclass(frozen=True, slots=True)
class TrustCounts:
    """One number for each trust."""

    remote: int
    local: int
    confirmed: int


@dataclass(frozen=True, slots=True)
class RouteStatistics:
    """Gauges (`rows` … `capacity`) and counters since start (the others).

    `evicted` counts rows by the best trust they had; `expired`, `voided` and `withdrawn` count claims.
    """

    rows: int
    fingerprints: int  # that find a row: each row has one token fingerprint, or text fingerprints, or both
    claims: TrustCounts
    capacity: int
    created: int  # rows
    matched: int  # lookups that found a holder
    missed: int  # lookups that found none
    attached: int  # token fingerprints that joined a row known by its text only
    merged: int  # rows that turned out to be another row
    unlinked: int  # rows whose place among their ancestors was uncertain, hence left alone
    evicted: TrustCounts
    refused: int  # stops not stored because their own path filled the table
    expired: int
    voided: int  # claims of an earlier generation
    withdrawn: int


@dataclass(frozen=True, slots=True)
class ClaimView:
    backend: BackendId
    trust: Trust
    generation: int
    age_s: float  # since the last evidence


@dataclass(frozen=True, slots=True)
class RouteView:
    """One row for the admin page. `level` counts from the top of what is shown; `parent` is a fingerprint or 0."""

    level: int
    tokens: int
    exact: bool  # False: `tokens` is an estimate
    token_fingerprint: Fingerprint
    text_fingerprints: Sequence[Fingerprint]
    parent: Fingerprint
    children: int
    holders: Sequence[ClaimView]
    idle_s: float  # since it was last matched or learned
