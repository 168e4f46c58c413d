"""The tree of checkpoints: what is found, what an insertion keeps, what is evicted. Against sets of prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.replay.hybrid.hybrid_model import PAPER_7B
from ranvier_py.replay.hybrid.state_tree import COMPAT, REPAIRED, Defects, EvictionRule, StateTree

ENDLESS = 10**15
STATE, TOKEN = PAPER_7B.state_bytes, PAPER_7B.token_bytes
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=25)
RULES: tuple[EvictionRule, ...] = ("lru", "utility")


def path(tokens: Sequence[int], width: int = 4) -> bytes:
    return np.array(tokens, dtype=f"<u{width}").tobytes()


def tree_of(rule: EvictionRule = "utility", capacity: int = ENDLESS, defects: Defects = REPAIRED) -> StateTree:
    return StateTree(PAPER_7B, capacity, rule, defects=defects)


def is_sound(tree: StateTree) -> bool:
    """Counts are those of a walk, ends add up, and no child is kept under another's key."""
    nodes = list(tree.walk())
    for node in nodes:
        assert node.parent is not None
        assert node.end == node.parent.end + len(node.edge) // tree.width
        assert all(child.edge[: tree.width] == key and child.parent is node for key, child in node.children.items())
    return (tree.nodes, tree.symbols) == (len(nodes), sum(len(node.edge) for node in nodes) // tree.width)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [4, 8])
@given(sequences=SEQUENCES)
def test_what_is_reusable_is_the_longest_prefix_with_a_checkpoint(
    rule: EvictionRule, width: int, sequences: list[list[int]]
) -> None:
    tree = StateTree(PAPER_7B, ENDLESS, rule, width=width)
    stored: list[list[int]] = []
    checkpoints: set[tuple[int, ...]] = set()
    for each in sequences:
        raw = max((common(each, other) for other in stored), default=0)
        reusable = max((len(end) for end in checkpoints if tuple(each[: len(end)]) == end), default=0)
        found = tree.find(path(each, width))
        assert (found.raw, found.reusable) == (raw, reusable)
        before = tree.nodes
        tree.insert(path(each, width))
        stored.append(each)
        checkpoints |= {tuple(each)} | ({tuple(each[:raw])} if raw else set())
        assert tree.nodes == len(checkpoints) <= before + 2
        assert is_sound(tree)


def test_what_is_purely_input_pays_when_it_comes_the_third_time() -> None:
    tree = tree_of()
    reused = []
    for question in (7, 8, 9):
        reused.append(tree.match(path([1, 2, 3, question])).reusable)
        tree.insert(path([1, 2, 3, question, 100 + question]))
    assert reused == [0, 0, 3]


def test_a_chat_that_goes_on_pays_at_its_second_turn() -> None:
    tree = tree_of()
    tree.insert(path([1, 2, 3, 4]))
    assert tree.match(path([1, 2, 3, 4, 5])).reusable == 4


def test_a_prefix_shorter_than_its_edge_is_stored_but_not_reusable() -> None:
    tree = tree_of()
    tree.insert(path([1, 2, 3, 4]))
    found = tree.find(path([1, 2, 3, 4]), 3)
    assert (found.raw, found.reusable) == (3, 0)


def test_the_published_walk_below_half_an_edge_finds_what_is_not_there() -> None:
    """Repaired, the walk ends in the middle of the edge."""
    tokens = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]
    asked = path([1, 2, 5])
    for defects, expected in ((COMPAT, (3, 1)), (REPAIRED, (2, 0))):
        tree = tree_of("lru", defects=defects)
        for each in tokens:
            tree.insert(path(each))
        found = tree.find(asked)
        assert (found.raw, found.reusable) == expected


def test_the_least_recently_visited_leaf_goes_first_where_recency_alone_counts() -> None:
    tree = tree_of("lru", capacity=3 * (STATE + 10 * TOKEN))
    for first in (1, 2, 3):
        tree.insert(path([first] * 10))
    tree.match(path([1] * 10))
    tree.insert(path([4] * 10))
    assert [tree.find(path([first] * 10)).reusable for first in (1, 2, 3, 4)] == [10, 0, 10, 10]


def test_a_long_prefix_outlives_a_short_one_that_was_used_later() -> None:
    for alpha, kept in ((0.0, [0, 10, 10]), (2.0, [4_000, 0, 10])):
        tree = tree_of("utility", capacity=2 * STATE + 4_010 * TOKEN)
        tree.alpha = alpha
        for length in (4_000, 10):
            tree.insert(path([length] * length))
        tree.insert(path([7] * 10))
        assert [tree.find(path([token] * size)).reusable for token, size in ((4_000, 4_000), (10, 10), (7, 10))] == kept


def test_dropping_a_checkpoint_with_one_child_leaves_its_keys_and_values() -> None:
    tree = tree_of("utility", capacity=2 * STATE + 30 * TOKEN)
    tree.insert(path([1] * 10))
    tree.insert(path([1] * 10 + [2] * 10))
    tree.insert(path([1] * 10 + [2] * 10 + [3] * 10))
    assert tree.find(path([1] * 10)).reusable == 0
    assert tree.find(path([1] * 10 + [2] * 10 + [3] * 10)).reusable == 30
    assert (tree.nodes, tree.symbols) == (2, 30)
    assert is_sound(tree)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_held_is_not_evicted_until_it_is_let_go(rule: EvictionRule) -> None:
    tree = tree_of(rule, capacity=2 * (STATE + 10 * TOKEN))
    tree.insert(path([1] * 10))
    held = tree.find(path([1] * 10)).deepest
    tree.pin(held)
    for first in (2, 3, 4):
        tree.insert(path([first] * 10))
    assert tree.find(path([1] * 10)).reusable == 10
    tree.pin(held, -1)
    for first in (5, 6):
        tree.insert(path([first] * 10))
    assert tree.find(path([1] * 10)).reusable == 0


@pytest.mark.parametrize("rule", RULES)
@given(sequences=SEQUENCES)
def test_a_copy_goes_on_as_the_tree_itself_does(rule: EvictionRule, sequences: list[list[int]]) -> None:
    half = len(sequences) // 2
    tree = tree_of(rule, capacity=4 * STATE)
    for each in sequences[:half]:
        tree.insert(path(each))
    twin, left = tree.copy(), tree.copy()
    before = (left.clock, left.bytes_used, left.find(path([0, 1, 2]))[:2])
    for each in sequences[half:]:
        assert tree.match(path(each))[:2] == twin.match(path(each))[:2]
        for one in (tree, twin):
            one.insert(path(each))
            assert is_sound(one)
    assert (tree.clock, tree.bytes_used) == (twin.clock, twin.bytes_used)
    assert before == (left.clock, left.bytes_used, left.find(path([0, 1, 2]))[:2])


@given(sequences=SEQUENCES)
def test_repaired_a_cache_is_above_its_capacity_by_one_sequence_at_most(sequences: list[list[int]]) -> None:
    tree = tree_of("utility", capacity=3 * STATE)
    for each in sequences:
        tree.insert(path(each))
        assert is_sound(tree)
        assert tree.bytes_used <= max(tree.capacity_bytes, 2 * STATE + 8 * TOKEN)
