"""Messages of every kind: one of each to keep, and strategies for any of them within the bounds."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from hypothesis import strategies as st

from ranvier_py.core.clients.body_mender import OFF, PROVED, TrialResult
from ranvier_py.core.gossip.wire import messages as m
from ranvier_py.core.gossip.wire.columns import BUCKETS, GROUP_BYTES, GROUPS

U64_MAX = 2**64 - 1
SESSION = 0x1122334455667788

RECORD = m.Record("router-1", SESSION, 1_700_000_000_000, 3, m.State.ALIVE, "10.1.2.3", 7946, 99, "10.1.2.3:8080")
LONGEST = m.Record(
    "n" * 64, U64_MAX, U64_MAX, 2**32 - 1, m.State.LEFT, "fe80:1111:2222:3333:4444:5555:6666:7777", 65535,
    U64_MAX, "p" * 80,
)  # fmt: skip
IPV6 = RECORD._replace(name="knoten-ä", host="fd00::1", state=m.State.SUSPECT, public="")
UPDATES = (m.Update(RECORD), m.Update(IPV6, 77), m.Update(LONGEST))


def rows_of(count: int, backends: int = 2) -> m.TableRows:
    """A chunk of that many claims."""
    word = b"\x01\x02\x03\x04\x05\x06\x07\x08" * count
    indices = b"".join((claim % backends).to_bytes(2, "little") for claim in range(count))
    held = tuple((11 + index, index) for index in range(backends))
    return m.TableRows(5, 6, True, held, word, word[: 4 * count], word, word, indices, word[: 2 * count])


EXAMPLES: tuple[m.Message, ...] = (
    m.Hello(RECORD, 0x0102030405060708),
    m.Echo(IPV6, 1, 0),
    m.Challenge(U64_MAX),
    m.Ping(4_000_000_000, UPDATES),
    m.Ack(1),
    m.PingRequest(2, SESSION, "10.9.8.7", 7946, UPDATES[:1]),
    m.Nack(3),
    m.Push(UPDATES),
    m.Members((RECORD, IPV6), True),
    m.RouteUpdates(SESSION, 41, (m.Entry(0, b"lesson"), m.Entry(65535, b""), m.Entry(7, b"\x00" * 300)), 1234),
    m.Digest(U64_MAX, 99),
    m.Vector(((SESSION, 5), (1, U64_MAX)), False),
    m.Reset(SESSION, 1000),
    m.RowsWanted(9, 2, b"\x00\x00\xff\x0f", True),
    rows_of(3),
    m.Busy(9),
    m.TotalSum(U64_MAX, bytes(range(256)) * 2, False, 8),
    m.PartSums(b"\x00\x07\x3f", bytes(range(256)) * 6, True, 8),
    m.SideState(9, 3, True, (m.Entry(0, b"update"),)),
    m.Loads(4, ((11, 0, 0, 0), (12, 65535, 65535, 2**32 - 1))),
    m.Facts((m.Fact(11, 2, 1.5, 1, False, 0), m.Fact(12, 0, 0.0, 3, True, 2**32 - 1, 65535, 2**64 - 1, 7, 30))),
    m.Commands((m.Command(3, 1_795_000_000_000, "add", "http://10.0.0.1:8000", 1.5, "engine-1", bytes(range(32))),)),
    m.ReaderClaims((m.ReaderClaim(11, SESSION, 7, 5), m.ReaderClaim(12, 1, 2**32 - 1, 0))),
    m.Prefills((m.SharedPrefill(1, 11, 2, bytes(range(16))), m.SharedPrefill(2**32 - 1, 1, 255, bytes(8))), bytes(8)),
    m.SnapshotWanted(6, 11, 1, 32),
    m.SnapshotChunk(6, 3, False, bytes(range(24)), b"\0abcdefgh", b"\1", b"\0" * 4, b"\x10\0", b"totals!!", b"\1", b""),
    m.SnapshotRefused(6, True),
    m.AnswerKeys(7, False, bytes(range(16)), b"\1\0\xff\xff", bytes(8)),
    m.AnswerDigest(7, U64_MAX, True),
    m.AnswerWanted(8, bytes(range(32)), 2**32 - 1),
    m.AnswerPart(8, 0, 2, b"answer"),
    m.AnswerRefused(8, False),
    m.Voided((m.VoidedAnswers(9, 60_000, "model", bytes(16), bytes(32)), m.VoidedAnswers(U64_MAX, 0, "", b"", b""))),
    m.RuleVerdicts(U64_MAX, (TrialResult("tools-by-name", "codex", "Qwen/Qwen3-8B", "off", "it helps nothing", "n1"),)),
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
def records(draw: st.DrawFn) -> m.Record:
    name, public = draw(texts(64, least=1)), draw(texts(80))
    host, port = draw(hosts), draw(ports)
    state = draw(st.sampled_from(m.State))
    return m.Record(name, draw(identities), draw(u64), draw(u32), state, host, port, draw(u64), public)


@st.composite
def rows(draw: st.DrawFn) -> m.TableRows:
    backends = draw(st.lists(st.tuples(u64, u32), min_size=1, max_size=4))
    indices = draw(st.lists(st.integers(0, len(backends) - 1), max_size=6))
    count = len(indices)
    parent, tokens, token, text, ages = (
        draw(st.binary(min_size=w * count, max_size=w * count)) for w in (8, 4, 8, 8, 2)
    )
    held = b"".join(index.to_bytes(2, "little") for index in indices)
    return m.TableRows(
        draw(u32), draw(u32), draw(st.booleans()), tuple(backends), parent, tokens, token, text, held, ages
    )


def answer_keys(version: int, whole: bool, added: bytes, removed: bytes) -> m.AnswerKeys:
    return m.AnswerKeys(version, whole, added, b"\5\0" * (len(added) // 8), removed)


def part_sums(groups: AbstractSet[int], reply: bool, request: int) -> m.PartSums:
    return m.PartSums(bytes(sorted(groups)), b"part sum" * (GROUP_BYTES // 8 * len(groups)), reply, request)


def many(elements: st.SearchStrategy[object], most: int = 5) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(elements, max_size=most).map(tuple)


updates = many(st.builds(m.Update, records(), st.just(0) | identities))
pairs = st.tuples(identities, u64)
amounts = st.floats(0, allow_infinity=False, allow_nan=False)
entries = st.builds(m.Entry, u16, st.binary(max_size=100))
facts = st.builds(m.Fact, u64, u32, amounts, st.integers(0, 3), st.booleans(), u32, u16, u64, u64, u16)
commands = st.builds(
    m.Command, u64, u64, texts(16), texts(512), amounts, texts(64), st.binary(min_size=32, max_size=32)
)  # fmt: skip
standings = st.builds(m.ReaderClaim, u64, identities, u32, st.integers(0, 5))
columns = (st.binary(max_size=60),) * 7
digests = st.lists(u64, max_size=5).map(lambda numbers: b"".join(number.to_bytes(8, "little") for number in numbers))
voided = st.builds(
    m.VoidedAnswers, identities, u32, texts(1024), st.sampled_from((b"", bytes(16))), st.sampled_from((b"", bytes(32)))
)
numbers = st.lists(u32, max_size=5).map(lambda several: b"".join(number.to_bytes(4, "little") for number in several))
prefills = st.builds(m.SharedPrefill, u32, u64, st.integers(0, 255), digests.filter(bool))
verdicts = st.builds(
    TrialResult, texts(60), texts(32), texts(1024), st.sampled_from((PROVED, OFF)), texts(255), texts(64)
)
buckets = st.lists(st.integers(0, BUCKETS - 1), max_size=9).map(
    lambda numbers: b"".join(number.to_bytes(2, "little") for number in numbers)
)

STRATEGIES: dict[type, st.SearchStrategy[m.Message]] = {
    m.Hello: st.builds(m.Hello, records(), identities),
    m.Echo: st.builds(m.Echo, records(), identities, u64),
    m.Challenge: st.builds(m.Challenge, identities),
    m.Ping: st.builds(m.Ping, u32, updates),
    m.Ack: st.builds(m.Ack, u32, updates),
    m.PingRequest: st.builds(m.PingRequest, u32, identities, hosts, ports, updates),
    m.Nack: st.builds(m.Nack, u32),
    m.Push: st.builds(m.Push, updates),
    m.Members: st.builds(m.Members, many(records()), st.booleans()),
    m.RouteUpdates: st.builds(m.RouteUpdates, identities, u64, many(entries), u16),
    m.Digest: st.builds(m.Digest, u64, u64),
    m.Vector: st.builds(m.Vector, many(pairs), st.booleans()),
    m.Reset: st.builds(m.Reset, identities, u64),
    m.RowsWanted: st.builds(m.RowsWanted, u32, u32, buckets, st.booleans()),
    m.TableRows: rows(),
    m.Busy: st.builds(m.Busy, u32),
    m.SideState: st.builds(m.SideState, u32, u32, st.booleans(), many(entries)),
    m.TotalSum: st.builds(m.TotalSum, u64, st.sampled_from((b"", bytes(8 * GROUPS))), st.booleans(), u32),
    m.PartSums: st.builds(part_sums, st.frozensets(st.integers(0, GROUPS - 1), max_size=9), st.booleans(), u32),
    m.Loads: st.builds(m.Loads, u32, many(st.tuples(u64, u16, u16, u32))),
    m.Prefills: st.builds(m.Prefills, many(prefills, 3), numbers),
    m.Facts: st.builds(m.Facts, many(facts)),
    m.Commands: st.builds(m.Commands, many(commands, 3)),
    m.ReaderClaims: st.builds(m.ReaderClaims, many(standings)),
    m.SnapshotWanted: st.builds(m.SnapshotWanted, u32, u64, u16, u32),
    m.SnapshotChunk: st.builds(m.SnapshotChunk, u32, u32, st.booleans(), st.binary(min_size=24, max_size=24), *columns),
    m.SnapshotRefused: st.builds(m.SnapshotRefused, u32, st.booleans()),
    m.AnswerKeys: st.builds(answer_keys, u32, st.booleans(), digests, digests),
    m.AnswerDigest: st.builds(m.AnswerDigest, u32, u64, st.booleans()),
    m.AnswerWanted: st.builds(m.AnswerWanted, u32, st.binary(min_size=32, max_size=32), u32),
    m.AnswerPart: st.builds(m.AnswerPart, u32, u16, u16, st.binary(max_size=60)),
    m.AnswerRefused: st.builds(m.AnswerRefused, u32, st.booleans()),
    m.Voided: st.builds(m.Voided, many(voided, 3)),
    m.RuleVerdicts: st.builds(m.RuleVerdicts, u64, many(verdicts, 3)),
}

messages: st.SearchStrategy[m.Message] = st.one_of(*STRATEGIES.values())
