"""What passed between nodes: every datagram and every frame of a stream, kept so that a test can look for secrets.

The relay tells a `Recorder` each packet as it passes. Packets are sealed, so a test that only looks at them proves that
the seal works; one that also looks inside gives `search` an `opener`, which turns a packet into what it holds.

Bounds: `bytes_max` in all; what comes later is counted, not kept, and `complete` is False from then on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

BYTES_MAX = 64 * 1024 * 1024
"""An hour of a small cluster's gossip."""

FRAME_BYTES_MAX = 1024 * 1024
"""A length above this is no frame of ours; the rest of that stream is kept as it comes."""

FRAME_HEAD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet from node to node, by number. `plane` is udp or tcp."""

    sender: int
    receiver: int
    plane: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Finding:
    """A needle, where it was, and whether inside the seal."""

    needle: bytes
    packet: Packet
    opened: bool


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
    """Keeps packets. One for a whole run."""

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

    def search(self, needles: Sequence[bytes], opener: Callable[[bytes], bytes | None] | None = None) -> list[Finding]:
        """Every needle in every packet, as it passed and, with an opener, as it was before the seal."""
        found: list[Finding] = []
        for packet in self.packets:
            inside = opener(packet.data) if opener is not None else None
            for needle in needles:
                if needle in packet.data:
                    found.append(Finding(needle, packet, opened=False))
                if inside is not None and needle in inside:
                    found.append(Finding(needle, packet, opened=True))
        return found


def text_needles(texts: Iterable[str], length_bytes: int = 12) -> list[bytes]:
    """Pieces of what was said that a packet could hold: each text cut into pieces of that many bytes.

    Twelve bytes never stand in random bytes by chance, and are short enough to be found in whatever is cut.
    """
    pieces: dict[bytes, None] = {}
    for text in texts:
        data = text.encode()
        for start in range(0, max(1, len(data) - length_bytes + 1), length_bytes):
            pieces[data[start : start + length_bytes]] = None
    return [piece for piece in pieces if len(piece) == length_bytes]


def token_needles(tokens: Sequence[int], run: int = 5) -> list[bytes]:
    """How runs of token ids could be written: fixed 2, 4 and 8 bytes either way round, msgpack, and digits.

    Two of 2^16 ids meet by chance now and then; a run of five never does.
    """
    needles: dict[bytes, None] = {}
    for start in range(0, len(tokens) - run + 1, run):
        chosen = tokens[start : start + run]
        for code in ("<%dH", ">%dH", "<%dI", ">%dI", "<%dQ", ">%dQ"):
            try:
                needles[struct.pack(code % run, *chosen)] = None
            except struct.error:  # an id too large for two bytes
                continue
        needles[b"".join(msgpack_integer(token) for token in chosen)] = None
        needles[", ".join(map(str, chosen)).encode()] = None
        needles[",".join(map(str, chosen)).encode()] = None
    return list(needles)


def msgpack_integer(value: int) -> bytes:
    if value < 0x80:
        return bytes([value])
    if value < 0x100:
        return b"\xcc" + value.to_bytes(1, "big")
    if value < 0x10000:
        return b"\xcd" + value.to_bytes(2, "big")
    return b"\xce" + value.to_bytes(4, "big")
