"""`ranvier check`, and `ranvier config --check --live`: a configuration, and all that it needs of the world."""

from __future__ import annotations

import argparse

from ranvier_py.commands.config_flags import add_config_flags
from ranvier_py.commands.live_report import report


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ranvier check [--json] [--config FILE] [--KEY VALUE ...]"
    parser.description = (
        "Checks a configuration, its files, and all that it needs: names, ports, engines with this key, model and "
        "tokenizer, peers with this cluster key, clocks, certificates, descriptors. Exit code 1 if anything is "
        "degraded or down, 2 if the configuration is wrong."
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_config_flags(parser)


def run(options: argparse.Namespace) -> int:
    return report(options, as_json=options.json)
