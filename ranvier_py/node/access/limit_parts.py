"""Limits of keys and tenants on a node: its limiter, alone or among peers, and the file that keeps budgets.

Rule: what a node counted is in the file SAVE_S later, and at its end: only if all nodes are killed at once, counts of
that time are lost. Without a file of keys nothing is limited.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import islice
from math import inf
from typing import Any

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.core.access.limit_values import ModelCost
from ranvier_py.core.access.limits.counts import Counters
from ranvier_py.core.access.limits.limit_records import SavedRows, read, unsaved_rows, written
from ranvier_py.core.access.limits.limit_view import budgets_left, limits_view
from ranvier_py.core.access.limits.limiter import Limiter
from ranvier_py.core.access.limits.shares import KEEP, LimitPeers
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.metrics import Sample, samples
from ranvier_py.io.gossip.state_file import set_aside, write_whole
from ranvier_py.io.limit_file import LimitFile
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.part import Node, Part
from ranvier_py.proxy.stages.reserve import ReserveStage

SAVE_S = 5.0
REFUSED_S, SCOPES_SHOWN = 30.0, 8
"""A limit counts as reached for so long after its last refusal, and the table of counts as full after it dropped one;
so many tenants and keys are named at once."""

LAST_SAVE_S = 1.0  # a hanging disk must not delay the end of the process


class LimitParts(Part):
    """See the module."""

    name = "limits"
    keys = ("limits",)

    def __init__(self, node: Node, clustering: ClusterParts | None) -> None:
        config = node.config
        self.limiter: Limiter | None = None
        self.reserve: ReserveStage | None = None
        self._file: LimitFile | None = None
        self._is_alone = clustering is None
        self._dropped, self._dropped_at = 0, -inf
        if config.keys_file is None:
            return
        if clustering is None:
            me = node.rng.getrandbits(64) or 1
            self.limiter = Limiter(Counters(me), LimitPeers(me, lambda _: False, str))
        else:
            self.limiter = clustering.peer.features.limits.begin()
            self.limiter.hurry = clustering.port.poke
        self.reload(config, config)
        if config.limit_state_file is not None:
            self._file = LimitFile(config.limit_state_file, write_whole)
        self.reserve = ReserveStage(self.limiter, dearest_of(config))
        self._set_clock()
        self._saved = SavedRows(self.limiter.counts, time.monotonic())

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Take what earlier processes counted of running budgets."""
        if self._file is not None:
            found, end = await trio.to_thread.run_sync(self._file.read), 0
            for rows, end in read(found):  # noqa: B007  # where the last one ended
                for row in rows:
                    self._saved.take(row, time.monotonic())
                await trio.lowlevel.checkpoint()
            if end < len(found):
                aside = "" if end else await trio.to_thread.run_sync(set_aside, self._file.path)
                self._file.refuse(end, aside)
            await self._file.replace(written(self._saved.all(time.monotonic())))
        task_status.started()

    async def loop(self) -> None:
        """Save what is new, for ever, and once more at the end."""
        if self._file is None:
            return
        try:
            while True:
                await trio.sleep(SAVE_S)
                await self._save(self._file)
        finally:
            with trio.move_on_after(LAST_SAVE_S, shield=True):
                await self._save(self._file)

    async def _save(self, file: LimitFile) -> None:
        assert self.limiter is not None
        counts, now = self.limiter.counts, time.monotonic()
        if file.is_due:
            await file.replace(written(self._saved.all(now)))
        else:
            await file.append(written(unsaved_rows(counts, now)))

    def sweep(self, now: float) -> None:
        if self.limiter is not None:
            self._set_clock()
            self._saved.sweep(now)
            if self._is_alone:
                self.limiter.sweep(now)
            if (dropped := self.limiter.counts.dropped) != self._dropped:
                self._dropped, self._dropped_at = dropped, now
            if self._file is None:
                self.limiter.counts.unsaved.clear()

    def _set_clock(self) -> None:
        assert self.limiter is not None
        self.limiter.counts.wall_offset_s = time.time() - time.monotonic()

    def reload(self, before: Config, after: Config) -> None:
        if self.limiter is not None:
            self.limiter.peers.keeps = after.limits.on_partition == KEEP
        if self.reserve is not None:
            self.reserve.dearest = dearest_of(after)

    def findings(self, now: float) -> Iterator[Finding]:
        """Yield whether counts were dropped, and who was refused a moment ago; those refused last, of many."""
        if now - self._dropped_at <= REFUSED_S:
            what = f"the table of limits' counts is full: {self._dropped:,} were dropped here since the start"
            remedy = "Have fewer keys with limits of their own, or limit their tenants instead."
            meaning = "what those counted passes without a limit"
            yield Finding("limits_full", Severity.DEGRADED, what, whom=meaning, remedy=remedy, command="ranvier access")
        for scope, refused in islice(reversed(self.limiter.refusals.items() if self.limiter else ()), SCOPES_SHOWN):
            if now - refused.at > REFUSED_S:
                return
            what = f"{refused.last}; {refused.times:,} of its requests refused here since the start"
            remedy = "Leave it, or raise the limit in keys_file: it is read again by itself."
            yield Finding(
                "limit_reached",
                Severity.NOTICE,
                what,
                about=scope,
                whom=f"requests of {scope}: 429",
                remedy=remedy,
                command="ranvier access",
            )

    def metrics(self) -> Iterator[Sample]:
        if self.limiter is not None and self._is_alone:  # among peers gossip shows them
            yield from samples("limits", self.limiter.counters)
        if self.limiter is not None:
            words = "Share of a budget that is left over all nodes, from 1 to 0, by scope and limit."
            for meter, left in budgets_left(self.limiter, time.monotonic()):
                yield Sample("budget_left_ratio", "gauge", words, left, {"scope": meter.scope, "limit": meter.name})
            yield Sample("budget_left_ratio", "gauge", words, None, {"scope": "", "limit": ""})
        if self._file is not None:
            yield from samples("limits_file", self._file.counters)

    def view(self) -> Mapping[str, Any]:
        return {} if self.limiter is None else limits_view(self.limiter, time.monotonic())


def dearest_of(config: Config) -> ModelCost:
    """Return what a token costs at most, of any model that has a table."""
    costs = [ModelCost(), *[spec.cost.cost for spec in config.model if spec.cost is not None]]
    return ModelCost(**{kind.name: max(getattr(cost, kind.name) for cost in costs) for kind in fields(ModelCost)})
