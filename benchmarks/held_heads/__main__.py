"""What does it add to the time of a stream's first event that its head is held until then?

    python -m benchmarks.held_heads [--rounds 150] [--turns 60] [--dry]

The node of `request_cost`, in lockstep with this process, its client and its engine. By turns the engine sends the head
alone, pauses, and sends the first event, or pauses and sends both together, so that nothing is held. Measured is the
time from sending the event until the client has it. p50 and p99 are those of the quietest round: in others p99 is that
of other work of the machine. Goal: at most 20 µs more.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import Any

from benchmarks.harness.bench import ROOT, command_line, finish, percentiles, show_row
from benchmarks.harness.stub_engine import EVENT, STREAM_END, STREAM_HEAD, chat_request, chunk
from benchmarks.request_cost.__main__ import NODE, Case, Peer

PAUSE_S = 0.001  # the node waits by then
WARM_UP_TURNS = 200


def turn(peer: Peer, *, early: bool) -> float:
    """Return the microseconds that the first event took."""
    peer.client.sendall(chat_request(next(peer.bodies)))
    engine, event = peer.request(), chunk(EVENT)
    if early:
        engine.sendall(STREAM_HEAD)
    time.sleep(PAUSE_S)
    began = time.perf_counter()
    engine.sendall(event if early else STREAM_HEAD + event)
    until(peer.client, event)
    took = time.perf_counter() - began
    engine.sendall(STREAM_END)
    until(peer.client, STREAM_END)
    return 1e6 * took


def until(sock: socket.socket, end: bytes) -> None:
    data = b""
    while not data.endswith(end):
        data += (more := sock.recv(1 << 18))
        assert more, f"closed after {data!r}"


def measured(rounds: int, turns: int) -> dict[str, Any]:
    peer = Peer(Case(fields='"stream":true,'))
    command = [sys.executable, "-m", "benchmarks.request_cost", NODE, peer.urls, "{}"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        peer.connected(int(node.stdout.readline()))
        for number in range(WARM_UP_TURNS):
            turn(peer, early=bool(number % 2))
        found = [round_of(peer, turns) for _ in range(rounds)]
        node.kill()
        peer.close()
    least = {kind: {name: min(each[kind][name] for each in found) for name in ("p50", "p99")} for kind in found[0]}
    more = {name: round(least["held"][name] - least["together"][name], 1) for name in ("p50", "p99")}
    return {"unit": "µs", **least, "more": more}


def round_of(peer: Peer, turns: int) -> dict[str, dict[str, float]]:
    took: dict[bool, list[float]] = {True: [], False: []}
    for number in range(turns):
        early = bool(number % 2)
        took[early].append(turn(peer, early=early))
    return {"held": percentiles(took[True], 1), "together": percentiles(took[False], 1)}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--turns", type=int, default=60, help="of a round")
    options = parser.parse_args()
    found = measured(options.rounds, options.turns)
    show_row(found)
    return finish("held_heads", options, found)


if __name__ == "__main__":
    sys.exit(main())
