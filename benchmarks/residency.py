"""How many events of engines does one core take in, what does a block cost in memory, and what a match of what came?

    python -m benchmarks.residency [--engines 10] [--blocks 20000] [--rows 1000000] [--seed 1] [--times-only] [--dry]

- `events`: busy engines whose caches are full (`residency_parts`), one stream each, by turns. `block_us` is what a
  stored block costs together with the removal that makes room for it, all of a node's core work included: gap machine,
  decoder, residency, settling, and with `engine_caches` the route table. By parts, and in instructions where valgrind
  is there. Goal: 20 us, which is ten engines at 5,000 blocks a second each.
- `memory`: bytes of a residency for each block it holds.
- `match`: microseconds of `RouteTable.match` among so many CONFIRMED rows, at the depths of chats.
- `radix_tree`: NVIDIA Dynamo's RadixTree (Rust), in its own environment where `make test-engines` made one: applying
  blocks and finding a prefix, as the distance that Python has to it. It gets hashes ready made, and decodes nothing.

Times are processor time of this process, and the better on a machine that does nothing else: `load_of_the_machine`
says what it did. The garbage collector is set as in a node.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import orjson

from benchmarks.decision import Chats, measure, memory_of_process
from benchmarks.harness.bench import ROOT, command_line, finish, instructions
from benchmarks.residency_parts.residency_node import BLOCK_TOKENS, GENERATION, KEY, NAMESPACE, PARTS, apply_streams
from benchmarks.residency_parts.residency_streams import make_streams
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.sources.events import EventDecoder
from ranvier_py.core.prompts.fingerprint import TokenHasher
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.node.node import GARBAGE_THRESHOLDS

CAPACITY_BLOCKS = 16_384  # of one engine: 262,144 tokens, as of a large GPU with a middling model
STREAMS = 2  # recorded; engines share them, for recording takes longer than measuring
GOAL_BLOCK_US = 20.0
COUNTED_BLOCKS = 2_000  # of the shorter of two runs under valgrind
LONGER = 3
MATCHES = 2_000
MEMORY_BLOCKS = 200_000
RADIX_TREE = ROOT / "benchmarks" / "residency_parts" / "residency_radix_tree.py"


def measure_events(options: argparse.Namespace) -> dict[str, Any]:
    streams = [make_streams(CAPACITY_BLOCKS, options.blocks, options.seed + number) for number in range(STREAMS)]
    result: dict[str, Any] = {
        "blocks_of_a_message": round(
            sum(each.blocks for each in streams) / sum(len(each.payloads) for each in streams)
        ),
        "events_of_a_block": round(sum(each.events for each in streams) / sum(each.blocks for each in streams), 2),
    }
    for name, engine_caches in (("residency", False), ("engine_cache", True)):
        runs = []
        for _ in range(options.runs):
            _, blocks, spent = apply_streams(streams, options.engines, engine_caches=engine_caches)
            runs.append({part: round(took / blocks / 1000, 2) for part, took in zip(PARTS, spent, strict=True)})
        best = min(runs, key=lambda run: sum(run.values()))
        cost = round(sum(best.values()), 2)
        result[name] = {
            "block_us": cost,
            "parts_us": best,
            "blocks_per_s": round(1e6 / cost),
            "events_per_s": round(1e6 / cost * result["events_of_a_block"]),
            "engines_of_5000_blocks_per_s": round(1e6 / cost / 5000, 1),
            "all_runs_us": [round(sum(run.values()), 2) for run in runs],
        }
        if not options.times_only and shutil.which("valgrind"):
            result[name]["instructions_of_a_block"] = instructions_of_a_block(options, name)
    return result


def instructions_of_a_block(options: argparse.Namespace, name: str) -> int:
    """Of one stored block and a removal, in user space: two runs of one engine, of which one is longer."""
    command = [sys.executable, "-m", "benchmarks.residency_parts.residency_node", name, *map(str, GARBAGE_THRESHOLDS)]
    several = [
        make_streams(CAPACITY_BLOCKS, count, options.seed) for count in (COUNTED_BLOCKS, LONGER * COUNTED_BLOCKS)
    ]
    counted = [instructions(command, pickle.dumps(streams)) for streams in several]
    return round((counted[1] - counted[0]) / (several[1].blocks - several[0].blocks))


def measure_memory(seed: int) -> dict[str, float]:
    """A residency that holds so many blocks, by the process's resident memory."""
    residency = Residency(TokenHasher(KEY, BLOCK_TOKENS), lambda _scope: NAMESPACE)
    streams = make_streams(MEMORY_BLOCKS, 1, seed)
    decoder = EventDecoder()
    gc.collect()
    before = memory_of_process()
    for payload in streams.filling:
        for event in decoder.decode(payload).events:
            residency.apply(event)
        residency.settle()
    gc.collect()
    blocks = residency.view().blocks
    return {"blocks": blocks, "bytes_of_a_block": round((memory_of_process() - before) / blocks, 1)}


def measure_match(rows: int, seed: int) -> dict[str, Any]:
    """Chats of 20 messages, as in benchmarks/decision.py, every row CONFIRMED and refreshed as events would."""
    chats, table = Chats(seed), RouteTable(capacity=rows)
    now, known = 0.0, []
    while len(table) < rows:
        chat = chats.new()
        table.learn(chat.chain, chat.backend, GENERATION, Trust.CONFIRMED, now)
        known.append(chat)
        now += 0.05
    known = known[-MATCHES:]
    branches, strangers = [chats.new() for _ in known], [chats.stranger() for _ in known]
    generations = [GENERATION] * 64
    gc.disable()

    def match(several: Sequence[Any]) -> dict[str, float]:
        call: Callable[[int], Callable[[], object]] = lambda i: partial(table.match, several[i].chain, generations, now)  # noqa: E731
        return measure(call, len(several))

    found = {
        "rows": len(table),
        "claims_confirmed": table.counters.claims["confirmed"],
        "microseconds": {
            "at_the_deepest_stop": match(known),
            "of_a_shared_system_prompt": match(branches),
            "of_nothing": match(strangers),
        },
    }
    gc.enable()
    return found


def measure_radix_tree() -> dict[str, Any] | None:
    """None where there is no environment for it."""
    python = ROOT / ".venv-dynamo" / "bin" / "python"
    if not python.exists():
        return None
    done = subprocess.run([python, RADIX_TREE], check=True, capture_output=True, text=True, cwd=ROOT)
    found: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    options = read_options()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    memory = measure_memory(options.seed)
    result = {
        "benchmark": "residency",
        "question": "events of engines that one core takes in, memory of a block, cost of a match of what came",
        "seed": options.seed,
        "load_of_the_machine": round(os.getloadavg()[0], 1),
        "engines": options.engines,
        "capacity_blocks": CAPACITY_BLOCKS,
        "goals": {"block_us": GOAL_BLOCK_US},
        "events": measure_events(options),
        "memory": memory,
        "match": measure_match(options.rows, options.seed),
        "radix_tree": measure_radix_tree(),
    }
    return finish("residency", result, write=not options.dry)


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__, seed="streams and chats")
    parser.add_argument("--engines", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=20_000, help="stored by each engine while it is measured")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--times-only", action="store_true", help="count no instructions: that takes minutes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
