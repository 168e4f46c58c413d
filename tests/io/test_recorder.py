"""The recorder: bounded, rotated, and nobody's trouble."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import trio
import trio.testing

from ranvier_py.core.answers.answer_stream import NOTHING, Answer
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backends import Outcome
from ranvier_py.core.routing.request_record import Header, read_header, read_record
from ranvier_py.io import recorder
from ranvier_py.io.recorder import Recorder, RecordFiles
from tests.core.routing.test_request_record import CHAT, RECORD, SECRET, sent_attempt

HEADER = Header(1_000.0, 16, "a")
ANSWER = Answer({"role": "assistant", "content": SECRET}, SECRET, 203, 96, 9)


def attempt(first_at: float | None = 10.5) -> Attempt:
    made, _, _ = sent_attempt(CHAT, 100)
    made.first_at = first_at
    return made


def made(path: Path, bytes_max: int = 1 << 20, files_max: int = 3) -> Recorder:
    clock: Callable[[], float] = trio.current_time
    return Recorder(path, HEADER, started_at=4.0, clock=clock, bytes_max=bytes_max, files_max=files_max)


def records(path: Path) -> list[Any]:
    """The records of a file, whose first line is a header."""
    header, *lines = path.read_bytes().splitlines()
    assert read_header(orjson.loads(header)) == HEADER
    return [read_record(orjson.loads(line)) for line in lines]


async def recorded(target: Recorder, send: Callable[[Recorder], None]) -> None:
    """Run the recorder while it is told, and to its end."""
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(target.run)
            send(target)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()


async def test_an_attempt_is_written_when_its_answer_has_been_read(tmp_path: Path) -> None:
    one = attempt()

    def send(target: Recorder) -> None:
        target.attempt_sent(one, 10.0)
        target.started(one, 10.5)
        target.answered(one, one.prompt.end, NOTHING, 11.0)
        target.finished(one, Outcome.SUCCESS, 12.0)
        target.answered(one, one.prompt.end, NOTHING, 12.1)
        assert target.counters.waiting == 1
        target.answered(one, one.prompt.end, ANSWER, 12.2)
        target.answered(one, one.prompt.end, ANSWER, 12.3)

    target = made(tmp_path / "node.jsonl")
    await recorded(target, send)
    [record] = records(tmp_path / "node.jsonl")
    assert (record.cached_tokens, record.answer_tokens, record.total_s) == (96, 9, 2.0)
    assert (target.counters.lines, target.counters.unlearned) == (1, 0)
    assert target.counters.bytes == (tmp_path / "node.jsonl").stat().st_size
    assert (tmp_path / "node.jsonl").stat().st_mode & 0o777 == 0o600


async def test_an_attempt_without_a_token_is_written_at_once(tmp_path: Path) -> None:
    one = attempt(first_at=None)
    await recorded(made(tmp_path / "a"), lambda reported: reported.finished(one, Outcome.CONNECT_ERROR, 12.0))
    [record] = records(tmp_path / "a")
    assert record.outcome == "connect_error"
    assert not record.served


async def test_an_attempt_whose_update_does_not_come_is_written_without(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The tokenizer worker drops route updates when it has too many: their lines must not wait for ever, nor be
    lost."""
    del autojump_clock
    target = made(tmp_path / "a")
    async with trio.open_nursery() as nursery:
        await nursery.start(target.run)
        while not target.counters.bytes:  # the thread that begins the file knows nothing of a mocked clock
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(20)
        target.finished(attempt(), Outcome.SUCCESS, trio.current_time())
        await trio.sleep(recorder.LEARNING_WAIT_S - 2)
        assert target.counters.unlearned == 0
        await trio.sleep(4)
        assert (target.counters.unlearned, target.counters.waiting) == (1, 0), "handed to the thread"
        nursery.cancel_scope.cancel()


async def test_attempts_that_wait_are_written_at_the_end(tmp_path: Path) -> None:
    await recorded(
        made(tmp_path / "a"), lambda reported: reported.finished(attempt(), Outcome.SUCCESS, trio.current_time() + 20)
    )
    assert len(records(tmp_path / "a")) == 1


@pytest.mark.parametrize("bound", ["PENDING_MAX", "PENDING_BYTES_MAX"])
async def test_too_many_that_wait_for_their_route_update_are_written_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    attempts = [attempt() for _ in range(5)]
    monkeypatch.setattr(recorder, bound, 2 if bound == "PENDING_MAX" else 2 * len(attempts[0].prompt.body))
    target = made(tmp_path / "a")
    for one in attempts:
        target.finished(one, Outcome.SUCCESS, 12.0)
    assert target.counters.unlearned == 3
    target.answered(attempts[4], attempts[4].prompt.end, ANSWER, 13.0)
    assert target.counters.waiting == 5, "four lines and an attempt"


def test_lines_that_find_the_queue_full_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "QUEUE_MAX", 3)
    target = made(tmp_path / "a")
    for _ in range(5):
        target.finished(attempt(first_at=None), Outcome.TIMEOUT, 12.0)
    assert (target.counters.dropped, target.counters.waiting) == (2, 3)


def test_files_are_rotated_by_size_and_no_more_are_kept_than_wanted(tmp_path: Path) -> None:
    numbered = [replace(RECORD, at=float(number)) for number in range(10, 22)]
    files = RecordFiles(tmp_path / "a", HEADER.line(), len(HEADER.line()) + 3 * len(numbered[0].line()), 3)
    assert files.write(numbered[:2]) == ""
    assert files.write(numbered[2:]) == ""
    assert sorted(os.listdir(tmp_path)) == ["a", "a.1", "a.2"]
    found = [[record.at for record in records(tmp_path / name)] for name in ("a.2", "a.1", "a")]
    assert found == [[13, 14, 15], [16, 17, 18], [19, 20, 21]]


def test_a_line_that_is_longer_than_a_file_is_a_file(tmp_path: Path) -> None:
    files = RecordFiles(tmp_path / "a", HEADER.line(), 10, 2)
    assert files.write([RECORD, RECORD]) == ""
    assert len(records(tmp_path / "a")) == len(records(tmp_path / "a.1")) == 1


def test_one_file_begins_again(tmp_path: Path) -> None:
    files = RecordFiles(tmp_path / "a", HEADER.line(), len(HEADER.line()) + len(RECORD.line()), 1)
    assert files.write([RECORD, replace(RECORD, at=2.5)]) == ""
    assert os.listdir(tmp_path) == ["a"]
    assert [record.at for record in records(tmp_path / "a")] == [2.5]


def test_a_new_process_begins_a_new_file(tmp_path: Path) -> None:
    for _ in range(2):
        RecordFiles(tmp_path / "a", HEADER.line(), 1 << 20, 3).write([RECORD])
    assert len(records(tmp_path / "a")) == len(records(tmp_path / "a.1")) == 1


async def test_a_file_that_is_no_recording_is_never_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "precious"
    path.write_bytes(b"my thesis")
    with caplog.at_level(logging.INFO):
        target = made(path)
        await recorded(target, lambda reported: reported.finished(attempt(None), Outcome.SUCCESS, 12.0))
    assert path.read_bytes() == b"my thesis"
    assert os.listdir(tmp_path) == ["precious"]
    assert [entry.getMessage() for entry in caplog.records] == [
        f"recorder.not_written {path}: precious is there and no recording; going on without"
    ]
    assert (target.counters.lines, target.counters.lost) == (0, 1)


class FullDisk:
    """Takes so many bytes of each write, and says that it is full where that is none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.takes: int | None = None
        self.real = os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, file: int, data: bytes, at: int) -> int:
        if self.takes == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.real(file, data[: self.takes], at)


@pytest.mark.parametrize("number", [1, 2])
def test_an_older_file_that_is_no_recording_is_never_overwritten(tmp_path: Path, number: int) -> None:
    """Somebody may call a backup of his own FILE.1."""
    for _ in range(number):
        RecordFiles(tmp_path / "a", HEADER.line(), 1 << 20, 3).write([RECORD])
    foreign = tmp_path / f"a.{number}"
    foreign.write_bytes(b"my own notes")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    files = RecordFiles(tmp_path / "a", HEADER.line(), 1 << 20, 3)
    assert files.write([RECORD]) == f"a.{number} is there and no recording"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert (files.counters.failures, files.counters.lost) == (1, 1)
    foreign.unlink()
    assert files.write([RECORD]) == ""


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    assert RecordFiles(tmp_path / "a", HEADER.line(), 1 << 20, 3).write([RECORD]) == "a is there and no file"


@pytest.mark.parametrize("takes", [0, 50])
def test_a_full_disk_costs_lines_and_leaves_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: int
) -> None:
    disk = FullDisk(monkeypatch)
    files = RecordFiles(tmp_path / "a", HEADER.line(), 1 << 20, 2)
    assert files.write([RECORD]) == ""
    disk.takes = takes
    assert files.write([RECORD, RECORD]) != ""
    assert (files.counters.failures, files.counters.lost) == (1, 2)
    assert len(records(tmp_path / "a")) == 1
    disk.takes = None
    assert files.write([replace(RECORD, at=9.0)]) == ""
    assert [record.at for record in records(tmp_path / "a")] == [RECORD.at, 9.0]


def test_a_file_that_somebody_took_away_is_begun_again(tmp_path: Path) -> None:
    """As logrotate does."""
    files = RecordFiles(tmp_path / "a", HEADER.line(), 1 << 20, 2)
    files.write([RECORD])
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    files.write([RECORD])
    assert files.write([RECORD]) == ""
    assert len(records(tmp_path / "a")) == 1


async def test_a_folder_that_is_not_there_is_stated_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = made(tmp_path / "nowhere" / "a")

    def send(reported: Recorder) -> None:
        for _ in range(3):
            reported.finished(attempt(None), Outcome.SUCCESS, 12.0)

    with caplog.at_level(logging.INFO):
        await recorded(target, send)
    assert len(caplog.records) == 1
    assert "No such file or directory" in caplog.text
    (tmp_path / "nowhere").mkdir()
    with caplog.at_level(logging.INFO):
        await recorded(target, send)
    assert len(records(tmp_path / "nowhere" / "a")) == 3
