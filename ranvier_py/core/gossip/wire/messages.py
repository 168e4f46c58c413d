"""Every message between nodes, as plain values. `codec` turns them into bytes and back and checks every bound.

    contact     Hello, Echo, Challenge                        two sessions prove to each other that they are live
    membership  Ping, Ack, PingRequest, Nack, Push, Members   SWIM with Lifeguard, and push-pull of the whole list
    routes      RouteUpdates, Digest, Vector, Reset           eager updates, and repair by version vectors
                TotalSum, PartSums, RowsWanted, Rows, Busy    repair of whole tables by buckets, and the first sync
                SideStateWanted, SideState                    what no row has, for who missed updates of it
    backends    Loads, Prefills, Facts, Commands              what is in flight, generations, verdicts, signed commands
    streams     ReaderClaims, SnapshotWanted,           who reads which engine's events, and snapshots of what an
                SnapshotChunk, SnapshotRefused          engine holds
    answers     AnswerKeys, AnswerDigest, Voided        stored answers that the sender has, and those that are void
                AnswerWanted, AnswerPart, AnswerRefused one of them, to whoever lacks it
    rules       RuleVerdicts                            what rules against breakers of prefixes proved to be

Numbers are unsigned unless said otherwise; u16, u32, u64 tell their width. The sender's session and the intended
receiver's are in the envelope (`seal`), not in the messages. Prompts, tokens and secrets are in none of them; of what
engines answered only AnswerPart has any.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ranvier_py.core.clients.body_mender import TrialResult


class State(IntEnum):
    """What is said of a member. At equal epoch and incarnation the greater one holds."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


class Record(NamedTuple):
    """All that is said about one member. `host` is an IP literal."""

    name: str  # at most 64 bytes of UTF-8
    session: int  # u64, not 0
    epoch: int  # u64: of two sessions with one name the higher is the later
    incarnation: int  # u32: raised by the member itself, to refute
    state: State
    host: str  # at most 45 bytes
    port: int  # u16, not 0
    schema: int  # u64: how fingerprints are made; routes of another schema are ignored
    public: str = ""  # host:port of the public port, to show; at most 80 bytes


class Update(NamedTuple):
    """One record on its way through the cluster. `accuser` is the session that suspects, for SUSPECT; else 0."""

    record: Record
    accuser: int = 0


class Hello(NamedTuple):
    """The first message to an address, padded: the answer to a stranger is never longer than the question."""

    record: Record
    challenge: int  # u64, not 0: to be echoed


class Echo(NamedTuple):
    """Proof of being live: the nonce that was asked for. `challenge` asks in turn, 0 when nothing is left to prove."""

    record: Record
    nonce: int
    challenge: int


class Challenge(NamedTuple):
    """To a session that is not known yet, whatever it sent: prove that you are live."""

    challenge: int


class Ping(NamedTuple):
    seq: int  # u32
    updates: tuple[Update, ...] = ()


class Ack(NamedTuple):
    seq: int
    updates: tuple[Update, ...] = ()


class PingRequest(NamedTuple):
    """Ask somebody else to ping `target`, in the name of the sender: indirect probe."""

    seq: int
    session: int
    host: str
    port: int
    updates: tuple[Update, ...] = ()


class Nack(NamedTuple):
    """The relay is well, but the target has not answered it in time."""

    seq: int


class Push(NamedTuple):
    """Updates for their own sake: the gossip tick, an accusation, a leave."""

    updates: tuple[Update, ...]


class Members(NamedTuple):
    """The whole list, in one or several parts. `reply` asks for the receiver's in return."""

    records: tuple[Record, ...]
    reply: bool


class Entry(NamedTuple):
    """One route update in a batch. `age_s` is the age of its evidence when sent: durations travel, never times of
    day."""

    age_s: int  # u16, whole seconds, rounded up: nothing gets younger on its way
    route_update: bytes  # of `route_updates.encode`: opaque to the log. Empty: it expired, only its number counts


class RouteUpdates(NamedTuple):
    """Consecutive route updates of one origin: numbers after + 1 … after + len(entries)."""

    origin: int  # session that learned them; 0 = the sender, as in most: 8 bytes of 140 less
    after: int  # u64
    entries: tuple[Entry, ...]
    held_ms: int = 0  # u16: how long its senders held the newest of these, so far; 65535 = so long or longer


class Digest(NamedTuple):
    """Hash of the sender's version vector: equal ones end the exchange after 8 bytes."""

    vector_hash: int  # u64
    schema: int  # u64


class Vector(NamedTuple):
    """What the sender has: for each origin the number up to which it has everything."""

    entries: tuple[tuple[int, int], ...]  # (session, number)
    reply: bool  # the receiver's vector is wanted too


class Reset(NamedTuple):
    """The log was trimmed: route updates of `origin` up to `base` are not to be had as route updates. Whole tables will
    tell."""

    origin: int
    base: int


class TotalSum(NamedTuple):
    """All bucket sums of the sender's table in one: equal ones end a comparison after 8 bytes.

    With `reply` a question; `request` is chosen by the asker and comes back with the answer. Who has another total
    answers with the sums of its groups, too.
    """

    total: int  # u64
    groups: bytes  # empty, or 8 bytes for each group of buckets, little-endian
    reply: bool
    request: int  # u32


class PartSums(NamedTuple):
    """Bucket sums of the groups that were found to differ. `reply` asks for the other's of the same groups."""

    groups: bytes  # u8 each, ascending
    sums: bytes  # of each group those of its buckets, 8 bytes each, little-endian
    reply: bool
    request: int  # u32: of the TotalSum before


class RowsWanted(NamedTuple):
    """Send rows: those of these buckets, or all of them when empty. `cursor` resumes an interrupted sync."""

    request: int  # u32, chosen by the asker
    cursor: int  # u32: index of the first chunk wanted
    buckets: bytes  # u16 each, little-endian; empty = whole table


class TableRows(NamedTuple):
    """One chunk of a table, in columns, parents before children. All columns have one element for each claim."""

    request: int
    chunk: int  # u32: chunks count from 0
    last: bool
    backends: tuple[tuple[int, int], ...]  # (key, generation): what `backend` indexes
    parent: bytes  # u64 each: fingerprint of the row above, or 0
    tokens: bytes  # u32 each
    token: bytes  # u64 each: token fingerprint or 0
    text: bytes  # u64 each: text fingerprint or 0
    backend: bytes  # u16 each
    age_s: bytes  # u16 each


class Busy(NamedTuple):
    """No sync now: too many at once. Ask another."""

    request: int


class SideStateWanted(NamedTuple):
    """Send what no row of a table has: owners of responses and sessions, checkpoints of hybrid models."""

    request: int  # u32, chosen by the asker


class SideState(NamedTuple):
    """A part of it, as route updates that have no number and that nobody passes on."""

    request: int
    last: bool
    entries: tuple[Entry, ...]  # of age 0: what they say has ages of its own


class Loads(NamedTuple):
    """What the sender has in flight. Backends that are not listed: none. Numbered, so that an older one is ignored."""

    seq: int  # u32
    loads: tuple[tuple[int, int], ...]  # (backend key, requests in flight u16)
    waits: tuple[tuple[int, int], ...]  # (requests without a first token u16, tokens to be computed before it u32)
    """Of each of `loads`, in their order."""


class SharedPrefill(NamedTuple):
    """A long prompt that an engine computes for the sender."""

    number: int  # u32: the sender's own
    backend: int  # key, u64
    generation: int  # u8: low bits
    fingerprints: bytes  # u64 each, little-endian


class Prefills(NamedTuple):
    """What of these began and ended since the sender's last message."""

    begun: tuple[SharedPrefill, ...]
    ended: bytes  # u32 each: numbers


class Fact(NamedTuple):
    """What one observer knows of one backend."""

    backend: int  # key, u64
    generation: int  # u32: counts the processes of this backend that the cluster has seen
    started_at: float  # as the engine tells, seconds; 0 when it tells nothing
    verdict: int  # u8: 0 unknown, 1 healthy, 2 unhealthy, 3 circuit open
    draining: bool
    drain_clock: int  # u32: the greater one decides about draining


class Facts(NamedTuple):
    """Facts of one observer, which may be another than the sender. Numbered per observer."""

    observer: int
    seq: int
    facts: tuple[Fact, ...]


class Command(NamedTuple):
    """An operator's order, signed with the admin key: taken only where the configuration allows it."""

    clock: int  # u64: per url the greatest decides
    signed_ms: int  # u64: the time of day when it was signed, perhaps again
    verb: str  # add, remove
    url: str  # at most 512 bytes
    weight: float
    name: str
    signature: bytes  # 32 bytes, HMAC-SHA256


class Commands(NamedTuple):
    commands: tuple[Command, ...]


class ReaderClaim(NamedTuple):
    """Whether one member subscribes to the events of one engine, and how well it knows them, by its own report."""

    backend: int  # key, u64
    member: int  # u64, not 0: whose report this is
    clock: int  # u32: the greater one of a member and backend is the later
    state: int  # u8: readers.ownership.ReaderState


class ReaderClaims(NamedTuple):
    """Of any members: they are passed on."""

    claims: tuple[ReaderClaim, ...]


class SnapshotWanted(NamedTuple):
    """Send a snapshot of what an engine holds. With a later cursor: so much has come, go on."""

    request: int  # u32, chosen by the asker
    backend: int  # key, u64
    rank: int  # u16: of a data-parallel engine; 0 else
    cursor: int  # u32: chunks before this one have come


class SnapshotChunk(NamedTuple):
    """One chunk of a snapshot, in columns (engine_cache.snapshot.BlockRows)."""

    request: int
    chunk: int  # u32: chunks count from 0
    last: bool
    head: bytes  # 24: seq u64 and digest u64 of the message it stands after, group u32, block tokens u32
    names: bytes
    kinds: bytes
    above: bytes
    widths: bytes
    totals: bytes
    copies: bytes
    extras: bytes


class SnapshotRefused(NamedTuple):
    """No snapshot: it is not known exactly here, or it broke; `busy`: others are under way, ask again."""

    request: int
    busy: bool


class AnswerKeys(NamedTuple):
    """What changed since the message before among the answers that the sender has; or all of them, if `whole`."""

    version: int  # u32: counts these messages
    whole: bool
    added: bytes  # u64 each: keyed hash of a key
    ages: bytes  # u16 each, in seconds, rounded up: of the answers behind `added`
    removed: bytes  # u64 each


class AnswerDigest(NamedTuple):
    """The number of the sender's last AnswerKeys, and the digest of what it knows to be void."""

    version: int  # u32
    voided: int  # u64
    wanted: bool  # the receiver's whole AnswerKeys


class AnswerWanted(NamedTuple):
    """Send the answer of this name, if it is not older than that."""

    request: int  # u32, chosen by the asker
    name: bytes  # 32: keyed hash of a key, of which AnswerKeys has the first 8 bytes
    age_max_ms: int  # u32


class AnswerPart(NamedTuple):
    """A part of an answer, as `answer_frames` writes it."""

    request: int
    part: int  # u16: parts count from 0
    parts: int  # u16
    data: bytes


class AnswerRefused(NamedTuple):
    """It is not here, or too old; `busy`: too many were asked for."""

    request: int
    busy: bool


class VoidedAnswers(NamedTuple):
    """Answers of this model and tenant are void that are older than this, in a node's own words or another's."""

    number: int  # u64, not 0: names it at all nodes; the greater one of a subject holds
    older_ms: int  # u32, when it was sent
    model: str  # at most 1024 bytes; empty: any
    tenant: bytes  # 16, or empty: any
    signature: bytes  # 32: HMAC-SHA256 under the admin key; or empty


class Voided(NamedTuple):
    invalidations: tuple[VoidedAnswers, ...]


class RuleVerdicts(NamedTuple):
    """Of trials that are decided, each with the name of the node that decided it. `rules`: digest of those it has."""

    rules: int  # u64
    verdicts: tuple[TrialResult, ...]


Message = (
    Hello | Echo | Challenge
    | Ping | Ack | PingRequest | Nack | Push | Members
    | RouteUpdates | Digest | Vector | Reset | TotalSum | PartSums | RowsWanted | TableRows | Busy
    | SideStateWanted | SideState
    | Loads | Prefills | Facts | Commands
    | ReaderClaims | SnapshotWanted | SnapshotChunk | SnapshotRefused
    | AnswerKeys | AnswerDigest | AnswerWanted | AnswerPart | AnswerRefused | Voided
    | RuleVerdicts
)  # fmt: skip
