"""`ranvier version`."""

from __future__ import annotations

import argparse

from ranvier_py import __version__
from ranvier_py.commands.exit_codes import EXIT_OK


def add_flags(_: argparse.ArgumentParser) -> None:
    """It has none."""


def run(_: argparse.Namespace) -> int:
    print(__version__)
    return EXIT_OK
