"""PU8 to PU10 through a real Router, the sink and the push protocol's maps, by one clock and without a socket."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import trio

from ranvier_py.core.engine_cache.engine_caches import EngineCaches
from ranvier_py.core.engine_cache.sources.push_keys import key_of
from ranvier_py.core.engine_cache.sources.push_messages import read_eviction, read_sync
from ranvier_py.core.errors import NotFound
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher
from ranvier_py.core.prompts.prompt import PromptMemory
from ranvier_py.core.prompts.request_body import PromptReader
from ranvier_py.core.routing.backends import BackendLimits, Outcome, ProbeResult, Registry
from ranvier_py.core.routing.placement.policies import PlacementOptions, make_policy
from ranvier_py.core.routing.request_paths import COMPLETION_PATH
from ranvier_py.core.routing.router import Attempt, Router
from ranvier_py.node.engine_cache import push_parts
from ranvier_py.node.engine_cache.push_parts import LEASE_S, KeyInbox, WorkerReports
from ranvier_py.supervision import Faults
from tests.builders.route_tables import route_table

KEY = b"k" * 32


class World:
    """A node's core in front of some workers, and what these report."""

    def __init__(self, workers: int = 3, models: tuple[str, ...] = ("m",)) -> None:
        self.now = 0.0
        registry = Registry(BackendLimits())
        for number in range(workers):
            backend = registry.add(f"http://10.0.0.{number + 1}:8000", name=f"w{number}")
            registry.changes.probed(backend.id, ProbeResult(True, models=models), 0.0)
        inbox = KeyInbox(KEY, 16, "sticky_least_loaded")
        memory = PromptMemory()
        reader = PromptReader(TextHasher(KEY), inbox.hasher, memory, identity="t", bytes_per_token=4.0, digest_seed=3)
        self.router = Router(
            reader=reader,
            hasher=TokenHasher(KEY),
            routes=route_table(),
            registry=registry,
            policy=make_policy("sticky_least_loaded", PlacementOptions()),
            rng=Random(1),
        )
        self.engine_caches = EngineCaches(self.router.routes, lambda backend: registry[backend].generation)
        self.faults = Faults()
        self.reports = WorkerReports(self.router, self.engine_caches, inbox, faults=self.faults, clock=lambda: self.now)

    def restart(self) -> None:
        """The router's process ends and begins again."""
        now, workers = self.now, len(self.router.registry)
        self.__init__(workers)  # type: ignore[misc]
        self.now = now

    def start_attempt(self, ids: Sequence[int], **fields: Any) -> Attempt:
        body = json.dumps({"model": "m", "prompt": list(ids), **fields}).encode()
        prompt = self.router.read(COMPLETION_PATH, body)
        self.reports.drain()
        decision = self.router.place(prompt, self.router.find(prompt, self.now))
        return self.router.start_attempt(prompt, decision, self.now)

    def serve(self, ids: Sequence[int], **fields: Any) -> tuple[str, str]:
        """One request from its start to its end: who served it, and why."""
        attempt = self.start_attempt(ids, **fields)
        self.router.first_token(attempt, self.now)
        self.router.finish_attempt(attempt, Outcome.SUCCESS, self.now)
        return attempt.decision.backend_name, attempt.decision.reason

    def busy(self, worker: str, requests: int = 5) -> None:
        """So many requests of somebody else's."""
        backend = self.router.registry.ids.find(worker)
        assert backend is not None
        for _ in range(requests):
            self.router.registry.dispatched(backend, self.now)

    async def evict(self, worker: str, *keys: int, **more: Any) -> dict[str, Any]:
        body = {"worker_id": worker, "evicted_hashes": [f"{key:064x}" for key in keys], **more}
        return dict(await self.reports.evicted(read_eviction(body)))

    async def sync(self, worker: str, *keys: int, **more: Any) -> dict[str, Any]:
        body = {"worker_id": worker, "active_hashes": [f"{key:064x}" for key in keys], **more}
        return dict(await self.reports.synced(read_sync(body)))


def ids(number: int, length: int = 200) -> list[int]:
    return list(range(1000 * number, 1000 * number + length))


def key(number: int) -> int:
    return key_of(ids(number), 64)


async def test_pu8_a_hit_goes_to_the_least_loaded_of_those_that_the_map_names_even_if_others_are_idler() -> None:
    world = World(4)
    await world.sync("w1", key(1))
    await world.sync("w2", key(1))
    world.busy("w1", 9)
    world.busy("w2", 3)
    assert world.serve(ids(1)) == ("w2", "hit")


async def test_pu8_a_hundred_concurrent_requests_of_one_new_prefix_go_to_one_worker() -> None:
    world = World()
    for worker in ("w0", "w1", "w2"):
        await world.sync(worker)
    attempts = [world.start_attempt([*ids(1, 64), number]) for number in range(100)]
    assert len({attempt.target.id for attempt in attempts}) == 1
    assert [attempt.decision.reason for attempt in attempts] == ["miss", *["hit"] * 99]


async def test_pu2_a_request_may_name_the_length_of_its_prefix_and_0_is_the_default() -> None:
    world = World(2)
    await world.sync("w0", key(1), key_of(ids(1), 128))
    world.busy("w0")
    beginning = ids(1)[:100]  # w0 has it for 64 tokens, not for 128
    assert world.serve([*beginning, *ids(8)], prefix_len=0) == ("w0", "hit")
    assert world.serve([*beginning, *ids(9)], prefix_len=128) == ("w1", "miss")
    assert world.serve(ids(1), prefix_len=128) == ("w0", "hit"), "that length is known by now"


async def test_pu9_cold_start_stickiness_eviction_and_recovery_are_the_four_states_of_the_report() -> None:
    world = World(2)
    first, reason = world.serve(ids(1))
    assert reason == "miss"
    await world.sync(first, key(1))
    world.busy(first)
    assert world.serve(ids(1)) == (first, "hit")
    await world.evict(first, key(1))
    other, reason = world.serve(ids(1))
    assert reason == "miss"
    assert other != first
    assert world.serve(ids(1)) == (other, "hit")


async def test_pu9_what_lies_below_an_evicted_prefix_goes_with_it_and_nothing_else() -> None:
    world = World(2)
    first, _ = world.serve(ids(1, 800))
    second, _ = world.serve(ids(2, 800))
    await world.sync(first, *[key(number) for number, name in ((1, first), (2, second)) if name == first])
    await world.evict(first, key(1))
    assert world.serve(ids(1, 800))[1] == "miss"
    assert world.serve(ids(2, 800)) == (second, "hit")


async def test_pu10_a_router_that_was_restarted_finds_the_holders_with_the_first_sync_and_the_first_prompt() -> None:
    world = World()
    await world.sync("w2", key(1))
    world.restart()
    world.busy("w2")
    assert world.serve(ids(1))[1] == "miss", "it knows nothing yet"
    world.restart()
    world.busy("w2")
    await world.sync("w2", key(1))
    assert world.serve(ids(1)) == ("w2", "hit")


async def test_pu10_a_phantom_is_gone_after_one_sync() -> None:
    world = World(2)
    first, _ = world.serve(ids(1))
    await world.sync(first, key(1))
    await world.sync(first)  # the report of its eviction was lost
    world.busy(first)
    assert world.serve(ids(1))[1] == "miss"


async def test_pu10_the_first_sync_of_a_worker_ends_what_was_believed_of_it_before() -> None:
    world = World(2)
    first, _ = world.serve(ids(1))  # nobody reports yet: no lease
    await world.sync(first, key(2))
    world.busy(first)
    assert world.serve(ids(1))[1] == "miss"


async def test_px4_a_snapshot_does_not_wipe_out_what_was_served_a_moment_ago() -> None:
    """In the report it does: one request in five, where a worker's table lags by a second."""
    world = World(2)
    for worker in ("w0", "w1"):
        await world.sync(worker)
    first, _ = world.serve(ids(1))
    await world.sync(first)  # taken before the prompt was cached
    world.busy(first)
    assert world.serve(ids(1)) == (first, "hit")
    world.now += 5.0
    await world.sync(first, key(1))
    world.now += LEASE_S
    await world.sync(first, key(1))
    world.reports.tick(world.now)
    assert world.serve(ids(1)) == (first, "hit")


async def test_px4_what_a_worker_never_confirms_is_withdrawn_at_the_end_of_its_lease() -> None:
    world = World(2)
    for worker in ("w0", "w1"):
        await world.sync(worker)
    first, _ = world.serve(ids(1))
    world.now += 5.0
    assert world.serve(ids(1))[0] == first, "which confirms nothing"
    world.busy(first)
    world.now += LEASE_S - 5.1
    for worker in ("w0", "w1"):
        await world.sync(worker)
    world.reports.tick(world.now)
    assert world.start_attempt(ids(1)).decision.reason == "hit"
    world.now += 0.2
    world.reports.tick(world.now)
    assert world.reports.map.counters.leases_ended == 1
    assert world.router.routes.match([(64, world.reports.links.part(0, 1)[0].fingerprint, 0)], [1, 1], world.now) == []


async def test_px7_a_silent_workers_map_is_not_asked_any_more() -> None:
    world = World(2)
    await world.sync("w0", key(1))
    world.now = 20.0
    world.reports.tick(world.now)
    assert world.serve(ids(1))[1] == "miss"
    assert world.reports.views()[0]["level"] == "estimated"


async def test_px11_keys_of_one_model_mean_nothing_to_another() -> None:
    world = World(2, models=("m", "other"))
    await world.sync("w0", key(1), model="other")
    world.busy("w0")
    assert world.serve(ids(1))[1] == "miss"
    assert world.serve(ids(1), model="other") == ("w0", "hit")


async def test_pu3_a_prompt_with_a_salt_is_never_taken_for_one_without() -> None:
    world = World(2)
    await world.sync("w0", key(1))
    world.busy("w0")
    assert world.serve(ids(1), cache_salt="tenant")[1] == "miss"
    assert world.reports.map.counters.keys_foreign == 1


async def test_a_worker_that_is_no_backend_is_reported_so() -> None:
    world = World(1)
    with pytest.raises(NotFound, match="worker_id"):
        await world.evict("stranger", key(1))


async def test_claims_of_what_is_held_outlive_their_time_to_live() -> None:
    world = World(2)
    await world.sync("w0", key(1))
    world.start_attempt(ids(1))
    for _ in range(80):
        world.now += 100.0
        await world.sync("w0", key(1))
        world.reports.tick(world.now)
    link = world.reports.links.part(0, 1)[0]
    held = world.router.routes.match([(64, link.fingerprint, 0)], [1, 1], world.now)
    assert [holder.backend for holder in held] == [0]


async def test_a_restarted_engine_holds_nothing_whatever_its_reporter_still_believes() -> None:
    world = World(2)
    await world.sync("w0", key(1))
    backend = world.router.registry.ids.by_name["w0"]
    world.router.registry.changes.restart(backend, "test", world.now)
    world.reports.tick(world.now)
    assert len(world.reports.map) == 0
    world.busy("w0")
    assert world.serve(ids(1))[1] == "miss"


async def test_a_worker_that_is_removed_takes_its_map_with_it() -> None:
    world = World(2)
    await world.sync("w0", key(1))
    world.router.registry.remove("w0")
    world.reports.tick(0.0)
    assert len(world.reports.map) == 0
    assert world.reports.views() == []


async def test_what_a_removed_worker_did_not_hold_is_not_withdrawn_from_the_next_one_with_its_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push_parts, "SLICE_LINKS", 1)
    world = World(1)
    prompts = [ids(number) for number in range(1, 9)]
    for prompt in prompts:
        world.serve(prompt)
    world.now += LEASE_S
    registry = world.router.registry
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.sync, "w0")
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        gone = registry.remove("w0")
        world.reports.removed(gone)
        added = registry.add("http://10.0.0.9:8000", name="next")
        assert added.id == gone.id
        registry.changes.probed(added.id, ProbeResult(True, models=("m",)), world.now)
        await world.sync("next", *[key(number) for number in range(1, 9)])
    assert {world.start_attempt(prompt).decision.reason for prompt in prompts} == {"hit"}


async def test_a_bug_in_what_follows_reports_does_not_end_the_node(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    world = World()
    monkeypatch.setattr(world.reports.events, "tick", fail)
    with trio.move_on_after(10):
        await world.reports.run()
    assert world.faults.counters.unexpected_errors == {"pushed_events": 7}
