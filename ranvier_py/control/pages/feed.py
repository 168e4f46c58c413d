"""What the page shows: panes of all parts, each as JSON, with a quarter of an hour of history, which is always kept.

Once a second each part gives its numbers. While somebody looks it also gives its panes; else each part in turn, once in
SNAPSHOT_S, for the history. Rule: a viewer gets everything first, then what has changed, one line of JSON at a time.
A part that raises is counted as a fault, and its panes stay as they were. Nothing here runs longer than one part does.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import orjson
import trio

from ranvier_py.core.errors import NotFound
from ranvier_py.core.history.series import SeriesHistory
from ranvier_py.core.history.snapshots import LEVEL, Snapshots
from ranvier_py.node.part import Part
from ranvier_py.supervision import Faults

STEP_S = 1.0
SNAPSHOT_S = 5
"""Steps between two snapshots of one pane."""

WATCHED_S = 3.0
"""So long after a line was taken somebody is supposed to look: a viewer takes one each second."""

LARGE_BYTES = 64 << 10
"""A pane from here on is packed by a thread: that takes milliseconds."""

NAMES_AT_ONCE = 16
"""Series in one line of the history, which is built in one piece."""


@dataclass(slots=True)
class PaneState:
    """What a pane shows: JSON, since which round, and when its last snapshot was taken."""

    json: bytes = b""
    round: int = 0
    kept_at: float = 0.0


class Feed:
    """See the module. `parts` of the node, in their order."""

    def __init__(self, parts: Callable[[], Sequence[Part]], faults: Faults) -> None:
        self.series, self.snapshots = SeriesHistory(), Snapshots()
        self._parts, self._faults = parts, faults
        self._shown: dict[str, PaneState] = {}
        self._latest: dict[str, float] = {}
        self._round, self._watched_until = 0, 0.0
        self._changed = trio.Event()

    async def loop(self) -> None:
        due = trio.current_time()
        while True:
            due = max(due + STEP_S, trio.current_time())
            await trio.sleep_until(due)
            await self.step(time.monotonic())

    async def step(self, now: float) -> None:
        """Ask the parts once, and wake the viewers."""
        self._round += 1
        with self._faults.caught("page_series"):
            self._latest = dict(chain.from_iterable(part.series(now) for part in self._parts()))
            self.series.record(self._latest.items(), time.time())
        await self._ask(now, every=now < self._watched_until)
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def _ask(self, now: float, *, every: bool) -> None:
        """Ask all parts for their panes, or those whose turn it is."""
        turn = self._round % SNAPSHOT_S
        for place, part in enumerate(self._parts()):
            if every or place % SNAPSHOT_S == turn:
                with self._faults.caught("page_panes"):
                    for pane, value in part.panes(now, watched=every).items():
                        await self._show(pane, value, now)
                        await trio.lowlevel.checkpoint()

    async def _show(self, pane: str, value: Any, now: float) -> None:
        """Take what a pane shows now, and keep it for the history if it is time for that."""
        value = await stepped(value) if isinstance(value, Generator) else value
        shown, made = self._shown.setdefault(pane, PaneState()), json_of(value)
        if made != shown.json:
            shown.json, shown.round = made, self._round
        if now < shown.kept_at + SNAPSHOT_S - STEP_S / 2:
            return
        shown.kept_at = now
        if len(made) < LARGE_BYTES:
            self.snapshots.add(pane, made, time.time())
        else:
            packed = await trio.to_thread.run_sync(zlib.compress, made, LEVEL)
            self.snapshots.keep(pane, packed, time.time())

    async def lines(self, hello: Any, rounds_max: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield what a viewer gets: `hello`, all panes, the history, then what has changed, for so many rounds."""
        now, before = time.monotonic(), self._watched_until
        self._watched_until = now + WATCHED_S
        if now >= before:  # nobody looked: panes are some seconds old
            await self._ask(now, every=True)
        yield json_of({"hello": hello}) + b"\n"
        seen = self._round
        yield self._line(-1)
        for portion in self.series.portions(NAMES_AT_ONCE):
            history = {"ended_at": self.series.ended_at, "series": {name: [*kept] for name, kept in portion.items()}}
            yield json_of({"history": history}) + b"\n"
        while rounds_max is None or rounds_max > 0:
            self._watched_until = time.monotonic() + WATCHED_S
            await self._changed.wait()
            line, seen = self._line(seen), self._round
            rounds_max = None if rounds_max is None else rounds_max - 1
            yield line

    def _line(self, seen: int) -> bytes:
        """Return the panes that have changed since a round, and the numbers of the last one."""
        changed = [(pane, shown.json) for pane, shown in self._shown.items() if shown.round > seen]
        panes = b",".join(json_of(pane) + b":" + made for pane, made in changed)
        return b'{"at":%.3f,"now":%b,"panes":{%b}}\n' % (self.series.ended_at, json_of(self._latest), panes)

    async def past(self, ago_s: float) -> bytes:
        """Return what all panes showed so long ago, as JSON. Raises NotFound if that is not known."""
        then = time.time() - ago_s
        found = await trio.to_thread.run_sync(self.snapshots.copy().at, then)
        if not found:
            raise NotFound("nothing is known of that time: this node had not started, or it is too long ago")
        panes = b",".join(json_of(pane) + b":" + made for pane, (_, made) in found.items())
        return b'{"at":%.3f,"panes":{%b}}' % (then, panes)


async def stepped(steps: Generator[None, None, Any]) -> Any:
    """Return what a generator returns, and let others run between its steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        await trio.lowlevel.checkpoint()


def json_of(value: Any) -> bytes:
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
