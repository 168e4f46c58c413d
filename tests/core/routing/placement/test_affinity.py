"""`affinity`: go where the prefix is, unless that backend is too busy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.routing.placement import Choice, Holder, Match, Service, ttft
from ranvier_py.core.routing.placement.affinity import Affinity, AffinityOptions
from ranvier_py.core.routing.placement.rendezvous import Rendezvous
from ranvier_py.core.routing.placement.ttft import missing_share
from ranvier_py.core.routing.rates.decode_rate import LOOK_EVERY, Decoded
from tests.core.routing.placement.engines import NO_MATCH, Engine, engines, match_of

COLD = match_of()


def choose(match: Match, candidates: Sequence[Engine]) -> Choice:
    return Affinity().choose(match, candidates, Random(1))


def test_the_deepest_holder_is_preferred_to_an_idle_backend() -> None:
    assert choose(match_of((0, 256), (2, 446)), engines(0, 0, 2)) == Choice(BackendId(2), "affinity", 446)


@pytest.mark.parametrize(
    ("loads", "reason"),
    [
        ((0, 0, 0, 0), "affinity"),
        ((2, 0, 0, 0), "affinity"),  # at the floor
        ((3, 0, 0, 0), "diverted"),
        ((10, 4, 4, 4), "affinity"),  # exactly 2 x 4 + 2
        ((11, 4, 4, 4), "diverted"),
        ((11, 0, 4, 4), "diverted"),  # sorted 0 4 4 11: the upper median is 4
        ((12, 0, 5, 5), "affinity"),  # the upper median is 5: at most 12
        ((50, 50, 0, 0), "affinity"),  # the upper median is 50
        ((3, 0), "diverted"),  # of two, the other one's load counts
        ((12, 5), "affinity"),
        ((13, 5), "diverted"),
        ((100,), "only"),
    ],
)
def test_while_no_rate_is_known_a_holder_is_left_when_its_load_exceeds_twice_the_upper_median_plus_two(
    loads: tuple[int, ...], reason: str
) -> None:
    assert choose(match_of((0, 512)), engines(*loads)).reason == reason


def test_a_diverted_request_goes_to_the_least_loaded_backend_and_expects_no_cache() -> None:
    assert choose(match_of((0, 512)), engines(90, 4, 3, 5)) == Choice(BackendId(2), "diverted", 0)


def test_among_equally_idle_backends_a_diverted_request_takes_the_one_that_holds_most() -> None:
    candidates = engines(90, 4, 3, 3, 3)
    assert choose(match_of((0, 512), (1, 500), (3, 64), (4, 128)), candidates) == Choice(BackendId(4), "diverted", 128)


def test_among_equally_deep_holders_the_least_loaded_serves() -> None:
    assert choose(match_of((0, 64), (1, 64), (2, 32)), engines(2, 1, 0)) == Choice(BackendId(1), "affinity", 64)


def test_among_equally_deep_and_loaded_holders_all_nodes_choose_the_same() -> None:
    ours = engines(0, 0, 0, 0)
    theirs = tuple(Engine(BackendId(3 - one.id), one.name) for one in reversed(ours))
    for home in range(1, 50):
        mine = choose(match_of((1, 64), (2, 64), (3, 64), home=home), ours)
        other = choose(match_of((2, 64), (1, 64), (0, 64), home=home), theirs)
        assert f"e{mine.backend}" == theirs[other.backend].name


def test_one_candidate_is_never_diverted_from() -> None:
    assert choose(match_of((0, 64)), engines(1000)) == Choice(BackendId(0), "only", 64)
    assert choose(COLD, engines(1000)) == Choice(BackendId(0), "only", 0)
    assert choose(NO_MATCH, engines(1000)).reason == "only"


def test_a_cold_prefix_goes_to_its_rendezvous_home() -> None:
    candidates = engines(0, 0, 0, 0)
    for home in range(1, 100):
        expected = candidates[Rendezvous().best(Fingerprint(home), candidates)]
        assert choose(match_of(home=home), candidates) == Choice(expected.id, "cold", 0)


def test_a_cold_prefix_goes_to_the_less_loaded_of_its_first_two_homes() -> None:
    """Each node finds the same two, whatever it knows; with one home alone unshared prompts queue by chance."""
    candidates = engines(1, 1, 1, 1, 0)
    first, second, *_ = Rendezvous().order(Fingerprint(7), candidates)
    candidates[first].load, candidates[second].load = 2, 1
    assert choose(COLD, candidates) == Choice(BackendId(second), "cold", 0)
    candidates[second].load = 2
    assert choose(COLD, candidates) == Choice(BackendId(first), "cold", 0)


def test_a_cold_prefix_skips_homes_where_it_would_wait() -> None:
    candidates = engines(1, 1, 1, 1, 1)
    first, second, *_ = Rendezvous().order(Fingerprint(7), candidates)
    for home in (first, second):
        candidates[home].load = candidates[home].work.waiting = 13
        candidates[home].work.pending_tokens = 13_000
    assert choose(COLD, candidates).reason == "cold_diverted"


def test_a_cold_prompt_of_one_message_goes_to_the_least_loaded() -> None:
    """It shares its beginning with nobody that is known of: a home would cost it a queue and bring nothing."""
    candidates = engines(3, 1, 1, 2)
    alone = COLD._replace(own=COLD.home)
    chosen = choose(alone, candidates)
    assert chosen.backend in (1, 2)
    assert chosen == choose(alone, candidates)  # every node names the same one
    assert chosen.reason == "cold"


def test_a_request_without_a_prefix_goes_to_any_of_the_least_loaded() -> None:
    policy, rng = Affinity(), Random(1)
    chosen = Counter(policy.choose(NO_MATCH, engines(5, 1, 1, 2), rng) for _ in range(200))
    assert {(choice.backend, choice.reason) for choice in chosen} == {(1, "no_prefix"), (2, "no_prefix")}
    assert min(chosen.values()) > 60


def test_a_backend_of_twice_the_weight_bears_twice_the_load() -> None:
    candidates = engines(18, 4, 4, 4)
    candidates[0].weight = 2.0  # may bear 2 x 4 x 2 + 2
    assert choose(match_of((0, 64)), candidates).reason == "affinity"
    candidates[0].load = 19
    assert choose(match_of((0, 64)), candidates).reason == "diverted"


def test_when_most_of_the_traffic_shares_one_prefix_it_spreads_and_each_spread_copy_is_used_again() -> None:
    """The document's case: 80 % of the requests begin with one system prompt, each takes a while."""
    policy, rng = Affinity(), Random(4)
    candidates = engines(*[0] * 8)
    holders: dict[int, int] = {}
    running: list[Engine] = []
    served: Counter[int] = Counter()
    hits = 0
    for number in range(4000):
        shared = rng.random() < 0.8
        match = match_of(*holders.items(), home=99) if shared else match_of(home=1000 + number)
        choice = policy.choose(match, candidates, rng)
        if shared:
            hits += choice.tokens > 0
            holders[choice.backend] = 256
        served[choice.backend] += 1
        candidates[choice.backend].load += 1
        running.append(candidates[choice.backend])
        if len(running) > 48:
            running.pop(rng.randrange(len(running))).load -= 1
    assert max(served.values()) < 0.25 * 4000
    assert hits > 0.98 * 0.8 * 4000


@pytest.mark.parametrize(
    ("median", "load"),
    [("upper", 14), ("lower", 6), ("middle", 10)],  # sorted 0 2 6 x: twice 6, 2 or 4, and 2
)
def test_the_median_of_an_even_number_may_be_the_upper_the_lower_or_their_middle(median: str, load: int) -> None:
    """Of two the other one's load counts, whatever the median."""
    policy = Affinity(AffinityOptions(median=median))
    for most, *others in ((load, 0, 2, 6), (8, 3)):
        assert policy.choose(match_of((0, 512)), engines(most, *others), Random(1)).reason == "affinity"
        assert policy.choose(match_of((0, 512)), engines(most + 1, *others), Random(1)).reason == "diverted"


def test_by_the_least_load_a_holder_is_left_for_one_with_more_than_the_floor_fewer() -> None:
    """Ranvier's p2c: divert to the least loaded when least + floor < selected."""
    policy = Affinity(AffinityOptions(divert_rule="least", divert_floor=2))
    assert policy.choose(match_of((0, 512)), engines(7, 5, 9, 9), Random(1)) == Choice(BackendId(0), "affinity", 512)
    assert policy.choose(match_of((0, 512)), engines(8, 5, 9, 9), Random(1)) == Choice(BackendId(1), "diverted", 0)


def test_without_regard_to_load_every_request_goes_to_its_holder_or_home() -> None:
    policy = Affinity(AffinityOptions(load_aware=False))
    assert policy.choose(match_of((0, 512)), engines(900, 0, 0, 0), Random(1)) == Choice(BackendId(0), "affinity", 512)
    candidates = engines(0, 0, 0, 0)
    candidates[home := Rendezvous().best(Fingerprint(7), candidates)].load = 900
    assert policy.choose(COLD, candidates, Random(1)) == Choice(BackendId(home), "cold", 0)


@given(load=st.integers(3, 500), weight=st.sampled_from((49.0, 0.1, 3.0, 1.0)), home=st.integers(1, 99))
def test_equally_loaded_engines_of_odd_weight_are_never_all_too_busy(load: int, weight: float, home: int) -> None:
    """3 / 49 * 49 is less than 3: multiplied back, each would exceed the median of all."""
    candidates = [Engine(BackendId(number), f"e{number}", weight, load) for number in range(4)]
    policy = Affinity(AffinityOptions(divert_factor=1.0, divert_floor=0))
    assert policy.choose(match_of(home=home), candidates, Random(1)).reason == "cold"
    assert policy.choose(match_of((0, 512), home=home), candidates, Random(1)).reason == "affinity"


LOADS = st.lists(st.integers(0, 60), min_size=2, max_size=12)


@given(loads=LOADS, data=st.data())
def test_whoever_is_chosen_is_either_the_deepest_holder_or_not_too_busy(loads: list[int], data: st.DataObject) -> None:
    candidates = engines(*loads)
    ids = st.integers(0, len(loads) - 1)
    holders = data.draw(st.dictionaries(ids, st.integers(1, 4).map(lambda blocks: 16 * blocks)))
    match = match_of(*holders.items(), home=data.draw(st.integers(1, 2**64 - 1)))
    match = match._replace(shared=bool(holders) and data.draw(st.booleans()))
    choice = choose(match, candidates)
    median = sorted(loads)[len(loads) // 2] if len(loads) > 2 else min(loads)
    if choice.reason in ("cold", "cold_diverted"):
        assert not holders
    elif match.shared:
        assert choice.reason == ("affinity" if choice.tokens == max(holders.values()) else "common")
        assert choice.tokens == holders.get(choice.backend, 0)
    elif choice.reason == "diverted":
        assert loads[choice.backend] == min(loads)
        assert choice.tokens == holders.get(choice.backend, 0)
        assert min(loads[one] for one in holders if holders[one] == max(holders.values())) > 2 * median + 2
    else:
        assert (choice.reason, choice.tokens) == ("affinity", max(holders.values()))
        assert loads[choice.backend] <= 2 * median + 2


# --- what chats share -------------------------------------------------------------------------------------------------


def shared(match: Match, own: int = 1) -> Match:
    """The same match, with others that go on from where it ends."""
    return match._replace(shared=True, own=Fingerprint(own))


def test_a_few_blocks_that_all_chats_share_are_no_affinity() -> None:
    """Documents behind one short instruction must not pile up where the instruction is warm."""
    match = match_of((0, 64), prompt=10_000, home_tokens=64)
    chosen = {choose(shared(match, own), engines(0, 0, 0, 0)) for own in range(1, 200)}
    assert {choice.backend for choice in chosen} == {0, 1, 2, 3}
    assert {choice.reason for choice in chosen} == {"affinity", "common"}


@pytest.mark.parametrize(
    ("match", "waiting", "choice"),
    [
        pytest.param(match_of((1, 5000), prompt=10_000), 1, (1, "affinity", 5000), id="own history"),
        pytest.param(shared(match_of((1, 256), prompt=600)), 0, (1, "affinity", 256), id="shared, its holder idle"),
        pytest.param(shared(match_of((1, 256), prompt=600)), 1, (2, "common", 0), id="shared, its holder busy"),
        pytest.param(
            shared(match_of((1, 256), (2, 99), prompt=600)), 1, (2, "common", 99), id="shared, less elsewhere"
        ),
        pytest.param(shared(match_of((1, 5000), prompt=5600)), 1, (1, "affinity", 5000), id="much of it shared"),
    ],
)
def test_what_is_shared_goes_where_it_is_soonest(match: Match, waiting: int, choice: tuple[int, str, int]) -> None:
    candidates = engines(2, waiting, 0)
    candidates[1].work.waiting, candidates[1].work.pending_tokens = waiting, 600 * waiting
    candidates[0].work.waiting, candidates[0].work.pending_tokens = 2, 5000
    assert choose(match, candidates) == choice


# --- what is ahead at the holder ------------------------------------------------------------------------------------


def trained() -> Affinity:
    """A policy that has seen each of four engines compute 10,000 tokens/s, and decode in steps of 10 ms and 0.1 us for
    each token of context."""
    policy, rng = Affinity(), Random(3)
    for _ in range(40):
        for backend in range(4):
            tokens, contexts = rng.randrange(100, 8000), rng.randrange(1000, 100_000)
            policy.learner.served(Service(BackendId(backend), tokens, tokens * 1e-4, False, 0, 0))
            policy.learner.decoded(Decoded(BackendId(backend), 100, 100 * (0.01 + contexts * 1e-7), contexts, 0))
    return policy


def busy(*loads: tuple[int, int]) -> tuple[Engine, ...]:
    """Engines with so many tokens of one request to compute, and so many requests that decode 2,000 tokens each."""
    found = engines(*[(tokens > 0) + decoding for tokens, decoding in loads])
    for engine, (tokens, decoding) in zip(found, loads, strict=True):
        engine.work.waiting, engine.work.pending_tokens = int(tokens > 0), tokens
        engine.work.decoding = engine.work.own.decoding = decoding
        engine.work.own.contexts, engine.work.own.inflight = 2600 * decoding, engine.load
    return found


def chat_of(held: int, prompt: int) -> Match:
    return match_of((0, held), prompt=prompt, home_tokens=64)._replace(answer_tokens=200.0)


@pytest.mark.parametrize(
    ("loads", "reason"),
    [
        pytest.param([(0, 0)] * 4, "affinity", id="nobody is ahead"),
        pytest.param([(2000, 0)] + [(0, 0)] * 3, "affinity", id="computing the prompt anew would take longer"),
        pytest.param([(20_000, 0)] + [(0, 0)] * 3, "diverted", id="a long prompt is ahead"),
        pytest.param([(20_000, 0)] + [(11_000, 0)] * 3, "affinity", id="less than twice the median is ahead"),
        pytest.param([(30_000, 0)] * 2 + [(0, 0)] * 2, "diverted", id="the median is that of the others"),
        pytest.param([(0, 9)] + [(0, 1)] * 3, "affinity", id="what decodes is no reason to compute it anew"),
    ],
)
def test_a_holder_is_left_if_more_than_twice_the_median_is_ahead_there_and_another_is_sooner(
    loads: list[tuple[int, int]], reason: str
) -> None:
    assert trained().choose(chat_of(5000, 5200), busy(*loads), Random(1)).reason == reason


def test_long_answers_beside_many_others_are_a_reason_to_leave_a_short_history() -> None:
    """Each step reads the context of all that decode there: of 3,000 steps that is more than a small prefill."""
    for answer_tokens, reason in ((3000.0, "diverted"), (20.0, "affinity")):
        match = chat_of(900, 1000)._replace(answer_tokens=answer_tokens)
        assert trained().choose(match, busy((0, 9), (0, 1), (0, 1), (0, 1)), Random(1)).reason == reason


def test_a_holder_whose_cache_running_answers_will_fill_is_left() -> None:
    candidates = busy((0, 4), (0, 4), (0, 4), (0, 4))
    for engine in candidates:
        engine.work.room.cache_tokens, engine.work.own.memory = 40_000, 10_000
    match = chat_of(5000, 5200)._replace(answer_tokens=3000.0)
    assert trained().choose(match, candidates, Random(1)).reason == "affinity"
    candidates[0].work.own.memory = 60_000
    assert trained().choose(match, candidates, Random(1)).reason == "diverted"


def test_whether_an_engine_is_full_is_found_out_once_and_only_where_its_size_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(
        ttft,
        "missing_share",
        lambda match, engine, *more: looks.append(engine.id) or missing_share(match, engine, *more),
    )
    candidates = busy((20_000, 0), (11_000, 0), (11_000, 0), (11_000, 0))
    for engine in candidates[:3]:
        engine.work.room.cache_tokens = 400_000
    assert trained().choose(chat_of(5000, 5200), candidates, Random(1)).reason == "affinity"
    assert looks == [0, 1, 2]


def test_a_full_holder_is_left_for_the_one_engine_with_room_although_others_are_full_as_well() -> None:
    """The median waits as long as the holder then: by twice that nobody would ever be left."""
    candidates = busy((0, 4), (0, 4), (0, 4), (0, 1))
    for engine in candidates:
        engine.work.room.cache_tokens, engine.work.own.memory = 40_000, 70_000
    match = chat_of(5000, 5200)._replace(answer_tokens=3000.0)
    candidates[3].work.own.memory = 10_000
    assert trained().choose(match, candidates, Random(1)).backend == 3


def test_a_holder_whose_places_are_taken_is_left_for_a_free_one() -> None:
    """Of llama.cpp's four slots each is held until its answer ends."""
    candidates = busy((0, 5), (0, 4), (0, 4), (0, 4))
    assert trained().choose(chat_of(5000, 5200), candidates, Random(1)).reason == "affinity"
    for engine, places in zip(candidates, (4, 8, 8, 8), strict=True):
        engine.work.room.places = places
    match = chat_of(5000, 5200)._replace(answer_tokens=1000.0)
    assert trained().choose(match, candidates, Random(1)).reason == "diverted"


def test_a_holder_that_answers_a_quarter_as_fast_as_an_idle_other_is_left() -> None:
    policy = trained()
    for number in range(12 * LOOK_EVERY + 1):
        policy.learner.decoded(Decoded(BackendId(number % 4), 100, 1.0 if number % 4 else 4.0, 3000, 0))
    assert policy.choose(chat_of(900, 1000), busy((0, 0), (0, 0), (0, 0), (0, 0)), Random(1)).reason == "diverted"


def test_a_chat_that_has_only_begun_goes_where_it_is_soonest() -> None:
    """What its first turn left is little beside the instruction that all engines have."""
    candidates = busy((2000, 1), (0, 0), (0, 0), (0, 0))
    begun = chat_of(5032, 5200)._replace(home_tokens=5000)
    begun = begun._replace(holders=[Holder(BackendId(0), 5032, 1), *(Holder(BackendId(n), 5000, 1) for n in (1, 2, 3))])
    assert trained().choose(begun, candidates, Random(1)).backend != 0
    assert (
        trained().choose(begun._replace(home_tokens=100), busy((0, 3), (0, 2), (0, 2), (0, 2)), Random(1)).backend == 0
    )


def test_a_backend_that_has_shown_no_rate_is_worth_a_look_now_and_then() -> None:
    policy, looked = Affinity(), 0
    for _ in range(6 * LOOK_EVERY):
        looked += policy.choose(shared(chat_of(900, 1000)), busy((0, 0), (0, 0)), Random(1)).backend
        policy.learner.served(Service(BackendId(0), 1000, 0.1, False, 0, 0))
        policy.learner.decoded(Decoded(BackendId(0), 100, 1.0, 1000, 0))
    assert looked in (4, 5), "of six: at first nothing is known of rates"
    assert policy.choose(chat_of(900, 1000), busy((0, 0), (0, 0)), Random(1)).backend == 0, "a chat stays"
    for _ in range(20):
        policy.learner.decoded(Decoded(BackendId(1), 100, 1.0, 1000, 0))
    assert policy.choose(shared(chat_of(900, 1000)), busy((0, 0), (0, 0)), Random(1)).backend == 0, "it is no faster"


def test_a_choice_among_dozens_weighs_the_least_loaded_and_the_holders_alone() -> None:
    candidates = engines(*[1] * 8, *[2] * 56)
    for engine in candidates:
        engine.work.waiting, engine.work.pending_tokens = engine.load, 500 * engine.load
    assert choose(COLD._replace(own=COLD.home), candidates).backend < 8
    assert choose(shared(match_of((40, 950))), candidates) == Choice(BackendId(40), "affinity", 950)
    chosen = {choose(shared(match_of((40, 16)), own), engines(*[0] * 64)).backend for own in range(1, 1000)}
    assert len(chosen) > 60, "of many that idle each has its turn"


def test_who_holds_most_is_weighed_however_many_hold_a_little_and_have_less_to_do() -> None:
    """All hold the instructions, and one holds the document behind them, too."""
    match = match_of((11, 9000), *[(number, 64) for number in range(11)], prompt=10_000, home_tokens=64)
    candidates = busy(*[(0, 1)] * 11, (0, 3))
    assert trained().choose(shared(match._replace(answer_tokens=200.0)), candidates, Random(1)).backend == 11
    own = chat_of(5000, 5200)._replace(
        several=lambda: match_of((0, 5000), (11, 4900), *[(n, 64) for n in range(1, 11)]).holders
    )
    loads = [(20_000, 0), *[(0, 1)] * 10, (0, 3)]
    assert trained().choose(own, busy(*loads), Random(1)).backend == 11, "if a chat's own holder is left"


@given(loads=LOADS, data=st.data())
def test_compatible_with_ranvier_twice_the_median_alone_decides(loads: list[int], data: st.DataObject) -> None:
    """Against the document's rule written down once more: no floor, any match is followed, and there is one home."""
    policy = Affinity(AffinityOptions(placement_compatibility="ranvier", divert_floor=9))
    candidates = engines(*loads)
    for engine in candidates:
        engine.work.waiting, engine.work.pending_tokens = engine.load, data.draw(st.integers(0, 9000))
    held = data.draw(st.one_of(st.just(()), st.tuples(st.tuples(st.integers(0, len(loads) - 1), st.just(64)))))
    match = match_of(*held, prompt=9000, home=data.draw(st.integers(2, 2**64 - 1)), home_tokens=64)
    match = match._replace(shared=data.draw(st.booleans()), own=data.draw(st.sampled_from((match.own, match.home))))
    preferred = held[0][0] if held else Rendezvous().best(match.home, candidates)
    median = sorted(loads)[len(loads) // 2] if len(loads) > 2 else min(loads)
    choice = policy.choose(match, candidates, Random(1))
    if loads[preferred] <= 2 * median:
        assert choice == Choice(BackendId(preferred), "affinity" if held else "cold", 64 if held else 0)
    else:
        assert loads[choice.backend] == min(loads)
        assert choice.reason == ("diverted" if held else "cold_diverted")
