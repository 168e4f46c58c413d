"""What a chaos run concludes from the words of its nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from cluster.expectations import disagreement
from cluster.processes.peer_watch import SILENT_S, Census, View, first_of, read_view
from ranvier_py.core.mesh.wire.messages import State

ALL_WELL = {0: True, 1: True, 2: True}
NO_LABELS: dict[int, str] = {}


def view(session: str, sums: bytes = b"12345678", sent_bytes: int = 0, **states: str) -> View:
    return View(session, {name: State[state.upper()] for name, state in states.items()}, sent_bytes, sums)


def agreeing(*sessions: str, **others: str) -> dict[int, View | None]:
    """Nodes with these sessions, all alive to each other; `others` is what all say of somebody else."""
    states = dict.fromkeys(sessions, "alive") | others
    return {number: view(session, **states) for number, session in enumerate(sessions)}


wrong = partial(first_of, look=disagreement)


def seen(census: Census, at_s: float, views: Mapping[int, View | None], well: Mapping[int, bool] = ALL_WELL) -> None:
    census.round(at_s, views, well, NO_LABELS)


def test_all_agree_when_each_holds_exactly_those_who_run_for_alive() -> None:
    assert wrong(agreeing("a", "b", "c"), NO_LABELS) == ""
    assert wrong(agreeing("a", "b", gone="dead"), NO_LABELS) == ""
    assert wrong(agreeing("a", "b", gone="suspect"), NO_LABELS) == "node 0 sees a past session gone as suspect"
    lonely: dict[int, View | None] = {0: view("a", a="alive"), 1: view("b", a="alive", b="alive")}
    assert wrong(lonely, NO_LABELS) == "node 0 sees node 1, which runs, as unknown"
    assert wrong({0: view("a", a="alive"), 1: None}, NO_LABELS) == "node 1 does not answer"


def test_nodes_of_another_cluster_are_judged_apart() -> None:
    views: dict[int, View | None] = {0: view("a", a="alive"), 1: view("b", b="alive")}
    assert wrong(views, NO_LABELS) != ""
    assert wrong(views, {1: "other"}) == ""


def test_with_a_core_only_the_core_is_asked_and_about_itself() -> None:
    census = Census(core=frozenset((0, 1)))
    seen(census, 1.0, agreeing("a", "b", ghost="alive") | {2: None})
    assert census.disagreement == ""
    seen(census, 2.0, {0: view("a", a="alive", b="dead"), 1: view("b", a="alive", b="alive"), 2: None})
    assert census.disagreement == "node 0 sees node 1, which runs, as dead"


def test_agreement_counts_from_when_it_lasts() -> None:
    census = Census()
    assert census.agree_s(0.0) is None
    seen(census, 1.0, agreeing("a", "b"))
    seen(census, 2.0, agreeing("a", "b", ghost="alive"))
    assert census.agree_s(0.5) == math.inf
    seen(census, 3.0, agreeing("a", "b"))
    seen(census, 4.0, agreeing("a", "b"))
    assert census.agree_s(0.5) == 2.5
    assert census.agree_s(3.5) == 0.0


def test_a_node_that_answers_late_for_once_has_not_disagreed_and_one_that_is_silent_for_long_has() -> None:
    """On a busy machine one answer that took longer than a second made agreement look twenty seconds late."""
    census = Census()
    both = agreeing("a", "b")
    seen(census, 1.0, both)
    census.tables(1.0, both, NO_LABELS)
    for at_s in (2.0, 1.0 + SILENT_S - 0.1):
        seen(census, at_s, both | {1: None})
        census.tables(at_s, both | {1: None}, NO_LABELS)
        assert (census.agree_s(0.0), census.same_s(0.0)) == (1.0, 1.0)
    seen(census, 1.0 + SILENT_S, both | {1: None})
    assert census.disagreement
    assert census.agree_s(0.0) == math.inf


def test_what_a_node_reported_before_it_was_killed_counts_no_more() -> None:
    census = Census()
    seen(census, 1.0, agreeing("a", "b"))
    census.killed(1, 1.5)
    seen(census, 2.0, agreeing("a", "b") | {1: None})
    assert census.disagreement


def test_a_death_is_known_when_the_last_who_lives_has_stated_so() -> None:
    census = Census()
    assert census.dead_s() is None
    seen(census, 9.0, agreeing("a", "b", "c"))
    census.killed(2, 10.0)
    left = {0: view("a", a="alive", b="alive", c="dead"), 1: view("b", a="alive", b="alive", c="suspect")}
    seen(census, 11.0, left)
    assert census.dead_s() == math.inf
    seen(census, 12.0, agreeing("a", "b", c="dead"))
    assert census.dead_s() == 2.0
    assert census.false_deaths == {}


def test_an_observer_that_dies_itself_is_not_waited_for() -> None:
    census = Census()
    seen(census, 9.0, agreeing("a", "b", "c"))
    census.killed(2, 10.0)
    census.killed(1, 10.5)
    seen(census, 11.0, {0: view("a", a="alive", b="dead", c="dead")})
    assert census.dead_s() == 1.0


def test_who_runs_well_and_is_held_for_dead_is_a_false_death_once() -> None:
    census = Census()
    seen(census, 1.0, agreeing("a", "b"))
    wrong = {0: view("a", a="alive", b="dead"), 1: view("b", a="alive", b="alive")}
    seen(census, 2.0, wrong)
    seen(census, 3.0, wrong)
    assert census.false_deaths == {(0, "b"): 2.0}


def test_who_stated_goodbye_and_is_held_for_dead_was_not_received() -> None:
    """A node that ends without a word is found out all the same, seconds later: only this tells the two apart."""
    census = Census()
    seen(census, 1.0, agreeing("a", "b", "c"))
    census.leaving(2, 1.5)
    seen(census, 2.0, agreeing("a", "b", c="suspect"))
    assert census.false_deaths == {}
    seen(census, 3.0, {0: view("a", a="alive", b="alive", c="dead"), 1: view("b", a="alive", b="alive", c="left")})
    assert census.false_deaths == {(0, "c"): 3.0}


def test_who_stands_still_or_stood_still_a_moment_ago_is_no_false_death() -> None:
    census = Census()
    seen(census, 1.0, agreeing("a", "b"), {0: True, 1: False})
    seen(census, 2.0, {0: view("a", a="alive", b="dead"), 1: view("b", a="alive", b="alive")})
    assert census.false_deaths == {}


def test_tables_are_equal_from_when_no_bucket_differs_any_more() -> None:
    census = Census()
    assert census.same_s(0.0) is None
    one, other = view("a", b"1" * 24), view("b", b"1" * 8 + b"2" * 8 + b"1" * 8)
    census.tables(1.0, {0: one, 1: other}, NO_LABELS)
    assert census.difference == "the route tables of nodes 0 and 1 differ in 1 of 3 buckets"
    assert census.same_s(0.0) == math.inf
    census.tables(2.0, {0: one, 1: one}, NO_LABELS)
    assert census.same_s(0.5) == 1.5
    census.tables(3.0, {0: one, 1: view("b", b"")}, NO_LABELS)
    assert census.difference == "a node does not give its sums"


def test_bytes_are_summed_over_sessions() -> None:
    census = Census()
    assert census.bytes_per_node_s(2, 10.0) is None
    seen(census, 1.0, {0: view("a", sent_bytes=100), 1: view("b", sent_bytes=300)})
    seen(census, 2.0, {0: view("a", sent_bytes=500), 1: view("again", sent_bytes=100)})
    assert census.bytes_per_node_s(2, 10.0) == (500 + 300 + 100) / 20


def test_a_nodes_answer_is_read_and_counts_itself() -> None:
    body = {
        "session": "0a",
        "state": "alive",
        "members": [{"session": "0b", "state": "suspect", "name": "n1"}],
        "topics": {"probe": {"sent": {"packets": 1, "bytes": 70}}, "routes": {"sent": {"packets": 1, "bytes": 30}}},
    }
    assert read_view(body, b"x") == View("0a", {"0b": State.SUSPECT, "0a": State.ALIVE}, 100, b"x")
