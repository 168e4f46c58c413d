"""Connects to a host; the connections to a name with several addresses are spread over these.

Resolvers give addresses mostly in the same order, and the first that answers would get every connection. So each
connection begins with the next address; one that does not answer within STAGGER_S is joined by the next (RFC 8305).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import trio

from ranvier_py.core.addresses import is_address

STAGGER_S = 0.25  # RFC 8305 5 recommends it
ADDRESSES_MAX = 16  # to try for one connection: at STAGGER_S each, they are within the time limit of one


async def connect(host: str, port: int, turn: int) -> trio.SocketStream:
    """Return a connection to the host; `turn` chooses the first address. Raises OSError. The time limit is the
    caller's."""
    if is_address(host):
        return await trio.open_tcp_stream(host, port)
    infos = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = in_turn(infos, turn)
    if len(addresses) == 1:
        return await trio.open_tcp_stream(addresses[0], port)
    return await connect_to_first(addresses[:ADDRESSES_MAX], port)


def in_turn(infos: Sequence[Any], turn: int) -> list[str]:
    """Return the addresses in the order to try: the families alternate, each in its order from number `turn` on."""
    families: dict[int, dict[str, None]] = {}
    for family, *_, address in infos:
        families.setdefault(family, {})[numeric(address)] = None
    lists = [list(each) for each in families.values()]
    turned = [each[turn % len(each) :] + each[: turn % len(each)] for each in lists]
    return [address for row in zip_longest(*turned) for address in row if address is not None]


def numeric(address: Sequence[Any]) -> str:
    """Return the address of a socket address as text, with the number of its interface if it is link-local."""
    host = str(address[0])
    return f"{host}%{address[3]}" if len(address) == 4 and address[3] and "%" not in host else host


async def connect_to_first(addresses: Sequence[str], port: int) -> trio.SocketStream:
    """Return a connection to the first of these that answers. Raises OSError if none does."""
    won: list[trio.SocketStream] = []
    errors: list[OSError] = []

    async def attempt(address: str, over: trio.Event, scope: trio.CancelScope) -> None:
        try:
            won.append(await trio.open_tcp_stream(address, port))
            scope.cancel()
        except OSError as error:
            errors.append(error)
        over.set()

    try:
        async with trio.open_nursery() as nursery:
            for address in addresses:
                over = trio.Event()
                nursery.start_soon(attempt, address, over, nursery.cancel_scope)
                with trio.move_on_after(STAGGER_S):
                    await over.wait()
    except BaseException:
        close(won)
        raise
    if not won:
        raise errors[0] if len(errors) == 1 else OSError("no address answers") from ExceptionGroup("", errors)
    close(won[1:])
    return won[0]


def close(streams: Sequence[trio.SocketStream]) -> None:
    for stream in streams:
        stream.socket.close()
