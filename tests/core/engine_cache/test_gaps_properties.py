"""A gap machine on a lossy stream of an engine that restarts, with replay that loses and reorders, and stale peers."""

from __future__ import annotations

import random
from collections import deque

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.gap_values import (
    Apply,
    AskPeer,
    AskReplay,
    Effect,
    GapSettings,
    Install,
    Level,
    StreamReset,
)
from ranvier_py.core.engine_cache.gaps import GapMachine
from tests.core.engine_cache.test_gaps import Stream, snapshot
from tests.examples import examples

HELD_MAX = 25


class World(Stream):
    """One engine, the way from it, and who listens: `applied` is what the engine is believed to have published."""

    def __init__(self, seed: int, loss: float, buffer: int, replay: bool, peers: bool) -> None:
        super().__init__(replay=replay, peers=peers, held_messages_max=HELD_MAX)
        self.rng = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.run = 0
        self.history: list[str] = []
        self.old_history: list[str] = []
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self.in_transit: deque[tuple[int, int, bytes | None]] = deque()  # answers: ask, number, payload or the end
        self.met: dict[Level, int] = {}

    def receive(self, effects: list[Effect]) -> None:
        super().receive(effects)
        if any(isinstance(effect, AskReplay) for effect in effects):
            self.in_transit.clear()
        self.check()

    def check(self) -> None:
        """At EXACT it is what the engine published since it started, without a hole."""
        machine = self.machine
        self.met[machine.level] = self.met.get(machine.level, 0) + 1
        held, kept = machine.waiting
        assert held <= HELD_MAX
        assert kept <= HELD_MAX + 1
        if machine.level is Level.EXACT:
            assert self.applied == self.history[: len(self.applied)]
            assert machine.next_seq == len(self.applied)

    def append(self) -> tuple[int, bytes]:
        """The engine's next message, which takes it a step."""
        self.now += 0.0011
        self.history.append(f"{self.run}/{len(self.history)}")
        self.buffer.append((len(self.history) - 1, self.history[-1].encode()))
        return self.buffer[-1]

    def publish(self) -> None:
        seq, payload = self.append()
        if self.rng.random() < self.loss:
            return
        self.receive(self.machine.live(seq, payload, self.now))
        if self.rng.random() < self.loss:
            self.receive(self.machine.live(seq, payload, self.now))

    def restart(self) -> None:
        self.run += 1
        self.old_history, self.history = self.history, []
        self.buffer.clear()
        self.in_transit.clear()
        self.replay = None
        self.receive(self.machine.disconnected(self.now))
        for _ in range(self.rng.randrange(8)):  # published before we are back
            self.append()
        if self.rng.random() < 0.7:
            self.receive(self.machine.connected(self.now))

    def serve(self) -> None:
        """The engine takes the question; its answers are on the way."""
        if self.replay is None:
            return
        ask, first = self.replay
        self.replay = None
        answers = [(ask, seq, payload) for seq, payload in self.buffer if seq >= first]
        kept = [answer for answer in answers if self.rng.random() >= self.loss]
        kept += [answer for answer in kept if self.rng.random() < self.loss]
        if self.loss:
            for place in range(len(kept) - 1):
                if self.rng.random() < 0.3:
                    kept[place], kept[place + 1] = kept[place + 1], kept[place]
        self.in_transit.extend(kept)
        # An empty answer is the end of an empty history: it is never made by loss alone.
        if (not answers or kept) and self.rng.random() >= self.loss:
            self.in_transit.append((ask, 0, None))

    def arrive(self, count: int) -> None:
        for _ in range(min(count, len(self.in_transit))):
            if not self.in_transit:
                return  # a new question was asked meanwhile
            ask, seq, payload = self.in_transit.popleft()
            if payload is None:
                self.receive(self.machine.replay_ended(ask, self.now))
            else:
                self.receive(self.machine.replayed(ask, seq, payload, self.now))

    def propose(self, *, honest: bool) -> None:
        if self.peer is None:
            return
        ask, self.peer = self.peer.ask, None
        source = self.history if honest or self.rng.random() < 0.6 else self.old_history
        if not source:
            self.receive(self.machine.snapshot_offered(ask, None, self.now))
            return
        last = len(source) - 1 if honest else self.rng.randrange(len(source))
        self.copy = source[: last + 1]
        digest = xxhash.xxh3_64_intdigest(source[last].encode())
        self.receive(self.machine.snapshot_offered(ask, snapshot(last, digest), self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.receive(self.machine.tick(self.now))

    def step(self) -> None:
        action = self.rng.random()
        if action < 0.6:
            self.publish()
        elif action < 0.7:
            self.serve()
        elif action < 0.85:
            self.arrive(self.rng.randrange(6))
        elif action < 0.9:
            self.propose(honest=False)
        elif action < 0.97:
            self.tick(self.rng.random() * 6)
        elif action < 0.98:
            self.restart()
        elif action < 0.99:
            self.receive(self.machine.contradicted(self.now))
        else:
            self.receive(self.machine.disconnected(self.now))

    def calm(self) -> None:
        """From now on nothing is lost."""
        self.loss = 0.0
        for _ in range(40):
            self.publish()
            self.serve()
            self.arrive(1000)
            self.propose(honest=True)
            self.publish()
            self.tick(31.0)


@settings(max_examples=examples(200))
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.05, 0.2, 0.5]), st.sampled_from([3, 15, 1000]), st.booleans())
def test_exact_means_exact_and_comes_back_when_the_net_is_calm(
    seed: int, loss: float, buffer: int, peers: bool
) -> None:
    """A hole that nobody noticed would be believed for hours."""
    world = World(seed, loss, buffer, True, peers)
    for _ in range(150):
        world.step()
    world.calm()
    if peers:
        assert world.machine.level is Level.EXACT
        assert world.applied == world.history
    else:
        assert world.machine.level in (Level.EXACT, Level.DEGRADED)
        assert world.applied[-1] == world.history[-1]


@settings(max_examples=examples(80))
@given(st.integers(0, 2**32), st.sampled_from([0.05, 0.2]))
def test_without_replay_a_peers_copy_brings_it_back(seed: int, loss: float) -> None:
    world = World(seed, loss, 1000, False, True)
    for _ in range(150):
        world.step()
    world.calm()
    assert (world.machine.level, world.applied) == (Level.EXACT, world.history)


def test_all_levels_are_met() -> None:
    """Else the tests above would show nothing."""
    met: dict[Level, int] = {}
    for seed in range(20):
        world = World(seed, 0.2, 15, True, True)
        for _ in range(150):
            world.step()
        met |= world.met
    assert met.keys() == {*Level}


A_DIGEST = xxhash.xxh3_64_intdigest(b"a")

calls = st.one_of(
    st.tuples(st.just("live"), st.integers(0, 8) | st.integers(0, 2**64 - 1), st.sampled_from([b"a", b"b"])),
    st.tuples(st.just("replayed"), st.integers(0, 8), st.sampled_from([b"a", b"b"])),
    st.tuples(st.sampled_from(["replay_ended", "replay_failed", "tick", "connected", "disconnected"])),
    st.tuples(st.sampled_from(["cleared", "unreadable"]), st.integers(0, 8)),
    st.tuples(st.just("snapshot_offered"), st.none() | st.builds(snapshot, st.integers(0, 8), st.just(A_DIGEST))),
)


@settings(max_examples=examples(150))
@given(st.lists(calls, max_size=60))
def test_any_order_of_calls_keeps_the_bounds_and_never_raises(todo: list[tuple[object, ...]]) -> None:
    """What an engine numbers as it likes, and sockets that report as they like."""
    machine = GapMachine(GapSettings(held_messages_max=5, held_bytes_max=6))
    now, ask = 0.0, 0
    for name, *arguments in todo:
        now += 1.0
        if name in ("replayed", "replay_ended", "replay_failed", "snapshot_offered"):
            arguments.insert(0, ask)
        if name != "cleared":
            arguments.append(now)
        effects: list[Effect] = getattr(machine, str(name))(*arguments)
        ask = max([ask, *(effect.ask for effect in effects if isinstance(effect, AskReplay | AskPeer))])
        applied = [effect.seq for effect in effects if isinstance(effect, Apply)]
        since = [place for place, effect in enumerate(effects) if isinstance(effect, StreamReset | Install)]
        assert since or applied == sorted(applied)
        held, kept = machine.waiting
        assert held <= 5
        assert kept <= 6
        wake = machine.wake_at()
        if wake is not None and wake <= now:
            machine.tick(now)
            after = machine.wake_at()
            assert after is None or after > now, "it would be woken for ever"
