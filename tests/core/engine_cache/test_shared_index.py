"""One router's side of the shared index, with a Redis of dictionaries. Names begin with the criterion or resolution."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.prefix_index import shared_index
from ranvier_py.core.engine_cache.prefix_index.prefix_index import IndexEvent, IndexSettings, KvIndex, Verb
from ranvier_py.core.engine_cache.prefix_index.shared_index import Command, RedisJob, SharedIndex
from ranvier_py.core.ids import BackendId
from tests.examples import examples

X, Y = BackendId(0), BackendId(1)
NAMES = {X: "http://x", Y: "http://y"}
IDS = {name: backend for backend, name in NAMES.items()}


class FakeRedis:
    """Hashes and texts, without expiry."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}

    def run(self, commands: Iterable[Command]) -> list[object]:
        return [self.one(*[part if isinstance(part, bytes) else str(part) for part in each]) for each in commands]

    def one(self, verb: Any, key: Any, *more: Any) -> object:
        data = self.data
        if verb == "GET":
            return data.get(key)
        if verb == "SET":
            data[key] = more[0].encode()
        elif verb == "HSET":
            data.setdefault(key, {})[more[0].encode()] = more[1].encode()
        elif verb == "DEL":
            data.pop(key, None)
        elif verb == "HDEL":
            return sum(data.get(key, {}).pop(name.encode(), None) is not None for name in more)
        elif verb == "HGETALL":
            return dict(data.get(key, {}))
        elif verb == "HINCRBY":
            number = int(data.setdefault(key, {}).get(more[0].encode(), b"0")) + int(more[1])
            data[key][more[0].encode()] = b"%d" % number
            return number
        else:
            assert verb == "PEXPIRE", verb
        return 1


class Side:
    """A router, with a stream of each backend that it reads."""

    def __init__(self, redis: FakeRedis, *reads: BackendId, seed: int = 1, **options: Any) -> None:
        self.redis = redis
        self.index = KvIndex(IndexSettings(**options))
        self.standing = dict.fromkeys(reads)
        self.shared = SharedIndex(
            self.index,
            "p:",
            {backend: NAMES[backend] for backend in reads},
            find=IDS.get,
            stands=self.standing.__contains__,
            rng=Random(seed),
        )

    def work(self, now: float) -> list[RedisJob]:
        """All jobs that are due."""
        found = []
        while (job := self.shared.next_job(now)) is not None:
            assert self.shared.done(job, self.redis.run(job.commands), now)
            found.append(job)
        return found

    def job(self, now: float) -> RedisJob:
        """The one that is due."""
        job = self.shared.next_job(now)
        assert job is not None
        return job

    def fail(self, now: float) -> None:
        """Redis can't be reached for the job that is due."""
        self.shared.failed(self.job(now), "connection", "refused", now)

    def receive(self, kind: Verb, prefix: str, now: float, backend: BackendId = X, tokens: int | None = 64) -> None:
        self.index.apply(backend, IndexEvent(kind, prefix, tokens), now)

    def holders(self, prefix: str, now: float) -> dict[str, int]:
        """As a request learns it that waits for the answer."""
        self.shared.prepare(prefix, now)
        self.work(now)
        return {NAMES[one]: held.tokens for one, held in self.index.holders(prefix, now).items()}

    def mirrored(self) -> dict[str, dict[bytes, bytes]]:
        """What Redis has of this router."""
        begin = f"p:{self.shared.generation}:"
        return {
            key.removeprefix(begin): value for key, value in self.redis.data.items() if key.startswith(begin) and value
        }


def side(*reads: BackendId, **options: Any) -> Side:
    """One that shares, at 0.0."""
    made = Side(FakeRedis(), *(reads or (X, Y)), **options)
    made.work(0.0)
    assert made.shared.sharing
    return made


def pair(now: float = 0.0) -> tuple[Side, Side]:
    """One that reads both backends, and one that reads none."""
    redis = FakeRedis()
    one, two = Side(redis, X, Y, seed=1), Side(redis, seed=2)
    for each in (one, two, one):
        each.work(now)
    one.work(now + 1.0)
    return one, two


def verbs(jobs: Iterable[RedisJob]) -> list[str]:
    return [
        str(command[0]) for job in jobs for command in job.commands if len(command) > 1 and ":" in str(command[1])[2:]
    ]


# --- writing --------------------------------------------------------------------------------------------------------


def test_cr20_what_one_router_receives_another_one_knows() -> None:
    one, two = pair()
    one.receive(Verb.CREATED, "ab", 1.1, X, 2048)
    one.receive(Verb.OFFLOADED, "ab", 1.1, Y, 512)
    one.work(1.2)
    assert two.holders("ab", 1.3) == {"http://x": 2048, "http://y": 512}
    assert two.index.holders("ab", 1.3)[Y].reload
    one.receive(Verb.PURGED, "ab", 1.4, Y, None)
    one.work(1.5)
    assert two.holders("ab", 1.6) == {"http://x": 2048}
    assert len(two.index) == 0


def test_cr20_events_are_gathered_and_the_last_of_several_is_written() -> None:
    one = side()
    one.work(0.1)
    one.receive(Verb.CREATED, "aa", 0.2)
    assert verbs(one.work(0.2)) == ["HSET", "PEXPIRE"]
    for number in range(100):
        one.receive(Verb.CREATED, "aa", 0.201, tokens=number)
        one.receive(Verb.CREATED, "bb", 0.201)
        one.receive(Verb.PURGED, "bb", 0.201)
    assert one.shared.next_job(0.202) is None, "they wait for more"
    assert sorted(verbs(one.work(0.206))) == ["HDEL", "HSET", "PEXPIRE"]
    assert one.mirrored() == {"aa": {b"http://x": b"99 h"}}


def test_cr16_what_expires_or_is_evicted_here_goes_from_redis_too() -> None:
    one = side(entries_max=100, ttl_s=600.0)
    for number in range(101):
        one.receive(Verb.CREATED, f"{number:03x}", 1.0)
    one.work(2.0)
    one.work(2.1)
    assert len(one.mirrored()) == 91, "a tenth went"
    one.index.expire(700.0)
    one.work(700.0)
    one.work(700.1)
    assert one.mirrored() == {}


def test_cx18_what_a_stream_had_reported_is_taken_back_when_it_begins_anew() -> None:
    one, two = pair()
    for backend in (X, Y):
        one.receive(Verb.CREATED, "ab", 1.1, backend)
    one.work(1.2)
    one.index.forget((X,))
    one.work(1.3)
    assert two.holders("ab", 1.4) == {"http://y": 64}


def test_more_to_write_than_there_is_room_for_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_index, "PENDING_MAX", 100)
    one = side()
    before = one.shared.generation
    for number in range(101):
        one.receive(Verb.CREATED, f"{number:x}", 2.0)
    one.work(2.0)
    assert not one.shared.sharing
    assert (one.shared.counters.outages, one.shared.counters.dropped) == (1, 101)
    for tenths in range(5):
        one.work(5.0 + tenths / 10)
    assert one.shared.generation != before
    assert len(one.mirrored()) == 101


def test_cx21_only_what_a_standing_stream_vouches_for_is_written_anew_and_what_is_new_comes_first() -> None:
    one = Side(FakeRedis(), X, Y)
    for number in range(1200):
        one.receive(Verb.CREATED, f"{number:03x}", 0.0, (X, Y)[number % 2])
    del one.standing[Y]
    one.work(1.0)
    one.receive(Verb.CREATED, "ffff", 1.0)
    one.work(1.01)
    assert "ffff" in one.mirrored()
    assert one.shared.waiting > 0
    for step in range(5):
        one.work(1.02 + step / 100)
    assert one.shared.waiting == 0
    assert {name for held in one.mirrored().values() for name in held} == {b"http://x"}
    assert len(one.mirrored()) == 601


# --- asking ---------------------------------------------------------------------------------------------------------


def test_cr19_redis_is_asked_once_a_prefix_in_a_tenth_of_a_second() -> None:
    _, two = pair()
    for step in range(100):
        two.holders("aa", 1.0 + step / 1000)
    assert two.shared.counters.asked == 1
    two.holders("aa", 1.11)
    assert two.shared.counters.asked == 2


def test_cr20_what_a_router_receives_itself_counts_more_and_an_answer_ends_after_a_second() -> None:
    one, two = pair()
    two.receive(Verb.CREATED, "aa", 1.0, X, 10)
    one.receive(Verb.CREATED, "aa", 1.0, X, 500)
    one.receive(Verb.CREATED, "aa", 1.0, Y, 7)
    one.work(1.1)
    assert two.holders("aa", 1.2) == {"http://x": 10, "http://y": 7}
    assert set(two.index.holders("aa", 2.3)) == {X}


def test_of_two_routers_entries_of_one_backend_the_greater_counts() -> None:
    redis = FakeRedis()
    sides = [Side(redis, X, seed=1), Side(redis, X, seed=2), Side(redis, seed=3)]
    for tokens, each in zip((30, 20, 0), sides, strict=True):
        each.work(0.0)
        if tokens:
            each.receive(Verb.CREATED, "aa", 0.1, X, tokens)
            each.work(0.2)
    assert sides[2].holders("aa", 0.3) == {"http://x": 30}


def test_cx21_while_redis_is_away_what_was_received_here_decides() -> None:
    one, two = pair()
    one.receive(Verb.CREATED, "aa", 1.0, Y)
    two.receive(Verb.CREATED, "aa", 1.0, X)
    one.work(1.1)
    assert set(two.holders("aa", 1.2)) == {"http://x", "http://y"}
    job = two.job(3.0)
    two.shared.failed(job, "timeout", "no answer", 3.1)
    assert set(two.index.holders("aa", 3.1)) == {X}
    assert (two.shared.errors["timeout"], two.shared.counters.outages) == (1, 1)
    assert not two.shared.prepare("aa", 3.2), "nobody waits for a Redis that is away"
    assert two.shared.done(job, [], 3.3) is False, "what comes of a job of before is nothing"


@pytest.mark.parametrize("received_at", ["under way", "answered"])
def test_cx28_an_answer_never_contradicts_what_was_received_here_since_it_was_asked(received_at: str) -> None:
    redis = FakeRedis()
    one, two = Side(redis, X, Y, seed=1), Side(redis, X, seed=2)
    one.work(0.0)
    for backend in (X, Y):
        one.receive(Verb.CREATED, "aa", 0.1, backend)
    one.work(0.2)
    two.work(0.3)
    two.receive(Verb.CREATED, "aa", 0.3)
    two.shared.holders("aa", 0.4)
    job = two.job(0.4)
    replies = redis.run(job.commands)
    if received_at == "under way":
        two.receive(Verb.PURGED, "aa", 0.41)
    two.shared.done(job, replies, 0.42)
    if received_at == "answered":
        two.receive(Verb.PURGED, "aa", 0.43)
    assert set(two.index.holders("aa", 0.44)) == {Y}


def test_questions_and_answers_have_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_index, "QUESTIONS_MAX", 10)
    monkeypatch.setattr(shared_index, "PREFIXES_MAX", 20)
    one, two = pair()
    one.receive(Verb.CREATED, "0", 1.0)
    one.work(1.1)
    for number in range(40):
        two.shared.holders(f"{number:x}", 1.2)
    assert two.shared.counters.unasked == 30
    two.work(1.2)
    assert two.shared.counters.asked == 10
    assert two.shared.holders("0", 1.2) == {}, "asked, and forgotten since"


# --- other routers --------------------------------------------------------------------------------------------------


def test_cx18_a_router_that_is_gone_is_not_believed_any_more_and_struck_off_the_list() -> None:
    one, two = pair()
    one.receive(Verb.CREATED, "ab", 1.0)
    one.work(1.1)
    assert two.holders("ab", 1.2)
    for second in range(2, 9):
        two.work(float(second))
    assert two.holders("ab", 9.0) == {}
    assert len(two.redis.data["p:routers"]) == 2
    for second in range(9, 70):
        two.work(float(second))
    assert len(two.redis.data["p:routers"]) == 1
    for tenths in range(3):
        one.work(70.0 + tenths / 10)
    two.work(71.0)
    assert two.holders("ab", 71.5) == {"http://x": 64}, "it was only away"


@pytest.mark.parametrize("harm", ["emptied", "older"])
def test_cx20_what_redis_has_lost_is_written_anew_under_another_generation(harm: str) -> None:
    one, two = pair()
    one.receive(Verb.CREATED, "gone", 1.0)
    one.receive(Verb.CREATED, "ab", 1.0)
    one.work(1.1)
    before, backup = one.shared.generation, {key: dict(value) for key, value in one.redis.data.items()}
    one.receive(Verb.PURGED, "gone", 1.2)
    one.work(1.3)
    one.work(2.5)
    one.redis.data.clear()
    if harm == "older":
        one.redis.data.update(backup)
    for tenths in range(30):
        one.work(3.6 + tenths / 10)
        two.work(3.6 + tenths / 10)
    assert one.shared.counters.lost == 1
    assert one.shared.generation != before
    assert two.holders("ab", 7.0) == {"http://x": 64}
    assert two.holders("gone", 7.0) == {}


def test_cx20_who_comes_back_from_an_outage_takes_a_new_generation() -> None:
    """What it took back meanwhile stands in the old one."""
    one, two = pair()
    one.receive(Verb.CREATED, "ab", 1.0)
    one.receive(Verb.CREATED, "cd", 1.0)
    one.work(1.1)
    one.fail(2.5)
    one.receive(Verb.PURGED, "ab", 2.6)
    one.work(5.0)
    one.work(5.1)
    two.work(5.2)
    assert two.holders("ab", 5.3) == {}
    assert two.holders("cd", 5.3) == {"http://x": 64}


def test_cr33_tries_again_come_slower_and_slower_up_to_half_a_minute() -> None:
    one, now, waits = Side(FakeRedis(), X), 0.0, []
    for _ in range(12):
        one.fail(now)
        waits.append(one.shared.wait_s(now))
        assert one.shared.next_job(now) is None
        now += waits[-1]
    assert 0.5 <= waits[0] <= 1.0
    assert all(15.0 <= wait <= 30.0 for wait in waits[6:])
    one.work(now)
    assert one.shared.sharing
    assert (one.shared.errors["connection"], one.shared.counters.outages) == (12, 0)


# --- clears ---------------------------------------------------------------------------------------------------------


def test_cx20_a_clear_takes_what_others_received_before_it() -> None:
    one, two = pair()
    one.receive(Verb.CREATED, "ab", 1.0)
    one.work(1.1)
    two.index.clear()
    two.shared.clear(1.2)
    two.work(1.2)
    assert two.shared.sharing
    one.work(2.5)
    assert len(one.index) == 0
    assert one.shared.counters.cleared == 1
    assert two.holders("ab", 2.6) == {}
    one.receive(Verb.CREATED, "ab", 2.7)
    one.work(2.8)
    two.work(3.8)
    assert two.holders("ab", 3.9) == {"http://x": 64}, "nobody clears twice"
    two.receive(Verb.CREATED, "cd", 4.0)
    two.work(5.0)
    assert len(two.index) == 1


def test_cx20_a_clear_is_reported_until_redis_has_it_and_what_is_received_after_it_stays() -> None:
    one, two = pair()
    two.receive(Verb.CREATED, "ab", 1.0)
    job = one.job(2.5)
    one.index.clear()
    one.shared.clear(2.6)
    one.receive(Verb.CREATED, "cd", 2.6)
    assert one.shared.done(job, one.redis.run(job.commands), 2.7), "it was begun before, and counts for nothing"
    one.fail(2.7)
    hello = one.job(5.0)
    one.shared.clear(5.1)  # once more, while it is under way
    assert one.shared.done(hello, one.redis.run(hello.commands), 5.2)
    assert not one.shared.sharing
    one.work(5.2)
    one.work(5.3)
    assert one.shared.sharing
    assert one.mirrored() == {"cd": {b"http://x": b"64 h"}}
    two.work(6.0)
    assert len(two.index) == 0


def test_cx20_a_router_that_was_away_during_a_clear_learns_of_it_when_it_comes_back() -> None:
    one, two = pair()
    one.receive(Verb.CREATED, "ab", 1.0)
    one.fail(2.5)
    two.shared.clear(2.6)
    two.work(2.6)
    one.work(5.0)
    assert len(one.index) == 0


# --- what is no reply -----------------------------------------------------------------------------------------------

replies = st.recursive(
    st.none() | st.integers() | st.binary(max_size=20) | st.just(ValueError("WRONGTYPE")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.binary(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(replies, max_size=5), st.booleans())
@settings(max_examples=examples(200))
def test_cr33_a_reply_of_any_form_is_taken_or_is_an_error_and_never_more(reply: list[object], hello: bool) -> None:
    one = Side(FakeRedis(), X) if hello else side(X)
    job = one.job(2.0)
    taken = one.shared.done(job, reply, 2.0)
    assert one.shared.errors["other"] == (not taken)


@given(st.dictionaries(st.sampled_from([b"http://x", b"http://y", b"?", b"\xff"]), st.binary(max_size=20)))
@settings(max_examples=examples(100))
def test_an_entry_of_any_content_is_read_or_left_out(entries: dict[bytes, bytes]) -> None:
    one, two = pair()
    two.redis.data[f"p:{one.shared.generation}:aa"] = {**entries, b"http://y": b"64 w"}
    assert two.holders("aa", 1.5)["http://y"] == 64
    assert two.shared.sharing


@pytest.mark.parametrize("value", [b"", b"64", b"-1 h", b"64 q", b"nan h", b"99999999999 h", b"9999999999 h", b"64 h "])
def test_an_entry_that_cannot_be_read_is_left_out_and_counted(value: bytes) -> None:
    one, two = pair()
    two.redis.data[f"p:{one.shared.generation}:aa"] = {b"http://x": value}
    assert two.holders("aa", 1.5) == {}
    assert two.shared.counters.garbage == 1
