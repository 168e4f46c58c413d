"""From raw payloads to claims: what a stream decodes, repairs, settles and reports."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from ranvier_py.core.engine_cache.block_namespaces import Names, base_models
from ranvier_py.core.engine_cache.engine_caches import EngineCaches, Source
from ranvier_py.core.engine_cache.event_stream import SETTLE_S, EventStream, StreamEffect
from ranvier_py.core.engine_cache.gap_values import AskPeer, AskReplay, GapSettings, Level, LevelChanged
from ranvier_py.core.engine_cache.residency_values import Scope
from ranvier_py.core.engine_cache.snapshot import Snapshot, SnapshotReader
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher
from ranvier_py.core.prompts.namespaces import TokenNamespaces
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.checkpoints.cache_profile import profile_named
from ranvier_py.core.routing.checkpoints.checkpoint_index import CHECKPOINT_TTL_S, STATE
from ranvier_py.core.routing.checkpoints.checkpoints import Checkpoints
from ranvier_py.core.routing.route_table import Trust
from tests.builders.route_tables import route_table

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


FULL = {"kv_cache_spec_kind": "full_attention"}
CLEARED = {"type": "AllBlocksCleared"}


class World:
    """A stream with all that it ends in."""

    def __init__(
        self, *base: str, settings: GapSettings | None = None, entries_max: int = 2_000_000, rows_max: int = 1000
    ) -> None:
        self.routes = route_table(capacity=rows_max)
        self.entries_max = entries_max
        self.generations = [1]
        self.checkpoints = Checkpoints(Boundary.chain)
        self.checkpoints.set_profile(ENGINE, profile_named("vllm-align:16"))
        self.engine_caches = EngineCaches(
            self.routes,
            lambda backend: self.generations[backend],
            restarted=self.restarted,
            checkpoints=self.checkpoints,
        )
        self.settings = settings or GapSettings(peers=False)
        self.base = base or ("m",)
        self.stream = self.another()
        self.now = 10.0
        self.seq = 0
        self.stream.open(self.now)

    def another(self, rank: int = 0) -> EventStream:
        names = Names(HASHER, NAMESPACES.of, self.base)
        bounds = {"settings": self.settings, "entries_max": self.entries_max}
        return EventStream(Source(ENGINE, f"zmq/{rank}"), self.engine_caches, HASHER, names, **bounds)  # type: ignore[arg-type]

    def restarted(self, backend: BackendId, _why: str, _now: float) -> int:
        self.generations[backend] += 1
        return self.generations[backend]

    def connect(self, stream: EventStream) -> None:
        """To an engine that has not published anything yet."""
        (ask,) = [effect for effect in stream.connected(self.now) if isinstance(effect, AskReplay)]
        stream.replay_ended(ask.ask, self.now)

    def publish(self, *events: dict[str, Any]) -> list[StreamEffect]:
        """The next message, and all that follows from it a moment later."""
        effects = self.receive(*events)
        self.settle()
        return effects

    def receive(self, *events: dict[str, Any]) -> list[StreamEffect]:
        self.seq += 1
        return self.stream.live(self.seq - 1, payload(*events), self.now)

    @property
    def level(self) -> Level:
        return self.engine_caches.level(ENGINE)

    def settle(self) -> None:
        while (at := self.stream.wake_at()) is not None and at <= self.now + SETTLE_S:
            self.now = max(self.now, at)
            self.stream.tick(self.now)

    def sweep(self) -> None:
        """Twice, so that all of the table is looked at."""
        for _ in range(2):
            self.engine_caches.sweep(self.now, 1000)

    def credited(self, held: int) -> int:
        """Of a prompt of which so many tokens are held, those before a checkpoint."""
        keys = [(count, fingerprint(count), 0) for count in range(64, 0, -16)]
        own = self.checkpoints.known[ENGINE]
        return own.credit(keys, held, 100, self.generations[0], self.now, guessed=False).tokens

    def depth(self, model: str = "m", adapter: str = "", salt: str = "") -> int:
        chain = [(count, fingerprint(count, model, adapter, salt), 0) for count in (64, 32, 16)]
        found = self.routes.match(chain, self.generations, self.now)
        assert all(holder.trust == Trust.CONFIRMED for holder in found)
        return found[0].tokens if found else 0


def known(*base: str, **options: Any) -> World:
    """A stream that is known exactly."""
    world = World(*base, **options)
    world.connect(world.stream)
    assert world.level is Level.EXACT
    return world


def test_a_message_becomes_claims_a_moment_later_and_an_eviction_takes_them() -> None:
    world = known()
    world.receive(stored())
    assert world.depth() == 0
    world.settle()
    assert world.depth() == 64
    assert world.stream.residency.tiers()[fingerprint(48)] is Tier.GPU
    world.publish(removed(3, 4))
    assert world.depth() == 32


def test_a_restart_voids_everything_at_once() -> None:
    world = known()
    world.publish(stored())
    world.publish()
    world.seq = 0
    world.receive(stored(0, 1))
    assert (world.depth(), world.generations) == (16, [2])


def test_a_cleared_cache_voids_everything_at_once_and_is_exact_again() -> None:
    world = World()
    world.stream.connected(world.now)
    world.seq = 7
    world.receive(stored())
    world.stream.replay_failed(1, world.now)
    world.settle()
    assert (world.depth(), world.level) == (64, Level.ESTIMATED)
    world.publish(CLEARED, stored(0, 2))
    assert (world.depth(), world.level) == (32, Level.EXACT)


def test_exact_waits_until_everything_is_settled() -> None:
    """Else a sweep would take what is not settled for what is not held."""
    world = World()
    world.stream.connected(world.now)
    assert LevelChanged(Level.EXACT, "nothing missed") in world.receive(stored())
    assert world.level is Level.REPAIRING
    world.settle()
    assert world.level is Level.EXACT


@pytest.mark.parametrize("bad", [b"garbage", payload({"type": "BlockStored", "block_hashes": 7})])
def test_what_cannot_be_read_costs_the_level_and_nothing_else(bad: bytes) -> None:
    world = known()
    world.publish(stored())
    world.stream.live(1, bad, world.now)
    world.settle()
    assert (world.depth(), world.level) == (64, Level.DEGRADED)
    assert world.stream.counts()["decoder_refused"] + world.stream.counts()["decoder_unread"] == 1


def test_a_peers_copy_fills_what_replay_cannot() -> None:
    there = known(settings=GapSettings())
    there.publish(stored(0, 2))
    here = World(settings=GapSettings())
    here.stream.connected(here.now)
    here.stream.live(1, payload(stored(2, 2)), here.now)
    effects = here.stream.replay_failed(1, here.now)
    (ask,) = [effect for effect in effects if isinstance(effect, AskPeer)]
    there.publish(stored(2, 2))
    machine = here.stream.machine
    here.stream.carry(machine.snapshot_offered(ask.ask, snapshot_of(there.stream), here.now), here.now)
    here.settle()
    assert (here.depth(), here.level) == (64, Level.EXACT)
    assert machine.snapshot_offered(ask.ask, None, here.now) == [], "that question is closed"


def snapshot_of(stream: EventStream) -> Snapshot:
    writer, reader = stream.snapshot(), SnapshotReader(HASHER)
    assert writer is not None
    while not writer.done:
        writer.step()
    for rows in writer.chunks:
        reader.add(rows)
    return Snapshot(writer.seq, writer.digest, reader.finish())


def test_nothing_is_exact_while_a_copy_is_made_and_messages_wait() -> None:
    world = known()
    world.publish(stored(0, 2))
    world.stream.residency.freeze()
    world.receive(stored(2, 2))
    world.now += 1.0
    world.stream.tick(world.now)
    assert world.depth() == 32
    world.stream.residency.thaw()
    world.now += 1.0
    world.settle()
    assert world.depth() == 64


def test_all_names_of_the_base_model_find_its_blocks() -> None:
    world = known("m", "alias", "other")
    world.publish(stored(extra_keys=[["s"], None, None, None]))
    assert [world.depth(name, salt="s") for name in ("m", "alias", "other")] == [64, 64, 64]
    assert world.depth("m") == world.depth("stranger", salt="s") == 0
    world.routes.learn([(48, fingerprint(48, "alias", salt="s"), 7)], ENGINE, 1, Trust.LOCAL, world.now)
    world.engine_caches.sweep(world.now + 100.0, 1000)
    assert world.routes.match([(48, 0, 7)], [1], world.now + 100.0)[0].trust == Trust.CONFIRMED
    world.publish(removed(3, 4))
    assert [world.depth(name, salt="s") for name in ("m", "alias", "other")] == [32, 32, 32]


def test_an_adapter_is_asked_for_by_its_own_name() -> None:
    world = known()
    world.publish(stored(lora_id=1, lora_name="adapter"))
    assert (world.depth("adapter"), world.depth("m", "adapter"), world.depth("m")) == (64, 64, 0)


def test_an_adapter_without_a_name_and_an_engine_without_one_have_no_fingerprints() -> None:
    assert Names(HASHER, NAMESPACES.of, ["m"]).namespace(Scope(None, 3, None)) is None
    assert Names(HASHER, NAMESPACES.of, []).namespace(Scope(None, None, None)) is None
    assert Names(HASHER, NAMESPACES.of, []).namespace(Scope("a", None, "s")) == NAMESPACES.of("a", salt="s")


@pytest.mark.parametrize(
    ("cards", "models"),
    [
        ([], (("a",), ("x",))),
        ([{"id": "a"}], (("a",),)),
        (
            [{"id": "a", "root": "/m"}, {"id": "b", "root": "/m"}, {"id": "x", "root": "/l", "parent": "a"}],
            (("a", "b"),),
        ),
        ([{"id": "a", "root": "/m"}, {"id": "b", "root": "/n"}], (("a",), ("b",))),
        ([{"id": "a"}, {"id": "b"}], (("a",), ("b",))),
        ([{"id": 7}, {"id": "a", "root": None}], (("a",),)),
    ],
)
def test_names_of_one_root_are_one_model(cards: list[dict[str, Any]], models: tuple[tuple[str, ...], ...]) -> None:
    assert base_models(cards, ("a", "x")) == models


def test_a_view_shows_what_a_stream_knows() -> None:
    world = known()
    world.publish(stored(), {"type": "Unheard"})
    view = world.stream.view()
    assert (view["level"], view["next"], view["blocks"], view["block_tokens"]) == ("exact", 1, 4, 16)
    assert (view["unknown_tags"], view["counts"]["decoder_tags_skipped"]) == ({"Unheard": 1}, 1)
    (reported,) = world.engine_caches.sources()
    assert (reported.level, reported.changes, reported.source.name) == (Level.EXACT, 4, "zmq/0")


def test_a_closed_stream_reports_nothing_of_the_one_that_follows_it() -> None:
    """Its connection ends a moment later, which says nothing of the next one."""
    world = known()
    old = world.stream
    world.receive(stored())
    old.close(world.now)
    assert world.level is Level.ESTIMATED
    world.stream = world.another()
    world.stream.open(world.now)
    world.connect(world.stream)
    old.tick(world.now + 1.0)
    old.disconnected(world.now + 1.0)
    assert (world.level, world.depth()) == (Level.EXACT, 0)


def test_a_standby_is_known_as_well_and_applies_nothing_until_it_is_opened() -> None:
    """What its reader found out came as routes of a peer; what went meanwhile is put right by the next sweep."""
    world = World()
    world.stream.close(world.now)
    world.connect(world.stream)
    world.publish(stored())
    world.publish(removed(4))
    assert (world.stream.level, world.depth()) == (Level.EXACT, 0)
    assert world.level is Level.ESTIMATED
    assert snapshot_of(world.stream).seq == 1
    for count in (32, 64):
        world.routes.learn([(count, fingerprint(count), 0)], ENGINE, 1, Trust.REMOTE, world.now)
    world.now += 20.0
    world.stream.open(world.now)
    assert world.level is Level.EXACT
    world.engine_caches.sweep(world.now, 1000)
    assert world.depth() == 32
    world.publish(removed(2))
    assert world.depth() == 0
    world.stream.close(world.now)
    assert world.level is Level.ESTIMATED


@pytest.mark.parametrize("how", ["restarted", "cleared"])
def test_a_rank_that_begins_anew_takes_its_own_claims_and_no_others(how: str) -> None:
    """At once and without a sweep; the engine's generation is the other ranks', too."""
    world = known()
    other = world.another(rank=1)
    other.open(world.now)
    world.connect(other)
    world.receive(stored(0, 1))
    other.live(0, payload(stored(0, 4)), world.now)
    other.live(1, payload(), world.now)
    world.settle()
    other.tick(world.now + SETTLE_S)
    assert (world.depth(), world.level) == (64, Level.EXACT)
    first = payload(CLEARED, removed(9))
    other.live(2 if how == "cleared" else 0, first if how == "cleared" else payload(removed(9)), world.now)
    while (at := other.wake_at()) is not None and at <= world.now + 1.0:
        other.tick(at)
    assert world.depth() == 16, "what the first rank holds"
    assert world.generations == [1]
    assert world.level is Level.EXACT
    world.publish(removed(1))
    assert world.depth() == 0


def test_a_request_that_wants_a_full_report_leaves_no_phantoms() -> None:
    """vLLM's kv_cache_report_mode: blocks reported twice, and removed once, are gone."""
    world = known()
    world.publish(stored())
    world.publish(stored(0, 3))
    world.publish(removed(4, 3, 2, 1))
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


def depths(world: World, chain: list[tuple[int, Fingerprint, int]]) -> list[int]:
    """At which of these something holds a route."""
    return [key[0] for key in chain if world.routes.match([key], world.generations, world.now)]


def reasons(world: World) -> list[str]:
    return [source.reason for source in world.engine_caches.sources()]


def test_at_exact_what_the_engine_does_not_report_is_not_held() -> None:
    world = known()
    assert not believed(world)


def test_an_engine_whose_events_all_have_unknown_names_is_not_taken_for_empty() -> None:
    """Another version of an engine must not cost the claims that traffic makes (llm-d-kv-cache#661, kthena#1535)."""
    world = known()
    reported = world.receive({**stored(), "type": "BlockKept"})
    assert [(each.level, each.reason) for each in reported if isinstance(each, LevelChanged)] == [
        (Level.ESTIMATED, "its events have names that we do not know")
    ]
    assert world.level is Level.ESTIMATED
    assert reasons(world) == ["its events have names that we do not know"]
    assert world.stream.view()["lacks"]
    assert believed(world)
    assert world.stream.snapshot() is None, "nor is a peer to take it for empty"
    world.publish(stored())
    assert world.level is Level.EXACT
    assert world.depth() == 64


def test_unknown_names_beside_known_ones_are_only_counted() -> None:
    world = known()
    world.publish({"type": "BlockInactive"}, stored(count=1))
    world.publish({"type": "BlockInactive"})
    assert world.level is Level.EXACT
    assert world.stream.counts()["decoder_tags_skipped"] == 2


def test_a_tier_that_is_cleared_is_empty_and_the_level_stays() -> None:
    world = known()
    world.publish(stored(medium="GPU"), stored(count=2, medium="CPU"))
    world.publish({"type": "TierBlocksCleared", "medium": "GPU"})
    assert world.level is Level.EXACT
    assert world.depth() == 32
    world.publish({"type": "TierBlocksCleared", "medium": "CPU"})
    assert (world.level, world.depth()) == (Level.EXACT, 0)


def test_what_an_unknown_event_takes_away_is_not_known_exactly_until_the_cache_is_cleared() -> None:
    world = known()
    world.publish(stored())
    world.publish({"type": "GroupBlocksCleared", "group_idx": 0})
    assert world.level is Level.DEGRADED
    world.publish(CLEARED, stored())
    assert world.level is Level.EXACT


def test_after_a_restart_as_another_version_it_is_seen_again_whether_it_is_understood() -> None:
    world = known()
    world.publish(stored())
    world.seq = 0
    world.receive({**stored(), "type": "BlockKept"})
    assert world.stream.machine.counters.restarts == 1
    assert world.level is Level.ESTIMATED


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
    world = known()
    world.publish({**stored(), **fields})
    assert world.level is Level.ESTIMATED
    assert reason in reasons(world)[0]
    assert believed(world)


OTHER_GROUPS = (
    {**stored(), "kv_cache_spec_kind": "sliding_window", "group_idx": 1},
    {**stored(), **FULL, "group_idx": 1},  # a hit needs a block in each
    {**stored(), "group_idx": 1},  # before vLLM named the kinds
    {**removed(1), "group_idx": 1},
)
HYBRID = "a hybrid: its attention's blocks are of use only where its other caches have theirs"


@pytest.mark.parametrize("other", OTHER_GROUPS)
def test_attention_alone_makes_no_hybrid_exact_nor_a_prefix_confirmed(other: dict[str, Any]) -> None:
    """llm-d-router#2362: a quarter of what its attention held was reused."""
    world = known()
    kind = FULL if "kv_cache_spec_kind" in other else {}
    world.publish({**stored(), **kind, "group_idx": 0}, other)
    assert (world.level, reasons(world)) == (Level.ESTIMATED, [HYBRID])
    assert world.depth() == 0
    assert world.stream.view()["lacks"] == HYBRID
    assert world.stream.snapshot() is None
    assert believed(world), "what requests taught is not withdrawn for what events do not say"


STATES = {"kv_cache_spec_kind": "mamba", "group_idx": 1}


@pytest.mark.parametrize("states", [stored(1, 1), stored(count=0)])
def test_a_hybrid_whose_states_are_seen_is_exact(states: dict[str, Any]) -> None:
    """Also where no state was worth keeping yet; before that it is not."""
    world = known()
    world.stream.measured(world.now, is_hybrid=True)
    world.publish({**stored(), **FULL})
    assert (world.level, world.depth()) == (Level.ESTIMATED, 0)
    world.publish({**states, **STATES})
    assert (world.level, world.stream.view()["lacks"]) == (Level.EXACT, "")
    chain = [(count, fingerprint(count), 0) for count in (64, 32, 16)]
    world.routes.learn(chain, ENGINE, world.generations[0], Trust.LOCAL, world.now)
    world.sweep()
    assert world.depth() == 64, "as far as its attention goes: where it can begin is another question"
    assert world.stream.snapshot() is None, "which has no states"


def test_states_come_and_go_with_their_own_events_and_their_engine_is_credited_by_them_alone() -> None:
    """R6: BlockRemoved of a group of states takes the checkpoint, and leaves keys and values."""
    world = known()
    world.publish({**stored(), **FULL}, {**stored(1, 1), **STATES})
    world.sweep()
    own = world.checkpoints.known[ENGINE]
    assert own.by_events
    assert world.credited(64) == 32
    world.publish({**stored(3, 1), **STATES})
    assert world.credited(64) == 64
    world.publish({**removed(4), "group_idx": 1})
    assert world.credited(64) == 32
    world.publish({**removed(2), "group_idx": 1})
    assert (world.credited(64), world.depth()) == (0, 64)
    world.publish({**stored(2, 1), **STATES})
    world.now += 10_000
    assert world.credited(64) == 48, "for as long as no event takes it"


def test_peers_are_reminded_of_states_that_are_there_and_learn_at_once_which_are_not() -> None:
    world = known()
    chain = [(count, fingerprint(count), 0) for count in (64, 32, 16)]
    world.routes.learn(chain, ENGINE, world.generations[0], Trust.LOCAL, world.now)
    world.checkpoints.collect(world.routes.rows.index)
    world.publish({**stored(), **FULL}, {**stored(1, 1), **STATES})
    world.sweep()
    first = list(world.checkpoints.new.taken())
    assert {mark.name for mark in first} <= {key[1] for key in chain}, "what nobody asks for is not sent"
    assert {(mark.position, mark.mark & STATE) for mark in first} == {(32, STATE)}
    world.sweep()
    assert not world.checkpoints.new
    world.now += CHECKPOINT_TTL_S / 2 + 1
    world.sweep()
    assert {mark.name for mark in world.checkpoints.new.taken()} == {mark.name for mark in first}
    world.publish({**removed(2), "group_idx": 1})
    assert {(mark.position, mark.mark & STATE) for mark in world.checkpoints.new.taken()} == {(32, 0)}


def test_after_a_gap_what_events_brought_is_as_good_as_learned() -> None:
    world = known()
    world.publish({**stored(), **FULL}, {**stored(1, 1), **STATES})
    world.sweep()
    own = world.checkpoints.known[ENGINE]
    world.seq += 1
    for effect in world.publish():
        if isinstance(effect, AskReplay):
            world.stream.replay_failed(effect.ask, world.now)
    assert world.level is not Level.EXACT
    world.sweep()
    assert not own.by_events
    assert world.credited(64) == 32
    world.now += CHECKPOINT_TTL_S
    assert world.credited(64) == 0


def test_that_attention_dropped_a_block_of_a_hybrid_withdraws_what_needs_it() -> None:
    world = known()
    chain = [(64, fingerprint(64), 0), (32, fingerprint(32), 0)]
    world.publish({**stored(), **FULL, "group_idx": 1}, {**stored(), "kv_cache_spec_kind": "mamba", "group_idx": 0})
    world.routes.learn(chain, ENGINE, world.generations[0], Trust.LOCAL, world.now)
    world.publish({**removed(1), "group_idx": 0})
    assert depths(world, chain) == [64, 32], "a state further up may still be there"
    world.publish({**removed(3), "group_idx": 1})
    assert depths(world, chain) == [32]


def test_a_hybrid_stays_one_when_its_cache_is_cleared_until_it_is_another_process() -> None:
    world = known()
    world.publish({**stored(), **FULL}, OTHER_GROUPS[0])
    world.publish(CLEARED)
    world.publish({**stored(), **FULL})
    assert world.level is Level.ESTIMATED
    world.seq = 0
    world.publish(stored(count=2))
    assert world.stream.machine.counters.restarts == 1
    world.publish()
    assert world.level is Level.EXACT
    assert world.depth() == 32


def test_an_engine_is_a_hybrid_where_its_metrics_page_states_it() -> None:
    """SGLang drops a state without a word, and vLLM's first states come after its first blocks of attention."""
    world = known()
    effects = world.stream.measured(world.now, is_hybrid=True)
    assert [each.reason for each in effects if isinstance(each, LevelChanged)] == [HYBRID]
    world.publish(stored())
    assert (world.level, world.depth()) == (Level.ESTIMATED, 0)
    world.stream.measured(world.now, is_hybrid=False)
    assert world.level is Level.EXACT


def test_an_engine_with_more_blocks_than_there_is_room_for_is_degraded_until_it_is_empty() -> None:
    world = known(entries_max=4)
    world.publish(stored())
    world.stream.tick(world.now)
    world.settle()
    assert world.depth() == 32
    assert world.level is Level.DEGRADED
    assert reasons(world) == ["it reports more blocks than there is room for"]
    assert believed(world)
    world.publish(CLEARED)
    assert world.level is Level.EXACT
    assert not believed(world)


def test_after_a_restart_another_group_of_caches_may_count() -> None:
    world = known()
    world.publish({**stored(), **FULL, "group_idx": 1})
    world.publish(CLEARED)
    world.publish({**stored(), **FULL, "group_idx": 0})
    assert world.depth() == 64
