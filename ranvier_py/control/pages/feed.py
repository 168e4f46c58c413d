"""What the page shows: panes of all parts, each as JSON, with a quarter of an hour of history, which is always kept.

Once a second each part gives its numbers. While somebody looks it also gives its panes; else each part in turn, once in
SNAPSHOT_S, for the history. Rule: a viewer gets everything first, then what has changed, one line of JSON at a time.
A part that raises is counted as a fault, and its panes stay as they were. Nothing here runs longer than one part does.
What each worker of a node has served is joined for who looks (`sibling_panes.py`); each keeps the history of its own.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import orjson
import trio

from ranvier_py.control.pages.sibling_panes import Ask, SiblingPanes, added_to, joins_of, nobody
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

    def take(self, made: bytes, round_: int) -> None:
        if made != self.json:
            self.json, self.round = made, round_


class Feed:
    """See the module. `parts` of the node, in their order; `siblings` asks its other workers, if there are any."""

    def __init__(self, parts: Callable[[], Sequence[Part]], faults: Faults, siblings: Ask = nobody) -> None:
        self.series, self.snapshots = SeriesHistory(), Snapshots()
        self.workers = SiblingPanes(siblings)
        self._parts, self._faults = parts, faults
        self._shown, self._joined = dict[str, PaneState](), dict[str, PaneState]()
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
        await self._look(now, every=now < self._watched_until)
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def _look(self, now: float, *, every: bool) -> None:
        """Ask all parts and the other workers, or only the parts whose turn it is."""
        async with trio.open_nursery() as nursery:
            if every:
                nursery.start_soon(self._faults.once, "page_workers", self.workers.look)
            await self._ask(now, every=every)
        if every and self.workers.known:
            with self._faults.caught("page_workers"):
                for pane, value in self.workers.panes(self._parts(), self._own()).items():
                    self._joined.setdefault(pane, PaneState()).take(json_of(value), self._round)

    async def _ask(self, now: float, *, every: bool, joined: bool = False) -> None:
        """Ask all parts for their panes, or those whose turn it is; `joined`: only those whose panes are joined."""
        turn = self._round % SNAPSHOT_S
        for place, part in enumerate(self._parts()):
            if (every or place % SNAPSHOT_S == turn) and (part.joins or not joined):
                with self._faults.caught("page_panes"):
                    for pane, value in part.panes(now, watched=every).items():
                        await self._show(pane, value, now)
                        await trio.lowlevel.checkpoint()

    async def _show(self, pane: str, value: Any, now: float) -> None:
        """Take what a pane shows now, and keep it for the history if it is time for that."""
        value = await stepped(value) if isinstance(value, Generator) else value
        shown, made = self._shown.setdefault(pane, PaneState()), json_of(value)
        shown.take(made, self._round)
        if now < shown.kept_at + SNAPSHOT_S - STEP_S / 2:
            return
        shown.kept_at = now
        if len(made) < LARGE_BYTES:
            self.snapshots.add(pane, made, time.time())
        else:
            packed = await trio.to_thread.run_sync(zlib.compress, made, LEVEL)
            self.snapshots.keep(pane, packed, time.time())

    async def lines(self, hello: Any, rounds_max: int | None = None, *, key: str = "") -> AsyncGenerator[bytes, None]:
        """Yield what a viewer with this key gets: `hello`, all panes, the history, then what has changed, for so many
        rounds."""
        now, before = time.monotonic(), self._watched_until
        self._watched_until, self.workers.key = now + WATCHED_S, key
        if now >= before:  # nobody looked: panes are some seconds old
            await self._look(now, every=True)
        yield json_of({"hello": hello}) + b"\n"
        seen = self._round
        yield self._line(-1)
        others = await self.workers.histories()
        for portion in self.series.portions(NAMES_AT_ONCE):
            ended_at, known = self.series.ended_at, {name: [*kept] for name, kept in portion.items()}
            yield json_of({"history": {"ended_at": ended_at, "series": added_to(known, ended_at, others)}}) + b"\n"
            await trio.lowlevel.checkpoint()
        while rounds_max is None or rounds_max > 0:
            self._watched_until, self.workers.key = time.monotonic() + WATCHED_S, key
            await self._changed.wait()
            line, seen = self._line(seen), self._round
            rounds_max = None if rounds_max is None else rounds_max - 1
            yield line

    def _line(self, seen: int) -> bytes:
        """Return the panes that have changed since a round, and the numbers of the last one."""
        shown = {**self._shown, **(self._joined if self.workers.known else {})}
        changed = {pane: each.json for pane, each in shown.items() if each.round > seen}
        latest = json_of(self.workers.summed(self._latest))
        return b'{"at":%.3f,"now":%b,"panes":%b}\n' % (self.series.ended_at, latest, object_of(changed))

    async def past(self, ago_s: int, *, key: str = "") -> bytes:
        """Return what all panes showed so long ago, as JSON. Raises NotFound if that is not known."""
        then, panes = time.time() - ago_s, await self._past(ago_s)
        joined = await self.workers.past(self._parts(), panes, ago_s, key)
        panes |= {pane: json_of(value) for pane, value in joined.items()}
        return b'{"at":%.3f,"panes":%b}' % (then, object_of(panes))

    async def _past(self, ago_s: int) -> dict[str, bytes]:
        found = await trio.to_thread.run_sync(self.snapshots.copy().at, time.time() - ago_s)
        if not found:
            raise NotFound("nothing is known of that time: this node had not started, or it is too long ago")
        return {pane: made for pane, (_, made) in found.items()}

    def _own(self) -> dict[str, bytes]:
        """Return the panes of this worker that are joined with those of its siblings."""
        return {pane: self._shown[pane].json for pane in joins_of(self._parts()) if pane in self._shown}

    async def own(self) -> bytes:
        """Return what this worker alone has served, for another one: its panes and the last values of its series."""
        await self._ask(time.monotonic(), every=True, joined=True)
        summed = {name: self._latest[name] for name in self._summed() if name in self._latest}
        return b'{"panes":%b,"now":%b}' % (object_of(self._own()), json_of(summed))

    async def own_past(self, ago_s: int) -> bytes:
        """Return what those panes showed so long ago. Raises NotFound."""
        panes, joined = await self._past(ago_s), joins_of(self._parts())
        return b'{"panes":%b}' % object_of({pane: made for pane, made in panes.items() if pane in joined})

    def own_history(self) -> bytes:
        """Return the history of its own counts."""
        kept = self.series.of(self._summed())
        return json_of({"ended_at": self.series.ended_at, "series": {name: [*values] for name, values in kept.items()}})

    def _summed(self) -> list[str]:
        """Return the names of the series that are counts of this worker alone."""
        now = time.monotonic()
        return [name for part in self._parts() if part.sums_series for name, _ in part.series(now)]


async def stepped(steps: Generator[None, None, Any]) -> Any:
    """Return what a generator returns, and let others run between its steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        await trio.lowlevel.checkpoint()


def object_of(members: Mapping[str, bytes]) -> bytes:
    """Return a JSON object of members that are JSON."""
    return b"{%b}" % b",".join(json_of(name) + b":" + made for name, made in members.items())


def json_of(value: Any) -> bytes:
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
