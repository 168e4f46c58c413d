"""What the tests of the loaders share: files, the shared traces, and what a cache could give by brute force."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.hit_rate import DRAWS, reference
from benchmarks.workloads.traffic import leading
from ranvier_py.io.tokenizer import ChatTokenizer
from ranvier_py.replay.replay_plan import prepare
from ranvier_py.replay.traces.open_trace import open_trace
from ranvier_py.replay.traces.trace import Format, Trace, TraceOptions, TraceRequest

DATA = Path(os.environ.get("SHARED_DATA", Path(__file__).parents[3].parent / "shared" / "data"))


__all__ = ["all_are_sound", "leading", "load_once", "loaded", "shared", "shares", "written"]

load_once = cache(ChatTokenizer.load)
"""Instead of `ChatTokenizer.load` where many traces are opened: it takes a second."""


def written(path: Path, lines: Sequence[Any], packed: bool = False) -> Path:
    """A file with one JSON value, or these very bytes, on each line."""
    data = b"\n".join(line if isinstance(line, bytes) else orjson.dumps(line) for line in lines)
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


def loaded(path: Path, format_name: Format, *lines: Any, **options: Any) -> Trace:
    """A file of these lines, opened as this format; every request is sound."""
    trace = open_trace(written(path / "trace.jsonl", lines), TraceOptions(format=format_name, **options))
    all_are_sound(trace)
    return trace


def shared(name: str) -> Path:
    """A file or folder of the shared data; skips the test where it is not."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the shared {name} is not here (set SHARED_DATA)")
    return path


def all_are_sound(trace: Trace) -> None:
    """Each request is, and together they name prefixes: what comes before a block is the same wherever it stands.

    An engine that reads its blocks by halving would else look for some that it evicted.
    """
    before: dict[int, int] = {}
    called: dict[int, int] = {}
    ends: dict[int, int] = {}
    for item in prepare(trace):
        is_sound(item.request, trace.block_tokens)
        for known, keys in ((before, item.request.blocks), (called, item.job.keys)):
            for above, block in pairwise((0, *keys)):
                assert known.setdefault(block, above) == above, "a block follows two others"
        for key in item.request.chain:
            block = item.request.blocks[key.tokens // trace.block_tokens - 1]
            assert ends.setdefault(key.fingerprint, block) == block, "a prefix key names two prefixes"


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


def shares(trace: Trace, draws: int = DRAWS) -> tuple[float, float, float]:
    """Shares of prompt tokens that infinite caches would have: ideal, random, greedy (`benchmarks/hit_rate.py`)."""
    known = reference(trace, draws=draws)
    return known.ideal, known.random, known.greedy
