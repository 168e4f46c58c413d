"""A list of Kubernetes' API: whole once its last page is there, and then as its events make it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.routing.wanted import watched_list
from ranvier_py.core.routing.wanted.watched_list import ListGone, NotKubernetes, WatchedList
from tests.examples import examples


def item(name: str, version: int = 0, value: int = 0) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "value": value}


def page(*names: str, version: int = 1, more: str = "") -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version), "continue": more}, "items": [item(name) for name in names]}


def event(kind: str, name: str, version: int, value: int = 0) -> dict[str, Any]:
    return {"type": kind, "object": item(name, version, value)}


def test_a_new_list_counts_with_its_last_page_and_until_then_the_one_before_it() -> None:
    watched = WatchedList()
    watched.begin()
    assert watched.page(page("a", more="t")) == "t"
    assert watched.objects is None
    assert watched.page(page("b", version=7)) == ""
    assert (sorted(watched.objects or {}), watched.version) == (["a", "b"], "7")
    watched.begin()
    watched.page(page("c", more="t"))
    assert sorted(watched.objects or {}) == ["a", "b"]
    watched.begin()
    watched.page(page("d"))
    assert sorted(watched.objects or {}) == ["d"]


def test_events_and_bookmarks_move_the_version_and_a_repeated_event_changes_nothing() -> None:
    watched = WatchedList()
    watched.page({"metadata": {"resourceVersion": "1"}, "items": None})
    assert watched.event(event("ADDED", "a", 2))
    assert not watched.event(event("ADDED", "a", 2))
    assert not watched.event({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}})
    assert watched.version == "9"
    assert watched.event(event("DELETED", "a", 10))
    assert not watched.event(event("DELETED", "a", 11))
    assert watched.objects == {}


def test_an_event_of_410_means_a_new_list_and_another_error_is_one() -> None:
    watched = WatchedList()
    watched.page(page("a"))
    with pytest.raises(ListGone):
        watched.event({"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}})
    with pytest.raises(NotKubernetes, match="500 InternalError: odd") as error:
        watched.event({"type": "ERROR", "object": {"code": 500, "reason": "InternalError", "message": "odd"}})
    assert not isinstance(error.value, ListGone)
    assert sorted(watched.objects or {}) == ["a"]


def test_a_list_beyond_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_list, "OBJECTS_MAX", 2)
    watched = WatchedList()
    with pytest.raises(NotKubernetes, match="more than 2"):
        watched.page(page("a", "b", "c"))
    watched.begin()
    watched.page(page("a", "b"))
    with pytest.raises(NotKubernetes, match="more than 2"):
        watched.event(event("ADDED", "c", 3))


NAMES = st.sampled_from("abcd")


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(NAMES, st.integers(0, 2))), st.lists(st.tuples(st.booleans(), NAMES, st.integers(0, 2))))
def test_after_any_events_the_objects_are_those_of_a_list_read_now(
    first: list[tuple[str, int]], events: list[tuple[bool, str, int]]
) -> None:
    model = dict(first)
    watched = WatchedList()
    watched.page(
        {"metadata": {"resourceVersion": "1"}, "items": [item(name, 1, value) for name, value in model.items()]}
    )
    for version, (is_there, name, value) in enumerate(events, 2):
        kind = ("MODIFIED" if name in model else "ADDED") if is_there else "DELETED"
        watched.event(event(kind, name, version, value))
        model.pop(name, None)
        if is_there:
            model[name] = value
    assert {name: each["value"] for name, each in (watched.objects or {}).items()} == model


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["ADDED", "ERROR", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "object", "items", "metadata", "name", "continue", "resourceVersion"]), inner
        )
    ),
)


@settings(max_examples=examples(200), deadline=None)
@given(JSON)
def test_whatever_comes_is_taken_or_refused(body: object) -> None:
    watched = WatchedList()
    for take in (watched.page, watched.event):
        try:
            take(body)
        except NotKubernetes:
            continue
