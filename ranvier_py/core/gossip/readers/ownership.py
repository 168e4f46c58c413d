"""Which nodes subscribe to an engine's event stream: a reader, which applies it for all, and a standby.

All nodes rank the live members for each engine by a hash of both (highest random weight), leaving out those that say
they can't. The first two subscribe. Of those who subscribe, the one that knows the stream best is the reader, of equals
the first; the standby knows as much and says nothing of it, until it is the best. What a node does follows from that
and from what the others say of themselves (`ReaderState`); nobody is asked, so in doubt three subscribe, or two apply.

    nobody subscribes          the first two begin after SETTLE_S, each one behind them a turn later
    I am one of the first two  I begin after STEADY_S without a change, and get a snapshot meanwhile
    I subscribe, and two       I stop when both know it as well as I do, or after HANDOVER_S
      before me do, too
    I can't                    I say so, and others move up

Rules: alone, a node reads all. A member is what membership calls alive; a death moves the standby up at once.
Invariant: when members and reports are the same at all nodes and time passes, each stream has exactly one reader and
one standby among those that can. Bounds: STREAMS_MAX engines, one state for each live member and engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import NamedTuple

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.prompts.fingerprint import mix

STREAMS_MAX = 4096  # as many as a node's registry holds
SUBSCRIBERS = 2  # of each stream
SETTLE_S = 0.5  # reports of others are on their way as long
TURN_S = 4.0  # for each one ahead who does not begin: it may be older, or at its limit of descriptors
STEADY_S = 3.0  # members come one by one when a cluster starts or rolls: not each is worth a handover
HANDOVER_S = 45.0  # longest time that three subscribe: a copy of the largest engine takes half of it
MEET_S = 3.0  # a node that has just started waits so long for others, if there may be others


class ReaderState(IntEnum):
    """What a member says of itself and one stream. Of those who subscribe, the greater one knows it better."""

    NONE = 0  # does not subscribe
    UNABLE = 1  # nor could it: no way to the publisher, or the part that reads is not installed
    ESTIMATED = 2
    REPAIRING = 3
    DEGRADED = 4
    EXACT = 5

    @property
    def subscribes(self) -> bool:
        return self >= ReaderState.ESTIMATED


STATE_OF: Mapping[Level, ReaderState] = {level: ReaderState[level.name] for level in Level}


class Subscribers(NamedTuple):
    """Of one stream, as this node sees it. 0 = nobody."""

    reader: int
    standby: int
    states: Mapping[int, ReaderState]  # of all who subscribe, ourselves included, in the order of the ranking


@dataclass(slots=True)
class _Stream:
    mine: ReaderState = ReaderState.NONE
    others: dict[int, ReaderState] = field(default_factory=dict)
    ranking: Sequence[int] = ()
    since: float = 0.0  # of what decides: the ranking, and whether anybody subscribes
    unread: bool = True  # nobody subscribes, when last looked at
    surplus_since: float = inf  # I subscribe, and enough before me do, too
    reads: bool = False  # I am the reader
    behind_since: float = inf  # I am, and another should be

    def of(self, member: int, me: int) -> ReaderState:
        return self.mine if member == me else self.others.get(member, ReaderState.NONE)


class Ownership:
    """One node's part in reading the streams. Members are sessions, engines the keys by which all nodes call them."""

    def __init__(self, me: int, now: float) -> None:
        self.handovers = 0  # that we gave or took
        self.dropped = 0  # streams beyond the bound
        self._me = me
        self._members: Sequence[int] = (me,)
        self._streams: dict[int, _Stream] = {}
        self._met_at = now + MEET_S
        self._tick_at = inf

    def backends(self, keys: Iterable[int], now: float) -> bool:
        """These are the engines whose streams there are. Whether one that we subscribe to is gone."""
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
        """These live; we are among them in any case."""
        members = sorted({self._me: None, **dict.fromkeys(live)})
        if members == self._members:
            return
        self._members = members
        for key, stream in self._streams.items():
            stream.others = {member: state for member, state in stream.others.items() if member in members}
            self._rank(key, stream, now)
        self._tick_at = now

    def met(self, now: float) -> None:
        """We know the others, as far as there are any, and what they report."""
        if now < self._met_at:
            self._met_at = self._tick_at = now

    def reported(self, member: int, backend: int, state: ReaderState, now: float) -> None:
        """A live member reports this of itself."""
        stream = self._streams.get(backend)
        if stream is None or member == self._me or stream.others.get(member, ReaderState.NONE) is state:
            return
        before = stream.others.get(member, ReaderState.NONE)
        stream.others[member] = state
        if ReaderState.UNABLE in (before, state):
            self._rank(backend, stream, now)
        self._tick_at = now

    def reached(self, backend: int, state: ReaderState, now: float) -> None:
        """Our own state: how well we know a stream, that we can't subscribe to it, or (NONE) could again."""
        stream = self._streams.get(backend)
        if stream is None or stream.mine is state:
            return
        before, stream.mine = stream.mine, state
        if ReaderState.UNABLE in (before, state):
            self._rank(backend, stream, now)
        self._tick_at = now

    @property
    def wake_at(self) -> float:
        """When `tick` is wanted next; any call may bring it nearer."""
        return self._tick_at

    def tick(self, now: float) -> bool:
        """Begin and end what is due; whether anything was. A subscription counts as made: say otherwise with
        `reached`."""
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
        """Whether it is to apply the stream for all."""
        stream = self._streams.get(backend)
        return stream is not None and stream.reads and stream.mine.subscribes

    def mine(self) -> dict[int, ReaderState]:
        """Our own state, by stream."""
        return {key: stream.mine for key, stream in self._streams.items()}

    def snapshot_sources(self, backend: int) -> list[int]:
        """Who could give an exact snapshot, the reader last: while one is written, nothing is applied."""
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
        """Become the reader at once; give way after others had time to learn that they are."""
        if self._best(stream) == self._me:
            stream.reads, stream.behind_since = True, inf
        elif stream.reads:
            stream.behind_since = min(stream.behind_since, now)
            if not stream.mine.subscribes or self._is_due(stream.behind_since + SETTLE_S, now):
                stream.reads, stream.behind_since = False, inf

    def _best(self, stream: _Stream) -> int:
        """Of those who subscribe, who knows the stream best, of equals the first; 0: nobody does."""
        best = max(stream.ranking, key=lambda member: stream.of(member, self._me), default=0)
        return best if stream.of(best, self._me).subscribes else 0

    def _is_due(self, at: float, now: float) -> bool:
        if now < at:
            self._tick_at = min(self._tick_at, at)
        return now >= at
