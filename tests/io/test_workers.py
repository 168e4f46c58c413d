"""The supervisor in a process of its own: it forks, and takes signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

DEADLINE_S = 20.0
PROGRAM = """
import functools, os, signal, sys
from ranvier_py.io import workers
from ranvier_py.io.logs import set_up_logs
from ranvier_py.io.workers import Supervisor

workers.RESTART_DELAY_S_MAX = 0.01
workers.Worker = functools.partial(workers.Worker, deaths={deaths})
set_up_logs("info", "text")

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # one write: lines of two workers do not mix

def start(index):
    say("worker", index, os.getpid())
    {body}
    return 0

{before}
sys.exit(Supervisor({count}, start, stop_timeout_s={stop_timeout_s}, fatal=(2, 3), restart_delay_s=0.01).run())
"""
WAIT_FOR_SIGTERM = (
    "signal.pthread_sigmask(signal.SIG_BLOCK, [15, 2]); say('ready', index); "
    "say('reported', index, int(signal.sigwait([15, 2])))"
)


class Run:
    """A running supervisor. `line()` is the next line that one of its workers prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def lines(self, count: int) -> list[list[str]]:
        return sorted(self.line() for _ in range(count))

    def pids(self, count: int) -> list[int]:
        """Pids of so many workers, once each of them waits for its signal."""
        found = self.lines(2 * count)
        return [int(words[2]) for words in found if words[0] == "worker"]


@contextmanager
def running(body: str, count: int = 2, stderr: int = subprocess.DEVNULL, **more: object) -> Iterator[Run]:
    fields = {"stop_timeout_s": 30.0, "deaths": 0, "before": "", **more}
    program = PROGRAM.format(body=body, count=count, **fields)
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=root
    ) as process:
        try:
            yield Run(process)
        finally:
            process.kill()  # on Linux the workers end with it


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_worker_once_and_all_end_well(number: signal.Signals) -> None:
    with running(WAIT_FOR_SIGTERM) as run:
        run.pids(2)
        run.process.send_signal(number)
        assert run.lines(2) == [["reported", "0", str(int(number))], ["reported", "1", str(int(number))]]
        assert run.process.wait(DEADLINE_S) == 0


def test_a_worker_that_dies_is_started_again_and_the_others_are_left_alone() -> None:
    with running(WAIT_FOR_SIGTERM) as run:
        first, second = run.pids(2)
        os.kill(first, signal.SIGKILL)
        assert run.pids(1)[0] not in (first, second)
        os.kill(second, 0)  # lives
        run.process.terminate()
        assert [words[0] for words in run.lines(2)] == ["reported", "reported"]
        assert run.process.wait(DEADLINE_S) == 0


def test_a_worker_that_died_a_thousand_times_is_started_again() -> None:
    with running("return 1", count=1, deaths=1023) as run:
        assert [run.line()[:2] for _ in range(5)] == [["worker", "0"]] * 5
        assert run.process.poll() is None


def test_workers_for_which_there_is_no_process_now_are_started_later() -> None:
    lacking = "real, failures = os.fork, [OSError(11, 'no process')] * 3\n"
    lacking += "os.fork = lambda: real() if not failures else (_ for _ in ()).throw(failures.pop())"
    with running(WAIT_FOR_SIGTERM, before=lacking) as run:
        run.pids(2)
        run.process.terminate()
        assert [words[0] for words in run.lines(2)] == ["reported", "reported"]
        assert run.process.wait(DEADLINE_S) == 0


def test_a_worker_that_can_not_be_helped_ends_all_with_its_code() -> None:
    """A wrong configuration or a taken address would fail again for ever."""
    body = f"if index == 1: return 3\n    {WAIT_FOR_SIGTERM}"
    with running(body) as run:
        assert run.process.wait(DEADLINE_S) == 3


def test_a_worker_that_does_not_end_in_time_is_killed() -> None:
    body = "signal.pthread_sigmask(signal.SIG_BLOCK, [15]); say('ready', index); signal.sigwait([10])"
    with running(body, count=1, stop_timeout_s=0.05) as run:
        run.lines(2)
        run.process.terminate()
        assert run.process.wait(DEADLINE_S) == 9


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_workers_end_when_their_parent_is_killed() -> None:
    with running(WAIT_FOR_SIGTERM, count=1) as run:
        run.pids(1)
        run.process.kill()
        assert run.line() == ["reported", "0", "15"]


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """What is written to it waits for ever."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


@pytest.mark.slow
def test_a_log_that_nobody_reads_keeps_no_worker_from_its_restart(tmp_path: Path, full_pipe: int) -> None:
    with running(raising_once(tmp_path), count=1, stderr=full_pipe) as run:
        assert [run.line()[0] for _ in range(3)] == ["worker", "worker", "ready"]
        run.process.terminate()
        assert run.process.wait(DEADLINE_S) == 0


def test_a_worker_that_raises_is_started_again(tmp_path: Path) -> None:
    with running(raising_once(tmp_path), count=1) as run:
        assert [run.line()[0] for _ in range(3)] == ["worker", "worker", "ready"]


def raising_once(tmp_path: Path) -> str:
    marker = tmp_path / "raised"
    return f"""
    marker = {str(marker)!r}
    if not os.path.exists(marker):
        open(marker, "w").close()
        raise RuntimeError("a bug at the start")
    {WAIT_FOR_SIGTERM}"""
