"""Uses of what a backend holds, as its claims show them: what a request that is told of used again, what it still uses.

A claim's evidence is the second in which its prefix was last used. So what a peer's request used is known when its
lesson comes, before the claims are raised: `RouteTable.hearing` is called there, and `used_before` says from which
seconds the tokens come. A running request uses its prefix until it ends, which its evidence does not show: `renew`.

Rule: neither is a use of the rows themselves. Cost: 0.5 us for each row that is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompt import Stop
from ranvier_py.core.routes.table import RouteTable


def used_before(
    table: RouteTable, stops: Sequence[Stop], backend: BackendId, epoch: int, second: int
) -> tuple[int, dict[int, int]]:
    """Of a prompt with these stops (deepest first), used in that second: how many tokens the backend had no claim for,
    and how many it last used in which earlier second."""
    rows, _, claims, _ = table.parts()
    parents, depths = rows.parent, rows.tokens
    for tokens, token, text in stops:
        row = rows.index.get(token) or rows.index.get(text) or 0
        claim = claims.get(row, backend) if row else None
        if claim is None or claim.epoch != epoch:
            continue
        found: dict[int, int] = {}
        while claim is not None and claim.evidence < second:
            above = parents[row]
            found[claim.evidence] = found.get(claim.evidence, 0) + depths[row] - (depths[above] if above > 0 else 0)
            row, claim = above, claims.get(above, backend) if above > 0 else None
        return stops[0][0] - tokens, found
    return stops[0][0], {}


def renew(table: RouteTable, stops: Iterable[Stop], backend: BackendId, epoch: int, second: int) -> None:
    """A running request holds the deepest of these stops that its backend has a claim for, and all before it."""
    rows, _, claims, _ = table.parts()
    for _, token, text in stops:
        row = rows.index.get(token) or rows.index.get(text) or 0
        claim = claims.get(row, backend) if row else None
        if claim is not None and claim.epoch == epoch:
            claims.raise_from(row, backend, claim._replace(evidence=max(second, claim.evidence)))
            return
