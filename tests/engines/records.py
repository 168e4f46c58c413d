"""Reads what an oracle writes, and holds it against a residency that got the same events."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.residency_values import Scope
from ranvier_py.core.engine_cache.sources.event_values import BlocksRemoved, Tier
from ranvier_py.core.engine_cache.sources.events import EventDecoder
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import TokenHasher
from tests.engines.environments import python_of

HERE = Path(__file__).parent
SIZE = 16
ORACLE_S_MAX = 300.0
U64 = 1 << 64

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": str(HERE.parents[1]),
}


def records(engine: str, *arguments: object, oracle: str = "") -> Iterator[list[Any]]:
    """All that an oracle writes; its process is gone at the end. Fails when they take too long."""
    script = HERE / f"oracle_{oracle or engine}.py"
    command = ("nice", "-n", "10", str(python_of(engine)), str(script), *map(str, arguments))
    deadline = time.monotonic() + ORACLE_S_MAX
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **ENVIRONMENT}) as process:
        assert process.stdout is not None
        try:
            while head := process.stdout.read(4):
                assert time.monotonic() < deadline, "the oracle takes too long"
                yield msgpack.unpackb(process.stdout.read(int.from_bytes(head, "big")), strict_map_key=False)
        finally:
            process.kill()


def namespace_of(scope: Scope) -> Fingerprint:
    return Fingerprint(1 + int.from_bytes(repr((scope.lora_name, scope.salt)).encode(), "big") % (U64 - 1))


@dataclass(slots=True)
class SeenOfBackend:
    """What a run was, so that a test can tell it was worth something."""

    requests: int = 0
    hit_tokens: int = 0
    tokens: int = 0
    tables: int = 0
    copied_blocks: int = 0
    wrong: list[str] = field(default_factory=list)


class Held:
    """A decoder and a residency, fed with payloads."""

    def __init__(self) -> None:
        self.hasher = TokenHasher(b"a key of thirty-two bytes' length", SIZE)
        self.decoder = EventDecoder()
        self.residency = Residency(self.hasher, namespace_of, repeats=True)  # as a node has it
        self.removed = 0

    def take(self, payload: bytes) -> None:
        for event in self.decoder.decode(payload).events:
            self.removed += len(event.hashes) if isinstance(event, BlocksRemoved) else 0
            self.residency.apply(event)

    def settle(self) -> None:
        while not self.residency.settle().complete:
            pass

    def usable(self, tokens: Sequence[int], salt: str | None, adapter: str | None, *, recompute: int = 1) -> int:
        """Tokens of this prompt that the engine will not compute: whole blocks of its own, and never the last token.

        `recompute` tokens at the end are computed in any case.
        """
        start = self.hasher.start(namespace_of(Scope(adapter, None, salt)))
        ids, width = np.array(tokens, dtype=np.uint32), self.residency.block_tokens
        if not width:
            return 0
        ends = range(SIZE, len(ids) + 1, SIZE)
        held = 0
        for segment in self.hasher.extend(start, ids, ends):
            depth, fingerprint = segment.end
            if not self.residency.held_among((fingerprint,)):
                break
            held = depth
        return min(held, len(tokens) - recompute) // width * width


def compared(engine: str, *arguments: object) -> tuple[Held, SeenOfBackend]:
    """A whole run, which proves something, and in which nothing differs."""
    held, seen = Held(), SeenOfBackend()
    for kind, *values in records(engine, *arguments):
        if kind == "events":
            held.take(values[0])
        elif kind == "request":
            held.settle()
            compare_request(seen, held, *values)
        elif kind == "table":
            held.settle()
            compare_table(seen, held, values[0])
    print(seen, held.residency.counters, held.residency.view(), held.decoder.counters)
    assert seen.wrong == []
    assert seen.tables == seen.requests // 100
    assert seen.hit_tokens > seen.tokens // 4, "nearly nothing was found: this proves nothing"
    counts, read = held.residency.counters, held.decoder.counters
    assert (counts.removed_unknown, counts.contradicted, counts.mismatched, counts.opaque) == (0, 0, 0, 0)
    assert read.unread == read.tags_skipped == read.fields_skipped == 0
    return held, seen


def compare_request(
    seen: SeenOfBackend, held: Held, tokens: list[int], salt: str | None, adapter: str | None, hit: int
) -> None:
    predicted = held.usable(tokens, salt, adapter)
    unit = SIZE if held.residency.block_tokens < SIZE else 1  # we see no finer than our own blocks
    if predicted // unit != hit // unit:
        seen.wrong.append(f"request {seen.requests}: {hit} of {len(tokens)} tokens, predicted {predicted}")
    seen.requests += 1
    seen.hit_tokens += hit
    seen.tokens += len(tokens)


def compare_table(seen: SeenOfBackend, held: Held, table: dict[int | bytes, int]) -> None:
    named = {key % U64 if isinstance(key, int) else key: copies for key, copies in table.items()}
    found = held.residency.copies(Tier.GPU)
    if found != named:
        differ = [key for key in {**named, **found} if named.get(key) != found.get(key)]
        seen.wrong.append(f"table {seen.tables}: {len(differ)} of {len(named)} blocks differ")
    seen.tables += 1
    seen.copied_blocks += sum(copies > 1 for copies in named.values())
