"""Connections to a name with several addresses: each begins with the next one, and none that is dead delays it."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import trio
import trio.testing

from ranvier_py.proxy.spread import STAGGER_S, connect, in_turn
from tests.io.test_discovery import FakeResolver, entry

DEAD, ALSO_DEAD, SILENT = "10.0.0.7", "10.0.0.8", "10.0.0.9"


class Stream:
    def __init__(self, address: str) -> None:
        self.address, self.socket = address, self
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def world(autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names and their addresses; one that is dead refuses at once, and one that is silent never answers."""

    async def dial(address: str, _port: int) -> Stream:
        if address == SILENT:
            await trio.sleep_forever()
        await trio.sleep(0.01)
        if address in (DEAD, ALSO_DEAD):
            raise ConnectionRefusedError("refused")
        return Stream(address)

    monkeypatch.setattr(trio, "open_tcp_stream", dial)
    return {}


async def reached(addresses: list[str], turns: int) -> list[str]:
    trio.socket.set_custom_hostname_resolver(FakeResolver({"engines": addresses}))
    return [(await connect("engines", 80, turn)).address for turn in range(turns)]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("world")
async def test_each_address_gets_its_share_of_connections() -> None:
    addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert await reached(addresses, 6) == addresses * 2


@pytest.mark.usefixtures("world")
async def test_an_address_that_refuses_or_hangs_costs_a_moment_at_most() -> None:
    began = trio.current_time()
    assert await reached([DEAD, SILENT, "10.0.0.1"], 3) == ["10.0.0.1"] * 3
    assert trio.current_time() - began < 2 * STAGGER_S + 0.1


@pytest.mark.usefixtures("world")
async def test_a_name_of_which_no_address_answers_is_an_error_of_the_network() -> None:
    with pytest.raises(OSError, match="refused"):
        await reached([DEAD], 1)
    with pytest.raises(OSError, match="no address answers"):
        await reached([DEAD, ALSO_DEAD], 1)


def test_families_alternate_and_each_keeps_its_order_from_its_turn_on() -> None:
    infos: list[Any] = [entry(text, 80) for text in ("fd00::1", "fd00::2", "10.0.0.1", "10.0.0.1")]
    assert in_turn(infos, 1) == ["fd00::2", "10.0.0.1", "fd00::1"]
    link_local = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 80, 0, 3))
    assert in_turn([link_local], 0) == ["fe80::1%3"]
