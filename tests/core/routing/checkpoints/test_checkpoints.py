"""R2 to R5, and R7a: what a hybrid model's backend is credited with, and how a router learns that."""

from __future__ import annotations

import pytest

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.engine_cache.states import StateMoved
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.routing.checkpoints.cache_profile import ATTENTION, STEPS_SEEN, profile_named
from ranvier_py.core.routing.checkpoints.checkpoints import ALARM_ANSWERS, HALF_LIFE, Confidence
from ranvier_py.core.routing.peers.route_updates import CHECKPOINTS, ProcessUpdate, encode_process
from ranvier_py.core.routing.placement.policies import POLICIES, make_policy
from ranvier_py.core.routing.route_table import Trust
from tests.core.routing.checkpoints.hybrid_router import chain, credit, hybrid_router, prompt_of, send, serve

SYSTEM, QUESTION, ANSWER, NEXT = ("system", 1600), ("question", 200), ("answer", 300), ("next", 40)


def test_the_credit_is_the_deepest_checkpoint_and_not_the_floor_of_what_is_held() -> None:
    router = hybrid_router("vllm-dense:528")
    serve(router, [SYSTEM, QUESTION], ANSWER, cached=0)
    assert credit(router, SYSTEM, QUESTION, ANSWER, NEXT) == (2096, 1584)  # both ends round to 1584; 2100 is held
    assert credit(router, SYSTEM, ("other", 500)) == (1600, 1584)
    assert credit(router, ("other", 500)) == (0, 0)


def test_a_checkpoint_behind_what_is_held_or_at_the_last_token_earns_nothing() -> None:
    router = hybrid_router("vllm-dense:528")
    serve(router, [("system", 400), ("question", 700)], ("answer", 4), cached=0)
    assert credit(router, ("system", 400), ("other", 700)) == (400, 0)
    exact = hybrid_router("sglang-no-buffer")
    serve(exact, [SYSTEM, QUESTION], ANSWER, cached=0)
    assert credit(exact, SYSTEM, QUESTION) == (1792, 0)  # its end is its own last token
    assert credit(exact, SYSTEM, QUESTION, ANSWER, NEXT) == (2096, 2099)  # one before the last of the answer


@pytest.mark.parametrize(("beyond", "at_once"), [(-4, 0), (4, 1584), (-40, 1056)])
def test_a_prompt_that_may_end_a_step_further_on_is_learned_by_its_answers_count(beyond: int, at_once: int) -> None:
    """By 4 tokens of a generation prompt, which only the engine counts."""
    router = hybrid_router("vllm-align:528")
    asked, answer = [("system", 1100), ("question", 484 + beyond)], ("answer", 60)
    attempt = send(router, *asked)
    router.first_token(attempt, 0.0)
    assert credit(router, *asked, answer, NEXT)[1] == at_once
    count = attempt.prompt.end.length + 4 + 1
    router.answered(attempt, chain(*asked, answer), Answer(prompt_tokens=count, cached_tokens=0), 0.0)
    assert credit(router, *asked, answer, NEXT)[1] == count // 528 * 528
    assert credit(router, asked[0], ("other", 500))[1] == (1056 if count < 1584 else 0), "none was left before"


def test_a_message_boundary_is_matched_and_earns_nothing_where_no_checkpoint_is() -> None:
    router = hybrid_router("vllm-dense:528")
    messages = [("a", 256), ("b", 50), ("c", 100)]
    serve(router, messages, ("answer", 40), cached=0)
    assert credit(router, *messages, ("answer", 40), NEXT) == (432, 0)


def test_a_junction_is_credited_from_the_third_occurrence() -> None:
    router = hybrid_router("vllm-dense:528")
    serve(router, [SYSTEM, ("one", 600)], ("a1", 20), cached=0)
    assert credit(router, SYSTEM, ("two", 600)) == (1600, 0)
    serve(router, [SYSTEM, ("two", 600)], ("a2", 20), cached=0)
    assert credit(router, SYSTEM, ("three", 600)) == (1600, 1584)
    plain = hybrid_router("sglang-no-buffer")
    for number in range(4):
        serve(plain, [SYSTEM, (f"{number}", 600)], ("a", 20), cached=0)
    assert credit(plain, SYSTEM, ("another", 600)) == (1600, 0)


def test_the_second_request_goes_where_it_leaves_a_junction_for_the_third() -> None:
    """R4: three requests that share 1,600 tokens, four backends."""
    router = hybrid_router("vllm-dense:528", backends=4)
    first, second = (serve(router, [SYSTEM, (name, 600)], ("a", 20), cached=0) for name in ("one", "two"))
    third = send(router, SYSTEM, ("three", 600))
    assert first.target.id == second.target.id == third.target.id
    assert (second.decision.matched_tokens, third.decision.matched_tokens) == (0, 1584)


@pytest.mark.parametrize("profile", ["attention", "marconi"])
def test_whether_others_go_on_from_a_prefix_is_asked_of_what_is_held_and_not_of_its_worth(profile: str) -> None:
    """Where little of it is worth anything, too: a prompt behind a shared opening is no chat of its holder's own."""
    router = hybrid_router(profile, backends=4)
    serve(router, [("opening", 48), ("one", 600)], ("a", 20), cached=0)
    for number in range(4):
        send(router, ("opening", 48), ("one", 600), ("a", 20), (f"{number}", 40))
    assert send(router, ("opening", 48), ("two", 600)).decision.reason == "common"


def test_where_every_block_has_a_checkpoint_none_is_worth_waiting_for() -> None:
    """What was computed has it already, or gave it up, and would again."""
    worth = {}
    for profile in ("vllm-dense:528", "vllm-all:528"):
        router = hybrid_router(profile)
        serve(router, [SYSTEM, ("one", 600)], ("a", 20), cached=0)
        own = router.checkpoints.known[BackendId(0)]
        own.index.clear()
        keys = list(prompt_of(SYSTEM, ("two", 600)).end.chain())
        worth[profile] = own.credit(keys, 1600, 2199, own.generation, 0.0, guessed=False).worth
    assert worth["vllm-dense:528"] > worth["vllm-all:528"] == 0


def test_it_is_learned_after_how_many_others_an_engine_gives_a_state_up() -> None:
    """An engine that keeps some ten states: SGLang gives them up without a message."""
    router = hybrid_router("sglang-no-buffer")

    def first_turn(chat: int, now: float) -> None:
        serve(router, [(f"{chat}", 600)], ("a", 20), now=now, cached=0)

    def next_turn(chat: int) -> tuple[tuple[str, int], ...]:
        return (f"{chat}", 600), ("a", 20), NEXT

    for chat in range(30):
        first_turn(chat, float(chat))
    assert credit(router, *next_turn(1), now=30.0) == (608, 619), "nothing is known yet"
    for chat in range(30, 50):
        first_turn(chat, float(chat))
        serve(router, next_turn(chat - 3), ("b", 20), now=float(chat), cached=619)
        serve(router, next_turn(chat - 29), ("b", 20), now=float(chat), cached=0)
    assert credit(router, *next_turn(48), now=50.0) == (608, 619)
    assert credit(router, *next_turn(25), now=50.0) == (608, 0)
    found = router.find(prompt_of(*next_turn(25)), 50.0)
    assert [holder.backend for holder in found.holders] == [0], "it leaves a state where the next turn goes as well"


def test_an_api_in_which_an_engine_counts_nothing_refutes_nothing() -> None:
    router = hybrid_router("vllm-dense:528")
    serve(router, [SYSTEM, QUESTION], ANSWER, cached=0)
    for cached in (None, 0):
        serve(router, [SYSTEM, QUESTION, ANSWER, NEXT], ("a", 20), cached=cached, api="completion")
        assert credit(router, SYSTEM, ("other", 500)) == (1600, 1584)
    serve(router, [SYSTEM, QUESTION, ANSWER, NEXT], ("a", 20))
    assert credit(router, SYSTEM, ("other", 500)) == (1600, 0), "in chats it has counted before"


def test_the_counts_of_an_answer_to_several_prompts_refute_nothing() -> None:
    router = hybrid_router("vllm-dense:528")
    serve(router, [SYSTEM, QUESTION], ANSWER, cached=0)
    attempt = send(router, SYSTEM, QUESTION, ANSWER, NEXT)
    attempt.prompt.counts_differ = True
    router.answered(attempt, attempt.prompt.end, Answer(prompt_tokens=4280, cached_tokens=0), 1.0)
    assert credit(router, SYSTEM, ("other", 500)) == (1600, 1584)


def test_a_position_that_does_not_fit_what_peers_get_is_not_noted() -> None:
    router = hybrid_router("vllm-dense:528")
    router.checkpoints.collect(router.routes.rows.index)
    serve(router, [SYSTEM, QUESTION], ANSWER, cached=16)
    serve(router, [SYSTEM, QUESTION, ANSWER, NEXT], ("a", 20), cached=2**33)
    marks = [(mark.name, mark.position, mark.mark, 0) for mark in router.checkpoints.new.taken()]
    assert marks
    encode_process(ProcessUpdate(CHECKPOINTS, (1, 1), list(zip(*marks, strict=True))))


def test_an_answer_proves_its_position_and_refutes_what_lies_behind() -> None:
    router = hybrid_router("sglang-no-buffer")
    turns = [SYSTEM, QUESTION, ANSWER, NEXT]
    serve(router, turns[:2], ANSWER, cached=0)
    assert credit(router, *turns) == (2096, 2099)
    serve(router, turns, ("a2", 50), cached=1234)
    branch = (SYSTEM, QUESTION, ANSWER, ("elsewhere", 9))
    assert credit(router, *branch) == (2096, 1234)  # the state at 2,099 was given up, the keys and values were not
    router = hybrid_router("sglang-no-buffer")
    serve(router, turns[:2], ANSWER, cached=0)
    serve(router, turns, ("a2", 50), cached=0)
    assert credit(router, *branch) == (2096, 0)


def test_what_an_answer_proves_in_mid_message_is_credited_to_whoever_parts_at_the_same_place() -> None:
    router = hybrid_router("sglang-extra-buffer")
    document = ("document", 900)
    for number, cached in enumerate((0, 0, 896)):
        serve(router, [document, (f"q{number}", 300)], ("a", 20), cached=cached)
    assert credit(router, document, ("q3", 300))[1] == 896
    assert credit(router, document, ("q3", 300), now=601.0)[1] == 0


def test_silent_evictions_age_by_a_time_of_their_own() -> None:
    router = hybrid_router("vllm-dense:528")
    serve(router, [SYSTEM, QUESTION], ANSWER, cached=0)
    assert credit(router, SYSTEM, QUESTION, ANSWER, NEXT, now=599.0)[1] == 1584
    assert credit(router, SYSTEM, QUESTION, ANSWER, NEXT, now=601.0) == (2096, 0)  # the route lives for an hour
    serve(router, [SYSTEM, QUESTION, ANSWER, NEXT], ("a2", 9), now=300.0, cached=1584)
    assert credit(router, SYSTEM, QUESTION, ANSWER, ("elsewhere", 40), now=899.0) == (2096, 1584)


def test_a_state_ahead_of_all_that_events_know_is_credited_to_the_prompts_that_left_it() -> None:
    """An engine of long blocks, whose events know no prefix between the last whole block and the end of a prompt."""
    router = hybrid_router("vllm-align:528")
    checkpoints, backend = router.checkpoints, router.registry[BackendId(0)]
    checkpoints.states_known(backend.id, backend.generation, list, 0.0)
    document, turns = ("document", 1040), [("document", 1040), ("question", 60)]
    anchor = next(key for key in chain(document).chain() if key[0] == 1024)
    serve(router, turns, ("answer", 20), cached=0)
    assert credit(router, *turns, ("answer", 20), NEXT)[1] == 0, "no event told of it"
    ahead = StateMoved(Fingerprint(anchor[1]), 1056, present=True, ahead=True)
    checkpoints.states_changed(backend.id, backend.generation, [ahead], 0.0)
    assert credit(router, *turns, ("answer", 20), NEXT) == (1120, 1056)
    assert credit(router, document, ("other", 60)) == (1040, 0), "it parts before"
    checkpoints.states_changed(backend.id, backend.generation, [ahead._replace(present=False)], 1.0)
    assert credit(router, *turns, ("answer", 20), NEXT)[1] == 0, "it is gone"


def test_what_lies_ahead_is_another_prompts_where_an_answer_was_cached_to_less() -> None:
    router = hybrid_router("vllm-align:528")
    checkpoints, backend = router.checkpoints, router.registry[BackendId(0)]
    checkpoints.states_known(backend.id, backend.generation, list, 0.0)
    turns = [("document", 1040), ("question", 60), ("answer", 20), NEXT]
    anchor = next(key for key in chain(turns[0]).chain() if key[0] == 1024)
    serve(router, turns[:2], turns[2], cached=0)
    checkpoints.states_changed(backend.id, backend.generation, [(anchor[1], 1056, True, True)], 0.0)
    serve(router, turns, ("more", 20), cached=0)
    assert credit(router, *turns[:3], ("elsewhere", 40))[1] == 0


def test_what_another_node_tokenized_and_served_is_credited_to_a_prompt_of_which_this_one_knows_texts() -> None:
    """Turns of a chat that come by several nodes, each of which has the engine's events."""
    served, here = hybrid_router("vllm-align:528"), hybrid_router("vllm-align:528")
    turns = [("document", 1040), ("question", 60), ("answer", 20)]
    anchor = next(key for key in chain(turns[0]).chain() if key[0] == 1024)
    for router in (served, here):
        router.holders.texts_match = True
        backend = router.registry[BackendId(0)]
        router.checkpoints.states_known(backend.id, backend.generation, list, 0.0)
        router.checkpoints.states_changed(backend.id, backend.generation, [(anchor[1], 1056, True, True)], 0.0)
    served.checkpoints.collect(served.routes.rows.index)
    serve(served, turns[:2], turns[2], cached=0)
    marks = [mark[2:] for mark in served.checkpoints.new.taken()]
    prompt = prompt_of(*turns, NEXT, tokenized=False)
    assert here.find(prompt, 0.0).credit == {}, "nobody told of it"
    here.routes.learn(chain(*turns).chain(), backend.id, backend.generation, Trust.REMOTE, 0.0)
    assert here.find(prompt, 0.0).credit[backend.id].tokens == 0, "it is known of whom, but not what he left"
    here.checkpoints.take(backend.id, backend.generation, marks)
    assert here.find(prompt, 0.0).credit[backend.id].tokens == 1056


def test_another_time_to_live_counts_at_once() -> None:
    router = hybrid_router("vllm-dense:528")
    serve(router, [SYSTEM, QUESTION], ANSWER, cached=0)
    router.checkpoints.ttl_s = 50.0
    assert credit(router, SYSTEM, QUESTION, ANSWER, NEXT, now=49.0)[1] == 1584
    assert credit(router, SYSTEM, QUESTION, ANSWER, NEXT, now=51.0)[1] == 0


def test_an_explanation_has_the_credit_beside_what_is_held_and_changes_nothing() -> None:
    router = hybrid_router("vllm-dense:528", backends=2)
    served = serve(router, [SYSTEM, QUESTION], ANSWER, cached=0)
    before = [repr(vars(own.index)) for own in router.checkpoints.known.values()]
    asked = prompt_of(SYSTEM, QUESTION, ANSWER, NEXT)
    explained = router.explain(asked, 1.0)
    views = {view["backend"]: view for view in explained["candidates"]}
    held = views[router.registry[served.target.id].name]
    assert (held["matched_tokens"], held["credit_tokens"]) == (2096, 1584)
    assert explained["matched_tokens"] == 1584
    assert [view.get("credit_tokens") for view in views.values() if view is not held] == [None]
    assert [repr(vars(own.index)) for own in router.checkpoints.known.values()] == before


def test_a_new_process_begins_without_checkpoints() -> None:
    router = hybrid_router("vllm-dense:528")
    serve(router, [SYSTEM, QUESTION], ANSWER, cached=0)
    backend = router.registry[BackendId(0)]
    router.registry.changes.restart_reported(backend, 0.0, 1.0, "test")
    router.routes.learn(
        prompt_of(SYSTEM, QUESTION).end.chain(),
        backend.id,
        backend.generation,
        2,
        2.0,  # type: ignore[arg-type]
    )
    assert credit(router, SYSTEM, QUESTION, ANSWER, now=2.0) == (1792, 0)


def test_checkpoints_of_the_process_before_do_not_show_how_many_a_new_one_keeps() -> None:
    """Peers know what it holds before it has answered here."""
    router = hybrid_router("sglang-no-buffer")
    serve(router, [SYSTEM, QUESTION], ANSWER, cached=0)
    backend, turns = router.registry[BackendId(0)], (SYSTEM, QUESTION, ANSWER, NEXT)
    router.registry.changes.restart_reported(backend, 0.0, 1.0, "test")
    router.routes.learn(chain(*turns[:3]).chain(), backend.id, backend.generation, Trust.REMOTE, 2.0)
    assert send(router, *turns, now=3.0).checkpoint is None


def test_a_checkpoint_that_events_have_not_is_worth_nothing_though_others_were_given_up() -> None:
    router = hybrid_router("sglang-no-buffer")
    serve(router, [SYSTEM, QUESTION], ANSWER, cached=0)
    own, backend = router.checkpoints.known[BackendId(0)], router.registry[BackendId(0)]
    for _ in range(3):
        own.was_kept(0.0, is_kept=False)
    router.checkpoints.states_known(backend.id, backend.generation, list, 1.0)
    keys = list(chain(SYSTEM, QUESTION, ANSWER, NEXT).chain())
    assert own.credit(keys, 2096, 2139, own.generation, 1.0, guessed=False).worth == 0


def test_confidence_fades_by_half_in_200_answers_and_alarms_below_a_half() -> None:
    confidence = Confidence()
    assert (confidence.value, confidence.doubt) == (1.0, 0.0)
    for _ in range(ALARM_ANSWERS):
        confidence.add(0, 1000)
    assert confidence.doubt > 1
    low = confidence.value
    for _ in range(int(HALF_LIFE)):
        confidence.add(1000, 1000)
    assert confidence.doubt < 1
    settled = Confidence()
    for _ in range(5000):
        settled.add(0, 10)
    for _ in range(int(HALF_LIFE)):
        settled.add(10, 10)
    assert settled.value == pytest.approx(0.5, abs=0.01)
    assert low < 0.5


def test_a_wrong_profile_is_found_out_by_the_counts_of_its_answers() -> None:
    """An engine without junctions, believed to have them."""
    router = hybrid_router("sglang-extra-buffer")
    for number in range(100):
        serve(router, [SYSTEM, (f"{number}", 600)], ("a", 20), now=float(number), cached=0)
    own = router.checkpoints.known[BackendId(0)]
    assert own.confidence.doubt > 1
    assert own.index.counters.refuted > 0


@pytest.mark.parametrize("policy", [name for name in POLICIES if make_policy(name).depths_wanted])
def test_every_policy_takes_the_credit_as_tokens_saved(policy: str) -> None:
    """R7a: of two backends with equal keys and values, that with the checkpoint; a request is predicted by it."""
    router = hybrid_router("vllm-dense:528", backends=2, policy=policy)
    end = [SYSTEM, ("one", 600), ("a", 200)]
    for number in (0, 1):
        backend = router.registry[BackendId(number)]
        router.routes.learn(prompt_of(*end).end.chain(), backend.id, backend.generation, 2, 0.0)  # type: ignore[arg-type]
    own = router.checkpoints.known[BackendId(1)]
    own.begin(router.registry[BackendId(1)].generation)
    keys = list(prompt_of(*end).end.chain())
    own.index.learn(keys, [(2112, 3)], 0.0)
    found = router.find(prompt_of(*end, NEXT), 1.0)
    assert [(holder.backend, holder.tokens) for holder in found.holders if holder.tokens > 1000] == [(1, 2112)]
    decision = router.place(prompt_of(*end, NEXT), found)
    credited = found.credit[decision.backend]
    assert decision.matched_tokens == credited.tokens


def test_attention_backends_are_found_as_before() -> None:
    plain, beside = hybrid_router("attention", backends=2), hybrid_router("attention", backends=2)
    for router in (plain, beside):
        for number in range(20):
            serve(router, [SYSTEM, (f"{number % 7}", 600)], ("a", 20), now=float(number), cached=1600)
    assert not plain.checkpoints.known
    assert plain.observers == (), "nobody is notified of their requests"
    asked = prompt_of(SYSTEM, ("3", 600), ("a", 20), NEXT)
    beside.checkpoints.set_profile(BackendId(7), profile_named("vllm-align"))  # of another model
    one, two = (router.find(asked, 30.0) for router in (plain, beside))
    assert one.holders[0] == two.holders[0]
    assert plain.place(asked, one) == beside.place(asked, two)
    assert one.credit == two.credit == {}


def test_a_profile_that_changes_begins_anew() -> None:
    router = hybrid_router("vllm-dense:528")
    serve(router, [SYSTEM, QUESTION], ANSWER, cached=0)
    checkpoints = router.checkpoints
    assert not checkpoints.set_profile(BackendId(0), profile_named("vllm-dense:528"))
    assert credit(router, SYSTEM, QUESTION, ANSWER, NEXT)[1] == 1584
    assert checkpoints.set_profile(BackendId(0), profile_named("vllm-dense:672"))
    assert credit(router, SYSTEM, QUESTION, ANSWER, NEXT)[1] == 0
    assert checkpoints.set_profile(BackendId(0), ATTENTION)
    assert credit(router, SYSTEM, QUESTION, ANSWER, NEXT) == (0, 0)
    assert router.find(prompt_of(SYSTEM, QUESTION, ANSWER), 1.0).holders[0].tokens == 2096


def test_chats_behind_one_system_prompt_show_no_step() -> None:
    """All of them have the same count. Taken for a step, it would be another profile, and void what is known."""
    router = hybrid_router("vllm-align:528")
    own = router.checkpoints.known[BackendId(0)]
    for number in range(STEPS_SEEN + 4):
        serve(router, [("system", 1600), (f"question {number}", 300)], ("answer", 4), cached=1584)
    assert own.step_tokens == 0
    for blocks in (1, 2, 5):
        serve(router, [("system", 1600), ("long", 4000)], ("answer", 4), cached=528 * blocks)
    assert own.step_tokens == 528
