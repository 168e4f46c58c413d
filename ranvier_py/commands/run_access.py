"""`ranvier access`: who may use a node, what is left of limits, and revocations of keys, which all nodes follow."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ranvier_py.commands.control_client import add_control_flags, asked, control_client, of_a_node
from ranvier_py.commands.exit_codes import EXIT_CONFIG, EXIT_OK, CommandError
from ranvier_py.core.findings import counted

HEADS = ("limit", "amount", "used", "reserved", "remaining")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ranvier access [revoke ID [--hours H] | restore ID] [--control URL]"
    parser.add_argument("action", nargs="?", choices=("show", "revoke", "restore"), default="show", help="what to do")
    parser.add_argument("id", nargs="?", metavar="ID", help="id of the key")
    parser.add_argument("--hours", type=float, help="how long a key is revoked (720)")
    add_control_flags(parser)


def run(options: argparse.Namespace) -> int:
    with control_client(options) as client, of_a_node(client):
        if options.action == "show":
            print("\n".join(lines_of(asked(client, "GET", "/admin/access?limit=1000").json())))
            return EXIT_OK
        if options.id is None:
            raise CommandError(f"access {options.action} needs the id of a key", EXIT_CONFIG)
        hours = {"hours": options.hours} if options.action == "revoke" and options.hours is not None else {}
        answer = asked(client, "POST", f"/admin/access/{options.action}", json={"id": options.id, **hours}).json()
        done = f"is refused until {answer['until']}" if answer["until"] else "is restored"
        unknown = "" if answer.get("known", True) else "; the file of this node has no key of that id"
        print(f"{answer['id']} {done}{unknown}")
    return EXIT_OK


def lines_of(access: Mapping[str, Any]) -> Iterator[str]:
    if not access["needs_key"]:
        yield "nobody needs a key: there is no keys_file"
        return
    keys = access["keys"]
    yield f"{access['file']}: {counted(keys['count'], 'key')}, {counted(access['tenants'], 'tenant')}"
    if access["trouble"]:
        yield f"not read, going on with the keys before: {access['trouble']}"
    for kind in ("refused", "claims"):
        if access[kind]:
            yield f"{kind}: {', '.join(f'{name} {count}' for name, count in access[kind].items())}"
    until = {each["id"]: each["until"] for each in access["revoked"]}
    for key in keys["listed"]:
        state = "disabled" if key["disabled"] else f"revoked until {until[key['id']]}" if key["id"] in until else ""
        yield "  ".join([word for word in (key["id"], key["tenant"], *key["models"], state) if word])
    if keys["count"] > len(keys["listed"]):
        yield f"and {keys['count'] - len(keys['listed'])} more: ranvier keys list FILE"
    for scope, shown in access.get("limits", {}).items():
        yield f"\n{scope}" + (
            f", {shown['refused']} refused, last: {shown['last_refusal']}" if shown["refused"] else ""
        )
        yield from lines_of_limits(shown["limits"])
    if vanished := access.get("vanished_nodes"):
        yield f"\nshares of {vanished} vanished nodes are kept"


def lines_of_limits(limits: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table of the limits of one scope."""
    rows = [HEADS, *[(one["limit"], *[f"{one[name]:g}" for name in HEADS[1:]]) for one in limits]]
    for row, mode in zip(rows, ["", *[one["mode"] for one in limits]], strict=True) if limits else ():
        yield f"  {row[0]:<26}" + "".join(f"{value:>14}" for value in row[1:]) + "  (shadow)" * (mode == "shadow")
