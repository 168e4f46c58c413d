"""Health and circuit: the whole table of the circuit, then the stories it has to tell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.routing.health import (
    FAULTS,
    NEVER_S,
    TRANSITIONS,
    Action,
    BackendLimits,
    Circuit,
    Event,
    Health,
    Outcome,
    Vitals,
    outcome_of,
)

LIMITS = BackendLimits(circuit_open_s=30)

# One row per circuit; the events of the columns in the order of Event: two of probes, then dispatched, served, fault,
# neutral, waited, restarted. A dot stays where it is.
GRID = """
closed    . . . closed/forgive open/start_open . . closed/forgive
open      . . . half_open . . half_open closed/forgive
half_open closed/probation open/start_open trial/start_lease closed/forgive open/start_open . . closed/forgive
trial     closed/probation open/start_open . closed/forgive open/start_open half_open half_open closed/forgive
"""


def test_every_pair_of_circuit_and_event_leads_where_the_grid_has_it() -> None:
    expected = {}
    for line in GRID.strip().splitlines():
        before, *cells = line.split()
        for event, cell in zip(Event, cells, strict=True):
            after, _, action = cell.partition("/")
            if cell != ".":
                expected[Circuit(before), event] = (Circuit(after), Action(action or "none"))
    assert expected == TRANSITIONS


def opened(now: float = 0.0) -> Vitals:
    vitals = Vitals(LIMITS)
    for _ in range(5):
        vitals.end(Outcome.SERVER_ERROR, now)
    assert vitals.circuit is Circuit.OPEN
    return vitals


def test_a_new_backend_may_be_asked_and_one_good_probe_makes_it_healthy() -> None:
    vitals = Vitals(LIMITS)
    assert vitals.admits
    vitals.probe(True, 0)
    assert vitals.health is Health.HEALTHY


def test_three_failed_probes_in_a_row_take_it_out_and_two_good_ones_bring_it_back() -> None:
    vitals = Vitals(LIMITS)
    for ok in (True, False, False, True, False, False):
        vitals.probe(ok, 0)
        assert vitals.health is Health.HEALTHY
    for ok in (False, True, False):
        vitals.probe(ok, 0)
        assert vitals.health is Health.UNHEALTHY
    vitals.probe(True, 0)
    assert not vitals.admits
    vitals.probe(True, 0)
    assert vitals.admits


@pytest.mark.parametrize("outcome", sorted(FAULTS, key=lambda outcome: outcome.value))
def test_five_faults_in_a_row_of_any_kind_open_the_circuit(outcome: Outcome) -> None:
    vitals = Vitals(LIMITS)
    for _ in range(4):
        vitals.end(outcome, 0)
    assert vitals.admits
    vitals.end(outcome, 0)
    assert not vitals.admits


def test_three_faults_that_clients_have_seen_do_as_well() -> None:
    vitals = Vitals(LIMITS)
    for admits in (True, True, False):
        vitals.end(Outcome.BROKEN, 0, was_seen=True)
        assert vitals.admits is admits


@pytest.mark.parametrize("outcome", sorted({*Outcome} - FAULTS - {Outcome.SUCCESS}, key=lambda outcome: outcome.value))
def test_what_proves_nothing_of_the_engine_is_no_fault_and_no_excuse(outcome: Outcome) -> None:
    vitals = Vitals(LIMITS)
    for _ in range(100):
        vitals.end(outcome, 0)
    assert vitals.admits
    for _ in range(5):
        vitals.end(Outcome.TIMEOUT, 0)
        vitals.end(outcome, 0)
    assert not vitals.admits


def test_only_statuses_by_which_an_engine_cannot_serve_are_faults() -> None:
    assert [status for status in range(200, 600) if outcome_of(status) in FAULTS] == [
        500,
        *range(502, 505),
        *range(520, 525),
    ]
    assert [status for status in range(200, 600) if outcome_of(status) is Outcome.OVERLOADED] == [429, 529]
    assert {outcome_of(status) for status in (200, 201, 304)} == {Outcome.SUCCESS}
    assert {outcome_of(status) for status in (400, 404, 422, 501, 505)} == {Outcome.REFUSED}


@pytest.mark.parametrize("outcome", sorted(FAULTS - {Outcome.CONNECT_ERROR}, key=lambda outcome: outcome.value))
def test_what_asks_for_no_inference_neither_opens_a_circuit_nor_closes_one(outcome: Outcome) -> None:
    """A browser asks by OPTIONS before each of its chats: those answers would hide that every chat fails."""
    vitals = Vitals(LIMITS)
    for _ in range(20):
        vitals.end(outcome, 0, judged=False)
    assert vitals.circuit is Circuit.CLOSED
    for _ in range(5):
        vitals.end(Outcome.SUCCESS, 0, judged=False)
        vitals.end(outcome, 0)
    assert vitals.circuit is Circuit.OPEN
    vitals.tick(30)
    vitals.feed(Event.DISPATCHED, 30)
    vitals.end(Outcome.SUCCESS, 31, judged=False)
    assert vitals.circuit is Circuit.HALF_OPEN, "the trial is free again"


def test_a_connection_that_is_not_made_counts_whatever_was_to_be_sent() -> None:
    vitals = Vitals(LIMITS)
    for _ in range(5):
        vitals.end(Outcome.CONNECT_ERROR, 0, judged=False)
    assert vitals.circuit is Circuit.OPEN


def test_a_served_request_between_faults_starts_the_count_again() -> None:
    vitals = Vitals(LIMITS)
    for _ in range(20):
        for _ in range(4):
            vitals.end(Outcome.BROKEN, 0)
        vitals.end(Outcome.SUCCESS, 0)
    assert vitals.admits


def test_the_open_time_ends_in_one_trial_whose_success_closes() -> None:
    vitals = opened()
    vitals.tick(29.9)
    assert not vitals.admits
    vitals.tick(30)
    assert vitals.circuit is Circuit.HALF_OPEN
    assert vitals.admits
    vitals.feed(Event.DISPATCHED, 30)
    assert not vitals.admits
    vitals.end(Outcome.SUCCESS, 31)
    assert vitals.circuit is Circuit.CLOSED
    assert vitals.quiet


def test_each_failed_trial_doubles_the_open_time_up_to_its_bound() -> None:
    vitals = opened()
    now = 0.0
    for open_s in [30, 60, 120, 240, 240]:
        assert vitals.wake_at == now + open_s
        now = vitals.wake_at
        vitals.tick(now)
        vitals.feed(Event.DISPATCHED, now)
        vitals.end(Outcome.SERVER_ERROR, now)
    assert vitals.openings == 6


def test_a_served_request_brings_the_first_open_time_back() -> None:
    vitals = opened()
    vitals.tick(30)
    vitals.feed(Event.DISPATCHED, 30)
    vitals.end(Outcome.TIMEOUT, 30)
    assert vitals.wake_at == 30 + 60
    vitals.tick(90)
    vitals.feed(Event.DISPATCHED, 90)
    vitals.end(Outcome.SUCCESS, 90)
    for _ in range(5):
        vitals.end(Outcome.TIMEOUT, 100)
    assert vitals.wake_at == 100 + 30


def test_a_probe_closes_a_half_open_circuit_on_probation_only() -> None:
    vitals = opened()
    vitals.probe(True, 10)
    assert vitals.circuit is Circuit.OPEN
    vitals.tick(30)
    vitals.probe(True, 30)
    assert vitals.circuit is Circuit.CLOSED
    vitals.end(Outcome.SERVER_ERROR, 31)
    assert vitals.circuit is Circuit.OPEN
    assert vitals.wake_at == 31 + 60


def test_a_trial_without_a_verdict_frees_its_place() -> None:
    vitals = opened()
    vitals.tick(30)
    vitals.feed(Event.DISPATCHED, 30)
    vitals.end(Outcome.CANCELLED, 31)
    assert vitals.circuit is Circuit.HALF_OPEN
    vitals.feed(Event.DISPATCHED, 32)
    vitals.tick(61)
    assert vitals.circuit is Circuit.TRIAL
    vitals.tick(62)
    assert vitals.circuit is Circuit.HALF_OPEN


def test_a_restarted_engine_starts_with_a_clean_sheet() -> None:
    vitals = opened()
    vitals.feed(Event.RESTARTED, 1)
    assert vitals.admits
    assert vitals.quiet
    assert vitals.wake_at == NEVER_S


STEPS = st.one_of(
    st.booleans(), st.sampled_from(Outcome), st.sampled_from([Event.DISPATCHED, Event.WAITED, Event.RESTARTED])
)


@given(st.lists(STEPS, max_size=80))
def test_a_circuit_that_is_not_closed_always_has_a_path_back(steps: list[bool | Outcome | Event]) -> None:
    """An open circuit or a trial without a wake-up would keep a backend out for ever."""
    vitals = Vitals(LIMITS)
    for now, step in enumerate(steps):
        if isinstance(step, bool):
            vitals.probe(step, now)
        elif isinstance(step, Outcome):
            vitals.end(step, now)
        elif step is Event.WAITED:
            vitals.tick(now)
        else:
            vitals.feed(step, now)
        assert (vitals.wake_at < NEVER_S) is (vitals.circuit in (Circuit.OPEN, Circuit.TRIAL))
    vitals.tick(1e9)
    assert vitals.circuit in (Circuit.CLOSED, Circuit.HALF_OPEN)


def test_limits_that_make_no_sense_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        BackendLimits(backends_max=5000, circuit_faults_to_open=0, circuit_open_s=0)
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "circuit_faults_to_open",
        "circuit_open_s",
        "backends_max",
    ]
