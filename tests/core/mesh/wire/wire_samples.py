"""Messages of every kind: one of each to keep, and strategies for any of them within the bounds."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from hypothesis import strategies as st

from ranvier_py.core.access.limits.count import CountRow
from ranvier_py.core.access.limits.homes import AskRow
from ranvier_py.core.access.limits.limit_gossip import LimitAnswer, LimitCounts, LimitQuestion
from ranvier_py.core.access.revocations import Revocation, Revoked
from ranvier_py.core.clients.body_mender import OFF, PROVED, TrialResult
from ranvier_py.core.clients.rule_verdicts import RuleVerdicts
from ranvier_py.core.engine_cache.peers.reader_claims import ReaderClaim, ReaderClaims
from ranvier_py.core.mesh.transfer import Refused, TransferPart, Wanted
from ranvier_py.core.mesh.wire import codec
from ranvier_py.core.mesh.wire import messages as m
from ranvier_py.core.mesh.wire.columns import COLUMN, FLAG, IDENTITY, U16, U32, U64, Field
from ranvier_py.core.mesh.wire.frame import BASE_VERSION, PROTOCOL_VERSION
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.response_cache.peers.answer_keys import AnswerKeys
from ranvier_py.core.response_cache.peers.invalidation_gossip import Voided, VoidedAnswers
from ranvier_py.core.response_cache.peers.peer_answers import AnswerDigest
from ranvier_py.core.routing.backend_state.backend_lists import BackendList, ListedBackend, ListQuestion
from ranvier_py.core.routing.backend_state.backend_sets import BackendSet
from ranvier_py.core.routing.backend_state.facts import Fact, Facts
from ranvier_py.core.routing.backend_state.loads import Loads
from ranvier_py.core.routing.backend_state.order_notes import Order, OrderAnswer, OrderAnswers, Orders
from ranvier_py.core.routing.backend_state.prefills import Prefills, SharedPrefill
from ranvier_py.core.routing.backend_state.signed_commands import (
    HOSTED,
    NO_OPTIONS,
    Command,
    CommandOptions,
    Commands,
    OwnCommands,
)
from ranvier_py.core.routing.backend_state.status_reports import UNKNOWN, EngineReport, StatusReport, Trouble
from ranvier_py.core.routing.peers import route_messages as r

U64_MAX = 2**64 - 1
SESSION = 0x1122334455667788

RECORD = m.Record("router-1", SESSION, 1_700_000_000_000, 3, m.State.ALIVE, "10.1.2.3", 7946, 99, "10.1.2.3:8080")
LONGEST = m.Record(
    "n" * 64, U64_MAX, U64_MAX, 2**32 - 1, m.State.LEFT, "fe80:1111:2222:3333:4444:5555:6666:7777", 65535,
    U64_MAX, "p" * 80,
)  # fmt: skip
IPV6 = RECORD._replace(name="knoten-ä", host="fd00::1", state=m.State.SUSPECT, public="")
UPDATES = (m.Update(RECORD), m.Update(IPV6, 77), m.Update(LONGEST))


EXAMPLES: tuple[m.Message, ...] = (
    m.Hello(RECORD, 0x0102030405060708, PROTOCOL_VERSION, "1.2.3"),
    m.Echo(IPV6, 1, 0, PROTOCOL_VERSION, "1.2.3"),
    m.Challenge(U64_MAX),
    m.Ping(4_000_000_000, UPDATES),
    m.Ack(1),
    m.PingRequest(2, SESSION, "10.9.8.7", 7946, UPDATES[:1]),
    m.Nack(3),
    m.Push(UPDATES),
    m.Members((RECORD, IPV6), True),
    r.RouteUpdates(SESSION, 41, (r.Entry(0, b"lesson"), r.Entry(65535, b""), r.Entry(7, b"\x00" * 300)), 1234),
    r.Digest(U64_MAX, 99),
    r.Vector(((SESSION, 5), (1, U64_MAX)), False),
    r.Reset(SESSION, 1000),
    r.TotalSum(U64_MAX, bytes(range(256)) * 2, False, 8),
    r.PartSums(b"\x00\x07\x3f", bytes(range(256)) * 6, True, 8),
    Loads(4, ((11, 0, 0, 0), (12, 65535, 65535, 2**32 - 1))),
    Facts((Fact(11, 2, 1.5, 1, False, 0), Fact(12, 0, 0.0, 3, True, 2**32 - 1, 65535, 2**64 - 1, 7, 30))),
    ListQuestion(2**32 - 1),
    BackendList(
        7, 2, (ListedBackend(11, 1.5, True, 2, 3, 2**32 - 1, "w1"), ListedBackend(12, 1.0, False, 0, 0, 0, ""))
    ),
    Commands(
        (Command(3, 1_795_000_000_000, "add", "http://10.0.0.1:8000", 1.5, "engine-1", bytes(range(32))),),
        (CommandOptions(1, True, "engine.internal", "/llm"),),
    ),
    ReaderClaims((ReaderClaim(11, SESSION, 7, 5), ReaderClaim(12, 1, 2**32 - 1, 0))),
    Prefills((SharedPrefill(1, 11, 2, bytes(range(16))), SharedPrefill(2**32 - 1, 1, 255, bytes(8))), bytes(8)),
    AnswerKeys(7, False, bytes(range(16)), b"\1\0\xff\xff", bytes(8)),
    AnswerDigest(7, U64_MAX, True),
    Voided((VoidedAnswers(9, 60_000, "model", bytes(16), bytes(32)), VoidedAnswers(U64_MAX, 0, "", b"", b""))),
    Wanted(1, 6, 32, b"what"),
    TransferPart(1, 6, 3, True, b"some of it"),
    Refused(1, 6, True),
    RuleVerdicts(U64_MAX, (TrialResult("tools-by-name", "codex", "Qwen/Qwen3-8B", "off", "it helps nothing", "n1"),)),
    BackendSet(2, U64_MAX, True, bytes(16), 2**32 - 1),
    LimitCounts((CountRow(11, SESSION, 1, 2**32 - 1, 250, 4105.0, 3000.0, 2417.5),)),
    LimitQuestion(2**32 - 1, (AskRow(11, 5, 24_000, 0, 1e9, 1e9, 7e8, 4105.0, 1e12),)),
    LimitAnswer(7, U64_MAX),
    Revoked((Revocation(U64_MAX, 1_795_000_000_000, 1, "ann", bytes(range(32))), Revocation(7, 0, 0, "", bytes(32)))),
    OwnCommands(
        (Command(3, 1_795_000_000_000, "undrain", "node:", 1.5, "engine-1", bytes(range(32))),),
        (CommandOptions(1, True, "engine.internal"),),
    ),
    Orders((Order(1, 0, U64_MAX, 7, "ann"), Order(U64_MAX, 2, 1, U64_MAX, ""))),
    OrderAnswers((OrderAnswer(1, ""), OrderAnswer(U64_MAX, "no key"))),
    StatusReport(
        (EngineReport(11, 2, 0, 1500, 870), EngineReport(U64_MAX, *[UNKNOWN] * 4)),
        (Trouble(1, 60, "node_full", "", "90 of 100 are in use", "Raise it."), Trouble(0, UNKNOWN, "x", "y", "", "")),
    ),
)

WRITTEN = {4: "4f50efb864106d9b", 5: "0ffb9d05b3c15331"}
"""By version a digest of the examples as it writes them. What adds a kind or a field changes only the last."""

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
identities = st.integers(1, U64_MAX)
ports = st.integers(1, 65535)


def texts(bytes_max: int, least: int = 0) -> st.SearchStrategy[str]:
    """Printable, often of the greatest length."""
    short = st.text(max_size=bytes_max // 4, min_size=least).filter(str.isprintable)
    return short | st.integers(bytes_max - 1, bytes_max).map("x".__mul__)


hosts = st.one_of(
    st.ip_addresses(v=4).filter(int).map(str),
    st.ip_addresses(v=6).filter(int).map(str),
)


@st.composite
def records(draw: st.DrawFn) -> m.Record:
    name, public = draw(texts(64, least=1)), draw(texts(80))
    host, port = draw(hosts), draw(ports)
    state = draw(st.sampled_from(m.State))
    return m.Record(name, draw(identities), draw(u64), draw(u32), state, host, port, draw(u64), public)


def answer_keys(version: int, whole: bool, added: bytes, removed: bytes) -> AnswerKeys:
    return AnswerKeys(version, whole, added, b"\5\0" * (len(added) // 8), removed)


def part_sums(groups: AbstractSet[int], reply: bool, request: int) -> r.PartSums:
    return r.PartSums(bytes(sorted(groups)), b"part sum" * (r.GROUP_BYTES // 8 * len(groups)), reply, request)


def many(elements: st.SearchStrategy[object], most: int = 5) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(elements, max_size=most).map(tuple)


updates = many(st.builds(m.Update, records(), st.just(0) | identities))
pairs = st.tuples(identities, u64)
amounts = st.floats(0, allow_infinity=False, allow_nan=False)
entries = st.builds(r.Entry, u16, st.binary(max_size=100))
facts = st.builds(Fact, u64, u32, amounts, st.integers(0, 3), st.booleans(), u32, u16, u64, u64, u16)
signed_alone = st.just(NO_OPTIONS)  # as in messages, which have options apart
commands = st.builds(
    Command, u64, u64, texts(16), texts(512), amounts, texts(64), st.binary(min_size=32, max_size=32), signed_alone
)  # fmt: skip
options = st.builds(CommandOptions, st.integers(0, len(HOSTED) - 1), st.booleans(), texts(253), texts(200))


def commands_of(rows: tuple[Any, ...]) -> Commands:
    return Commands(*zip(*rows, strict=True)) if rows else Commands(())


def own_commands_of(rows: tuple[Any, ...]) -> OwnCommands:
    return OwnCommands(*commands_of(rows))


listed = st.builds(ListedBackend, u64, amounts, st.booleans(), st.integers(0, 2), u32, u32, texts(128))
orders = st.builds(Order, u64, st.integers(0, 2), u64, u64, texts(64))
answers = st.builds(OrderAnswer, u64, texts(200))


standings = st.builds(ReaderClaim, u64, identities, u32, st.integers(0, 5))
digests = st.lists(u64, max_size=5).map(lambda numbers: b"".join(number.to_bytes(8, "little") for number in numbers))
voided = st.builds(
    VoidedAnswers, identities, u32, texts(1024), st.sampled_from((b"", bytes(16))), st.sampled_from((b"", bytes(32)))
)
revocations = st.builds(Revocation, u64, u64, st.integers(0, 1), texts(64), st.binary(min_size=32, max_size=32))
numbers = st.lists(u32, max_size=5).map(lambda several: b"".join(number.to_bytes(4, "little") for number in several))
prefills = st.builds(SharedPrefill, u32, u64, st.integers(0, 255), digests.filter(bool))
verdicts = st.builds(
    TrialResult, texts(60), texts(32), texts(1024), st.sampled_from((PROVED, OFF)), texts(255), texts(64)
)
limited = st.builds(CountRow, identities, identities, st.integers(0, 5), u32, u32, amounts, amounts, amounts)
asks = st.builds(AskRow, identities, st.integers(0, 5), u32, u32, amounts, amounts, amounts, amounts, amounts)
engine_reports = st.builds(EngineReport, u64, u32, u32, u32, u32)
troubles = st.builds(Trouble, st.integers(0, 255), u32, texts(60).filter(bool), texts(60), texts(300), texts(300))
OF_FIELD: dict[Field, st.SearchStrategy[object]] = {
    U16: u16,
    U32: u32,
    U64: u64,
    IDENTITY: identities,
    FLAG: st.booleans(),
    COLUMN: st.binary(max_size=60),
    codec.RECORD: records(),
    codec.RECORDS: many(records()),
    codec.UPDATES: updates,
    codec.HOST: hosts,
    codec.PORT: ports,
    codec.ABOUT[0]: st.integers(BASE_VERSION, 255),
    codec.ABOUT[1]: texts(32),
    r.ENTRIES: many(entries),
    r.VECTOR: many(pairs),
}
OF_ROWS: dict[type, st.SearchStrategy[m.Message]] = {
    r.TotalSum: st.builds(r.TotalSum, u64, st.sampled_from((b"", bytes(8 * r.GROUPS))), st.booleans(), u32),
    r.PartSums: st.builds(part_sums, st.frozensets(st.integers(0, r.GROUPS - 1), max_size=9), st.booleans(), u32),
    Loads: st.builds(Loads, u32, many(st.tuples(u64, u16, u16, u32))),
    Prefills: st.builds(Prefills, many(prefills, 3), numbers),
    Facts: st.builds(Facts, many(facts)),
    BackendSet: st.builds(BackendSet, u32, u64, st.booleans(), digests, u32),
    Commands: many(st.tuples(commands, options), 3).map(commands_of),
    OwnCommands: many(st.tuples(commands, options), 3).map(own_commands_of),
    Orders: st.builds(Orders, many(orders)),
    OrderAnswers: st.builds(OrderAnswers, many(answers)),
    BackendList: st.builds(BackendList, u32, st.integers(0, 4096), many(listed)),
    ReaderClaims: st.builds(ReaderClaims, many(standings)),
    AnswerKeys: st.builds(answer_keys, u32, st.booleans(), digests, digests),
    Voided: st.builds(Voided, many(voided, 3)),
    LimitCounts: st.builds(LimitCounts, many(limited)),
    LimitQuestion: st.builds(LimitQuestion, u32, many(asks)),
    StatusReport: st.builds(StatusReport, many(engine_reports), many(troubles, 3)),
    Revoked: st.builds(Revoked, many(revocations, 3)),
    RuleVerdicts: st.builds(RuleVerdicts, u64, many(verdicts, 3)),
}
STRATEGIES = OF_ROWS | {
    kind.make: st.builds(kind.make, *[OF_FIELD[field] for field in kind.fields])
    for kind in CODEC.kinds
    if kind.make not in OF_ROWS
}

messages: st.SearchStrategy[m.Message] = st.one_of(*STRATEGIES.values())
