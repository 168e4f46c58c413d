"""`ranvier status`: what is wrong with a node and its cluster, its engines and peers; once, or a screen with keys."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

from ranvier_py.commands.control_client import add_control_flags, asked, control_client, of_a_node
from ranvier_py.commands.exit_codes import EXIT_OK, EXIT_STATUS_UNKNOWN, CommandError
from ranvier_py.commands.keyboard import keyboard
from ranvier_py.control.status_page import NodeStatus, divergence, status_page
from ranvier_py.control.status_screen import SORTS, Looked, engines_of, page, pressed, screen, whole_engine

INTERVAL_MIN_S, INTERVAL_MAX_S = 0.1, 86_400.0
"""Seconds between two pages of a watched status: not too many requests for the node, and no wait beyond a day."""

CODES = {"well": EXIT_OK, "notice": EXIT_OK, "degraded": 1, "down": 2}
EXIT_CODES = f"""exit codes:
  0  nothing is wrong, or nothing that takes requests or hits
  1  degraded: some requests or hits are lost
  2  down: no request is served
  {EXIT_STATUS_UNKNOWN}  the node can't be reached, refuses the key, or the command line is wrong"""

WIDTH = 80  # of what is written to a file or a pipe


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXIT_CODES
    parser.add_argument("--all", action="store_true", help="also every table and counter that the node shows")
    parser.add_argument("--json", action="store_true", help="the answer of GET /admin/status")
    parser.add_argument("--engine", metavar="NAME", help="one engine in full")
    parser.add_argument("--sort", choices=SORTS, default="trouble", help="order of the engines (trouble)")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only engines with TEXT in name, state or model")
    parser.add_argument("--watch", action="store_true", help="again and again, until q or Ctrl-C; ? lists the keys")
    parser.add_argument("--interval-s", type=float, default=2.0, metavar="S", help="time between two pages (2)")
    parser.add_argument(
        "--against", metavar="URL", help="control port of another node, to compare route tables (on no screen)"
    )
    add_control_flags(parser)


def run(options: argparse.Namespace) -> int:
    with control_client(options) as client, control_client(options, options.against) as other:
        if options.watch:
            return watch(options, client, other if options.against else None)
        with of_a_node(client):
            status = asked(client, "GET", "/admin/status").json()
            print("\n".join(written(options, status, client, other if options.against else None)), flush=True)
            return CODES[status["severity"]]


def written(
    options: argparse.Namespace, status: dict[str, Any], client: httpx.Client, other: httpx.Client | None
) -> Iterator[str]:
    """Yield the lines that the options ask for. Raises CommandError."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    if options.json:
        yield json.dumps(status, indent=2)
        return
    if options.engine is not None:
        found = [each for each in status["engines"] if options.engine in (each["name"], each["url"])]
        if not found:
            raise CommandError(f"there is no engine {options.engine!r}", EXIT_STATUS_UNKNOWN)
        yield from whole_engine(found[0], status["findings"], width)
        return
    shown = {**status, "engines": engines_of(status, Looked(sort=options.sort, wanted=options.filter))}
    yield from page(shown, str(client.base_url), width)
    if other is not None and not options.all:
        sums = [asked(each, "GET", "/admin/cluster/sums").content for each in (client, other)]
        yield f"route tables: {divergence(*sums)}"
    if options.all:
        yield ""
        yield status_page(node_status(client, other)).rstrip()


def watch(options: argparse.Namespace, client: httpx.Client, other: httpx.Client | None) -> int:
    """Show the status again and again: on a screen with keys if there is a terminal, else page after page."""
    looked, status = Looked(sort=options.sort, wanted=options.filter), None
    wait_s = min(max(INTERVAL_MIN_S, options.interval_s), INTERVAL_MAX_S)
    with keyboard() as keys:
        while not looked.over:
            trouble = ""
            try:
                with of_a_node(client):
                    status = asked(client, "GET", "/admin/status").json()
            except CommandError as error:
                if status is None:
                    raise
                trouble = str(error)  # it may be restarting: go on watching
            until = time.monotonic() + wait_s
            if keys is None:
                print("\n".join([trouble] if trouble else written(options, status, client, other)), flush=True)
                time.sleep(wait_s)
                continue
            while not looked.over and (left_s := until - time.monotonic()) > 0:
                draw(status, str(client.base_url), looked, trouble)
                for key in keys.wait(left_s):
                    pressed(looked, key)
    return EXIT_OK if status is None else CODES[status["severity"]]


def draw(status: dict[str, Any], address: str, looked: Looked, trouble: str) -> None:
    """Write one screen over the one before."""
    width, rows = shutil.get_terminal_size((WIDTH, 24))
    lines = screen(status, address, looked, width, rows)
    if trouble:
        lines[0] = f"{trouble} (as of before)"[:width]
    sys.stdout.write("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[J")
    sys.stdout.flush()


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
