"""Round-robin names, and addresses for the lab."""

from __future__ import annotations

import socket
from random import Random

import pytest
import trio

from cluster.dns import addresses as names
from cluster.dns.addresses import Address, NamesError, free_port, node_addresses, parse_resolve
from cluster.dns.resolvers import RoundRobinResolver

LAB = [Address("127.0.0.2"), Address("127.0.0.3"), Address("127.0.0.4", 81)]


async def looked_up(resolver: RoundRobinResolver, name: str, times: int) -> list[list[tuple[str, int]]]:
    trio.socket.set_custom_hostname_resolver(resolver)
    answers = [await trio.socket.getaddrinfo(name, 80, type=trio.socket.SOCK_STREAM) for _ in range(times)]
    return [[line[4][:2] for line in answer] for answer in answers]


async def test_each_look_up_begins_with_the_next_address_and_has_all_of_them() -> None:
    found = await looked_up(RoundRobinResolver({"router.lab": LAB}), "router.lab", 4)
    assert [answer[0] for answer in found] == [
        ("127.0.0.2", 80),
        ("127.0.0.3", 80),
        ("127.0.0.4", 81),
        ("127.0.0.2", 80),
    ]
    assert all(len(answer) == 3 for answer in found)


async def test_a_name_does_not_mind_its_case() -> None:
    found = await looked_up(RoundRobinResolver({"Router.LAB": LAB}), "ROUTER.lab", 1)
    assert found[0][0] == ("127.0.0.2", 80)


async def test_other_names_are_the_systems() -> None:
    found = await looked_up(RoundRobinResolver({"router.lab": LAB}), "localhost", 1)
    assert found[0][0][0] in ("127.0.0.1", "::1")


async def test_a_family_that_is_not_there_is_not_found() -> None:
    trio.socket.set_custom_hostname_resolver(RoundRobinResolver({"router.lab": LAB}))
    with pytest.raises(socket.gaierror):
        await trio.socket.getaddrinfo("router.lab", 80, family=socket.AF_INET6)


def test_names_are_read_from_the_command_line() -> None:
    name, found = parse_resolve("Router.lab=127.0.0.2,127.0.0.3:81,[::1]:82,::1")
    assert name == "router.lab"
    assert found == (Address("127.0.0.2"), Address("127.0.0.3", 81), Address("::1", 82), Address("::1"))


@pytest.mark.parametrize("text", ["", "router.lab", "=127.0.0.2", "a=", "a=host", "a=127.0.0.1:x", "a=127.0.0.1:70000"])
def test_a_wrong_name_is_refused(text: str) -> None:
    with pytest.raises(NamesError):
        parse_resolve(text)


def test_a_name_without_an_address_is_refused() -> None:
    with pytest.raises(NamesError):
        RoundRobinResolver({"router.lab": []})


def test_a_free_port_is_free_on_every_address_and_low() -> None:
    """From 32768 on, an outgoing connection may hold the number."""
    port = free_port(["127.0.0.1", "127.0.0.2"], Random(4))
    assert port < 32768
    with socket.socket() as holder:
        holder.bind(("127.0.0.2", port))
        assert not names.can_bind("127.0.0.2", port)
        assert free_port(["127.0.0.1", "127.0.0.2"], Random(4)) != port


def test_nodes_share_one_port_where_the_machine_can() -> None:
    if not names.can_bind("127.0.0.2"):
        pytest.skip("this machine has one loopback address only")
    found, word = node_addresses(3, Random(1))
    assert [address.ip for address in found] == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    assert len({address.port for address in found}) == 1
    assert not word


def test_nodes_get_ports_of_their_own_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system whose loopback is 127.0.0.1 alone; and it says so."""
    can_bind = names.can_bind
    monkeypatch.setattr(names, "can_bind", lambda ip, port=0: ip == "127.0.0.1" and can_bind(ip, port))
    found, word = node_addresses(3, Random(1))
    assert {address.ip for address in found} == {"127.0.0.1"}
    assert len({address.port for address in found}) == 3
    assert "127.0.0.2" in word
