"""Records every datagram and every stream's frame between nodes, so that a test can look for secrets in them.

Bound: `bytes_max` in all; later packets are counted, not kept, and `complete` is False from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BYTES_MAX = 64 * 1024 * 1024
"""An hour of a small cluster's gossip."""

FRAME_BYTES_MAX = 1024 * 1024
"""A greater length is not of a frame of ours; the rest of that stream is kept as it comes."""

FRAME_HEAD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet from node to node, by number. `plane` is udp or tcp."""

    sender: int
    receiver: int
    plane: str
    data: bytes


class Deframer:
    """Cuts one direction of a stream into its frames (u32 little-endian length, then the packet)."""

    def __init__(self) -> None:
        self.rest = bytearray()
        self.lost = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        self.rest += data
        while len(self.rest) >= FRAME_HEAD_BYTES and not self.lost:
            length = int.from_bytes(self.rest[:FRAME_HEAD_BYTES], "little")
            if length > FRAME_BYTES_MAX:
                self.lost = True
            elif len(self.rest) < FRAME_HEAD_BYTES + length:
                return
            else:
                yield bytes(self.rest[FRAME_HEAD_BYTES : FRAME_HEAD_BYTES + length])
                del self.rest[: FRAME_HEAD_BYTES + length]
        if self.lost and self.rest:
            yield bytes(self.rest)
            self.rest.clear()


class Recorder:
    """Keeps the packets of a whole run."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.packets: list[Packet] = []
        self.bytes_max = bytes_max
        self.bytes_kept = 0
        self.packets_dropped = 0

    @property
    def complete(self) -> bool:
        return not self.packets_dropped

    def note(self, sender: int, receiver: int, plane: str, data: bytes) -> None:
        if self.bytes_kept + len(data) > self.bytes_max:
            self.packets_dropped += 1
            return
        self.bytes_kept += len(data)
        self.packets.append(Packet(sender, receiver, plane, data))
