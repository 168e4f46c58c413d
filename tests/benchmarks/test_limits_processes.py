"""What the benchmark of limits with processes does to its nodes, and what it notes of them."""

from __future__ import annotations

import socket
import struct
from random import Random

import pytest
import trio
from trio.testing import MockClock

from benchmarks.limits.processes import Engine, Nodes
from cluster.limits.limit_run import CUT_S, NEEDED, RESERVED, LimitCase, Served, measured
from ranvier_py.core.mesh.mesh_values import Plane

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"
RESET = struct.pack("ii", 1, 0)  # a close by it is no goodbye


class Brief(Random):
    """All answers have ten tokens."""

    def randint(self, a: int, b: int) -> int:
        return 10


async def test_the_engine_goes_on_after_a_node_was_killed_that_waited_for_its_answer() -> None:
    engine = Engine(Brief())
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, engine.serve, [listener])
        place = listener.socket.getsockname()
        killed = await trio.open_tcp_stream(*place)
        await killed.send_all(CHAT)
        while not engine.served:
            await trio.lowlevel.checkpoint()
        killed.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        killed.socket.close()
        with trio.fail_after(5.0):
            async with await trio.open_tcp_stream(*place) as other:
                await other.send_all(CHAT)
                assert (await other.receive_some()).startswith(b"HTTP/1.1 200")
        nursery.cancel_scope.cancel()
    assert len(engine.served) == 2, "what the killed node had begun counts"


async def test_half_of_the_nodes_are_cut_off_for_half_a_minute(autojump_clock: MockClock) -> None:
    nodes = Nodes(LimitCase(4, cut_s=100.0), 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(nodes.trouble)
        cut = []
        for at in (99.0, 101.0, 99.0 + CUT_S, 101.0 + CUT_S):
            await trio.sleep_until(at)
            cut.append([nodes.links.link(1, other, Plane.DATAGRAM).cut for other in (0, 2, 3)])
    assert cut == [[False, False, False], [False, True, True], [False, True, True], [False, False, False]]
    assert nodes.links.link(0, 1, Plane.DATAGRAM).loss == 0.2


@pytest.mark.parametrize(("used", "false"), [(95_000 - NEEDED - 1, 1), (95_000 - NEEDED, 0)])
def test_a_refusal_is_false_where_its_request_had_fit_below_the_share_with_all_that_is_held(
    used: int, false: int
) -> None:
    served = [Served(100.0, used - RESERVED, 101.0, 0), Served(159.0, 9, 162.0, 0)]  # the last one runs
    found = measured(served, [160.5, 300.0], 130.0, 170.0, 100_000)
    assert (found.requests, found.refused, found.false) == (2, 1, false)
