"""PU4 to PU6 and PU10 from the worker's side: what is sent, when, and what becomes of what was not answered."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.engine_cache.sources.push_book import Book
from ranvier_py.core.engine_cache.sources.push_messages import read_eviction, read_sync
from ranvier_py.core.engine_cache.sources.push_sender import (
    EVICTION_PATH,
    SYNC_PATH,
    Posting,
    Sender,
    SenderSettings,
    Speaker,
)
from ranvier_py.core.engine_cache.sources.push_state import PushMap, Word
from ranvier_py.core.engine_cache.sources.push_table import Entry
from ranvier_py.core.ids import BackendId

A = BackendId(0)
OK: Mapping[str, Any] = {"status": "ok", "resync": False, "want": None}


def key(number: int) -> int:
    return number << 200 | number


def hexed(*numbers: int) -> list[str]:
    return [f"{key(number):064x}" for number in numbers]


class Side:
    """A worker's reporter, and a router at the other end of a wire that a test may cut."""

    def __init__(self, *, plain: bool = False, **options: Any) -> None:
        self.book = Book()
        speaker = Speaker("w1", "" if plain else "i1")
        self.sender = Sender(speaker, "prefix_hash", self.book, Random(1), SenderSettings(**options))
        self.router = PushMap()
        self.sent: list[Posting] = []

    def hold(self, *numbers: int) -> None:
        for number in numbers:
            self.book.hold(Entry(key(number)))
        self.sender.note(self.book.take_changed())

    def lose(self, *numbers: int) -> None:
        for number in numbers:
            self.book.lose(key(number))
        self.sender.note(self.book.take_changed())

    def step(self, now: float, *, lost: bool = False) -> Posting | None:
        posting = self.sender.next(now)
        if posting is None:
            return None
        self.sent.append(posting)
        body = orjson.loads(orjson.dumps(posting.body))
        reply = OK if lost else self.take(posting.path, body, now)  # lost: somebody between said yes
        self.sender.answered(200, reply, now)
        return posting

    def run(self, now: float) -> list[Posting]:
        """All that is due at this moment."""
        before = len(self.sent)
        while self.step(now) is not None:
            assert len(self.sent) - before < 50, "it never ends"
        return self.sent[before:]

    def take(self, path: str, body: Mapping[str, Any], now: float) -> Mapping[str, Any]:
        """What a router does with a message."""
        if path == EVICTION_PATH:
            message = read_eviction(body, "m")
            if not self.router.hear(A, message.word, now):
                return {"status": "old", "resync": False, "want": None}
            self.router.evict(A, message.evicted)
            self.router.store(A, message.stored)
            return {"status": "ok", "resync": not self.router.workers[A].synced, "want": None}
        sync = read_sync(body, "m")
        if not self.router.hear(A, sync.word, now):
            return {"status": "old", "resync": True, "want": None}
        want: Any = None
        if sync.sums is not None:
            want = self.router.workers[A].table.differing(sync.sums)
        elif sync.digest is not None:
            want = None if self.router.compare(A, sync.hashes, sync.digest, now) else "sums"
        else:
            filling = self.router.begin(A)
            for place, found in (sync.active or sync.buckets or {}).items():
                self.router.replace(A, filling, place, found)
            self.router.finish(A, filling, now, whole=sync.active is not None)
        return {"status": "ok", "resync": False, "want": want}

    @property
    def agrees(self) -> bool:
        return sorted(self.router.workers[A].table) == sorted(self.book.table)


def test_pu4_an_eviction_report_has_the_members_of_the_listing() -> None:
    side = Side(plain=True)
    side.hold(1, 2)
    side.run(0.0)
    side.lose(1)
    [posting] = side.run(0.2)
    assert posting == (EVICTION_PATH, {"worker_id": "w1", "evicted_hashes": hexed(1)})


def test_pu4_an_answer_that_is_no_200_is_lived_with() -> None:
    side = Side()
    for status in (400, 401, 404, 422, 500, 503):
        posting = side.sender.next(100.0 * status)
        assert posting is not None, status
        side.sender.answered(status, {}, 100.0 * status)
        side.sender.misnamed = False
    assert side.sender.counts.refused == 4
    assert side.sender.counts.failed == 2


def test_pu5_ten_thousand_evictions_are_one_request_and_nothing_is_sent_when_there_is_nothing() -> None:
    side = Side()
    side.hold(*range(10_000))
    side.run(0.0)
    assert side.run(0.2) == []
    for start in range(0, 10_000, 100):
        side.lose(*range(start, start + 100))
    [posting] = side.run(0.3)
    assert len(posting.body["evicted_hashes"]) == 10_000
    assert side.agrees


def test_pu5_reports_leave_every_100_ms() -> None:
    side = Side()
    side.run(0.0)
    times = []
    for tick in range(40):
        side.hold(tick)
        times += [0.01 * tick for _ in side.run(0.01 * tick)]
    assert 3 <= len(times) <= 4
    assert all(later - earlier > 0.095 for earlier, later in pairwise(times))


def test_what_came_and_went_between_two_reports_is_told_as_it_is_now() -> None:
    side = Side()
    side.run(0.0)
    side.hold(1, 2)
    side.lose(1)
    [posting] = side.run(1.0)
    assert posting.body["evicted_hashes"] == hexed(1)
    assert posting.body["stored"] == hexed(2)


def test_pu6_in_the_plain_form_all_hashes_leave_every_5_s() -> None:
    side = Side(plain=True)
    side.hold(1, 2)
    syncs = []
    for tenths in range(200):
        syncs += [(tenths / 10, posting) for posting in side.run(tenths / 10) if posting.path == SYNC_PATH]
    assert [at for at, _ in syncs] == [0.0, 5.0, 10.0, 15.0]
    assert syncs[-1][1].body == {"worker_id": "w1", "active_hashes": hexed(1, 2)}
    assert side.router.workers[A].level is Level.EXACT


def test_px8_while_nothing_is_lost_a_sync_is_a_count_and_a_sum() -> None:
    side = Side()
    side.hold(*range(5000))
    side.run(0.0)
    assert side.agrees
    [posting] = side.run(5.0)
    assert set(posting.body) == {"worker_id", "hash_scheme", "incarnation", "seq", "count", "digest"}
    assert len(orjson.dumps(posting.body)) < 200


def test_pu10_a_lost_report_heals_with_the_next_sync() -> None:
    side = Side()
    side.hold(1, 2, 3)
    side.run(0.0)
    side.lose(2)
    side.step(1.0, lost=True)
    assert key(2) in side.router.workers[A].table
    side.run(5.0)
    assert side.agrees
    kinds = [set(posting.body) & {"digest", "sums", "buckets"} for posting in side.sent[-4:]]
    assert kinds == [{"digest"}, {"sums"}, {"buckets"}, {"digest"}]


def test_pu10_a_lost_report_shows_at_the_next_one_by_its_number() -> None:
    side = Side()
    side.hold(1, 2, 3)
    side.run(0.0)
    side.lose(2)
    side.step(1.0, lost=True)
    side.lose(3)
    side.run(1.2)
    side.run(1.4)
    assert side.agrees, "healed without waiting for the next sync"


def test_pu10_a_router_that_was_restarted_has_it_all_after_one_sync() -> None:
    side = Side()
    side.hold(*range(3000))
    side.run(0.0)
    side.router = PushMap()
    side.run(5.0)
    assert side.agrees
    assert side.router.workers[A].level is Level.EXACT


def test_px6_a_report_that_was_not_answered_is_sent_again_with_its_number_and_counts_once() -> None:
    side = Side()
    side.hold(1)
    side.run(0.0)
    side.lose(1)
    first = side.sender.next(0.2)
    assert first is not None
    side.take(first.path, orjson.loads(orjson.dumps(first.body)), 0.2)  # it came, its answer did not
    side.sender.failed(0.2)
    assert side.sender.next(0.2) is None, "not at once"
    again = side.step(5.0)
    assert again == first
    assert side.router.counts.old == 1
    side.run(5.0)
    assert side.agrees


def test_px6_what_waits_is_bounded_and_healed_by_a_comparison() -> None:
    side = Side(pending_max=100)
    side.run(0.0)
    side.hold(*range(150))
    assert side.sender.counts.overflowed == 150
    side.run(0.1)
    assert side.agrees


def test_a_reporter_notices_that_another_one_speaks_for_its_worker() -> None:
    side = Side()
    side.run(0.0)
    side.router.hear(A, Word("prefix_hash", "another", 1), 0.0)
    for second in (5.0, 10.0):
        side.hold(int(second))
        side.run(second)
    assert side.sender.old_in_a_row > 1


def test_a_large_cache_is_sent_in_several_messages() -> None:
    side = Side(batch_max=500)
    side.hold(*range(5000))
    side.run(0.0)
    side.router = PushMap()
    side.run(5.0)
    assert side.agrees
    assert max(len(posting.body.get("stored", ())) for posting in side.sent) == 500
    assert max(sum(map(len, posting.body.get("buckets", {}).values())) for posting in side.sent) < 600


def test_a_router_with_other_fingerprints_is_told_when_their_scheme_is_known() -> None:
    side = Side()
    side.hold(1)
    assert side.sender.next(0.0) is not None
    side.sender.answered(422, {}, 0.0)
    assert side.sender.misnamed
    assert side.sender.next(100.0) is None
    side.sender.renamed("prefix_hash")
    side.run(100.0)
    assert side.agrees


STEPS = st.lists(
    st.tuples(st.sampled_from(["hold", "lose", "cut", "lost", "restart", "run"]), st.integers(0, 30)), max_size=40
)


@given(STEPS)
@settings(max_examples=80, deadline=None)
def test_pu10_whatever_is_lost_two_syncs_later_both_sides_agree(steps: list[tuple[str, int]]) -> None:
    side, now = Side(), 0.0
    for verb, number in steps:
        now += 0.3
        if verb == "hold":
            side.hold(number, number + 1)
        elif verb == "lose":
            side.lose(number)
        elif verb == "restart":
            side.router = PushMap()
        elif verb == "run":
            side.run(now)
        elif verb == "lost":
            side.step(now, lost=True)
        elif side.sender.next(now) is not None:
            side.sender.failed(now)
    for _ in range(2):
        now += 5.5
        side.run(now)
    assert side.agrees
    assert side.router.workers[A].level is Level.EXACT


def test_tiers_and_depths_travel() -> None:
    side = Side()
    side.book.hold(Entry(key(1), 64, Tier.CPU))
    side.sender.note(side.book.take_changed())
    side.run(0.0)
    assert side.router.workers[A].table.tier(key(1)) is Tier.CPU
