"""The radix route table: `table` has the rules; `rows`, `leaves`, `claims`, `tree` its parts, `values` its words."""

from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table.route_values import (
    BACKENDS_MAX,
    QUANTUM_S,
    ClaimView,
    News,
    RouteStatistics,
    RouteView,
    Trust,
    TrustCounts,
    Withdrawn,
)
from ranvier_py.core.routing.route_table.table import RouteTable

__all__ = [
    "BACKENDS_MAX",
    "QUANTUM_S",
    "ClaimView",
    "News",
    "PrefixKey",
    "RouteStatistics",
    "RouteTable",
    "RouteView",
    "Trust",
    "TrustCounts",
    "Withdrawn",
]
