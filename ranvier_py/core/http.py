"""HTTP as values: what the two data-plane edges and the pipeline pass to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

Headers = list[tuple[bytes, bytes]]
"""Field lines as they arrived: original spelling, original order, duplicates kept."""

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""RFC 9110 7.6.1: fields of one connection, never passed on. Fields that `Connection` names join them."""


class Phase(Enum):
    """What a client connection waits for; decides what a missed deadline means."""

    IDLE = "idle"  # no byte of the next request yet: close silently
    HEADER = "header"  # 408
    BODY = "body"  # 408
    FIRST_BYTE = "first_byte"  # the backend has not begun to answer: 504
    STALL = "stall"  # the backend stopped in mid-answer: cut
    SEND = "send"  # the client does not read: cut
    WORK = "work"  # ours; no deadline


@dataclass(slots=True)
class HttpRequest:
    """One complete request, as parsed. `target` is origin-form, `body` has no transfer coding left."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes = b""
    http_minor: int = 1
    keep_alive: bool = True

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]

    def header(self, name: bytes) -> bytes | None:
        """Value of the first field line with this lower-case name."""
        for key, value in self.headers:
            if len(key) == len(name) and key.lower() == name:
                return value
        return None


@dataclass(slots=True)
class HttpResponseHead:
    """Status line and fields of a backend's answer; its body follows as raw bytes in the backend's own framing.

    `framing` is how the body ends: "length", "chunked", "close" (until the connection ends) or "none".
    """

    status: int
    reason: bytes
    headers: Headers = field(default_factory=list)
    framing: str = "none"
