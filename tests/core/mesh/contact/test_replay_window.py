"""The window of counters against a plain set."""

from __future__ import annotations

from sys import getsizeof

from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.mesh.contact.sessions import WINDOW, ReplayWindow
from tests.examples import examples


@settings(max_examples=examples(200))
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(-3, 9) | st.sampled_from([-WINDOW, 1 - WINDOW, -1 - WINDOW, WINDOW - 1, WINDOW, WINDOW + 1])),
)
def test_a_counter_is_taken_once_and_not_below_the_floor_or_the_window(floor: int, steps: list[int]) -> None:
    window, taken, highest = ReplayWindow(floor), set(), floor
    for step in steps:
        counter = max(0, highest + step)
        expected = counter > floor and counter > highest - WINDOW and counter not in taken
        assert window.take(counter) == expected, (counter, highest)
        if expected:
            taken.add(counter)
            highest = max(highest, counter)
        assert window.highest == highest


def test_what_was_overtaken_by_a_whole_window_is_lost_and_by_one_less_is_not() -> None:
    window = ReplayWindow(0)
    assert window.take(WINDOW + 5)
    assert window.take(6)
    assert not window.take(6)
    assert not window.take(5)


def test_a_window_stays_small_whatever_comes() -> None:
    """A counter far ahead or behind must not make a number of that many bits."""
    window = ReplayWindow(0)
    for counter in (1, 2**64 - 1, 0, 5, 2**63, 2**64 - WINDOW, 2**64 - 2):
        window.take(counter)
        assert getsizeof(window.missing) <= WINDOW // 8 + 100
    assert window.take(2**64 - 3)
