"""Packets as one version of the protocol sent them: examples of all kinds, and frames of seeded runs of the simulator.

    python -m tests.core.mesh.wire.recorded_frames      writes frames_VERSION.json here, with the code of that version

Record the last commit of a version before the next one is begun; what is recorded is never changed.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cluster.scenario import settled
from cluster.simulation.sim_node import ring_of, sim_nodes
from cluster.simulation.sim_run import Run
from ranvier_py.core.mesh.mesh_values import Plane
from ranvier_py.core.mesh.transfer import Refused, TransferPart, Wanted
from ranvier_py.core.mesh.wire.frame import PROTOCOL_VERSION
from ranvier_py.core.mesh.wire.seal import Sealer
from ranvier_py.core.peer.router_peer import CODEC
from tests.core.mesh.wire.wire_samples import EXAMPLES

FOLDER = Path(__file__).parent
SCENARIOS, SEED = ("kv_late_joiner", "partition_log_trimmed"), 3
LABEL, KEYS = "lab", (1,)  # of the simulator
BYTES_MAX = 700
"""Of a frame: a longer one of a kind is recorded only if there is no other."""


class Frame(NamedTuple):
    """One packet, and the name of the message in it."""

    message: str
    plane: Plane
    packet: bytes


def frames_of(version: int) -> list[Frame]:
    """Return what was recorded of this version."""
    rows = json.loads((FOLDER / f"frames_{version}.json").read_text())
    return [Frame(message, Plane[plane.upper()], b64decode(packet)) for message, plane, packet in rows]


def opener() -> Sealer:
    """Return what opens the recorded packets."""
    return Sealer(1, ring_of(KEYS), LABEL)


def examples() -> Iterator[Frame]:
    sealer = Sealer(2, ring_of(KEYS), LABEL)
    for message in EXAMPLES:
        yield Frame(type(message).__name__, Plane.BULK, sealer.seal(Plane.BULK, 1, *CODEC.encode(message)))


def simulated() -> Iterator[Frame]:
    """Yield of each kind, and each kind of transfer, the longest frame of at most BYTES_MAX; else the shortest."""
    best: dict[tuple[str, int], Frame] = {}
    name_of = {kind.number: kind.make.__name__ for kind in CODEC.kinds}
    reader = opener()

    def tap(_source: Any, _target: Any, plane: Plane, data: bytes) -> None:
        opened = reader.open(data, plane)
        name, message = name_of[opened.kind], CODEC.decode(opened.kind, opened.body)
        known = best.get(key := (name, message.what if isinstance(message, Wanted | TransferPart | Refused) else 0))
        if known is None or rank(data) > rank(known.packet):
            best[key] = Frame(name, plane, data)

    for scenario in SCENARIOS:
        run = Run(settled(scenario, "sim", SEED, 0, None, 0.0), SEED, sim_nodes())
        run.world.net.tap = tap
        run.result()
    yield from best.values()


def rank(packet: bytes) -> int:
    return len(packet) if len(packet) <= BYTES_MAX else -len(packet)


def main() -> None:
    rows = [
        (frame.message, frame.plane.name.lower(), b64encode(frame.packet).decode())
        for frame in (*examples(), *simulated())
    ]
    path = FOLDER / f"frames_{PROTOCOL_VERSION}.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print(f"{path}: {len(rows)} frames, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
