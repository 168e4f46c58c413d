"""Reads the recorded events of engines: see captures/README.md."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgpack

FOLDER = Path(__file__).parent / "captures"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jsonl"))


class Capture(NamedTuple):
    """Frames as they came from each socket."""

    events: list[list[bytes]]
    replay: list[list[bytes]]
    load: list[list[bytes]]

    @property
    def payloads(self) -> list[bytes]:
        return [frames[2] for frames in self.events]


def capture(name: str) -> Capture:
    found = Capture([], [], [])
    for line in (FOLDER / f"{name}.jsonl").read_text().splitlines():
        reported = json.loads(line)
        getattr(found, reported["from"]).append([base64.b64decode(frame) for frame in reported["frames"]])
    return found


def block_table(payloads: Sequence[bytes], *media: str) -> dict[int | bytes, int]:
    """How often each block of group 0 is held at these media: counted without any of our code."""
    copies: dict[int | bytes, int] = {}
    for payload in payloads:
        for event in msgpack.unpackb(payload)[1]:
            if isinstance(event, list):
                tag, hashes = event[0], event[1] if len(event) > 1 else []
                at, group = event[6 if tag == "BlockStored" else 2] if len(event) > 2 else "GPU", 0
            else:
                tag, hashes = event["type"], event.get("block_hashes", [])
                at, group = event.get("medium") or "GPU", event.get("group_idx", 0)
            if tag == "AllBlocksCleared":
                copies.clear()
            if at not in media or group:
                continue
            for each in hashes:
                name = each if isinstance(each, bytes) else each % 2**64
                change = {"BlockStored": 1, "BlockRemoved": -1}.get(tag, 0)
                copies[name] = copies.get(name, 0) + change
    return {name: count for name, count in copies.items() if count}
