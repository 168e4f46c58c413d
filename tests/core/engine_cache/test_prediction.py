"""A router's own error, attempt by attempt, through a real Router."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.engine_cache.calibration.biases import Bias
from ranvier_py.core.engine_cache.calibration.calibration import SAMPLES_PER_S_MAX, Calibration
from ranvier_py.core.engine_cache.calibration.predictions import BackendPredictions, BiasChange
from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.fingerprint import MEDIA_MARK, Segment, TokenState
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.backends import Outcome
from ranvier_py.core.routing.placement import Service
from ranvier_py.core.routing.placement.ttft import TimeLearner
from ranvier_py.core.routing.route_table import Trust
from ranvier_py.core.routing.router import Attempt
from tests.core.routing.test_router import make_router

URL = "http://10.0.0.1:8000"
BLOCK = 16
A = BackendId(0)


class ServiceLearner(TimeLearner):
    """Notes the counts by which what first tokens taught is corrected."""

    def __init__(self, learned: list[int]) -> None:
        super().__init__()
        self.learned = learned

    def counted(
        self, backend: BackendId, believed_tokens: int, computed_tokens: int, service: Service | None = None
    ) -> None:
        super().counted(backend, believed_tokens, computed_tokens, service)
        if service is not None:
            self.learned.append(computed_tokens)


class World:
    """One router before one engine, whose answers a test makes up. Prompts are named by their blocks."""

    def __init__(self, **given: object) -> None:
        self.router = make_router(1, texts_match=False)
        self.calibration = Calibration(self.router.routes, **given)  # type: ignore[arg-type]
        self.router.observers += (self.calibration,)
        self.root = Boundary(None, Fingerprint(0), 0)
        self.api = "chat"
        self.kept: dict[int, int] = {}  # what `press` has the engine keep
        self.rng = Random(1)
        self.now = 100.0

    def prompt(self, names: Sequence[int], extra: int = 5) -> Prompt:
        end = Boundary(self.root, Fingerprint(names[-1]), len(names) * BLOCK)
        chain = [(BLOCK * (at + 1), Fingerprint(name)) for at, name in enumerate(names)]
        length = len(names) * BLOCK + extra
        end.tokenized(Segment(chain[:-1], chain[-1], TokenState(length, 0, ())))
        return Prompt("chat", "", True, end, self.root, (), b"", api=self.api)

    def start_attempt(self, names: Sequence[int], now: float) -> Attempt:
        prompt = self.prompt(names)
        found = self.router.find(prompt, now)
        return self.router.start_attempt(prompt, self.router.place(prompt, found), now, found=found)

    def answer(self, attempt: Attempt, cached: int | None, now: float, *, prompt_tokens: int | None = None) -> None:
        router, end = self.router, attempt.prompt.end
        router.first_token(attempt, now)
        counted = prompt_tokens if prompt_tokens is not None else end.length
        router.answered(attempt, end, Answer(None, "", counted, cached, 8), now)
        router.finish_attempt(attempt, Outcome.SUCCESS, now)

    def reuses_what_it_served(self) -> None:
        """It counts a prompt as new, then as cached: from now on it is known to report hits."""
        for now, cached in ((10.0, 0), (11.0, 64)):
            self.served([1, 2, 3, 4], cached, now)

    def served(self, names: Sequence[int], cached: int | None, now: float) -> Attempt:
        attempt = self.start_attempt(names, now)
        self.answer(attempt, cached, now + 0.1)
        return attempt

    @property
    def view(self) -> BackendPredictions:
        return self.calibration.backends()[BackendId(0)]

    def depth(self, names: Sequence[int], now: float) -> int:
        found = self.router.find(self.prompt(names), now, touch=False)
        return found.holders[0].tokens if found.holders else 0


def test_precision_is_of_the_predicted_and_recall_of_the_cached_tokens() -> None:
    world = World()
    world.served([1, 2, 3, 4], 0, 10.0)
    world.served([1, 2, 3, 4], 64, 11.0)
    world.served([1, 2, 3, 4], 32, 12.0)
    world.served([9, 8], 32, 13.0)  # another client's prompt was there
    view = world.view
    assert (view.counters.predicted_tokens, view.counters.cached_tokens, view.counters.right_tokens) == (128, 128, 96)
    assert (view.precision, view.recall) == (0.75, 0.75)
    assert view.counters.error_tokens.count == view.counters.answers == 4


def test_the_block_of_the_last_token_is_no_error() -> None:
    """It is always computed again: of 64 tokens asked again, 48 can be found."""
    world = World()
    for now in (10.0, 11.0):
        attempt = world.start_attempt([1, 2, 3, 4], now)
        world.answer(attempt, 48 if now > 10 else 0, now + 0.1, prompt_tokens=64)
    assert world.view.precision == 1.0


def test_a_larger_block_of_the_engine_is_no_error_once_it_is_reported() -> None:
    world = World()
    world.calibration.report(A, URL, 1, EngineMetrics(block_tokens=32))
    world.served([1, 2, 3], 0, 10.0)
    world.served([1, 2, 3], 32, 11.0)
    assert world.view.precision == 1.0
    assert world.view.block_tokens == 32


def test_a_prefix_that_answered_cold_is_withdrawn_and_no_other() -> None:
    world = World()
    for names, cached in (([1, 2, 3, 4], 0), ([1, 2, 5, 6], 32), ([7, 8], 0)):
        world.served(names, cached, 10.0)
    world.served([1, 2, 3, 4], 16, 20.0)
    assert world.depth([1, 2, 5, 6], 21.0) == 32
    assert world.depth([1, 2, 3, 4], 21.0) == 64
    assert world.depth([7, 8], 21.0) == 32
    assert world.view.counters.refuted == 1


def test_a_backend_that_publishes_events_is_measured_and_not_corrected() -> None:
    sent: list[BackendId] = []
    world = World(estimated=lambda _: False, contradicted=sent.append)
    for names, cached in (([1, 2, 3, 4], 0), ([1, 2, 5, 6], 32)):
        world.served(names, cached, 10.0)
    world.served([1, 2, 3, 4], 0, 20.0)
    assert world.depth([1, 2, 5, 6], 21.0) == 64
    assert world.view.precision == 32 / 96
    assert sent == [A]


def test_a_prompt_with_media_that_answered_cold_is_withdrawn_though_events_name_others() -> None:
    sent: list[BackendId] = []
    world = World(estimated=lambda _: False, contradicted=sent.append)
    picture = [1, 2, MEDIA_MARK | 3 << 40, MEDIA_MARK | 4 << 40]
    for names, cached in ((picture, 0), ([1, 2, 5, 6], 32)):
        world.served(names, cached, 10.0)
    world.served(picture, 32, 20.0)
    world.router.routes.sweep(21.0, [1])
    assert world.depth([1, 2, 5, 6], 21.0) == 64
    assert world.depth(picture, 21.0) == 64, "computed anew just now"
    assert world.view.counters.refuted == 1
    assert sent == []


def test_events_that_are_another_engines_are_named_and_those_of_its_own_are_not() -> None:
    """A wrong endpoint in a configuration looks like any other: EXACT, and nothing missed."""
    reported: list[BiasChange] = []
    world = World(estimated=lambda _: False)
    for number in range(60):
        world.served([100 * number + block + 1 for block in range(10)], 0, 10.0 + number)
        world.served([100 * number + block + 1 for block in range(10)], 160 if number % 10 else 0, 10.5 + number)
        reported += world.calibration.tick(world.now)
    assert reported == []
    for number in range(60, 200):
        world.served([100 * number + block + 1 for block in range(10)], 96, 100.0 + number)
        reported += world.calibration.tick(world.now)
    assert [(change.bias, change.appeared) for change in reported] == [(Bias.EVENTS, True)]
    assert "another engine's" in reported[0].detail
    for number in range(280):
        world.served([100 * (60 + number % 140) + block + 1 for block in range(10)], 160, 400.0 + number)
        reported += world.calibration.tick(world.now)
    assert [(change.bias, change.appeared) for change in reported[1:]] == [(Bias.EVENTS, False)]


def press(world: World, capacity: int, answers: int) -> float:
    """Chats of 640 tokens come back after a while to an engine that keeps `capacity` tokens, LRU. Returns the time."""
    rng, kept = world.rng, world.kept
    for _ in range(answers):
        number = rng.randrange(60)
        names = [number * 1000 + block + 1 for block in range(40)]
        cached = kept.pop(number, 0)
        world.served(names, cached, world.now)
        kept[number] = 640
        while sum(kept.values()) > capacity:
            del kept[next(iter(kept))]
        world.now += 2.0
        world.calibration.tick(world.now)
    return world.now


def test_old_prefixes_of_a_small_cache_fade_and_young_ones_stay() -> None:
    world = World()
    now = press(world, 10_000, 400)
    view = world.view
    assert view.capacity_learned_tokens is not None
    assert 6_000 < view.capacity_learned_tokens < 14_000
    assert tuple(view.biases) == (Bias.SMALL_CACHE,)
    assert world.calibration.lifetime_s(BackendId(0), 1e6) is not None
    world.served([10**6, 10**6 + 1, 10**6 + 2], 0, now)
    assert world.depth([10**6, 10**6 + 1, 10**6 + 2], now + 1) == 48
    before = world.view.counters.predicted_tokens, world.view.counters.right_tokens
    press(world, 10_000, 200)
    predicted, right = (
        after - old
        for after, old in zip(
            (world.view.counters.predicted_tokens, world.view.counters.right_tokens), before, strict=True
        )
    )
    assert right / predicted > 0.9


def test_what_a_running_request_holds_does_not_fade() -> None:
    """Its engine can't push it out, however much passes by; the next turn belongs there."""
    world = World()
    now = press(world, 10_000, 200)
    names = [10**6 + block for block in range(10)]
    attempt = world.start_attempt(names, now)
    world.router.first_token(attempt, now + 0.1)
    world.now += 1.0
    now = press(world, 10_000, 60)
    assert world.depth(names, now) == 160
    world.answer(attempt, 0, now)
    now = press(world, 10_000, 60)
    assert world.depth(names, now) == 0


DOCUMENT = tuple(range(1, 41))


def ask_at_once(world: World, count: int) -> None:
    """So many questions on one document, all sent before the first is answered."""
    asked = [world.start_attempt([*DOCUMENT, 1000 + number], 10.0) for number in range(count)]
    for number, attempt in enumerate(asked):
        world.answer(attempt, 0 if number == 0 else 640, 11.0 + number)


@pytest.mark.parametrize("count", [2, 30, 3 * SAMPLES_PER_S_MAX])
def test_what_several_requests_use_at_once_counts_once(count: int) -> None:
    """Beside the questions and answers themselves: 16 and 8 tokens. Many in a second are followed roughly."""
    world = World()
    ask_at_once(world, count)
    used = world.view.clock.total
    assert used == 640 + count * (16 + 8)


def test_a_document_that_many_ask_about_at_once_pushes_nothing_out() -> None:
    world = World()
    world.calibration.report(A, URL, 1, EngineMetrics(capacity_tokens=4000, block_tokens=16))
    other = [500 + block for block in range(40)]
    world.served(other, 0, 5.0)
    ask_at_once(world, 30)
    world.calibration.tick(60.0)
    assert world.depth(other, 60.0) == 640


def test_prompts_of_peers_push_out_too() -> None:
    world = World()
    now = press(world, 10_000, 200)
    names = [10**6 + block for block in range(10)]
    world.served(names, 0, now)
    for number in range(60):
        chain = [(16 * (block + 1), 10**7 + 100 * number + block, 0) for block in range(40)]
        world.router.routes.learn(chain[::-1], A, 1, Trust.REMOTE, now + 1 + number)
    world.calibration.tick(now + 62)
    assert world.depth(names, now + 62) == 0
    assert world.depth([10**7 + 100 * 59 + block for block in range(40)], now + 62) == 640


@pytest.mark.parametrize("restarted", [False, True])
def test_prompts_of_peers_push_out_before_we_send_a_request_there(restarted: bool) -> None:
    """They are the only ones that used it so far, or its new process."""
    world = World()
    if restarted:
        world.served([1, 2, 3], 0, 5.0)
        world.router.registry.changes.restart(world.router.registry[A], "test", 8.0)
    generation = world.router.registry[A].generation
    for number in range(8):
        chain = [(16 * (block + 1), number * 100 + block + 10, 0) for block in range(40)]
        world.router.routes.learn(chain[::-1], A, generation, Trust.REMOTE, 10.0 + 2 * number)
    world.calibration.report(A, URL, generation, EngineMetrics(capacity_tokens=2000, block_tokens=16))
    world.calibration.tick(26.0)
    assert world.depth([block + 10 for block in range(40)], 26.0) == 0
    assert world.depth([700 + block + 10 for block in range(40)], 26.0) == 640


def test_the_capacity_that_an_engine_reports_limits_what_is_believed_at_once() -> None:
    world = World()
    world.calibration.report(A, URL, 1, EngineMetrics(capacity_tokens=2000, block_tokens=16))
    for number in range(8):
        world.served([number * 100 + block + 1 for block in range(40)], 0, 10.0 + 2 * number)
    world.calibration.tick(world.now)
    assert world.depth([block + 1 for block in range(40)], 30.0) == 0
    assert world.depth([700 + block + 1 for block in range(40)], 30.0) == 640


def test_a_bias_is_reported_once_when_it_appears_and_once_when_it_goes() -> None:
    world = World()
    changes = []
    for number in range(40):
        world.served([number + 1, number + 100], None, 10.0 + number)
        changes += world.calibration.tick(world.now)
    assert [(change.bias, change.appeared) for change in changes] == [(Bias.NO_COUNTS, True)]
    for number in range(200):
        world.served([number + 1000, number + 3000], 0, 60.0 + number)
        changes += world.calibration.tick(world.now)
    assert [(change.bias, change.appeared) for change in changes[1:]] == [(Bias.NO_COUNTS, False)]


def test_an_engine_that_gave_a_count_once_means_zero_where_it_gives_none() -> None:
    """vLLM leaves cached tokens out where there are none."""
    world = World()
    world.served([1, 2], 0, 10.0)
    world.served([1, 2], 32, 11.0)
    world.served([3, 4], None, 12.0)
    assert world.view.counters.answers == 3
    assert world.view.counters.answers_silent == 0


@pytest.mark.parametrize("count", [None, 0])
def test_what_an_engine_counts_for_one_api_proves_nothing_of_its_silence_or_zeros_in_another(count: int | None) -> None:
    """vLLM 0.32 always counts in /v1/responses and in chats only if told to; SGLang counts in /generate, and writes 0
    in /v1/responses without its cache report."""
    world = World()
    world.api = "responses"
    world.reuses_what_it_served()
    world.api = "chat"
    for now in (12.0, 13.0, 14.0):
        world.served([1, 2, 3, 4], count, now)
        world.served([5, 6, 7, 8], count, now)
    assert (world.depth([1, 2, 3, 4], 15.0), world.depth([5, 6, 7, 8], 15.0)) == (64, 64)
    assert (world.view.counters.refuted, world.calibration.counters.withdrawn) == (0, 0)
    assert world.view.capacity_learned_tokens is None
    world.served([1, 2, 3, 4], 64, 16.0)
    world.served([5, 6, 7, 8], count, 17.0)
    assert world.view.counters.refuted == 1, "it counts there, too"


def test_an_engine_with_events_is_not_contradicted_by_an_api_in_which_it_counts_nothing() -> None:
    hits: list[BackendId] = []
    world = World(estimated=lambda _: False, contradicted=hits.append)
    world.api = "generate"
    world.reuses_what_it_served()
    world.api = "chat"
    for now in (12.0, 13.0, 14.0):
        world.served([1, 2, 3, 4], None, now)
    assert hits == []


def test_an_engine_that_never_reports_a_hit_reports_nothing() -> None:
    """There are engines whose count is always 0: their chats would be sent away from what they hold."""
    world, changes = World(), []
    for turn in range(1, 40):
        for number in range(4):
            chat = [1000 * number + block + 1 for block in range(2 * turn)]
            attempt = world.served(chat, 0, 10.0 + 4 * turn + number)
            assert attempt.decision.matched_tokens == (turn - 1) * 2 * BLOCK
        changes += world.calibration.tick(12.0 + 4 * turn)
    view = world.view
    assert (view.capacity_learned_tokens, view.counters.refuted, view.counters.predicted_tokens) == (None, 0, 0)
    assert (view.counters.answers, view.counters.answers_silent) == (4, 4 * 38)
    assert [change.bias for change in changes] == [Bias.NO_REUSE], "named, for it may have no prefix cache"


def test_zeros_count_from_the_first_hit_of_a_process_on() -> None:
    world = World()
    for now in (10.0, 11.0):
        world.served([1, 2, 3, 4], 0, now)
    assert world.view.counters.refuted == 0
    world.served([1, 2, 3, 4], 64, 12.0)
    world.served([1, 2, 3, 4], 0, 13.0)
    assert world.view.counters.refuted == 1
    world.router.registry.changes.restart(world.router.registry[A], "test", 14.0)
    for now in (15.0, 16.0):
        world.served([1, 2, 3, 4], 0, now)
    assert world.view.counters.refuted == 1


def test_what_an_engine_without_counts_seems_to_compute_teaches_no_service_rate() -> None:
    """By its zeros it would compute whole prompts in the time that their last turns take."""
    world = World()
    learned: list[int] = []
    world.router.policy.learner = ServiceLearner(learned)
    for cached in (0, 0, 64, 0):
        world.served([1, 2, 3, 4], cached, 10.0)
    assert learned == [5, 69]


@pytest.mark.parametrize(("prompt_tokens", "cached"), [(69, 10**18), (2**31 - 1, 16)])
def test_an_absurd_count_teaches_no_absurd_service_rate(prompt_tokens: int, cached: int) -> None:
    """One line of all engines is learned: it would be wrong for all."""
    world = World()
    learned: list[int] = []
    world.router.policy.learner = ServiceLearner(learned)
    world.served([1, 2, 3, 4], 64, 10.0)
    world.answer(world.start_attempt([1, 2, 3, 4], 11.0), cached, 11.5, prompt_tokens=prompt_tokens)
    assert 0 <= learned[-1] <= 69


def test_the_counts_of_an_answer_to_several_prompts_are_not_compared_with_the_first() -> None:
    """vLLM gives the sum of their tokens, and the cached ones of the last."""
    world = World()
    learned: list[int] = []
    world.reuses_what_it_served()
    world.router.policy.learner = ServiceLearner(learned)
    attempt = world.start_attempt([1, 2, 3, 4], 12.0)
    attempt.prompt.counts_differ = True
    world.answer(attempt, 0, 12.1, prompt_tokens=69 + 69)
    assert world.depth([1, 2, 3, 4], 13.0) == 64
    assert (world.view.counters.refuted, world.view.precision, world.view.counters.answers, learned) == (0, 1.0, 2, [])


@pytest.mark.parametrize(
    "names",
    [
        {"response_key": 7},
        {
            "body": b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"https://a/b.png"}}]}]}'
        },
        {"body": b'{"input":[{"role":"user","content":[{"type":"input_image","image_url":"https://a/b.png"}]}]}'},
        {"body": b'{"messages":[{"content":[{"type":"image","source":{"type":"url","url":"https://a/b.png"}}]}]}'},
    ],
)
def test_a_body_that_only_names_a_stored_response_or_media_may_make_the_engine_compute_more_than_it_has(
    names: dict[str, Any],
) -> None:
    world = World()
    learned: list[int] = []
    world.router.policy.learner = ServiceLearner(learned)
    world.served([1, 2, 3, 4], 64, 10.0)
    attempt = world.start_attempt([1, 2, 3, 4], 11.0)
    attempt.prompt = replace(attempt.prompt, **names)
    world.answer(attempt, 16, 11.5, prompt_tokens=50_016)
    assert learned[-1] == 50_000


def test_another_template_is_named_by_the_engines_own_count() -> None:
    world, rng = World(), Random(1)
    for number in range(60):
        attempt = world.start_attempt([number + 1, number + 100], 10.0 + number)
        world.answer(attempt, 0, 10.5 + number, prompt_tokens=32 + rng.choice((3, 50, 9, 14, 33, -7)))
    [change] = world.calibration.tick(world.now)
    assert change.bias is Bias.TEMPLATE


def test_a_restart_forgets_what_was_there_and_not_how_large_it_is() -> None:
    world = World()
    now = press(world, 10_000, 300)
    learned = world.view.capacity_learned_tokens
    world.router.registry.changes.restart(world.router.registry[A], "test", now)
    world.served([1, 2, 3], 0, now + 1)
    world.calibration.tick(world.now)
    assert world.view.capacity_learned_tokens == pytest.approx(learned, rel=0.3)
    assert world.depth([1, 2, 3], now + 2) == 48


def test_attempts_without_an_answer_leave_nothing_behind() -> None:
    world = World()
    for second in range(seconds := 100):
        for number in range(SAMPLES_PER_S_MAX + 5):
            attempt = world.start_attempt([number + 1, number + 100], float(second))
            world.router.finish_attempt(attempt, Outcome.BROKEN if number % 2 else Outcome.SUCCESS, float(second))
    counts = world.calibration.counters
    assert counts.sampled == seconds * SAMPLES_PER_S_MAX
    assert counts.skipped == 5 * seconds
    assert not world.calibration.running


def test_a_removed_backend_is_forgotten() -> None:
    world = World()
    press(world, 5_000, 100)
    world.calibration.forget(A)
    assert world.calibration.backends() == {}
    assert world.depth([1, 2], 1e3) == 32
