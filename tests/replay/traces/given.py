"""What the tests of the loaders share: files, the shared traces, and what a cache could give by brute force."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from ranvier_py.io.tokenizer import ChatTokenizer
from ranvier_py.replay.trace import Trace, TraceRequest

DATA = Path(os.environ.get("SHARED_DATA", Path(__file__).parents[3].parent / "shared" / "data"))


load_once = cache(ChatTokenizer.load)
"""Instead of `ChatTokenizer.load` where many traces are opened: it takes a second."""


def written(path: Path, lines: Sequence[Any], packed: bool = False) -> Path:
    """A file with one JSON value, or these very bytes, on each line."""
    data = b"\n".join(line if isinstance(line, bytes) else orjson.dumps(line) for line in lines)
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


def shared(name: str) -> Path:
    """A file or folder of the shared data; skips the test where it is not."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the shared {name} is not here (set SHARED_DATA)")
    return path


def is_sound(request: TraceRequest, size: int) -> None:
    """What every request of every loader holds to."""
    tokens = [key.tokens for key in request.chain]
    total = request.prompt_tokens + request.answer_tokens
    assert request.at >= 0
    assert request.prompt_tokens >= 1
    assert request.answer_tokens >= 1
    assert tokens == sorted(set(tokens))
    assert all(0 < depth <= total and depth % size == 0 for depth in tokens)
    assert all(0 < key.fingerprint < 1 << 64 for key in request.chain)
    assert list(request.ends) == sorted(set(request.ends))
    assert all(0 <= end < len(request.chain) for end in request.ends)
    assert len(request.blocks) == total // size
    assert all(0 < name < 1 << 64 for name in request.blocks)
    assert request.block_tokens == size


def leading(cache: set[int], names: Sequence[int]) -> int:
    """How many names from the first on are in the cache."""
    return next((depth for depth, name in enumerate(names) if name not in cache), len(names))


def shares(trace: Trace, engines: int = 8, draws: int = 8) -> tuple[float, float, float]:
    """Shares of prompt tokens that infinite caches would have: one for all; requests sent anywhere (the mean of some
    draws); each where its longest prefix is, of those with at most 1.5 times their share of the requests + 4."""
    prompts = [request.blocks[: request.prompt_tokens // trace.block_tokens] for request in trace.requests]
    total = sum(request.prompt_tokens for request in trace.requests) / trace.block_tokens

    def anywhere(count: int, rng: Random) -> int:
        caches: list[set[int]] = [set() for _ in range(count)]
        found = 0
        for names in prompts:
            cache = rng.choice(caches)
            found += leading(cache, names)
            cache.update(names)
        return found

    caches: list[set[int]] = [set() for _ in range(engines)]
    counts, greedy = [0] * engines, 0
    for number, names in enumerate(prompts):
        open_now = [index for index in range(engines) if counts[index] <= 1.5 * number / engines + 4]
        depth, _, best = max((leading(caches[index], names), -counts[index], index) for index in open_now)
        greedy += depth
        counts[best] += 1
        caches[best].update(names)
    drawn = sum(anywhere(engines, Random(draw)) for draw in range(draws)) / draws
    return anywhere(1, Random(0)) / total, drawn / total, greedy / total
