"""Verdicts on rules against breakers of prefixes (`core/clients`): what one node found of a rule holds on all nodes.

Each message names the rules that its verdicts are about, so that verdicts from before a change of the rules turn
nothing off after it, on whichever node it is made first. How verdicts spread: see `table_gossip`.

Bounds: as many verdicts as a BodyMender has trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from ranvier_py.core.clients.body_mender import BodyMender, TrialResult
from ranvier_py.core.gossip.gossip_values import Outgoing, Peer
from ranvier_py.core.gossip.table_gossip import TableGossip
from ranvier_py.core.gossip.wire.columns import VERDICTS_MAX
from ranvier_py.core.gossip.wire.messages import RuleVerdicts
from ranvier_py.core.metrics import increment

REPAIR_INTERVAL_S = 30.0


class VerdictGossip(TableGossip[tuple[str, str, str], TrialResult]):
    """Sends and receives the verdicts of one node, which its `mender` holds: None without rules, and replaced when they
    change. `followed` is called with each verdict of another node that holds here from now on.
    """

    ROWS_MAX = VERDICTS_MAX
    REPEAT_S = REPAIR_INTERVAL_S

    def __init__(self, name: str, outbox: list[Outgoing], rng: Random, now: float) -> None:
        super().__init__(outbox, rng, now)
        self.mender: BodyMender | None = None
        self.followed: Callable[[TrialResult], object] = lambda _: None
        self._name = name

    @property
    def wake_at(self) -> float:
        return 0.0 if self.mender is not None and self.mender.fresh else super().wake_at

    def peers(self, live: Sequence[Peer], now: float) -> None:
        """Set the live peers. A newcomer is sent all verdicts."""
        self._meet(live, now)

    def tick(self, now: float) -> None:
        if self.mender is not None:
            self._changed |= self.mender.fresh
            self.mender.fresh.clear()
        super().tick(now)

    def receive(self, message: RuleVerdicts) -> None:
        if self.mender is None or message.rules != self.mender.rules:
            if self.mender is not None:
                increment(self.mender.counters.not_followed, "rules")
            return
        for verdict in message.verdicts:
            if self.mender.follow(verdict):
                self.followed(verdict)

    def _rows(self, keys: dict[tuple[str, str, str], None] | None, _now: float) -> Sequence[TrialResult]:
        verdicts = [] if self.mender is None else self.mender.verdicts()
        return [
            each if each.node else each._replace(node=self._name)
            for each in verdicts
            if keys is None or each[:3] in keys
        ]

    def _message(self, rows: Sequence[TrialResult]) -> RuleVerdicts:
        assert self.mender is not None
        return RuleVerdicts(self.mender.rules, tuple(rows))
