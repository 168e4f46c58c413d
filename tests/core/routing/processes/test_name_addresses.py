"""What an answer of a resolver means for a backend's name."""

from __future__ import annotations

import pytest

from ranvier_py.core.routing.processes.name_addresses import NameAddresses, in_short


@pytest.mark.parametrize(
    ("before", "found", "moved"),
    [
        ([], ["10.0.0.1"], False),
        (["10.0.0.1"], [], False),
        (["10.0.0.1"], ["10.0.0.2"], True),
        (["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.3"], False),
        (["10.0.0.1"], ["fd00::1"], True),
    ],
)
def test_a_name_has_moved_if_none_of_its_addresses_is_left(before: list[str], found: list[str], moved: bool) -> None:
    name = NameAddresses(frozenset(before))
    assert name.answered(found) is moved
    assert name.addresses == frozenset(found or before)


def test_one_address_of_each_family_is_one_host() -> None:
    assert NameAddresses(frozenset(["127.0.0.1", "::1"])).hosts == 1
    assert NameAddresses(frozenset(["10.0.0.1", "10.0.0.2", "fd00::1"])).hosts == 2
    assert NameAddresses().hosts == 0


def test_of_many_addresses_some_are_shown() -> None:
    assert in_short([f"10.0.0.{number}" for number in range(9)]).endswith("10.0.0.7 and 1 more")
