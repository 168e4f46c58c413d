"""What a table has for its peers: what was learned here, and what engines dropped.

Learned is what this node served and what engines said themselves. A claim that is only refreshed is told again when its
evidence enters another half of the time to live, each row at a time of its own.
Bounds: NEWS_MAX of each kind; beyond, the oldest goes and is counted. Cost: 0.5 us for a stop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table.claims import Claim, Claims
from ranvier_py.core.routing.route_table.route_values import News, Withdrawn
from ranvier_py.core.routing.route_table.rows import Rows

NEWS_MAX = 16_384
"""Calls of `learn` whose news wait to be told: seconds of full load. Beyond, the oldest is dropped and counted."""


class Telling:
    """News of one table; nothing is noted before `begin`."""

    def __init__(self, rows: Rows, claims: Claims, ttl_s: float) -> None:
        self._rows = rows
        self._claims = claims
        self._half_ttl_s = max(1, int(ttl_s) // 2)
        self._came: Callable[[], object] = lambda: None
        self.collecting = False
        self.news: deque[News] = deque()
        self.news_dropped = 0
        self.withdrawn: deque[Withdrawn] = deque()
        self.withdrawn_dropped = 0

    def begin(self, came: Callable[[], object]) -> None:
        self.collecting = True
        self._came = came

    def dropped(self, withdrawn: Withdrawn) -> None:
        """An engine dropped something."""
        if len(self.withdrawn) >= NEWS_MAX:
            self.withdrawn.popleft()
            self.withdrawn_dropped += 1
        self.withdrawn.append(withdrawn)
        if len(self.withdrawn) == 1:
            self._came()

    def learned(self, chain: Sequence[PrefixKey], known: int, backend: BackendId, claim: Claim, now: float) -> None:
        """Before a claim is stored: which of these stops will be new to peers, and what stands above them."""
        fresh: list[PrefixKey] = []
        parent, index = 0, self._rows.index
        for key in chain:
            if (key[1] or key[2]) not in index or self._is_news(key, backend, claim):
                fresh.append(key)
                parent = 0
            elif fresh and not parent:
                parent = key[1] or key[2]
        if not fresh:
            return
        if known and fresh[-1] is chain[-1]:
            parent = self._note_above(known, fresh, backend, claim)
        if len(self.news) >= NEWS_MAX:
            self.news.popleft()
            self.news_dropped += 1
        self.news.append(News(backend, claim.generation, fresh, parent, now))
        if len(self.news) == 1:
            self._came()

    def _note_above(self, known: int, fresh: list[PrefixKey], backend: BackendId, claim: Claim) -> int:
        """Add the rows above a known one that lack the claim, too. Returns the name of the row above them.

        They were told with a claim of an earlier process, if at all: a peer that knew better has not taken them.
        """
        rows = self._rows
        row = rows.parent[known]
        while row > 0:
            key = (rows.tokens[row], rows.token[row], rows.text[row])
            if not self._is_news(key, backend, claim):
                break
            fresh.append(key)
            row = rows.parent[row]
        return rows.name(row)

    def _is_news(self, key: PrefixKey, backend: int, claim: Claim) -> bool:
        _, token, text = key
        name, index = token or text, self._rows.index
        row = index.get(name)
        if row is None or (text and token and text not in index):
            return True
        rows = self._rows
        if (
            rows.backend[row] == backend
            and rows.generation[row] == claim.generation
            and rows.evidence[row] == claim.evidence
        ):
            return claim.evidence <= self._claims.horizon
        old = self._claims.get(row, backend)
        if old is None or old.generation != claim.generation or old.evidence <= self._claims.horizon:
            return True
        if old.evidence == claim.evidence:
            return False
        half = self._half_ttl_s
        return (old.evidence + name) // half != (claim.evidence + name) // half
