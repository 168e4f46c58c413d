"""The fuzzer's targets: every reader of input from other nodes, and the reader of a node's state file.

The first byte of an input selects the reader, which gets the rest. `check` holds readers to these rules: a reader
raises nothing but its one error; a value that was read, written and read again is the same; memory is bounded by the
bytes that have arrived, not by the lengths that they announce.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence

from ranvier_py.core.mesh.mesh_values import Plane
from ranvier_py.core.mesh.wire.frame import BadFrame
from ranvier_py.core.mesh.wire.keyring import KeyRing
from ranvier_py.core.mesh.wire.messages import Members, Message, Ping, Record, State, Update
from ranvier_py.core.mesh.wire.seal import Sealer
from ranvier_py.core.peer.router_peer import CODEC, STATE_HEAD, STATE_MAGIC, read_state
from ranvier_py.core.routing.backend_state.loads import Loads
from ranvier_py.core.routing.peers import route_updates
from ranvier_py.core.routing.peers.route_messages import Digest, RouteUpdates, Vector
from ranvier_py.core.routing.peers.route_updates import REMOVED, BadRouteUpdate, Entry, ProcessUpdate, UpdateRow

KINDS: Sequence[int] = tuple(CODEC.topic_of)
MEMORY_EVERY = 16
MEMORY_TIMES, MEMORY_MORE_BYTES = 20, 16 * 1024
"""Bounds of memory. Well-formed rows cost the objects that they become (figures by message:
tests/core/mesh/wire/test_wire.py); refused input costs at most 4 times its bytes."""

SEALER = Sealer(7, KeyRing({1: bytes(range(32))}, 1), "fuzz")


def read_message(kind: int, data: bytes) -> None:
    message = CODEC.decode(kind, data)
    assert CODEC.decode(*CODEC.encode(message)) == message


def read_update(data: bytes) -> None:
    if route_updates.kind_of(data) is not None:
        assert route_updates.encode_process(route_updates.decode_process(data)) == data
    else:  # decode accepts several encodings of one update, encode writes one of them
        rows = route_updates.decode_rows(data)
        assert route_updates.decode_rows(route_updates.encode_rows(rows)) == rows


def read_packet(data: bytes) -> None:
    for plane in Plane:
        SEALER.open(data, plane)


def readers() -> Sequence[Callable[[bytes], object]]:
    """Return a reader for each message kind, then the others. The first byte of an input is an index into these."""
    of_kinds = [lambda data, kind=kind: read_message(kind, data) for kind in KINDS]
    return (*of_kinds, read_update, read_packet, read_state)


READERS = readers()
ROUTE_UPDATE, PACKET, STATE = range(len(KINDS), len(KINDS) + 3)


def check(data: bytes) -> None:
    """Give an input to its reader. Raises whatever a reader must not raise, and AssertionError for a broken rule."""
    if not data:
        return
    read, body = READERS[data[0] % len(READERS)], data[1:]
    looks = len(body) % MEMORY_EVERY == 0
    if looks:
        tracemalloc.start()
    try:
        read(body)
    except (BadFrame, BadRouteUpdate):
        pass
    finally:
        if looks:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    if looks:
        assert peak <= MEMORY_TIMES * len(body) + MEMORY_MORE_BYTES, f"{peak} bytes for {len(body)}"


def beginnings() -> Sequence[bytes]:
    """Return well-formed inputs, from which the fuzzer starts."""
    record = Record("n1", 11, 1_700_000_000_000, 3, State.ALIVE, "10.1.2.3", 7946, 99, "10.1.2.3:8080")
    route_update = route_updates.encode_rows(
        [UpdateRow((7, 1), 5, 288, 14, 0), UpdateRow((7, 1), 14, 320, 11, 12), UpdateRow((8, 1), 14, 320, 0, 13)]
    )
    messages: Sequence[Message] = (
        Ping(1, (Update(record), Update(record._replace(state=State.SUSPECT), 77))),
        Members((record,), True),
        RouteUpdates(0, 41, (Entry(0, route_update), Entry(9, b"")), 12),
        Digest(1, 2),
        Vector(((11, 5), (12, 9)), True),
        Loads(3, ((7, 2, 1, 600), (8, 1, 0, 0))),
    )
    written = [CODEC.encode(message) for message in messages]
    found = [bytes((KINDS.index(kind),)) + body for kind, body in written]
    removal = route_updates.encode_process(ProcessUpdate(REMOVED, (7, 1), [(1, 2)]))
    found += [bytes((ROUTE_UPDATE,)) + each for each in (route_update, removal)]
    packet = SEALER.seal(Plane.DATAGRAM, 0, *written[0])
    state = STATE_HEAD.pack(STATE_MAGIC, 7, 0) + bytes(2) + written[1][1]
    return [*found, bytes((PACKET,)) + packet, bytes((STATE,)) + state]
