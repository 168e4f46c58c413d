"""Through which files of `ranvier_py` gossip packets and engine events go: a simulated cluster with each call noted.
What a chat's turn takes is recorded by `benchmarks.request_cost`.

A packet's fixed price is what nine of ten packets go through, whatever they are about. Of the others the median run
counts; an event is applied when it comes and becomes routes at a later tick.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import ranvier_py
from benchmarks.harness.bench import RESULTS
from benchmarks.harness.report import TURN_MOST
from cluster.scenario import Cluster, Load, Scenario
from cluster.simulation.sim_node import sim_nodes
from cluster.simulation.sim_run import Run
from ranvier_py.core.engine_cache.event_stream import EventStream
from ranvier_py.core.peer.router_peer import RouterPeer

PACKAGE = f"{Path(ranvier_py.__file__).parent}/"
SECONDS, SEED = 15.0, 3
FILES_MAX = {"every gossip packet": 6, "a route update": 18, "an engine's event": 15}
"""They may only fall: each is at its goal or below."""

Walk = list[tuple[str, str]]
"""File and name of each function that was called."""


@contextmanager
def noted(owner: type, method: str, walks: list[Walk]) -> Iterator[None]:
    """Note what each call of a method calls in turn."""
    original: Callable[..., Any] = getattr(owner, method)

    def call(*args: Any) -> Any:
        walk: Walk = []

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                walk.append((frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname))

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            return original(*args)
        finally:
            sys.setprofile(before)
            walks.append(walk)

    with patch.object(owner, method, call):
        yield


def through(walks: Sequence[Walk], function: str) -> list[Walk]:
    """The walks through this function, the shortest first."""
    return sorted([walk for walk in walks if function in [name for _, name in walk]], key=len)


def median(walks: Sequence[Walk], function: str) -> set[str]:
    """The files of the median walk through this function."""
    found = through(walks, function)
    return {file for file, _ in found[len(found) // 2]}


def walked() -> dict[str, set[str]]:
    """The files of each kind of walk."""
    packets: list[Walk] = []
    events: list[Walk] = []
    run = Run(Scenario("walks", "", SECONDS, Cluster(nodes=3, engines=2, events=True), Load()), SEED, sim_nodes())
    run.steps.plan()
    run.world.clients.start()
    with ExitStack() as noting:
        noting.enter_context(noted(RouterPeer, "receive", packets))
        for method in ("live", "tick"):
            noting.enter_context(noted(EventStream, method, events))
        run.world.time.run(SECONDS)
    taken = through(packets, "Membership.received_from")
    files = Counter(file for walk in taken for file in {file for file, _ in walk})
    fixed = {file for file, count in files.items() if count >= 0.9 * len(taken)}
    event = median(events, "Residency.apply") | median(events, "EngineCaches.changed")
    return dict(zip(FILES_MAX, (fixed, median(packets, "UpdateLogs.extend"), event), strict=True))


def recorded() -> dict[str, int]:
    """What the last record of `benchmarks.request_cost` has of a chat's turn of 3 kB."""
    turn = json.loads((RESULTS / "request_cost.json").read_text())["cases"]["chat_3kB"]
    return {what: len(turn[what]) if what == "files" else turn[what] for what in TURN_MOST}


if __name__ == "__main__":
    for what, count in recorded().items():
        sys.stdout.write(f"{count:6} of {TURN_MOST[what]} {what}  a chat's turn\n")
    for name, files in walked().items():
        sys.stdout.write(f"{len(files):6} of {FILES_MAX[name]} files  {name}\n")
