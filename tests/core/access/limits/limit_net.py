"""Nodes that share limits, on the fake network."""

from __future__ import annotations

from random import Random

from ranvier_py.core.access.limit_values import Limits
from ranvier_py.core.access.limits.limit_gossip import LimitCounts, LimitGossip
from ranvier_py.core.access.limits.limiter import Grant, HomeQuestion, Refusal
from ranvier_py.core.access.limits.meter_groups import MeterGroup
from ranvier_py.core.access.limits.meters import Amounts, Meter, meters_of
from tests.builders.machine_net import LoneMachine, MachineNet

MAY_2026 = 1_778_000_000.0


def meters(**limits: object) -> tuple[Meter, ...]:
    return tuple(meters_of("tenant a", Limits(**limits), "a"))  # type: ignore[arg-type]


class LimitNode(LoneMachine[LimitGossip]):
    def __init__(self, session: int, now: float) -> None:
        self.left: list[int] = []
        self.groups: dict[tuple[Meter, ...], MeterGroup] = {}
        super().__init__(
            lambda outbox: LimitGossip(session, outbox, Random(session), now, left=lambda one: one in self.left)
        )
        self.limiter = self.machine.begin()
        self.machine.counts.wall_offset_s = MAY_2026


class LimitNet(MachineNet[LimitNode]):
    """`loss`: of datagrams alone, as streams lose nothing."""

    def __init__(self, nodes: int, seed: int = 7, loss: float = 0.0) -> None:
        super().__init__(LimitNode, nodes, seed)
        self.drop = lambda _source, _target, message: not isinstance(message, LimitCounts) and self.rng.random() < loss
        self.run(1.0)

    def reserve(self, session: int, limits: tuple[Meter, ...], tokens: float = 1.0) -> Grant | Refusal | HomeQuestion:
        """What a node answers at once."""
        node = self.nodes[session]
        group = node.groups.setdefault(limits, MeterGroup(limits))
        found = node.limiter.reserve(group, Amounts(tokens, tokens, tokens), self.now)
        self._work(session)
        return found

    def decided(self, session: int, limits: tuple[Meter, ...], tokens: float = 1.0) -> Grant | Refusal:
        """What it answers in the end."""
        found = self.reserve(session, limits, tokens)
        if isinstance(found, HomeQuestion):
            question = found
            self.run_until(lambda: question.outcome is not None, 1.0, 0.001)
            assert question.outcome is not None
            found = question.outcome
        assert not isinstance(found, HomeQuestion)
        return found

    def settle(self, session: int, grant: Grant | Refusal, tokens: float) -> None:
        assert isinstance(grant, Grant)
        self.nodes[session].limiter.settle(Amounts(tokens, tokens, tokens), grant)
        self._work(session)

    def taken(self, session: int, limit: Meter) -> float:
        counts = self.nodes[session].machine.counts
        counts.book(self.now)
        return counts.count(limit, self.now).taken

    def home(self, limit: Meter) -> int:
        """The node that decides about this limit, as all see it."""
        found = [node.limiter.peers.home(limit.home) for node in self.nodes.values()]
        homes = {session if peer is None else peer.session for session, peer in zip(self.nodes, found, strict=True)}
        (home,) = homes
        return home
