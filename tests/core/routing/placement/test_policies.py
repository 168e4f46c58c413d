"""What holds for every policy, whatever its rule."""

from __future__ import annotations

import re
from copy import copy
from random import Random
from sys import modules

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.routing.backend import SeenOfBackend
from ranvier_py.core.routing.placement import ALL_HOLDERS, Candidate, Choice, Holder, Match, Policy
from ranvier_py.core.routing.placement.policies import POLICIES, PlacementOptions, make_policy, option_reference
from ranvier_py.core.routing.rates.work import Work
from tests.core.routing.placement.engines import Engine
from tests.examples import examples

SWITCHED = [
    {},
    *({name: not one.default} for _, name, one in option_reference() if isinstance(one.default, bool)),
    {"divert_rule": "least"},
    {"median": "middle"},
    {"divert_factor": 1.0, "divert_floor": 0},
    {"placement_compatibility": "ranvier"},
    {"cache_threshold": 0.0},
    {"overlap_norm": "relative", "min_overlap_threshold": 0.0},
    {"sticky_limit_factor": 1.0, "sticky_limit_floor": 0},
    {"cache_threshold": 1.0, "spill_margin_min": 0, "spill_margin_max": 0, "spill_factor": 1.0},
]
"""Options under which the laws hold too."""

EACH = pytest.mark.parametrize("name", list(POLICIES))
WEIGHTS = st.sampled_from((1.0, 1.0, 0.001, 1000.0, 3.0, 1 / 3, 49.0))
TOKENS = st.integers(0, 2000)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Match, tuple[Candidate, ...]]:
    """Candidates in any state, and any match that a route table may give of them."""
    ids = draw(st.lists(st.integers(0, 4095).map(BackendId), min_size=1, max_size=8, unique=True))
    idle = draw(st.booleans())
    candidates = tuple(
        Engine(
            number,
            f"10.0.0.{number}:8000",
            draw(WEIGHTS),
            load := 0 if idle else draw(st.integers(0, 300)),
            Work(
                pending_tokens=0 if idle else draw(TOKENS),
                decoding=(decoding := draw(st.integers(0, load))),
                waiting=load - decoding,
            ),
            SeenOfBackend(success_rate=draw(st.sampled_from((1.0, 0.0, 0.37)))),
        )
        for number in ids
    )
    prompt = draw(TOKENS)
    held = draw(st.dictionaries(st.sampled_from(ids), st.integers(1, max(1, prompt)), max_size=len(ids)))
    holders = sorted(
        (Holder(one, tokens, draw(st.integers(0, 2)), draw(st.integers(0, 1))) for one, tokens in held.items()),
        key=lambda one: -one.tokens,
    )
    match = Match(
        holders,
        prompt,
        Fingerprint(draw(st.sampled_from((0, 5, 2**64 - 1)))),
        draw(TOKENS),
        Fingerprint(draw(st.integers(0, 2**64 - 1))),
        at=draw(st.floats(0, 1e6)),
        opening=draw(st.sampled_from((b"", b"\0" * 32, b"\xff" * 32))),
        shared=bool(holders) and draw(st.booleans()),
    )
    return match, candidates


def reasons_of(policy: Policy) -> list[str]:
    """What the policy's own file says: `Reasons: one, two.`, or for the simplest of them the name alone."""
    documented = re.search(r"Reasons: ([a-z_, \n]+)\.", modules[type(policy).__module__].__doc__ or "")
    return re.split(r",\s+", documented[1]) if documented else [policy.name]


@EACH
@settings(max_examples=examples(40))
@given(situation=situations(), named=st.sampled_from(SWITCHED), seed=st.integers(0, 2**32))
def test_every_policy_names_a_candidate_and_a_reason_of_its_list_and_repeats_itself(
    name: str, situation: tuple[Match, tuple[Candidate, ...]], named: dict[str, bool], seed: int
) -> None:
    match, candidates = situation
    options = PlacementOptions(**named)
    policy, again = make_policy(name, options), make_policy(name, options)
    choice = policy.choose(match, candidates, Random(seed))
    assert choice.backend in [one.id for one in candidates]
    assert choice.reason in reasons_of(policy)
    assert choice.tokens in (0, *(holder.tokens for holder in match.holders if holder.backend == choice.backend))
    assert again.choose(match, list(candidates), Random(seed)) == choice
    if terms := policy.terms(match, candidates):
        assert len(terms) == len(candidates)
        assert len({tuple(each) for each in terms}) == 1
    if len(candidates) == 1:
        assert choice.backend == candidates[0].id


@EACH
@settings(max_examples=examples(20))
@given(first=situations(), second=situations())
def test_what_a_copy_chooses_changes_nothing_for_the_original(
    name: str, first: tuple[Match, tuple[Candidate, ...]], second: tuple[Match, tuple[Candidate, ...]]
) -> None:
    """A dry run (`/explain`) asks a copy."""

    def course(*, explained: bool) -> list[Choice]:
        policy, rng = make_policy(name), Random(7)
        found = [policy.choose(*first, rng)]
        if explained:
            copy(policy).choose(*second, Random(1))
        return [*found, policy.choose(*second, rng), policy.choose(*first, rng)]

    assert course(explained=True) == course(explained=False)


def test_a_policy_asks_for_what_it_reads_and_for_no_more() -> None:
    policies = {name: make_policy(name) for name in POLICIES}
    every = {name for name, policy in policies.items() if policy.depths_wanted == ALL_HOLDERS}
    assert every == {"kv_score", "sticky_least_loaded", "ttft"}
    none = {name for name, policy in policies.items() if policy.depths_wanted == 0}
    assert none == {"round_robin", "random", "least_loaded", "power_of_two"}
    assert {name for name, policy in policies.items() if policy.opening_bytes} == {"chwbl", "kv_score"}
    assert {name for name, policy in policies.items() if policy.wants_prefix} == {"sticky_least_loaded"}
