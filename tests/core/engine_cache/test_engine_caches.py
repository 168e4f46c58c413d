"""What engines say becomes claims where the table is asked, and withdrawals; and a sweep heals the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from ranvier_py.core.engine_cache.engine_caches import GRACE_S, EngineCaches, Source
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.prefixes import Change
from ranvier_py.core.engine_cache.residency_values import Changes
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.fingerprint import MEDIA_MARK
from ranvier_py.core.routing.placement import Holder
from ranvier_py.core.routing.route_table import Trust
from tests.builders.route_tables import route_table

ENGINE, OTHER = BackendId(0), BackendId(1)
STREAM = Source(ENGINE, "zmq/0")


class Cache:
    """A Held that holds what the test wants."""

    def __init__(self) -> None:
        self.tiers: dict[int, Tier] = {}

    def held_among(self, fingerprints: Sequence[Fingerprint]) -> Mapping[Fingerprint, Tier]:
        return {name: self.tiers[name] for name in fingerprints if name in self.tiers}

    def store(self, *chain: tuple[int, int, int], tier: Tier = Tier.GPU) -> Changes:
        """(tokens, fingerprint, the anchor above) of each."""
        for _, name, _ in chain:
            self.tiers[name] = tier
        return reported(*chain, tier=tier)

    def remove(self, *chain: tuple[int, int, int]) -> Changes:
        for _, name, _ in chain:
            del self.tiers[name]
        return reported(*chain, tier=Tier.ABSENT)


def reported(*chain: tuple[int, int, int], tier: Tier, cleared: bool = False) -> Changes:
    changes = [Change(Fingerprint(name), tokens, tier, Fingerprint(above)) for tokens, name, above in chain]
    return Changes(cleared, tuple(changes), complete=True)


class World:
    def __init__(self) -> None:
        self.routes = route_table(capacity=1000, ttl_s=1000.0)
        self.routes.outgoing.collect()
        self.generations = [1, 1]
        self.hybrids: set[BackendId] = set()
        self.engine_caches = EngineCaches(
            self.routes,
            lambda backend: self.generations[backend],
            is_hybrid=lambda backend: backend in self.hybrids,
            restarted=self.restarted,
        )
        self.cache = Cache()
        self.engine_caches.open(STREAM, self.cache, 0.0)

    def restarted(self, backend: BackendId, why: str, now: float) -> int:
        self.generations[backend] += 1
        return self.generations[backend]

    def holders(self, *chain: tuple[int, int, int], now: float = 10.0, wanted: int = 1) -> list[Holder]:
        return self.routes.match(chain, self.generations, now, wanted=wanted)

    def sweep(self, now: float) -> None:
        self.engine_caches.sweep(now, 10_000)


RUN = ((16, 101, 0), (32, 102, 101), (48, 103, 102), (64, 104, 102))


def test_stored_blocks_become_confirmed_claims_at_anchors() -> None:
    world = World()
    world.engine_caches.changed(STREAM, world.cache.store(*RUN), 10.0)
    assert world.holders((64, 104, 0)) == [Holder(ENGINE, 64, Trust.CONFIRMED)]
    assert not world.holders((48, 103, 0)), "48 tokens are no anchor, and nobody asked for them"
    (top,) = world.routes.subtree(101)[:1]
    assert (top.parent, [view.tokens for view in world.routes.subtree(101)]) == (0, [16, 32, 64])


def test_a_row_that_traffic_made_is_confirmed_at_any_depth() -> None:
    world = World()
    world.routes.learn([(48, 103, 203)], OTHER, 1, Trust.LOCAL, 9.0)
    world.engine_caches.changed(STREAM, world.cache.store(*RUN), 10.0)
    assert world.holders((48, 0, 203), wanted=2)[0] == Holder(ENGINE, 48, Trust.CONFIRMED)


def test_a_removal_withdraws_the_claim_and_what_is_below_it_and_is_reported() -> None:
    world = World()
    world.engine_caches.changed(STREAM, world.cache.store(*RUN), 10.0)
    world.routes.learn([(80, 105, 0), (64, 104, 0)], ENGINE, 1, Trust.LOCAL, 10.0)
    world.engine_caches.changed(STREAM, world.cache.remove(RUN[3]), 11.0)
    assert world.holders((80, 105, 0), (64, 104, 0), (32, 102, 0)) == [Holder(ENGINE, 32, Trust.CONFIRMED)]
    assert [
        (updates.backend, updates.generation, updates.fingerprint) for updates in world.routes.outgoing.withdrawn
    ] == [(ENGINE, 1, 104), (ENGINE, 1, 105)]


def test_a_restart_begins_a_generation_and_what_came_with_it_counts_for_that() -> None:
    world = World()
    world.engine_caches.changed(STREAM, world.cache.store(*RUN), 10.0)
    world.cache.tiers.clear()
    changes = world.cache.store((16, 101, 0))
    world.engine_caches.changed(STREAM, changes._replace(cleared=True), 11.0)
    assert world.generations == [2, 1]
    assert world.holders((64, 104, 0), (16, 101, 0), now=11.0) == [Holder(ENGINE, 16, Trust.CONFIRMED)]


def test_a_restart_that_was_noticed_otherwise_begins_no_second_generation() -> None:
    world = World()
    world.engine_caches.changed(STREAM, world.cache.store(*RUN), 10.0)
    world.generations[ENGINE] += 1  # a probe saw it first
    world.engine_caches.changed(STREAM, reported(tier=Tier.GPU, cleared=True), 11.0)
    assert world.generations == [2, 1]


def test_a_sweep_at_exact_withdraws_what_is_not_held_once_the_grace_is_over() -> None:
    world = World()
    world.routes.learn([(64, 104, 204), (32, 102, 0)], ENGINE, 1, Trust.LOCAL, 10.0)
    world.engine_caches.changed(STREAM, world.cache.store(*RUN[:2]), 10.0)
    world.engine_caches.set_level(STREAM, Level.EXACT, "", 10.0)
    world.sweep(10.0 + GRACE_S / 2)
    assert world.holders((64, 104, 204)), "the event may still come"
    world.sweep(11.0 + GRACE_S)
    assert world.holders((64, 104, 204), (32, 102, 0)) == [Holder(ENGINE, 32, Trust.CONFIRMED)]


def test_a_prompt_with_media_is_not_taken_for_gone_because_no_event_names_it() -> None:
    """It goes with what is above it, and with a restart."""
    world = World()
    world.engine_caches.set_level(STREAM, Level.EXACT, "nothing missed", 0.0)
    picture = 7 << 32 | MEDIA_MARK
    world.engine_caches.changed(STREAM, world.cache.store((16, 101, 0)), 10.0)
    world.routes.learn([(32, picture, 9), (16, 101, 0)], ENGINE, 1, Trust.LOCAL, 10.0)
    world.routes.learn([(32, 8, 0), (16, 101, 0)], ENGINE, 1, Trust.LOCAL, 10.0)
    world.sweep(10.0 + GRACE_S + 2)
    assert world.holders((32, picture, 9), now=20.0)
    assert not world.holders((32, 8, 0), now=20.0)
    world.engine_caches.changed(STREAM, world.cache.remove((16, 101, 0)), 20.0)
    assert not world.holders((32, picture, 9), now=20.0)


def test_nothing_is_withdrawn_for_not_being_held_below_exact() -> None:
    world = World()
    world.routes.learn([(64, 104, 204)], ENGINE, 1, Trust.LOCAL, 10.0)
    for level in (Level.ESTIMATED, Level.REPAIRING, Level.DEGRADED):
        world.engine_caches.set_level(STREAM, level, "", 10.0)
        world.sweep(100.0)
        assert world.holders((64, 104, 204), now=100.0)


def test_a_sweep_keeps_what_is_held_alive_past_its_time_to_live() -> None:
    world = World()
    world.engine_caches.changed(STREAM, world.cache.store(*RUN), 10.0)
    world.engine_caches.set_level(STREAM, Level.EXACT, "", 10.0)
    for now in range(300, 3000, 300):
        world.sweep(float(now))
    assert world.holders((64, 104, 0), now=2900.0)


def test_a_generation_that_began_for_nothing_costs_no_claim_of_what_is_held() -> None:
    """A probe that was refused may be a false alarm; the events never stopped."""
    world = World()
    world.engine_caches.changed(STREAM, world.cache.store(*RUN), 10.0)
    world.engine_caches.set_level(STREAM, Level.EXACT, "", 10.0)
    world.generations[ENGINE] += 1
    assert not world.holders((64, 104, 0))
    for second in range(11, 20):
        world.engine_caches.sweep(float(second), 1)
        world.routes.sweep(float(second), world.generations, 1)
    assert world.holders((64, 104, 0), now=20.0) == [Holder(ENGINE, 64, Trust.CONFIRMED)]


def test_a_restart_that_two_channels_report_begins_one_generation() -> None:
    """The second one would void what the new process has served by then."""
    world = World()
    push = Source(ENGINE, "push")
    world.engine_caches.open(push, Cache(), 0.0)
    for source in (STREAM, push):
        world.engine_caches.changed(source, reported(*RUN, tier=Tier.GPU), 10.0)
    for source, now in ((STREAM, 20.0), (push, 23.0)):
        world.engine_caches.changed(source, Changes(True, (), complete=True), now)
    assert world.generations == [2, 1]
    world.engine_caches.changed(push, Changes(True, (), complete=True), 90.0)
    assert world.generations == [3, 1], "that is another one"


def test_routes_below_the_gpu_show_it_until_they_are_back() -> None:
    world = World()
    world.engine_caches.changed(STREAM, world.cache.store(*RUN, tier=Tier.CPU), 10.0)
    assert world.holders((64, 104, 0)) == [Holder(ENGINE, 64, Trust.CONFIRMED, 1)]
    world.engine_caches.changed(STREAM, world.cache.store(*RUN), 11.0)
    assert world.holders((64, 104, 0)) == [Holder(ENGINE, 64, Trust.CONFIRMED, 0)]


def test_an_engine_is_known_as_well_as_its_best_channel_and_a_channel_as_its_worst_rank() -> None:
    world = World()
    second, push = Source(ENGINE, "zmq/1"), Source(ENGINE, "push")
    world.engine_caches.open(second, Cache(), 1.0)
    world.engine_caches.set_level(STREAM, Level.EXACT, "", 1.0)
    assert world.engine_caches.level(ENGINE) is Level.ESTIMATED
    world.engine_caches.open(push, Cache(), 1.0)
    world.engine_caches.set_level(push, Level.DEGRADED, "", 1.0)
    assert world.engine_caches.level(ENGINE) is Level.DEGRADED
    world.engine_caches.close(push, 2.0)
    world.engine_caches.set_level(second, Level.EXACT, "", 2.0)
    assert world.engine_caches.level(ENGINE) is Level.EXACT
    assert world.engine_caches.level(OTHER) is Level.ESTIMATED


def test_what_one_rank_drops_and_another_holds_stays() -> None:
    world = World()
    second, other = Source(ENGINE, "zmq/1"), Cache()
    world.engine_caches.open(second, other, 1.0)
    world.engine_caches.changed(STREAM, world.cache.store(*RUN), 10.0)
    world.engine_caches.changed(second, other.store(*RUN), 10.0)
    world.engine_caches.changed(STREAM, world.cache.remove(RUN[3]), 11.0)
    assert world.holders((64, 104, 0))
    world.engine_caches.changed(second, other.remove(RUN[3]), 12.0)
    assert not world.holders((64, 104, 0))


def test_reports_of_unknown_sources_are_counted() -> None:
    world = World()
    world.engine_caches.changed(Source(OTHER, "zmq/0"), reported((16, 101, 0), tier=Tier.GPU), 10.0)
    world.generations[ENGINE] = -1
    world.engine_caches.changed(STREAM, reported((16, 101, 0), tier=Tier.GPU), 10.0)
    assert (world.engine_caches.counters.unknown, len(world.routes)) == (2, 0)


def test_a_sweep_takes_the_nearest_tier_of_all_ranks() -> None:
    world = World()
    second, other = Source(ENGINE, "zmq/1"), Cache()
    world.engine_caches.open(second, other, 1.0)
    for source in (STREAM, second):
        world.engine_caches.set_level(source, Level.EXACT, "", 1.0)
    world.cache.tiers = {103: Tier.CPU, 104: Tier.CPU}
    other.tiers = {103: Tier.GPU, 105: Tier.DISK}
    world.routes.learn([(80, 105, 0), (64, 104, 0), (48, 103, 0)], ENGINE, 1, Trust.LOCAL, 1.0)
    world.sweep(2.0)
    found = [world.holders(key, now=2.0)[0].tier for key in ((80, 105, 0), (64, 104, 0), (48, 103, 0))]
    assert found == [1, 1, 0]


def test_one_engine_fills_its_share_of_the_table_and_no_more_whatever_it_reports() -> None:
    """Else a stream of garbage would push out what is known of all others."""
    world = World()
    world.routes.learn([(48, 7, 8)], OTHER, 1, Trust.REMOTE, 1.0)
    for number in range(1000):
        world.engine_caches.changed(STREAM, world.cache.store((16, 10_000 + number, 0)), 10.0)
    assert 0.2 * world.routes.capacity < len(world.routes) < 0.3 * world.routes.capacity
    assert world.engine_caches.counters.refused > 700
    assert world.holders((48, 7, 8))
    world.routes.learn([(16, 20_000, 0)], OTHER, 1, Trust.LOCAL, 10.0)
    world.engine_caches.changed(STREAM, world.cache.store((16, 20_000, 0)), 11.0)
    assert len(world.holders((16, 20_000, 0), now=11.0, wanted=2)) == 2, "what traffic knows is confirmed all the same"
    before = len(world.routes)
    world.engine_caches.changed(STREAM, world.cache.store(*RUN)._replace(cleared=True), 13.0)
    assert len(world.routes) > before, "an engine that begins anew has its share anew"


def test_rows_that_went_by_themselves_do_not_count_against_an_engine_for_ever() -> None:
    world = World()
    for number in range(300):
        world.engine_caches.changed(STREAM, world.cache.store((16, 10_000 + number, 0)), 10.0)
    refused = world.engine_caches.counters.refused
    assert refused
    world.routes.sweep(5000.0, world.generations, 10_000)
    assert not len(world.routes)
    for _ in range(2):
        world.sweep(5000.0)
    world.engine_caches.changed(STREAM, world.cache.store(*RUN), 5001.0)
    assert (len(world.routes), world.engine_caches.counters.refused) == (3, refused)


@pytest.mark.parametrize("name", ["zmq/0", "push", "pushed/0", "index"])
def test_of_a_hybrid_no_channel_confirms_a_prefix_and_each_withdraws_it(name: str) -> None:
    world, source = World(), Source(ENGINE, name)
    world.engine_caches.open(source, world.cache, 0.0)
    world.engine_caches.set_level(source, Level.EXACT, "", 0.0)
    world.hybrids.add(ENGINE)
    world.engine_caches.changed(source, world.cache.store(*RUN), 10.0)
    assert not world.holders((64, 104, 0), (32, 102, 0))
    assert world.engine_caches.level(ENGINE) is Level.ESTIMATED
    assert world.engine_caches.reason(ENGINE).startswith("a hybrid")
    world.routes.learn([(64, 104, 0), (32, 102, 0)], ENGINE, 1, Trust.LOCAL, 10.0)
    world.engine_caches.changed(source, world.cache.remove(RUN[3]), 11.0)
    assert world.holders((64, 104, 0), (32, 102, 0), now=11.0) == [Holder(ENGINE, 32, Trust.LOCAL)]


@pytest.mark.parametrize("by_events", [False, True])
def test_what_was_confirmed_before_an_engine_is_known_as_a_hybrid_is_withdrawn(by_events: bool) -> None:
    """What was served is not: that it was reused before is the better guess."""
    world = World()
    world.engine_caches.changed(STREAM, world.cache.store(*RUN), 10.0)
    world.routes.learn([(64, 204, 0)], ENGINE, 1, Trust.LOCAL, 10.0)
    world.routes.learn([(64, 304, 0)], OTHER, 1, Trust.CONFIRMED, 10.0)
    world.engine_caches.set_level(STREAM, Level.EXACT, "", 11.0)
    assert world.engine_caches.level(ENGINE) is Level.EXACT
    if by_events:
        world.engine_caches.set_level(STREAM, Level.ESTIMATED, "", 12.0, mixed=True)
    else:
        world.hybrids.add(ENGINE)
    world.sweep(12.0)
    world.sweep(13.0)
    assert not world.holders((64, 104, 0), (32, 102, 0), (16, 101, 0), now=14.0)
    assert world.holders((64, 204, 0), now=14.0) == [Holder(ENGINE, 64, Trust.LOCAL)]
    assert world.holders((64, 304, 0), now=14.0) == [Holder(OTHER, 64, Trust.CONFIRMED)]


def test_an_engine_that_is_no_hybrid_any_more_is_believed_again() -> None:
    world = World()
    world.engine_caches.set_level(STREAM, Level.EXACT, "", 10.0)
    world.hybrids.add(ENGINE)
    world.sweep(10.0)
    world.hybrids.clear()
    world.sweep(11.0)
    world.engine_caches.changed(STREAM, world.cache.store(*RUN), 12.0)
    assert world.engine_caches.level(ENGINE) is Level.EXACT
    assert world.holders((64, 104, 0), now=12.0) == [Holder(ENGINE, 64, Trust.CONFIRMED)]
