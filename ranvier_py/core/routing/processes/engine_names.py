"""Finds one engine under two names, and two engines under one name, by the marks of engines (`engine_marks`).

Two nodes that write one engine's URL in two forms (`localhost`, `127.0.0.1`) share none of its routes; where one URL
leads each node to another engine, they share routes of strangers. Neither fails, so it must be looked for.
Rule: twins have equal marks (`_compare`); a stranger is a peer's engine whose marks differ from ours under our URL,
while ours stayed the same (`_compare_shared`). Both count until marks show otherwise, or for LIFE_S after the last
look. Invariant: every node that sees one names it until it ends; a restart never is one (test_engine_twins.py).
Bounds: SOURCES_MAX for each kind; one more is not noted, and counted. Sessions are of live peers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from math import inf

from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter
from ranvier_py.core.pauses import doubled
from ranvier_py.core.routing.backend import Backend, Transition
from ranvier_py.core.routing.processes.engine_marks import (
    EngineMarks,
    OtherNames,
    agree,
    disagree,
    in_short,
    strangers_advice,
    twins_advice,
)

LIFE_S = 600.0  # many times the interval at which pages are read and marks are sent, for hundreds of peers too
MARGIN_S = 3.0  # ages of marks travel in whole seconds, and messages may be late
ASKED_AGAIN_S = 5.0  # between two looks at a page that differs from what a peer read; doubled with each
LOGGED_S = 600.0  # between two lines about one backend that begin alike
SOURCES_MAX = 256  # a few show whose configuration is to be mended
NONE = "none"

LOCAL = 0  # in place of a peer's session: this node

Source = tuple[int, int]  # a peer's session and the key of its backend; or LOCAL and the id of ours


@dataclass(frozen=True, slots=True)
class MarksRead:
    """The marks of one backend as this node read them last, at `at`, and since when each was so."""

    marks: EngineMarks
    at: float
    identity_since: float
    totals_since: float


@dataclass(slots=True)
class Stranger:
    """A peer that read other marks under our URL at `read_at`, when ours had been the same for a while."""

    read_at: float
    by_identity: bool
    seen_at: float
    is_proved: bool = False


@dataclass(slots=True)
class NameCounters:
    names_dropped: int = counter("Other names of engines, or engines of one name, that were too many to be noted.")


class EngineNames:
    """See the module. `node_name` returns the name of a peer by its session."""

    def __init__(self) -> None:
        self.node_name: Callable[[int], str] = "{:016x}".format
        self.readings: dict[BackendId, MarksRead] = {}
        self.counters = NameCounters()
        self._by_mark: dict[int, BackendId] = {}  # of all readings, by identity and by totals
        self._twins: dict[
            Source, dict[BackendId, float]
        ] = {}  # which of ours it is the engine of, and when it was seen
        self._strangers: dict[tuple[int, BackendId], Stranger] = {}  # by session
        self._places: dict[BackendId, Collection[BackendId]] = {}
        self._ask_at: dict[
            BackendId, tuple[float, int]
        ] = {}  # when a page may be asked for again, after how many times
        self._unsure: dict[BackendId, None] = {}
        self._changed: dict[BackendId, None] = {}  # to be judged anew
        self._logged_at: dict[tuple[BackendId, str], float] = {}

    # --- what is read -----------------------------------------------------------------------------------------------

    def probed(self, backend: BackendId, marks: EngineMarks, now: float) -> None:
        """Take the marks that this node has read of a backend."""
        before, reading = self.readings.get(backend), MarksRead(marks, now, now, now)
        if before is not None:
            self._forget_marks(backend, before.marks)
            if before.marks.identity == marks.identity:
                reading = replace(reading, identity_since=before.identity_since)
            if before.marks.totals == marks.totals:
                reading = replace(reading, totals_since=before.totals_since)
        self.readings[backend] = reading
        for other in self._alike((LOCAL, backend), marks):
            self._compare((LOCAL, other), backend, self.readings[other].marks, now)
            self._compare((LOCAL, backend), other, marks, now)
        self._by_mark |= {mark: backend for mark in (marks.identity, marks.totals) if mark}
        for source, found in list(self._strangers.items()):
            if source[1] == backend and not found.is_proved:
                self._prove(source, found, reading)

    def placed(self, backend: BackendId, others: Collection[BackendId]) -> None:
        """Note which of our backends lead to the same place as this one."""
        self._places[backend] = others

    def peer_read(
        self, session: int, key: int, ours: BackendId | None, marks: EngineMarks, read_at: float, now: float
    ) -> None:
        """Take the marks that a peer has read of a backend, which is `ours` or none of ours. Without marks the peer has
        no such backend, or has read no page of it."""
        source = (session, key)
        if ours is not None:
            self._changed |= dict.fromkeys(self._twins.pop(source, ()))
            self._compare_shared((session, ours), marks, read_at, now)
            return
        if not marks.identity and not marks.totals:
            self._changed |= dict.fromkeys(self._twins.pop(source, ()))
            return
        for backend in self._alike(source, marks):
            self._compare(source, backend, marks, now)

    def _alike(self, source: Source, marks: EngineMarks) -> Collection[BackendId]:
        """Return backends that may be this engine: those that were so far, and one that has a mark of it."""
        found = [self._by_mark[mark] for mark in (marks.identity, marks.totals) if mark in self._by_mark]
        return dict.fromkeys([*self._twins.get(source, ()), *found])

    def _compare(self, source: Source, backend: BackendId, marks: EngineMarks, now: float) -> None:
        """Note whether the engine of `backend` has these marks, which are those of `source`: equal identities; or equal
        totals, unless the identities differ."""
        reading = self.readings.get(backend)
        ours = reading.marks if reading is not None else EngineMarks()
        is_twin = agree(ours, marks)
        # engines of one node often start together: a start time alone is not enough
        if source[0] == LOCAL and not (ours.is_exact and marks.is_exact):
            is_twin = is_twin and ours.totals == marks.totals != 0
        twins = self._twins.get(source)
        if is_twin and (twins is not None or self._has_room(self._twins)):
            twins = self._twins.setdefault(source, {})
            if backend not in twins:
                self._changed[backend] = None
            twins[backend] = now
        elif twins is not None and backend in twins and 0 != ours.identity != marks.identity != 0:
            del twins[backend]
            self._changed[backend] = None

    def _compare_shared(self, source: tuple[int, BackendId], marks: EngineMarks, read_at: float, now: float) -> None:
        """Note whether a peer reads another engine's marks under a name that it shares with us, and ours were the same
        before and after that, by MARGIN_S at least: nobody reads again what was before a restart."""
        reading = self.readings.get(source[1])
        ours, found = reading.marks if reading is not None else EngineMarks(), self._strangers.get(source)
        if reading is None or not disagree(ours, marks):
            if ours.identity == marks.identity != 0 or agree(ours, marks) or marks == EngineMarks():
                self._drop_stranger(source)
                self._ask_at.pop(source[1], None)
            return
        by_identity = bool(ours.identity and marks.identity)
        if found is not None:
            found.seen_at = now
        elif read_at > since(reading, by_identity) + MARGIN_S and self._has_room(self._strangers):
            found = self._strangers[source] = Stranger(read_at, by_identity, now)
        if found is not None and not found.is_proved:
            self._prove(source, found, reading)
        is_clear = found is not None and found.is_proved
        ask_at, times = self._ask_at.get(source[1], (-inf, 0))
        if by_identity and not is_clear and now >= ask_at:
            self._ask_at[source[1]] = (now + doubled(ASKED_AGAIN_S, times, LIFE_S), times + 1)
            self._unsure[source[1]] = None

    def _prove(self, source: tuple[int, BackendId], found: Stranger, reading: MarksRead) -> None:
        """Prove a stranger by what we read after it did; drop it if that differs from what we read before."""
        if since(reading, found.by_identity) + MARGIN_S > found.read_at:
            del self._strangers[source]
        elif reading.at > found.read_at + MARGIN_S:
            found.is_proved = True
            self._changed[source[1]] = None

    def _drop_stranger(self, source: tuple[int, BackendId]) -> None:
        if self._strangers.pop(source, None) is not None:
            self._changed[source[1]] = None

    def _has_room(self, table: Collection[object]) -> bool:
        has_room = len(table) < SOURCES_MAX
        self.counters.names_dropped += not has_room
        return has_room

    # --- who is gone ------------------------------------------------------------------------------------------------

    def forget(self, backend: BackendId) -> None:
        """Forget a backend that was removed."""
        if reading := self.readings.pop(backend, None):
            self._forget_marks(backend, reading.marks)
        self._twins.pop((LOCAL, backend), None)
        for twins in self._twins.values():
            twins.pop(backend, None)
        self._strangers = {source: found for source, found in self._strangers.items() if source[1] != backend}
        self._logged_at = {key: at for key, at in self._logged_at.items() if key[0] != backend}
        for known in (self._places, self._ask_at, self._unsure, self._changed):
            known.pop(backend, None)

    def keep(self, sessions: Collection[int]) -> None:
        """Forget the peers with other sessions than these."""
        for source in [source for source in self._twins if source[0] != LOCAL and source[0] not in sessions]:
            self._changed |= dict.fromkeys(self._twins.pop(source))
        for shared in [shared for shared in self._strangers if shared[0] not in sessions]:
            self._drop_stranger(shared)

    def _forget_marks(self, backend: BackendId, marks: EngineMarks) -> None:
        for mark in (marks.identity, marks.totals):
            if self._by_mark.get(mark) == backend:
                del self._by_mark[mark]

    # --- what is found ----------------------------------------------------------------------------------------------

    def unsure(self) -> list[BackendId]:
        """Return the backends whose pages are to be read now, to see which process is there. Each is returned once."""
        unsure = list(self._unsure)
        self._unsure.clear()
        return unsure

    def changed(self) -> list[BackendId]:
        """Return the backends to be judged, of which something else is known by now. Each is returned once."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def judge(self, backend: Backend, named: Callable[[BackendId], Backend | None], now: float) -> list[Transition]:
        """Note the other names of a backend, and the other engines of its name, as they are known now. That it has any
        is a transition, which says what to do; so is that it has none any more."""
        before = backend.behind.names
        names = backend.behind.names = OtherNames(
            twins=list(dict.fromkeys(self._twins_of(backend.id, named, now))),
            # where several processes answer us, other marks show nothing
            strangers=list(dict.fromkeys(self._strangers_of(backend.id, now))) if backend.behind.processes == 1 else [],
        )
        found = (
            ("twins", before.twins, names.twins, twins_advice(names.twins) or "its engine has one URL"),
            ("strangers", before.strangers, names.strangers, strangers_advice(names.strangers) or "it is one engine"),
        )
        return [
            Transition.of(backend, what, in_short(old) or NONE, in_short(new) or NONE, why)
            for what, old, new, why in found
            if bool(old) is not bool(new) and self._may_log(backend.id, f"{what} {bool(new)}", now)
        ]

    def _may_log(self, backend: BackendId, what: str, now: float) -> bool:
        if now - self._logged_at.get((backend, what), -inf) < LOGGED_S:
            return False
        self._logged_at[backend, what] = now
        return True

    def _twins_of(self, backend: BackendId, named: Callable[[BackendId], Backend | None], now: float) -> Iterable[str]:
        here = [other for other, same in self._places.items() if backend in same]
        here += self._places.get(backend, ())
        for (session, key), twins in list(self._twins.items()):
            if now - twins.get(backend, now) > LIFE_S:
                del twins[backend]
            if not twins:
                del self._twins[session, key]
            elif backend in twins and session == LOCAL:
                here.append(BackendId(key))
            elif backend in twins:
                yield f"node {self.node_name(session)}"
        for other in sorted(here):
            if (twin := named(other)) is not None:
                yield f"{twin.name} here"

    def _strangers_of(self, backend: BackendId, now: float) -> Iterable[str]:
        for source, found in list(self._strangers.items()):
            if now - found.seen_at > LIFE_S:
                del self._strangers[source]
            elif source[1] == backend and found.is_proved:
                yield f"node {self.node_name(source[0])}"


def since(reading: MarksRead, by_identity: bool) -> float:
    """Return since when we have read the same marks, of the kind that differs from a peer's."""
    return reading.identity_since if by_identity else reading.totals_since
