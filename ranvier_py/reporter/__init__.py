"""Reports to routers what one engine's cache holds: beside the engine (`ranvier reporter`), or as a hook inside it.

    from ranvier_py.reporter.hook import EvictionReporter

The flags of `ranvier reporter` are here, apart from the command, so that only the command imports its sockets.
"""

from __future__ import annotations

import argparse
from pathlib import Path

KEY_VARIABLE = "RANVIER_REPORTER_KEY"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--worker-id", default="", metavar="NAME", help="the engine as the routers know it: name or URL of a backend")
    add("--router", action="append", default=[], metavar="URL", help="control port of a router; may be repeated")
    add(
        "--key-file",
        type=Path,
        metavar="FILE",
        help=f"bearer key for them; ${KEY_VARIABLE} holds one, or ${KEY_VARIABLE}_FILE names its file",
    )
    add("--engine", default="", metavar="URL", help="HTTP of the engine, to ask where it publishes its KV events")
    add("--events", default="", metavar="tcp://HOST:PORT", help="where it publishes them, instead of asking")
    add(
        "--replay",
        default="",
        metavar="tcp://HOST:PORT",
        help="where it replays KV events that were missed, with --events",
    )
    add(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="data-parallel ranks that publish, with --events: rank r at port + r",
    )
    add("--model", default="", metavar="NAME", help="its base model as clients name it, where it serves several")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="(%(default)s)")
    add("--make-key", default="", metavar="WORKER", help="print a key for this worker, made of the given one, and end")
