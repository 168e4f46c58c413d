"""The command line of `ranvier`: COMMANDS lists what it does.

Only the command that is called is imported, with its flags (`ranvier_py.commands`): `--help` and `version` answer at
once, and no node loads the replay.
"""

from __future__ import annotations

import argparse
import errno
import gc
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from ranvier_py import __version__
from ranvier_py.commands.exit_codes import (
    EXIT_CODES,
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STATUS_UNKNOWN,
    PROBLEMS,
    CommandError,
)
from ranvier_py.core.errors import ConfigError

COMMANDS = {
    "serve": "run a node, or several on one port",
    "config": "print every key with its help and default",
    "check": "is all there that a node with this configuration needs: engines, peers, ports, keys, tokenizers",
    "keys": "make a key of a client, or list or check a file of keys",
    "backend": "the engines of a node, or of all: list, add, drain, undrain, weight, set, remove",
    "node": "the nodes that a node knows; drain: be unready, so that no new clients are sent to it",
    "access": "who may use a node, what is left of limits, and keys that are revoked on all nodes",
    "explain": "where would this request go, and why (body on stdin)",
    "status": "what is wrong with a node and its cluster, and what to do; engines and peers",
    "clients": "what clients do to their own prefixes, as a node sees it",
    "replay": "what would each policy have done with this traffic",
    "lint": "what clients do to their own prefixes, in captured requests or live traffic",
    "reporter": "report what an engine holds to routers, by its KV events",
    "version": "print the version",
}
"""What each command does. Its module is `run_NAME` of `ranvier_py.commands`, or the one that MODULES has."""

MODULES = {"backend": "fleet.run_backend", "node": "fleet.run_nodes"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. `argv` has no program name; None: sys.argv."""
    open_standard_streams()
    words = sys.argv[1:] if argv is None else argv
    called = next((word for word in words if not word.startswith("-")), "")
    failed = EXIT_STATUS_UNKNOWN if called == "status" else None  # its other codes are a node's state
    try:
        options, extra = make_parser(called).parse_known_args(words)
    except SystemExit as ended:
        raise SystemExit(failed if failed and ended.code == EXIT_CONFIG else ended.code) from None
    try:
        options.problems = unknown(extra, options.flags()) if extra else []
        if options.problems and not hasattr(options, "config"):
            raise ConfigError(options.problems)
        code = int(options.run(options))
        sys.stdout.flush()  # here, where an error is caught; printing nothing instead would fail on a full disk
        return code
    except ConfigError as error:
        print(
            "\n".join([f"ranvier: {PROBLEMS}", *(f"  {line}" for line in error.problems)]),
            file=sys.stderr,
        )
        return failed or EXIT_CONFIG
    except CommandError as error:
        print(f"ranvier: {error}", file=sys.stderr)
        return failed or error.code
    except KeyboardInterrupt:
        return EXIT_OK
    except BrokenPipeError:  # `ranvier status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"ranvier: the output can't be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of the output can't be written either
        return EXIT_FAILED


def open_standard_streams() -> None:
    """Open missing standard streams as /dev/null: else a socket would get the descriptor, and what is printed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  # for good


class Parser(argparse.ArgumentParser):
    """A parser that names the closest of the words that are possible, where one is not."""

    def error(self, message: str) -> NoReturn:
        if "invalid choice" in message:
            from ranvier_py.commands.unknown_arguments import closest

            message += closest(message)
        super().error(message)


def make_parser(called: str) -> argparse.ArgumentParser:
    """Return the parser. Of the commands, only the one that is `called` has its flags."""
    style: Any = partial(
        Parser,
        allow_abbrev=False,  # --control-key must not mean --control-key-file
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXIT_CODES,
    )
    parser: argparse.ArgumentParser = style(prog="ranvier", description="A cache-aware router for LLM engines.")
    parser.add_argument("--version", action="version", version=f"ranvier {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=style)
    for name, meaning in COMMANDS.items():
        command = commands.add_parser(name, help=meaning)
        if name == called:
            gc.disable()  # modules stay: they would be looked through in vain, again and again, or once at the end
            module = import_module(f"ranvier_py.commands.{MODULES.get(name, f'run_{name}')}")
            module.add_flags(command)
            gc.freeze()
            gc.enable()
            command.set_defaults(run=module.run, flags=partial(flags_of, command))
    return parser


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long flags in the help of a parser."""
    return re.findall(r"--[a-z][a-z-]+", parser.format_help())


def unknown(extra: Sequence[str], flags: Sequence[str]) -> list[str]:
    from ranvier_py.commands.unknown_arguments import unknown_arguments

    return list(unknown_arguments(extra, flags))
