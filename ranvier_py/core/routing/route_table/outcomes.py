"""What the answers of engines say of claims: how old was what they were placed by, and what was wrong.

An engine that answered cold below some depth had lost that prefix, and all that needs it: its least recently used
blocks go first, deeper ones before shallower ones. The prompt itself it holds again, for it has just computed it.

Rules: `refute` withdraws claims of one backend below one prefix whose evidence is older than the request that found
them wrong; what was served meanwhile stays, and so does every other prefix. Peers are told: the engine has said it.
Bound: rows looked at in one call. Cost: 0.5 us for each stop or row.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import floor

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table.table import RouteTable

ROWS_MAX = 2000
"""Looked at for one answer, a millisecond. What lies beyond stays until it expires or is refuted itself."""


def evidence_of(
    table: RouteTable, chain: Iterable[PrefixKey], backend: BackendId, generation: int
) -> list[tuple[int, int]]:
    """(depth, second of the last evidence) of the claims one backend has on a prompt, also of faded ones.

    Deepest first; of several depths with the same evidence the deepest alone.
    """
    rows, _, claims, _ = table.parts()
    row_of, backends, generations, evidences = rows.index.get, rows.backend, rows.generation, rows.evidence
    found: list[tuple[int, int]] = []
    last = max(-1, floor(claims.horizon))
    for tokens, token, text in chain:
        row = row_of(token) or row_of(text)
        if row is None:
            continue
        if backends[row] == backend:  # the usual row, without a call
            if evidences[row] > last and generations[row] == generation:
                last = evidences[row]
                found.append((tokens, last))
            continue
        claim = claims.get(row, backend)
        if claim is not None and claim.evidence > last and claim.generation == generation:
            last = claim.evidence
            found.append((tokens, last))
    return found


def refute(table: RouteTable, key: PrefixKey, backend: BackendId, before: int) -> int:
    """Withdraw the claims below this stop whose evidence is older than that second. Returns how many subtrees went."""
    rows, _, claims, _ = table.parts()
    top = rows.index.get(key[1]) or rows.index.get(key[2])
    if top is None or claims.get(top, backend) is None:
        return 0
    old: list[int] = []
    seen, pending = 0, [top]
    while pending and seen < ROWS_MAX:
        for child in rows.children(pending.pop()):
            seen += 1
            claim = claims.get(child, backend)
            if claim is None:
                continue
            if claim.evidence < before:
                old.append(rows.name(child))
            else:
                pending.append(child)
            if seen >= ROWS_MAX:
                break
    return sum(table.retract(name, backend, before) for name in old)
