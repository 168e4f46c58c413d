"""Options of policies: each has its limits and its meaning, and what is wrong is said all at once."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.options import Option, Options, OptionValue, option
from ranvier_py.core.routing.placement import Holder, Match
from ranvier_py.core.routing.placement.affinity import AffinityOptions
from ranvier_py.core.routing.placement.policies import POLICIES, PlacementOptions, make_policy, option_reference
from tests.core.routing.placement.engines import Engine


@dataclass(frozen=True, slots=True)
class Few(Options):
    share: float = option(0.5, "a share", most=1.0)
    count: int = option(3, "a count", least=1, most=9)
    on: bool = option(True, "a switch")
    kind: str = option("near", "a word", one_of=("near", "far"))

    def contradictions(self) -> list[str]:
        return ["count: must be even where kind is far"] if self.kind == "far" and self.count % 2 else []


def problems_of(**values: OptionValue) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Few(**values)  # type: ignore[arg-type]
    return caught.value.problems


def test_all_that_is_wrong_is_stated_at_once() -> None:
    assert problems_of(share=1.5, count=0, on=1, kind="beside") == [
        "share: must be 0 to 1, not 1.5",
        "count: must be a whole number, 1 to 9, not 0",
        "on: must be true or false, not 1",
        "kind: must be one of near, far, not 'beside'",
    ]


@pytest.mark.parametrize(("name", "value"), [("count", 2.0), ("count", True), ("share", float("nan")), ("share", "1")])
def test_a_value_of_another_type_is_refused(name: str, value: OptionValue) -> None:
    assert problems_of(**{name: value})[0].startswith(f"{name}: must be")


def test_a_whole_number_is_a_number() -> None:
    assert Few(share=1).share == 1


def test_what_contradicts_each_other_is_stated_when_each_is_good() -> None:
    assert problems_of(kind="far") == ["count: must be even where kind is far"]
    assert problems_of(kind="far", count=11) == ["count: must be a whole number, 1 to 9, not 11"]
    assert Few(kind="far", count=4).count == 4


def test_options_are_set_by_name_and_the_others_keep_their_defaults() -> None:
    assert PlacementOptions(divert_floor=5).build(AffinityOptions) == AffinityOptions(divert_floor=5)
    assert PlacementOptions(divert_factor=3.0).build(AffinityOptions) == AffinityOptions(divert_factor=3.0)


def test_numbers_and_booleans_may_come_as_text() -> None:
    named = {"divert_factor": "2.5", "divert_floor": "7", "load_aware": "False", "median": "lower"}
    assert PlacementOptions(**named).build(AffinityOptions) == AffinityOptions(
        divert_factor=2.5, divert_floor=7, load_aware=False, median="lower"
    )
    with pytest.raises(ConfigError, match="divert_floor: must be a whole number, 0 to 1000000, not 'two'"):
        PlacementOptions(divert_floor="two")


@pytest.mark.parametrize("name", ["divert_flor", "self", "kind", ""])
def test_an_unknown_name_is_reported_with_those_there_are_and_with_all_other_problems(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PlacementOptions(**{name: 1, "divert_factor": 0.5})
    unknown, bad = caught.value.problems
    assert unknown.startswith(f"{name}: no policy has this option; there are ")
    assert all(name in unknown for _, name, _ in option_reference())
    assert bad == "divert_factor: must be 1 to 1000, not 0.5"


def test_options_reach_the_policy() -> None:
    match = Match([Holder(BackendId(0), 64, 1)], 100, Fingerprint(5))
    engines = [Engine(BackendId(number), f"e{number}", load=3) for number in range(3)]
    patient = make_policy("affinity", PlacementOptions(divert_factor=3.0, divert_floor=9))
    engines[0].load = 18
    assert patient.choose(match, engines, Random(1)).reason == "affinity"
    engines[0].load = 19
    assert patient.choose(match, engines, Random(1)).reason == "diverted"


def test_the_reference_has_each_option_of_each_policy_with_a_meaning() -> None:
    rows = option_reference()
    policies = [policy for policy, _, _ in rows]
    assert ("affinity", "divert_factor", 2.0) in [(policy, name, one.default) for policy, name, one in rows]
    assert policies == sorted(policies, key=list(POLICIES).index)
    assert all(one.meaning for _, _, one in rows)


def test_an_option_that_two_policies_share_means_the_same_and_has_one_default() -> None:
    """They are set by one name: two defaults or two meanings could not be told apart by who sets it."""
    known: dict[str, tuple[OptionValue, str]] = {}
    for _, name, one in option_reference():
        assert known.setdefault(name, (one.default, one.meaning)) == (one.default, one.meaning)


@pytest.mark.parametrize("row", option_reference(), ids=lambda row: ".".join(row[:2]))
def test_every_default_keeps_its_own_limits(row: tuple[str, str, Option]) -> None:
    policy, name, one = row
    assert make_policy(policy, PlacementOptions(**{name: one.default})).name == policy
