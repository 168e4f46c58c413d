"""Messages to bytes and back: every kind, every bound, and whatever else may arrive."""

from __future__ import annotations

import tracemalloc
from hashlib import blake2b
from itertools import product
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.access.revocations import ROWS_PER_MESSAGE, Revocation, Revoked
from ranvier_py.core.clients.body_mender import TrialResult
from ranvier_py.core.clients.rule_verdicts import VERDICTS_MAX, RuleVerdicts
from ranvier_py.core.engine_cache.peers.reader_claims import READER_CLAIMS_MAX, ReaderClaim, ReaderClaims
from ranvier_py.core.mesh.mesh_values import FRAME_BYTES_MAX, Plane
from ranvier_py.core.mesh.transfer import TransferPart
from ranvier_py.core.mesh.wire import messages as m
from ranvier_py.core.mesh.wire.codec import BODY_BYTES_MIN, HELLO_BODY_BYTES_MIN
from ranvier_py.core.mesh.wire.frame import SPOKEN, BadFrame, Reason
from ranvier_py.core.mesh.wire.records import ROWS_MAX, pack_record, size_of, unpack_row
from ranvier_py.core.mesh.wire.seal import BODY_BYTES_MAX
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.response_cache.peers.invalidation_gossip import Voided
from ranvier_py.core.routing.backend_state.facts import FACTS_MAX, Fact, Facts
from ranvier_py.core.routing.backend_state.loads import Loads
from ranvier_py.core.routing.backend_state.prefills import (
    PREFILL_FINGERPRINTS_MAX,
    PREFILLS_MAX,
    Prefills,
    SharedPrefill,
)
from ranvier_py.core.routing.backend_state.signed_commands import (
    COMMANDS_PER_MESSAGE,
    Command,
    CommandOptions,
    Commands,
)
from ranvier_py.core.routing.peers import route_messages as r
from ranvier_py.core.routing.peers.route_updates import ROUTE_UPDATE_BYTES_MAX, UPDATES_MAX
from tests.core.mesh.wire.wire_samples import (
    EXAMPLES,
    IPV6,
    LONGEST,
    RECORD,
    SESSION,
    STRATEGIES,
    WRITTEN,
    messages,
)
from tests.examples import examples

KINDS = list(CODEC.topic_of)
LAYOUTS = {kind.make: kind.fields for kind in CODEC.kinds}


ADDED = Command(1, 1, "add", "u", 1.0, "", bytes(32))


def refuses(kind: int, body: bytes) -> BadFrame:
    with pytest.raises(BadFrame) as caught:
        CODEC.decode(kind, body)
    return caught.value


def fields(message: m.Message) -> tuple[int, list[Any]]:
    """Kind and fields of an encoded message, to be changed."""
    kind, body = CODEC.encode(message)
    return kind, msgpack.unpackb(body)


def changed(message: m.Message, index: int, value: object) -> tuple[int, bytes]:
    kind, values = fields(message)
    values[index] = value
    return kind, msgpack.packb(values)


# --- the protocol -----------------------------------------------------------------------------------------------------


def test_every_message_has_a_kind_and_all_its_members_travel() -> None:
    for _, _, make, layout, *_ in CODEC.kinds:
        assert len(layout) == len(make._fields)
    assert {type(example) for example in EXAMPLES} == set(STRATEGIES) == set(CODEC.number_of)


def test_what_is_written_otherwise_is_another_version_of_the_protocol() -> None:
    digests = {}
    for version in SPOKEN:
        known = [example for example in EXAMPLES if CODEC.speaks(example, version)]
        written = [bytes((kind,)) + body for kind, body in (CODEC.encode(example, version) for example in known)]
        digests[version] = blake2b(b"".join(written), digest_size=8).hexdigest()
    assert digests == WRITTEN, "nodes of one version would read each other's messages as others"


@pytest.mark.parametrize("make", STRATEGIES, ids=lambda make: make.__name__)
def test_a_message_comes_back_as_it_was(make: type) -> None:
    @settings(max_examples=examples(40))
    @given(STRATEGIES[make])
    def round_trip(message: m.Message) -> None:
        kind, body = CODEC.encode(message)
        assert CODEC.decode(kind, body) == message
        assert type(CODEC.decode(kind, body)) is make

    round_trip()


def test_a_message_with_a_field_missing_is_refused() -> None:
    """But for those that a later version added."""
    for message in EXAMPLES:
        layout = LAYOUTS[type(message)]
        kind, values = fields(message)
        required = sum(not field.since for field in layout)
        assert refuses(kind, msgpack.packb(values[: required - 1])).reason is Reason.BODY
        CODEC.decode(kind, msgpack.packb(values[:required]))


def test_a_kind_that_does_not_exist_is_refused() -> None:
    assert refuses(200, b"\x91\x01").reason is Reason.BODY


def test_hosts_arrive_in_canonical_spelling() -> None:
    kind, body = CODEC.encode(m.Hello(IPV6._replace(host="FD00:0:0::1"), 1))
    arrived = CODEC.decode(kind, body)
    assert isinstance(arrived, m.Hello)
    assert arrived.record.host == "fd00::1"


# --- bytes of strangers -----------------------------------------------------------------------------------------------


def one_input(data: bytes) -> None:
    """The first byte is the kind, the rest a body: a message that is written as it was read, or BadFrame."""
    try:
        message = CODEC.decode(data[0], data[1:])
    except BadFrame:
        return
    kind, body = CODEC.encode(message)
    assert (kind, CODEC.decode(kind, body)) == (data[0], message)


@settings(max_examples=examples(400))
@given(st.sampled_from([*KINDS, 0, 255]), st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_bad_frame(kind: int, body: bytes) -> None:
    one_input(bytes((kind,)) + body)
    one_input(bytes((kind, 0x90 | len(body) % 16)) + body)


@settings(max_examples=examples(200))
@given(st.data())
def test_a_message_with_some_bytes_changed_raises_nothing_but_bad_frame(data: st.DataObject) -> None:
    kind, body = CODEC.encode(data.draw(messages))
    spoilt = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        spoilt[data.draw(st.integers(0, min(len(spoilt), 300) - 1))] = data.draw(st.integers(0, 255))
    one_input(bytes((kind,)) + spoilt)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@settings(max_examples=examples(150))
@given(st.sampled_from(KINDS), st.lists(values, max_size=15))
def test_fields_of_any_type_raise_nothing_but_bad_frame(kind: int, something: list[object]) -> None:
    one_input(bytes((kind,)) + msgpack.packb(something))


def test_a_message_cut_off_at_any_byte_is_refused() -> None:
    for message in (*EXAMPLES[:13], *EXAMPLES[14:]):  # all but Sums, which is long
        kind, body = CODEC.encode(message)
        for end in range(len(body)):
            refuses(kind, body[:end])


def test_a_message_with_bytes_behind_it_is_refused() -> None:
    for message in EXAMPLES:
        kind, body = CODEC.encode(message)
        refuses(kind, body + b"\x00")


def test_every_field_is_checked_for_its_type() -> None:
    """Each field of each kind gets a value of every other type. Only what has the right one may pass."""
    strange: tuple[object, ...] = (None, True, -1, 2**64 - 1, 1.5, "text", b"\xffseven!", [1], {"a": 1}, [])
    passed = []
    for message in EXAMPLES:
        make, layout = type(message), LAYOUTS[type(message)]
        for index, value in product(range(len(layout)), strange):
            if make._fields[index] == "release" and value == "text":
                continue  # the only text that is one on the wire
            kind, body = changed(message, index, value)
            try:
                CODEC.decode(kind, body)
            except BadFrame:
                continue
            passed.append((make.__name__, make._fields[index], value))
    odd = {case[:2] for case in passed if case[2] is not True and case[2] != 2**64 - 1}
    assert odd == {("TransferPart", "data"), ("Wanted", "subject")}, "which features read"
    flags = {"reply", "last", "busy", "whole", "wanted"}
    assert {name for make, name, value in passed if value is True} == flags
    wide = {(make, name) for make, name, value in passed if value == 2**64 - 1}
    assert wide == {
        ("Hello", "challenge"), ("Echo", "nonce"), ("Echo", "challenge"), ("Challenge", "challenge"),
        ("PingRequest", "session"), ("RouteUpdates", "origin"), ("RouteUpdates", "after"), ("Digest", "vector_hash"),
        ("Digest", "schema"), ("TotalSum", "total"), ("Reset", "origin"), ("Reset", "base"),
        ("BackendSet", "digest"), ("AnswerDigest", "voided"), ("RuleVerdicts", "rules"), ("LimitAnswer", "refused"),
    }  # fmt: skip


NESTED = [
    b"\x91" * 100_000,  # an array in an array in …
    b"\x9f" * 100_000,
    b"\xdd\xff\xff\xff\xff" * 20_000,  # each claims to hold four thousand million
    b"\x91" + b"\xdc\xff\xff" * 30_000,
    b"\x92\xdd\x00\x0f\xff\xff" + b"\x90" * 100_000,
    b"\x91\xdf\xff\xff\xff\xff",
    b"\x91" + b"\x81\x01" * 50_000,
    b"\x91\x80",
    b"\x9f" + b"\x80" * 15,
    b"\x91\xc6\xff\xff\xff\xff",  # a string of 4 GiB that did not arrive
    b"\x91\xdb\xff\xff\xff\xff",
    b"\x91\xc9\xff\xff\xff\xff\x01",
    b"\x92\xc4\xff" + b"\x00" * 100,
    b"\x91\xc1",
    b"\x91\xd4\x01\x00",  # an extension
    b"\x91\xc7\x01\x01\x00",
    b"",
    b"\x90",
    b"\xc0",
]


@pytest.mark.parametrize("make", [m.Ping, r.RouteUpdates, TransferPart, Commands])
def test_no_bytes_make_the_reader_recurse_or_allocate_for_what_did_not_arrive(make: type) -> None:
    """memberlist#357: a header that promises much made the reader allocate it."""
    for body in NESTED:
        tracemalloc.start()
        refuses(CODEC.number_of[make], body)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= 4 * len(body) + 8 * 1024, (body[:8], len(body), peak)


def filled(kind: int, row: bytes, *before: object, after: tuple[object, ...] = ()) -> tuple[int, bytes]:
    return kind, msgpack.packb((*before, row, *after))


def test_memory_for_what_is_well_formed_is_bounded_by_its_objects() -> None:
    """Columns are copied once; rows cost the tuples and numbers that they are, up to 16 x as much, of bounded count."""
    vector = r.Vector(tuple((2**40 + index, 2**41 + index) for index in range(r.VECTOR_ENTRIES_MAX)), False)
    smallest = tuple(
        m.Record(str(number), number, 1000, 1000, m.State.ALIVE, "1.1.1.1", 1, 0) for number in range(1, ROWS_MAX + 1)
    )
    for message, times, more in (
        (TransferPart(1, 2, 3, False, bytes(200_000)), 3, 0),
        (vector, 12, 0),
        (m.Members(smallest, True), 16, 0),
        (r.RouteUpdates(1, 2, (r.Entry(300, b"\x00" * 40),) * UPDATES_MAX), 7, 0),
        (r.RouteUpdates(1, 2, (r.Entry(300, b""),) * UPDATES_MAX), 4, 1024 * 1024),
    ):
        kind, body = CODEC.encode(message)
        unpack_row.cache_clear()  # or nothing would be allocated
        tracemalloc.start()
        CODEC.decode(kind, body)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= times * len(body) + more, (type(message), peak / len(body))


def test_a_body_beyond_the_largest_frame_is_refused_unread() -> None:
    assert refuses(CODEC.number_of[TransferPart], b"\x91\xc6" + bytes(FRAME_BYTES_MAX)).reason is Reason.SIZE


# --- bounds -----------------------------------------------------------------------------------------------------------


BEYOND: list[tuple[m.Message, str]] = [
    (m.Hello(RECORD._replace(name="n" * 65), 1), "a name of 65 bytes"),
    (m.Hello(RECORD._replace(name="ä" * 33), 1), "a name of 66 bytes"),
    (m.Hello(RECORD._replace(name=""), 1), "no name"),
    (m.Hello(RECORD._replace(name="a\nb"), 1), "a line end in a name"),
    (m.Hello(RECORD._replace(public="p" * 81), 1), "a public address of 81 bytes"),
    (m.Hello(RECORD._replace(host="router.example"), 1), "a host name"),
    (m.Hello(RECORD._replace(host="1.2.3"), 1), "half an address"),
    (m.Hello(RECORD._replace(host="1.2.3.256"), 1), "no address"),
    (m.Hello(RECORD._replace(host="0.0.0.0"), 1), "nowhere"),
    (m.Hello(RECORD._replace(host="::"), 1), "nowhere"),
    (m.Hello(RECORD._replace(host="fe80::1%eth0"), 1), "an address that means something else elsewhere"),
    (m.Hello(RECORD._replace(port=0), 1), "port 0"),
    (m.Hello(RECORD._replace(port=65536), 1), "port 65536"),
    (m.Hello(RECORD._replace(session=0), 1), "session 0"),
    (m.Hello(RECORD._replace(epoch=2**64), 1), "an epoch of 65 bits"),
    (m.Hello(RECORD._replace(incarnation=2**32), 1), "an incarnation of 33 bits"),
    (r.Digest(2**64, 1), "a hash of 65 bits"),
    (r.Vector(((1, 2),) * (r.VECTOR_ENTRIES_MAX + 1), False), "a long vector"),
    (r.RouteUpdates(1, 2, (r.Entry(0, bytes(ROUTE_UPDATE_BYTES_MAX + 1)),)), "a long route update"),
    (r.RouteUpdates(1, 2, (r.Entry(65536, b"x"),)), "an old route update"),
    (r.RouteUpdates(1, 2, (r.Entry(0, b"x"),) * (UPDATES_MAX + 1)), "many route updates"),
    (Loads(1, ((1, 65536, 0, 0),)), "a great load"),
    (Loads(1, ((1, 1, 65536, 1),)), "many waiting"),
    (Loads(1, ((1, 1, 1, 1),) * (r.BACKENDS_MAX + 1)), "many loads"),
    (Prefills((SharedPrefill(1, 1, 1, bytes(8)),) * (PREFILLS_MAX + 1), b""), "many prefills"),
    (Prefills((SharedPrefill(1, 1, 1, bytes(8 * PREFILL_FINGERPRINTS_MAX + 8)),), b""), "a prefill of many parts"),
    (Prefills((SharedPrefill(1, 1, 1, b""),), b""), "a prefill of nothing"),
    (Facts((Fact(1, 1, 1.0, 1, True, 1),) * (r.BACKENDS_MAX + 1)), "many facts"),
    (ReaderClaims((ReaderClaim(1, 1, 1, 5),) * (READER_CLAIMS_MAX + 1)), "many reader claims"),
    (ReaderClaims((ReaderClaim(1, 1, 2**32, 5),)), "a clock of 33 bits"),
    (Commands((ADDED,), (CommandOptions(tls_name="t" * 254),)), "a long name of a certificate"),
    (Commands((Command(1, 1, "add", "u" * 513, 1.0, "", bytes(32)),)), "a long URL"),
    (Commands((Command(1, 1, "a" * 17, "u", 1.0, "", bytes(32)),)), "a long verb"),
    (Commands((Command(1, 1, "add", "u", 1.0, "n" * 129, bytes(32)),)), "a long name of a backend"),
    (Commands((Command(1, 1, "add", "u", 1.0, "", bytes(31)),)), "a short signature"),
    (Commands((Command(1, 1, "add", "u", 1.0, "", bytes(32)),) * (COMMANDS_PER_MESSAGE + 1)), "many commands"),
    (Revoked((Revocation(1, 1, 2, "ann", bytes(32)),)), "a state that is none"),
    (Revoked((Revocation(1, 1, 1, "a" * 65, bytes(32)),)), "a long id of a key"),
    (Revoked((Revocation(1, 1, 1, "a", bytes(31)),)), "a short signature of a revocation"),
    (Revoked((Revocation(1, 1, 1, "a", bytes(32)),) * (ROWS_PER_MESSAGE + 1)), "many revocations"),
    (RuleVerdicts(1, (TrialResult("r", "c", "m" * 1025, "off", "", ""),)), "a long name of a model"),
    (RuleVerdicts(1, (TrialResult("r", "c", "m", "measuring", "", ""),)), "a trial that is not decided"),
    (RuleVerdicts(1, (TrialResult("r", "c", "m", "off", "", ""),) * (VERDICTS_MAX + 1)), "many verdicts"),
]  # fmt: skip


@pytest.mark.parametrize("message", [case[0] for case in BEYOND], ids=[case[1] for case in BEYOND])
def test_we_send_nothing_that_would_be_refused(message: m.Message) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        CODEC.encode(message)


def row(**change: Any) -> bytes:
    """A record's row with some bytes put over it: {offset: bytes}."""
    made = bytearray(pack_record(RECORD))
    for at, data in change.items():
        start = int(at[2:])
        made[start : start + len(data)] = data
    return bytes(made)


BAD_ROWS = {
    "session 0": row(at0=bytes(8)),
    "unknown flag": row(at20=b"\x10"),
    "accuser 0": row(at20=b"\x08") + bytes(8),
    "accuser cut off": row(at20=b"\x08") + bytes(7),
    "no name": row(at21=b"\x00").replace(b"router-1", b""),
    "name too long": row(at21=b"\x41").replace(b"router-1", b"n" * 65),
    "public too long": row(at22=b"\x51").replace(b"10.1.2.3:8080", b"p" * 81),
    "port 0": row(at23=b"\x00\x00"),
    "host 0.0.0.0": row(at33=bytes(4)),
    "name that is not UTF-8": row(at37=b"\xff"),
    "name with a line end": row(at37=b"\n"),
}


@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_record_beyond_its_bounds_is_refused(bad: bytes) -> None:
    assert refuses(*filled(CODEC.number_of[m.Push], bad)).reason is Reason.BODY
    assert refuses(*filled(CODEC.number_of[m.Members], bad, after=(True,))).reason is Reason.BODY


def test_the_rows_that_are_spoilt_in_these_tests_are_good_ones() -> None:
    assert CODEC.decode(*filled(CODEC.number_of[m.Push], row())) == m.Push((m.Update(RECORD),))
    assert CODEC.decode(*changed(Commands(()), 0, bytes(60))) == Commands((Command(0, 0, "", "", 0.0, "", bytes(32)),))
    verdict, its_row = TrialResult("", "", "", "off", "", ""), bytes(4) + b"\x03" + bytes(2) + b"off"
    assert CODEC.decode(*changed(RuleVerdicts(1, ()), 1, its_row)) == RuleVerdicts(1, (verdict,))


def test_a_greeting_has_exactly_one_record_and_nobody_accuses_in_it() -> None:
    one = pack_record(RECORD)
    for record in (b"", one + one, pack_record(RECORD, 5)):
        refuses(*filled(CODEC.number_of[m.Hello], record, after=(1,)))
    refuses(*filled(CODEC.number_of[m.Members], pack_record(RECORD, 5), after=(True,)))


BAD_FIELDS: dict[str, tuple[int, bytes]] = {
    "challenge 0": changed(m.Challenge(1), 0, 0),
    "nonce 0": changed(m.Echo(RECORD, 1, 0), 1, 0),
    "seq of 33 bits": changed(m.Ping(1), 0, 2**32),
    "relay to port 0": changed(m.PingRequest(1, 2, "1.2.3.4", 5), 3, 0),
    "relay to session 0": changed(m.PingRequest(1, 2, "1.2.3.4", 5), 1, 0),
    "relay to half an address": changed(m.PingRequest(1, 2, "1.2.3.4", 5), 2, b"\x01\x02"),
    "half a pair": changed(r.Vector((), False), 0, bytes(15)),
    "long vector": changed(r.Vector((), False), 0, bytes(16 * (r.VECTOR_ENTRIES_MAX + 1))),
    "sums of half the groups": changed(r.TotalSum(1, b"", True, 7), 1, bytes(8 * r.GROUPS // 2)),
    "group that does not exist": changed(r.PartSums(b"\x01", bytes(r.GROUP_BYTES), True, 7), 0, bytes((r.GROUPS,))),
    "one group twice": changed(r.PartSums(b"\x01\x02", bytes(2 * r.GROUP_BYTES), True, 7), 0, b"\x01\x01"),
    "sums of fewer groups": changed(r.PartSums(b"\x01", bytes(r.GROUP_BYTES), True, 7), 1, bytes(r.GROUP_BYTES - 8)),
    "sums of more groups": changed(r.PartSums(b"\x01", bytes(r.GROUP_BYTES), True, 7), 1, bytes(r.GROUP_BYTES + 8)),
    "route updates cut off": changed(r.RouteUpdates(1, 2, ()), 2, b"\x01\x00\x00\x00\x05\x00four"),
    "route updates with bytes behind": changed(r.RouteUpdates(1, 2, ()), 2, b"\x01\x00\x00\x00\x03\x00four"),
    "route updates without their lengths": changed(r.RouteUpdates(1, 2, ()), 2, b"\xff\x0f"),
    "no route updates": changed(r.RouteUpdates(1, 2, ()), 2, b""),
    "long route update": changed(r.RouteUpdates(1, 2, ()), 2, b"\x01\x00\x00\x00\xff\xff" + bytes(65535)),
    "many route updates": changed(r.RouteUpdates(1, 2, ()), 2, b"\x01\x10" + bytes(4 * 4097)),
    "held for ever": changed(r.RouteUpdates(1, 2, ()), 3, 65536),
    "half a load": changed(Loads(1, ()), 1, bytes(15)),
    "verdict 4": changed(Facts(()), 0, bytes(20) + b"\x04" + bytes(25)),
    "neither draining nor not": changed(Facts(()), 0, bytes(21) + b"\x02" + bytes(24)),
    "started at no time": changed(Facts(()), 0, bytes(12) + b"\x00\x00\x00\x00\x00\x00\xf8\x7f" + bytes(26)),
    "command cut off": changed(Commands(()), 0, bytes(59)),
    "command without its verb": changed(Commands(()), 0, bytes(56) + b"\x03" + bytes(3)),
    "command of infinite weight": changed(Commands(()), 0, bytes(22) + b"\xf0\x7f" + bytes(36)),
    "command of negative weight": changed(Commands(()), 0, bytes(22) + b"\xf0\xbf" + bytes(36)),
    "many commands": changed(Commands(()), 0, bytes(60 * (COMMANDS_PER_MESSAGE + 1))),
    "commands that are no bytes": changed(Commands(()), 0, 7),
    "options of no command": changed(Commands(()), 1, bytes(3)),
    "a third kind of host": changed(Commands((ADDED,), (CommandOptions(),)), 1, b"\x03\0\0"),
    "an option that is neither": changed(Commands((ADDED,), (CommandOptions(),)), 1, b"\0\x02\0"),
    "a long name of a certificate": changed(Commands((ADDED,), (CommandOptions(),)), 1, b"\0\0\xfe" + b"t" * 254),
    "invalidation cut off": changed(Voided(()), 0, b"\x01" + bytes(14)),
    "invalidation without its model": changed(Voided(()), 0, b"\x01" + bytes(11) + b"\x05\x00" + bytes(2) + b"four"),
    "invalidation of half a tenant": changed(Voided(()), 0, b"\x01" + bytes(13) + b"\x08\x00" + bytes(8)),
    "invalidation without a number": changed(Voided(()), 0, bytes(16)),
    "many invalidations": changed(Voided(()), 0, (b"\x01" + bytes(15)) * 129),
    "invalidations that are no bytes": changed(Voided(()), 0, "x"),
    "prefill cut off": changed(Prefills((), b""), 0, bytes(14)),
    "prefill of nothing": changed(Prefills((), b""), 0, bytes(15)),
    "prefill of half a fingerprint": changed(Prefills((), b""), 0, bytes(13) + b"\x04\x00four"),
    "prefill without its fingerprint": changed(Prefills((), b""), 0, bytes(13) + b"\x08\x00four"),
    "many prefills": changed(Prefills((), b""), 0, (bytes(13) + b"\x08\x00" + bytes(8)) * (PREFILLS_MAX + 1)),
    "ends that are no numbers": changed(Prefills((), b""), 1, bytes(7)),
    "verdict of no state": changed(RuleVerdicts(1, ()), 1, bytes(4) + b"\x04" + bytes(2) + b"open"),
    "verdict without its state": changed(RuleVerdicts(1, ()), 1, bytes(4) + b"\x03" + bytes(2) + b"of"),
    "verdict cut off": changed(RuleVerdicts(1, ()), 1, bytes(6)),
    "verdict with a line end": changed(RuleVerdicts(1, ()), 1, b"\x01" + bytes(3) + b"\x03" + bytes(2) + b"\noff"),
    "many verdicts": changed(RuleVerdicts(1, ()), 1, (bytes(4) + b"\x03" + bytes(2) + b"off") * 129),
}


@pytest.mark.parametrize("frame", BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_field_beyond_its_bounds_is_refused(frame: tuple[int, bytes]) -> None:
    assert refuses(*frame).reason is Reason.BODY


# --- what fits --------------------------------------------------------------------------------------------------------


def test_the_largest_of_everything_fits_in_its_frame() -> None:
    """cortex#4327: when the state outgrew a limit it was never sent. Each bound is tried from within, too."""
    stream = BODY_BYTES_MAX[Plane.BULK]
    largest: tuple[m.Message, ...] = (
        r.PartSums(bytes(range(r.GROUPS)), bytes(8 * r.BUCKETS), True, 7),
        r.Vector(((2**64 - 1, 2**64 - 1),) * r.VECTOR_ENTRIES_MAX, True),
        Facts((Fact(1, 1, 1.0, 1, True, 1),) * FACTS_MAX),
        Loads(1, ((1, 1, 1, 1),) * r.BACKENDS_MAX),
        Commands(
            (Command(1, 1, "a" * 16, "u" * 512, 1.0, "n" * 128, bytes(32)),) * COMMANDS_PER_MESSAGE,
            (CommandOptions(2, True, "t" * 253),) * COMMANDS_PER_MESSAGE,
        ),
        r.RouteUpdates(1, 2, (r.Entry(0, bytes(50)),) * UPDATES_MAX),
        m.Members((LONGEST,) * ROWS_MAX, True),
        Prefills((SharedPrefill(1, 1, 1, bytes(8 * PREFILL_FINGERPRINTS_MAX)),) * PREFILLS_MAX, bytes(4 * UPDATES_MAX)),
        RuleVerdicts(1, (TrialResult("r" * 60, "c" * 32, "m" * 1024, "off", "w" * 255, "n" * 64),) * VERDICTS_MAX),
    )
    for message in largest:
        kind, body = CODEC.encode(message)
        assert len(body) <= stream, type(message)
        assert CODEC.decode(kind, body) == message
    longest = CODEC.encode(r.RouteUpdates(1, 2, (r.Entry(0, bytes(ROUTE_UPDATE_BYTES_MAX)),)))
    assert CODEC.decode(*longest) == r.RouteUpdates(1, 2, (r.Entry(0, bytes(ROUTE_UPDATE_BYTES_MAX)),))


def test_no_echo_is_longer_than_a_hello_and_no_challenge_than_any_message() -> None:
    """So the answer to a stranger is never longer than what it sent."""
    assert len(CODEC.encode(m.Echo(LONGEST, 2**64 - 1, 2**64 - 1))[1]) <= HELLO_BODY_BYTES_MIN
    for record in (RECORD, LONGEST):
        assert len(CODEC.encode(m.Hello(record, 1))[1]) - HELLO_BODY_BYTES_MIN in (0, 1)
    shortest = m.Record("x", 1, 0, 0, m.State.ALIVE, "1.1.1.1", 1, 0)
    assert len(CODEC.encode(m.Hello(shortest, 1))[1]) - HELLO_BODY_BYTES_MIN in (0, 1)
    assert len(CODEC.encode(m.Challenge(2**64 - 1))[1]) == BODY_BYTES_MIN
    assert all(len(CODEC.encode(example)[1]) >= BODY_BYTES_MIN for example in EXAMPLES)
    for seq in (0, 200, 60_000, 2**32 - 1):
        for message in (m.Ping(seq), m.Challenge(seq or 1)):
            kind, body = CODEC.encode(message)
            assert len(body) >= BODY_BYTES_MIN
            assert CODEC.decode(kind, body) == message


def test_the_size_of_an_update_is_exact() -> None:
    for record, accuser in product((RECORD, IPV6, LONGEST), (0, SESSION)):
        update = m.Update(record, accuser)
        _, body = CODEC.encode(m.Push((update,)))
        assert len(msgpack.unpackb(body)[0]) == size_of(update)


def test_more_updates_than_a_byte_can_count_all_arrive() -> None:
    """memberlist#239: the count of parts was one byte. Here rows are not counted at all."""
    many = tuple(
        m.Update(RECORD._replace(name=f"router-{number}", session=number)) for number in range(1, ROWS_MAX + 1)
    )
    assert CODEC.decode(*CODEC.encode(m.Push(many))) == m.Push(many)
    members = m.Members(tuple(update.record for update in many), False)
    assert CODEC.decode(*CODEC.encode(members)) == members


def test_a_row_that_was_read_before_is_read_the_same_again() -> None:
    """Rows are remembered by their bytes: one bit more is another row."""
    first = CODEC.decode(*CODEC.encode(m.Push((m.Update(RECORD, 5),))))
    assert CODEC.decode(*CODEC.encode(m.Push((m.Update(RECORD, 6),)))) == m.Push((m.Update(RECORD, 6),))
    assert CODEC.decode(*CODEC.encode(m.Push((m.Update(RECORD._replace(epoch=1), 5),)))) != first
    assert CODEC.decode(*CODEC.encode(m.Push((m.Update(RECORD, 5),)))) == first
