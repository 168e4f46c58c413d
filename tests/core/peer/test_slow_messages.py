"""No message of a member holds up the event loop, as large and as new as it may be, the first time or again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest

from ranvier_py.core.clients.body_mender import TrialResult
from ranvier_py.core.clients.rule_verdicts import VERDICTS_MAX, RuleVerdicts
from ranvier_py.core.engine_cache.peers.reader_claims import READER_CLAIMS_MAX, ReaderClaim, ReaderClaims
from ranvier_py.core.engine_cache.snapshot import READY, ROOT, BadSnapshot, BlockRows, SnapshotReader, written_name
from ranvier_py.core.mesh.mesh_values import FRAME_BYTES_MAX, Peer, Plane
from ranvier_py.core.mesh.transfer import TransferPart
from ranvier_py.core.mesh.wire import messages as m
from ranvier_py.core.mesh.wire import records
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.response_cache.peers.answer_keys import ADVERTISED_MAX, AnswerKeys
from ranvier_py.core.response_cache.peers.invalidation_gossip import VOIDED_MAX, Voided, VoidedAnswers
from ranvier_py.core.routing.backend_state.facts import FACTS_MAX, Fact, Facts
from ranvier_py.core.routing.backend_state.loads import Loads
from ranvier_py.core.routing.backend_state.prefills import (
    PREFILL_FINGERPRINTS_MAX,
    PREFILLS_MAX,
    Prefills,
    SharedPrefill,
)
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync
from ranvier_py.core.routing.backend_state.signed_commands import COMMANDS_PER_MESSAGE, Command, Commands
from ranvier_py.core.routing.peers import route_messages as r
from ranvier_py.core.routing.peers import route_updates
from ranvier_py.core.routing.peers.route_updates import (
    UPDATES_MAX,
    UpdateRow,
    encode_rows,
    pack_entries,
    unpack_entries,
)
from ranvier_py.core.routing.peers.table_copy import TableCopy
from tests.core.engine_cache.test_snapshot import hasher
from tests.core.mesh.wire.wire_samples import EXAMPLES
from tests.core.peer.test_gossip_state import URL, started
from tests.core.peer.test_hostile_member import carry
from tests.core.routing.peers.route_net import ENGINE, RouteNode
from tests.node.turns import OCCUPIED_S_MAX, least_s

rng = Random(7)
Name = tuple[int, int]  # of a backend: its key, and the generation
SOME_BYTES = FRAME_BYTES_MAX - 4096


def u64() -> int:
    return rng.getrandbits(64) | 1


def record(number: int, state: m.State) -> m.Record:
    return m.Record(f"n{number}", u64(), 5, 3, state, f"10.{number // 256}.{number % 256}.9", 7946, 99, "")


def updates() -> tuple[m.Update, ...]:
    return tuple(m.Update(record(number, m.State.SUSPECT), 77) for number in range(records.ROWS_MAX))


def rows(backend: Name) -> r.RouteUpdates:
    """As many rows as fit in a frame, each new."""
    count = route_updates.ROWS_MAX
    paths = [
        encode_rows([UpdateRow(backend, u64(), 16 * place, u64(), u64()) for place in range(1, count + 1)])
        for _ in range(SOME_BYTES // (29 * count))
    ]
    return r.RouteUpdates(0, 0, tuple(r.Entry(0, path) for path in paths))


def short_rows(backend: Name) -> r.RouteUpdates:
    """As many updates as fit in a frame, each of one new row."""
    entries = many(UPDATES_MAX, lambda _: r.Entry(0, encode_rows([UpdateRow(backend, 0, 16, u64(), u64())])))
    return r.RouteUpdates(0, 0, entries)


def table(backend: Name) -> r.TableRows:
    """Claims of a table that nobody has asked for."""
    count = SOME_BYTES // 34
    names, tokens = rng.randbytes(8 * count), b"".join((16 * place).to_bytes(4, "little") for place in range(count))
    return r.TableRows((backend,), bytes(8) + names[:-8], tokens, names, names, bytes(2 * count), bytes(2 * count))


def many(count: int, make: Callable[[int], Any]) -> tuple[Any, ...]:
    return tuple(map(make, range(count)))


def command(number: int) -> Command:
    return Command(3, 1_795_000_000_000, "add", f"http://10.0.0.{number}:8000", 1.0, "e", rng.randbytes(32))


def prefills(backend: Name) -> Prefills:
    size = 8 * PREFILL_FINGERPRINTS_MAX
    begun = many(PREFILLS_MAX, lambda number: SharedPrefill(number, *backend, rng.randbytes(size)))
    return Prefills(begun, rng.randbytes(4 * UPDATES_MAX))


def part_sums(_: Name) -> r.PartSums:
    return r.PartSums(bytes(range(r.GROUPS)), rng.randbytes(r.GROUP_BYTES * r.GROUPS), True, 8)


def answer_keys(_: Name) -> AnswerKeys:
    count = ADVERTISED_MAX
    return AnswerKeys(7, True, rng.randbytes(8 * count), bytes(2 * count), b"")


def voided(number: int) -> VoidedAnswers:
    return VoidedAnswers(u64(), 60_000, f"m{number}", rng.randbytes(16), rng.randbytes(32))


LARGEST: Mapping[type[Any], Callable[[Name], m.Message]] = {
    m.Ping: lambda _: m.Ping(1, updates()),
    m.Ack: lambda _: m.Ack(1, updates()),
    m.PingRequest: lambda _: m.PingRequest(1, 99, "10.9.9.9", 7946, updates()),
    m.Push: lambda _: m.Push(updates()),
    m.Members: lambda _: m.Members(tuple(update.record for update in updates()), True),
    r.RouteUpdates: rows,
    r.Vector: lambda _: r.Vector(many(r.VECTOR_ENTRIES_MAX, lambda _: (u64(), u64() >> 1)), True),
    r.TotalSum: lambda _: r.TotalSum(1, rng.randbytes(8 * r.GROUPS), True, 8),
    r.PartSums: part_sums,
    Loads: lambda _: Loads(4, many(r.BACKENDS_MAX, lambda _: (u64(), 1, 1, 100))),
    Facts: lambda _: Facts(many(FACTS_MAX, lambda _: Fact(u64(), 2, 1.5, 3, True, 9))),
    Commands: lambda _: Commands(many(COMMANDS_PER_MESSAGE, command)),
    ReaderClaims: lambda _: ReaderClaims(many(READER_CLAIMS_MAX, lambda _: ReaderClaim(u64(), u64(), 7, 5))),
    Prefills: prefills,
    AnswerKeys: answer_keys,
    TransferPart: lambda _: TransferPart(1, 8, 0, True, rng.randbytes(SOME_BYTES)),
    Voided: lambda _: Voided(many(VOIDED_MAX, voided)),
    RuleVerdicts: lambda _: RuleVerdicts(
        1, many(VERDICTS_MAX, lambda number: TrialResult("r", "c", f"m{number}", "off", "", "n"))
    ),
}


def counted(backends: RegistrySync, url: str) -> Name:
    """The name of a backend whose generation a peer has told."""
    backends.look(0.0)
    backend = backends.registry.ids.find(url)
    name = backends.name_of(backend.id, backend.generation) if backend is not None else None
    assert name is not None
    backends.facts.receive(Peer(2, ("10.0.0.2", 7946)), Facts((Fact(*name, 0.0, 1, False, 0),)), 0.0)
    assert backends.holder(*name, 0.0)
    return name


def longest_s(make: Callable[[Name], m.Message]) -> float:
    """The longest step of a node to which a member sends three such messages, with ticks in between."""
    now, longest, node, member = 1.0, 0.0, started(), started(number=2)
    member.contact([(node.me.host, node.me.port)], now)
    carry([node, member], now)
    backend = counted(node.features.backends, URL)

    def timed(step: Callable[[], object]) -> None:
        nonlocal longest
        began = time.thread_time()
        step()
        longest = max(longest, time.thread_time() - began)

    for _ in range(3):
        packet = member.sealer.seal(Plane.BULK, node.me.session, *CODEC.encode(make(backend)))
        timed(partial(node.receive, packet, (member.me.host, 1), Plane.BULK, now))
        for _ in range(4):
            now += 0.3
            timed(partial(node.tick, now))
            timed(node.take)
        timed(node.state)
    return longest


def repeated(example: m.Message) -> m.Message:
    """This message with its rows as often as one may have them."""
    longest = example
    for times in (2**power for power in range(15)):
        more = type(example)._make([part * times if type(part) is tuple else part for part in example])
        with suppress(ValueError):
            if len(CODEC.encode(more)[1]) < SOME_BYTES:
                longest = more
    return longest


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_no_message_of_a_member_holds_up_the_event_loop(example: m.Message) -> None:
    make = LARGEST.get(type(example), lambda _: repeated(example))
    assert least_s(partial(longest_s, make)) <= OCCUPIED_S_MAX


def test_updates_of_one_row_each_hold_up_nobody() -> None:
    assert least_s(partial(longest_s, short_rows)) <= OCCUPIED_S_MAX


def blocks(count: int, inside: int) -> BlockRows:
    """A root and what hangs below it: so many blocks, each with so many fingerprints inside."""
    width = 16 * (inside + 1)
    names, places = b"".join(map(written_name, range(count))), (0, *[1] * count)
    above = b"".join(place.to_bytes(4, "little") for place in places)
    widths = b"\0\0" + width.to_bytes(2, "little") * count
    kinds, copies, totals = bytes((ROOT, *[READY] * count)), b"\0" + b"\1" * count, rng.randbytes(8 * count + 8)
    return BlockRows(1, 16, names, kinds, above, widths, totals, copies, rng.randbytes(8 * inside * count))


@pytest.mark.parametrize(("count", "inside"), [(255, 0), (SOME_BYTES // 25, 0), (255, 32), (255, 120), (7, 4094)])
def test_no_chunk_of_a_snapshot_that_was_asked_for_holds_up_the_event_loop(count: int, inside: int) -> None:
    rows = blocks(count, inside)

    def took_s() -> float:
        began = time.thread_time()
        with suppress(BadSnapshot):
            SnapshotReader(hasher()).add(rows)
        return time.thread_time() - began

    assert least_s(took_s) <= OCCUPIED_S_MAX


def test_no_chunk_of_a_table_that_was_asked_for_holds_up_the_event_loop() -> None:
    def took_s() -> float:
        node = RouteNode(1)
        part = r.pack_rows(table(counted(node.backends, ENGINE)))
        began = time.thread_time()
        assert TableCopy(node.table, node.backends).merge(r.unpack_rows(part), 1.0, 1.0) > 0
        return time.thread_time() - began

    assert least_s(took_s) <= OCCUPIED_S_MAX


def test_no_part_of_side_state_that_was_asked_for_holds_up_the_event_loop() -> None:
    def took_s() -> float:
        node = RouteNode(1)
        part = pack_entries(short_rows(counted(node.backends, ENGINE)).entries)
        began = time.thread_time()
        node.sync.take_side_state([update for _, update in unpack_entries(part)], 1.0, 1.0)
        return time.thread_time() - began

    assert least_s(took_s) <= OCCUPIED_S_MAX
