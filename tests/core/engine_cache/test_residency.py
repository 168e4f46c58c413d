from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from time import process_time
from typing import Any

import pytest

from ranvier_py.core.engine_cache.prefixes import Change
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.residency_values import ROOM_EACH, Lack, Scope
from ranvier_py.core.engine_cache.sources.event_values import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineHash,
    Tier,
    TierCleared,
)
from ranvier_py.core.ids import Fingerprint
from tests.core.engine_cache.model import PLAIN, SIZE, fingerprint, hasher, namespace_of

TEXT = list(range(100, 100 + 2048))


def residency(**bounds: Any) -> Residency:
    return Residency(hasher(), namespace_of, **bounds)


def stored(hashes: Sequence[EngineHash], tokens: Sequence[int], width: int = 16, **fields: Any) -> BlocksStored:
    return BlocksStored(hashes=tuple(hashes), token_bytes=array("I", tokens).tobytes(), block_tokens=width, **fields)


def removed(*hashes: EngineHash, **fields: Any) -> BlocksRemoved:
    return BlocksRemoved(hashes=hashes, **fields)


def depths(held: Residency, tokens: Sequence[int] = TEXT, scope: Scope = PLAIN) -> list[int]:
    """Depths at which a prefix of `tokens` is held in the GPU."""
    held.settle()
    ends = range(SIZE, len(tokens) + 1, SIZE)
    return [end for end in ends if held.tiers().get(fingerprint(list(tokens[:end]), scope)) is Tier.GPU]


def test_stored_blocks_are_found_under_the_fingerprints_of_prompts() -> None:
    held = residency()
    held.apply(stored([1, 2], TEXT[:32]))
    held.apply(stored([b"3"], TEXT[32:48], parent=2))
    first, second, third = (fingerprint(TEXT[:end]) for end in (16, 32, 48))
    assert held.settle().changes == (
        Change(first, 16, Tier.GPU, Fingerprint(0)),
        Change(second, 32, Tier.GPU, first),
        Change(third, 48, Tier.GPU, second),
    )
    assert held.settle().changes == ()
    assert held.view().block_tokens == 16


def test_blocks_wait_for_their_parent() -> None:
    """A node that joins late learns of the ends of prompts before their beginnings."""
    held = residency()
    held.apply(stored([4], TEXT[48:64], parent=3))
    held.apply(stored([3], TEXT[32:48], parent=2))
    held.apply(stored([5], TEXT[64:80], parent=4))
    held.apply(stored([99], range(16), parent=3))
    assert (depths(held), held.view().orphaned) == ([], 5)
    held.apply(stored([1, 2], TEXT[:32]))
    assert depths(held) == [16, 32, 48, 64, 80]
    assert depths(held, [*TEXT[:48], *range(16)]) == [16, 32, 48, 64]
    assert (held.view().orphaned, held.counters.resolved_late) == (0, 4)


def test_orphaned_blocks_have_a_bound_and_the_oldest_go_first() -> None:
    held = residency(orphaned_max=30)
    for number in range(0, 100, 2):
        held.apply(stored([b"%d" % number], TEXT[:16], parent=b"%d" % (number + 1)))
        assert held.view().entries <= 30
    assert held.counters.dropped == 2 * 40
    assert (b"98" in held.copies(Tier.GPU), b"0" in held.copies(Tier.GPU)) == (True, False)
    for number in range(0, 100, 2):
        held.apply(removed(b"%d" % number))
    assert (held.view().entries, held.view().orphaned) == (0, 0)


def test_with_an_orphaned_block_goes_all_that_continues_it() -> None:
    """What stayed would wait for a parent that is another one when it comes."""
    held = residency(orphaned_max=7)
    held.apply(stored([2], TEXT[16:32], parent=1))
    held.apply(stored([8], TEXT[16:32], parent=7))
    held.apply(stored([3], range(16), parent=1))
    assert (held.counters.dropped, held.view().orphaned) == (3, 2)
    held.apply(stored([1, 3], [*TEXT[:16], *range(16)]))
    assert depths(held, [*TEXT[:16], *range(16)]) == [16, 32]
    assert held.counters.contradicted == 0


def test_new_blocks_are_refused_where_there_is_no_room() -> None:
    held = residency(entries_max=20)
    held.apply(stored(range(1, 65), TEXT[:1024]))
    assert held.view().entries <= 20
    assert depths(held) == list(range(16, 161, 16))
    assert held.counters.refused >= 54
    held.apply(removed(*range(1, 65)))
    held.settle()
    assert held.view().entries == 0


def test_what_lies_below_the_gpu_makes_room_for_what_is_stored_there() -> None:
    """Of vLLM's tiers of storage some never report that a block is gone."""
    held = residency(entries_max=400)
    prompts = [[1000 * number + token for token in range(64)] for number in range(200)]
    for number, prompt in enumerate(prompts):
        keys = tuple(range(10 * number + 1, 10 * number + 5))
        held.apply(stored(keys, prompt, medium="GPU"))
        for key in keys:
            held.apply(BlocksStored(hashes=(key,), medium="STORAGE"))
        assert depths(held, prompt) == [16, 32, 48, 64]
        held.apply(removed(*reversed(keys), medium="GPU"))
        held.settle()
        assert held.view().entries <= 400
    assert (held.lack, held.counters.refused) == (Lack.NOTHING, 0)
    assert held.counters.forgotten > 0
    assert held.tiers()[fingerprint(prompts[-1])] is Tier.DISK
    assert fingerprint(prompts[0][:16]) not in held.tiers()
    for number in range(200):
        held.apply(removed(*range(10 * number + 1, 10 * number + 5), medium="STORAGE"))
    held.settle()
    assert (held.view().entries, held.tiers()) == (0, {})


def test_a_name_without_tokens_is_reported_later() -> None:
    held = residency()
    held.apply(BlocksStored(hashes=(1, 2), medium="CPU"))
    held.apply(stored([1, 2], TEXT[:32]))
    held.apply(removed(1, 2))
    held.settle()
    assert held.tiers()[fingerprint(TEXT[:32])] is Tier.CPU


PROMOTIONS = [
    [BlocksStored(hashes=(key,), medium="CPU") for key in (1, 2, 3, 4)],
    [BlocksStored(hashes=(1, 2, 3, 4), medium="CPU")],
    [stored([1, 2, 3, 4], TEXT[:64], medium="CPU")],
]
"""As vLLM's offloading says them: one name at a time, some at once, or with tokens and without a salt."""


@pytest.mark.parametrize("promoted", PROMOTIONS)
@pytest.mark.parametrize("salt", [None, "pepper"])
def test_what_is_promoted_before_the_gpu_stores_it_gets_its_place_from_the_gpus_event(
    promoted: list[BlocksStored], salt: str | None
) -> None:
    held, scope = residency(repeats=True), Scope(None, None, salt)
    for event in promoted:
        held.apply(event)
    held.settle()
    assert (held.view().prefixes, held.lack) == (0, Lack.NOTHING)
    held.apply(stored([1, 2, 3, 4], TEXT[:64], medium="GPU", extra_keys=((salt,), (), (), ()) if salt else ()))
    held.apply(stored([5], TEXT[64:80], parent=4, medium="GPU"))
    assert depths(held, scope=scope) == [16, 32, 48, 64, 80]
    assert not held.held_among((fingerprint(TEXT[16:32]), fingerprint(TEXT[48:64])))
    assert (held.counters.contradicted, held.view().orphaned) == (0, 0)
    held.apply(removed(1, 2, 3, 4, 5, medium="GPU"))
    held.settle()
    assert held.tiers()[fingerprint(TEXT[:64], scope)] is Tier.CPU
    held.apply(removed(1, 2, 3, 4, medium="CPU"))
    held.settle()
    assert held.view().entries == 0


def test_a_cleared_cache_holds_nothing_and_starts_anew() -> None:
    held = residency()
    held.apply(stored([1], TEXT[:16]))
    held.settle()
    held.apply(stored([2], TEXT[16:32], parent=1))
    held.apply(CacheCleared())
    held.apply(stored([2], TEXT[:16]))
    changes = held.settle()
    assert changes.cleared
    assert changes.changes == (Change(fingerprint(TEXT[:16]), 16, Tier.GPU, Fingerprint(0)),)
    assert depths(held) == [16]
    assert not held.settle().cleared


def test_adapters_and_salts_share_no_prefix() -> None:
    held = residency()
    salted = {"extra_keys": (("pepper",), ())}
    held.apply(stored([1, 2], TEXT[:32], **salted))
    held.apply(stored([3], TEXT[:16], lora_name="french", lora_id=1, extra_keys=(("french",),)))
    held.apply(stored([4], TEXT[:16], lora_name="french", lora_id=1, extra_keys=(("french", "pepper"),)))
    held.apply(stored([5], TEXT[:16], salt="pepper", lora_id=7))
    assert depths(held) == []
    assert depths(held, scope=Scope(None, None, "pepper")) == [16, 32]
    assert depths(held, scope=Scope("french", 1, None)) == [16]
    assert depths(held, scope=Scope("french", 1, "pepper")) == [16]
    assert depths(held, scope=Scope(None, 7, "pepper")) == [16]
    held.apply(stored([6], TEXT[32:48], parent=2))
    assert depths(held, scope=Scope(None, None, "pepper")) == [16, 32, 48]


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_keys": ((), (("image", 3),), ())},
        {"extra_keys": ((), ("bare",), ())},
        {"extra_keys": ((), (b"embeddings",), ())},
    ],
)
def test_blocks_with_media_and_those_behind_them_have_no_fingerprint(fields: dict[str, Any]) -> None:
    """The tokens of an image are placeholders: two images would pass for one."""
    held = residency()
    held.apply(stored([4], TEXT[48:64], parent=3))
    held.apply(stored([1, 2, 3], TEXT[:48], **fields))
    held.apply(stored([5], TEXT[64:80], parent=4))
    assert depths(held) == [16]
    assert (held.counters.opaque, held.view().orphaned) == (4, 0)
    held.apply(removed(5, 4, 3, 2, 1))
    held.settle()
    assert held.view().entries == 0


@pytest.mark.parametrize(
    "fields", [{"media": True}, {"lora_name": "foreign"}, {"extra_keys": ((("image", 1), "salt"),)}]
)
def test_a_prompt_that_cannot_be_one_of_ours_has_no_fingerprint(fields: dict[str, Any]) -> None:
    held = residency()
    held.apply(stored([1], TEXT[:16], **fields))
    assert (held.settle().changes, held.copies(Tier.GPU)) == ((), {1: 1})


def test_the_first_dense_group_counts_and_no_other() -> None:
    held = residency()
    held.apply(stored([1], TEXT[:16], kind="full_attention", group=1))
    assert not held.mixed
    held.clear()
    held.apply(stored([1], TEXT[:16], kind="mamba", group=0))
    held.apply(stored([1], TEXT[:16], kind="full_attention", group=1))
    held.apply(stored([1], TEXT[:16], kind="full_attention", group=2))
    held.apply(removed(1, group=0))
    held.apply(removed(1, group=2))
    assert depths(held) == [16]
    held.apply(removed(1, group=1))
    assert (depths(held), held.counters.other_groups, held.mixed) == ([], 4, True)


def test_tokens_that_do_not_fit_their_blocks_are_not_trusted() -> None:
    held = residency()
    held.apply(stored([1, 2], TEXT[:48]))
    held.apply(stored([3], TEXT[:16], 0))
    assert (depths(held), held.counters.mismatched, held.copies(Tier.GPU)) == ([], 2, {1: 1, 2: 1, 3: 1})


def test_a_block_reported_under_another_parent_stays_where_it_was() -> None:
    held = residency()
    held.apply(stored([1, 2], TEXT[:32]))
    held.apply(stored([7, 2, 8], [*range(16), *TEXT[16:48]], parent=66))
    assert (depths(held), held.counters.contradicted) == ([16, 32, 48], 1)


def test_namespaces_beyond_the_bound_have_no_fingerprints() -> None:
    held = residency()
    for number in range(5000):
        held.apply(stored([number], TEXT[:16], salt=str(number)))
    assert held.counters.roots_refused == 5000 - 4096
    held.apply(removed(*range(5000)))
    held.settle()
    for number in range(ROOM_EACH):
        held.apply(stored([number], TEXT[:16], salt=f"new{number}"))
    assert depths(held, TEXT[:16], Scope(None, None, f"new{ROOM_EACH - 1}")) == [16]


def test_blocks_that_a_request_reused_are_repeated_and_are_no_new_copies() -> None:
    """vLLM's kv_cache_report_mode=full: they are removed once, and what was counted twice would stay for ever."""
    held = residency(repeats=True)
    held.apply(stored([1, 2, 3], TEXT[:48]))
    for _ in range(3):
        held.apply(stored([1, 2], TEXT[:32]))
        held.apply(stored([1], TEXT[:16]))
    assert held.copies(Tier.GPU) == {1: 1, 2: 1, 3: 1}
    assert held.counters.repeated == 9
    held.apply(removed(3, 2, 1))
    assert depths(held) == []
    assert held.view().blocks == 0


def test_an_engine_that_removes_what_was_taken_for_reused_twice_makes_copies() -> None:
    """vLLM looks nothing up for a request that wants the logprobs of its prompt."""
    held = residency(repeats=True)
    for _ in range(2):
        held.apply(stored([1, 2, 3], TEXT[:48]))
    held.apply(removed(3, 2, 1))
    held.apply(removed(3, 2, 1))
    for _ in range(2):
        held.apply(stored([1, 2, 3], TEXT[:48]))
    held.apply(removed(3, 2, 1))
    assert depths(held) == [16, 32, 48]
    held.apply(removed(3, 2, 1))
    assert (depths(held), held.view().blocks) == ([], 0)


def test_the_only_block_of_a_short_prompt_shows_nothing_of_the_others() -> None:
    held = residency(repeats=True)
    for hashes in ([1, 2, 3], [1, 2], [1]):  # the last one was stored again
        held.apply(stored(hashes, TEXT[: 16 * len(hashes)]))
    held.apply(removed(3, 2, 1, 1))
    held.apply(stored([1, 2, 3], TEXT[:48]))
    held.apply(stored([1, 2], TEXT[:32]))
    assert held.copies(Tier.GPU) == {1: 1, 2: 1, 3: 1}


def test_a_report_brings_back_what_was_missed() -> None:
    held = residency(repeats=True)
    held.apply(stored([1], TEXT[:16]))
    held.apply(stored([1, 2, 3], TEXT[:48]))
    assert held.copies(Tier.GPU) == {1: 1, 2: 1, 3: 1}
    assert depths(held) == [16, 32, 48]


def test_a_block_marked_as_reused_is_no_new_copy_wherever_it_stands() -> None:
    held = residency()
    held.apply(stored([1, 2], TEXT[:32]))
    held.apply(stored([2], TEXT[16:32], parent=1, reused=True))
    held.apply(stored([1], TEXT[:16], reused=True))
    assert held.copies(Tier.GPU) == {1: 1, 2: 1}
    held.apply(stored([5], TEXT[32:48], parent=2, reused=True))
    assert held.copies(Tier.GPU)[5] == 1


def test_what_an_engine_computes_twice_is_two_copies() -> None:
    """The end of a prompt whose beginning was there, and the only block of a prompt of one: both are computed anew."""
    held = residency(repeats=True)
    held.apply(stored([1, 2], TEXT[:32]))
    held.apply(stored([2], TEXT[16:32], parent=1))
    held.apply(stored([1], TEXT[:16]))
    assert held.copies(Tier.GPU) == {1: 2, 2: 2}
    held.apply(stored([1, 2], TEXT[:32], medium="CPU"))
    assert held.copies(Tier.CPU) == {1: 1, 2: 1}


def test_a_removal_at_a_tier_of_which_nothing_was_reported_again_shows_no_second_copy() -> None:
    held = residency(repeats=True)
    for _ in range(2):
        held.apply(stored([1, 2], TEXT[:32]))
    held.apply(removed(2, 1, medium="CPU"))  # stored before we listened, or forgotten for want of room
    held.apply(stored([1, 2], TEXT[:32]))
    assert held.copies(Tier.GPU) == {1: 1, 2: 1}


def a_large_cache() -> Residency:
    """One whose blocks take milliseconds to walk over."""
    held = residency()
    held.apply(stored(list(range(10_000, 30_000)), [7] * 320_000))
    while not held.settle().complete:
        pass
    return held


def clear_a_tier(held: Residency, number: int) -> None:
    held.apply(stored([number], TEXT[:16], medium="CPU"))
    held.apply(TierCleared(Tier.CPU))


def clear_a_rank(held: Residency, number: int) -> None:
    held.apply(stored([number], TEXT[:16]))
    held.clear(singly=True)


def store_for_a_salt(held: Residency, number: int) -> None:
    held.apply(stored([number], TEXT[:16], salt=f"s{number}"))


@pytest.mark.parametrize("happen", [clear_a_tier, clear_a_rank, store_for_a_salt])
def test_what_takes_a_walk_over_all_that_is_held_does_not_take_it_with_each_event(
    happen: Callable[[Residency, int], None],
) -> None:
    """An engine that sends nothing else would hold up its readers for minutes with one message."""
    held, began = a_large_cache(), process_time()
    for number in range(8000):
        happen(held, number)
    assert process_time() - began < 1.0


def test_a_clear_of_a_tier_that_a_later_one_makes_superfluous_takes_no_turn() -> None:
    held = a_large_cache()
    for number in range(100):
        clear_a_tier(held, number)
    turns = 1
    while not held.settle().complete:
        turns += 1
    assert turns < 10
    assert held.copies(Tier.CPU) == {}


def test_a_tier_that_is_cleared_while_a_snapshot_is_written_is_empty_once_that_is_done() -> None:
    held = residency()
    held.apply(stored([1, 2], TEXT[:32]))
    held.settle()
    held.freeze()
    held.apply(TierCleared(Tier.GPU))
    held.apply(stored([1], TEXT[:16]))
    assert depths(held) == [16, 32]
    held.thaw()
    assert depths(held) == [16]
