"""The supposed cache of one engine: least recently used, the deepest first, and never more than its size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from copy import deepcopy
from random import Random

import pytest

from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.shadows.supposed_cache import Hold, SupposedCache
from ranvier_py.replay.engine.block_cache import BlockCache, Job
from ranvier_py.replay.engine.block_cache import Lease as EngineLease

BLOCK = 16
CHATS, ANSWER, SHARED = 6, 3, 2  # at a time; blocks
PLENTY = 1_000_000


def cache(capacity: float = float("inf"), prefixes_max: int = PLENTY) -> SupposedCache:
    found = SupposedCache(BLOCK, prefixes_max)
    found.capacity = capacity
    return found


def names(chat: int, blocks: int) -> list[int]:
    """Names of the blocks of a chat; all chats share the first ones."""
    return [1 + index if index < SHARED else 1000 * (chat + 1) + index for index in range(blocks)]


def chain(
    blocks: Sequence[int], every: int = 1, ends: Collection[int] = (), *, tokens: bool = True, texts: bool = False
) -> list[PrefixKey]:
    """The keys of a prompt of these blocks, deepest first: one for each `every` blocks, for the last, and at `ends`."""
    last = len(blocks) - 1
    return [
        ((index + 1) * BLOCK, blocks[index] if tokens else 0, -blocks[index] if texts else 0)
        for index in range(last, -1, -1)
        if index == last or (index + 1) % every == 0 or index + 1 in ends
    ]


def held(cache: SupposedCache, keys: Sequence[PrefixKey]) -> int:
    """How much of a prompt is there now."""
    hold = deepcopy(cache).hold(keys, 0, force=True)
    assert hold is not None
    return hold.held


def serve(cache: SupposedCache, keys: Sequence[PrefixKey]) -> int:
    hold = cache.hold(keys, 0)
    assert hold is not None
    cache.prove(hold)
    cache.release(hold)
    return hold.held


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("every", [1, 4])
def test_it_holds_what_an_engine_of_its_size_holds(seed: int, every: int) -> None:
    """Chats go on in any order, several at once, in a cache of a third of them: each finds what the engine finds."""
    rng, capacity = Random(seed), 60
    ours, engine = cache(capacity * BLOCK), BlockCache(capacity, BLOCK)
    lengths = {chat: 3 + rng.randrange(8) for chat in range(CHATS)}
    running: list[tuple[int, Hold, EngineLease]] = []
    begun, ends = CHATS, defaultdict[int, set[int]](lambda: {SHARED})
    for _ in range(300):
        idle = [chat for chat in lengths if chat not in [each[0] for each in running]]
        if running and (len(running) == 2 or rng.random() < 0.5):
            chat, hold, lease = running.pop(rng.randrange(len(running)))
            engine.grow(lease, lease.job.tokens_computed)
            engine.release(lease)
            lengths[chat] += ANSWER
            ours.release(hold, chain(names(chat, lengths[chat]), every, ends[chat]))
            ends[chat].add(lengths[chat])
        else:
            chat = rng.choice(idle)
            if lengths[chat] > 20:
                del lengths[chat]
                chat, begun = begun, begun + 1
            lengths[chat] = lengths.get(chat, 3) + rng.randrange(3)
            asked = names(chat, lengths[chat])
            ends[chat].add(lengths[chat])
            prompt_tokens = BLOCK * len(asked) + 1  # the last block is a whole one, and so found
            job = Job.named(prompt_tokens, ANSWER * BLOCK, tuple(names(chat, lengths[chat] + ANSWER)))
            lease_or_none = engine.lease(job)
            hold_or_none = ours.hold(chain(asked, every, ends[chat]), ANSWER * BLOCK)
            assert lease_or_none is not None
            assert hold_or_none is not None
            engine.grow(lease_or_none, prompt_tokens)
            ours.prove(hold_or_none)
            assert abs(hold_or_none.held - lease_or_none.hits * BLOCK) <= 2 * BLOCK  # a part of a block is a block
            running.append((chat, hold_or_none, lease_or_none))
        assert ours.tokens <= ours.capacity


def test_the_prompt_used_longest_ago_goes_first_and_its_end_before_its_beginning() -> None:
    ours = cache(20 * BLOCK)
    for chat in range(2):
        serve(ours, chain(names(chat, 10)))
    serve(ours, chain(names(0, 10)))
    serve(ours, chain(names(2, 9)))  # 2 + 8 + 8 + 7 blocks: five too many
    assert [held(ours, chain(names(chat, 10))) // BLOCK for chat in range(3)] == [10, 5, 9]


def test_what_running_requests_hold_is_not_evicted_and_others_wait() -> None:
    ours = cache(16 * BLOCK)
    first = ours.hold(chain(names(0, 8)), 2 * BLOCK)
    assert first is not None
    assert ours.hold(chain(names(1, 10)), BLOCK) is None
    assert ours.tokens == 10 * BLOCK
    ours.release(first)
    second = ours.hold(chain(names(1, 10)), BLOCK)
    assert second is not None
    assert (second.held, held(ours, chain(names(0, 8)))) == (2 * BLOCK, 7 * BLOCK)


def test_a_failed_request_leaves_what_others_have_or_will_have() -> None:
    ours = cache()
    serve(ours, chain(names(0, 5)))
    failed, other = (ours.hold(chain(names(0, blocks)), 0) for blocks in (9, 7))
    assert failed is not None
    assert other is not None
    ours.abandon(failed)
    assert held(ours, chain(names(0, 9))) == 7 * BLOCK
    ours.abandon(other)
    assert held(ours, chain(names(0, 9))) == 5 * BLOCK
    assert ours.tokens == 5 * BLOCK


def test_a_prompt_read_as_text_first_and_as_tokens_later_is_one_prompt() -> None:
    """What is known of its parts later lies between what was known before."""
    ours, blocks = cache(), names(0, 12)
    serve(ours, chain(blocks, 6, tokens=False, texts=True))
    assert serve(ours, chain(blocks, 6, texts=True)) == 12 * BLOCK
    assert serve(ours, chain(blocks, 2)) == 12 * BLOCK
    assert ours.tokens == 12 * BLOCK
    assert held(ours, chain([*blocks[:6], 77, 78], 2)) == 6 * BLOCK


def test_the_number_of_prefixes_is_bounded_and_what_is_dropped_is_counted() -> None:
    ours = cache(prefixes_max=20)
    for chat in range(10):
        serve(ours, chain(names(chat, 6)))
    assert ours.count <= 20 + 6
    assert ours.dropped >= 10
