"""`ranvier keys`: makes a key of a client or of the control port, lists a file of keys, or checks one."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from math import isinf
from pathlib import Path

from ranvier_py.commands.exit_codes import EXIT_CONFIG, EXIT_OK, CommandError
from ranvier_py.config.key_files import read_key_file
from ranvier_py.core.access.identity import AccessKey
from ranvier_py.core.access.key_table import KeyTable, digest_of
from ranvier_py.core.access.keys_file import ROLES, KeyTables
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.findings import counted

KEY_BYTES = 32  # twice of what nobody can guess
PREFIX = "rk-"  # so that people, and scanners of what is published, recognise one


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ranvier keys make ID [--tenant NAME] [--models GLOB ...] [--expires TIME] | list FILE | check FILE"
    parser.add_argument("action", choices=("make", "list", "check"), help="what to do")
    parser.add_argument("what", metavar="ID | FILE", help="id of the new key; file of keys")
    parser.add_argument("--tenant", help="whose key it is; its own without")
    parser.add_argument("--models", nargs="+", metavar="GLOB", help="models that it may use; all without")
    parser.add_argument("--expires", metavar="TIME", help="when it ends, such as 2027-01-31T12:00:00Z")
    parser.add_argument("--role", choices=ROLES, help="make a key of the control port, with this role")
    parser.add_argument("--control", action="store_true", help="the file has keys of the control port")


def run(options: argparse.Namespace) -> int:
    if options.action == "make":
        print_new_key(options)
        return EXIT_OK
    table = read_key_file(Path(options.what), "control_keys_file" if options.control else "keys_file")
    if options.action == "list":
        print("\n".join(lines_of(table)))
    else:
        print(f"good: {counted(len(table), 'key')}, {counted(len(table.tenants), 'tenant')}")
    return EXIT_OK


def print_new_key(options: argparse.Namespace) -> None:
    """Print the lines of the file to stdout, and the key to stderr, so that `>> FILE` leaves the key on the screen.
    Raises ConfigError."""
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    members = {"id": options.what, "sha256": digest_of(key.encode()).hex()}
    given = ((name, getattr(options, name)) for name in ("tenant", "models", "expires", "role"))
    members |= {name: value for name, value in given if value is not None}
    tables = KeyTables("control_keys_file" if options.role else "keys_file", lambda _: "ranvier keys make")
    tables.take({"key": [members]})
    if tables.problems:
        raise ConfigError(tables.problems)
    (made,) = tables.table().identities(0, 1)
    if made.key is not None and made.key.expires <= time.time():
        raise CommandError("--expires: that time is over, so the key would never be valid", EXIT_CONFIG)
    print(
        "\n[[key]]", *[f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in members.items()], sep="\n"
    )
    sys.stdout.flush()
    print(key, file=sys.stderr)


def lines_of(table: KeyTable) -> Iterator[str]:
    now = time.time()
    for each in table.identities(0, len(table)):
        key = each.key
        assert key is not None
        words = [key.id, key.role or key.tenant, key.refusal(now) or "valid", validity_of(key), *key.models]
        yield "  ".join([word for word in words if word])


def validity_of(key: AccessKey) -> str:
    bounds = [(word, at) for word, at in (("from", key.not_before), ("until", key.expires)) if not isinf(at)]
    return " ".join([f"{word} {datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}" for word, at in bounds])
