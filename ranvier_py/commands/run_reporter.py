"""`ranvier reporter`: reports what an engine holds to routers, by its KV events."""

from __future__ import annotations

import argparse

from ranvier_py.commands.bearer_keys import bearer_key
from ranvier_py.reporter import KEY_VARIABLE, add_flags

__all__ = ["add_flags", "run"]


def run(options: argparse.Namespace) -> int:
    from ranvier_py.reporter.reporter_command import report

    return report(options, bearer_key(KEY_VARIABLE, options.key_file))
