"""From raw payloads to claims: what a stream decodes, repairs, settles and tells."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from ranvier_py.core.engine_cache.block_namespaces import Names, base_names
from ranvier_py.core.engine_cache.engine_caches import EngineCaches, Source
from ranvier_py.core.engine_cache.event_stream import SETTLE_S, EventStream
from ranvier_py.core.engine_cache.gap_values import AskPeer, AskReplay, GapSettings, Level, LevelChanged
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.residency_values import Scope
from ranvier_py.core.engine_cache.snapshot import Snapshot, SnapshotReader
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher
from ranvier_py.core.prompts.namespaces import TokenNamespaces
from ranvier_py.core.routing.route_table import RouteTable, Trust

KEY = b"k" * 32
HASHER = TokenHasher(KEY)
NAMESPACES = TokenNamespaces(TextHasher(KEY), "t")
ENGINE = BackendId(0)
TOKENS = list(range(64))


def fingerprint(count: int, model: str = "m", adapter: str = "", salt: str = "") -> Fingerprint:
    start = HASHER.start(NAMESPACES.of(model, adapter, salt))
    return HASHER.extend(start, np.array(TOKENS[:count], np.uint32), [count])[0].end[1]


def stored(first: int = 0, count: int = 4, **fields: Any) -> dict[str, Any]:
    tokens = TOKENS[16 * first : 16 * (first + count)]
    parent = first or None
    return {
        "type": "BlockStored",
        "block_hashes": list(range(first + 1, first + count + 1)),
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 16,
        **fields,
    }


def removed(*blocks: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(blocks)}


def payload(*events: dict[str, Any]) -> bytes:
    return bytes(msgpack.packb([0.0, list(events), 0]))


class World:
    def __init__(self, *base: str, settings: GapSettings | None = None) -> None:
        self.routes = RouteTable(capacity=1000)
        self.generations = [1]
        self.engine_caches = EngineCaches(
            self.routes, lambda backend: self.generations[backend], restarted=self.restarted
        )
        self.settings = settings or GapSettings(peers=False)
        self.base = base or ("m",)
        self.stream = self.another()
        self.now = 10.0
        self.stream.open(self.now)

    def another(self) -> EventStream:
        names = Names(HASHER, NAMESPACES.of, self.base)
        return EventStream(Source(ENGINE, "zmq/0"), self.engine_caches, HASHER, names, settings=self.settings)

    def restarted(self, backend: BackendId, _why: str, _now: float) -> int:
        self.generations[backend] += 1
        return self.generations[backend]

    def exact(self) -> None:
        """Connected to an engine that has not said anything yet."""
        (ask,) = [effect for effect in self.stream.connected(self.now) if isinstance(effect, AskReplay)]
        self.stream.replay_ended(ask.ask, self.now)
        assert self.engine_caches.level(ENGINE) is Level.EXACT

    def settle(self) -> None:
        while (at := self.stream.wake_at()) is not None and at <= self.now + SETTLE_S:
            self.now = max(self.now, at)
            self.stream.tick(self.now)

    def depth(self, model: str = "m", adapter: str = "", salt: str = "") -> int:
        chain = [(count, fingerprint(count, model, adapter, salt), 0) for count in (64, 32, 16)]
        found = self.routes.match(chain, self.generations, self.now)
        assert all(holder.trust == Trust.CONFIRMED for holder in found)
        return found[0].tokens if found else 0


def test_a_message_becomes_claims_a_moment_later_and_an_eviction_takes_them() -> None:
    world = World()
    world.exact()
    world.stream.live(0, payload(stored()), world.now)
    assert world.depth() == 0
    world.settle()
    assert world.depth() == 64
    assert world.engine_caches.tier(ENGINE, fingerprint(48)) is Tier.GPU
    world.stream.live(1, payload(removed(3, 4)), world.now)
    world.settle()
    assert world.depth() == 32


def test_a_restart_voids_everything_at_once() -> None:
    world = World()
    world.exact()
    world.stream.live(0, payload(stored()), world.now)
    world.stream.live(1, payload(), world.now)
    world.settle()
    world.stream.live(0, payload(stored(0, 1)), world.now)
    assert (world.depth(), world.generations) == (16, [2])


def test_a_cleared_cache_voids_everything_at_once_and_is_exact_again() -> None:
    world = World()
    world.stream.connected(world.now)
    world.stream.live(7, payload(stored()), world.now)
    world.stream.replay_failed(1, world.now)
    world.settle()
    assert (world.depth(), world.engine_caches.level(ENGINE)) == (64, Level.ESTIMATED)
    world.stream.live(8, payload({"type": "AllBlocksCleared"}, stored(0, 2)), world.now)
    world.settle()
    assert (world.depth(), world.engine_caches.level(ENGINE)) == (32, Level.EXACT)


def test_a_gap_is_filled_from_replay_while_live_messages_go_on() -> None:
    world = World()
    world.exact()
    world.stream.live(0, payload(stored(0, 1)), world.now)
    effects = world.stream.live(2, payload(stored(2, 2)), world.now)
    (ask,) = [effect for effect in effects if isinstance(effect, AskReplay)]
    assert world.engine_caches.level(ENGINE) is Level.REPAIRING
    world.stream.replayed(ask.ask, 0, payload(stored(0, 1)), world.now)
    world.stream.replayed(ask.ask, 1, payload(stored(1, 1)), world.now)
    world.settle()
    assert (world.depth(), world.engine_caches.level(ENGINE)) == (64, Level.EXACT)


def test_exact_waits_until_everything_is_settled() -> None:
    """Else a sweep would take what is not settled for what is not held."""
    world = World()
    world.stream.connected(world.now)
    assert LevelChanged(Level.EXACT, "nothing missed") in world.stream.live(0, payload(stored()), world.now)
    assert world.engine_caches.level(ENGINE) is Level.REPAIRING
    world.settle()
    assert world.engine_caches.level(ENGINE) is Level.EXACT


@pytest.mark.parametrize("bad", [b"garbage", payload({"type": "BlockStored", "block_hashes": 7})])
def test_what_cannot_be_read_costs_the_level_and_nothing_else(bad: bytes) -> None:
    world = World()
    world.exact()
    world.stream.live(0, payload(stored()), world.now)
    world.stream.live(1, bad, world.now)
    world.settle()
    assert (world.depth(), world.engine_caches.level(ENGINE)) == (64, Level.DEGRADED)
    assert world.stream.counts()["decoder_refused"] + world.stream.counts()["decoder_unread"] == 1


def test_a_peers_copy_fills_what_replay_cannot() -> None:
    there = World(settings=GapSettings())
    there.exact()
    there.stream.live(0, payload(stored(0, 2)), there.now)
    there.settle()
    here = World(settings=GapSettings())
    here.stream.connected(here.now)
    here.stream.live(1, payload(stored(2, 2)), here.now)
    effects = here.stream.replay_failed(1, here.now)
    (ask,) = [effect for effect in effects if isinstance(effect, AskPeer)]
    there.stream.live(1, payload(stored(2, 2)), there.now)
    there.settle()
    here.stream.snapshot_offered(ask.ask, snapshot_of(there.stream), here.now)
    here.settle()
    assert (here.depth(), here.engine_caches.level(ENGINE)) == (64, Level.EXACT)
    assert here.stream.snapshot_offered(ask.ask, None, here.now) == [], "that question is closed"


def snapshot_of(stream: EventStream) -> Snapshot:
    writer, reader = stream.snapshot(), SnapshotReader(HASHER)
    assert writer is not None
    while not writer.done:
        writer.step()
    for rows in writer.chunks:
        reader.add(rows)
    return Snapshot(writer.seq, writer.digest, reader.finish())


def test_nothing_is_exact_while_a_copy_is_made_and_messages_wait() -> None:
    world = World()
    world.exact()
    world.stream.live(0, payload(stored(0, 2)), world.now)
    world.settle()
    world.stream.residency.freeze()
    world.stream.live(1, payload(stored(2, 2)), world.now)
    world.now += 1.0
    world.stream.tick(world.now)
    assert world.depth() == 32
    world.stream.residency.thaw()
    world.now += 1.0
    world.settle()
    assert world.depth() == 64


def test_all_names_of_the_base_model_find_its_blocks() -> None:
    world = World("m", "alias", "other")
    world.exact()
    world.stream.live(0, payload(stored(extra_keys=[["s"], None, None, None])), world.now)
    world.settle()
    assert [world.depth(name, salt="s") for name in ("m", "alias", "other")] == [64, 64, 64]
    assert world.depth("m") == world.depth("stranger", salt="s") == 0
    world.routes.learn([(48, fingerprint(48, "alias", salt="s"), 7)], ENGINE, 1, Trust.LOCAL, world.now)
    world.engine_caches.sweep(world.now + 100.0, 1000)
    assert world.routes.match([(48, 0, 7)], [1], world.now + 100.0)[0].trust == Trust.CONFIRMED
    world.stream.live(1, payload(removed(3, 4)), world.now)
    world.settle()
    assert [world.depth(name, salt="s") for name in ("m", "alias", "other")] == [32, 32, 32]


def test_an_adapter_is_asked_for_by_its_own_name() -> None:
    world = World()
    world.exact()
    world.stream.live(0, payload(stored(lora_id=1, lora_name="adapter")), world.now)
    world.settle()
    assert (world.depth("adapter"), world.depth("m", "adapter"), world.depth("m")) == (64, 64, 0)


def test_an_adapter_without_a_name_and_an_engine_without_one_have_no_fingerprints() -> None:
    assert Names(HASHER, NAMESPACES.of, ["m"]).namespace(Scope(None, 3, None)) is None
    assert Names(HASHER, NAMESPACES.of, []).namespace(Scope(None, None, None)) is None
    assert Names(HASHER, NAMESPACES.of, []).namespace(Scope("a", None, "s")) == NAMESPACES.of("a", salt="s")


@pytest.mark.parametrize(
    ("cards", "names"),
    [
        ([], ()),
        ([{"id": "a"}], ("a",)),
        ([{"id": "a", "root": "/m"}, {"id": "b", "root": "/m"}, {"id": "x", "root": "/l", "parent": "a"}], ("a", "b")),
        ([{"id": "a", "root": "/m"}, {"id": "b", "root": "/n"}], ()),
        ([{"id": "a"}, {"id": "b"}], ()),
        ([{"id": 7}, {"id": "a", "root": None}], ("a",)),
    ],
)
def test_base_names_are_those_of_one_root(cards: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    assert base_names(cards) == names


def test_a_view_states_what_a_stream_knows() -> None:
    world = World()
    world.exact()
    world.stream.live(0, payload(stored(), {"type": "Unheard"}), world.now)
    world.settle()
    view = world.stream.view()
    assert (view["level"], view["next"], view["blocks"], view["block_tokens"]) == ("exact", 1, 4, 16)
    assert (view["unknown_tags"], view["counts"]["decoder_tags_skipped"]) == ({"Unheard": 1}, 1)
    (reported,) = world.engine_caches.sources()
    assert (reported.level, reported.changes, reported.source.name) == (Level.EXACT, 4, "zmq/0")


def test_a_closed_stream_states_nothing_of_the_one_that_follows_it() -> None:
    """Its connection ends a moment later, which is not the news of the next one."""
    world = World()
    old = world.stream
    world.exact()
    old.live(0, payload(stored()), world.now)
    old.close(world.now)
    assert world.engine_caches.level(ENGINE) is Level.ESTIMATED
    world.stream = world.another()
    world.stream.open(world.now)
    world.exact()
    old.tick(world.now + 1.0)
    old.disconnected(world.now + 1.0)
    assert (world.engine_caches.level(ENGINE), world.depth()) == (Level.EXACT, 0)


def test_a_standby_is_known_as_well_and_applies_nothing_until_it_is_opened() -> None:
    """What its reader found out came as routes of a peer; what went meanwhile is put right by the next sweep."""
    world = World()
    world.stream.close(world.now)
    (ask,) = [effect for effect in world.stream.connected(world.now) if isinstance(effect, AskReplay)]
    world.stream.replay_ended(ask.ask, world.now)
    world.stream.live(0, payload(stored()), world.now)
    world.stream.live(1, payload(removed(4)), world.now)
    world.settle()
    assert (world.stream.level, world.depth()) == (Level.EXACT, 0)
    assert world.engine_caches.level(ENGINE) is Level.ESTIMATED
    assert snapshot_of(world.stream).seq == 1
    for count in (32, 64):
        world.routes.learn([(count, fingerprint(count), 0)], ENGINE, 1, Trust.REMOTE, world.now)
    world.now += 20.0
    world.stream.open(world.now)
    assert world.engine_caches.level(ENGINE) is Level.EXACT
    world.engine_caches.sweep(world.now, 1000)
    assert world.depth() == 32
    world.stream.live(2, payload(removed(2)), world.now)
    world.settle()
    assert world.depth() == 0
    world.stream.close(world.now)
    assert world.engine_caches.level(ENGINE) is Level.ESTIMATED


@pytest.mark.parametrize("how", ["restarted", "cleared"])
def test_a_rank_that_begins_anew_takes_its_own_claims_and_no_others(how: str) -> None:
    """At once and without a sweep; the engine's epoch is the other ranks', too."""
    world = World()
    world.exact()
    other = EventStream(
        Source(ENGINE, "zmq/1"),
        world.engine_caches,
        HASHER,
        Names(HASHER, NAMESPACES.of, ("m",)),
        settings=world.settings,
    )
    other.open(world.now)
    (ask,) = [effect for effect in other.connected(world.now) if isinstance(effect, AskReplay)]
    other.replay_ended(ask.ask, world.now)
    world.stream.live(0, payload(stored(0, 1)), world.now)
    other.live(0, payload(stored(0, 4)), world.now)
    other.live(1, payload(), world.now)
    world.settle()
    other.tick(world.now + SETTLE_S)
    assert (world.depth(), world.engine_caches.level(ENGINE)) == (64, Level.EXACT)
    first = payload({"type": "AllBlocksCleared"}, removed(9))
    other.live(2 if how == "cleared" else 0, first if how == "cleared" else payload(removed(9)), world.now)
    while (at := other.wake_at()) is not None and at <= world.now + 1.0:
        other.tick(at)
    assert world.depth() == 16, "what the first rank holds"
    assert world.generations == [1]
    assert world.engine_caches.level(ENGINE) is Level.EXACT
    world.stream.live(1, payload(removed(1)), world.now)
    world.settle()
    assert world.depth() == 0


def test_a_request_that_wants_a_full_report_leaves_no_phantoms() -> None:
    """vLLM's kv_cache_report_mode: blocks told of twice, and removed once, are gone."""
    world = World()
    world.exact()
    world.stream.live(0, payload(stored()), world.now)
    world.stream.live(1, payload(stored(0, 3)), world.now)
    world.stream.live(2, payload(removed(4, 3, 2, 1)), world.now)
    world.settle()
    assert world.depth() == 0
    assert world.stream.counts()["blocks_repeated"] == 3


def believed(world: World, count: int = 64) -> bool:
    """Whether a claim that traffic made is left after the sweeps at the end of the grace."""
    chain = [(count, fingerprint(count), 0)]
    world.routes.learn(chain, ENGINE, world.generations[0], Trust.LOCAL, world.now)
    for _ in range(10):
        world.now += 1.0
        world.stream.tick(world.now)
        world.engine_caches.sweep(world.now, 1000)
    return bool(world.routes.match(chain, world.generations, world.now))


def reasons(world: World) -> list[str]:
    return [source.reason for source in world.engine_caches.sources()]


def test_at_exact_what_the_engine_does_not_report_is_not_held() -> None:
    world = World()
    world.exact()
    assert not believed(world)


def test_an_engine_whose_events_all_have_unknown_names_is_not_taken_for_empty() -> None:
    """Another version of an engine must not cost the claims that traffic makes (llm-d-kv-cache#661, kthena#1535)."""
    world = World()
    world.exact()
    reported = world.stream.live(0, payload({**stored(), "type": "BlockKept"}), world.now)
    assert [(each.level, each.reason) for each in reported if isinstance(each, LevelChanged)] == [
        (Level.ESTIMATED, "its events have names that we do not know")
    ]
    assert world.engine_caches.level(ENGINE) is Level.ESTIMATED
    assert reasons(world) == ["its events have names that we do not know"]
    assert world.stream.view()["lacks"]
    assert believed(world)
    assert world.stream.snapshot() is None, "nor is a peer to take it for empty"
    world.stream.live(1, payload(stored()), world.now)
    world.settle()
    assert world.engine_caches.level(ENGINE) is Level.EXACT
    assert world.depth() == 64


def test_unknown_names_beside_known_ones_are_only_counted() -> None:
    world = World()
    world.exact()
    world.stream.live(0, payload({"type": "BlockInactive"}, stored(count=1)), world.now)
    world.stream.live(1, payload({"type": "BlockInactive"}), world.now)
    world.settle()
    assert world.engine_caches.level(ENGINE) is Level.EXACT
    assert world.stream.counts()["decoder_tags_skipped"] == 2


def test_after_a_restart_as_another_version_it_is_seen_again_whether_it_is_understood() -> None:
    world = World()
    world.exact()
    world.stream.live(0, payload(stored()), world.now)
    world.settle()
    world.stream.live(0, payload({**stored(), "type": "BlockKept"}), world.now)
    assert world.stream.machine.counters.restarts == 1
    assert world.engine_caches.level(ENGINE) is Level.ESTIMATED


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_cache_spec_kind": "sliding_window"}, "none of its groups"),
        ({"token_ids": []}, "without their tokens"),
        ({"block_size": 15}, "without their tokens"),
        ({"lora_id": 7}, "adapters without a name"),
    ],
)
def test_an_engine_whose_blocks_can_not_be_named_is_not_taken_for_empty(fields: dict[str, Any], reason: str) -> None:
    world = World()
    world.exact()
    world.stream.live(0, payload({**stored(), **fields}), world.now)
    world.settle()
    assert world.engine_caches.level(ENGINE) is Level.ESTIMATED
    assert reason in reasons(world)[0]
    assert believed(world)


def test_a_model_of_several_kinds_of_caches_is_known_by_the_one_that_keeps_whole_prefixes() -> None:
    world = World()
    world.exact()
    world.stream.live(0, payload({**stored(), "kv_cache_spec_kind": "mamba", "group_idx": 0}), world.now)
    world.stream.live(1, payload({**stored(), "kv_cache_spec_kind": "full_attention", "group_idx": 1}), world.now)
    world.settle()
    assert world.engine_caches.level(ENGINE) is Level.EXACT
    assert world.depth() == 64


def test_an_engine_with_more_blocks_than_there_is_room_for_is_degraded_until_it_is_empty() -> None:
    world = World()
    world.stream.residency = Residency(HASHER, world.stream.names.namespace, entries_max=4)
    world.stream.open(world.now)
    world.exact()
    world.stream.live(0, payload(stored()), world.now)
    world.settle()
    world.stream.tick(world.now)
    world.settle()
    assert world.depth() == 32
    assert world.engine_caches.level(ENGINE) is Level.DEGRADED
    assert reasons(world) == ["it tells of more blocks than there is room for"]
    assert believed(world)
    world.stream.live(1, payload({"type": "AllBlocksCleared"}), world.now)
    world.settle()
    assert world.engine_caches.level(ENGINE) is Level.EXACT
    assert not believed(world)


def test_after_a_restart_another_group_of_caches_may_count() -> None:
    world = World()
    world.exact()
    world.stream.live(0, payload({**stored(), "kv_cache_spec_kind": "full_attention", "group_idx": 1}), world.now)
    world.stream.live(1, payload({"type": "AllBlocksCleared"}), world.now)
    world.stream.live(2, payload({**stored(), "kv_cache_spec_kind": "full_attention", "group_idx": 0}), world.now)
    world.settle()
    assert world.depth() == 64
