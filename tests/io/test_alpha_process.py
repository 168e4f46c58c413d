"""The process that finds out how a full route table weighs its routes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
import trio

from ranvier_py.core.routing.route_table.alpha_tuner import AlphaJob, AlphaTuner, found_alpha
from ranvier_py.io.alpha_process import COMMAND, AlphaProcess
from ranvier_py.io.tokenizer_process import environment
from tests.core.routing.route_table.test_alpha_tuner import long_and_short, tuned_router

DEADLINE_S = 120  # a child gives way to all else on the machine


class OneJob(AlphaTuner):
    """Has something to find out, once."""

    def __init__(self, job: AlphaJob) -> None:
        router, _ = tuned_router(40)
        super().__init__(router.routes, router.chain)
        self.wanted: list[AlphaJob] = [job]
        self.taken = trio.Event()

    @property
    def due(self) -> bool:
        return bool(self.wanted)

    def job(self) -> AlphaJob | None:
        return self.wanted.pop()

    def take(self, alpha: float | None) -> None:
        super().take(alpha)
        self.taken.set()


async def tuned(tuner: OneJob, command: Sequence[str] = COMMAND) -> None:
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(AlphaProcess(tuner, environment(), command, pause_s=0.01).run)
            await tuner.taken.wait()
            nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_the_process_finds_what_the_replay_finds() -> None:
    job = AlphaJob(0.2, 16, long_and_short())
    tuner = OneJob(job)
    await tuned(tuner)
    assert tuner.counters.alpha == found_alpha(job) != 0.2
    assert (tuner.counters.tunings, tuner.counters.failed) == (1, 0)


@pytest.mark.parametrize(
    "code", ["raise SystemExit(1)", "print('no alpha')", "while True: pass  # until the kernel ends it"]
)
async def test_a_process_that_gives_no_answer_changes_nothing_and_is_counted(code: str) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n"
    tuner = OneJob(AlphaJob(0.2, 16, long_and_short()))
    await tuned(tuner, (sys.executable, "-c", limit + code))
    assert (tuner.counters.alpha, tuner.counters.tunings, tuner.counters.failed) == (1.0, 1, 1)


@pytest.mark.slow
async def test_the_kernel_ends_a_replay_that_takes_more_than_two_seconds_of_a_core() -> None:
    """Prompts of many more prefixes than are ever kept."""
    requests = [
        request._replace(chain=[(16 * depth, request.at << 32 | depth, 0) for depth in range(1500, 0, -1)])
        for request in long_and_short()
    ]
    tuner = OneJob(AlphaJob(0.2, 10_000, requests))
    await tuned(tuner)
    assert tuner.counters.failed == 1
