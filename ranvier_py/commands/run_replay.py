"""`ranvier replay`: what each policy would have done with recorded traffic."""

from __future__ import annotations

import argparse

from ranvier_py.replay.replay_flags import add_flags

__all__ = ["add_flags", "run"]


def run(options: argparse.Namespace) -> int:
    from ranvier_py.replay.replay_command import replay

    return replay(options)
