"""Watches what nodes report about their peers during a chaos run, and measures the bounds on membership and routes.

`Watch` asks the control port of every node in rounds, one every POLL_S, so measured times are that coarse. `Census`
judges the rounds and is pure. Nodes are known by their sessions, as they report them themselves. A node that does not
answer for SILENT_S agrees with none; before, what it said last counts. Nodes with different labels are different
clusters and are judged apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
import trio

from cluster.expectations import LIVING, Difference, difference, disagreement, groups
from cluster.load.http_client import ExchangeFailed, fetch
from cluster.processes.chaos_plan import Plan
from cluster.processes.fleet import Member
from ranvier_py.core.mesh.wire.messages import State

POLL_S = 0.25
ANSWER_S = 1.0
"""A node that does not answer for so long counts as silent in this round."""

SILENT_S = 5.0
"""A busy machine may keep a node from answering for a second or two; that says nothing of what the node knows."""


@dataclass(frozen=True, slots=True)
class View:
    """What one node reports. `states` are by session; `sums` are its routes' bucket fingerprints, if asked for."""

    session: str
    states: Mapping[str, State]
    sent_bytes: int = 0
    sums: bytes = b""


@dataclass(slots=True)
class Kill:
    """A death that must become known. `waiting`: nodes that have not reported it yet."""

    at_s: float
    node: int
    session: str
    waiting: set[int]
    longest_s: float = 0.0


@dataclass(slots=True)
class Census:
    """Judges the rounds of one run. Numbers are those of nodes."""

    agreed_at_s: float | None = None
    same_at_s: float | None = None
    rounds: int = 0
    disagreement: str = "no round yet"
    difference: str = "no round yet"
    false_deaths: dict[tuple[int, str], float] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    goodbyes: dict[str, float] = field(default_factory=dict)  # sessions that were asked to end, and when
    last: dict[int, tuple[View, bool]] = field(default_factory=dict)  # and whether the node was well then
    answered_at_s: dict[int, float] = field(default_factory=dict)  # when each node answered last
    sent: dict[str, int] = field(default_factory=dict)  # bytes by session

    def killed(self, node: int, at_s: float) -> None:
        """Note that a node is being killed; all nodes that know its session must notice the death."""
        known = self.last.pop(node, None)
        if known is not None:
            observers = {other for other, (view, _) in self.last.items() if known[0].session in view.states}
            self.kills.append(Kill(at_s, node, known[0].session, observers))

    def leaving(self, node: int, at_s: float) -> None:
        """Note that a node is being asked to end; it says goodbye, so no node has to detect its end."""
        known = self.last.pop(node, None)
        if known is not None:
            self.goodbyes[known[0].session] = at_s

    core: frozenset[int] | None = None  # only these nodes are judged, and about each other; None: all

    def round(
        self, at_s: float, views: Mapping[int, View | None], well: Mapping[int, bool], labels: Mapping[int, str]
    ) -> None:
        """Judge a round: `views` of all nodes that should run (None: no answer); `well`: whether each is not paused."""
        self.rounds += 1
        self.note_false_deaths(at_s, views, well)
        self.note_deaths(at_s, views)
        asked = self.asked(at_s, views)
        self.disagreement = first_of(asked, labels, partial(disagreement, ghosts=self.core is None))
        self.agreed_at_s = None if self.disagreement else at_s if self.agreed_at_s is None else self.agreed_at_s
        for node, view in views.items():
            if view is not None:
                self.last[node] = view, well.get(node, False)
                self.answered_at_s[node] = at_s
                self.sent[view.session] = view.sent_bytes

    def tables(self, at_s: float, views: Mapping[int, View | None], labels: Mapping[int, str]) -> None:
        """Compare the route tables once, while there is no traffic."""
        self.difference = first_of(self.asked(at_s, views), labels, differing)
        self.same_at_s = None if self.difference else at_s if self.same_at_s is None else self.same_at_s

    def asked(self, at_s: float, views: Mapping[int, View | None]) -> Mapping[int, View | None]:
        """Return the views of those who are judged; of who is silent, the last one, unless he has been for long."""
        lately = {node: last[0] for node, last in self.last.items() if at_s - self.answered_at_s[node] < SILENT_S}
        return {
            node: lately.get(node) if view is None else view
            for node, view in views.items()
            if self.core is None or node in self.core
        }

    def note_false_deaths(self, at_s: float, views: Mapping[int, View | None], well: Mapping[int, bool]) -> None:
        """Note sessions newly held for dead although they ran well since the last round, or had said goodbye."""
        sound = {
            view.session
            for node, view in views.items()
            if view is not None and well.get(node) and self.was_well(node, view.session)
        }
        for observer, view in views.items():
            before = self.last.get(observer)
            if view is None or before is None or before[0].session != view.session:
                continue
            for session, state in view.states.items():
                missed = session in self.goodbyes and before[1] and well.get(observer, False)
                if state is State.DEAD and before[0].states.get(session) in LIVING and (session in sound or missed):
                    self.false_deaths.setdefault((observer, session), at_s)

    def was_well(self, node: int, session: str) -> bool:
        before = self.last.get(node)
        return before is not None and before[1] and before[0].session == session

    def note_deaths(self, at_s: float, views: Mapping[int, View | None]) -> None:
        for kill in self.kills:
            for observer in sorted(kill.waiting):
                view = views.get(observer)
                if observer not in views:
                    kill.waiting.discard(observer)  # the observer was ended, too
                elif view is not None and view.states.get(kill.session) not in LIVING:
                    kill.waiting.discard(observer)
                    kill.longest_s = max(kill.longest_s, at_s - kill.at_s)

    # --- bounds -----------------------------------------------------------------------------------------------------

    def agree_s(self, quiet_s: float) -> float | None:
        """Return seconds from `quiet_s` until all agreed for good; inf: they do not agree; None: there was no round."""
        if not self.rounds:
            return None
        return math.inf if self.agreed_at_s is None else max(0.0, self.agreed_at_s - quiet_s)

    def same_s(self, quiet_s: float) -> float | None:
        """Like `agree_s`, for route tables: seconds from the end of faults and traffic until all tables are equal."""
        if self.difference == "no round yet":
            return None
        return math.inf if self.same_at_s is None else max(0.0, self.same_at_s - quiet_s)

    def dead_s(self) -> float | None:
        """Return the longest time that a node took to notice a death; None without a kill."""
        if not self.kills:
            return None
        return max(math.inf if kill.waiting else kill.longest_s for kill in self.kills)

    def bytes_per_node_s(self, nodes: int, seconds: float) -> float | None:
        return sum(self.sent.values()) / nodes / seconds if self.sent else None


def first_of(
    views: Mapping[int, View | None], labels: Mapping[int, str], look: Callable[..., Difference | None]
) -> str:
    """Return the first difference in any cluster; "" if there is none."""
    for group in groups(views, labels):
        found = look({node: views[node] for node in group})
        if found is not None:
            return found.text
    return ""


def differing(views: Mapping[int, View | None]) -> Difference | None:
    """Return two nodes of a cluster whose route tables differ."""
    sums = {node: memoryview(view.sums).cast("Q").tolist() for node, view in views.items() if view and view.sums}
    if len(sums) < len(views):
        return Difference((), "a node does not give its sums")
    return difference(sums)


# --- asking ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Watch:
    """Asks all nodes, round after round, and gives the census their views."""

    plan: Plan
    nodes: Sequence[Member]
    labels: dict[int, str]
    clock: Callable[[], float]
    census: Census = field(default_factory=Census)

    async def run(self, tables_from_s: float) -> None:
        """Ask until cancelled. Route tables are compared from `tables_from_s` on."""
        while True:
            next_at = trio.current_time() + POLL_S
            expected = [number for number, node in enumerate(self.nodes) if node.wanted and node.running]
            views = await self.ask_all(expected, sums=self.clock() >= tables_from_s)
            still = [number for number in expected if self.nodes[number].wanted and self.nodes[number].running]
            kept = {number: views.get(number) for number in still}
            well = {number: not self.nodes[number].pauses for number in still}
            self.census.round(self.clock(), kept, well, self.labels)
            if self.clock() >= tables_from_s:
                self.census.tables(self.clock(), kept, self.labels)
            await trio.sleep_until(next_at)

    async def ask_all(self, numbers: Sequence[int], *, sums: bool) -> dict[int, View]:
        found: dict[int, View] = {}

        async def ask(number: int) -> None:
            with trio.move_on_after(ANSWER_S):
                view = await self.ask(number, sums=sums)
                if view is not None:
                    found[number] = view

        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(ask, number)
        return found

    async def ask(self, number: int, *, sums: bool) -> View | None:
        """Return one node's view; None if it gives none."""
        place = self.plan.nodes[number]
        get = (place.ip, place.control_port)
        try:
            status, body = await fetch(*get, "/admin/cluster", api_key=self.plan.control_key)
            if status != 200:
                return None
            answered, table = 0, b""
            if sums:
                answered, table = await fetch(*get, "/admin/cluster/sums", api_key=self.plan.control_key)
        except ExchangeFailed:
            return None
        return read_view(orjson.loads(body), table if answered == 200 else b"")


def read_view(body: Mapping[str, Any], sums: bytes) -> View:
    """Read the view in a node's answer. Raises LookupError for another answer."""
    states = {str(member["session"]): State[member["state"].upper()] for member in body["members"]}
    states.setdefault(str(body["session"]), State[body["state"].upper()])
    sent = sum(int(topic["sent"]["bytes"]) for topic in body["topics"].values())
    return View(str(body["session"]), states, sent, sums)
