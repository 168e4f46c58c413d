"""Tunes how a full route table weighs its routes (`core/routing/route_table/alpha_tuner`), in child processes.

A replay takes as much processor time as thousands of requests, so it must not run in the event loop. Each replay has
a process, which reads one job, answers and ends; the kernel ends it after CPU_S of processor time, we after LIMIT_S.
Rules: at most one at a time, with PAUSE_S between two; one without an answer is counted and changes nothing.
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
LIMIT_S = 60.0  # long, because a niced process gets next to nothing of a busy machine


class AlphaProcess:
    """Asks for replays while `run` runs. `environment` is the child's."""

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
        """Run for ever."""
        while True:
            await trio.sleep(self._pause_s)
            if self.tuner.due and (job := self.tuner.job()) is not None:
                self.tuner.take(await self._ask(job))

    async def _ask(self, job: AlphaJob) -> float | None:
        """Return the child's answer, or None if it gave none."""
        with trio.move_on_after(LIMIT_S):
            done = await trio.run_process(
                self._command,
                stdin=encode_job(job),
                capture_stdout=True,
                stderr=subprocess.DEVNULL,
                check=False,
                process_group=0,  # so that signals for the node's process group do not reach the child
                env=self._environment,
            )
            try:
                (alpha,) = ANSWER.unpack(done.stdout)
            except StructError:
                return None
            return float(alpha)
        return None
