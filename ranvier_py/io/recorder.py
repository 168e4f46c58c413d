"""Records each attempt as a line for a replay: `ranvier serve --record FILE`. Format: core/routing/request_record.py.

Rule: a line is made when an answer has been tokenized (io/tokenizer_worker.py), since its tokens are known only then,
or `LEARNING_WAIT_S` after it finished, or at the end. One worker thread alone touches the disk: a slow disk loses
lines, a broken one all of them, and neither affects a request. A file that is no recording is never touched: while one
is in the place of a recording, nothing is recorded, and the log names it. Only their owner may read the files: they
show who sent how much, though not what. Bounds: QUEUE_MAX lines, PENDING_MAX attempts, `bytes_max` of each of
`files_max` files.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import trio

from ranvier_py.core.answers.answer_stream import NOTHING, Answer
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.attempt import Attempt, Observer
from ranvier_py.core.routing.health import Outcome
from ranvier_py.core.routing.request_record import MARK, Header, RequestRecord, record_of

log = logging.getLogger(__name__)

QUEUE_MAX = 2048  # lines that wait for the disk: some 10 MB
PENDING_MAX = 4096  # attempts that wait for their tokens; the tokenizer worker's queue holds fewer
PENDING_BYTES_MAX = 64 << 20  # of the bodies that pending attempts keep alive
LEARNING_WAIT_S = 30.0  # an answer that is not tokenized by then was probably dropped
SWEEP_S = 1.0  # between two searches for attempts that have waited too long
BATCH_MAX = 256  # lines in one call of the thread
LAST_WRITE_S = 1.0  # a hanging disk must not delay the end of the process
MARK_BYTES = f'{{"{MARK}"'.encode()  # what every file of ours begins with


@dataclass(slots=True)
class RecorderCounters:
    """What was written, and what was not. The writing thread counts lines, bytes, failures and losses."""

    waiting: int = gauge("Lines and attempts that wait to be written to the recording.")
    lines: int = counter("Lines of requests written to the recording.")
    bytes: int = counter("Bytes written to the recording, headers too.")
    dropped: int = counter("Lines of the recording dropped because its queue was full.")
    unlearned: int = counter("Lines of the recording without the tokens of an answer, though they were due.")
    failures: int = counter("Failures of the disk when the recording was written.")
    lost: int = counter("Lines of the recording that a failing disk did not take.")


@dataclass(frozen=True, slots=True)
class Finished:
    """An attempt that has finished."""

    attempt: Attempt
    outcome: Outcome
    at: float


class Recorder(Observer):
    """Observes attempts and records them. `run` writes; without it lines are dropped once the queue is full.

    Args:
        header: first line of every file; its `started` is the wall clock at `started_at`.
        started_at: the monotonic clock at that moment, in seconds.
        clock: the same monotonic clock.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        *,
        started_at: float,
        clock: Callable[[], float],
        bytes_max: int,
        files_max: int,
    ) -> None:
        self._files = RecordFiles(path, header.line(), bytes_max, files_max)
        self._started_at, self._clock = started_at, clock
        self._pending: dict[Attempt, Finished] = {}
        self._pending_bytes = 0
        self._queue: deque[RequestRecord] = deque()
        self._wake = trio.Event()
        self._one = trio.CapacityLimiter(1)  # one thread at a time, even if a write was abandoned
        self._troubled = False

    def finished(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        finished = Finished(attempt, outcome, now)
        if attempt.first_at is None or attempt.prompt.kind == "opaque":  # its tokens will never be known
            self._append(finished)
            return
        self._pending[attempt] = finished
        self._pending_bytes += len(attempt.prompt.body)
        while len(self._pending) > PENDING_MAX or (self._pending_bytes > PENDING_BYTES_MAX and self._pending):
            self._give_up(next(iter(self._pending)))

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:  # noqa: ARG002
        if answer is not NOTHING and attempt in self._pending:  # NOTHING: only the prompt; its answer comes later
            self._append(self._released(attempt), end, answer)

    def _append(self, finished: Finished, end: Boundary | None = None, answer: Answer = NOTHING) -> None:
        if len(self._queue) >= QUEUE_MAX:
            self._files.counters.dropped += 1
            return
        record = record_of(finished.attempt, finished.outcome, finished.at, self._started_at, end, answer)
        self._queue.append(record)
        self._wake.set()

    def _give_up(self, attempt: Attempt) -> None:
        self._files.counters.unlearned += 1
        self._append(self._released(attempt))

    def _released(self, attempt: Attempt) -> Finished:
        self._pending_bytes -= len(attempt.prompt.body)
        return self._pending.pop(attempt)

    def _sweep(self, before: float) -> None:
        """Give up attempts that finished until `before`. They are in the order in which they finished."""
        while self._pending:
            attempt, finished = next(iter(self._pending.items()))
            if finished.at > before:
                return
            self._give_up(attempt)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled, and then what is left. File errors are logged, not raised."""
        task_status.started()
        try:
            await self._write(())  # the first header, so that a file that can't be written is logged at the start
            while True:
                with trio.move_on_after(SWEEP_S):
                    await self._wake.wait()
                self._wake = trio.Event()
                self._sweep(self._clock() - LEARNING_WAIT_S)
                while self._queue:
                    await self._write([self._queue.popleft() for _ in range(min(BATCH_MAX, len(self._queue)))])
        finally:
            self._sweep(inf)
            last = list(self._queue)
            self._queue.clear()
            with trio.move_on_after(LAST_WRITE_S, shield=True):
                await self._write(last)

    async def _write(self, records: Sequence[RequestRecord]) -> None:
        trouble = await trio.to_thread.run_sync(self._files.write, records, abandon_on_cancel=True, limiter=self._one)
        if trouble and not self._troubled:
            log.warning(event("recorder.not_written", file=str(self._files.path), why=str(trouble)))
        elif self._troubled and not trouble:
            log.info(event("recorder.written", file=str(self._files.path)))
        self._troubled = bool(trouble)

    @property
    def counters(self) -> RecorderCounters:
        counters = self._files.counters
        counters.waiting = len(self._queue) + len(self._pending)
        return counters


class RecordFiles:
    """The files of one recording. One thread at a time calls `write`.

    Invariant: a file holds whole lines, its header first (test_recorder.py).
    """

    def __init__(self, path: Path, header: bytes, bytes_max: int, files_max: int) -> None:
        self.path = path
        self.counters = RecorderCounters()
        self._header, self._bytes_max, self._files_max = header, bytes_max, files_max
        self._size = 0  # of the current file; 0: no file has been begun

    def write(self, records: Sequence[RequestRecord]) -> str:
        """Append lines. Returns what went wrong, "" if nothing did."""
        lines = [record.line() for record in records]
        written = 0
        try:
            while written < len(lines) or self._size == 0:
                if self._size == 0 or self._size + len(lines[written]) > self._bytes_max:
                    self._begin()
                written += self._append(lines[written:])
        except OSError as error:
            if isinstance(error, FileNotFoundError):  # the file was removed: a new one needs its header
                self._size = 0
            self.counters.failures += 1
            self.counters.lost += len(lines) - written
            return error.strerror or str(error)
        return ""

    def _begin(self) -> None:
        """Rename each file to the next number and begin a new one, as each process does, whose clock and perhaps secret
        differ. Raises OSError, renaming none, if one isn't ours."""
        ours = [is_recording(self._numbered(number)) for number in range(self._files_max)]
        if ours[0]:
            last = ours.index(False) if False in ours else self._files_max - 1
            for number in range(last, 0, -1):
                self._numbered(number - 1).replace(self._numbered(number))
        self._put(self._header, os.O_CREAT | os.O_TRUNC, 0)

    def _append(self, lines: Sequence[bytes]) -> int:
        """Write as many of these lines as the file may hold, at least one. Returns how many. Raises OSError."""
        count, size = 0, self._size
        while count < len(lines) and (count == 0 or size + len(lines[count]) <= self._bytes_max):
            size += len(lines[count])
            count += 1
        if count:
            self._put(b"".join(lines[:count]), 0, self._size)
            self.counters.lines += count
        return count

    def _put(self, data: bytes, flags: int, at: int) -> None:
        """Write data at an offset, all of it or nothing. Raises OSError."""
        file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
        try:
            done = os.pwrite(file, data, at)
            if done < len(data):
                os.ftruncate(file, at)
                raise OSError(None, "the disk took only a part")
        finally:
            os.close(file)
        self._size = at + len(data)
        self.counters.bytes += len(data)

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path


def is_recording(path: Path) -> bool:
    """Whether a recording is at this path; False if nothing is. Raises OSError for anything else."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(None, f"{path.name} is there and no file")
        with path.open("rb") as stream:
            if stream.read(len(MARK_BYTES)) not in (MARK_BYTES, b""):
                raise OSError(None, f"{path.name} is there and no recording")
    except FileNotFoundError:
        return False
    return True


def check_recording(path: Path) -> None:
    """Raise ConfigError if no recording could be written at this path. Writes nothing."""
    try:
        if is_recording(path):
            path.open("ab").close()
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise OSError(None, f"{path.parent} is no folder to write to")
    except OSError as error:
        raise ConfigError([f"record_file: {path} can't be written: {error.strerror or error}"]) from error
