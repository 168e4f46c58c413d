"""How fast a backend gets to first tokens, learned from those it gave."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.placement import Service
from ranvier_py.core.routing.rates.moments import Moments
from ranvier_py.core.routing.rates.service_rate import NOMINAL, WINDOW, Ahead, Fleet, ServiceRates, fitted
from tests.examples import examples

FIRST, SECOND = BackendId(0), BackendId(1)
IDLE = Ahead(0, 0, 0, 0.0)


def service(
    tokens: int, gap_s: float, *, queued: bool = False, decoding: int = 0, peers: int = 0, backend: BackendId = FIRST
) -> Service:
    return Service(backend, tokens, gap_s, queued, decoding, peers)


def show(
    service_rates: ServiceRates,
    count: int,
    *,
    per_token: float,
    alone: float = 0.0,
    queued: float = 0.0,
    noise: float = 0.0,
    backend: BackendId = FIRST,
) -> None:
    """Let a backend serve `count` prompts of random sizes, half of them from a queue."""
    rng = Random(1)
    for _ in range(count):
        tokens, waited = rng.randrange(10, 8000), rng.random() < 0.5
        gap_s = (queued if waited else alone) + tokens * per_token
        service_rates.served(service(tokens, gap_s * (1 + rng.uniform(-noise, noise)), queued=waited, backend=backend))


def test_before_anything_is_known_only_the_tokens_count() -> None:
    assert Fleet().line() == NOMINAL
    assert ServiceRates()[FIRST].predict(500, IDLE) == (0.0, 500 * NOMINAL.per_token)


def test_rate_and_fixed_parts_are_found() -> None:
    service_rates = ServiceRates()
    show(service_rates, 800, per_token=2e-4, alone=0.01, queued=0.2)
    line = service_rates.fleet.line()
    assert line.per_token == pytest.approx(2e-4, rel=0.01)
    assert line.alone == pytest.approx(0.01, rel=0.1)
    assert line.queued == pytest.approx(0.2, rel=0.05)
    assert service_rates[FIRST].factor == pytest.approx(1.0, abs=0.05)
    assert service_rates.fleet.error_s < 0.05


def test_noise_of_a_third_leaves_the_rate_within_an_eighth() -> None:
    service_rates = ServiceRates()
    show(service_rates, 200, per_token=2e-4, alone=0.01, queued=0.2, noise=0.33)
    assert service_rates.fleet.line().per_token == pytest.approx(2e-4, rel=0.125)


def test_what_requests_cost_that_decode_is_found_where_there_is_no_other_cause() -> None:
    service_rates, rng = ServiceRates(), Random(2)
    for _ in range(400):
        tokens, decoding = rng.randrange(10, 8000), rng.randrange(40)
        service_rates.served(service(tokens, tokens * 1e-4 + decoding * 2e-3, decoding=decoding))
    assert service_rates.fleet.line().per_decoding == pytest.approx(2e-3, rel=0.3)


def test_prompts_that_are_all_alike_do_not_make_tokens_free() -> None:
    """A few others, behind work that this node can't see, would else say that a prefill of any length takes as long."""
    service_rates = ServiceRates()
    for _ in range(20):
        service_rates.served(service(2200, 0.22))
    for _ in range(5):
        service_rates.served(service(128, 0.22))
    assert service_rates.fleet.line().per_token > 5e-5


def test_a_few_observations_do_not_make_decoding_dear() -> None:
    """Prompts of one size, as load comes up: what a node can't see lasts longer while more decodes."""
    service_rates = ServiceRates()
    for decoding in range(8):
        service_rates.served(service(2000, 0.2 + 0.1 * (decoding > 3), decoding=decoding))
    queue_s, _ = service_rates[FIRST].predict(100, Ahead(0, 0, 40, 0.0))
    assert queue_s < 0.5


def test_those_who_wait_with_nothing_to_compute_will_decode_beside_who_comes_last() -> None:
    """Else a crowd that shares its prefix costs nothing where nobody decodes yet, and all of it goes there."""
    service_rates, rng = ServiceRates(), Random(2)
    for _ in range(400):
        tokens, decoding = rng.randrange(10, 8000), rng.randrange(40)
        service_rates.served(service(tokens, tokens * 1e-4 + decoding * 2e-3, decoding=decoding))
    step_s = service_rates.fleet.line().per_decoding
    queue_s = [service_rates[FIRST].predict(100, Ahead(0, waiting, 0, 0.0))[0] for waiting in (10, 20)]
    assert queue_s[0] > step_s * 10 * 11 / 2  # the last of eleven decodes beside ten, the one before beside nine
    assert queue_s[1] > 3 * queue_s[0]


def test_a_new_backend_is_taken_for_one_of_the_fleet_until_it_shows_another_rate() -> None:
    service_rates = ServiceRates()
    show(service_rates, 200, per_token=1e-4, alone=0.01, queued=0.01)
    assert service_rates[SECOND].per_token_s == pytest.approx(1e-4, rel=0.05)
    for _ in range(10):
        show(service_rates, 30, per_token=1e-4, alone=0.01, queued=0.01)
        show(service_rates, 5, per_token=5e-4, alone=0.01, queued=0.01, backend=SECOND)
    assert service_rates[SECOND].per_token_s > 2.5e-4
    assert service_rates[FIRST].per_token_s < 1.3e-4


def test_a_backend_that_nobody_asked_yet_keeps_up_with_what_the_fleet_shows() -> None:
    """Else it would seem slower or faster than the others for ever, and be asked never or always."""
    service_rates = ServiceRates()
    unseen = service_rates[SECOND]
    show(service_rates, 200, per_token=3e-5, alone=0.01, queued=0.01)
    assert unseen.per_token_s == pytest.approx(3e-5, rel=0.05)


def test_a_backend_that_gets_slower_is_known_as_slower_after_a_window() -> None:
    service_rates = ServiceRates()
    show(service_rates, 300, per_token=1e-4)
    show(service_rates, 2 * int(WINDOW), per_token=3e-4)
    assert service_rates[FIRST].per_token_s == pytest.approx(3e-4, rel=0.15)


def test_what_the_engine_counted_amends_what_was_predicted() -> None:
    """An engine that had evicted what we believed in it looks slow, until it says how much it computed."""
    service_rates = ServiceRates()
    for _ in range(50):
        believed = service(100, 0.5)
        service_rates.served(believed)
        service_rates.corrected(believed, 5000)
        service_rates.served(service(2500, 0.25))
    assert service_rates[FIRST].per_token_s == pytest.approx(1e-4, rel=0.1)
    assert service_rates[FIRST].factor == pytest.approx(1.0, abs=0.1)


def serve_deep(
    service_rates: ServiceRates, count: int, *, slope: float, longest: int = 60_000, noise: float = 0.1, seed: int = 4
) -> None:
    """Let a backend serve the tails of prompts, whose tokens take longer by `slope` for each token before them."""
    rng = Random(seed)
    for _ in range(count):
        prompt = rng.randrange(500, longest)
        tokens, waited = rng.choice((prompt, rng.randrange(50, 1 + prompt // 2))), rng.random() < 0.3
        work = sum(1.0 + slope * (place + 5) * 10 for place in range((prompt - tokens) // 10, prompt // 10)) * 10
        gap_s = 0.02 + 1e-4 * work
        seen = service(tokens, gap_s * (1 + rng.uniform(-noise, noise)), queued=waited)
        service_rates.served(seen._replace(prompt_tokens=prompt))


@pytest.mark.parametrize("slope", [2e-5, 1e-4])
def test_the_cost_of_a_token_is_learned_with_its_depth(slope: float) -> None:
    service_rates = ServiceRates()
    serve_deep(service_rates, 400, slope=slope)
    assert service_rates.fleet.slope == pytest.approx(slope, rel=0.25)
    for held, prompt in ((0, 2_000), (0, 50_000), (49_000, 50_000), (25_000, 50_000)):
        tokens = prompt - held
        real_s = 0.02 + 1e-4 * (tokens + slope * tokens * (held + prompt) / 2)
        found = service_rates[FIRST].predict(service_rates.work_of(held, prompt), IDLE)
        assert sum(found) == pytest.approx(real_s, rel=0.12)


def test_what_waits_ahead_is_predicted_by_its_depth_too() -> None:
    service_rates = ServiceRates()
    serve_deep(service_rates, 400, slope=1e-4)
    early, deep = (Ahead(service_rates.work_of(held, held + 2000), 1, 0, 0.0) for held in (0, 50_000))
    queue_s = [service_rates[FIRST].predict(100, ahead)[0] for ahead in (early, deep)]
    assert queue_s[1] == pytest.approx(6.1 / 1.1 * queue_s[0], rel=0.25)


@pytest.mark.parametrize(("longest", "slope"), [(60_000, 0.0), (1_000, 3e-5)])
def test_where_depth_does_not_count_or_prompts_are_short_a_token_is_a_token(longest: int, slope: float) -> None:
    """Whatever the seed: what is no more than chance would do changes nothing, not even a little."""
    for seed in range(examples(100)):
        service_rates = ServiceRates()
        serve_deep(service_rates, 100, slope=slope, longest=longest, noise=0.3, seed=seed)
        assert service_rates.fleet.slope == 0.0
        assert service_rates.work_of(400, 1000) == 600


def test_what_the_engine_counted_amends_the_depths_too() -> None:
    """Half of the prompts were thought to be held, and had to be computed."""
    service_rates, rng = ServiceRates(), Random(5)
    for _ in range(400):
        prompt = rng.randrange(1000, 60_000)
        believed = service(500, 1e-4 * (prompt + 1e-4 * prompt**2 / 2))._replace(prompt_tokens=prompt)
        service_rates.served(believed)
        service_rates.corrected(believed, prompt)
        tail_s = 1e-4 * 500 * (1 + 1e-4 * (prompt - 250))
        service_rates.served(service(500, tail_s)._replace(prompt_tokens=prompt))
    assert service_rates.fleet.slope == pytest.approx(1e-4, rel=0.15)
    assert service_rates[FIRST].factor == pytest.approx(1.0, abs=0.1)


def test_gaps_that_are_no_service_are_left_out() -> None:
    service_rates = ServiceRates()
    for gap_s in (10_000.0, -1.0):
        service_rates.served(service(100, gap_s))
        service_rates.corrected(service(100, gap_s), 50)
    assert service_rates.fleet.count == 0
    assert service_rates.fleet.line() == NOMINAL


def test_what_was_computed_beside_the_work_of_peers_teaches_nothing() -> None:
    """How far that had come is not known, and a node among several would take its own engines for slow."""
    service_rates = ServiceRates()
    show(service_rates, 50, per_token=1e-4)
    for _ in range(50):
        service_rates.served(service(100, 0.5, peers=5000))
        service_rates.corrected(service(100, 0.5, peers=5000), 50)
    assert service_rates[FIRST].per_token_s == pytest.approx(1e-4, rel=0.05)


gaps = st.one_of(st.just(0.0), st.floats(1e-6, 600))


@given(st.lists(st.tuples(st.integers(0, 200_000), gaps, st.booleans(), st.integers(0, 99)), max_size=60))
def test_no_observations_make_a_prediction_negative_or_infinite(seen: list[tuple[int, float, bool, int]]) -> None:
    service_rates = ServiceRates()
    for number, (tokens, gap_s, queued, decoding) in enumerate(seen):
        one = service(tokens, gap_s, queued=queued, decoding=decoding, backend=BackendId(number % 3))
        one = one._replace(prompt_tokens=tokens * (number % 4))
        service_rates.served(one)
        service_rates.corrected(one, tokens // 2)
        assert all(0.0 <= part < 1e9 for part in service_rates.fleet.line())
        assert 0.0 <= service_rates[FIRST].factor < 1e9
        assert all(part >= 0.0 for part in service_rates[FIRST].predict(tokens, Ahead(tokens, 2, decoding, gap_s)))
        assert service_rates[FIRST].per_token_s > 0.0


def test_a_fleet_without_tokens_predicts_by_the_nominal_rate() -> None:
    service_rates = ServiceRates()
    service_rates.served(service(0, 0.5))
    assert service_rates.fleet.line() == NOMINAL
    assert fitted(Moments(), Moments()) == NOMINAL
