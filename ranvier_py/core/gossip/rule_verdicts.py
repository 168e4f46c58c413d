"""Verdicts on rules against breakers of prefixes (`core/clients`): what one node found of a rule holds on all nodes.

A node sends a verdict to all peers when it is new here, whoever found it; all verdicts to a newcomer; and all of them
to one random peer about every REPAIR_INTERVAL_S. Each message names the rules that its verdicts are about, so that
verdicts from before a change of the rules turn nothing off after it, on whichever node it is made first.

Bounds: as many verdicts as a BodyMender has trials. A lost message costs one REPAIR_INTERVAL_S, and prefixes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from random import Random

from ranvier_py.core.clients.body_mender import BodyMender, TrialResult
from ranvier_py.core.gossip.gossip_values import Outgoing, Peer, Plane
from ranvier_py.core.gossip.wire.columns import VERDICTS_MAX
from ranvier_py.core.gossip.wire.messages import RuleVerdicts
from ranvier_py.core.metrics import increment

REPAIR_INTERVAL_S = 30.0


class VerdictGossip:
    """Sends and receives the verdicts of one node, which its `mender` holds: None without rules, and replaced when they
    change. `followed` is called with each verdict of another node that holds here from now on.
    """

    def __init__(self, name: str, outbox: list[Outgoing], rng: Random, now: float) -> None:
        self.mender: BodyMender | None = None
        self.followed: Callable[[TrialResult], object] = lambda _: None
        self._name = name
        self._outbox = outbox
        self._rng = rng
        self._peers: Sequence[Peer] = ()
        self._repair_at = now + rng.uniform(0, REPAIR_INTERVAL_S)

    @property
    def wake_at(self) -> float:
        if self.mender is None or not self._peers:
            return inf
        return 0.0 if self.mender.fresh else self._repair_at

    def peers(self, live: Sequence[Peer]) -> None:
        """Set the live peers. A newcomer is sent all verdicts."""
        before = {peer.session: None for peer in self._peers}
        self._peers = live
        if self.mender is not None:
            self._send([peer for peer in live if peer.session not in before], self.mender.verdicts())

    def tick(self, now: float) -> None:
        if self.mender is None or not self._peers:
            return
        if self.mender.fresh:
            fresh = dict(self.mender.fresh)
            self.mender.fresh.clear()
            self._send(self._peers, [each for each in self.mender.verdicts() if each[:3] in fresh])
        if now >= self._repair_at:
            self._repair_at = now + REPAIR_INTERVAL_S * self._rng.uniform(0.8, 1.2)
            self._send([self._rng.choice(self._peers)], self.mender.verdicts())

    def receive(self, message: RuleVerdicts) -> None:
        if self.mender is None or message.rules != self.mender.rules:
            if self.mender is not None:
                increment(self.mender.counters.not_followed, "rules")
            return
        for verdict in message.verdicts:
            if self.mender.follow(verdict):
                self.followed(verdict)

    def _send(self, peers: Sequence[Peer], verdicts: Iterable[TrialResult]) -> None:
        if self.mender is None or not peers:
            return
        rows = [each if each.node else each._replace(node=self._name) for each in verdicts]
        for start in range(0, len(rows), VERDICTS_MAX):
            message = RuleVerdicts(self.mender.rules, tuple(rows[start : start + VERDICTS_MAX]))
            for peer in peers:
                self._outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, message))
