"""Messages of every kind: one of each to keep, and strategies for any of them within the bounds."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from hypothesis import strategies as st

from ranvier_py.core.gossip.wire.columns import BUCKETS, GROUP_BYTES, GROUPS
from ranvier_py.core.gossip.wire.messages import (
    Ack,
    Busy,
    Challenge,
    Command,
    Commands,
    Digest,
    Echo,
    Entry,
    Fact,
    Facts,
    Hello,
    Loads,
    Members,
    Message,
    Nack,
    PartSums,
    Ping,
    PingRequest,
    Push,
    ReaderClaim,
    ReaderClaims,
    Record,
    Reset,
    RouteUpdates,
    RowsWanted,
    SnapshotChunk,
    SnapshotRefused,
    SnapshotWanted,
    State,
    TableRows,
    TotalSum,
    Update,
    Vector,
)

U64_MAX = 2**64 - 1
SESSION = 0x1122334455667788

RECORD = Record("router-1", SESSION, 1_700_000_000_000, 3, State.ALIVE, "10.1.2.3", 7946, 99, "10.1.2.3:8080")
LONGEST = Record(
    "n" * 64, U64_MAX, U64_MAX, 2**32 - 1, State.LEFT, "fe80:1111:2222:3333:4444:5555:6666:7777", 65535,
    U64_MAX, "p" * 80,
)  # fmt: skip
IPV6 = RECORD._replace(name="knoten-ä", host="fd00::1", state=State.SUSPECT, public="")
UPDATES = (Update(RECORD), Update(IPV6, 77), Update(LONGEST))


def rows_of(count: int, backends: int = 2) -> TableRows:
    """A chunk of that many claims."""
    word = b"\x01\x02\x03\x04\x05\x06\x07\x08" * count
    indices = b"".join((claim % backends).to_bytes(2, "little") for claim in range(count))
    held = tuple((11 + index, index) for index in range(backends))
    return TableRows(5, 6, True, held, word, word[: 4 * count], word, word, indices, word[: 2 * count])


EXAMPLES: tuple[Message, ...] = (
    Hello(RECORD, 0x0102030405060708),
    Echo(IPV6, 1, 0),
    Challenge(U64_MAX),
    Ping(4_000_000_000, UPDATES),
    Ack(1),
    PingRequest(2, SESSION, "10.9.8.7", 7946, UPDATES[:1]),
    Nack(3),
    Push(UPDATES),
    Members((RECORD, IPV6), True),
    RouteUpdates(SESSION, 41, (Entry(0, b"lesson"), Entry(65535, b""), Entry(7, b"\x00" * 300)), 1234),
    Digest(U64_MAX, 99),
    Vector(((SESSION, 5), (1, U64_MAX)), False),
    Reset(SESSION, 1000),
    RowsWanted(9, 2, b"\x00\x00\xff\x0f"),
    rows_of(3),
    Busy(9),
    TotalSum(U64_MAX, bytes(range(256)) * 2, False, 8),
    PartSums(b"\x00\x07\x3f", bytes(range(256)) * 6, True, 8),
    Loads(4, ((11, 0), (12, 65535)), ((0, 0), (65535, 2**32 - 1))),
    Facts(SESSION, 5, (Fact(11, 2, 1.5, 1, False, 0), Fact(12, 0, 0.0, 3, True, 2**32 - 1))),
    Commands((Command(3, "add", "http://10.0.0.1:8000", 1.5, "engine-1", bytes(range(32))),)),
    ReaderClaims((ReaderClaim(11, SESSION, 7, 5), ReaderClaim(12, 1, 2**32 - 1, 0))),
    SnapshotWanted(6, 11, 1, 32),
    SnapshotChunk(6, 3, False, bytes(range(24)), b"\0abcdefgh", b"\1", b"\0" * 4, b"\x10\0", b"totals!!", b"\1", b""),
    SnapshotRefused(6, True),
)

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
def records(draw: st.DrawFn) -> Record:
    name, public = draw(texts(64, least=1)), draw(texts(80))
    host, port = draw(hosts), draw(ports)
    state = draw(st.sampled_from(State))
    return Record(name, draw(identities), draw(u64), draw(u32), state, host, port, draw(u64), public)


@st.composite
def rows(draw: st.DrawFn) -> TableRows:
    backends = draw(st.lists(st.tuples(u64, u32), min_size=1, max_size=4))
    indices = draw(st.lists(st.integers(0, len(backends) - 1), max_size=6))
    count = len(indices)
    parent, tokens, token, text, ages = (
        draw(st.binary(min_size=w * count, max_size=w * count)) for w in (8, 4, 8, 8, 2)
    )
    held = b"".join(index.to_bytes(2, "little") for index in indices)
    return TableRows(
        draw(u32), draw(u32), draw(st.booleans()), tuple(backends), parent, tokens, token, text, held, ages
    )


def part_sums(groups: AbstractSet[int], reply: bool, request: int) -> PartSums:
    return PartSums(bytes(sorted(groups)), b"part sum" * (GROUP_BYTES // 8 * len(groups)), reply, request)


def many(elements: st.SearchStrategy[object], most: int = 5) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(elements, max_size=most).map(tuple)


updates = many(st.builds(Update, records(), st.just(0) | identities))
pairs = st.tuples(identities, u64)
amounts = st.floats(0, allow_infinity=False, allow_nan=False)
entries = st.builds(Entry, u16, st.binary(max_size=100))
facts = st.builds(Fact, u64, u32, amounts, st.integers(0, 3), st.booleans(), u32)
commands = st.builds(
    Command, u64, texts(16), texts(512), amounts, texts(64), st.binary(min_size=32, max_size=32)
)  # fmt: skip
standings = st.builds(ReaderClaim, u64, identities, u32, st.integers(0, 5))
columns = (st.binary(max_size=60),) * 7
buckets = st.lists(st.integers(0, BUCKETS - 1), max_size=9).map(
    lambda numbers: b"".join(number.to_bytes(2, "little") for number in numbers)
)

STRATEGIES: dict[type, st.SearchStrategy[Message]] = {
    Hello: st.builds(Hello, records(), identities),
    Echo: st.builds(Echo, records(), identities, u64),
    Challenge: st.builds(Challenge, identities),
    Ping: st.builds(Ping, u32, updates),
    Ack: st.builds(Ack, u32, updates),
    PingRequest: st.builds(PingRequest, u32, identities, hosts, ports, updates),
    Nack: st.builds(Nack, u32),
    Push: st.builds(Push, updates),
    Members: st.builds(Members, many(records()), st.booleans()),
    RouteUpdates: st.builds(RouteUpdates, identities, u64, many(entries), u16),
    Digest: st.builds(Digest, u64, u64),
    Vector: st.builds(Vector, many(pairs), st.booleans()),
    Reset: st.builds(Reset, identities, u64),
    RowsWanted: st.builds(RowsWanted, u32, u32, buckets),
    TableRows: rows(),
    Busy: st.builds(Busy, u32),
    TotalSum: st.builds(TotalSum, u64, st.sampled_from((b"", bytes(8 * GROUPS))), st.booleans(), u32),
    PartSums: st.builds(part_sums, st.frozensets(st.integers(0, GROUPS - 1), max_size=9), st.booleans(), u32),
    Loads: st.builds(Loads, u32, many(st.tuples(u64, u16)), many(st.tuples(u16, u32))),
    Facts: st.builds(Facts, identities, u32, many(facts)),
    Commands: st.builds(Commands, many(commands, 3)),
    ReaderClaims: st.builds(ReaderClaims, many(standings)),
    SnapshotWanted: st.builds(SnapshotWanted, u32, u64, u16, u32),
    SnapshotChunk: st.builds(SnapshotChunk, u32, u32, st.booleans(), st.binary(min_size=24, max_size=24), *columns),
    SnapshotRefused: st.builds(SnapshotRefused, u32, st.booleans()),
}

messages: st.SearchStrategy[Message] = st.one_of(*STRATEGIES.values())
