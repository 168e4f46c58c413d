"""The flags of `ranvier replay`. All values stay text here: `replay_request` reads them, and says in one line
what is wrong.

Light on purpose: the command line imports this before it knows which command is wanted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ranvier_py.core.routing.placement.policies import POLICIES
from ranvier_py.replay.engine.presets import PRESETS

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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of the command, none of them required but a trace."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="a file; its first line says its format")
    add_run_flags(parser.add_argument_group("what is run"))
    add_engine_flags(parser.add_argument_group("engines"))
    add_trace_flags(parser.add_argument_group("the trace"))
    add_output_flags(parser.add_argument_group("output"))


def add_run_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--policy",
        metavar="A,B",
        help=f"of {', '.join(POLICIES)}, and of the bounds oracle_greedy and oracle_ttft; or all (ttft, affinity, "
        "least_loaded, round_robin and the bounds)",
    )
    group.add_argument("--policy-option", action="append", default=[], metavar="NAME=VALUE", help="for all policies")
    group.add_argument("--nodes", default="1", metavar="1,4", help="nodes that requests enter at random (1)")
    group.add_argument("--speed", default="1", metavar="X", help="divides the gaps between arrivals (1)")
    group.add_argument("--sweep", metavar="rate=0.5,1,2", help="several speeds, for curves up to saturation")
    group.add_argument("--seed", default="1", metavar="N", help="of everything that is drawn (1)")
    group.add_argument(
        "--gossip-delay", metavar="S", help="nodes know of each other after S seconds, instead of by the real gossip"
    )
    group.add_argument(
        "--knowledge",
        default="calibrated",
        metavar="K",
        help="of the engines' caches: estimated (requests alone), calibrated (and the counts in answers, the default) "
        "or events (the engines publish them)",
    )
    group.add_argument("--jobs", metavar="N", help="runs at a time, each in a process (as many as there are cores)")


def add_engine_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--engines", default="8", metavar="N", help="engines (8)")
    group.add_argument(
        "--preset", default="lab", metavar="A,B", help=f"of several, engines take turns: {', '.join(PRESETS)} (lab)"
    )
    group.add_argument("--cache-tokens", metavar="N", help="cache of each engine: 200k, 1M (the preset's)")
    group.add_argument(
        "--restart",
        action="append",
        default=[],
        metavar="ENGINE@S",
        help="a new process of engine ENGINE (0 is the first), S seconds after the first request",
    )


def add_trace_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--format", metavar="F", help="mooncake, chats, token_ids or recording")
    group.add_argument("--limit", metavar="N", help="only the first N requests")
    group.add_argument("--block-tokens", metavar="N", help="tokens behind one hash, or of an engine's block (512, 16)")
    group.add_argument("--tokenizer", metavar="DIR", help="for chats: a directory with tokenizer and chat template")
    group.add_argument("--chat-template", metavar="FILE", help="for chats: instead of the tokenizer's own")
    group.add_argument("--arrivals", type=Path, metavar="FILE", help="CSV of arrivals for a trace that has none")
    group.add_argument("--arrivals-replace", action="store_true", help="take them also where the trace has its own")


def add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", type=Path, metavar="DIR", help="write DIR/results.json and DIR/report.html")
    group.add_argument("--per-request", type=Path, metavar="FILE", help="write a line of JSON for each request")
    group.add_argument("--no-regret", action="store_true", help="do not compare each request with the best engine")
