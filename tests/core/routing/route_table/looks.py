"""What a table holds, by looking at every row."""

from __future__ import annotations

from collections.abc import Iterator

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.routing.route_table.route_values import Claim


def claims_of(table: RouteTable) -> Iterator[tuple[int, BackendId, Claim]]:
    """(fingerprint, backend, claim), also of claims that count no more."""
    for view in table.subtree(0, limit=len(table)):
        for name in (view.token_fingerprint, *view.text_fingerprints):
            for holder in view.holders if name else ():
                claim = table.claim(name, holder.backend)
                assert claim is not None
                yield name, holder.backend, claim
