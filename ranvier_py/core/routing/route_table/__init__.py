"""The radix route table: `table` states its rules; `rows`, `claims` and `tree` are its parts."""

from ranvier_py.core.routing.route_table.route_values import (
    BACKENDS_MAX,
    ClaimView,
    NewRoutes,
    RouteTableCounters,
    RouteTableOptions,
    RouteView,
    Trust,
    Unheld,
    WithdrawnRoute,
)
from ranvier_py.core.routing.route_table.table import RouteTable

__all__ = [
    "BACKENDS_MAX",
    "ClaimView",
    "NewRoutes",
    "RouteTable",
    "RouteTableCounters",
    "RouteTableOptions",
    "RouteView",
    "Trust",
    "Unheld",
    "WithdrawnRoute",
]
