"""Which node reads an engine's event stream: one owner for each stream, and who is next when it goes.

All nodes rank the live members for each engine by a hash of both (highest random weight), leaving out those that say
they can't. The first is the owner, the second the standby. What a node does follows from that and from what the others
say they do (`Standing`); nobody is asked, so in doubt two read a stream for a while rather than nobody.

    nobody reads it            the first begins after `settle_s`, the one behind it a turn later if that did not help
    another reads it           the first begins after `steady_s` without a change, and gets a copy meanwhile
    I read it, and another     I stop when one before me knows it as well as I do, or after `handover_s`
      before me does, too
    I can't                    I say so, and others move up

Rules: alone, a node reads all. A member is what membership calls alive; a death moves the next one up at once.
Invariant: when members and reports are the same at all nodes and time passes, each stream has exactly one reader among
those that can. Bounds: STREAMS_MAX engines, one standing for each live member and engine. Cost: 1 us for each member
and engine when members change; a tick without change is one comparison an engine.
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


class Standing(IntEnum):
    """What a member says of itself and one stream. Of those who read it, the greater one knows it better."""

    NONE = 0  # does not read it
    UNABLE = 1  # nor could it: no way to the publisher, or the part that reads is not installed
    ESTIMATED = 2
    REPAIRING = 3
    DEGRADED = 4
    EXACT = 5

    @property
    def reads(self) -> bool:
        return self >= Standing.ESTIMATED


STANDING_OF: Mapping[Level, Standing] = {level: Standing[level.name] for level in Level}


@dataclass(frozen=True, slots=True)
class OwnershipSettings:
    settle_s: float = 0.5  # from «nobody reads it» to beginning: reports of others are on their way as long
    turn_s: float = 4.0  # for each one ahead who does not begin: it may be older, or at its limit of descriptors
    steady_s: float = 3.0  # members come one by one when a cluster starts or rolls: not each is worth a handover
    handover_s: float = 45.0  # longest time that two read a stream: a copy of the largest engine takes half of it
    meet_s: float = 3.0  # a node that has just started waits so long for others, if there may be others


class Subscribe(NamedTuple):
    backend: int


class Unsubscribe(NamedTuple):
    backend: int
    why: str


Effect = Subscribe | Unsubscribe


class Owners(NamedTuple):
    """Who should read a stream, who would be next, and who says that he does. 0 = nobody."""

    backend: int
    owner: int
    standby: int
    reading: tuple[tuple[int, Standing], ...]  # all that read it, ourselves included


@dataclass(slots=True)
class _Stream:
    mine: Standing = Standing.NONE
    others: dict[int, Standing] = field(default_factory=dict)
    ranking: Sequence[int] = ()
    since: float = 0.0  # of what decides: the ranking, and whether anybody reads it
    shared_since: float = inf  # I and one before me read it
    unread: bool = True  # nobody reads it, when last looked at


class Ownership:
    """One node's part in reading the streams. Members are sessions, engines the keys by which all nodes call them."""

    def __init__(self, me: int, now: float, settings: OwnershipSettings | None = None, *, alone: bool = False) -> None:
        """`alone`: there will never be others."""
        self.handovers = 0  # that we gave or took
        self.dropped = 0  # streams beyond the bound
        self._settings = settings or OwnershipSettings()
        self._me = me
        self._members: Sequence[int] = (me,)
        self._streams: dict[int, _Stream] = {}
        self._met_at = now if alone else now + self._settings.meet_s
        self._tick_at = inf

    # --- what is told -----------------------------------------------------------------------------------------------

    def backends(self, keys: Iterable[int], now: float) -> list[Effect]:
        """These are the engines whose streams there are."""
        wanted = dict.fromkeys(keys)
        gone = [key for key in self._streams if key not in wanted]
        effects: list[Effect] = [
            Unsubscribe(key, "no such stream") for key in gone if self._streams.pop(key).mine.reads
        ]
        for key in wanted:
            if key in self._streams:
                continue
            if len(self._streams) >= STREAMS_MAX:
                self.dropped += 1
                continue
            self._streams[key] = stream = _Stream(since=now)
            self._rank(key, stream, now)
        self._tick_at = now
        return effects

    def members(self, live: Iterable[int], now: float) -> None:
        """These live; we are among them in any case."""
        members = sorted({self._me: None, **dict.fromkeys(live)})
        if members == self._members:
            return
        self._members = members
        for key, stream in self._streams.items():
            stream.others = {member: said for member, said in stream.others.items() if member in members}
            self._rank(key, stream, now)
        self._tick_at = now

    def met(self, now: float) -> None:
        """We know the others, as far as there are any, and what they say."""
        if now < self._met_at:
            self._met_at = self._tick_at = now

    def said(self, member: int, backend: int, standing: Standing, now: float) -> None:
        """A live member says this of itself."""
        stream = self._streams.get(backend)
        if stream is None or member == self._me or stream.others.get(member, Standing.NONE) is standing:
            return
        before = stream.others.get(member, Standing.NONE)
        stream.others[member] = standing
        if Standing.UNABLE in (before, standing):
            self._rank(backend, stream, now)
        self._tick_at = now

    def reached(self, backend: int, standing: Standing, now: float) -> None:
        """What we say: how well we know a stream that we read, that we can't read it, or (NONE) could again."""
        stream = self._streams.get(backend)
        if stream is None or stream.mine is standing:
            return
        before, stream.mine = stream.mine, standing
        if Standing.UNABLE in (before, standing):
            self._rank(backend, stream, now)
        self._tick_at = now

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float:
        """When `tick` is wanted next; any call may bring it nearer."""
        return self._tick_at

    def tick(self, now: float) -> list[Effect]:
        """Begin and end what is due. A Subscribe counts as done: say otherwise with `reached`."""
        self._tick_at = inf
        effects: list[Effect] = []
        for key, stream in self._streams.items():
            self._look(stream, now)
            if stream.mine.reads:
                effects += self._leave(key, stream, now)
            elif stream.mine is not Standing.UNABLE:
                effects += self._begin(key, stream, now)
        return effects

    # --- what it shows ----------------------------------------------------------------------------------------------

    def reads(self, backend: int) -> bool:
        """Whether this node is to read the stream now."""
        stream = self._streams.get(backend)
        return stream is not None and stream.mine.reads

    def mine(self) -> dict[int, Standing]:
        """What we say of all streams."""
        return {key: stream.mine for key, stream in self._streams.items()}

    def stands_by(self, backend: int) -> bool:
        """Whether this node comes first of all that do not read the stream: it is the next who will."""
        stream = self._streams.get(backend)
        if stream is None or stream.mine.reads:
            return False
        idle = [member for member in stream.ranking if not self._standing(stream, member).reads]
        return bool(idle) and idle[0] == self._me

    def snapshot_sources(self, backend: int) -> list[int]:
        """Who could give an exact copy, in the order of the ranking."""
        stream = self._streams.get(backend)
        if stream is None:
            return []
        return [member for member in stream.ranking if stream.others.get(member) is Standing.EXACT]

    def owners(self, backend: int) -> Owners | None:
        stream = self._streams.get(backend)
        if stream is None:
            return None
        first, second = (*stream.ranking, 0, 0)[:2]
        saying = {**stream.others, self._me: stream.mine}
        reading = tuple((member, said) for member, said in sorted(saying.items()) if said.reads)
        return Owners(backend, first, second, reading)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _rank(self, key: int, stream: _Stream, now: float) -> None:
        able = [member for member in self._members if self._standing(stream, member) is not Standing.UNABLE]
        ranking = sorted(able, key=lambda member: (mix(mix(member) ^ key), member), reverse=True)
        if ranking != stream.ranking:
            stream.ranking, stream.since = ranking, now

    def _standing(self, stream: _Stream, member: int) -> Standing:
        return stream.mine if member == self._me else stream.others.get(member, Standing.NONE)

    def _look(self, stream: _Stream, now: float) -> None:
        """Since when nobody reads it, or somebody."""
        unread = not stream.mine.reads and not any(said.reads for said in stream.others.values())
        if unread is not stream.unread:
            stream.unread, stream.since = unread, now

    def _begin(self, key: int, stream: _Stream, now: float) -> list[Effect]:
        settings, turn = self._settings, stream.ranking.index(self._me)
        if stream.unread:
            wait_s = settings.settle_s + turn * settings.turn_s if len(self._members) > 1 else 0.0
            due = max(stream.since + wait_s, self._met_at)
        elif turn == 0:
            due = max(stream.since + settings.steady_s, self._met_at)
        else:
            return []
        if now < due:
            self._tick_at = min(self._tick_at, due)
            return []
        self.handovers += not stream.unread
        stream.mine, stream.unread, stream.shared_since = Standing.ESTIMATED, False, inf
        return [Subscribe(key)]

    def _leave(self, key: int, stream: _Stream, now: float) -> list[Effect]:
        before_me = stream.ranking[: stream.ranking.index(self._me)]
        best = max((self._standing(stream, member) for member in before_me), default=Standing.NONE)
        if not best.reads:
            stream.shared_since = inf
            return []
        stream.shared_since = min(stream.shared_since, now)
        due = stream.shared_since + (self._settings.handover_s if best < stream.mine else self._settings.settle_s)
        if now < due:
            self._tick_at = min(self._tick_at, due)
            return []
        why = "handed over" if best >= stream.mine else "handed over late"
        stream.mine, stream.shared_since = Standing.NONE, inf
        self.handovers += 1
        return [Unsubscribe(key, why)]
