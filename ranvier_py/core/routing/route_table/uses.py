"""When the prefixes that a backend holds were last used, read from its claims.

A claim's evidence is the second in which its prefix was last used. When a request is learned, here or from a peer, the
claims still show the uses before it until they are raised; `RouteTable.on_use` is called at that moment. A running
request uses its prefix until it ends, which evidence alone does not show: `renew` refreshes it, for peers as well. What
a newcomer copies of a peer's whole table is no use: it says what is held, not what is used now.

Rule: none of this counts as a use of the rows, by which eviction goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import floor

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table.claims import Claims
from ranvier_py.core.routing.route_table.outgoing import OutgoingRoutes
from ranvier_py.core.routing.route_table.route_values import Claim
from ranvier_py.core.routing.route_table.rows import Rows

PrefixUse = Callable[[Sequence[Sequence[PrefixKey]], BackendId, int, int, int], object]
"""Called with what requests used, before the claims on it are raised: the keys of each prompt, the backend and its
generation, the second, and how many tokens below these prompts no backend had."""


class RouteUses:
    """Reads the uses of prefixes in one route table, and renews those of running requests."""

    def __init__(self, rows: Rows, claims: Claims, outgoing: OutgoingRoutes) -> None:
        self._rows = rows
        self._claims = claims
        self._outgoing = outgoing

    def evidence_of(self, chain: Iterable[PrefixKey], backend: BackendId, generation: int) -> list[tuple[int, int]]:
        """Return (depth, second of last evidence) of the live claims that a backend has on a prompt, hidden ones too.

        Deepest first. A claim is left out unless its evidence is later than that of all deeper ones.
        """
        rows, claims = self._rows, self._claims
        row_of, backends, generations, evidences = rows.index.get, rows.backend, rows.generation, rows.evidence
        found: list[tuple[int, int]] = []
        last, latest = max(-1, floor(claims.horizon)), int(claims.now)
        for tokens, token, text in chain:
            row = row_of(token) or row_of(text)
            if row is None:
                continue
            if backends[row] == backend:  # the usual row, without a call
                evidence, own = evidences[row], generations[row]
            elif (claim := claims.get(row, backend)) is not None:
                evidence, own = claim.evidence, claim.generation
            else:
                continue
            if evidence > last and own == generation:
                last = evidence
                found.append((tokens, last))
                if last >= latest:  # none can be later
                    break
        return found

    def used_before(
        self, prompts: Iterable[Sequence[PrefixKey]], backend: BackendId, generation: int, second: int
    ) -> tuple[int, dict[int, int]]:
        """Return what prompts (keys deepest first) used in `second`: how many tokens the backend had no claim for, and
        how many it had last used in each earlier second. Tokens that prompts share count once."""
        rows, claims = self._rows, self._claims
        parents, depths, backends, evidences = rows.parent, rows.tokens, rows.backend, rows.evidence
        new_tokens = 0
        found: dict[int, int] = {}
        counted: dict[int, None] = {}  # rows
        for chain in prompts:
            row = self._goes_on_from(chain, backend, generation, counted)
            new_tokens += max(0, chain[0][0] - depths[row])
            depth, last = depths[row], second  # where those of one earlier second begin
            while row and row not in counted:
                if backends[row] == backend:
                    evidence = evidences[row]
                else:
                    claim = claims.get(row, backend)
                    evidence = second if claim is None else claim.evidence
                if evidence >= second:
                    break
                if evidence != last:
                    found[last] = found.get(last, 0) + depth - depths[row]
                    depth, last = depths[row], evidence
                counted[row] = None
                row = parents[row]
            found[last] = found.get(last, 0) + depth - depths[row]
        found.pop(second, None)  # already used in this second
        return new_tokens, found

    def roughly_used_before(
        self, chain: Sequence[PrefixKey], backend: BackendId, generation: int, second: int
    ) -> tuple[int, dict[int, int]]:
        """Estimate `used_before` of one prompt in a few look-ups: all that the backend has of it counts as last used
        when the deepest part of that was, but for what lies above a row that was used in `second` already: the rows of
        one prompt may come one by one."""
        row, claim = self._deepest(chain, backend, generation)
        if claim is None:
            return chain[0][0], {}
        rows, parent = self._rows, self._rows.parent[row]
        above = self._claims.get(parent, backend) if parent > 0 else None
        held, used = rows.tokens[row], rows.tokens[parent] if above is not None and above.evidence >= second else 0
        return max(0, chain[0][0] - held), {claim.evidence: held - used} if claim.evidence < second else {}

    def _goes_on_from(
        self, chain: Sequence[PrefixKey], backend: BackendId, generation: int, counted: dict[int, None]
    ) -> int:
        """Return the deepest row of this prompt, or 0, that the backend has a claim for or that is in `counted`. Adds
        the rows below it to `counted`: their tokens count for this prompt."""
        rows, row_of = self._rows, self._rows.index.get
        lacking: dict[int, None] = {}
        found = 0
        for _, token, text in chain:
            row = row_of(token) or row_of(text) or 0
            while row > 0 and row not in counted and row not in lacking:
                if rows.backend[row] == backend:  # the usual row, without a call
                    own = rows.generation[row]
                else:
                    own = -1 if (claim := self._claims.get(row, backend)) is None else claim.generation
                if own == generation:
                    break
                lacking[row] = None
                row = rows.parent[row]
            if row > 0 and row not in lacking:
                found = row
                break
        counted.update(lacking)
        return found

    def deepest_held(self, chain: Iterable[PrefixKey], backend: BackendId, generation: int) -> PrefixKey | None:
        """Return the deepest of these prefixes that the backend has a claim for; None: it has none."""
        row, claim = self._deepest(chain, backend, generation)
        return None if claim is None else self._rows.key(row)

    def renew(self, key: PrefixKey, backend: BackendId, generation: int, second: int) -> None:
        """Raise the backend's claim on this prefix, which a running request uses, to `second`, and send it to peers."""
        row, claim = self._deepest((key,), backend, generation)
        if claim is not None and claim.evidence < second:
            renewed = claim._replace(evidence=second)
            if self._outgoing.collecting:
                self._outgoing.learned((key,), row, backend, renewed, second)
            self._claims.raise_from(row, backend, renewed)

    def _deepest(self, chain: Iterable[PrefixKey], backend: BackendId, generation: int) -> tuple[int, Claim | None]:
        """Return the row of the first key that this process of the backend has a claim for, and the claim."""
        row_of, claim_of = self._rows.index.get, self._claims.get
        for _, token, text in chain:
            row = row_of(token) or row_of(text)
            if row and (claim := claim_of(row, backend)) is not None and claim.generation == generation:
                return row, claim
        return 0, None
