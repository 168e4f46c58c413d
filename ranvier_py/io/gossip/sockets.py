"""What the gossip port takes from the system: sockets, and the waits for them. A test brings a network with a seed.

Rule: the shell opens sockets and waits for them through this, so that whoever gives it its `GossipSockets` says what
they are of. Nothing else of the system is used there but trio's clock.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from trio.lowlevel import wait_readable, wait_writable

from ranvier_py.proxy.transport import PlainTransport


class System(NamedTuple):
    """The real one, as it stands."""

    socket: Callable[[int, int], socket.socket] = socket.socket  # of this family and this kind
    transport: Callable[[socket.socket], PlainTransport] = PlainTransport
    wait_readable: Callable[[socket.socket], Awaitable[None]] = wait_readable
    wait_writable: Callable[[socket.socket], Awaitable[None]] = wait_writable


SYSTEM = System()
