"""Further turns of chats, known by their texts alone, on their way to peers: they wait for their tokens, in columns.

Most of what a busy node has to tell is of this kind. Mostly tokens and answer come within HOLD_S and are told with the
texts: then the turn is spared. What is left goes in lots, as full update batches, at most LOT_S later. A chat loses
nothing by that: its next turn goes to the engine of the turns before, which peers know.

Bound: HELD_MAX rows; of more, the oldest leave at once. Cost: 0.5 us to hold a row, 1 us to tell it in a full update
batch.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ranvier_py.core.gossip.peer.route_counters import SharedRouteCounters
from ranvier_py.core.gossip.replication.route_updates import TOKENS_MAX
from ranvier_py.core.gossip.replication.update_batches import ROWS_MAX
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table import News, RouteTable

HOLD_S = 2.0
"""News of the texts of a chat that goes on wait so long for its tokens and its answer, which repeat them: one route
update a turn instead of two. Until then peers know the chat up to the turn before. New chats are told at once, for
crowds."""

HELD_MAX = 16_384
"""As many as the table keeps for us: more than a node serves in HOLD_S and LOT_S."""

LOT_S = 0.5
"""What has waited HOLD_S waits until there is a full update batch for each backend, but no longer than this: a row of a
full update batch is told and heard in half the time of one of a third of it."""


class Turns(NamedTuple):
    """Rows of one backend's process, parents before children, in columns of one length."""

    backend: BackendId
    generation: int
    parents: npt.NDArray[np.uint64]
    texts: npt.NDArray[np.uint64]
    tokens: npt.NDArray[np.uint32]  # depths
    at: npt.NDArray[np.float64]  # evidence

    def part(self, start: int, count: int) -> Turns:
        end = start + count
        return self._replace(
            parents=self.parents[start:end],
            texts=self.texts[start:end],
            tokens=self.tokens[start:end],
            at=self.at[start:end],
        )

    def news(self) -> Iterator[News]:
        """The same one by one: each chain of rows as it was learned."""
        chain: list[PrefixKey] = []
        first = last = 0
        at = inf
        for parent, text, depth, when in zip(*(column.tolist() for column in self[2:]), strict=True):
            if chain and (parent != last or when != at):
                yield News(self.backend, self.generation, chain[::-1], first, at)
                chain = []
            if not chain:
                first = parent
            chain.append((depth, 0, text))
            last, at = text, when
        if chain:
            yield News(self.backend, self.generation, chain[::-1], first, at)


class HeldTurns:
    """`is_told` says of (text, backend) whether it was told together with its tokens."""

    def __init__(self, routes: RouteTable, is_told: Callable[[int, int], bool], counters: SharedRouteCounters) -> None:
        self._counters = counters
        self._rows, _, self._claims, _ = routes.parts()
        self._is_told = is_told
        self._backends, self._generations = array("h"), array("i")
        self._parents, self._texts, self._tokens = array("Q"), array("Q"), array("I")
        self._at = array("d")
        self._lot_rows = ROWS_MAX  # full update batches for as many backends as the last lot was for

    def __len__(self) -> int:
        """Rows."""
        return len(self._at)

    def hold(self, news: News) -> None:
        """Stops without tokens, below a parent."""
        backend, generation, chain, parent, at = news
        for depth, _, text in reversed(chain):
            if 0 < depth <= TOKENS_MAX and text != parent:
                self._backends.append(backend)
                self._generations.append(generation)
                self._parents.append(parent)
                self._texts.append(text)
                self._tokens.append(depth)
                self._at.append(at)
            parent = text

    def leave(self, now: float, hold_s: float, *, bound: bool) -> list[Turns]:
        """What has waited long enough and is still to be told, by backend. `bound`: it will be told in update
        batches."""
        count = self._due(now, hold_s, bound=bound)
        if not count:
            return []
        columns = (self._backends, self._generations, self._parents, self._texts, self._tokens, self._at)
        backends, generations, parents, texts, tokens, at = [np.array(column[:count]) for column in columns]
        for column in columns:
            del column[:count]
        left = self._untold(texts, backends)
        found: list[Turns] = []
        for backend, generation in sorted(set(zip(backends[left].tolist(), generations[left].tolist(), strict=True))):
            own = left & (backends == backend) & (generations == generation)
            found.append(Turns(BackendId(backend), generation, parents[own], texts[own], tokens[own], at[own]))
        self._lot_rows = ROWS_MAX * max(1, len(found))
        return found

    def _due(self, now: float, hold_s: float, *, bound: bool) -> int:
        """How many rows leave."""
        if not hold_s:
            return len(self)
        if len(self) > HELD_MAX:
            return len(self) - HELD_MAX
        ripe = bisect_right(self._at, now - hold_s)
        is_lot = ripe >= self._lot_rows or (ripe and self._at[0] <= now - hold_s - LOT_S)
        return ripe if is_lot or not bound else 0

    def _untold(self, texts: npt.NDArray[np.uint64], backends: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
        """Of which rows the claim is still believed, and was not told with its tokens."""
        rows, claims = self._rows, self._claims
        names: Sequence[int] = texts.tolist()
        at = np.array(list(map(rows.index.get, names, repeat(0))), np.int64)
        untold: npt.NDArray[np.bool_] = (at > 0) & (np.frombuffer(rows.backend, np.int16)[at] == backends)
        for number in np.flatnonzero((at > 0) & ~untold).tolist():
            untold[number] = claims.get(int(at[number]), BackendId(int(backends[number]))) is not None
        self._counters.keys_gone += len(names) - int(np.count_nonzero(untold))
        for number in np.flatnonzero(untold & (np.frombuffer(rows.token, np.uint64)[at] != 0)).tolist():
            if self._is_told(names[number], int(backends[number])):
                untold[number] = False
                self._counters.spared += 1
        return untold


def batches_of(turns: Turns) -> Iterator[Turns]:
    """Parts of at most ROWS_MAX rows."""
    for start in range(0, len(turns.texts), ROWS_MAX):
        yield turns.part(start, ROWS_MAX)
