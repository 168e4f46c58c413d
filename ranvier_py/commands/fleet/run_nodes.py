"""`ranvier node`: the nodes of a cluster as one of them knows them, and whether a node should get clients."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from ranvier_py.commands.control_client import add_control_flags, asked, control_client, of_a_node
from ranvier_py.commands.exit_codes import EXIT_FAILED, EXIT_OK
from ranvier_py.commands.fleet.run_backend import aligned, places_of, reached_of

HEADS = ("node", "address", "public", "state", "release")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ranvier node [list | drain | undrain] [--control URL]"
    parser.add_argument(
        "action", nargs="?", choices=("list", "drain", "undrain"), default="list", help="what to do; drain: be unready"
    )
    add_control_flags(parser)


def run(options: argparse.Namespace) -> int:
    with control_client(options) as client, of_a_node(client):
        if options.action == "list":
            ready = asked(client, "GET", "/readyz", also=503).json()
            cluster = asked(client, "GET", "/admin/cluster", also=404)
            known = cluster.json() if cluster.status_code == 200 else None
            print("\n".join(lines_of(known, ready["reason"])))
            return EXIT_OK
        body = {"draining": options.action == "drain"}
        answer = asked(client, "POST", "/admin/node/drain", json=body).json()
        print("\n".join(["unready" if answer["draining"] else "gets clients again", *reached_of(answer)]))
    return EXIT_FAILED if any(place["why"] for place in places_of(answer)) else EXIT_OK


def lines_of(cluster: Mapping[str, Any] | None, unready: str) -> Iterator[str]:
    if cluster is not None:
        names = ("name", "address", "public", "state", "release")
        yield from aligned([HEADS, *[[each[name] or "" for name in names] for each in members(cluster)]])
    else:
        yield "this node is alone: it does not gossip"
    yield f"the node that was asked is not ready: {unready}" if unready else "the node that was asked is ready"


def members(cluster: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the node that was asked, and those that it knows."""
    yield {**cluster, "public": "(asked)"}
    yield from cluster["members"]
