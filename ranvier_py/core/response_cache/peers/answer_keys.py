"""Which stored answers each node has: our own keys, as peers are sent them, and the keys of peers.

A key is named by a hash under a secret of all nodes: 8 bytes of it advertise an answer, 32 ask for it, and show nobody
else anything of a prompt. Changes go to all peers every TICK_S, numbered; who finds a number missing, or joins, is sent
the whole list. Each key carries its answer's age, so peers forget it in time without a message. Rules: keys yield to
all else; they are sent only while routes leave room, and merged while they wait. Bounds: ADVERTISED_MAX own keys, the
oldest goes; KNOWN_MAX keys of all peers, beyond which new ones are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from math import ceil, inf
from struct import pack, unpack
from typing import NamedTuple

from ranvier_py.core.mesh.budget import MESSAGE_BYTES, Window
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import COLUMN, FLAG, U32, column_field
from ranvier_py.core.mesh.wire.frame import bad
from ranvier_py.core.response_cache.peers.answer_values import PeerAnswerCounters, PeerAnswerSettings

ADVERTISED_MAX = 16_384  # keys of one node, in one message: 160 KiB
KNOWN_MAX = 131_072  # eight peers that advertise all they may; 100 bytes each
TICK_S = 0.05
NO_ROOM_S = 0.25  # until the next try when there was no room
KEY_BYTES = 10  # what a key takes with its age
CHANGES_MIN = 64  # changes that one message may have at least, however many peers it goes to
AGE_MAX_S = 65_535
VERSION_MASK = (1 << 32) - 1


class AnswerKeys(NamedTuple):
    """The answers that the sender stored and dropped since its last message; all that it has, if `whole`."""

    version: int  # u32: counts these messages
    whole: bool
    added: bytes  # u64 each: keyed hash of a key
    ages: bytes  # u16 each, in seconds, rounded up: the ages of the answers in `added`
    removed: bytes  # u64 each


def check_answer_keys(keys: AnswerKeys) -> None:
    """Raise BadFrame unless each added answer has its age."""
    if 4 * len(keys.ages) != len(keys.added):
        bad("columns of different length")


KEYS = column_field(8, ADVERTISED_MAX)
KEYS_KIND = Kind("answers", 80, AnswerKeys, (U32, FLAG, KEYS, COLUMN, KEYS), check_answer_keys)


class OwnAnswer(NamedTuple):
    """An answer of ours that is advertised."""

    key: bytes
    name: bytes
    stored_at: float


@dataclass(slots=True)
class KnownKeys:
    """The keys of one peer, with the time when each answer was stored. `version` None: its list is not known."""

    version: int | None = None
    stored_at: dict[int, float] = field(default_factory=dict)


def digest_of(name: bytes) -> int:
    """Return the part of a name that is advertised: u64."""
    return int.from_bytes(name[:8], "little")


class AnswerKeyGossip:
    """Advertises our keys and keeps those of peers. `room` returns the bytes of the budget left beside routes now."""

    def __init__(
        self,
        secret: bytes,
        settings: PeerAnswerSettings,
        counters: PeerAnswerCounters,
        outbox: list[Outgoing],
        room: Callable[[float], int],
    ) -> None:
        self.version = 0  # of the last message
        self._secret = blake2b(secret, digest_size=32, person=b"answer keys").digest()
        self._counters = counters
        self._outbox = outbox
        self._room = room
        self._window = Window(settings.keys_bytes_per_s)
        self._own: dict[int, OwnAnswer] = {}  # by digest, the oldest first
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._has_gap = False  # more was removed than a message holds: all peers need the whole list
        self._owed: dict[int, None] = {}  # sessions to be sent the whole list
        self._peers: dict[int, Peer] = {}
        self._known: dict[int, KnownKeys] = {}
        self._next_at = 0.0

    # --- our own ----------------------------------------------------------------------------------------------------

    def name_of(self, key: bytes) -> bytes:
        """Return the name of a key between nodes: 32 bytes."""
        return blake2b(key, digest_size=32, key=self._secret).digest()

    def add(self, key: bytes, stored_at: float) -> None:
        name = self.name_of(key)
        digest = digest_of(name)
        self._own.pop(digest, None)
        self._own[digest] = OwnAnswer(key, name, stored_at)
        self._removed.pop(digest, None)
        self._added[digest] = None
        if len(self._own) > ADVERTISED_MAX:
            self._counters.keys_dropped += 1
            self._remove(next(iter(self._own)))
        self._counters.advertised = len(self._own)

    def drop(self, key: bytes) -> None:
        digest = digest_of(self.name_of(key))
        if digest in self._own:
            self._remove(digest)
            self._counters.advertised = len(self._own)

    def find(self, name: bytes) -> bytes | None:
        """Return the key of our answer of this name, if there is one."""
        own = self._own.get(digest_of(name))
        return own.key if own is not None and own.name == name else None

    def _remove(self, digest: int) -> None:
        del self._own[digest]
        self._added.pop(digest, None)
        self._removed[digest] = None
        if len(self._removed) > ADVERTISED_MAX:
            self._removed.clear()
            self._added.clear()
            self._has_gap = True

    # --- those of peers ---------------------------------------------------------------------------------------------

    def holders(self, name: bytes, oldest: float) -> Iterator[Peer]:
        """Yield the peers that have the answer of this name, stored at `oldest` or later."""
        digest = digest_of(name)
        for session, known in self._known.items():
            if known.stored_at.get(digest, -inf) >= oldest and session in self._peers:
                yield self._peers[session]

    def lacks(self, session: int, name: bytes) -> None:
        """Note that this peer does not have the answer any more."""
        known = self._known.get(session)
        if known is not None and known.stored_at.pop(digest_of(name), None) is not None:
            self._counters.known -= 1

    def receive(self, peer: Peer, message: AnswerKeys, now: float) -> bool:
        """Take a peer's keys. Returns False if a message between this and the last one is missing."""
        known = self._known.setdefault(peer.session, KnownKeys())
        if message.whole:
            self._counters.known -= len(known.stored_at)
            known.stored_at = {}
        elif known.version is None or message.version != (known.version + 1) & VERSION_MASK:
            return known.version == message.version
        known.version = message.version
        stored_at = known.stored_at
        before = len(stored_at)
        for digest in digests_in(message.removed):
            stored_at.pop(digest, None)
        room = min(ADVERTISED_MAX - len(stored_at), KNOWN_MAX - self._counters.known - len(stored_at) + before)
        added = list(zip(digests_in(message.added), unpack(f"<{len(message.ages) // 2}H", message.ages), strict=True))
        self._counters.keys_dropped += max(0, len(added) - room)
        stored_at.update((digest, now - age_s) for digest, age_s in added[: max(0, room)])
        self._counters.known += len(stored_at) - before
        return True

    def is_behind(self, session: int, version: int) -> bool:
        """Whether keys are missing here of a peer whose last message has this number."""
        known = self._known.get(session)
        return known is None or known.version != version

    # --- with whom, and when ----------------------------------------------------------------------------------------

    def peers(self, live: Sequence[Peer]) -> None:
        """Set the live peers. A newcomer is sent the whole list."""
        before, self._peers = self._peers, {peer.session: peer for peer in live}
        self._owed = {session: None for session in self._owed if session in self._peers}
        if self._own or self.version:
            self._owed.update((session, None) for session in self._peers if session not in before)
        for session in [session for session in self._known if session not in self._peers]:
            self._counters.known -= len(self._known.pop(session).stored_at)

    def owe(self, session: int) -> None:
        """Send this peer the whole list when there is room: it asked for it."""
        if session in self._peers:
            self._owed[session] = None

    @property
    def wake_at(self) -> float:
        waits = self._peers and (self._added or self._removed or self._owed or self._has_gap)
        return self._next_at if waits else inf

    def tick(self, now: float) -> None:
        """Send what waits, if there is room."""
        if now < self.wake_at:
            return
        self._next_at = now + TICK_S
        if self._has_gap:
            self._has_gap = False
            self.version = (self.version + 1) & VERSION_MASK
            self._owed.update(dict.fromkeys(self._peers))
        if self._added or self._removed:
            count = max(CHANGES_MIN, self._window.per_s // len(self._peers) // KEY_BYTES)
            removed = list(islice(self._removed, count))
            added = list(islice(self._added, count - len(removed)))
            size = MESSAGE_BYTES + KEY_BYTES * (len(added) + len(removed))
            if not self._has_room(len(self._peers) * size, now):
                return
            for digest in removed:
                del self._removed[digest]
            for digest in added:
                del self._added[digest]
            self.version = (self.version + 1) & VERSION_MASK
            changes = self._message(added, removed, whole=False, now=now)
            for peer in self._peers.values():
                self._send(peer, changes, now)
        while self._owed and self._has_room(1, now):
            peer = self._peers[self._owed.popitem()[0]]
            self._counters.key_lists += 1
            self._send(peer, self._message(self._own, (), whole=True, now=now), now)

    def expire(self, oldest: float) -> None:
        """Forget answers stored at `oldest` or before: too old to be given. Peers do so by themselves."""
        for digest in [digest for digest, own in self._own.items() if own.stored_at <= oldest]:
            del self._own[digest]
            self._added.pop(digest, None)
        for known in self._known.values():
            kept = {digest: at for digest, at in known.stored_at.items() if at > oldest}
            self._counters.known -= len(known.stored_at) - len(kept)
            known.stored_at = kept
        self._counters.advertised = len(self._own)

    def _has_room(self, size: int, now: float) -> bool:
        """Whether there is room now. A message above a second's budget has room after a quiet second."""
        room = min(self._window.room(now), self._room(now))
        if size > room and room < self._window.per_s:
            self._counters.keys_held_back += 1
            self._next_at = now + NO_ROOM_S
            return False
        return True

    def _message(self, added: Iterable[int], removed: Sequence[int], *, whole: bool, now: float) -> AnswerKeys:
        chosen = [digest for digest in added if digest in self._own]
        ages = [min(AGE_MAX_S, ceil(now - self._own[digest].stored_at)) for digest in chosen]
        return AnswerKeys(
            self.version,
            whole,
            pack(f"<{len(chosen)}Q", *chosen),
            pack(f"<{len(ages)}H", *ages),
            pack(f"<{len(removed)}Q", *removed),
        )

    def _send(self, peer: Peer, message: AnswerKeys, now: float) -> None:
        self._window.spend(MESSAGE_BYTES + len(message.added) + len(message.ages) + len(message.removed), now)
        self._outbox.append(Outgoing(peer.address, peer.session, Plane.ANSWERS, message))


def digests_in(column: bytes) -> tuple[int, ...]:
    return unpack(f"<{len(column) // 8}Q", column)
