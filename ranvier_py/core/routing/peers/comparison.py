"""Comparing our table with a peer's, both sides: `pull` asks one peer at a time, any may ask us.

    we      TotalSum -> the peer            8 bytes; an equal one comes back, or another with sums of groups
    we      PartSums (groups that differ)   it answers with its own of the same buckets
Rule: a bucket's sum is the XOR of a number for each of its claims (`route_table.scan`); that of a group of 64 buckets,
or of the table, is the XOR of theirs: one equal number stands for equal tables, but for one chance in 2**64. Our sums
are begun when the comparison begins or later; the peer's after our question came (`OwnSums`). Bounds: 32 KiB while it
runs; SUMS_WAITING_MAX waiting questions of peers, of 32 KiB each, more are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ranvier_py.core.mesh.mesh_values import Peer
from ranvier_py.core.routing.peers.route_messages import BUCKETS, GROUPS, PartSums, TotalSum
from ranvier_py.core.routing.peers.route_outbox import RouteOutbox
from ranvier_py.core.routing.peers.table_copy import OwnSums

NO_ROOM_S = 0.05  # until a question or an answer is sent again for which there was no room
SUMS_WAITING_MAX = 8

GROUP_BUCKETS = BUCKETS // GROUPS

AnySums = TotalSum | PartSums
Buckets = npt.NDArray[np.uint16]


class Comparison:
    """The asking side of one comparison with a peer (see the module)."""

    def __init__(self, outbox: RouteOutbox, sums: OwnSums, peer: Peer, request: int, now: float) -> None:
        self.own: bytes | None = None  # our sums, once the peer was sent their total
        self.wake_at = now  # when `tick` must be called; inf while we wait for an answer
        self._outbox = outbox
        self._sums = sums
        self._peer = peer
        self._request = request
        self._begun_at = now
        self._groups = b""  # groups of buckets to ask the peer about

    def tick(self, now: float) -> None:
        """Compute our sums or send a question: at most one step of 2 ms."""
        if now < self.wake_at:
            return
        if self.own is not None:
            part = part_of(self.own, self._groups)
            self._ask(PartSums(self._groups, part, reply=True, request=self._request), now)
            return
        sums = self._sums.step(self._begun_at, now)
        if sums is not None and self._ask(TotalSum(total_of(sums), b"", reply=True, request=self._request), now):
            self.own = sums

    def receive(self, message: AnySums, now: float) -> Buckets | None:
        """Return the buckets that differ. None if the message is no answer to us, or if one more question is needed."""
        own = self.own
        if own is None or message.reply or message.request != self._request:
            return None
        if isinstance(message, PartSums):
            return differing_buckets(own, message)
        if message.total == total_of(own):
            return np.array((), np.uint16)
        self._groups = differing_groups(own, message.groups) if message.groups else b""
        if self._groups:
            self.wake_at = now
        return None

    def _ask(self, question: AnySums, now: float) -> bool:
        asked = self._outbox.send_bulk(self._peer, question, now)
        self.wake_at = inf if asked else now + NO_ROOM_S
        return asked


class SumsWanted(NamedTuple):
    """One peer's question for our sums, which must have been begun at `since` or later."""

    message: AnySums
    since: float


class SumsSource:
    """The answering side. `differs` is called with the buckets that a comparison with this peer found to differ."""

    def __init__(self, outbox: RouteOutbox, sums: OwnSums, differs: Callable[[Peer, Buckets, float], None]) -> None:
        self._outbox = outbox
        self._sums = sums
        self._differs = differs
        self._wanted: dict[int, SumsWanted] = {}  # by session
        self._no_room_until = 0.0

    @property
    def wake_at(self) -> float:
        return self._no_room_until if self._wanted else inf

    def meet(self) -> None:
        """React to a change of the live peers."""
        peers = self._outbox.peers
        self._wanted = {session: wanted for session, wanted in self._wanted.items() if session in peers}

    def receive(self, peer: Peer, message: AnySums, now: float) -> None:
        """Queue a peer's question for our sums. Its second one is answered from those of the first, or later ones."""
        if not message.reply:
            return
        if peer.session not in self._wanted and len(self._wanted) >= SUMS_WAITING_MAX:
            self._outbox.counters.sums_refused += 1
        else:
            is_second = isinstance(message, PartSums) and isfinite(self._sums.begun_at)
            self._wanted[peer.session] = SumsWanted(message, self._sums.begun_at if is_second else now)

    def tick(self, now: float) -> None:
        """Compute our sums, or send them: at most one step of 2 ms."""
        if not self._wanted or now < self._no_room_until:
            return
        value = self._sums.step(min(wanted.since for wanted in self._wanted.values()), now)
        if value is None:
            return
        for session, wanted in list(self._wanted.items()):
            if wanted.since > self._sums.begun_at:
                continue
            peer, asked = self._outbox.peers[session], wanted.message
            if not self._outbox.send_bulk(peer, answer_to(asked, value), now):
                self._no_room_until = now + NO_ROOM_S
                return
            del self._wanted[session]
            if isinstance(asked, PartSums):
                self._differs(peer, differing_buckets(value, asked), now)


def answer_to(question: AnySums, ours: bytes) -> AnySums:
    """Return the answer to a peer's question from our sums."""
    if isinstance(question, PartSums):
        return PartSums(question.groups, part_of(ours, question.groups), reply=False, request=question.request)
    total = total_of(ours)
    groups = group_sums(ours) if total != question.total else b""
    return TotalSum(total, groups, reply=False, request=question.request)


def group_sums(sums: bytes) -> bytes:
    """Return the sums of all groups, from the sums of all buckets."""
    return bytes(np.bitwise_xor.reduce(np.frombuffer(sums, "<u8").reshape(GROUPS, -1), axis=1).tobytes())


def total_of(sums: bytes) -> int:
    """Return the total of the sums of all buckets, or of all groups."""
    return int(np.bitwise_xor.reduce(np.frombuffer(sums, "<u8")))


def differing_groups(sums: bytes, groups: bytes) -> bytes:
    """Return the groups whose sums differ from the peer's `groups`, u8 each. `sums` are ours of all buckets."""
    ours, theirs = np.frombuffer(group_sums(sums), "<u8"), np.frombuffer(groups, "<u8")
    return np.flatnonzero(ours != theirs).astype(np.uint8).tobytes()


def part_of(sums: bytes, groups: bytes) -> bytes:
    """Return the sums of the buckets in these groups."""
    return np.frombuffer(sums, "<u8").reshape(GROUPS, -1)[list(groups)].tobytes()


def differing_buckets(sums: bytes, theirs: PartSums) -> Buckets:
    """Return the buckets whose sums differ from the peer's, of the groups that it sent. `sums` are ours of all."""
    groups = np.frombuffer(theirs.groups, np.uint8).astype(np.uint16)
    ours, part = (np.frombuffer(each, "<u8") for each in (part_of(sums, theirs.groups), theirs.sums))
    differing = np.flatnonzero(ours != part).astype(np.uint16)
    return groups[differing // GROUP_BUCKETS] * GROUP_BUCKETS + differing % GROUP_BUCKETS
