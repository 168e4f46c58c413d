"""Numbers of the last quarter of an hour, in fixed memory."""

from __future__ import annotations

from math import isnan

from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.history.series import NAMES_MAX, SECONDS, SeriesHistory


def whole(series: SeriesHistory) -> dict[str, list[float | None]]:
    found = {name: values for portion in series.portions(3) for name, values in portion.items()}
    return {name: [None if isnan(value) else value for value in values] for name, values in found.items()}


def test_each_second_has_the_value_that_was_given_in_it_and_none_if_there_was_none() -> None:
    series = SeriesHistory(seconds=4)
    for second, values in enumerate(({"a": 1.0}, {"b": 2.0}, {"a": 3.0, "b": 4.0})):
        series.record(values.items(), float(second))
    assert whole(series) == {"a": [1.0, None, 3.0], "b": [None, 2.0, 4.0]}
    assert (series.ended_at, series.recorded) == (2.0, 3)


@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9)), max_size=30), st.integers(1, 7))
def test_it_has_the_last_seconds_of_all_that_was_given_in_them(given_: list[dict[str, int]], seconds: int) -> None:
    series = SeriesHistory(seconds=seconds)
    for at, values in enumerate(given_):
        series.record(values.items(), float(at))
    last = given_[-seconds:]
    names = {name for values in last for name in values}
    assert whole(series) == {name: [values.get(name) for values in last] for name in names}


def test_names_beyond_the_most_are_counted_and_have_room_once_others_are_forgotten() -> None:
    series = SeriesHistory(seconds=2, names_max=2)
    series.record([("a", 1.0), ("b", 1.0), ("c", 1.0)], 1.0)
    assert (len(series), series.dropped) == (2, 1)
    series.record([("c", 1.0)], 2.0)
    series.record([("c", 1.0)], 3.0)
    series.record([("c", 2.0)], 4.0)
    assert (whole(series), series.dropped) == ({"c": [1.0, 2.0]}, 0) or whole(series) == {"c": [None, 2.0]}


def test_the_most_of_it_takes_less_than_four_megabytes() -> None:
    assert NAMES_MAX * SECONDS * 8 < 4e6
