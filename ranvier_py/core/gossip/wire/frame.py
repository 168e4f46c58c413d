"""The packet as it lies on the wire, and the one error for whatever is not one.

    header      2 magic "RG" | 1 protocol major | 1 key id | 8 session | 1 plane | 8 counter
    ciphertext  8 receiver's session (0 = whoever is there) | 1 message kind | body | 16 tag

Numbers are little-endian. The header is in clear and authenticated together with the cluster's label. `seal` makes and
opens packets, `wire` the bodies in them; both raise BadFrame and nothing else, whatever bytes they get.
"""

from __future__ import annotations

from enum import StrEnum
from struct import Struct

MAGIC = b"RG"
PROTOCOL_MAJOR = 1
"""Two majors do not understand each other. Everything smaller is settled per pair by the versions in the records."""

HEADER = Struct("<2sBBQBQ")
INNER = Struct("<QB")
TAG_BYTES = 16
OVERHEAD_BYTES = HEADER.size + INNER.size + TAG_BYTES
"""What a packet is longer than its body: 46."""


class Reason(StrEnum):
    """Why bytes were refused; the label of a counter."""

    SHORT = "short"
    MAGIC = "magic"
    VERSION = "version"
    PLANE = "plane"
    SIZE = "size"
    KEY = "key"
    TAG = "tag"
    KIND = "kind"
    BODY = "body"


class BadFrame(ValueError):
    """These bytes are no packet or no message of ours. They are dropped and counted under `reason`."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason


class UnknownKind(BadFrame):
    """A message of a kind that this version has not: its sender is newer. Skip it; the sender is alive all the same."""

    def __init__(self, kind: int) -> None:
        super().__init__(Reason.KIND, str(kind))
        self.message_kind = kind
