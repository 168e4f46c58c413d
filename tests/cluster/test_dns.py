"""The lab's DNS server: by its client, by a hand-built query, by a resolver under trio."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import dns.flags
import dns.message
import pytest
import trio
from dns.rcode import Rcode
from dns.rdatatype import RdataType
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.dns.dns_server import WAITING_MAX, DnsFault, DnsFaultKind, Zone, serve
from cluster.dns.resolvers import DnsResolver, LookupFailed, ask, look_up
from tests.examples import examples

DEADLINE_S = 10
NAME = "router.lab"
NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
ASKER = "127.0.0.1"


def zone_of(*addresses: str) -> Zone:
    return Zone({NAME: addresses or NODES})


class Reply(NamedTuple):
    code: Rcode
    truncated: bool
    addresses: tuple[str, ...]
    ttl_s: int


def query_of(name: str = NAME, kind: RdataType = RdataType.A, **more: int) -> bytes:
    return dns.message.make_query(name, kind, **more).to_wire()


def read(data: bytes | None) -> Reply:
    assert data is not None
    message = dns.message.from_wire(data)
    records = [(record.to_text(), found.ttl) for found in message.answer for record in found]
    ttl_s = min((ttl for _, ttl in records), default=0)
    return Reply(message.rcode(), bool(message.flags & dns.flags.TC), tuple(text for text, _ in records), ttl_s)


def asked(zone: Zone, name: str = NAME, kind: RdataType = RdataType.A, asker: str = ASKER) -> Reply:
    """What the zone says to one question, without sockets."""
    return read(zone.answer(query_of(name, kind), asker).data)


@asynccontextmanager
async def served(zone: Zone) -> AsyncIterator[tuple[str, int]]:
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            yield await nursery.start(serve, zone, "127.0.0.1", 0)
            nursery.cancel_scope.cancel()


# --- what it says ---------------------------------------------------------------------------------------------------


def test_each_look_up_begins_with_the_next_address_and_has_all() -> None:
    zone = zone_of()
    answers = [asked(zone).addresses for _ in range(4)]
    assert [answer[0] for answer in answers] == [*NODES, NODES[0]]
    assert all(sorted(answer) == sorted(NODES) for answer in answers)


def test_questions_for_ipv6_do_not_turn_those_for_ipv4() -> None:
    """A system's resolver asks for both at each look-up: one counter for both would show every second node only."""
    zone = zone_of(*NODES, "::2", "::3")
    heads = [(asked(zone).addresses[0], asked(zone, kind=RdataType.AAAA).addresses[0]) for _ in range(3)]
    assert heads == [("127.0.0.2", "::2"), ("127.0.0.3", "::3"), ("127.0.0.4", "::2")]


def test_a_name_without_such_an_address_is_empty_and_an_unknown_one_does_not_exist() -> None:
    zone = zone_of()
    assert asked(zone, kind=RdataType.AAAA) == Reply(Rcode.NOERROR, False, (), 0)
    assert asked(zone, kind=RdataType.SOA).code == Rcode.NOERROR
    assert asked(zone, "other.lab").code == Rcode.NXDOMAIN
    assert asked(zone, "example.org").code == Rcode.REFUSED
    assert asked(zone, "ROUTER.Lab").addresses == NODES


def test_answers_live_as_long_as_the_zone_states() -> None:
    zone = Zone({NAME: NODES}, ttl_s=30)
    assert asked(zone).ttl_s == 30


@pytest.mark.parametrize(
    ("fault", "code", "addresses"),
    [
        (DnsFault(DnsFaultKind.EMPTY), Rcode.NOERROR, ()),
        (DnsFault(DnsFaultKind.SUBSET, count=2), Rcode.NOERROR, NODES[:2]),
        (DnsFault(DnsFaultKind.SELF), Rcode.NOERROR, ("127.0.0.3",)),
        (DnsFault(DnsFaultKind.OTHER, addresses=("10.9.9.9",)), Rcode.NOERROR, ("10.9.9.9",)),
        (DnsFault(DnsFaultKind.SERVFAIL), Rcode.SERVFAIL, ()),
        (DnsFault(DnsFaultKind.SLOW), Rcode.NOERROR, NODES),
    ],
)
def test_each_fault_states_what_it_should_and_ends(fault: DnsFault, code: Rcode, addresses: tuple[str, ...]) -> None:
    zone = zone_of()
    zone.fault(NAME, fault)
    answer = asked(zone, asker="127.0.0.3")
    assert (answer.code, answer.addresses) == (code, addresses)
    zone.fault(NAME, None)
    assert len(asked(zone).addresses) == 3


def test_a_subset_shows_other_addresses_each_time() -> None:
    zone = zone_of()
    zone.fault(NAME, DnsFault(DnsFaultKind.SUBSET, count=1))
    assert [asked(zone).addresses for _ in range(4)] == [(NODES[0],), (NODES[1],), (NODES[2],), (NODES[0],)]


@pytest.mark.parametrize("kind", [RdataType.A, RdataType.AAAA])
def test_every_answer_fits_a_datagram_and_all_addresses_come_by_turns(kind: RdataType) -> None:
    known = [f"{'10.0.0.' if kind == RdataType.A else '2001:db8::'}{number}" for number in range(1, 61)]
    zone = zone_of(*known)
    answers = [zone.answer(query_of(kind=kind), ASKER).data for _ in range(60)]
    assert all(data is not None and len(data) <= 512 and len(read(data).addresses) == 16 for data in answers)
    assert {read(data).addresses[0] for data in answers} == set(known)


def test_a_fault_may_be_for_one_asker_alone() -> None:
    zone = zone_of()
    zone.fault(NAME, DnsFault(DnsFaultKind.SERVFAIL), asker="127.0.0.2")
    assert asked(zone, asker="127.0.0.2").code == Rcode.SERVFAIL
    assert asked(zone, asker="127.0.0.3").code == Rcode.NOERROR


def test_several_faults_take_turns_for_each_asker() -> None:
    zone = zone_of()
    for asker in ("127.0.0.2", "127.0.0.3"):
        zone.fault(NAME, None, DnsFault(DnsFaultKind.EMPTY), DnsFault(DnsFaultKind.SERVFAIL), asker=asker)
    found = [asked(zone, asker=asker) for _ in range(4) for asker in ("127.0.0.2", "127.0.0.3")]
    assert [(answer.code, len(answer.addresses)) for answer in found[::2]] == [
        (Rcode.NOERROR, 3),
        (Rcode.NOERROR, 0),
        (Rcode.SERVFAIL, 0),
        (Rcode.NOERROR, 3),
    ]
    assert [answer.code for answer in found[::2]] == [answer.code for answer in found[1::2]]


def test_what_is_no_address_or_lies_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.256"):
        zone_of("127.0.0.256")
    with pytest.raises(ValueError, match="not in the zone"):
        Zone({"router.example": NODES})


# --- messages -------------------------------------------------------------------------------------------------------


def test_a_query_as_the_rfc_writes_it_is_understood() -> None:
    """Bytes by hand, so that reader and writer cannot share a misunderstanding."""
    data = bytes.fromhex("abcd 0100 0001 0000 0000 0000") + b"\x06Router\x03lab\x00" + b"\x00\x01\x00\x01"
    outcome = zone_of("127.0.0.2").answer(data, ASKER)
    expected = bytes.fromhex("abcd 8500 0001 0001 0000 0000") + b"\x06Router\x03lab\x00\x00\x01\x00\x01"
    expected += bytes.fromhex("c00c 0001 0001 00000001 0004 7f000002")
    assert outcome.data == expected


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", None),
        (b"\0" * 11, None),
        (bytes.fromhex("0001 8000 0001 0000 0000 0000"), None),  # an answer: replying would make two servers talk
        (bytes.fromhex("0001 2800 0001 0000 0000 0000"), Rcode.NOTIMP),
        (bytes.fromhex("0001 0000 0002 0000 0000 0000"), Rcode.FORMERR),
        (bytes.fromhex("0001 0000 0001 0000 0000 0000"), Rcode.FORMERR),
        (query_of()[:-1], Rcode.FORMERR),
        (query_of()[:-1] + b"\x03", Rcode.REFUSED),
        (bytes.fromhex("0001 0000 0001 0000 0000 0000 c00c 0001 0001"), Rcode.FORMERR),  # a name that points at itself
    ],
    ids=range(9),  # the queries have an id drawn at random
)
def test_what_is_no_plain_query_is_answered_with_its_code(data: bytes, code: Rcode | None) -> None:
    answer = zone_of().answer(data, ASKER).data
    assert (None if answer is None else dns.message.from_wire(answer).rcode()) == code


@given(st.binary(max_size=80))
@settings(max_examples=examples(300))
def test_no_bytes_make_the_zone_raise(data: bytes) -> None:
    zone = zone_of()
    for message in (data, query_of()[:12] + data, query_of() + data):
        outcome = zone.answer(message, ASKER)
        assert outcome.data is None or len(outcome.data) >= 12


# --- over sockets ---------------------------------------------------------------------------------------------------


async def test_a_slow_answer_does_not_hold_up_the_others() -> None:
    zone = zone_of()
    zone.fault(NAME, DnsFault(DnsFaultKind.SLOW, delay_s=60.0))
    zone.set("quick.lab", ["127.0.0.2"])
    async with served(zone) as server, trio.open_nursery() as nursery:
        nursery.start_soon(ask, server, NAME, RdataType.A)
        assert await look_up(server, "quick.lab", RdataType.A) == ("127.0.0.2",)
        nursery.cancel_scope.cancel()


async def test_too_many_slow_answers_are_dropped_and_counted() -> None:
    zone = zone_of()
    zone.fault(NAME, DnsFault(DnsFaultKind.SLOW, delay_s=60.0))
    zone.set("quick.lab", ["127.0.0.2"])
    async with served(zone) as server:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for number in range(WAITING_MAX + 10):
                sock.sendto(query_of(), server)
                if number % 50 == 0:
                    await look_up(server, "quick.lab", RdataType.A)  # lets the server keep up
            await look_up(server, "quick.lab", RdataType.A)
    assert zone.counts["dropped"] == 10


async def test_a_name_that_fails_states_how() -> None:
    zone = zone_of()
    async with served(zone) as server:
        with pytest.raises(LookupFailed, match="NXDOMAIN"):
            await look_up(server, "other.lab", RdataType.A)
        zone.fault(NAME, DnsFault(DnsFaultKind.SERVFAIL))
        with pytest.raises(LookupFailed, match="SERVFAIL"):
            await look_up(server, NAME, RdataType.A)


async def test_a_server_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.dns.resolvers.TRY_S", 0.05)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(LookupFailed, match="no answer"):
            await look_up(silent.getsockname(), NAME, RdataType.A)


async def test_each_look_up_of_a_client_under_trio_begins_with_the_next_node() -> None:
    async with served(zone_of()) as server:
        trio.socket.set_custom_hostname_resolver(DnsResolver(server))
        found = [await trio.socket.getaddrinfo(NAME, 80, type=socket.SOCK_STREAM) for _ in range(3)]
    assert [each[0][4] for each in found] == [(node, 80) for node in NODES]
