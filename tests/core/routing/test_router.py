"""The Router learns what was proved, for who proved it, and forgets what failed."""

import json
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from ranvier_py.core.answers.answer_stream import NOTHING, Answer
from ranvier_py.core.errors import NoBackend
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import values
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher
from ranvier_py.core.prompts.prompt import PrefixKey, PromptMemory
from ranvier_py.core.prompts.request_body import PromptReader
from ranvier_py.core.routing.attempt import Notices, Observer
from ranvier_py.core.routing.backends import BackendLimits, Outcome, Registry
from ranvier_py.core.routing.placement import Candidate, Choice, Holder, Match
from ranvier_py.core.routing.placement.affinity import Affinity
from ranvier_py.core.routing.placement.policies import make_policy
from ranvier_py.core.routing.request_paths import CHAT_PATH, COMPLETION_PATH
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.routing.router import Attempt, Router
from tests.builders.route_tables import route_table

KEY = b"k" * 32


def make_router(backends: int = 4, *, texts_match: bool = True, seed: int = 1, policy: str = "affinity") -> Router:
    registry = Registry(BackendLimits())
    for number in range(backends):
        registry.add(f"http://10.0.0.{number + 1}:8000")
    hasher = TokenHasher(KEY)
    memory = PromptMemory()
    reader = PromptReader(TextHasher(KEY), hasher, memory, identity="t", bytes_per_token=4.0, digest_seed=3)
    return Router(
        reader=reader,
        hasher=hasher,
        routes=route_table(),
        registry=registry,
        policy=make_policy(policy),
        rng=Random(seed),
        texts_match=texts_match,
    )


def chat(*contents: str, system: str = "You are an assistant. " * 20) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}]
    messages += [{"role": roles[i % 2], "content": content * 20} for i, content in enumerate(contents)]
    return json.dumps({"messages": messages, "model": "m"}).encode()


def streamed(body: bytes) -> bytes:
    return body[:-1] + b', "stream": true}'


def start_attempt(router: Router, body: bytes, now: float = 0.0, path: bytes = CHAT_PATH) -> Attempt:
    prompt = router.read(path, body)
    return router.start_attempt(prompt, router.place(prompt, router.find(prompt, now)), now)


def serve(router: Router, body: bytes, now: float = 0.0) -> Attempt:
    attempt = start_attempt(router, body, now)
    router.first_token(attempt, now)
    router.finish_attempt(attempt, Outcome.SUCCESS, now)
    return attempt


def test_the_next_turn_goes_where_the_last_one_was_served() -> None:
    router = make_router()
    first = serve(router, chat("one"))
    second = start_attempt(router, chat("one", "answer", "two"))
    assert second.target.id == first.target.id
    assert second.decision.reason == "affinity"
    assert second.decision.matched_tokens == first.prompt.tokens > 0
    assert second.decision.source == "text"


def test_no_more_is_predicted_than_the_prompt_has() -> None:
    """Where later turns leave something out, a route may be deeper than a longer prompt."""
    router = make_router()
    prompt = router.read(CHAT_PATH, chat("one"))
    found = router.find(prompt, 0.0)
    holder = Holder(found.pool.ids[0], prompt.tokens + 64, Trust.LOCAL)
    decision = router.place(prompt, found._replace(holders=[holder], source="text"))
    assert decision.matched_tokens == prompt.tokens


def messages(*sizes: tuple[str, int]) -> bytes:
    """A chat of these roles and characters, of which four make a token."""
    made = [{"role": role, "content": f"{size} {role} ".ljust(size, "x")} for role, size in sizes]
    return json.dumps({"messages": made, "model": "m"}).encode()


@pytest.mark.parametrize("seed", range(4))
def test_a_chat_without_a_system_prompt_goes_on_where_less_than_half_of_it_is_held(seed: int) -> None:
    router, first, new = make_router(seed=seed), ("user", 19_776 + seed), (("assistant", 400), ("user", 20_000))
    held = serve(router, messages(first))
    attempt = start_attempt(router, messages(first, *new), 1.0)
    assert attempt.decision.matched_tokens == pytest.approx(4944, abs=32)
    assert attempt.decision.prompt_tokens > 2 * attempt.decision.matched_tokens
    assert (attempt.target.id, attempt.decision.reason) == (held.target.id, "affinity")


@pytest.mark.parametrize("seed", range(4))
def test_less_than_half_of_a_prompt_that_chats_share_is_followed_to_a_holder_that_is_idle(seed: int) -> None:
    router, shared = make_router(seed=seed), ("system", 1024)
    held = serve(router, messages(shared, ("user", 400 + seed)))
    attempt = start_attempt(router, messages(shared, ("user", 1376)), 1.0)
    assert attempt.decision.matched_tokens == pytest.approx(256, abs=32)
    assert (attempt.target.id, attempt.decision.reason) == (held.target.id, "affinity")


class Asking(Affinity):
    """Asks for more holders each time."""

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        self.asked = match.more_holders()
        return super().choose(match, candidates, rng)


@pytest.mark.parametrize("seed", range(8))
def test_who_else_holds_some_of_a_prompt_is_what_a_walk_of_all_of_it_finds(seed: int) -> None:
    router, rng = make_router(3), Random(seed)
    router.policy = asking = Asking()
    for _ in range(40):
        body = chat(*(rng.choice("ab") for _ in range(rng.randrange(1, 5))), system=rng.choice("xyz") * 400)
        prompt = router.read(CHAT_PATH, body)
        found = router.find(prompt, 0.0)
        router.place(prompt, found)
        if found.holders:
            assert asking.asked == router.routes.match(
                prompt.end.chain(), found.pool.generations, 0.0, wanted=3, touch=False
            )
        router.routes.learn(prompt.end.chain(), BackendId(rng.randrange(3)), 1, Trust.LOCAL, 0.0)


def test_a_history_that_is_known_by_its_texts_alone_is_not_walked_again_for_more_holders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tokens came, and the table has not learned them yet: nobody is found by the first of them."""
    router = make_router(3)
    router.policy = asking = Asking()
    attempt = serve(router, chat("one", "two", "three"))
    prompt = router.read(CHAT_PATH, chat("one", "two", "three", "four", "five"))
    root = prompt.end.root()
    assert root.state is not None
    ends = [200 * number for number in range(1, prompt.end.messages + 1)]
    router.absorb(prompt, root, router.hasher.extend(root.state, np.arange(ends[-1], dtype=np.uint32), ends))
    read: list[PrefixKey] = []
    match = RouteTable.match

    def counted(table: RouteTable, chain: Iterable[PrefixKey], *values: Any, **named: Any) -> list[Holder]:
        keys = list(chain)
        read.extend(keys)
        return match(table, keys, *values, **named)

    found = router.find(prompt, 0.0)
    monkeypatch.setattr(RouteTable, "match", counted)
    router.place(prompt, found)
    assert [holder.backend for holder in asking.asked] == [attempt.target.id]
    assert len(read) == 2


def test_a_prompt_is_placed_by_a_guess_also_where_that_has_failed_meanwhile() -> None:
    router = make_router()
    guessed = start_attempt(router, chat("one"))
    prompt = router.read(CHAT_PATH, chat("two"))
    found = router.find(prompt, 0.0)
    router.finish_attempt(guessed, Outcome.CONNECT_ERROR, 0.0)
    assert router.place(prompt, found).reason in ("affinity", "common")


def test_the_answer_is_learned_too_since_the_next_turn_contains_it() -> None:
    router = make_router()
    first = serve(router, chat("one"))
    answer = Answer({"role": "assistant", "content": "answer" * 20})
    router.learn_tokens(first, first.prompt.end, (), answer, 0.0)
    second = start_attempt(router, chat("one", "answer", "two"))
    assert second.decision.matched_tokens > first.prompt.tokens


def test_a_failed_request_leaves_no_claim_behind() -> None:
    router = make_router()
    attempt = start_attempt(router, chat("one"))
    router.finish_attempt(attempt, Outcome.CONNECT_ERROR, 0.0)
    assert len(router.routes) == 0
    assert len(router.holders.speculation) == 0
    found = router.find(router.read(CHAT_PATH, chat("one")), 0.0)
    assert not found.holders


def test_a_cancelled_request_that_had_no_token_leaves_no_route_and_one_that_had_does() -> None:
    router = make_router()
    router.finish_attempt(start_attempt(router, chat("one")), Outcome.CANCELLED, 0.0)
    assert len(router.routes) == 0
    attempt = start_attempt(router, chat("one"))
    router.first_token(attempt, 0.0)
    router.finish_attempt(attempt, Outcome.CANCELLED, 0.0)
    assert len(router.routes) > 0


def test_a_burst_of_one_new_prefix_follows_its_first_request_while_that_is_still_in_flight() -> None:
    router = make_router(policy="affinity")
    first = start_attempt(router, chat("one", system="You are an assistant. " * 400))
    second = start_attempt(router, chat("another question", system="You are an assistant. " * 400))
    assert second.target.id == first.target.id
    assert second.decision.matched_tokens > 0


@pytest.mark.parametrize("known", [(), ("one",)], ids=["a cold prompt", "a known chat"])
def test_an_attempt_claims_the_same_whether_or_not_its_prompt_is_walked_again(known: tuple[str, ...]) -> None:
    """What `find` noted on its way is what the next requests of the same burst are looking for."""
    router = make_router()
    if known:
        serve(router, chat(*known))
    prompt = router.read(CHAT_PATH, chat("one", "answer", "two"))
    found = router.find(prompt, 0.0)
    decision = router.place(prompt, found)
    attempts = [router.start_attempt(prompt, decision, 0.0), router.start_attempt(prompt, decision, 0.0, b"", found)]
    claims = [set(attempt.speculation) for attempt in attempts if attempt.speculation]
    assert len(claims) == 2
    assert claims[0] == claims[1]
    texts = {text for tokens, _, text in prompt.end.chain() if tokens > decision.matched_tokens}
    assert claims[0] == texts


def test_an_attempt_to_where_less_is_held_claims_all_that_is_new_there() -> None:
    """A diverted request makes the whole prompt warm at its backend, not only what nobody held."""
    router = make_router(backends=2)
    held = serve(router, chat("one"))
    prompt = router.read(CHAT_PATH, chat("one", "answer", "two"))
    found = router.find(prompt, 0.0)
    diverted = router.place(prompt, found)._replace(backend=BackendId(1 - held.target.id), matched_tokens=0)
    attempt = router.start_attempt(prompt, diverted, 0.0, b"", found)
    assert set(attempt.speculation) == {text for _, _, text in prompt.end.chain()}


class Noting(Observer):
    """An observer that takes notes."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, float]] = []

    def attempt_sent(self, attempt: Attempt, now: float) -> None:
        self.reported.append(("sent", now))

    def finished(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        self.reported.append(("finished", now))


def test_an_event_calls_only_observers_that_do_something_then() -> None:
    router, observer = make_router(), Noting()
    router.observers = (Observer(), observer)
    notices = Notices(router.observers)
    assert (notices.sent, notices.finished) == ([observer.attempt_sent], [observer.finished])
    assert not notices.started
    assert not notices.answered


@pytest.mark.parametrize("announces", [0, 1, 2])
def test_a_quiet_start_is_reported_once_and_before_the_end(announces: int) -> None:
    """Also that of a request which was never sent: an observer that counts attempts would lose one."""
    router, observer = make_router(), Noting()
    router.observers = (observer,)
    prompt = router.read(CHAT_PATH, chat("one"))
    attempt = router.start_attempt(prompt, router.place(prompt, router.find(prompt, 1.0)), 1.0, quiet=True)
    assert not observer.reported
    for _ in range(announces):
        router.announce(attempt)
    router.finish_attempt(attempt, Outcome.SUCCESS, 2.0)
    assert observer.reported == [("sent", 1.0), ("finished", 2.0)]


def test_the_backend_that_served_is_learned_and_not_the_one_that_failed_before() -> None:
    router = make_router()
    prompt = router.read(CHAT_PATH, chat("one"))
    failed = router.start_attempt(prompt, router.place(prompt, router.find(prompt, 0.0)), 0.0)
    router.finish_attempt(failed, Outcome.CONNECT_ERROR, 0.0)
    served = router.start_attempt(prompt, router.place(prompt, router.find(prompt, 0.0, [failed.target.id])), 0.0)
    router.first_token(served, 0.0)
    router.finish_attempt(served, Outcome.SUCCESS, 0.0)
    assert served.target.id != failed.target.id
    assert start_attempt(router, chat("one", "a", "two")).target.id == served.target.id


def test_an_engine_that_restarted_has_lost_its_claims_and_late_route_updates_of_its_old_life() -> None:
    router = make_router(backends=1)
    attempt = serve(router, chat("one"))
    router.registry.changes.restart(router.registry[attempt.target.id], "test", 0.0)
    assert not router.find(router.read(CHAT_PATH, chat("one")), 0.0).holders
    router.learn_tokens(attempt, attempt.prompt.end, (), NOTHING, 0.0)
    assert not router.find(router.read(CHAT_PATH, chat("one")), 0.0).holders


def test_what_an_engine_served_before_it_restarted_is_not_even_written_down() -> None:
    router = make_router(backends=1)
    attempt = start_attempt(router, chat("one"))
    router.registry.changes.restart(router.registry[attempt.target.id], "test", 0.0)
    router.first_token(attempt, 0.0)
    assert len(router.routes) == 0


def test_an_answer_without_a_generated_token_proves_no_prefill() -> None:
    router = make_router(backends=1)
    attempt = start_attempt(router, chat("one"))
    router.learn_tokens(attempt, attempt.prompt.end, (), Answer({"role": "assistant", "content": "x" * 500}), 0.0)
    assert len(router.routes) == 0


def test_a_removed_backend_is_never_chosen_again_and_its_late_route_update_is_ignored() -> None:
    router = make_router(backends=2)
    attempt = serve(router, chat("one"))
    router.registry.remove(router.registry[attempt.target.id].name)
    router.learn_tokens(attempt, attempt.prompt.end, (), NOTHING, 0.0)
    other = start_attempt(router, chat("one"))
    assert other.target.id != attempt.target.id


def test_in_flight_counts_are_exact() -> None:
    router = make_router(backends=2)
    attempts = [start_attempt(router, chat(f"chat {number}")) for number in range(6)]
    assert sum(backend.work.own.inflight for backend in router.registry) == 6
    for attempt, outcome in zip(attempts, Outcome, strict=False):
        router.finish_attempt(attempt, outcome, 0.0)
    assert sum(backend.work.own.inflight for backend in router.registry) == 0


def test_an_attempt_that_finishes_twice_is_a_bug() -> None:
    router = make_router()
    attempt = start_attempt(router, chat("one"))
    router.finish_attempt(attempt, Outcome.SUCCESS, 0.0)
    with pytest.raises(AssertionError, match="ends once"):
        router.finish_attempt(attempt, Outcome.SUCCESS, 0.0)


def fill_tokens(router: Router, attempt: Attempt, lengths: Sequence[int]) -> None:
    """Pretend the prompt's messages have these lengths in tokens."""
    root = attempt.prompt.end
    while root.parent is not None:
        root = root.parent
    assert root.state is not None
    ends = np.cumsum(lengths).tolist()
    segments = router.hasher.extend(root.state, np.arange(ends[-1], dtype=np.uint32), ends)
    router.learn_tokens(attempt, root, segments, NOTHING, 0.0)


def test_the_documents_own_chat_is_learned_at_its_block_aligned_boundaries() -> None:
    """[system: 256][user1: 50][assistant1: 100][user2: 40] -> 256, 304, 400, 432 (Ranvier's document)."""
    router = make_router()
    attempt = serve(router, chat("u1", "a1", "u2"))
    fill_tokens(router, attempt, (256, 50, 100, 40))
    boundaries = [tokens for tokens, _, text in attempt.prompt.end.chain() if text]
    assert boundaries == [432, 400, 304, 256]
    resumed = start_attempt(router, chat("u1", "a1", "another turn"))
    assert resumed.decision.matched_tokens == 400
    branched = start_attempt(router, chat("another question"))
    assert branched.decision.matched_tokens == 256


def learn_from_peer(router: Router, attempt: Attempt) -> None:
    """Learn from a peer what an attempt of its own proved."""
    router.routes.learn(attempt.prompt.end.chain(), attempt.target.id, 1, Trust.REMOTE, 0.0)


@pytest.mark.parametrize("lengths", [(9_008, 52), (64, 24)])
def test_depths_are_counted_from_the_last_message_that_somebody_has_tokenized(lengths: tuple[int, int]) -> None:
    """Tools are no message, so estimates leave them out: most of what an agent sends first."""
    peer, router = make_router(seed=1), make_router(seed=2)
    first = serve(peer, chat("one"))
    estimated = first.prompt.tokens
    fill_tokens(peer, first, lengths)
    learn_from_peer(router, first)
    found = router.read(CHAT_PATH, chat("one", "answer", "two"))
    alone = make_router().read(CHAT_PATH, chat("one", "answer", "two"))
    new_tokens = alone.tokens - estimated
    assert new_tokens > 0
    decision = router.place(found, router.find(found, 0.0))
    assert decision.backend == first.target.id
    assert (decision.matched_tokens, decision.prompt_tokens) == (
        sum(lengths) // 16 * 16,
        sum(lengths) // 16 * 16 + new_tokens,
    )
    depths = [tokens for tokens, _, _ in found.end.chain()]
    assert depths == sorted(set(depths), reverse=True), "each deeper than the one before"
    again = router.read(CHAT_PATH, chat("one", "answer", "two"))
    assert router.place(again, router.find(again, 0.0)).prompt_tokens == decision.prompt_tokens


def test_a_guess_behind_what_others_have_tokenized_is_found_however_little_was_estimated() -> None:
    peer, router = make_router(seed=1), make_router(seed=2)
    first = serve(peer, chat("one"))
    fill_tokens(peer, first, (9_008, 52))
    learn_from_peer(router, first)
    running = start_attempt(router, chat("one", "answer", "two"))
    longer = start_attempt(router, chat("one", "answer", "two", "more", "three"))
    assert longer.decision.matched_tokens == running.prompt.tokens > 9_056


def test_an_explanation_corrects_no_estimate_but_its_own() -> None:
    peer, router = make_router(seed=1), make_router(seed=2)
    first = serve(peer, chat("one"))
    fill_tokens(peer, first, (9_008, 52))
    router.read(CHAT_PATH, chat("one"))
    known = serve(router, chat("one"))
    before = known.prompt.tokens
    learn_from_peer(router, first)
    dry = router.read(CHAT_PATH, chat("one", "answer"), dry=True)
    report = router.explain(dry, 0.0)
    assert report["prompt_tokens"] > 9_000
    assert known.prompt.tokens == before


def test_with_a_template_that_moves_earlier_turns_text_alone_matches_nothing() -> None:
    router = make_router(texts_match=False)
    attempt = serve(router, chat("one"))
    again = router.read(CHAT_PATH, chat("one"))
    assert not router.find(again, 0.0).holders
    fill_tokens(router, attempt, (100, 40))
    assert router.find(router.read(CHAT_PATH, chat("one")), 0.0).holders


def test_tokens_come_first_only_when_the_text_finds_too_little() -> None:
    router = make_router()
    fresh = router.read(CHAT_PATH, chat("one"))
    assert router.too_little(fresh, router.find(fresh, 0.0))
    serve(router, chat("one"))
    next_turn = router.read(CHAT_PATH, chat("one", "answer", "two"))
    assert not router.too_little(next_turn, router.find(next_turn, 0.0))
    long_turn = router.read(CHAT_PATH, chat("one", "answer", "a long document " * 100))
    assert router.too_little(long_turn, router.find(long_turn, 0.0))


def test_baselines_never_wait_for_tokens() -> None:
    router = make_router(policy="round_robin")
    prompt = router.read(CHAT_PATH, chat("one"))
    assert not router.too_little(prompt, router.find(prompt, 0.0))


def test_completions_match_by_their_token_ids() -> None:
    router = make_router()
    ids = list(range(64))
    first = start_attempt(router, json.dumps({"model": "m", "prompt": ids}).encode(), path=COMPLETION_PATH)
    router.first_token(first, 0.0)
    router.finish_attempt(first, Outcome.SUCCESS, 0.0)
    longer = start_attempt(router, json.dumps({"model": "m", "prompt": [*ids, 5, 6]}).encode(), path=COMPLETION_PATH)
    assert (longer.target.id, longer.decision.matched_tokens) == (first.target.id, 64)


def test_nobody_to_ask_is_an_error() -> None:
    router = make_router(backends=0)
    with pytest.raises(NoBackend):
        router.find(router.read(CHAT_PATH, chat("one")), 0.0)


def test_an_explanation_names_every_candidate_and_changes_nothing() -> None:
    router = make_router()
    served = serve(router, chat("one"))
    prompt = router.read(CHAT_PATH, chat("one", "answer", "two"))
    before = values(router.routes.counters)
    report = router.explain(prompt, 0.0)
    assert values(router.routes.counters) == before
    assert report["chosen"] == served.decision.backend_name
    assert len(report["candidates"]) == 4
    held = {row["backend"]: row["matched_tokens"] for row in report["candidates"]}
    assert held[served.decision.backend_name] > 0
    assert sum(bool(tokens) for tokens in held.values()) == 1
    assert sum(backend.work.own.inflight for backend in router.registry) == 0


def test_counters_show_how_much_was_predicted_and_how_much_the_engines_had() -> None:
    router = make_router()
    attempt = serve(router, chat("one"))
    router.learn_tokens(attempt, attempt.prompt.end, (), Answer(None, "", 100, 64, 5), 0.0)
    counters = router.counters
    assert (counters.engine_prompt_tokens, counters.engine_cached_tokens) == (100, 64)
    assert counters.decisions == {attempt.decision.reason: 1}
    assert counters.outcomes == {"success": 1}


def test_a_policy_that_wants_the_opening_gets_it_and_places_all_chats_of_one_opening_together() -> None:
    router = make_router(policy="chwbl")
    placed = {serve(router, chat(f"question {number}")).target.id for number in range(4)}
    assert len(placed) == 1
    assert router.recent.made[-1][2].reason == "prefix_hash"
    one, two = (router.read(CHAT_PATH, chat(word)).opening(1024, "system") for word in ("one", "two"))
    assert one == two != b""
    assert router.read(CHAT_PATH, b"{}").opening(1024, "system") == b""


class Seeing(Affinity):
    """Keeps the last match."""

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        self.seen = match
        return super().choose(match, candidates, rng)


def test_a_policy_learns_what_an_engine_computed_and_evicted() -> None:
    router = make_router(2)
    router.policy = seeing = Seeing()
    attempt = serve(router, chat("one", "two", "three"))
    longer = chat("one", "two", "three", "four", "five")
    serve(router, longer)
    assert seeing.seen.evicted is None
    router.routes.hide(attempt.target.id, 10)
    serve(router, longer)
    assert seeing.seen.evicted is not None
    backend, tokens = seeing.seen.evicted
    assert backend == attempt.target.id
    assert 0 < tokens <= seeing.seen.prompt_tokens


def test_what_an_engine_held_before_it_restarted_was_not_evicted() -> None:
    router = make_router(2)
    router.policy = seeing = Seeing()
    attempt = serve(router, chat("one", "two", "three"))
    router.routes.hide(attempt.target.id, 10)
    router.registry.changes.restart(router.registry[attempt.target.id], "start time", 0.0)
    serve(router, chat("one", "two", "three"))
    assert seeing.seen.evicted is None


def test_what_an_engine_computed_for_a_whole_answer_is_learned_as_it_counts_and_not_as_was_believed() -> None:
    router = make_router(1)
    attempt = start_attempt(router, chat("one", "two"))
    router.first_token(attempt, 1.0)
    router.finish_attempt(attempt, Outcome.SUCCESS, 2.0)
    assert attempt.reply.decoded is not None
    believed, computed = attempt.decision.computed_tokens, attempt.reply.decoded.computed
    counted = Answer(prompt_tokens=believed, cached_tokens=believed - 20)
    router.answered(attempt, attempt.prompt.end, counted, 2.0)
    assert attempt.reply.decoded.computed == computed - believed + 20
    assert attempt.target.work.own.computed == 20
