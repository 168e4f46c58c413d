"""A fault of ours costs what was under way, and is seen; a cancellation is none."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

from ranvier_py.core.log_limit import LOG_INTERVAL_S
from ranvier_py.supervision import PAUSE_S, PAUSE_S_MAX, STEADY_S, Faults

Clock = trio.testing.MockClock


class Bug(Exception):
    """What nobody expected."""


def counts(faults: Faults) -> dict[str, int]:
    return faults.counters.unexpected_errors


class Failing:
    """Notes when it begins, and fails after so many seconds."""

    def __init__(self, *lives_s: float) -> None:
        self.began: list[float] = []
        self._lives_s = lives_s

    async def __call__(self) -> None:
        self.began.append(trio.current_time())
        number = len(self.began) - 1
        if number >= len(self._lives_s):
            return
        await trio.sleep(self._lives_s[number])
        raise Bug


async def test_a_loop_that_fails_begins_anew_after_a_pause_that_doubles_up_to_a_bound(autojump_clock: Clock) -> None:
    faults, failing = Faults(), Failing(*[0.0] * 12)
    await faults.keep("loop", failing)
    pauses = [later - earlier for earlier, later in zip(failing.began, failing.began[1:], strict=False)]
    assert pauses == pytest.approx([min(PAUSE_S * 2**number, PAUSE_S_MAX) for number in range(12)])
    assert counts(faults) == {"loop": 12}


async def test_a_loop_that_ran_long_enough_begins_anew_at_once(autojump_clock: Clock) -> None:
    failing = Failing(*[0.0] * 8, STEADY_S, 0.0)
    await Faults().keep("loop", failing)
    assert failing.began[9] - failing.began[8] == pytest.approx(STEADY_S + PAUSE_S)
    assert failing.began[10] - failing.began[9] == pytest.approx(2 * PAUSE_S)


async def test_a_fault_is_logged_with_its_traceback_once_in_an_interval_and_always_counted(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults()
    for _ in range(3):
        await faults.once("here", Failing(0.0))
        await faults.once("there", Failing(0.0))
    with faults.caught("here"):
        raise Bug
    await trio.sleep(LOG_INTERVAL_S)
    await faults.once("here", Failing(0.0))
    assert counts(faults) == {"here": 5, "there": 3}
    assert [record.getMessage() for record in caplog.records] == [
        "unexpected.error in here",
        "unexpected.error in there",
        "unexpected.error in here (3 more since the last line)",
    ]
    for record in caplog.records:
        assert record.levelno == logging.ERROR
        assert record.exc_info is not None
        assert record.exc_info[0] is Bug
        assert record.exc_info[2] is not None


async def test_faults_of_several_tasks_are_one_fault(autojump_clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    async def both() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Failing(0.0))
            nursery.start_soon(Failing(0.0))

    faults = Faults()
    await faults.once("loop", both)
    assert counts(faults) == {"loop": 1}
    assert "Bug" in caplog.text


async def test_a_cancellation_passes_and_is_no_fault(autojump_clock: Clock) -> None:
    faults = Faults()
    with trio.move_on_after(1) as scope:
        await faults.keep("loop", trio.sleep_forever)
    assert scope.cancelled_caught
    assert counts(faults) == {}


async def test_a_cancellation_passes_though_a_fault_comes_with_it(autojump_clock: Clock) -> None:
    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise Bug

    async def work() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_when_cancelled)
            nursery.start_soon(trio.sleep_forever)

    faults = Faults()
    with trio.move_on_after(1) as scope:
        await faults.keep("loop", work)
    assert scope.cancelled_caught
    assert counts(faults) == {"loop": 1}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_what_is_meant_to_end_the_process_passes(kind: type[BaseException]) -> None:
    async def end() -> None:
        raise kind

    faults = Faults()
    with pytest.raises(kind):
        await faults.keep("loop", end)
    assert counts(faults) == {}
