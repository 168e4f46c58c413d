"""One engine under two names, and two engines under one name, by what nodes read of them and when."""

from __future__ import annotations

from random import Random

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import BackendLimits, ProbeResult, Registry, Transition
from ranvier_py.core.routing.processes import engine_names
from ranvier_py.core.routing.processes.engine_marks import SHOWN_MAX, EngineMarks, in_short
from ranvier_py.core.routing.processes.engine_names import LIFE_S, LOGGED_S, MARGIN_S, SOURCES_MAX, EngineNames

PEER, OTHER_PEER = 7, 8
KEY = 99
LATE_S = 2.0  # at most, that a message is late
FIRST, SECOND, RESTED = EngineMarks(1, 11, is_exact=True), EngineMarks(2, 22, is_exact=True), EngineMarks(0, 33)
EARLY = EngineMarks(1, 0)  # of a page that shows a start time and nothing else
URLS = ("http://a:1", "http://b:1")


class Node:
    """A registry, and what its peers read."""

    def __init__(self, *urls: str) -> None:
        self.registry = Registry(BackendLimits())
        self.names = self.registry.names
        self.names.node_name = {PEER: "peer", OTHER_PEER: "other"}.__getitem__
        self.backends = [self.registry.add(url) for url in urls]
        self.logged: list[Transition] = []

    def probe(self, marks: EngineMarks | None, now: float, backend: int = 0) -> None:
        found = self.registry.changes.probed(self.backends[backend].id, ProbeResult(ok=True, marks=marks), now)
        self.logged += [change for change in found if change.what in ("twins", "strangers")]

    def peer_read(
        self, marks: EngineMarks, now: float, *, session: int = PEER, ours: int | None = None, age_s: float = 0.0
    ) -> None:
        id_ = None if ours is None else self.backends[ours].id
        self.names.peer_read(session, KEY, id_, marks, now - age_s, now)
        for each in self.names.changed():
            self.logged += self.names.judge(self.registry[each], self.registry.ids.current, now)

    def twins(self, backend: int = 0) -> list[str]:
        return list(self.backends[backend].behind.names.twins)

    def strangers(self) -> list[str]:
        return list(self.backends[0].behind.names.strangers)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_one"),
    [
        (FIRST, FIRST, True),
        (FIRST, EngineMarks(1, 12), True),  # totals move between two looks
        (FIRST, EngineMarks(2, 11), False),
        (EARLY, EARLY, True),
        (EngineMarks(1, 11), EngineMarks(1, 11), True),
        (EngineMarks(1, 11), EngineMarks(1, 12), False),  # two engines that a script began at once
        (RESTED, RESTED, True),
        (RESTED, EngineMarks(0, 34), False),
        (FIRST, EngineMarks(0, 11), True),  # one of the pages has no times
        (EngineMarks(), EngineMarks(), False),
    ],
)
def test_a_peers_backend_with_the_marks_of_ours_is_its_twin(
    ours: EngineMarks, theirs: EngineMarks, is_one: bool
) -> None:
    node = Node(*URLS)
    node.probe(ours, 1.0)
    node.peer_read(theirs, 2.0)
    assert node.twins() == (["node peer"] if is_one else [])
    assert ("by another URL" in node.backends[0].advice) is is_one
    assert [(change.what, change.before, change.after) for change in node.logged] == (
        [("twins", "none", "node peer")] if is_one else []
    )
    assert node.twins(1) == []


def test_a_twin_ends_when_its_peer_has_it_no_more_or_is_gone_or_reads_another_engine() -> None:
    for end in ("removed", "gone", "changed", "known here", "old"):
        node = Node(*URLS)
        node.probe(FIRST, 1.0)
        node.peer_read(FIRST, 2.0)
        assert node.twins(), end
        if end == "removed":
            node.peer_read(EngineMarks(), 3.0)
        elif end == "gone":
            node.names.keep({OTHER_PEER})
        elif end == "changed":
            node.peer_read(SECOND, 3.0)
        elif end == "known here":
            node.peer_read(FIRST, 3.0, ours=1)
        node.probe(None, 4.0 if end != "old" else 3.0 + LIFE_S)
        assert node.twins() == [], end
        assert [change.after for change in node.logged] == ["node peer", "none"]


@pytest.mark.parametrize(
    ("marks", "are_one"),
    [(FIRST, True), (EARLY, False), (EngineMarks(1, 5), True), (RESTED, True), (EngineMarks(), False)],
)
def test_two_backends_of_one_node_are_one_engine_by_more_than_a_start_time(marks: EngineMarks, are_one: bool) -> None:
    """A script starts many engines within the hundredth of a second that start times show."""
    node = Node(*URLS, "http://c:1")
    for backend in (0, 1, 2):
        node.probe(marks if backend < 2 else SECOND, 1.0, backend)
    node.probe(marks, 2.0)
    assert [node.twins(backend) for backend in (0, 1, 2)] == (
        [["b:1 here"], ["a:1 here"], []] if are_one else [[], [], []]
    )
    node.registry.remove("b:1")
    node.probe(marks, 3.0)
    assert node.twins() == []


def test_backends_that_lead_to_one_place_are_one_engine() -> None:
    node = Node(*URLS)
    node.names.placed(BackendId(0), [BackendId(1)])
    for backend in (0, 1):
        node.probe(None, 1.0, backend)
    assert (node.twins(0), node.twins(1)) == (["b:1 here"], ["a:1 here"])
    node.names.placed(BackendId(0), [])
    node.probe(None, 2.0)
    assert node.twins() == []


@pytest.mark.parametrize("theirs", [SECOND, EngineMarks(2, 0), EngineMarks(0, 12)])
def test_a_name_leads_to_two_engines_if_a_peer_reads_another_one_between_two_looks_of_ours(theirs: EngineMarks) -> None:
    node = Node(*URLS)
    node.probe(FIRST, 0.0)
    node.peer_read(theirs, 1.0, ours=0)
    assert node.strangers() == [], "it may have been restarted"
    node.peer_read(theirs, 5.0, ours=0)
    assert node.strangers() == []
    node.probe(FIRST, 5.0 + 2 * MARGIN_S)
    assert node.strangers() == ["node peer"]
    assert "leads to another engine on node peer" in node.backends[0].advice
    node.peer_read(theirs, 20.0, ours=0, session=OTHER_PEER)
    node.probe(FIRST, 40.0)
    assert node.strangers() == ["node peer", "node other"]
    node.peer_read(FIRST, 41.0, ours=0)
    node.peer_read(EngineMarks(), 41.0, ours=0, session=OTHER_PEER)
    assert node.strangers() == []
    assert [change.after for change in node.logged] == ["node peer", "none"]


def test_where_several_processes_answer_here_a_peer_may_well_have_read_another_one() -> None:
    node = Node(*URLS)
    node.backends[0].seen.process.several.hosts = 2
    node.probe(FIRST, 0.0)
    node.peer_read(SECOND, 5.0, ours=0)
    node.probe(FIRST, 20.0)
    assert node.strangers() == []
    assert node.backends[0].behind.processes == 2


def test_a_stranger_ends_when_its_peer_is_gone_or_silent() -> None:
    for is_gone in (True, False):
        node = Node(*URLS)
        node.probe(FIRST, 0.0)
        node.peer_read(SECOND, 5.0, ours=0)
        node.probe(FIRST, 10.0)
        assert node.strangers()
        if is_gone:
            node.names.keep(())
        node.probe(FIRST, 11.0 if is_gone else 6.0 + LIFE_S)
        assert node.strangers() == []


def test_a_stranger_ends_with_an_equal_start_though_the_engine_works() -> None:
    node = Node(*URLS)
    node.probe(EngineMarks(1, 11), 0.0)
    node.peer_read(EngineMarks(2, 22), 5.0, ours=0)
    node.probe(EngineMarks(1, 11), 10.0)
    assert node.strangers()
    node.peer_read(EngineMarks(1, 12), 15.0, ours=0)
    assert node.strangers() == []


def test_while_a_peer_reads_another_engine_ours_is_looked_at_again_but_not_too_often() -> None:
    node = Node(*URLS)
    node.probe(FIRST, 0.0)
    asked = []
    for now in range(1, 40):
        node.peer_read(SECOND, float(now), ours=0)
        asked += [now for _ in node.names.unsure()]
    assert asked == [1, 6, 16, 36]
    node.peer_read(FIRST, 40.0, ours=0)
    node.peer_read(SECOND, 41.0, ours=0)
    assert len(node.names.unsure()) == 1
    node.probe(FIRST, 50.0)
    node.peer_read(SECOND, 70.0, ours=0)
    assert node.strangers()
    assert node.names.unsure() == [], "it is clear by now"
    busy = Node(*URLS)
    busy.probe(RESTED, 0.0)
    busy.peer_read(EngineMarks(0, 34), 10.0, ours=0)
    assert busy.names.unsure() == [], "totals differ whenever an engine works"


@pytest.mark.parametrize("seed", range(30))
def test_an_engine_that_works_and_restarts_is_never_two_engines_however_late_its_marks_come(seed: int) -> None:
    """Two nodes read one engine at random times, and send what they read up to LATE_S later."""
    rng = Random(seed)
    node = Node(*URLS)
    process = total = 1
    for now in range(600):
        process += rng.random() < 0.05
        total += rng.random() < 0.3
        has_times = seed % 2 == 0
        marks = EngineMarks(process if has_times else 0, total)
        if rng.random() < 0.2:
            node.probe(marks, now)
        if rng.random() < 0.2:
            read = marks
            for late_s in (rng.uniform(0, LATE_S), LATE_S):
                node.peer_read(read, now, ours=0, age_s=-late_s)
    assert node.strangers() == []
    assert node.logged == []


def test_what_comes_and_goes_is_logged_seldom() -> None:
    node = Node(*URLS)
    for now in range(0, int(LOGGED_S), 10):
        node.probe(FIRST, float(now))
        node.peer_read(FIRST if now % 20 else SECOND, now + 1.0)
    assert [change.after for change in node.logged] == ["node peer", "none"]


def test_peers_can_fill_no_more_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    names = EngineNames()
    names.probed(BackendId(0), FIRST, 0.0)
    for key in range(SOURCES_MAX + 5):
        names.peer_read(PEER, key, None, FIRST, 1.0, 1.0)
    assert names.counters.names_dropped == 5
    monkeypatch.setattr(engine_names, "SOURCES_MAX", 1)
    strangers = EngineNames()
    strangers.probed(BackendId(0), FIRST, 0.0)
    for session in (PEER, OTHER_PEER):
        strangers.peer_read(session, KEY, BackendId(0), SECOND, 10.0, 10.0)
    assert strangers.counters.names_dropped == 1
    assert in_short([str(number) for number in range(SHOWN_MAX + 2)]).endswith("7 and 2 more")
