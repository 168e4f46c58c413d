"""`ranvier clients`: what clients do to their own prefixes, as a node sees it."""

from __future__ import annotations

import argparse

from ranvier_py.commands.control_client import add_control_flags, asked, control_client, of_a_node
from ranvier_py.commands.exit_codes import EXIT_OK
from ranvier_py.replay.lint_page import page, trial_page


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_control_flags(parser)


def run(options: argparse.Namespace) -> int:
    with control_client(options) as client, of_a_node(client):
        view = asked(client, "GET", "/admin/clients").json()
        print("\n".join([*page(view["clients"]), *trial_page(view["trials"])]))
    return EXIT_OK
