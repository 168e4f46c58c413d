"""R6: where an engine keeps recurrent states, by its events, against a walk over all that it reported."""

from __future__ import annotations

from array import array
from random import Random
from time import process_time

import pytest

from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.sources.event_values import BlocksRemoved, BlocksStored, Tier, TierCleared
from ranvier_py.core.prompts.fingerprint import is_anchor
from tests.core.engine_cache.model import SIZE, fingerprint, fingerprints, hasher, namespace_of

WIDTH = 80  # tokens of the engine's blocks: five of ours
STATES, DENSE = (0, 1), 2


class Engine:
    """Blocks of attention and two groups of states, as vLLM reports them."""

    def __init__(self) -> None:
        self.held = Residency(hasher(), namespace_of)
        self.found: dict[tuple[int, int], None] = {}
        self.ahead: dict[tuple[int, int], None] = {}

    def store(self, path: list[int], *, group: int = DENSE, keys: list[int] | None = None) -> None:
        """All blocks of these tokens, of attention; or of states those named, with all tokens all the same."""
        ends = range(WIDTH, len(path) + 1, WIDTH)
        hashes = tuple(name(path[:end]) for end in ends) if keys is None else tuple(keys)
        kind = "full_attention" if group == DENSE else "mamba"
        tokens = array("I", path[: ends[-1]] if ends else []).tobytes()
        self.held.apply(BlocksStored(hashes, token_bytes=tokens, block_tokens=WIDTH, group=group, kind=kind))

    def keep(self, path: list[int], groups: tuple[int, ...] = STATES) -> None:
        """A state at the end of these tokens."""
        for group in groups:
            self.store(path, group=group, keys=[name(path)])

    def drop(self, path: list[int], groups: tuple[int, ...] = STATES) -> None:
        for group in groups:
            self.held.apply(BlocksRemoved((name(path),), group=group))

    def positions(self, path: list[int]) -> dict[int, list[int]]:
        """Where each prefix of these tokens can begin, as it was reported so far."""
        for change in self.held.settle().states or ():
            found, place = self.ahead if change.ahead else self.found, (change.fingerprint, change.position)
            assert (place in found) is not change.present, "each change is reported once"
            if change.present:
                found[place] = None
            else:
                del found[place]
        known = [(each.fingerprint, each.position, each.ahead) for each in self.held.states()]
        assert self.found.keys() == {(name, position) for name, position, ahead in known if not ahead}
        assert self.ahead.keys() == {(name, position) for name, position, ahead in known if ahead}
        places: dict[int, list[int]] = {}
        for one, at in self.found:
            places.setdefault(one, []).append(at)
        return {end: sorted(places.get(one, ())) for end, one in fingerprints(path).items()}


def name(path: list[int]) -> int:
    return Random(repr(path)).getrandbits(63)


def tokens(count: int, seed: int = 1) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(50_000) for _ in range(count)]


def deepest(engine: Engine, path: list[int]) -> int:
    """What a prompt asks for that is held to the end of this path: the deepest key at which something is known."""
    known = engine.positions(path)
    asked = [end for end in known if is_anchor(end // SIZE) or end == max(known)]
    return max((at for end in asked for at in known[end] if at <= len(path)), default=0)


def test_a_state_is_there_where_all_groups_have_it() -> None:
    engine, path = Engine(), tokens(8 * WIDTH)
    engine.store(path)
    engine.keep(path[:160])
    assert deepest(engine, path) == 160
    engine.keep(path[:400], groups=(0,))
    assert deepest(engine, path) == 160
    engine.keep(path[:400], groups=(1,))
    assert deepest(engine, path) == 400
    engine.drop(path[:400], groups=(0,))
    assert deepest(engine, path) == 160
    engine.drop(path[:160])
    assert deepest(engine, path) == 0


def test_tokens_that_span_blocks_without_a_state_do_not_move_the_position() -> None:
    """vLLM #44451: hashes of what was kept, tokens of all: the block's own chain has its depth."""
    engine, path = Engine(), tokens(8 * WIDTH)
    engine.store(path, group=STATES[0], keys=[name(path[:400])])
    engine.store(path, group=STATES[1], keys=[name(path[:400])])
    assert deepest(engine, path) == 0, "its block is not known yet"
    engine.store(path)
    assert deepest(engine, path) == 400


def test_a_branch_that_comes_later_goes_on_from_the_state_before_it() -> None:
    engine, shared = Engine(), tokens(4 * WIDTH)
    first = [*shared, *tokens(3 * WIDTH, 2)]
    engine.store(first)
    engine.keep(shared)
    assert deepest(engine, first) == 320
    second = [*shared, *tokens(5 * WIDTH, 3)]
    engine.store(second)
    assert deepest(engine, second) == 320
    assert engine.positions(second)[336] == [320], "in mid-branch, before the next anchor"
    engine.drop(shared)
    assert not any(engine.positions(second).values())


def test_an_anchor_in_the_block_of_a_state_has_it_ahead_as_long_as_one_is_there() -> None:
    engine, shared = Engine(), tokens(280)
    paths = [[*shared, *tokens(40, seed)] for seed in (2, 3)]
    engine.store([*shared, *tokens(120, 2)])
    engine.keep([*shared, *tokens(120, 2)])
    engine.positions(paths[0])
    assert not engine.ahead, "the anchor may be held where that block is not"
    for path in paths:
        engine.store(path)
        engine.keep(path)
    anchor = (fingerprint(shared[:256]), 320)
    for path in paths:
        assert engine.positions(path)[256] == []
        assert anchor in engine.ahead
        engine.drop(path)
    assert engine.positions(paths[0])[320] == []
    assert not engine.ahead


@pytest.mark.parametrize("kept_last", [False, True])
def test_the_anchor_before_a_state_promises_it_only_once_prompts_part_behind_it(kept_last: bool) -> None:
    """Else the end of one question about a document were credited to the next one."""
    engine, shared = Engine(), tokens(4 * WIDTH)
    first, second = ([*shared, *tokens(3 * WIDTH, seed)] for seed in (2, 3))
    elsewhere = [*shared[:280], *tokens(5 * WIDTH, 4)]
    engine.store(first)
    if not kept_last:
        engine.keep(shared)
    engine.store(elsewhere)
    assert engine.positions(first)[256] == []
    engine.store(second)
    if kept_last:
        engine.keep(shared)
    assert engine.positions(first)[256] == [320]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_known_anywhere_is_a_state_on_its_path(seed: int) -> None:
    """Whatever comes in whatever order: the deepest state before each anchor is known there."""
    rng, engine = Random(seed), Engine()
    paths = [tokens(7 * WIDTH, 1)]
    for number in range(2, 6):
        cut = rng.randrange(1, 6) * WIDTH
        paths.append([*rng.choice(paths)[:cut], *tokens(7 * WIDTH - cut, number)])
    kept: dict[int, list[int]] = {}
    waiting = paths.copy()
    rng.shuffle(waiting)
    for _ in range(60):
        if waiting and rng.random() < 0.2:
            engine.store(waiting.pop())
        elif kept and rng.random() < 0.4:
            engine.drop(kept.pop(rng.choice(list(kept))))
        else:
            path = rng.choice(paths)[: rng.randrange(1, 8) * WIDTH]
            if name(path) not in kept:
                kept[name(path)] = path
                engine.keep(path)
        if rng.random() < 0.3:
            engine.positions(paths[0])
    for path in waiting:
        engine.store(path)
    for path in paths:
        states = [at for at in range(WIDTH, len(path) + 1, WIDTH) if name(path[:at]) in kept]
        for end, known in engine.positions(path).items():
            before = [at for at in states if at <= end]
            assert {at for at in known if at <= end} <= {*before}
            if is_anchor(end // SIZE):
                asked_since = [depth for depth in range(SIZE, end, SIZE) if is_anchor(depth // SIZE)]
                since = max(asked_since, default=0)
                assert [at for at in before if at > since] == [at for at in known if since < at <= end]


def test_a_copy_of_a_state_below_the_gpu_changes_nothing_of_the_one_in_it() -> None:
    engine, path = Engine(), tokens(8 * WIDTH)
    engine.store(path)
    engine.keep(path[:160])
    key = name(path[:160])
    for group in STATES:
        engine.held.apply(BlocksStored((key,), medium="CPU", group=group))  # vLLM's offloading names no kind
        engine.held.apply(BlocksRemoved((key,), medium="CPU", group=group))
    assert (deepest(engine, path), engine.held.mixed) == (160, False)
    engine.drop(path[:160])
    engine.held.apply(BlocksStored((key,), medium="CPU", group=STATES[0]))
    assert (deepest(engine, path), engine.held.mixed) == (0, False)


def test_a_gpu_that_is_cleared_keeps_no_state() -> None:
    engine, path = Engine(), tokens(8 * WIDTH)
    engine.store(path)
    engine.keep(path[:160])
    assert deepest(engine, path) == 160
    engine.held.apply(TierCleared(Tier.GPU))
    assert (deepest(engine, path), engine.held.copies(Tier.GPU)) == (0, {})


def test_a_stream_that_begins_with_removals_of_any_group_brings_the_states_that_follow() -> None:
    """As a node sees it that joins an engine under load."""
    engine, path = Engine(), tokens(8 * WIDTH)
    for group in (DENSE, *STATES):
        engine.held.apply(BlocksRemoved((77,), group=group))
    engine.held.apply(BlocksStored((78,), medium="CPU", group=STATES[1]))
    engine.store(path)
    for group in STATES:
        engine.held.apply(BlocksRemoved((79,), group=group))
    engine.keep(path[:160])
    assert (deepest(engine, path), engine.held.mixed) == (160, False)


def test_a_state_from_which_very_many_prompts_continue_is_not_looked_for_in_all_of_them() -> None:
    """An engine that drops and keeps a few of them again and again would hold up its readers for minutes."""
    held, path, branches = Residency(hasher(), namespace_of), tuple(range(1, 201)), 40_000
    held.apply(BlocksStored(path, None, array("I", path).tobytes(), 1, group=DENSE, kind="full_attention"))
    for key in range(1000, 1000 + branches):
        held.apply(BlocksStored((key,), 200, array("I", [key]).tobytes(), 1, group=DENSE, kind="full_attention"))
    while not held.settle().complete:
        pass
    began = process_time()
    for _ in range(3):
        held.apply(BlocksStored(path[100:], block_tokens=1, group=STATES[0], kind="mamba"))
        assert held.settle().states
        held.apply(BlocksRemoved(path[100:], group=STATES[0]))
        assert held.settle().states
    assert process_time() - began < 2.0
