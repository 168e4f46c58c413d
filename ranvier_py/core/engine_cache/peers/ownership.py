"""Which nodes subscribe to an engine's event stream: a reader, which applies it for all, and a standby.

Every node ranks the live members that can subscribe by a hash of engine and member; the first two subscribe, and of the
subscribers the one that knows the stream best is the reader. A node acts on the ranking and on what others report, and
asks nobody; so in doubt three subscribe, or two apply. A node alone reads all streams. Invariant: when members and
reports are the same at all nodes and time passes, each stream has exactly one reader and one standby among those that
can (test_ownership.py). Bounds: STREAMS_MAX engines, one state for each live member and engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import NamedTuple

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.splitmix import mix

STREAMS_MAX = 4096  # as many as a node's registry holds
SUBSCRIBERS = 2  # of each stream
SETTLE_S = 0.5  # how long reports of others may be in transit
TURN_S = 4.0  # for each node ahead that does not begin: it may be an older version, or out of descriptors
STEADY_S = 3.0  # members come one by one when a cluster starts or rolls: not each is worth a handover
HANDOVER_S = 45.0  # longest time that three subscribe: a snapshot of the largest engine takes half of it
MEET_S = 3.0  # how long a node that has just started waits for others, unless `met` says that it knows them


class ReaderState(IntEnum):
    """What a member reports of itself and one stream. Of two subscribers the greater one knows the stream better."""

    NONE = 0  # does not subscribe
    UNABLE = 1  # can't subscribe: the publisher can't be reached, or the part that reads is not installed
    ESTIMATED = 2
    REPAIRING = 3
    DEGRADED = 4
    EXACT = 5

    @property
    def subscribes(self) -> bool:
        return self >= ReaderState.ESTIMATED


STATE_OF: Mapping[Level, ReaderState] = {level: ReaderState[level.name] for level in Level}


class Subscribers(NamedTuple):
    """Who subscribes to one stream, as this node sees it. Members are sessions; 0 = nobody."""

    reader: int
    standby: int
    states: Mapping[int, ReaderState]  # of all subscribers, ourselves included, in the order of the ranking


@dataclass(slots=True)
class _Stream:
    mine: ReaderState = ReaderState.NONE
    others: dict[int, ReaderState] = field(default_factory=dict)
    ranking: Sequence[int] = ()
    since: float = 0.0  # when the ranking, or whether anybody subscribes, last changed
    unread: bool = True  # nobody subscribed at the last tick
    surplus_since: float = inf  # since when I subscribe although enough before me do, too
    reads: bool = False  # I am the reader
    behind_since: float = inf  # since when I am the reader although another should be

    def of(self, member: int, me: int) -> ReaderState:
        return self.mine if member == me else self.others.get(member, ReaderState.NONE)


class Ownership:
    """Decides which streams this node subscribes to and reads. Members are sessions, engines are shared keys."""

    def __init__(self, me: int, now: float) -> None:
        self.handovers = 0  # streams that we gave or took
        self.dropped = 0  # streams beyond the bound
        self._me = me
        self._members: Sequence[int] = (me,)
        self._streams: dict[int, _Stream] = {}
        self._met_at = now + MEET_S
        self._tick_at = inf

    def backends(self, keys: Iterable[int], now: float) -> bool:
        """Set the engines that have streams. Returns whether one that we subscribe to is gone."""
        wanted = dict.fromkeys(keys)
        gone = [self._streams.pop(key) for key in list(self._streams) if key not in wanted]
        for key in wanted:
            if key in self._streams:
                continue
            if len(self._streams) >= STREAMS_MAX:
                self.dropped += 1
                continue
            self._streams[key] = stream = _Stream(since=now)
            self._rank(key, stream, now)
        self._tick_at = now
        return any(stream.mine.subscribes for stream in gone)

    def members(self, live: Iterable[int], now: float) -> None:
        """Set the live members; this node is one of them in any case."""
        there = {self._me: None, **dict.fromkeys(live)}
        members = sorted(there)
        if members == self._members:
            return
        self._members = members
        for key, stream in self._streams.items():
            stream.others = {member: state for member, state in stream.others.items() if member in there}
            self._rank(key, stream, now)
        self._tick_at = now

    def met(self, now: float) -> None:
        """Note that this node knows the others, if there are any, and their reports: it waits no longer (MEET_S)."""
        if now < self._met_at:
            self._met_at = self._tick_at = now

    def reported(self, member: int, backend: int, state: ReaderState, now: float) -> None:
        """Take what a live member reports of itself."""
        stream = self._streams.get(backend)
        if stream is None or member == self._me or stream.others.get(member, ReaderState.NONE) is state:
            return
        before = stream.others.get(member, ReaderState.NONE)
        stream.others[member] = state
        if ReaderState.UNABLE in (before, state):
            self._rank(backend, stream, now)
        self._tick_at = now

    def reached(self, backend: int, state: ReaderState, now: float) -> None:
        """Set our own state: how well we know a stream, that we can't subscribe to it, or (NONE) that we can again."""
        stream = self._streams.get(backend)
        if stream is None or stream.mine is state:
            return
        before, stream.mine = stream.mine, state
        if ReaderState.UNABLE in (before, state):
            self._rank(backend, stream, now)
        self._tick_at = now

    @property
    def wake_at(self) -> float:
        """When `tick` must be called next; any call may bring it nearer."""
        return self._tick_at

    def tick(self, now: float) -> bool:
        """Begin and end what is due. Returns whether anything changed. A subscription counts as made until `reached`
        reports another state."""
        self._tick_at, moved = inf, False
        for stream in self._streams.values():
            before = stream.mine.subscribes, stream.reads
            unread = not before[0] and not any(state.subscribes for state in stream.others.values())
            if unread is not stream.unread:
                stream.unread, stream.since = unread, now
            if before[0]:
                self._leave(stream, now)
            elif stream.mine is not ReaderState.UNABLE:
                self._begin(stream, now)
            self._choose(stream, now)
            moved |= before != (stream.mine.subscribes, stream.reads)
        return moved

    def subscribes(self, backend: int) -> bool:
        """Whether this node is to receive the stream now."""
        stream = self._streams.get(backend)
        return stream is not None and stream.mine.subscribes

    def reads(self, backend: int) -> bool:
        """Whether this node is to apply the stream for all."""
        stream = self._streams.get(backend)
        return stream is not None and stream.reads and stream.mine.subscribes

    def is_unable(self, backend: int) -> bool:
        """Whether we reported that we can't subscribe."""
        stream = self._streams.get(backend)
        return stream is not None and stream.mine is ReaderState.UNABLE

    def mine(self) -> dict[int, ReaderState]:
        """Our own state, by stream."""
        return {key: stream.mine for key, stream in self._streams.items()}

    def snapshot_sources(self, backend: int) -> list[int]:
        """Return who could give an exact snapshot, the reader last: a node applies nothing while it writes one."""
        stream = self._streams.get(backend)
        ranking = reversed(stream.ranking) if stream is not None else ()
        return [member for member in ranking if stream is not None and stream.others.get(member) is ReaderState.EXACT]

    def subscribers(self, backend: int) -> Subscribers | None:
        stream = self._streams.get(backend)
        if stream is None:
            return None
        states = {member: state for member in stream.ranking if (state := stream.of(member, self._me)).subscribes}
        reader = self._best(stream)
        return Subscribers(reader, next((member for member in states if member != reader), 0), states)

    def _rank(self, key: int, stream: _Stream, now: float) -> None:
        able = [member for member in self._members if stream.of(member, self._me) is not ReaderState.UNABLE]
        ranking = sorted(able, key=lambda member: (mix(mix(member) ^ key), member), reverse=True)
        if ranking != stream.ranking:
            stream.ranking, stream.since = ranking, now

    def _begin(self, stream: _Stream, now: float) -> None:
        place = stream.ranking.index(self._me)
        if stream.unread and len(self._members) > 1:
            # nobody subscribes: the first two begin, then one more at a time
            due = stream.since + SETTLE_S + max(0, place - SUBSCRIBERS + 1) * TURN_S
        elif stream.unread or place < SUBSCRIBERS:
            due = stream.since + (0.0 if stream.unread else STEADY_S)
        else:
            return
        if self._is_due(max(due, self._met_at), now):
            self.handovers += not stream.unread
            stream.mine, stream.unread, stream.surplus_since = ReaderState.ESTIMATED, False, inf

    def _leave(self, stream: _Stream, now: float) -> None:
        before_me = [stream.of(member, self._me) for member in stream.ranking[: stream.ranking.index(self._me)]]
        # what two subscribers before me know of the stream at least
        enough = min(sorted(before_me, reverse=True)[:SUBSCRIBERS], default=ReaderState.NONE)
        if len(before_me) < SUBSCRIBERS or not enough.subscribes:
            stream.surplus_since = inf
            return
        stream.surplus_since = min(stream.surplus_since, now)
        wait_s = HANDOVER_S if enough < stream.mine else SETTLE_S
        if self._is_due(stream.surplus_since + wait_s, now):
            stream.mine, stream.surplus_since = ReaderState.NONE, inf
            self.handovers += 1

    def _choose(self, stream: _Stream, now: float) -> None:
        """Become the reader at once; give way after SETTLE_S, when another had time to learn that it is the reader."""
        if self._best(stream) == self._me:
            stream.reads, stream.behind_since = True, inf
        elif stream.reads:
            stream.behind_since = min(stream.behind_since, now)
            if not stream.mine.subscribes or self._is_due(stream.behind_since + SETTLE_S, now):
                stream.reads, stream.behind_since = False, inf

    def _best(self, stream: _Stream) -> int:
        """Return the subscriber that knows the stream best, of equals the first in the ranking; 0 if there is none."""
        best = max(stream.ranking, key=lambda member: stream.of(member, self._me), default=0)
        return best if stream.of(best, self._me).subscribes else 0

    def _is_due(self, at: float, now: float) -> bool:
        if now < at:
            self._tick_at = min(self._tick_at, at)
        return now >= at
