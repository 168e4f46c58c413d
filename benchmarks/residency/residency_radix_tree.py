"""Measures Dynamo's RadixTree by itself; benchmarks/residency runs it with the interpreter of .venv-dynamo.

Each of 200 documents of 512 blocks is held by four of eight workers, reported in events of 512 blocks; 20 of them also
in events of one block. Prints JSON: blocks applied per second, and microseconds to find a document of 512 blocks.
"""

from __future__ import annotations

import json
from random import Random
from time import perf_counter

from dynamo._core import RadixTree  # type: ignore[import-not-found]

WORKERS = 8
HOLDERS = 4
DOCUMENTS = 200
BLOCKS = 512
FINDS = 2_000


def stored(number: int, parent: int | None, names: list[int], digests: list[int]) -> bytes:
    blocks = [{"block_hash": name, "tokens_hash": digest} for name, digest in zip(names, digests, strict=True)]
    data = {"stored": {"parent_hash": parent, "blocks": blocks}}
    return json.dumps({"event_id": number, "data": data, "dp_rank": 0}).encode()


def apply_all(documents: list[list[int]], run: int) -> tuple[object, float]:
    """Report all documents in events of `run` blocks. Returns the tree, and the blocks applied per second."""
    tree = RadixTree()
    events: list[tuple[int, bytes]] = []
    for number, digests in enumerate(documents):
        names = [digest ^ 0x5555 for digest in digests]
        for place in range(0, BLOCKS, run):
            parent = names[place - 1] if place else None
            event = stored(len(events), parent, names[place : place + run], digests[place : place + run])
            events.extend((((number + each) % WORKERS), event) for each in range(HOLDERS))
    start = perf_counter()
    for worker, event in events:
        tree.apply_event(worker, event)
    return tree, len(events) * run / (perf_counter() - start)


def main() -> None:
    rng = Random(1)
    documents = [[rng.getrandbits(62) for _ in range(BLOCKS)] for _ in range(DOCUMENTS)]
    _, single_per_s = apply_all(documents[: DOCUMENTS // 10], 1)
    tree, blocks_per_s = apply_all(documents, BLOCKS)
    start = perf_counter()
    for number in range(FINDS):
        scores = tree.find_matches(documents[number % DOCUMENTS]).scores  # type: ignore[attr-defined]
    find_us = (perf_counter() - start) / FINDS * 1e6
    assert sorted(scores.values()) == [BLOCKS] * HOLDERS, scores
    found = {
        "blocks_per_s_in_events_of_512": round(blocks_per_s),
        "blocks_per_s_in_events_of_1": round(single_per_s),
        "find_512_blocks_us": round(find_us, 1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
