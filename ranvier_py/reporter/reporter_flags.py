"""Flags of `ranvier reporter`. Apart from the command, whose arrays and threads nobody else needs."""

from __future__ import annotations

import argparse
from pathlib import Path

KEY_VARIABLE = "RANVIER_REPORTER_KEY"
FINGERPRINT, PREFIX_HASH = "fingerprint", "prefix_hash"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--worker-id", default="", metavar="NAME", help="the engine as the routers know it: name or URL of a backend")
    add("--router", action="append", default=[], metavar="URL", help="control port of a router; may be repeated")
    add("--key-file", type=Path, metavar="FILE", help=f"bearer key for them; ${KEY_VARIABLE} holds one too")
    add("--engine", default="", metavar="URL", help="HTTP of the engine, to ask for its events and its model")
    add("--events", default="", metavar="tcp://HOST:PORT", help="where it publishes KV events, instead of asking")
    add("--replay", default="", metavar="tcp://HOST:PORT", help="... and where it tells missed ones again")
    add("--ranks", type=int, default=1, metavar="N", help="... of so many data-parallel ranks, rank r at port + r")
    add("--model", default="", metavar="NAME", help="its base model as clients name it, instead of asking")
    add(
        "--hashes",
        default=FINGERPRINT,
        choices=[FINGERPRINT, PREFIX_HASH],
        help="what to tell: the routers' fingerprints, or prefix hashes as in the Purdue report (%(default)s)",
    )
    add("--prefix-tokens", type=int, default=64, metavar="N", help="tokens of a prefix hash (%(default)s)")
    add("--plain", action="store_true", help="prefix hashes in the report's own form: all of them every 5 s")
    add("--cluster-secret-file", type=Path, metavar="FILE", help="makes fingerprints where routers withhold the key")
    add("--sync-s", type=float, default=5.0, metavar="S", help="time between two comparisons (%(default)s)")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="(%(default)s)")
    add("--make-key", default="", metavar="WORKER", help="print a key for this worker, made of the given one, and end")
