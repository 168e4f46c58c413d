"""`ranvier status`: a page of what a node knows and does, once or again and again."""

from __future__ import annotations

import argparse
import sys
import time

import httpx

from ranvier_py.commands.control_client import add_control_flags, asked, control_client, of_a_node
from ranvier_py.commands.exit_codes import EXIT_OK, CommandError
from ranvier_py.control.status_page import NodeStatus, divergence, status_page

INTERVAL_MIN_S, INTERVAL_MAX_S = 0.1, 86_400.0
"""Seconds between two pages of a watched status: not too many requests for the node, and no wait beyond a day."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    parser.add_argument("--interval-s", type=float, default=2.0, metavar="S", help="time between two pages (2)")
    parser.add_argument("--against", metavar="URL", help="control port of another node, to compare the route tables")
    add_control_flags(parser)


def run(options: argparse.Namespace) -> int:
    with control_client(options) as client, control_client(options, options.against) as other:
        reached = False
        while True:
            try:
                with of_a_node(client):
                    page = status_page(node_status(client, other if options.against else None))
                reached = True
            except CommandError as error:
                if not (options.watch and reached):
                    raise
                page = f"{error}\n"  # it may be restarting: go on watching
            print(f"\x1b[H\x1b[2J{page}" if options.watch and sys.stdout.isatty() else page, flush=True)
            if not options.watch:
                return EXIT_OK
            time.sleep(min(max(INTERVAL_MIN_S, options.interval_s), INTERVAL_MAX_S))


def node_status(client: httpx.Client, other: httpx.Client | None) -> NodeStatus:
    ready = asked(client, "GET", "/readyz", also=503)
    cluster = asked(client, "GET", "/admin/cluster", also=404)
    sums = [asked(each, "GET", "/admin/cluster/sums").content for each in (client, other) if each and other]
    return NodeStatus(
        cluster=cluster.json() if cluster.status_code == httpx.codes.OK else None,
        divergence=divergence(*sums) if sums else "",
        engine_caches=asked(client, "GET", "/admin/engine-cache").json(),
        calibration=asked(client, "GET", "/admin/calibration").json(),
        responses=asked(client, "GET", "/admin/response-cache/stats").json(),
        access=asked(client, "GET", "/admin/access", also=404).json(),
        address=str(client.base_url),
        ready=ready.status_code == httpx.codes.OK,
        reason=ready.json().get("reason", ""),
        backends=asked(client, "GET", "/admin/backends").json()["backends"],
        routes=asked(client, "GET", "/admin/routes").json(),
    )
