"""Fingerprints depend on the whole prefix, on the namespace and on the key, and on nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import (
    UNCOMPUTED_TOKENS,
    Segment,
    TextHasher,
    TokenHasher,
    anchors_between,
    canonical_message,
)
from ranvier_py.core.splitmix import mix, mix_array
from tests.examples import examples

KEY = b"k" * 32
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=400)


def hashed(ids: list[int], *, namespace: int = 7, key: bytes = KEY, block: int = 16) -> Segment:
    hasher = TokenHasher(key, block)
    return hasher.extend(hasher.start(Fingerprint(namespace)), np.array(ids, dtype=np.uint32), [len(ids)])[0]


def every_pair(segments: list[Segment]) -> set[tuple[int, int]]:
    return {pair for segment in segments for pair in (*segment.anchors, segment.end) if pair[0]}


@given(TOKENS, st.lists(st.integers(0, 60), max_size=30), st.sampled_from([1, 4, 16]))
def test_a_prompt_hashed_turn_by_turn_equals_the_prompt_hashed_at_once(
    ids: list[int], cuts: list[int], block: int
) -> None:
    hasher = TokenHasher(KEY, block)
    state = hasher.start(Fingerprint(7))
    segments, at = [], 0
    for cut in [*cuts, len(ids)]:
        stretch = ids[at : at + cut]
        segments.append(hasher.extend(state, np.array(stretch, dtype=np.uint32), [len(stretch)])[0])
        state = segments[-1].state
        at += len(stretch)
    whole = hashed(ids[:at], block=block)
    assert state == whole.state
    assert every_pair([whole]) <= every_pair(segments)


@given(TOKENS, st.lists(st.integers(0, 400), max_size=8))
def test_several_ends_in_one_call_equal_one_call_each(ids: list[int], ends: list[int]) -> None:
    ends = sorted({min(end, len(ids)) for end in ends} | {len(ids)})
    hasher = TokenHasher(KEY)
    start = hasher.start(Fingerprint(7))
    together = hasher.extend(start, np.array(ids, dtype=np.uint32), ends)
    for end, segment in zip(ends, together, strict=True):
        alone = hashed(ids[:end])
        assert segment.state == alone.state
        assert segment.end == alone.end


@given(st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=64), st.data())
def test_another_token_anywhere_changes_every_fingerprint_from_its_block_on(
    ids: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(ids) // 16 * 16 - 1))
    other = list(ids)
    other[at] ^= 1
    before, after = every_pair([hashed(ids)]), every_pair([hashed(other)])
    assert all(tokens <= at for tokens, _ in before & after)


@given(TOKENS)
def test_namespaces_and_keys_never_share_a_fingerprint(ids: list[int]) -> None:
    mine = {value for _, value in every_pair([hashed(ids)])}
    assert mine.isdisjoint(value for _, value in every_pair([hashed(ids, namespace=8)]))
    assert mine.isdisjoint(value for _, value in every_pair([hashed(ids, key=b"o" * 32)]))


def test_swapped_blocks_and_shifted_tokens_do_not_collide() -> None:
    first, second = list(range(16)), list(range(16, 32))
    assert hashed(first + second).end != hashed(second + first).end
    assert hashed([0, *first[:15]]).end != hashed([*first[:15], 0]).end


def test_anchors_stand_where_every_node_expects_them() -> None:
    assert anchors_between(0, 100) == [1, 2, 4, 8, 16, 32, 48, 64, 80, 96]
    assert anchors_between(16, 33) == [32]
    assert anchors_between(32, 32) == []
    assert [a for low in range(100) for a in anchors_between(low, low + 1)] == anchors_between(0, 100)


def test_the_array_mixer_equals_the_plain_one() -> None:
    values = [0, 1, 2**63, 2**64 - 1, 12345678901234567]
    assert mix_array(np.array(values, dtype=np.uint64)).tolist() == [mix(value) for value in values]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "hi"}, {"content": "hi", "role": "user"}),
        (
            {"role": "assistant", "content": "hi"},
            {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": []},
        ),
        ({"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": "a"}]},
        ),
    ],
)
def test_messages_that_render_equally_have_one_canonical_form(one: dict[str, object], other: dict[str, object]) -> None:
    assert canonical_message(one) == canonical_message(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}),
        ({"role": "user", "content": "a\x00b"}, {"role": "user\x00a", "content": "b"}),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AB"}}]},
        ),
    ],
)
def test_messages_that_render_differently_differ(one: dict[str, object], other: dict[str, object]) -> None:
    hasher = TextHasher(KEY)
    root = hasher.namespace({"model": "m"})
    assert hasher.extend(root, canonical_message(one)) != hasher.extend(root, canonical_message(other))


def test_arguments_and_tools_count_in_the_order_in_which_a_template_prints_them_and_members_in_none() -> None:
    def called(arguments: object) -> bytes:
        function = {"name": "f", "arguments": arguments}
        return canonical_message({"role": "assistant", "tool_calls": [{"id": "1", "function": function}]})

    assert len({called(each) for each in ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {}, '{"a":1,"b":2}', {"": "{}"})}) == 5
    other = {"tool_calls": [{"function": {"arguments": {}, "name": "f"}, "id": "1"}], "role": "assistant"}
    assert canonical_message(other) == called({})
    one, two = ({"role": "developer", "tools": [each]} for each in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert canonical_message(one) != canonical_message(two)


@pytest.mark.parametrize("number", [2**64, 2**64 + 1, -(2**63) - 2**12, 10**25])
def test_integers_that_are_rounded_when_read_have_no_fingerprint(number: int) -> None:
    """Engines have all of their digits, so two of them would look alike."""
    message = orjson.loads(f'{{"role":"assistant","tool_calls":[{{"function":{{"arguments":{{"n":{number}}}}}}}]}}')
    with pytest.raises(TypeError):
        canonical_message(message)
    exact = orjson.loads(f'{{"role":"user","content":"1e+20 {number}","n":[{2**64 - 1},1e18]}}')
    assert str(2**64 - 1).encode() in canonical_message(exact)


def test_token_ids_and_a_text_of_the_same_bytes_are_two_prompts() -> None:
    texts, data = TextHasher(KEY), b"a\0\0\0"
    assert texts.extend_bytes(Fingerprint(1), data) != texts.extend_bytes(Fingerprint(1), data, ids=True)


def test_tools_count_in_the_order_in_which_a_template_would_print_them() -> None:
    hasher = TextHasher(KEY)
    assert hasher.namespace({"tools": [{"a": 1, "b": 2}]}) != hasher.namespace({"tools": [{"b": 2, "a": 1}]})
    assert hasher.namespace({"model": "m", "cache_salt": "s"}) == hasher.namespace({"cache_salt": "s", "model": "m"})


@given(TOKENS, TOKENS, st.lists(st.integers(0, 40), max_size=8), st.sampled_from([4, 16]))
def test_hashing_goes_on_from_a_state_that_has_no_token_in_it(
    ids: list[int], more: list[int], cuts: list[int], block: int
) -> None:
    """A peer's copy of what an engine holds has such states only."""
    hasher = TokenHasher(KEY, block)
    state = hasher.extend(hasher.start(Fingerprint(7)), np.array(ids, dtype=np.uint32), [len(ids)])[0].state
    veiled = hasher.veiled(state)
    assert not any(veiled.rest)
    ends = sorted({*(cut for cut in cuts if cut <= len(more)), len(more)})
    tail = np.array(more, dtype=np.uint32)
    filler = (hasher.start(Fingerprint(9)), np.arange(50, dtype=np.uint32), [50])
    (_, known), (_, found) = (hasher.extend_many([filler, (one, tail, ends)]) for one in (state, veiled))
    assert [(one.anchors, one.end) for one in known] == [(one.anchors, one.end) for one in found]
    assert [hasher.veiled(one.state) for one in known] == [hasher.veiled(one.state) for one in found]


def named_anew(segments: Sequence[Segment]) -> list[Segment]:
    """The segments without anchors that an earlier one has: where a message ends within the last tokens of a block, the
    one after it names that block once more if it comes by itself."""
    found, reached = [], 0
    for segment in segments:
        found.append(replace(segment, anchors=tuple(anchor for anchor in segment.anchors if anchor[0] > reached)))
        reached = max(reached, segment.end[0])
    return found


@settings(max_examples=examples(60))
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.data())
def test_ends_that_fall_short_are_the_same_however_the_tokens_came(lengths: list[int], data: st.DataObject) -> None:
    """At once or message by message; and each is a whole block that ends early enough."""
    check_short_ends(lengths, lambda ends: data.draw(st.sets(st.sampled_from(ends))))


def test_a_short_message_at_the_end_of_a_block_changes_nothing_of_that() -> None:
    check_short_ends([16, 1, 18], set)


def check_short_ends(lengths: list[int], chosen: Callable[[list[int]], set[int]]) -> None:
    hasher = TokenHasher(KEY, short=UNCOMPUTED_TOKENS)
    ids = np.arange(sum(lengths), dtype=np.uint32)
    ends = list(accumulate(lengths))
    at_once = hasher.extend(hasher.start(Fingerprint(7)), ids, ends)
    cuts = sorted(chosen(ends) | {ends[-1]})
    state, start, segments = hasher.start(Fingerprint(7)), 0, []
    for cut in cuts:
        own = [end - start for end in ends if start < end <= cut]
        segments += hasher.extend(state, ids[start:cut], own)
        state, start = segments[-1].state, cut
    assert named_anew(segments) == named_anew(at_once)
    every_block = [*range(16, len(ids), 16), len(ids)]
    exact = dict(every_pair(TokenHasher(KEY).extend(hasher.start(Fingerprint(7)), ids, every_block)))
    for segment, before, end in zip(at_once, (0, *ends), ends, strict=False):
        assert segment.end[0] == max((end - UNCOMPUTED_TOKENS) // 16, before // 16) * 16
        assert all(fingerprint == exact[tokens] for tokens, fingerprint in (*segment.anchors, segment.end) if tokens)


def test_a_plain_hasher_hashes_the_same_to_the_very_end() -> None:
    short = TokenHasher(KEY, short=UNCOMPUTED_TOKENS)
    start = short.start(Fingerprint(7))
    ids = np.arange(32, dtype=np.uint32)
    assert short.extend(start, ids, [32])[0].end[0] == 16
    assert short.plain().extend(start, ids, [32]) == TokenHasher(KEY).extend(start, ids, [32])


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=5))
def test_blocks_of_many_jobs_at_once_equal_those_of_each_by_itself(jobs: list[tuple[int, int]]) -> None:
    """What engines hold is hashed by one of these, prompts by the other: a difference would make every claim wrong."""
    hasher, todo, reported, expected = TokenHasher(KEY), [], [], []
    for number, (before, blocks) in enumerate(jobs):
        ids = np.arange(16 * (before + blocks), dtype=np.uint32) * 2654435761 + number
        cut = 16 * before
        state = hasher.extend(hasher.start(Fingerprint(number + 1)), ids[:cut], [cut])[0].state
        todo.append((state, blocks))
        reported.append(ids[cut:])
        segments = hasher.extend(state, ids[cut:], range(16, 16 * blocks + 1, 16))
        expected += [(segment.state.total, segment.end[1]) for segment in segments]
    totals, fingerprints = hasher.every_block(todo, np.concatenate(reported))
    assert list(zip(totals, fingerprints, strict=True)) == expected
