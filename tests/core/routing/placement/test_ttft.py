"""`ttft`: the backend with the least predicted time to the first token."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.routing.placement import Choice, Match, Service
from ranvier_py.core.routing.placement.rendezvous import Rendezvous
from ranvier_py.core.routing.placement.ttft import LOSSES_MAX, LOSSES_S, Losses, Ttft, Weighed, missing_share
from ranvier_py.core.routing.rates.decode_rate import Decoded
from ranvier_py.core.routing.rates.work import Work
from tests.core.routing.placement.engines import Engine, match_of

PROMPT_TOKENS = 10_000


def engines(*pending: int, decoding: Sequence[int] = ()) -> tuple[Engine, ...]:
    """Backends with so many tokens waiting, each as one request."""
    loads = zip(pending, decoding or [0] * len(pending), strict=True)
    return tuple(
        Engine(
            BackendId(number),
            f"e{number}",
            load=(tokens > 0) + decodes,
            work=Work(pending_tokens=tokens, decoding=decodes, waiting=int(tokens > 0)),
        )
        for number, (tokens, decodes) in enumerate(loads)
    )


def warm(*held: tuple[int, int], at: float = 0.0) -> Match:
    match = match_of(*held, prompt=PROMPT_TOKENS, home_tokens=100)
    return match._replace(own=Fingerprint(9), at=at, deepest=Fingerprint(5))


def trained(per_token: float = 1e-4, error: float = 0.0, backends: Sequence[int] = range(4)) -> Ttft:
    """A policy that has seen each backend serve at this rate, with so large an error now and then."""
    policy, rng = Ttft(), Random(3)
    for _ in range(30):
        for backend in backends:
            tokens = rng.randrange(100, 8000)
            gap_s = tokens * per_token + rng.choice((0.0, 2 * error))
            policy.learner.served(Service(BackendId(backend), tokens, gap_s, False, 0, 0))
    return policy


def choose(policy: Ttft, match: Match, candidates: Sequence[Engine]) -> Choice:
    return policy.choose(match, candidates, Random(1))


def test_an_idle_holder_is_chosen() -> None:
    assert choose(Ttft(), warm((2, 8000)), engines(0, 0, 0, 0)) == Choice(BackendId(2), "warm", 8000)


def test_the_deepest_of_the_idle_holders_is_chosen() -> None:
    assert choose(Ttft(), warm((2, 8000), (1, 9000)), engines(0, 0, 0)).backend == 1


def test_a_queue_longer_than_the_prefill_it_saves_moves_the_prompt() -> None:
    candidates = engines(0, 5000, 0, 0)
    assert choose(trained(), warm((1, 8000)), candidates) == Choice(BackendId(1), "warm", 8000)
    moved = choose(trained(), warm((1, 8000)), engines(0, 9000, 0, 0))
    assert (moved.reason, moved.tokens) == ("moved", 0)
    assert moved.backend != 1


def test_it_moves_only_for_more_than_predictions_are_usually_wrong_by() -> None:
    assert choose(trained(error=0.3), warm((1, 8000)), engines(0, 9000, 0, 0)).reason == "warm"
    assert choose(trained(error=0.3), warm((1, 8000)), engines(0, 20_000, 0, 0)).reason == "moved"


def test_half_of_a_prefix_at_an_idle_backend_beats_all_of_it_in_a_queue() -> None:
    assert choose(trained(), warm((0, 8000), (1, 7000)), engines(5000, 0, 0)) == Choice(BackendId(1), "moved", 7000)


def test_what_everybody_holds_gives_nobody_an_advantage() -> None:
    everywhere = [(backend, 2000) for backend in range(4)]
    assert choose(trained(), warm(*everywhere), engines(9000, 3000, 6000, 8000)).backend == 1


def test_a_slow_backend_is_left_to_prompts_that_are_worth_it() -> None:
    policy = trained(backends=range(1, 4))
    for tokens in range(100, 5000, 50):
        policy.learner.served(Service(BackendId(0), tokens, tokens * 1e-3, False, 0, 0))
    assert choose(policy, warm((0, 5000)), engines(0, 0, 0, 0)).backend != 0
    assert choose(policy, warm((0, 9990)), engines(0, 0, 0, 0)) == Choice(BackendId(0), "warm", 9990)


def test_a_cold_prompt_goes_where_least_waits() -> None:
    assert choose(trained(), warm(), engines(9000, 3000, 6000, 8000)) == Choice(BackendId(1), "cold", 0)


def test_costs_within_a_twentieth_are_equal_and_the_idler_backend_is_taken() -> None:
    """Or the engine that is a hair faster would get everything, and its cache alone would be used."""
    candidates = engines(0, 300, 0, decoding=(3, 0, 1))
    assert choose(trained(), warm(), candidates).backend in (1, 2)
    lone = [warm()._replace(home=Fingerprint(own), own=Fingerprint(own)) for own in range(1, 40)]
    assert {choose(trained(), match, engines(0, 0, 0)).backend for match in lone} == {0, 1, 2}


def test_a_cold_prefix_has_two_homes_whoever_asks_for_it() -> None:
    """Before any gossip nodes would each make a copy of their own."""
    policy, rng = trained(), Random(5)
    policy.learner.service_rates.fleet.error_s = 0.1
    chosen = set()
    for own in range(10, 60):
        idle = engines(0, 0, 0, 0, decoding=[rng.randrange(3) for _ in range(4)])  # as each node sees them
        chosen.add(choose(policy, warm()._replace(own=Fingerprint(own)), idle).backend)
    assert chosen == set(Rendezvous().order(Fingerprint(7), engines(0, 0, 0, 0))[:2])


def test_a_cold_prefix_leaves_its_homes_for_a_backend_that_is_certainly_better() -> None:
    homes = Rendezvous().order(Fingerprint(7), engines(0, 0, 0, 0))[:2]
    busy = engines(*(5000 if position in homes else 0 for position in range(4)))
    assert choose(trained(), warm(), busy).backend not in homes
    assert choose(trained(error=2.0), warm(), busy).backend in homes


def test_equal_costs_are_ordered_by_load_and_then_the_same_path_every_time() -> None:
    loaded = engines(0, 0, 0, decoding=(1, 1, 0))
    unknown = Match((), 0, Fingerprint(7), 100, Fingerprint(9))
    assert choose(Ttft(), unknown, loaded).backend == 2
    equal = {choose(Ttft(), warm(), engines(0, 0, 0, 0)).backend for _ in range(10)}
    assert len(equal) == 1


def test_progress_since_the_last_first_token_shortens_the_queue() -> None:
    policy = trained()
    candidates = engines(9000, 8900)
    candidates[0].work.progress_at, candidates[1].work.progress_at = 99.5, 100.0
    at = warm(at=100.0)
    assert policy.terms(at, candidates)[0]["queue_s"] == pytest.approx(0.4, rel=0.05)
    assert policy.terms(at, candidates)[1]["queue_s"] == pytest.approx(0.89, rel=0.05)
    assert policy.choose(at, candidates, Random(1)).backend == 0


def test_a_queue_never_takes_less_than_no_time() -> None:
    policy, candidates = trained(), engines(1000)
    assert policy.terms(warm(at=1e6), candidates)[0]["queue_s"] >= 0.0


def asked(every_s: float, *waiting_tokens: tuple[int, int]) -> list[str]:
    """Why a prefix of 9000 tokens was placed each time it was asked for. What waits, at its one holder and at each of
    the others, is repeated."""
    policy, reasons = trained(), []
    for number in range(400):
        at = number * every_s
        here, elsewhere = waiting_tokens[number % len(waiting_tokens)]
        candidates = engines(here, elsewhere, elsewhere, elsewhere)
        for candidate in candidates:
            candidate.work.progress_at = at
        reasons.append(choose(policy, warm((0, 9000), at=at), candidates).reason)
    return reasons


def test_a_prefix_gets_a_second_holder_once_those_who_asked_have_waited_for_longer_than_its_prefill() -> None:
    """A queue of 0.6 s is no reason to compute 0.9 s again for one request; four such waits are."""
    assert asked(0.05, (6000, 0)).index("spread") == 3
    assert asked(0.05, (1000, 0)).index("spread") == 12


@pytest.mark.parametrize(
    ("every_s", "waiting"),
    [
        pytest.param(240.0, [(6000, 0)], id="asked for every four minutes"),
        pytest.param(0.05, [(6000, 0), (0, 6000)], id="queues that come and go by chance"),
        pytest.param(0.05, [(6000, 6000)], id="everybody waits as long"),
    ],
)
def test_a_prefix_gets_no_second_holder_for_nothing(every_s: float, waiting: list[tuple[int, int]]) -> None:
    assert set(asked(every_s, *waiting)) == {"warm"}


def test_a_copy_is_dearer_where_others_wait() -> None:
    busy = [asked(0.05, (here, here - 3000)).index("spread") for here in (3000, 6000)]
    assert busy[1] > busy[0]


def test_a_copy_is_dearer_where_many_decode() -> None:
    """They wait for it, too."""

    def asked_until_copied(decoding: int) -> int:
        policy, reasons = trained(), []
        while "spread" not in reasons:
            candidates = engines(6000, 0, 0, decoding=[decoding] * 3)
            reasons.append(choose(policy, warm((0, 9000)), candidates).reason)
        return len(reasons)

    assert asked_until_copied(40) > asked_until_copied(0)


def test_a_prompt_goes_where_what_it_evicts_is_not_needed_again() -> None:
    """The second engine's cache is full of what is asked for again and again, the others' of what is not."""
    policy, candidates = trained(), engines(500, 0, 500, 500)
    cold = warm()
    assert choose(policy, cold, candidates).backend == 1
    for _ in range(20):
        policy.chosen(cold._replace(evicted=(BackendId(1), 9000)), Choice(BackendId(1), "cold", 0))
    assert choose(policy, cold, candidates).backend != 1


def test_what_an_engine_computed_although_it_was_believed_to_hold_it_was_evicted() -> None:
    policy = trained()
    before = policy.learner.evictions.price(BackendId(1))
    policy.learner.counted(BackendId(1), 100, 9000)
    assert policy.learner.evictions.price(BackendId(1)) > before == 1.0


def test_where_all_answers_are_whole_a_holder_is_left_only_for_more_than_the_usual_error_of_what_is_believed() -> None:
    policy = Ttft()
    for number in range(60):
        policy.learner.decoded(Decoded(BackendId(number % 4), 100, 2.0, 1000, 10_000))
    assert choose(policy, warm((0, 9000)), engines(16_000, 0, 0, 0)).reason == "moved"
    for _ in range(30):
        policy.learner.counted(BackendId(0), 1000, 11_000)
    assert choose(policy, warm((0, 9000)), engines(16_000, 0, 0, 0)).reason == "warm"


def test_what_chats_wait_counts_for_the_first_message_that_they_share() -> None:
    """Chats stay where they began: if all begin at the one holder of an instruction, the others stay idle."""
    new_chat = warm((0, 5000))._replace(home_tokens=5000, prompt_tokens=6000, home=Fingerprint(7))
    policy, candidates = trained(), engines(1000, 0, 0, 0)
    assert choose(policy, new_chat, candidates).reason == "warm"
    for turn in range(10):
        chat = warm((0, 9000))._replace(home_tokens=5000, deepest=Fingerprint(20 + turn))
        assert choose(policy, chat, candidates).reason == "warm"
    spread = choose(policy, new_chat, candidates)
    assert spread.reason == "spread"
    assert spread.backend != 0
    assert choose(policy, new_chat, candidates).reason == "warm", "one copy at a time"


def test_what_a_holder_saves_is_no_chance_where_it_is_most_of_the_prompt() -> None:
    """Errors can be as long as a whole prefill, and the holder would be left for nothing."""
    policy, candidates = trained(error=2.0), engines(11_000, 0, 0, 0)
    assert policy.learner.service_rates.fleet.error_s > 1.0
    assert choose(policy, warm((0, 6000)), candidates).reason == "warm"
    assert choose(policy, warm((0, 4000)), candidates).reason == "common"


def test_a_single_candidate_is_taken_as_it_is() -> None:
    assert choose(Ttft(), warm((0, 50)), engines(10**6)) == Choice(BackendId(0), "only", 50)


def test_its_terms_add_up_to_what_decides() -> None:
    policy, candidates = trained(), engines(1000, 0, decoding=(2, 5))
    terms = policy.terms(warm((0, 9000)), candidates)
    for each in terms:
        assert each["sum_s"] == pytest.approx(each["queue_s"] + each["prefill_s"] + each["others_s"])
    assert terms[0]["prefill_s"] == pytest.approx(0.1, rel=0.05)
    assert terms[1]["prefill_s"] == pytest.approx(1.0, rel=0.05)
    assert terms[0]["tokens_per_s"] == pytest.approx(10_000, rel=0.05)


def test_its_terms_can_be_shown_where_whole_answers_took_longest_after_short_prompts() -> None:
    policy = Ttft()
    for computed in (10, 2000, 500, 4000):
        policy.learner.decoded(Decoded(BackendId(0), 100, 2.0 - computed / 4000, 1000.0, computed))
    cold, held = policy.terms(warm((1, 9000)), engines(0, 0))
    assert cold["tokens_per_s"] > 0.0
    assert cold["prefill_s"] > held["prefill_s"] > 0.0


def test_losses_fade_within_a_minute_and_are_bounded() -> None:
    losses = Losses()
    assert [round(losses.add(Fingerprint(1), 0.0, 0.1), 3) for _ in range(3)] == [0.0, 0.059, 0.127]
    assert losses.add(Fingerprint(1), 5 * LOSSES_S, 0.0) < 0.01
    for number in range(LOSSES_MAX + 5):
        losses.add(Fingerprint(10 + number), 400.0, 0.1)
    assert len(losses.known) == LOSSES_MAX
    assert losses.forgotten == 6


def test_a_prefill_costs_those_who_will_queue_behind_it() -> None:
    """Under overload whoever saves no prefill for them makes all of them wait, and the throughput falls."""
    policy, candidates = trained(), engines(8000, 8000)
    candidates[1].work.waiting = candidates[1].load = 4
    few, many = policy.terms(warm(), candidates)
    assert many["others_s"] / few["others_s"] == pytest.approx((4 + 2.5 + 1.25) / (1 + 2.5 + 1.25), rel=0.05)
    assert choose(policy, warm(), candidates).backend == 0


def test_a_long_prompt_does_not_take_the_requests_of_peers_for_as_long_as_itself() -> None:
    """Else it would find every cache full, and leave the engine that holds its history for nothing."""
    policy, candidates = trained(), engines(0, 0)
    policy.learner.decoded(Decoded(BackendId(0), 100, 1.0, 1000.0, 0))
    match = warm()._replace(answer_tokens=100.0)
    for candidate in candidates:
        candidate.load, candidate.work.room.cache_tokens = 6, 20_000
        candidate.work.own.inflight, candidate.work.own.memory = 2, 1000
    assert all(terms["queue_s"] < 1e-9 for terms in policy.terms(match, candidates))
    for candidate in candidates:
        candidate.work.own.memory = 8000
    assert all(terms["queue_s"] > 0.1 for terms in policy.terms(match, candidates))


def test_a_shortage_that_lengths_of_answers_may_make_by_chance_lets_nobody_wait() -> None:
    policy, candidates = trained(), engines(0, 0)
    policy.learner.decoded(Decoded(BackendId(0), 100, 1.0, 1000.0, 0))
    match = warm()._replace(answer_tokens=1000.0)
    for candidate, running in zip(candidates, (4, 16), strict=True):
        candidate.load = candidate.work.own.inflight = running
        needed = match.memory(0)
        # short of two answers, which is as much as the sum of four varies; of sixteen it is half of that
        candidate.work.room.cache_tokens, candidate.work.own.memory = 30_000, round(32_000 - needed)
    assert all(missing_share(match, candidate, 0, 0.0) <= 0.0 for candidate in candidates)
    for candidate in candidates:
        candidate.work.own.memory += 1000
    assert [missing_share(match, candidate, 0, 0.0) > 0.0 for candidate in candidates] == [True, False]


def sized(cache_tokens: int, *pending: int) -> tuple[Engine, ...]:
    """Backends whose caches have so many tokens."""
    found = engines(*pending)
    for each in found:
        each.work.room.cache_tokens = cache_tokens
    return found


def test_a_long_prompt_goes_where_it_evicts_no_chat_that_goes_on() -> None:
    """The first two caches have a chat each, of which no request is in flight."""
    policy, candidates = trained(), sized(25_000, 0, 0, 0)
    for backend in (0, 1):
        policy.chosen(warm()._replace(prompt_tokens=20_000), Choice(BackendId(backend), "cold", 0))
    new = [warm()._replace(own=Fingerprint(own)) for own in range(1, 20)]
    assert {policy.cold(each, weighed_of(policy, each, candidates), (), Random(1)) for each in new} == {2}
    later = [each._replace(at=1000.0) for each in new]  # those chats have ended
    assert {policy.cold(each, weighed_of(policy, each, candidates), (), Random(1)) for each in later} == {0, 1, 2}


def weighed_of(policy: Ttft, match: Match, candidates: Sequence[Engine]) -> Weighed:
    return policy.weigh(range(len(candidates)), match, (), candidates)


def test_of_two_long_chats_that_do_not_fit_together_one_goes_where_there_is_room() -> None:
    policy, candidates = trained(), sized(15_000, 0, 0)
    chat = warm((0, 2000))
    assert choose(policy, chat, candidates).backend == 0
    policy.chosen(warm()._replace(prompt_tokens=12_000), Choice(BackendId(0), "cold", 0))
    assert choose(policy, chat, candidates).backend == 1


def test_a_chat_that_goes_on_evicts_nothing_by_what_it_has_there_already() -> None:
    policy, candidates = trained(), sized(12_000, 0, 0)
    for _ in range(3):
        assert choose(policy, warm((0, 9900)), candidates).backend == 0
    assert policy.terms(warm((0, 9900)), candidates)[0]["others_s"] == 0.0


def test_where_two_long_prompts_fill_a_cache_one_is_waited_for_to_its_end_however_little_room_is_missing() -> None:
    policy, (few, many) = trained(), sized(25_000, 0, 0)
    policy.learner.decoded(Decoded(BackendId(0), 100, 1.0, 1000.0, 0))
    match = warm()._replace(answer_tokens=100.0)
    for candidate, running in ((few, 2), (many, 16)):
        candidate.load = candidate.work.own.inflight = running
        candidate.work.own.memory = 16_000  # with this one, about a thousand too many
    assert missing_share(match, few, 0, 0.0) == pytest.approx(8000 / 25_000)
    assert missing_share(match, many, 0, 0.0) == pytest.approx(1000 / 25_000)
