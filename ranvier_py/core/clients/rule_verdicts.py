"""Verdicts on rules against breakers of prefixes (`core/clients`): what one node found of a rule holds on all nodes.

Each message names the rules that its verdicts are about, so that verdicts from before a change of the rules turn
nothing off after it, on whichever node it is made first. How verdicts spread: see `join_table`.

Bounds: as many verdicts as a BodyMender has trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from ranvier_py.core.clients.body_mender import DECIDED, MODEL_BYTES_MAX, BodyMender, TrialResult
from ranvier_py.core.mesh.join_table import JoinTable
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import U64, parts_field
from ranvier_py.core.mesh.wire.frame import bad, text

REPAIR_INTERVAL_S = 30.0
VERDICTS_MAX = 128  # in a message
VERDICT_BYTES_MAX = (60, 32, MODEL_BYTES_MAX, 8, 255, 64)
"""The most bytes of the names of a rule, a client and a model, of the state and the reason, and of a node's name."""


class RuleVerdicts(NamedTuple):
    """Verdicts of decided trials, each with the name of the node that decided it."""

    rules: int  # u64: digest of the sender's rules
    verdicts: tuple[TrialResult, ...]


def read_verdict(*texts: bytes) -> TrialResult:
    verdict = TrialResult(*map(text, texts, VERDICT_BYTES_MAX))
    if verdict.state not in DECIDED:
        bad("state of a verdict")
    return verdict


class VerdictGossip(JoinTable[tuple[str, str, str], TrialResult]):
    """Sends and receives the verdicts of one node, which its `mender` holds: None without rules, and replaced when they
    change. `followed` is called with each verdict of another node that holds here from now on.
    """

    kinds = (
        Kind("rules", 96, RuleVerdicts, (U64, parts_field("verdict", "*B *B *H *B *B *B", VERDICTS_MAX, read_verdict))),
    )
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

    def tick(self, now: float) -> None:
        if self.mender is not None:
            self._changed |= self.mender.fresh
            self.mender.fresh.clear()
        super().tick(now)

    def receive(self, _peer: Peer, message: RuleVerdicts, _now: float) -> None:
        if self.mender is None or message.rules != self.mender.rules:
            if self.mender is not None:
                self.mender.counters.not_followed["rules"] += 1
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
