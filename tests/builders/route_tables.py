"""Route tables that have learned something before their test begins."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table import RouteTable, RouteTableOptions, Trust
from ranvier_py.core.routing.route_table.route_values import LRU, ROUTE_TTL_S

Served = tuple[Sequence[PrefixKey], int, float]
"""The keys of a prompt, deepest first; the backend that served it; when."""


def chain(*names: int) -> list[PrefixKey]:
    """The keys of a prompt by its tokens, deepest first: each name is 16 tokens deeper."""
    return [(16 * (depth + 1), name, 0) for depth, name in enumerate(names)][::-1]


def route_table(
    *served: Served,
    generation: int = 0,
    trust: Trust = Trust.LOCAL,
    capacity: int = 1_000_000,
    ttl_s: float = ROUTE_TTL_S,
    eviction: str = LRU,
) -> RouteTable:
    """A table that has learned this, one after the other, of backends in this generation."""
    table = RouteTable(capacity=capacity, ttl_s=ttl_s, options=RouteTableOptions(eviction))
    for keys, backend, at in served:
        table.learn(keys, BackendId(backend), generation, trust, at)
    return table
