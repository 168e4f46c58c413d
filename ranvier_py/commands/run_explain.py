"""`ranvier explain`: where a node would send a request, and why."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from ranvier_py.commands.control_client import add_control_flags, asked, control_client, of_a_node
from ranvier_py.commands.exit_codes import EXIT_CONFIG, EXIT_OK, CommandError
from ranvier_py.control.explain_page import explain_page

HEADER = re.compile(r"\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*:\s*([^\r\n\0]*)")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, help="the body, instead of stdin")
    parser.add_argument("--json", action="store_true", help="the node's answer as it is, with all numbers")
    meaning = "a field of the request, where tenants are kept apart (a credential as x-api-key)"
    parser.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help=meaning)
    add_control_flags(parser)


def run(options: argparse.Namespace) -> int:
    fields = []
    for line in options.header:
        if (found := HEADER.fullmatch(line)) is None:
            raise CommandError("--header takes NAME:VALUE", EXIT_CONFIG)  # the argument may be a key
        fields.append((found[1].encode(), os.fsencode(found[2].rstrip())))
    try:
        body = options.file.read_bytes() if options.file else sys.stdin.buffer.read()
    except OSError as error:
        raise CommandError(f"{options.file or 'stdin'} can't be read: {error.strerror}", EXIT_CONFIG) from error
    with control_client(options) as client, of_a_node(client):
        answer = asked(client, "POST", "/explain", content=body, headers=fields)
        print(answer.text if options.json else "\n".join(explain_page(answer.json())))
    return EXIT_OK
