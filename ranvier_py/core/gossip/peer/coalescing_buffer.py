"""News of chats that go on: they wait a moment for company before they are told.

A packet costs as many bytes as a route update in it. A further turn of a chat loses nothing by waiting: its next turn
goes to the engine of the turns before, which is the same one. The beginning of a chat is told at once, since a crowd
that comes to all nodes must find out where the first one went; so is a chat that another engine has taken over, which
is told anew from its beginning. Whatever leaves takes along what waits.

What waits is joined with what it goes on from, if that waits, too: the tokens of a prompt are there before those of its
answer. Bounds: WAITING_MAX news, and texts remembered; above, nothing waits. Cost: 1 us for each.
"""

from __future__ import annotations

from math import inf

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.route_table import News

COMPANY_S = 0.06
"""From the evidence. With the network it is usable everywhere well within the goal of 100 ms. At 16 turns a second and
node nearly two route updates share a packet; twice the time would save 7 bytes a turn more."""

SOME = 4
NEARLY_S = 0.03
"""Some that wait leave so much earlier rather than cause a tick of their own: a busy node has one every 50 ms, and a
packet of four costs each of them little."""

WAITING_MAX = 4096
REMEMBERED_S = 2.0
"""The tokens of a chat that was told at once by its texts are there by then, if ever."""

Place = tuple[BackendId, int, int]  # backend, epoch, and a name of a row


class Company:
    """See the module. `wake_at`: when it is time to leave."""

    def __init__(self) -> None:
        self.wake_at = inf
        self._waiting: list[News] = []
        self._ends: dict[Place, int] = {}  # by its deepest row: its place in the list
        self._begun: dict[Place, float] = {}  # texts of chats that were told at once

    def __len__(self) -> int:
        return len(self._waiting)

    def takes(self, news: News) -> bool:
        """Whether it waits. If not it is to be told now, and after it all that waits."""
        if len(self._waiting) < WAITING_MAX and self._goes_on(news):
            self._join(news)
            self.wake_at = min(self.wake_at, news.at + COMPANY_S)
            return True
        if self._waiting:
            self.wake_at = -inf
        return False

    def is_due(self, now: float) -> bool:
        return self.wake_at <= now + (NEARLY_S if len(self._waiting) >= SOME else 0.0)

    def leave(self) -> list[News]:
        """All that waits."""
        waiting, self._waiting = self._waiting, []
        self._ends.clear()
        self.wake_at = inf
        return waiting

    def _goes_on(self, news: News) -> bool:
        """Whether peers know the beginning of this chat at this backend: it hangs below something, or was told."""
        begun, horizon = self._begun, news.at - REMEMBERED_S
        texts = [(news.backend, news.generation, text) for _, _, text in news.chain if text]
        if news.parent or any(text in begun for text in texts):
            return True
        begun |= dict.fromkeys(texts, news.at)
        while begun and (len(begun) > WAITING_MAX or next(iter(begun.values())) < horizon):
            del begun[next(iter(begun))]
        return False

    def _join(self, news: News) -> None:
        """Of two times the earlier counts: nothing gets younger."""
        waiting, ends = self._waiting, self._ends
        place = ends.pop((news.backend, news.generation, news.parent), None)
        if place is None:
            place = len(waiting)
            waiting.append(news)
        else:
            above = waiting[place]
            chain = [*news.chain, *above.chain]
            waiting[place] = news._replace(chain=chain, parent=above.parent, at=min(above.at, news.at))
        _, token, text = news.chain[0]
        ends[news.backend, news.generation, token or text] = place
