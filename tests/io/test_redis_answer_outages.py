"""The response cache on a Redis that dies, hangs, refuses, is full or holds garbage.

Names begin with a criterion where there is one (CR, CX).
"""

from __future__ import annotations

import logging
import time
from random import Random

import pytest
import trio
import trio.testing

from tests.io.redis_answer_lab import DEADLINE_S, PREFIX, answer, found, has, hurried, key, made, running, written
from tests.io.redis_server import RedisServer, mortal, needs_redis, one_server, redis_server, server
from tests.waiting import until

pytestmark = [needs_redis, pytest.mark.usefixtures("hurried")]

__all__ = ["hurried", "mortal", "one_server", "server"]


async def test_cr13_redis_killed_in_the_middle_of_a_request_leaves_it_to_memory(mortal: RedisServer) -> None:
    one = made(mortal.url, retry_s=600, timeout_s=DEADLINE_S)
    async with running(one):
        await written(one, 1)
        mortal.pause()
        results: list[object] = []

        async def ask() -> None:
            results.append(await found(one, 1))

        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(ask)
            await until(lambda: one.view()["redis"]["connections"]["active"])
            one.keep(key(2), answer())
            mortal.kill()
        assert results == [None] * 60
        assert one.view()["redis"]["connections"]["idle"] == 0, "none is trusted any more"
        assert one.fallback_active
        assert (one.errors["connection"] > 0, one.counters.outages) == (True, 1)
        assert await has(one, 1, 2) == [2], "what was to be written, is"
        one.keep(key(3), answer())
        assert await has(one, 3) == [3]
        assert one.counters.fallback_hits == 2
        assert one.view()["entries"] == 2


async def test_cr33_redis_that_hangs_is_a_timeout_and_what_it_does_later_counts_for_nothing(
    mortal: RedisServer,
) -> None:
    one, two = made(mortal.url, timeout_s=0.5), made(mortal.url, timeout_s=DEADLINE_S)
    async with running(one, two):
        await written(one, 1)
        mortal.pause()
        began = time.monotonic()
        assert await found(one, 1) is None
        assert time.monotonic() - began < 5.0
        assert one.errors["timeout"] >= 1
        assert one.fallback_active
        assert await one.invalidate(None, None, None) == 0
        assert one.view()["redis"]["invalidation_owed"]
        mortal.resume()
        await until(lambda: one.sharing)
        assert not one.view()["redis"]["invalidation_owed"]
        assert await has(one, 1) == await has(two, 1) == []


async def test_cx20_what_was_invalidated_while_redis_was_away_does_not_come_back(mortal: RedisServer) -> None:
    one, two = made(mortal.url), made(mortal.url)
    async with running(one, two):
        for number in range(5):
            await written(one, number)
        mortal.kill()
        assert await found(one, 1) is None
        one.keep(key(7), answer())
        assert await one.invalidate(None, None, None) == 1
        one.keep(key(8), answer())
        mortal.start()
        assert mortal.client().dbsize() > 5, "Redis itself has forgotten nothing"
        await until(lambda: one.sharing and two.sharing)
        assert await has(one, *range(9)) == await has(two, *range(9)) == [], "nor does what memory had"


async def test_cx20_on_return_the_generation_is_raised_once_for_all(mortal: RedisServer) -> None:
    one, two = made(mortal.url), made(mortal.url)
    async with running(one, two):
        await until(lambda: two.view()["redis"]["generation"] == one.view()["redis"]["generation"])
        await written(one, 1)
        mortal.kill()
        await has(one, 1)
        await has(two, 1)
        raised = one.counters.generations + two.counters.generations
        mortal.start()
        await until(lambda: one.sharing and two.sharing)
        assert await has(one, 1) == await has(two, 1) == []
        assert raised < one.counters.generations + two.counters.generations <= raised + 2
        await until(lambda: two.view()["redis"]["generation"] == one.view()["redis"]["generation"])


async def test_what_memory_had_in_one_outage_is_not_found_in_the_next(mortal: RedisServer) -> None:
    one, two = made(mortal.url), made(mortal.url)
    async with running(one, two):
        for expected in ([7], []):
            mortal.kill()
            await has(one, 1)
            if expected:
                one.keep(key(7), answer())
            assert await has(one, 7) == expected
            mortal.start()
            await until(lambda: one.sharing and two.sharing)
            await two.invalidate(None, None, None)


async def test_without_the_fallback_requests_go_on_and_nothing_is_cached(mortal: RedisServer) -> None:
    one = made(mortal.url, fallback=False, retry_s=600)
    async with running(one):
        await written(one, 1)
        mortal.kill()
        assert await found(one, 1) is None
        one.keep(key(2), answer())
        assert await has(one, 1, 2) == []
        assert not one.fallback_active
        assert not one.view()["redis"]["connected"]
        assert await one.invalidate("m", None, None) == 0


async def test_cr12_memory_stands_in_with_a_room_and_a_time_of_its_own() -> None:
    one = made("unix:///nowhere", fallback_capacity=3, fallback_ttl_s=10.0)
    async with running(one, shares=False):
        await until(lambda: one.errors["connection"])
        for number in range(5):
            one.keep(key(number), answer())
        assert await has(one, *range(5)) == [2, 3, 4]
        one.keep(key(9), answer(age_s=11.0))
        assert await has(one, 9) == []


async def test_a_wrong_password_is_an_outage_that_shows_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with redis_server("--requirepass", "right") as server:
        one = made(f"unix://user:hunter2@{server.socket}")
        async with running(one, shares=False):
            await until(lambda: one.errors["connection"] >= 2)
            one.keep(key(1), answer())
            assert await has(one, 1) == [1]
            shown = f"{one.view()}{caplog.text}"
            assert "hunter2" not in shown
            assert caplog.text.count("response_cache.alone unix://") == 1, "once, until it is another trouble"


async def test_a_read_only_replica_is_done_without_until_it_takes_writes(mortal: RedisServer) -> None:
    one = made(mortal.url)
    async with running(one):
        await written(one, 1)
        mortal.client().config_set("replica-serve-stale-data", "yes")
        mortal.client().replicaof("127.0.0.1", "1")
        one.keep(key(2), answer())
        await until(lambda: not one.sharing)
        assert one.errors["other"] >= 1
        assert "READONLY" in one.trouble
        assert await has(one, 2) == [2]
        await until(lambda: one.errors["other"] >= 4)
        assert one.counters.outages == 1, "it does not come back before one may write"
        late = made(mortal.url)
        async with running(late, shares=False):
            await until(lambda: late.errors["other"] >= 2)
            assert not late.sharing, "though it has a generation"
        mortal.client().replicaof("NO", "ONE")
        await until(lambda: one.sharing)
        await written(one, 3)
        assert await has(one, 1, 3) == [3]


class Flapping:
    """Redis that comes and goes, and nodes that keep answers whose size is their number, and invalidate them.

    `floors`: at each node, the greatest number that was kept anywhere when it last invalidated all.
    """

    def __init__(self, server: RedisServer, seed: int) -> None:
        self.server, self.rng = server, Random(seed)
        self.nodes = [made(server.url, timeout_s=0.1) for _ in range(3)]
        self.floors = [0] * len(self.nodes)
        self.number, self.state = 0, "up"

    def harm(self) -> None:
        if self.rng.random() > 0.2:
            return
        if self.state == "up":
            self.state = self.rng.choice(("dead", "hanging"))
            self.server.kill() if self.state == "dead" else self.server.pause()
        else:
            self.server.start() if self.state == "dead" else self.server.resume()
            self.state = "up"

    async def step(self) -> None:
        index = self.rng.randrange(len(self.nodes))
        node, chance = self.nodes[index], self.rng.random()
        if chance < 0.1:
            floor = self.number
            await node.invalidate(None, None, None)
            self.floors[index] = max(self.floors[index], floor)
        elif chance < 0.5:
            self.number += 1
            node.keep(key(self.rng.randrange(5)), answer(self.number))
        else:
            await self.look(index, self.floors[index])

    async def look(self, index: int, floor: int) -> None:
        for number in range(5):
            stored = await found(self.nodes[index], number)
            assert stored is None or stored.size > floor, f"node {index}"

    async def recovered(self) -> None:
        if self.state != "up":
            self.server.start() if self.state == "dead" else self.server.resume()
        for node in self.nodes:
            await until(lambda node=node: node.sharing and not node.view()["redis"]["invalidation_owed"])  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(4))
async def test_cx20_a_flapping_redis_brings_no_invalidated_answer_back(mortal: RedisServer, seed: int) -> None:
    """Not to who invalidated it, at any time, and to nobody once all are there again."""
    place = Flapping(mortal, seed)
    async with running(*place.nodes):
        for _ in range(150):
            place.harm()
            await place.step()
            await trio.sleep(0.002)
        await place.recovered()
        for index in range(len(place.nodes)):
            await place.look(index, max(place.floors))
        while await has(place.nodes[1], 1) != [1]:  # and it is shared again
            await written(place.nodes[0], 1, answer(place.number + 1))


@pytest.mark.parametrize("kind", ["string", "long", "list", "other"])
async def test_garbage_under_the_key_of_an_answer_is_no_answer_and_is_replaced_by_one(
    server: RedisServer, kind: str
) -> None:
    one, two = made(server.url, bytes_max=5000), made(server.url, bytes_max=5000)
    async with running(one, two):
        await written(one, 1)
        await written(one, 2)
        client = server.client()
        name, other = (f"{PREFIX}{one.view()['redis']['generation']}:{key(number).hex()}" for number in (1, 2))
        whole = client.get(other)
        client.delete(name)
        if kind == "list":
            client.rpush(name, "a")
        else:
            client.set(name, {"string": b"\x00" * 50, "long": b"\x01" * (8 << 20), "other": whole}[kind])
        for node in (one, two):
            assert await has(node, 1, 2) == [2]
            assert node.counters.garbage == 1
            assert node.sharing
        assert int(client.info("stats")["total_net_output_bytes"]) < 1 << 20, "no more is taken than an answer may have"
        await written(one, 1)
        assert await has(two, 1, 2) == [1, 2]


async def test_a_redis_that_forbids_scripts_clears_all_and_one_that_forbids_more_is_away(mortal: RedisServer) -> None:
    one, two = made(mortal.url), made(mortal.url, retry_s=600)
    async with running(one, two):
        await written(one, 1)
        mortal.client().execute_command("ACL", "SETUSER", "default", "-eval")
        await one.invalidate("other", None, None)
        assert await has(two, 1) == []
        assert one.sharing
        await written(one, 2)
        mortal.client().execute_command("ACL", "SETUSER", "default", "-getrange")
        assert await has(two, 2) == []
        assert two.errors["other"] >= 1
        assert two.trouble == "refused: NoPermissionError"


@pytest.mark.parametrize("kind", ["nothing", "string", "hash"])
async def test_where_the_generation_is_lost_or_no_more_one_another_is_made_and_the_old_answers_are_gone(
    server: RedisServer, kind: str
) -> None:
    one, two = made(server.url), made(server.url)
    async with running(one, two):
        await written(one, 1)
        generation, client = one.view()["redis"]["generation"], server.client()
        client.delete(f"{PREFIX}generation")
        if kind == "string":
            client.set(f"{PREFIX}generation", b"\x93\x01\xa1a\x90")
        elif kind == "hash":
            client.hset(f"{PREFIX}generation", "a", "b")
        assert await has(two, 1) == []
        await until(lambda: two.view()["redis"]["generation"] not in (None, generation))
        one.keep(key(2), answer())
        while await has(two, 2) != [2]:
            one.keep(key(2), answer())
            await trio.sleep(0.005)
        assert await has(one, 1) == await has(two, 1) == []


async def test_redis_without_room_that_evicts_nothing_refuses_answers_and_is_still_asked() -> None:
    with redis_server("--maxmemory-policy", "noeviction") as server:
        one, two = made(server.url), made(server.url)
        async with running(one, two):
            await written(one, 1)
            server.client().config_set("maxmemory", 1)
            one.keep(key(2), answer())
            await until(lambda: one.counters.refused == 1)
            assert await has(one, 1, 2) == await has(two, 1, 2) == [1]
            await two.invalidate("other", None, None)  # which Redis has no room for
            assert await has(one, 1) == await has(two, 1) == [], "rather too much than too little"
            server.client().config_set("maxmemory", 0)
            await until(lambda: one.view()["redis"]["generation"] and two.view()["redis"]["generation"])
            while await has(two, 3) != [3]:
                one.keep(key(3), answer())
                await trio.sleep(0.005)
            assert one.counters.outages == two.counters.outages == 0


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru"])
async def test_redis_without_room_that_evicts_loses_answers_and_with_its_generation_all_of_them(policy: str) -> None:
    """A generation never expires, so volatile-lru keeps it. allkeys-lru takes seconds for moments, and may drop it."""
    with redis_server("--maxmemory-policy", policy) as server:
        one, two = made(server.url), made(server.url)
        used = int(server.client().info("memory")["used_memory"])
        server.client().config_set("maxmemory", used + (2 << 20))
        async with running(one, two):
            for number in range(300):
                await written(one, number, answer(20_000))
                await found(two, number)
            assert len(await has(two, *range(300))) < 300
            assert server.client().info("stats")["evicted_keys"] > 0
            while await has(two, 1) != [1]:
                await written(one, 1)
            assert policy == "allkeys-lru" or one.counters.generations + two.counters.generations == 1
            await one.invalidate("m", None, None)
            assert await has(two, *range(300)) == []
            assert one.counters.outages == two.counters.outages == 0
