"""Every message between nodes, as plain values. `codec` turns them into bytes and back and checks every bound.

    contact     Hello, Echo, Challenge                        two sessions prove to each other that they are live
    membership  Ping, Ack, PingRequest, Nack, Push, Members   SWIM with Lifeguard, and push-pull of the whole list
    routes      RouteUpdates, Digest, Vector, Reset           eager updates, and repair by version vectors
                TotalSum, PartSums, RowsWanted, Rows, Busy    repair of whole tables by buckets, and the first sync
                SideState                                     what no row has, for peers that missed updates of it
    backends    Loads, Prefills, Facts, Commands              what is in flight, generations, verdicts, signed commands
    streams     ReaderClaims, SnapshotWanted,           who reads which engine's events, and snapshots of what an
                SnapshotChunk, SnapshotRefused          engine holds
    answers     AnswerKeys, AnswerDigest, Voided        stored answers that the sender has, and those that are void
                AnswerWanted, AnswerPart, AnswerRefused one of them, for a peer that lacks it
    rules       RuleVerdicts                            what rules against breakers of prefixes proved to be

Numbers are unsigned unless stated otherwise; u16, u32 and u64 name their width. The sessions of the sender and of the
intended receiver are in the envelope (`seal`), not in the messages. No message has prompts, tokens or secrets; of the
answers of engines, only AnswerPart has any.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ranvier_py.core.clients.body_mender import TrialResult


class State(IntEnum):
    """The state of a member in a record. At equal epoch and incarnation the greater one holds."""

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
    public: str = ""  # host:port of the public port, for display; at most 80 bytes


class Update(NamedTuple):
    """One record on its way through the cluster. `accuser` is the session that suspects a SUSPECT; otherwise 0."""

    record: Record
    accuser: int = 0


class Hello(NamedTuple):
    """The first message to an address, padded: the answer to a stranger is never longer than the question."""

    record: Record
    challenge: int  # u64, not 0: to be echoed


class Echo(NamedTuple):
    """Proof that the sender is live: `nonce` repeats a challenge. `challenge` asks in turn; 0 asks for no proof."""

    record: Record
    nonce: int
    challenge: int


class Challenge(NamedTuple):
    """Asks a session that is not known yet, whatever it sent, to prove that it is live."""

    challenge: int


class Ping(NamedTuple):
    seq: int  # u32
    updates: tuple[Update, ...] = ()


class Ack(NamedTuple):
    seq: int
    updates: tuple[Update, ...] = ()


class PingRequest(NamedTuple):
    """Asks the receiver to ping this session on behalf of the sender: an indirect probe."""

    seq: int
    session: int
    host: str
    port: int
    updates: tuple[Update, ...] = ()


class Nack(NamedTuple):
    """The relay is well, but the target has not answered it in time."""

    seq: int


class Push(NamedTuple):
    """Updates alone: of the gossip tick, an accusation, a correction or a leave."""

    updates: tuple[Update, ...]


class Members(NamedTuple):
    """The sender's whole list, in one or several parts. `reply` asks for the receiver's list in return."""

    records: tuple[Record, ...]
    reply: bool


class Entry(NamedTuple):
    """One route update in a batch. `age_s` is the age of its evidence when sent: durations travel, never times of
    day."""

    age_s: int  # u16, whole seconds, rounded up: nothing gets younger on its way
    route_update: bytes  # as `route_updates` encodes it; opaque to the log. Empty: it expired, only its number counts


class RouteUpdates(NamedTuple):
    """Consecutive route updates of one origin: numbers after + 1 … after + len(entries)."""

    origin: int  # session that learned them; 0 = the sender, as in most messages: saves 8 bytes of 140
    after: int  # u64
    entries: tuple[Entry, ...]
    held_ms: int = 0  # u16: how long the newest of these was held by its senders so far; 65535 = that long or longer


class Digest(NamedTuple):
    """Hash of the sender's version vector: if it equals the receiver's, the exchange ends after these 8 bytes."""

    vector_hash: int  # u64
    schema: int  # u64


class Vector(NamedTuple):
    """The sender's version vector: for each origin the number up to which it has all updates."""

    entries: tuple[tuple[int, int], ...]  # (session, number)
    reply: bool  # asks for the receiver's vector in return


class Reset(NamedTuple):
    """Route updates of `origin` up to `base` can't be had from the sender's log: compare tables."""

    origin: int
    base: int


class TotalSum(NamedTuple):
    """All bucket sums of the sender's table in one number: if both are equal, a comparison ends after 8 bytes.

    With `reply` it is a question; `request` is chosen by the asker and comes back with the answer. A receiver with
    another total answers with the sums of its groups, too.
    """

    total: int  # u64
    groups: bytes  # empty, or 8 bytes for each group of buckets, little-endian
    reply: bool
    request: int  # u32


class PartSums(NamedTuple):
    """Bucket sums of the groups that were found to differ. `reply` asks for the receiver's sums of the same groups."""

    groups: bytes  # u8 each, ascending
    sums: bytes  # for each group the sums of its buckets, 8 bytes each, little-endian
    reply: bool
    request: int  # u32: of the TotalSum before


class RowsWanted(NamedTuple):
    """Asks for the rows of these buckets, or of all when empty, or for side state, in chunks. A later `cursor` lets
    more chunks come; the same one again asks for them again."""

    request: int  # u32, chosen by the asker
    cursor: int  # u32: index of the first chunk wanted
    buckets: bytes  # u16 each, little-endian; empty = whole table
    side: bool = False  # asks for what no row has: owners of responses and sessions, checkpoints of hybrid models


class TableRows(NamedTuple):
    """One chunk of a table, in columns, parents before children. Each column has one element for each claim."""

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
    """Refuses RowsWanted: too many transfers run, or the sender has not joined itself. Ask another peer."""

    request: int


class SideState(NamedTuple):
    """One chunk of side state, as route updates that have no number and are not passed on."""

    request: int
    chunk: int  # u32: chunks count from 0
    last: bool
    entries: tuple[Entry, ...]  # their age is 0: the entries in an update have ages of their own


class Loads(NamedTuple):
    """What the sender has in flight; nothing at backends that are not listed. An older `seq` is ignored."""

    seq: int  # u32
    loads: tuple[tuple[int, int, int, int], ...]
    """(backend key, requests in flight u16, of these without a first token u16, tokens to be computed before it u32)"""


class SharedPrefill(NamedTuple):
    """A long prompt that an engine computes for the sender."""

    number: int  # u32: the sender's number of it
    backend: int  # key, u64
    generation: int  # u8: low bits of the shared generation
    fingerprints: bytes  # u64 each, little-endian


class Prefills(NamedTuple):
    """The prefills that began and ended since the sender's last message."""

    begun: tuple[SharedPrefill, ...]
    ended: bytes  # u32 each: numbers


class Fact(NamedTuple):
    """What one observer knows of one backend."""

    backend: int  # key, u64
    generation: int  # u32: counts the processes of this backend that the cluster has seen
    started_at: float  # as the engine reports it, seconds; 0 when it reports nothing
    verdict: int  # u8: 0 unknown, 1 healthy, 2 unhealthy, 3 circuit open
    draining: bool
    drain_clock: int  # u32: the greater one decides about draining
    idle_s: int = 0  # u16, rounded up: seconds since any node, as far as the observer knows, had it in its registry
    identity: int = 0  # u64, as `totals` and `read_s`: the marks that the observer itself read last; 0: none
    totals: int = 0  # u64
    read_s: int = 0  # u16, rounded up: seconds since it read them


class Facts(NamedTuple):
    """What the sender knows. Empty: asks for all that the receiver knows."""

    facts: tuple[Fact, ...]


class Command(NamedTuple):
    """An operator's command, signed with the admin key: taken only where the configuration allows it."""

    clock: int  # u64: of commands about one URL the greatest decides
    signed_ms: int  # u64: the time of day when it was signed, perhaps again
    verb: str  # add, remove
    url: str  # at most 512 bytes
    weight: float
    name: str
    signature: bytes  # 32 bytes, HMAC-SHA256


class Commands(NamedTuple):
    commands: tuple[Command, ...]


class ReaderClaim(NamedTuple):
    """One member's own report of whether it subscribes to the events of one engine, and how well it knows them."""

    backend: int  # key, u64
    member: int  # session of the reporter: u64, not 0
    clock: int  # u32: of two reports of a member about one backend the greater is the later
    state: int  # u8: readers.ownership.ReaderState


class ReaderClaims(NamedTuple):
    """Reports of any members, as they are passed on."""

    claims: tuple[ReaderClaim, ...]


class SnapshotWanted(NamedTuple):
    """Asks for a snapshot of what an engine holds. A later cursor confirms the chunks before it and lets more come."""

    request: int  # u32, chosen by the asker
    backend: int  # key, u64
    rank: int  # u16: of a data-parallel engine; otherwise 0
    cursor: int  # u32: chunks before this one have come


class SnapshotChunk(NamedTuple):
    """One chunk of a snapshot, in columns (engine_cache.snapshot.BlockRows)."""

    request: int
    chunk: int  # u32: chunks count from 0
    last: bool
    head: bytes  # 24: seq u64 and digest u64 of the event message it includes last, group u32, block tokens u32
    names: bytes
    kinds: bytes
    above: bytes
    widths: bytes
    totals: bytes
    copies: bytes
    extras: bytes


class SnapshotRefused(NamedTuple):
    """Refuses a snapshot: the sender does not know it exactly, or it broke; `busy`: others are under way, ask again."""

    request: int
    busy: bool


class AnswerKeys(NamedTuple):
    """The answers that the sender stored and dropped since its last message; all that it has, if `whole`."""

    version: int  # u32: counts these messages
    whole: bool
    added: bytes  # u64 each: keyed hash of a key
    ages: bytes  # u16 each, in seconds, rounded up: the ages of the answers in `added`
    removed: bytes  # u64 each


class AnswerDigest(NamedTuple):
    """The number of the sender's last AnswerKeys, and the digest of what it knows to be void."""

    version: int  # u32
    voided: int  # u64
    wanted: bool  # asks for the receiver's whole AnswerKeys


class AnswerWanted(NamedTuple):
    """Asks for the answer of this name, if it is not older than `age_max_ms`."""

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
    """Refuses AnswerWanted: the answer is not here, or too old; `busy`: too many were asked for."""

    request: int
    busy: bool


class VoidedAnswers(NamedTuple):
    """An invalidation, new or passed on: answers of this model and tenant that are older than `older_ms` are void."""

    number: int  # u64, not 0: who gave it, and a count; of one scope the last of each giver holds
    older_ms: int  # u32, counted from when this message was sent
    model: str  # at most 1024 bytes; empty: any
    tenant: bytes  # 16, or empty: any
    signature: bytes  # 32: HMAC-SHA256 under the admin key; or empty


class Voided(NamedTuple):
    invalidations: tuple[VoidedAnswers, ...]


class RuleVerdicts(NamedTuple):
    """Verdicts of decided trials, each with the name of the node that decided it."""

    rules: int  # u64: digest of the sender's rules
    verdicts: tuple[TrialResult, ...]


Message = (
    Hello | Echo | Challenge
    | Ping | Ack | PingRequest | Nack | Push | Members
    | RouteUpdates | Digest | Vector | Reset | TotalSum | PartSums | RowsWanted | TableRows | Busy
    | SideState
    | Loads | Prefills | Facts | Commands
    | ReaderClaims | SnapshotWanted | SnapshotChunk | SnapshotRefused
    | AnswerKeys | AnswerDigest | AnswerWanted | AnswerPart | AnswerRefused | Voided
    | RuleVerdicts
)  # fmt: skip
