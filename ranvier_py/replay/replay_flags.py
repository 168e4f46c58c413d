"""The flags of `ranvier replay`. Their values stay text, but for paths: `replay_request` reads and checks them.

It imports little on purpose: the command line imports it before it knows which command is wanted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ranvier_py.core.routing.placement.policies import POLICIES
from ranvier_py.core.routing.route_table.route_values import LRU, STANDARD, UTILITY
from ranvier_py.replay.engine.engine_values import CACHES
from ranvier_py.replay.engine.presets import PRESETS
from ranvier_py.replay.hybrid.hybrid_model import HYBRID_MODELS

DESCRIPTION = """Replay traces through the real router and modelled engines, in virtual time: what would each policy
have done with this traffic, and how far is it from the best possible?"""

EPILOG = """examples:
  ranvier replay chats.jsonl --policy affinity,ttft,round_robin --engines 8 --nodes 1,4
  ranvier replay mooncake.jsonl.gz --cache-tokens 1M --sweep rate=0.5,1,2,4 --out report

exit codes:
  0  done
  1  a run died, or a file can't be written
  2  the command line, or a trace, is wrong: one line says how
  130  interrupted; nothing was written"""

Add = Callable[..., object]
"""Adds a flag to a group."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command to `parser`. Only a trace is required."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="a file; its first line says its format")
    for title, add_group in GROUPS.items():
        add_group(parser.add_argument_group(title).add_argument)


def add_run(add: Add) -> None:
    add(
        "--policy",
        metavar="A,B",
        help=f"of {', '.join(POLICIES)}, and of the bounds oracle_greedy and oracle_ttft; or all (without "
        "the flag ttft, affinity, least_loaded, round_robin and the bounds)",
    )
    add("--policy-option", action="append", default=[], metavar="NAME=VALUE", help="for all policies")
    add("--nodes", default="1", metavar="1,4", help="nodes that requests enter at random (1)")
    add("--sweep", metavar="rate=0.5,1,2", help="several speeds, for curves up to saturation")
    add("--seed", default="1", metavar="N", help="of everything that is drawn (1)")
    add_answers(add)
    add("--gossip-delay", metavar="S", help="seconds that a packet from node to node takes (0.0005)")
    add(
        "--knowledge",
        default="calibrated",
        metavar="K",
        help="of the engines' caches: estimated (requests alone), calibrated (and the counts in answers, the default) "
        "or events (the engines publish them); to compare with: attention (of these those of keys and values alone) or "
        "oracle (routers see into the caches)",
    )
    add("--routes", default="1M", metavar="N", help="rows of each node's route table (1M)")
    add(
        "--eviction",
        default=STANDARD.eviction,
        metavar="E",
        help=f"what a full route table forgets: {LRU} (the default) or {UTILITY}",
    )
    add("--jobs", metavar="N", help="runs at a time, each in a process (as many as there are cores)")


def add_answers(add: Add) -> None:
    """Add the flags that say when requests come and what routers see of answers."""
    add("--speed", default="1", metavar="X", help="divides the gaps between arrivals (1)")
    add("--unstreamed", action="store_true", help="answers come as a whole: routers see no first token")
    add("--think", metavar="S", help="each turn of a session comes so long after the answer before it")


def add_engines(add: Add) -> None:
    add("--engines", default="8", metavar="N", help="engines (8)")
    kinds = f"of several, engines take turns: {', '.join(PRESETS)} (lab)"
    add("--preset", default="lab", metavar="A,B", help=kinds)
    add("--cache-tokens", metavar="N", help="cache of each engine: 200k, 1M (the preset's)")
    add(
        "--cache",
        metavar="A,B",
        help=f"of all engines, of several one after the other: {', '.join(CACHES)} (the preset's)",
    )
    add(
        "--hybrid-model",
        default="paper-7b",
        metavar="M",
        help=f"whose checkpoints the caches but the first two keep: {', '.join(HYBRID_MODELS)} (paper-7b)",
    )
    add("--restart", action="append", default=[], metavar="ENGINE@S", help="of an engine (0 is the first) after S s")


def add_trace(add: Add) -> None:
    add("--format", metavar="F", help="mooncake, chats, token_ids, recording or sessions")
    add("--limit", metavar="N", help="only the first N requests")
    add("--block-tokens", metavar="N", help="tokens behind one hash, or of an engine's block (512, 16)")
    add("--tokenizer", metavar="DIR", help="for chats: a directory with tokenizer and chat template")
    add("--chat-template", metavar="FILE", help="for chats: instead of the tokenizer's own")
    add("--arrivals", type=Path, metavar="FILE", help="CSV of arrivals for a trace that has none")
    add("--arrivals-replace", action="store_true", help="take them also where the trace has its own")


def add_output(add: Add) -> None:
    add("--out", type=Path, metavar="DIR", help="write DIR/results.json and DIR/report.html")
    add("--per-request", type=Path, metavar="FILE", help="write a line of JSON for each request")
    add("--no-regret", action="store_true", help="do not compare each request with the best engine")


GROUPS = {"what is run": add_run, "engines": add_engines, "the trace": add_trace, "output": add_output}
