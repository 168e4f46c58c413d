"""The radix route table: `table` has the rules; `rows`, `leaves`, `claims`, `tree` its parts, `values` its words."""

from ranvier_py.core.prompt import Stop
from ranvier_py.core.routes.table import RouteTable
from ranvier_py.core.routes.values import (
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

__all__ = [
    "BACKENDS_MAX",
    "QUANTUM_S",
    "ClaimView",
    "News",
    "RouteStatistics",
    "RouteTable",
    "RouteView",
    "Stop",
    "Trust",
    "TrustCounts",
    "Withdrawn",
]
