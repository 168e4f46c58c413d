"""Backends are those that some source wants, in whatever order and however often the sources change their minds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ranvier_py.core.routing.wanted.backend_reconciler import (
    LINGER_S,
    OVERRIDE_KEPT_S,
    OVERRIDES_MAX,
    BackendReconciler,
    Effect,
    ToAdd,
    ToChange,
    ToDrain,
    ToRemove,
)
from ranvier_py.core.routing.wanted.found_backend import API, STATIC, EngineKey, FoundBackend, SourceName, own_key
from ranvier_py.core.routing.wanted.source_set import Belief
from tests.examples import examples

FILE, DNS, KUBERNETES = SourceName("file"), SourceName("dns", "engines:8000"), SourceName("kubernetes", "service/vllm")
FOLLOWED = (FILE, DNS, KUBERNETES)
DRAIN_S = 60.0


@dataclass(frozen=True)
class Engine:
    """Address and options, as the reconciler knows them."""

    url: str
    weight: float = 1.0
    kind: str = ""

    def is_but_for_weight(self, other: Engine) -> bool:
        return replace(self, weight=other.weight) == other


def engine(number: int, **options: Any) -> FoundBackend[Engine]:
    found = {name: options.pop(name) for name in ("draining", "process", "key") if name in options}
    return FoundBackend(Engine(f"http://e{number}", **options), **found)


def engines(*numbers: int) -> list[FoundBackend[Engine]]:
    return [engine(number) for number in numbers]


class Fleet:
    """A reconciler with the registry that its effects would make."""

    def __init__(self) -> None:
        self.reconciler: BackendReconciler[Engine] = BackendReconciler(100, DRAIN_S)
        self.now = 0.0
        self.backends: dict[str, Engine] = {}
        self.drained: dict[str, str] = {}
        self.busy: set[str] = set()
        self.full = 100
        self.added = 0

    def settle(self) -> list[Effect]:
        effects = self.reconciler.effects(self.now, self.busy.__contains__)
        for effect in effects:
            url = effect.url
            if isinstance(effect, ToAdd):
                assert url not in self.backends
                if len(self.backends) >= self.full:
                    self.reconciler.refused(effect, "full")
                    continue
                self.backends[url] = effect.want.found.spec
                self.added += 1
            elif isinstance(effect, ToRemove):
                del self.backends[url]
                self.drained.pop(url, None)
            elif isinstance(effect, ToDrain):
                self.drained[url] = effect.why
                self.drained = {each: why for each, why in self.drained.items() if why}
            else:
                self.backends[url] = replace(self.backends[url], weight=effect.want.found.spec.weight)
            self.reconciler.done(effect)
        return effects

    def take(self, name: SourceName, found: Sequence[FoundBackend[Engine]]) -> list[Effect]:
        self.reconciler.take(name, found, self.now)
        return self.settle()

    def fail(self, name: SourceName) -> None:
        self.reconciler.source(name, self.now).fail("no answer", self.now)

    def passes(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.settle()

    @property
    def numbers(self) -> list[int]:
        return sorted(int(url.removeprefix("http://e")) for url in self.backends)

    @property
    def serving(self) -> list[int]:
        return [number for number in self.numbers if f"http://e{number}" not in self.drained]

    def by(self, number: int) -> set[str]:
        return set(self.reconciler.placed[f"http://e{number}"].want.kinds)


@pytest.mark.parametrize("source", FOLLOWED, ids=str)
def test_a_source_that_fails_keeps_its_last_set_and_an_empty_one_after_it_is_not_obeyed(source: SourceName) -> None:
    fleet = Fleet()
    fleet.take(source, engines(1, 2))
    fleet.fail(source)
    fleet.passes(3600)
    assert fleet.serving == [1, 2]
    fleet.take(source, [])
    fleet.take(source, [])
    fleet.passes(3600)
    assert fleet.serving == [1, 2]
    assert fleet.reconciler.sources[source].counters.empty_ignored == 2
    fleet.take(source, engines(2))
    fleet.take(source, [])
    fleet.passes(LINGER_S)
    assert fleet.numbers == []


@pytest.mark.parametrize("source", FOLLOWED, ids=str)
def test_an_empty_set_after_a_good_one_is_obeyed_even_when_it_was_doubted_first(source: SourceName) -> None:
    fleet = Fleet()
    fleet.take(source, engines(1, 2))
    fleet.reconciler.source(source, fleet.now).doubt("it names nothing", fleet.now)
    assert fleet.serving == [1, 2]
    fleet.take(source, [])
    assert fleet.serving == []
    fleet.passes(LINGER_S)
    assert fleet.numbers == []


def test_a_backend_that_two_sources_want_goes_with_the_second() -> None:
    fleet = Fleet()
    fleet.take(DNS, engines(1))
    fleet.take(KUBERNETES, engines(1))
    assert fleet.by(1) == {"dns", "kubernetes"}
    fleet.take(KUBERNETES, [])
    assert fleet.serving == [1]
    assert fleet.by(1) == {"dns"}
    fleet.take(DNS, [])
    assert fleet.serving == []


def test_its_options_are_those_of_the_first_kind_whoever_came_first() -> None:
    for order in ((STATIC, DNS), (DNS, STATIC)):
        fleet = Fleet()
        for name in order:
            fleet.take(name, [engine(1, kind=name.kind)])
        assert fleet.backends["http://e1"].kind == "static"
    fleet.take(STATIC, [])
    assert fleet.backends["http://e1"].kind == "dns"


def test_what_nobody_wants_is_drained_while_it_is_busy_and_removed_when_it_is_idle_or_late() -> None:
    fleet = Fleet()
    fleet.take(DNS, engines(1, 2))
    fleet.busy = {"http://e1"}
    fleet.take(DNS, engines(3))
    assert fleet.serving == [3]
    fleet.passes(LINGER_S)
    assert fleet.numbers == [1, 3]
    fleet.passes(DRAIN_S - LINGER_S)
    assert fleet.numbers == [3]


def test_a_backend_that_is_gone_for_a_moment_is_not_replaced() -> None:
    fleet = Fleet()
    fleet.take(DNS, engines(1, 2))
    for _ in range(10):
        fleet.take(DNS, engines(2))
        fleet.passes(LINGER_S - 1)
        fleet.take(DNS, engines(1, 2))
    assert fleet.serving == [1, 2]
    assert fleet.added == 2


def test_what_an_operator_takes_out_of_the_configuration_goes_at_once() -> None:
    """Its running requests go on, as the registry has it."""
    fleet = Fleet()
    fleet.take(STATIC, engines(1, 2))
    fleet.busy = {"http://e1"}
    fleet.take(STATIC, [])
    assert fleet.numbers == []


def test_a_backend_that_its_source_lets_end_is_drained_and_is_not_added() -> None:
    fleet = Fleet()
    fleet.take(KUBERNETES, engines(1, 2))
    fleet.take(KUBERNETES, [engine(1, draining=True), engine(2), engine(3, draining=True)])
    assert (fleet.numbers, fleet.serving) == ([1, 2], [2])
    fleet.take(KUBERNETES, engines(1, 2, 3))
    assert fleet.serving == [1, 2, 3]


def test_of_two_entries_at_one_address_the_one_that_does_not_end_counts() -> None:
    fleet = Fleet()
    fleet.take(KUBERNETES, [engine(1, draining=True), engine(1)])
    assert fleet.serving == [1]
    fleet.take(KUBERNETES, [engine(1), engine(1, draining=True)])
    assert fleet.serving == [1]


def test_another_process_or_other_options_mean_another_backend_and_another_weight_does_not() -> None:
    fleet = Fleet()
    fleet.take(KUBERNETES, [engine(1, process="a")])
    fleet.take(KUBERNETES, [engine(1, process="a", weight=2.0)])
    assert (fleet.added, fleet.backends["http://e1"].weight) == (1, 2.0)
    effects = fleet.take(KUBERNETES, [engine(1, process="b", weight=2.0)])
    assert [type(effect) for effect in effects] == [ToRemove, ToAdd]
    fleet.take(KUBERNETES, [engine(1, process="b", kind="other")])
    assert fleet.added == 3


def test_another_key_leaves_a_backend_and_an_operators_options_as_they_are_and_any_source_may_have_it() -> None:
    fleet, first, second = Fleet(), EngineKey("file", "a"), EngineKey("file", "b")
    fleet.take(FILE, [engine(1, key=first)])
    fleet.reconciler.override("http://e1", Engine("http://e1", weight=7.0))
    fleet.reconciler.add(Engine("http://e1", weight=7.0), fleet.now)
    fleet.settle()
    (effect,) = fleet.take(FILE, [engine(1, key=second)])
    assert isinstance(effect, ToChange)
    assert effect.want.found.key == second
    assert (fleet.added, fleet.backends["http://e1"].weight) == (1, 7.0)
    fleet.reconciler.override("http://e1", Engine("http://e1", weight=2.0))
    fleet.settle()
    fleet.take(FILE, [engine(1, key=first)])
    assert (fleet.added, fleet.backends["http://e1"].weight) == (1, 2.0)
    assert fleet.take(FILE, [engine(1, key=first)]) == []


def test_a_rank_has_the_key_of_its_engine_and_nothing_prints_one() -> None:
    keys = {"http://e:1": EngineKey("file", "secret"), "http://f:1#rank=1": EngineKey("other", "secret")}
    own = [own_key(keys, url) for url in ("http://e:1#rank=3", "http://f:1#rank=1", "http://f:1#rank=2", "http://f:1")]
    assert [key and key.file for key in own] == ["file", "other", None, None]
    assert "secret" not in repr(FoundBackend(Engine("http://e:1"), key=keys["http://e:1"])) + str(keys)


@pytest.mark.parametrize("source", FOLLOWED, ids=str)
def test_while_its_source_fails_a_new_process_waits_until_it_is_confirmed(source: SourceName) -> None:
    fleet = Fleet()
    fleet.take(source, engines(1, 2))
    assert fleet.reconciler.restarted("http://e1") is None
    assert fleet.serving == [1, 2]
    fleet.fail(source)
    drain = fleet.reconciler.restarted("http://e1")
    assert drain is not None
    assert "another process" in drain.why
    fleet.settle()
    assert fleet.serving == [2]
    fleet.take(source, [])
    assert fleet.serving == [2]
    fleet.take(source, engines(1, 2))
    assert fleet.serving == [1, 2]


def test_a_new_process_is_not_doubted_where_another_source_stands_by_it() -> None:
    for other in (STATIC, API, DNS):
        fleet = Fleet()
        fleet.take(KUBERNETES, engines(1))
        fleet.take(other, engines(1))
        fleet.fail(KUBERNETES)
        assert fleet.reconciler.restarted("http://e1") is None


def test_what_an_operator_removes_stays_away_while_its_sources_only_repeat_it() -> None:
    fleet = Fleet()
    fleet.take(STATIC, engines(1, 2))
    fleet.take(DNS, engines(1, 3))
    fleet.busy = {"http://e1"}
    fleet.reconciler.remove("http://e1", fleet.now)
    fleet.settle()
    fleet.take(STATIC, engines(1, 2))
    fleet.take(DNS, engines(3))
    fleet.take(DNS, engines(1, 3))
    assert fleet.numbers == [2, 3]
    fleet.take(STATIC, [engine(1, weight=2.0), engine(2)])
    assert fleet.numbers == [1, 2, 3]


def test_a_line_that_was_taken_out_and_written_again_ends_a_removal() -> None:
    fleet = Fleet()
    fleet.take(FILE, engines(1, 2))
    fleet.reconciler.remove("http://e1", fleet.now)
    fleet.take(FILE, engines(2))
    fleet.take(FILE, engines(1, 2))
    assert fleet.numbers == [1, 2]


def test_a_removal_is_forgotten_once_nobody_has_named_the_address_for_long() -> None:
    fleet = Fleet()
    fleet.take(DNS, engines(1, 2))
    fleet.reconciler.remove("http://e1", fleet.now)
    fleet.take(DNS, engines(2))
    fleet.passes(OVERRIDE_KEPT_S)
    fleet.take(DNS, engines(1, 2))
    assert fleet.numbers == [1, 2]


def test_an_operators_options_hold_until_the_entry_changes_and_adding_ends_a_removal() -> None:
    fleet = Fleet()
    fleet.take(FILE, engines(1))
    fleet.reconciler.override("http://e1", Engine("http://e1", weight=7.0))
    fleet.settle()
    assert fleet.backends["http://e1"].weight == 7.0
    fleet.take(FILE, engines(1, 2))
    assert fleet.backends["http://e1"].weight == 7.0
    fleet.take(FILE, [engine(1, weight=3.0), engine(2)])
    assert fleet.backends["http://e1"].weight == 3.0
    fleet.reconciler.remove("http://e2", fleet.now)
    fleet.settle()
    fleet.reconciler.add(Engine("http://e2"), fleet.now)
    fleet.settle()
    assert fleet.by(2) == {"file", "api"}


def test_removals_are_bounded_and_the_oldest_goes() -> None:
    reconciler: BackendReconciler[Engine] = BackendReconciler(2 * OVERRIDES_MAX)
    numbers = range(OVERRIDES_MAX + 5)
    reconciler.take(DNS, engines(*numbers), 0.0)
    for number in numbers:
        reconciler.remove(f"http://e{number}", 0.0)
    assert len(reconciler.overrides) == OVERRIDES_MAX
    assert "http://e4" not in reconciler.overrides
    assert "http://e5" in reconciler.overrides


def test_a_set_beyond_the_bound_is_cut_and_the_rest_is_named() -> None:
    fleet = Fleet()
    fleet.take(DNS, engines(*range(103)))
    assert len(fleet.backends) == 100
    assert fleet.reconciler.sources[DNS].left_out == ("3 of 103: at most 100",)


def test_what_can_not_be_added_is_tried_again_and_is_there_when_there_is_room() -> None:
    fleet = Fleet()
    fleet.full = 1
    fleet.take(FILE, engines(1, 2))
    assert fleet.reconciler.failed == {"http://e2": "full"}
    assert not fleet.reconciler.is_settled
    fleet.full = 2
    fleet.settle()
    assert fleet.numbers == [1, 2]
    assert fleet.reconciler.failed == {}
    assert fleet.reconciler.is_settled


def test_a_source_that_is_no_longer_configured_wants_nothing() -> None:
    fleet = Fleet()
    fleet.take(DNS, engines(1))
    fleet.take(FILE, engines(2))
    fleet.reconciler.give_up(DNS)
    fleet.settle()
    assert fleet.serving == [2]


def test_all_engines_of_a_large_fleet_are_replaced_one_by_one() -> None:
    """One that goes has requests, and ends them; at each moment as many serve as the fleet has."""
    fleet = Fleet()
    fleet.reconciler.backends_max = fleet.full = 1000
    present = list(range(200))
    fleet.take(KUBERNETES, engines(*present))
    for old in range(200):
        new = 200 + old
        fleet.take(KUBERNETES, engines(*present, new))
        fleet.busy = {f"http://e{old}"}
        present = [*present[1:], new]
        fleet.take(KUBERNETES, [engine(old, draining=True), *engines(*present)])
        fleet.take(KUBERNETES, engines(*present))
        assert f"http://e{old}" in fleet.backends
        assert len(fleet.serving) == 200
        fleet.busy = set()
        fleet.passes(LINGER_S)
        fleet.passes(LINGER_S)
    assert fleet.numbers == list(range(200, 400))


SOURCES = (STATIC, API, *FOLLOWED)
LISTS = st.lists(st.integers(0, 5), unique=True)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SOURCES), LISTS), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_the_last_sets_decide_in_whatever_order_they_came(steps: list[tuple[SourceName, list[int]]], rng: Any) -> None:
    last = dict(steps)
    shuffled = list(last.items())
    rng.shuffle(shuffled)
    results = []
    for order in (steps, shuffled):
        fleet = Fleet()
        for name, numbers in order:
            fleet.take(name, [engine(number, kind=name.kind) for number in numbers])
            fleet.passes(rng.random())
        fleet.passes(LINGER_S)
        fleet.passes(LINGER_S)
        results.append((fleet.backends, {number: fleet.by(number) for number in fleet.numbers}, fleet.drained))
    assert results[0] == results[1]
    assert sorted(results[0][1]) == sorted({number for numbers in last.values() for number in numbers})


class SourcesChange(RuleBasedStateMachine):
    """Against a model that has, for each source, only the last set that was to be obeyed."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.model: dict[SourceName, list[int]] = {}
        self.broken: set[SourceName] = set()

    @rule(name=st.sampled_from(SOURCES), numbers=LISTS)
    def take(self, name: SourceName, numbers: list[int]) -> None:
        self.fleet.take(name, engines(*numbers))
        if numbers or name not in self.broken or not self.model.get(name):
            self.model[name] = numbers
            self.broken.discard(name)

    @rule(name=st.sampled_from(FOLLOWED))
    def fail(self, name: SourceName) -> None:
        self.fleet.fail(name)
        self.broken.add(name)

    @rule(numbers=st.sets(st.integers(0, 5)))
    def answers_run(self, numbers: set[int]) -> None:
        self.fleet.busy = {f"http://e{number}" for number in numbers}

    @rule(seconds=st.floats(0, 2 * DRAIN_S))
    def time_passes(self, seconds: float) -> None:
        self.fleet.passes(seconds)

    @invariant()
    def those_serve_that_somebody_wants(self) -> None:
        wanted = sorted({number for numbers in self.model.values() for number in numbers})
        assert self.fleet.serving == wanted
        assert set(self.fleet.reconciler.placed) == set(self.fleet.backends)
        for number in wanted:
            assert self.fleet.by(number) == {name.kind for name, numbers in self.model.items() if number in numbers}
        states = {name: each.state for name, each in self.fleet.reconciler.sources.items()}
        assert {name for name in states if states[name] is Belief.FAILING} == self.broken


TestSourcesChange = SourcesChange.TestCase
TestSourcesChange.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
