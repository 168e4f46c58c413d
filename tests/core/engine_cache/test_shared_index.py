"""One router's side of the shared index, without any Redis. Names begin with the criterion or the resolution."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.prefix_index.prefix_index import (
    Entry,
    IndexEvent,
    IndexSettings,
    Kind,
    KvIndex,
    Storage,
)
from ranvier_py.core.engine_cache.prefix_index.prepared import PreparedIndex, with_told
from ranvier_py.core.engine_cache.prefix_index.shared_answers import PREFIXES_MAX, QUESTIONS_MAX, SharedAnswers, Told
from ranvier_py.core.engine_cache.prefix_index.shared_clock import RedisClock
from ranvier_py.core.engine_cache.prefix_index.shared_index import PENDING_MAX, RETRY_MAX_S, Job, SharedIndex
from ranvier_py.core.ids import BackendId

X, Y = BackendId(0), BackendId(1)
NAMES = {X: "http://x", Y: "http://y"}
IDS = {name: backend for backend, name in NAMES.items()}
EPOCH_US = 1_700_000_000_000_000  # of Redis, when our clock shows 0
COUNTS = {"write": 5, "ask": 1, "tick": 3}


def redis_time(now: float) -> int:
    return EPOCH_US + int(now * 1e6)


class Side:
    """A router whose Redis is this test."""

    def __init__(self, *names: BackendId, **options: Any) -> None:
        self.index = KvIndex(IndexSettings(**options))
        self.standing = dict.fromkeys(names or (X, Y))
        self.shared = SharedIndex(
            self.index,
            {backend: NAMES[backend] for backend in names or (X, Y)},
            find=IDS.get,
            stands=self.standing.__contains__,
            rng=Random(1),
        )

    def greet(self, now: float, generation: int = 1, cleared: int = 0) -> Job:
        """The hello that is due, answered."""
        job = self.shared.next_job(now)
        assert job is not None
        assert job.hello
        state = [b"%d" % generation, b"%d" % cleared, b"%d" % redis_time(now)]
        self.shared.done(job, [[state, [1, 0]]], now, now)
        return job

    def work(self, now: float, answers: dict[str, list[object]] | None = None, generation: int = 1) -> Job | None:
        """The job that is due, answered: nothing is known but these answers."""
        job = self.shared.next_job(now)
        if job is not None:
            self.reply(job, now, answers, generation)
        return job

    def reply(self, job: Job, now: float, answers: dict[str, list[object]] | None = None, generation: int = 1) -> None:
        replies = []
        questions = iter(job.questions)
        for call in job.calls:
            reply: list[object] = [[b"%d" % generation, b"0", b"%d" % redis_time(now)], [0] * COUNTS[call.script]]
            if call.script == "ask":
                reply.append([(answers or {}).get(prefix, []) for prefix in next(questions)])
            elif call.script == "tick":
                reply.append([])
            replies.append(reply)
        self.shared.done(job, replies, now, now)

    def hear(self, kind: Kind, prefix: str, now: float, backend: BackendId = X, tokens: int | None = 64) -> None:
        event = IndexEvent(kind, prefix, tokens)
        before = self.index.peek(prefix, backend)
        self.index.apply(backend, event, now)
        self.shared.heard(backend, event, before, self.index.peek(prefix, backend), now)


def said(name: str, tokens: int, at: float, until: float, tier: str = "h") -> list[object]:
    text = f"{tokens} {tier} {redis_time(at)} {redis_time(until) // 1000}"
    return [name.encode(), text.encode()]


def written(job: Job | None) -> list[tuple[str, str, str, int]]:
    """Prefix, backend, verb, tokens."""
    found = []
    for call in job.calls if job is not None else ():
        if call.script == "write":
            found += [(one[0], one[1], one[3], one[4]) for one in orjson.loads(call.arguments[-1])]
    return found


def greeted(*names: BackendId, **options: Any) -> Side:
    side = Side(*names, **options)
    side.greet(0.0)
    side.work(0.5)  # the voids of an earlier life
    return side


# --- saying ---------------------------------------------------------------------------------------------------------


def test_cr20_events_are_gathered_and_said_in_one_job() -> None:
    side = greeted()
    side.hear(Kind.CREATED, "aa", 0.6, tokens=5)
    side.hear(Kind.OFFLOADED, "bb", 0.601, Y, None)
    assert side.shared.next_job(0.602) is None
    expected = [("aa", "http://x", "h", 5), ("bb", "http://y", "w", -1)]
    assert written(side.work(0.606)) == expected


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((Kind.CREATED, Kind.PURGED), ("x", 64)),
        ((Kind.PURGED, Kind.CREATED), ("h", 0)),  # what was purged has no count to keep
        ((Kind.EVICTED,), ("c", -1)),  # another router may know it
        ((Kind.PURGED, Kind.EVICTED), ("x", 0)),
        ((Kind.CREATED, Kind.EVICTED), ("w", 64)),
    ],
)
def test_cr17_what_is_said_of_one_thing_in_a_row_is_said_once(kinds: tuple[Kind, ...], expected: object) -> None:
    side = greeted(offloading=True)
    for kind in kinds:
        side.hear(kind, "aa", 1.0, tokens=64 if kind is Kind.CREATED and kinds[0] is kind else None)
    ((prefix, name, verb, tokens),) = written(side.work(1.1))
    assert (prefix, name, verb) == ("aa", "http://x", expected[0])  # type: ignore[index]
    assert verb == "x" or tokens == expected[1]  # type: ignore[index]


def test_cx19_sequences_ascend_however_the_clocks_wander() -> None:
    clock, rng = RedisClock(), Random(5)
    found = []
    for step in range(500):
        now = step / 100
        if rng.random() < 0.2:
            clock.learn(redis_time(now + rng.uniform(-5, 5)), now - 0.01, now)
        found.append(clock.sequence(now))
    assert all(one < other for one, other in pairwise(found))


@given(
    st.integers(-(10**15), 10**15),
    st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 1), st.floats(0.1, 50)), min_size=1, max_size=30),
)
@settings(max_examples=100, deadline=None)
def test_cx19_redis_time_is_known_to_half_a_round_trip(offset: int, trips: list[tuple[float, float, float]]) -> None:
    """A reply's time is that of some moment of the trip. Two routers' events are in order to that doubt."""
    clock, now = RedisClock(), 0.0
    for trip_s, share, pause_s in trips:
        now += pause_s
        clock.learn(int((now + share * trip_s) * 1e6) + offset, now, now + trip_s)
        now += trip_s
        truth_s = now
        assert abs(clock.moment(int(truth_s * 1e6) + offset) - truth_s) <= clock.doubt_s(now) + 2e-6
    assert clock.doubt_s(now) <= trips[-1][0] / 2 + 1e-9


def test_cx19_a_slow_round_trip_does_not_spoil_what_a_fast_one_told() -> None:
    clock = RedisClock()
    clock.learn(redis_time(1.0), 0.9995, 1.0005)
    clock.learn(redis_time(2.9), 2.0, 3.0)  # said late in the trip
    assert clock.doubt_s(3.0) < 0.001
    assert clock.moment(redis_time(5.0)) == pytest.approx(5.0, abs=0.001)


def test_cx19_a_clock_that_was_set_is_believed_however_slow_the_trip() -> None:
    clock = RedisClock()
    clock.learn(redis_time(1.0), 0.9995, 1.0005)
    clock.learn(redis_time(3602.5), 2.0, 3.0)
    assert clock.moment(redis_time(3605.0)) == pytest.approx(5.0, abs=0.5)


def test_cx18_a_stream_that_begins_anew_voids_what_was_to_be_said_of_its_backend_too() -> None:
    side = greeted()
    side.hear(Kind.CREATED, "aa", 1.0)
    side.hear(Kind.CREATED, "bb", 1.0, Y)
    side.shared.began(X, 1.0)
    side.hear(Kind.CREATED, "cc", 1.0)
    names = [(prefix, name, verb) for prefix, name, verb, _ in written(side.work(1.1))]
    assert names == [("bb", "http://y", "h"), ("", "http://x", "v"), ("cc", "http://x", "h")]


def test_more_unsaid_than_there_is_room_for_is_an_outage() -> None:
    side = greeted()
    job = side.shared.next_job(1.5)
    assert job is not None
    for number in range(PENDING_MAX + 1):
        side.hear(Kind.CREATED, f"{number:x}", 2.0)
    assert not side.shared.sharing
    assert side.shared.waiting == 0
    assert side.shared.counts.dropped == PENDING_MAX + 1
    side.reply(job, 2.1)  # of a time that is over
    assert side.greet(5.0, 2).calls[0].arguments[0] == "1", "the generation that lacks something is to be ended"
    assert side.shared.waiting == PENDING_MAX + 1


def test_cx21_only_what_a_standing_stream_vouches_for_is_said_anew() -> None:
    side = Side()
    for number in range(300):
        side.hear(Kind.CREATED, f"{number:03x}", 0.0, (X, Y)[number % 2])
    side.hear(Kind.CREATED, "fff", 0.0, X)
    del side.standing[Y]
    side.greet(1.0)
    assert side.shared.waiting == 2 + 151
    found, now = written(side.work(1.01)), 1.01
    assert len(found) == 2 + 128
    while side.shared.waiting:
        now += 0.01
        found += written(side.work(now))
    assert {name for prefix, name, _, _ in found if prefix} == {"http://x"}
    assert len([one for one in found if one[0]]) == 151
    assert next(one[0] for one in found if one[0]) == "fff", "the newest first"


def test_what_is_said_anew_ends_when_it_would_have_ended() -> None:
    side = Side(X)
    side.hear(Kind.CREATED, "aa", 0.0)
    side.greet(400.0)
    job = side.work(400.1)
    assert job is not None
    (void, anew) = orjson.loads(job.calls[0].arguments[-1])
    assert (void[3], anew[0], anew[5]) == ("v", "aa", 199_900)


def test_cx18_a_stream_that_ends_before_all_is_said_anew_vouches_for_nothing_more() -> None:
    side = Side(X)
    side.hear(Kind.CREATED, "aa", 0.0)
    side.greet(1.0)
    del side.standing[X]
    assert [verb for _, _, verb, _ in written(side.work(1.1))] == ["v"]


def test_what_our_own_index_refuses_is_not_said_either() -> None:
    side = greeted()
    side.hear(Kind.CREATED, "aa", 1.0, tokens=10**30)
    side.hear(Kind.CREATED, "b" * 129, 1.0)
    side.hear(Kind.CREATED, "", 1.0)
    assert side.shared.waiting == len(side.index) == 0


def test_what_is_new_is_said_before_what_is_said_anew() -> None:
    side = Side(X)
    side.hear(Kind.CREATED, "aa", 0.0)
    side.greet(1.0)
    for number in range(600):  # more than one job takes
        side.hear(Kind.CREATED, f"{number:03x}", 1.0)
    assert side.shared.waiting == 600 + 2
    assert len(written(side.work(1.1))) == 512
    assert [prefix for prefix, *_ in written(side.work(1.2))][-1] == "aa"


# --- asking ---------------------------------------------------------------------------------------------------------


def test_cr19_redis_is_asked_once_a_prefix_in_a_tenth_of_a_second() -> None:
    side = greeted()
    prepared = PreparedIndex(side.index, lambda: 0.0)
    prepared.shared = side.shared
    for step in range(100):
        prepared.holders("aa", 1.0 + step / 1000)
        side.work(1.0 + step / 1000)
    assert side.shared.counts.asked == 1
    prepared.holders("aa", 1.11)
    side.work(1.11)
    assert side.shared.counts.asked == 2


def test_cr20_an_answer_becomes_points_like_what_was_heard_here() -> None:
    side = greeted(X)
    prepared = PreparedIndex(side.index, lambda: 0.0)
    prepared.shared = side.shared
    side.hear(Kind.CREATED, "aa", 1.0, tokens=10)
    assert {name: entry.tokens for name, entry in prepared.holders("aa", 1.0).items()} == {X: 10}
    side.work(1.0, {"aa": said("http://y", 500, 0.9, 100.0, "w") + said("http://unknown", 7, 0.9, 100.0)})
    found = prepared.holders("aa", 1.02)
    assert found[X].tokens == 10
    assert found[Y] == Entry(500, Storage.WARM, pytest.approx(100.0, abs=0.01))
    assert not prepared.holders("aa", 90.0).get(Y), "an answer does not outlive its second"
    side.work(90.0, {"aa": said("http://y", 500, 89.0, 1e6)})
    assert prepared.holders("aa", 90.2)[Y].until <= 690.0, "nor a claim our own time to live"


def test_cx21_while_redis_is_away_what_was_heard_here_decides() -> None:
    side = greeted(X)
    side.hear(Kind.CREATED, "aa", 1.0)
    prepared = PreparedIndex(side.index, lambda: 0.0)
    prepared.shared = side.shared
    prepared.holders("aa", 1.0)
    side.work(1.0, {"aa": said("http://y", 500, 0.9, 100.0)})
    assert set(prepared.holders("aa", 1.1)) == {X, Y}
    job = side.shared.next_job(1.2)
    assert job is not None
    side.shared.failed(job, "timeout", "no answer", 1.3)
    assert set(prepared.holders("aa", 1.31)) == {X}
    assert side.shared.counts.timeout == side.shared.counts.outages == 1
    assert not side.shared.prepare("aa", 1.4), "nobody waits for a Redis that is away"


@pytest.mark.parametrize("heard_when", ["asked", "in flight", "answered", "answered, a gap"])
def test_cx28_an_answer_never_contradicts_what_was_heard_here_since(heard_when: str) -> None:
    side = greeted()
    side.shared.holders("aa", 1.0)
    answer = {"aa": said("http://x", 500, 0.9, 100.0) + said("http://y", 5, 0.9, 100.0)}
    if heard_when.startswith("answered"):
        side.work(1.0, answer)
        side.hear(Kind.PURGED, "aa", 1.01) if heard_when == "answered" else side.shared.began(X, 1.01)
    else:
        job = side.shared.next_job(1.0)
        assert job is not None
        side.hear(Kind.PURGED, "aa", 1.01) if heard_when == "asked" else side.shared.began(X, 1.01)
        side.reply(job, 1.02, answer)
    assert set(side.shared.holders("aa", 1.03)) == {Y}


def test_of_two_words_about_a_backend_the_later_counts() -> None:
    own = {X: Entry(10, Storage.HOT, 605.0)}  # heard at 5
    assert with_told(own, {X: Told(Entry(99, Storage.WARM, 700.0), 4.0)}, 600.0, 6.0)[X].tokens == 10
    assert with_told(own, {X: Told(Entry(99, Storage.WARM, 700.0), 5.5)}, 600.0, 6.0)[X].tokens == 99
    assert with_told(own, {X: Told(Entry(99, Storage.WARM, 5.9), 5.5)}, 600.0, 6.0)[X].tokens == 10


def test_questions_and_answers_have_their_bounds() -> None:
    poked: list[int] = []
    answers = SharedAnswers(lambda: poked.append(1))
    for number in range(2 * PREFIXES_MAX):
        answers.holders(f"{number:x}", 1.0)
    assert answers.waiting == QUESTIONS_MAX
    assert answers.unasked == 2 * PREFIXES_MAX - QUESTIONS_MAX
    assert len(answers._answers) == PREFIXES_MAX
    assert len(poked) == 1
    assert answers.take(3) == ["0", "1", "2"]


# --- away and back --------------------------------------------------------------------------------------------------


def test_cr33_tries_again_come_slower_and_slower_up_to_half_a_minute() -> None:
    side, now, waits = Side(), 0.0, []
    for _ in range(12):
        job = side.shared.next_job(now)
        assert job is not None
        side.shared.failed(job, "connection", "refused", now)
        waits.append(side.shared.wait_s(now))
        assert side.shared.next_job(now) is None
        now += waits[-1]
    assert 0.5 <= waits[0] <= 1.0
    assert all(RETRY_MAX_S / 2 <= wait <= RETRY_MAX_S for wait in waits[6:])
    side.greet(now)
    assert side.shared.sharing
    assert side.shared.counts.connection == 12
    assert side.shared.counts.outages == 0


def test_cx20_another_generation_is_joined_and_nothing_of_the_old_one_counts() -> None:
    side = greeted()
    side.hear(Kind.CREATED, "aa", 1.0)
    side.shared.holders("bb", 1.0)
    side.work(1.1, {"bb": said("http://y", 5, 0.9, 100.0)}, generation=7)
    assert not side.shared.sharing
    assert side.greet(1.3, 7).calls[0].arguments == ("1", "0")
    assert side.shared.generation == 7
    assert not side.shared.holders("bb", 1.3)
    assert written(side.work(1.4)) == [("aa", "http://x", "h", 64)]


def test_cx20_a_clear_elsewhere_takes_what_was_heard_before_it_and_not_what_came_after() -> None:
    side = greeted()
    side.hear(Kind.CREATED, "aa", 1.0)
    side.hear(Kind.CREATED, "bb", 2.0)
    side.work(2.1, generation=2)
    side.greet(2.3, 2, cleared=redis_time(1.5))
    assert [prefix for prefix, _ in side.index.pairs()] == ["bb"]


def test_cx20_a_clear_is_told_until_redis_has_heard_it() -> None:
    side = greeted()
    job = side.shared.next_job(1.5)
    assert job is not None
    side.shared.clear(1.6)
    side.reply(job, 1.7)
    hello = side.shared.next_job(1.7)
    assert hello is not None
    assert hello.calls[0].arguments == ("1", "1")
    side.shared.failed(hello, "connection", "refused", 1.8)
    hello = side.shared.next_job(5.0)
    assert hello is not None
    side.shared.clear(5.1)  # once more, while it is under way
    state = [b"2", b"%d" % redis_time(5.0), b"%d" % redis_time(5.0)]
    side.shared.done(hello, [[state, [1, 0]]], 5.0, 5.2)
    assert side.greet(5.2, 3, redis_time(5.2)).calls[0].arguments == ("2", "1")
    assert side.shared.sharing
    assert side.shared.next_job(5.3) is None, "it has been told"


def test_cx20_what_is_heard_after_a_clear_stays_though_redis_hears_of_the_clear_later() -> None:
    side = greeted()
    side.index.clear()
    side.shared.clear(1.0)
    side.hear(Kind.CREATED, "aa", 2.0)
    side.greet(3.0, 2, cleared=redis_time(3.0))
    assert len(side.index) == 1
    assert written(side.work(3.1)) == [("aa", "http://x", "h", 64)]


def test_what_comes_of_a_job_of_before_an_outage_is_nothing() -> None:
    side = greeted()
    job = side.shared.next_job(1.5)
    assert job is not None
    side.shared.clear(1.6)
    wait_s = side.shared.wait_s(1.7)
    side.reply(job, 1.7, generation=9)
    assert side.shared.wait_s(1.7) <= wait_s
    assert side.greet(1.7, 9).calls[0].arguments == ("1", "1")


replies = st.recursive(
    st.none() | st.integers() | st.binary(max_size=20) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(replies, max_size=4), st.booleans())
@settings(max_examples=200, deadline=None)
def test_cr33_a_reply_of_any_form_is_taken_or_is_an_error_and_never_more(reply: list[object], hello: bool) -> None:
    side = Side() if hello else greeted()
    side.shared.holders("aa", 2.0)
    job = side.shared.next_job(2.0)
    assert job is not None
    side.shared.done(job, reply, 2.0, 2.0)
    assert side.shared.counts.other == (not side.shared.sharing)


@given(st.lists(st.tuples(st.binary(max_size=12), st.binary(max_size=50)), max_size=20))
@settings(max_examples=100, deadline=None)
def test_an_answer_of_any_content_is_read_or_left_out(pairs: list[tuple[bytes, bytes]]) -> None:
    side = greeted()
    side.shared.holders("aa", 2.0)
    side.work(2.0, {"aa": [item for pair in pairs for item in pair]})
    assert side.shared.sharing
    assert set(side.shared.holders("aa", 2.01)) <= {X, Y}
