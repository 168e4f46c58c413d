"""How much of a connection lies in libzmq: what the kernel received of it, less what was handed over here.

libzmq bounds how many messages wait and how long a part may be, but not how many parts a message has: it would hold one
without an end for ever. The kernel counts what came (TCP_INFO, on Linux), so its owner can end such a connection.

Rules: without these figures nothing is bounded here and nothing fails. A publisher that sends what we did not subscribe
to seems to lag, and loses its connection after `bytes_max` of that. Cost: 2 us for a look.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Self

RECEIVED = struct.Struct("=Q")
RECEIVED_AT = 128  # of tcpi_bytes_received in Linux's struct tcp_info, since 4.1

SHORT_MAX = 255  # bytes of a part whose length is one byte
SHORT_HEAD, LONG_HEAD = 2, 9  # bytes before a part, in ZMTP 3


class Backlog:
    """Of one connection. Close it with its socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._taken = 0

    @classmethod
    def of(cls, descriptor: int, port: int) -> Self | None:
        """Of the connection that libzmq has under this descriptor, to this port; None where that can't be had."""
        if not hasattr(socket, "TCP_INFO"):
            return None
        try:
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            return None
        found = cls(connection)
        try:
            if connection.getpeername()[1] == port and found._received() is not None:
                return found
        except OSError:
            pass  # it is gone already, and the descriptor is another's
        found.close()
        return None

    def take(self, part_bytes: int) -> None:
        """A part was handed over."""
        self._taken += part_bytes + (SHORT_HEAD if part_bytes <= SHORT_MAX else LONG_HEAD)

    @property
    def size_bytes(self) -> int:
        """As of now; 0 when it can't be found out any more."""
        received = self._received()
        return 0 if received is None else max(0, received - self._taken)

    def close(self) -> None:
        self._connection.close()

    def _received(self) -> int | None:
        try:
            told = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED_AT + RECEIVED.size)
            return int(RECEIVED.unpack_from(told, RECEIVED_AT)[0])
        except (OSError, struct.error):
            return None
