"""The streams' part of gossip: standings, copies of holdings and standing by, beside routes and backends."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ranvier_py.core.gossip.gossip_values import Outgoing, Peer
from ranvier_py.core.gossip.readers.reader_claims import StandingBook
from ranvier_py.core.gossip.readers.snapshot_transfer import Transfers
from ranvier_py.core.gossip.readers.standby_copies import Following
from ranvier_py.core.gossip.wire.messages import (
    Holdings,
    HoldingsRefused,
    HoldingsSince,
    HoldingsWanted,
    Message,
    Standings,
)
from ranvier_py.core.prompts.fingerprint import TokenHasher

STREAM_MESSAGES = (Standings, Holdings, HoldingsWanted, HoldingsSince, HoldingsRefused)
"""What `StreamGossip.receive` takes."""


class StreamGossip:
    """Times are seconds of one monotonic clock."""

    def __init__(self, session: int, hasher: TokenHasher, outbox: list[Outgoing], rng: Random, now: float) -> None:
        self.standings = StandingBook(session, outbox, rng, now)
        self.transfers = Transfers(hasher, outbox, rng)
        self.following = Following(self.transfers, rng)
        self.live: Sequence[int] = ()  # all members that could read a stream, but us
        self._acquainted: Sequence[Peer] = ()

    @property
    def wake_at(self) -> float:
        return min(self.standings.wake_at, self.transfers.wake_at, self.following.wake_at)

    def peers(self, near: Sequence[Peer], acquainted: Sequence[Peer], live: Sequence[int]) -> None:
        """Whom to tell, whom a copy may be had from, and who lives."""
        self.live = live
        self.standings.peers(near, passes_on=len(live) > len(near))
        self.transfers.peers(acquainted)

    def forget(self, session: int) -> None:
        """A member is gone for good."""
        self.standings.forget(session)

    def tick(self, now: float) -> None:
        self.standings.tick(now)
        self.transfers.tick(now)
        self.following.tick(now)

    def receive(self, peer: Peer, message: Message, now: float) -> None:
        """One of STREAM_MESSAGES, from a live member."""
        if isinstance(message, Standings):
            self.standings.receive(message)
        elif isinstance(message, Holdings | HoldingsWanted | HoldingsSince | HoldingsRefused):
            self.transfers.receive(peer, message, now)
