"""What the workers of a node have served, as if they were one: each is asked at its control port, with a viewer's key.

Rule: while somebody looks, each is asked once a second. Its last answer stands for LATE_S; then it is left out, and
the pane `workers` names it. Bounds: the workers of one node, ANSWER_S, and the length that `io/engine_asker.py` reads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf
from typing import Any

import orjson
import trio

from ranvier_py.core.history.joined_panes import Join, added_up
from ranvier_py.core.history.series import SECONDS
from ranvier_py.node.part import Part

PATH = "/admin/page/worker"
AGO, HISTORY = "ago", "history"  # in its query
ANSWER_S = 0.5  # half of the time between two lines
LATE_S = 5.0  # an answer or two may be late without a jump in what is shown

Ask = Callable[[str, str], Awaitable[Mapping[int, bytes]]]
"""What the other workers answer at a path, with a key; b"": nothing."""


async def nobody(_: str, __: str) -> Mapping[int, bytes]:
    """Ask no worker: there is no other."""
    return {}


class SiblingPanes:
    """See the module. `key`: of who looked last."""

    def __init__(self, ask: Ask) -> None:
        self._ask, self.key = ask, ""
        self._answered: dict[int, tuple[float, Mapping[str, Any]]] = {}

    @property
    def known(self) -> bool:
        """Whether there are other workers, as far as they were asked for."""
        return bool(self._answered)

    async def look(self) -> None:
        """Ask what each shows now."""
        answers, now = await self._ask(PATH, self.key), trio.current_time()
        for index, answer in answers.items():
            at, _ = self._answered.setdefault(index, (-inf, {}))
            if answer:
                self._answered[index] = now, orjson.loads(answer)
            elif now > at + LATE_S:
                self._answered[index] = at, {}

    def panes(self, parts: Sequence[Part], own: Mapping[str, bytes]) -> Mapping[str, Any]:
        """Join the own panes with the last answers of the others."""
        return joined(parts, own, {index: answered for index, (_, answered) in self._answered.items()})

    def summed(self, own: Mapping[str, float]) -> Mapping[str, float]:
        """Add up the last values of series that count what each worker has served."""
        total = dict(own)
        for _, answered in self._answered.values():
            for name, value in answered.get("now", {}).items():
                total[name] = total.get(name, 0.0) + value
        return total

    async def past(self, parts: Sequence[Part], own: Mapping[str, bytes], ago_s: int, key: str) -> Mapping[str, Any]:
        """Join the own panes of a time with those that the others kept of it."""
        answers = await self._ask(f"{PATH}?{AGO}={ago_s}", key)
        return joined(parts, own, {index: orjson.loads(each) if each else {} for index, each in answers.items()})

    async def histories(self) -> list[Mapping[str, Any]]:
        """Return the history of each that answers."""
        return [orjson.loads(each) for each in (await self._ask(f"{PATH}?{HISTORY}", self.key)).values() if each]


def joins_of(parts: Sequence[Part]) -> dict[str, Join]:
    return {pane: join for part in parts for pane, join in part.joins.items()}


def joined(
    parts: Sequence[Part], own: Mapping[str, bytes], others: Mapping[int, Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the joined panes, and who is missing in them; nothing without other workers."""
    if not others:
        return {}
    known = [each["panes"] for each in others.values() if each]
    panes = {
        pane: join([orjson.loads(own[pane]), *(each[pane] for each in known if pane in each)])
        for pane, join in joins_of(parts).items()
        if pane in own
    }
    return {**panes, "workers": {"of": 1 + len(others), "missing": [index for index in others if not others[index]]}}


def added_to(
    own: Mapping[str, Sequence[float]], ended_at: float, others: Sequence[Mapping[str, Any]]
) -> Mapping[str, Sequence[float | None]]:
    """Add the histories of other workers to own ones that ended at a time."""
    found = dict[str, Sequence[float | None]](own)
    for name in own:
        columns = [
            shifted(each["series"][name], ended_at - each["ended_at"]) for each in others if name in each["series"]
        ]
        if columns:
            found[name] = added_up([own[name], *columns], SECONDS)
    return found


def shifted(column: list[float | None], late_s: float) -> list[float | None]:
    """Move a history that ended so much earlier, or later, to the end of another. Its last value stands meanwhile."""
    late = round(late_s)
    standing = column[-1:] if late <= LATE_S else []
    return [*column, *((standing or [None]) * late)] if late >= 0 else column[:late]
