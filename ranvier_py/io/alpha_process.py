"""Finds out in a process of its own how a full route table weighs its routes (`core/routing/route_table/alpha_tuner`).

A replay takes as much processor time as thousands of requests, so it is no work for the event loop. Each one has a
process that reads its job, answers and ends; the kernel ends it after CPU_S of processor time, and we after LIMIT_S.
Rules: at most one at a time, with PAUSE_S between two; one that gives no answer changes nothing and is counted.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from struct import error as StructError  # noqa: N812  # it is none of ours

import trio

from ranvier_py.core.routing.route_table.alpha_tuner import ANSWER, AlphaJob, AlphaTuner, encode_job

COMMAND = (sys.executable, "-P", "-m", "ranvier_py.node.alpha_child")
PAUSE_S = 30.0
LIMIT_S = 60.0  # its niceness leaves it next to nothing of a busy machine


class AlphaProcess:
    """`run` for as long as the table is used. `environment` is the child's."""

    def __init__(
        self,
        tuner: AlphaTuner,
        environment: Mapping[str, str],
        command: Sequence[str] = COMMAND,
        *,
        pause_s: float = PAUSE_S,
    ) -> None:
        self.tuner = tuner
        self._environment = environment
        self._command = command
        self._pause_s = pause_s

    async def run(self) -> None:
        """For ever."""
        while True:
            await trio.sleep(self._pause_s)
            if self.tuner.due and (job := self.tuner.job()) is not None:
                self.tuner.take(await self._ask(job))

    async def _ask(self, job: AlphaJob) -> float | None:
        """None: it gave no answer."""
        with trio.move_on_after(LIMIT_S):
            done = await trio.run_process(
                self._command,
                stdin=encode_job(job),
                capture_stdout=True,
                stderr=subprocess.DEVNULL,
                check=False,
                process_group=0,  # signals for the node's process group are not for it
                env=self._environment,
            )
            try:
                (alpha,) = ANSWER.unpack(done.stdout)
            except StructError:
                return None
            return float(alpha)
        return None
