"""How many engine events can one core process, and how much memory does a block take?

    python -m benchmarks.residency [--engines 10] [--blocks 20000] [--seed 1] [--dry]

- `events`: streams of busy engines whose caches are full (`residency_streams`), their messages in turn. `block_us` is
  the time for a stored block and the removal that makes room for it, with all of a node's core work, and in
  `engine_cache` also the route table. Goal: 20 us, that is ten engines with 5,000 blocks a second each.
- `memory`: bytes of a residency per block that it holds.
- `radix_tree`: NVIDIA Dynamo's RadixTree (Rust), if `make test-engines` made its environment. It is given finished
  hashes and decodes nothing.

Times are processor time of this process. The garbage collector is set as in a node: it does not run by itself.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from typing import Any

import orjson

from benchmarks.decision import memory_of_process
from benchmarks.harness.bench import ROOT, command_line, finish
from benchmarks.residency.residency_node import BLOCK_TOKENS, KEY, NAMESPACE, PARTS, apply_streams
from benchmarks.residency.residency_streams import make_streams
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.sources.events import EventDecoder
from ranvier_py.core.prompts.fingerprint import TokenHasher

CAPACITY_BLOCKS = 16_384  # of one engine: 262,144 tokens, as on a large GPU with a medium model
STREAMS = 2  # recorded streams, which the engines share, since recording takes longer than measuring
GOAL_BLOCK_US = 20.0
MEMORY_BLOCKS = 200_000
RADIX_TREE = ROOT / "benchmarks" / "residency" / "residency_radix_tree.py"


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
    return result


def measure_memory(seed: int) -> dict[str, float]:
    """Measure a residency of MEMORY_BLOCKS blocks by the process's resident memory."""
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


def measure_radix_tree() -> dict[str, Any] | None:
    """Run the measurement of Dynamo's RadixTree; None if it has no environment."""
    python = ROOT / ".venv-dynamo" / "bin" / "python"
    if not python.exists():
        return None
    done = subprocess.run([python, RADIX_TREE], check=True, capture_output=True, text=True, cwd=ROOT)
    found: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = command_line(__doc__, seed="the streams")
    parser.add_argument("--engines", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=20_000, help="stored by each engine while it is measured")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    gc.disable()  # as in a node that runs, which collects garbage only while it waits
    memory = measure_memory(options.seed)
    result = {
        "load_of_the_machine": round(os.getloadavg()[0], 1),
        "capacity_blocks": CAPACITY_BLOCKS,
        "goals": {"block_us": GOAL_BLOCK_US},
        "events": measure_events(options),
        "memory": memory,
        "radix_tree": measure_radix_tree(),
    }
    return finish("residency", options, result)


if __name__ == "__main__":
    sys.exit(main())
