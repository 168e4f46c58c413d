"""The values that go into the route table and come out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ranvier_py.core.ids import UNKNOWN, BackendId, Fingerprint
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.options import Options, option
from ranvier_py.core.prompts.prompt import PrefixKey

ROUTE_TTL_S = 3600.0
"""A route is forgotten this long after it was last served or confirmed, unless the operator says otherwise."""

BACKENDS_MAX = 4096
"""Backend ids are 0 … 4095 (core.ids): they fit a 16-bit column with room for «none»."""

LRU, UTILITY = "lru", "utility"


@dataclass(frozen=True, slots=True)
class RouteTableOptions(Options):
    """What an operator may set of the route table besides its size and time to live."""

    SECTION = "Routing"

    eviction: str = option(
        LRU,
        "Which routes a full table forgets: lru, those unused for longest; utility, those that save least for the time "
        "since their last use.",
        one_of=(LRU, UTILITY),
        key="route_eviction",
    )


STANDARD = RouteTableOptions()

U64 = np.uint64
Numbers = npt.NDArray[np.int64]
Fingerprints = npt.NDArray[np.uint64]


class Trust(IntEnum):
    """Who says that a prefix is warm. Under capacity pressure rows of lower trust are evicted first."""

    REMOTE = 1  # a peer says so
    LOCAL = 2  # we served it
    CONFIRMED = 3  # the engine says so


class Claim(NamedTuple):
    """One backend's claim on the prefix of a row: which process holds it, who says so, and when that was last seen."""

    generation: int
    trust: int
    evidence: int  # whole second of the latest evidence: 4 bytes, and exact enough for a life of an hour


class Unheld(list[PrefixKey]):
    """Keys of a prompt that no backend holds, deepest first. `known`: the table has some of them all the same. `end`:
    the next key, which is held."""

    known = False  # set of an instance only where it differs, since each decision makes one
    end: PrefixKey = (0, UNKNOWN, UNKNOWN)


class NewRoutes(NamedTuple):
    """What one call of `learn` has for peers. Deepest first; `parent` names the row above the chain, or is 0."""

    backend: BackendId
    generation: int
    chain: Sequence[PrefixKey]
    parent: int
    at: float  # of the evidence


class WithdrawnRoute(NamedTuple):
    """For peers that believe otherwise: an engine dropped a prefix, and so all longer ones."""

    backend: BackendId
    generation: int
    fingerprint: Fingerprint
    at: float  # seconds, monotonic


class RouteColumns(NamedTuple):
    """Claims, one element each, parents first. A row with several claims has several elements, the first one first."""

    parent: Fingerprints  # a name of the row above; 0 = the top, or not known
    tokens: npt.NDArray[np.uint32]
    token: Fingerprints
    text: Fingerprints
    backend: npt.NDArray[np.int16]  # local id
    evidence: npt.NDArray[np.int32]  # whole second, local clock

    def at(self, places: Numbers) -> RouteColumns:
        """The claims at these places."""
        return RouteColumns._make(column[places] for column in self)


class BackendNames(NamedTuple):
    """What this node's backend ids mean to peers, by id. A backend with `key` 0 is not shown to any peer."""

    key: Fingerprints
    shared_generation: Fingerprints  # the number that all nodes know its process by
    generation: npt.NDArray[np.int32]  # the local number of that process, whose claims are read; -1 = no claims are


@dataclass(slots=True)
class RouteTableCounters:
    rows: int = gauge("Rows of the route table: one for each known prefix.")
    fingerprints: int = gauge(
        "Fingerprints that find a row of the route table: one of its tokens, some of its texts, or both."
    )
    texts_dropped: int = counter("Text fingerprints that were not kept: too many of one prefix of tokens.")
    claims: dict[str, int] = gauge("Claims of backends in the route table.", label="trust")
    capacity: int = gauge("Rows that the route table may have at most.")
    created: int = counter("Rows created in the route table.")
    matched: int = counter("Lookups in the route table that found a holder.")
    missed: int = counter("Lookups in the route table that found no holder.")
    attached: int = counter("Token fingerprints that joined a row known by its text only.")
    merged: int = counter("Rows of the route table that turned out to be another row.")
    unlinked: int = counter(
        "Rows of the route table left alone because their place among their ancestors was uncertain."
    )
    evicted: dict[str, int] = counter("Rows evicted from the route table, by the best trust they had.", label="trust")
    refused: int = counter("Prefixes not stored because their own path filled the route table.")
    expired: int = counter("Claims of backends removed at the end of their time to live.")
    voided: int = counter("Claims removed because their backend has restarted since.")
    withdrawn: int = counter("Claims withdrawn because their backend no longer holds the prefix.")
    withdrawals_given_up: int = counter("Prefixes below which claims were not withdrawn: too many at once.")
    overtaken: int = counter("Rows of peers not learned because their engine had dropped the prefix meanwhile.")
    removals_forgotten: int = counter("Removals forgotten before peers' older rows had arrived: too many at once.")
    new_routes_dropped: int = counter("New routes that nobody fetched for peers in time.")
    withdrawn_dropped: int = counter("Withdrawals that nobody fetched for peers in time.")


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
