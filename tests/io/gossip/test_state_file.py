"""The file that remembers the peers: whatever is wrong with it, the node goes on."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from ranvier_py.io.gossip import state_file as gossip_state
from ranvier_py.io.gossip.state_file import MARK, STATE_BYTES_MAX, StateFile, digest


class FullDisk:
    """fsync fails as on a full disk, until it is emptied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        self.real = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.real(descriptor)


async def test_what_one_run_saves_the_next_one_reads(tmp_path: Path) -> None:
    path = tmp_path / "peers"
    file = StateFile(path)
    assert file.read() == b""
    await file.save(b"peers and epoch")
    assert StateFile(path).read() == b"peers and epoch"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["peers"]
    assert file.counters.writes == 1


async def test_it_is_written_when_it_changed_and_at_the_end(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    path = tmp_path / "peers"
    file = StateFile(path, interval_s=30)
    now = [b"one"]
    asked: list[float] = []

    def state() -> bytes:
        asked.append(trio.current_time())
        return now[0]

    async def next_write(number: int) -> None:
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(30)
        for _ in range(1_000_000):  # the thread that writes knows nothing of our clock
            await trio.lowlevel.checkpoint()
            if len(asked) == number and file.counters.writes == 1:
                return
        raise AssertionError("not written")

    async with trio.open_nursery() as nursery:
        await nursery.start(file.run, state)
        await next_write(1)
        assert StateFile(path).read() == b"one"
        await next_write(2)
        await next_write(3)
        assert file.counters.writes == 1
        now[0] = b"two"
        nursery.cancel_scope.cancel()
    assert StateFile(path).read() == b"two"
    assert file.counters.writes == 2


async def test_an_unchanged_state_of_the_run_before_is_not_written_again(tmp_path: Path) -> None:
    await StateFile(tmp_path / "peers").save(b"same")
    file = StateFile(tmp_path / "peers")
    await file.save(file.read())
    assert file.counters.writes == 0


GOOD = MARK + digest(b"state") + b"state"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        GOOD[:-1],
        GOOD[: len(MARK) + 3],
        GOOD + b"x",
        GOOD.replace(b"peers 1", b"peers 2"),
        b"\x00" * 100,
        MARK + digest(b"x" * (STATE_BYTES_MAX + 1)) + b"x" * (STATE_BYTES_MAX + 1),
    ],
)
def test_a_file_that_is_cut_or_foreign_is_reported_and_not_used(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "peers"
    path.write_bytes(content)
    file = StateFile(path)
    assert file.read() == b""
    assert file.counters.refused == 1
    assert len(caplog.records) == 1
    path.write_bytes(GOOD)
    assert file.read() == b"state"


def test_a_file_that_can_not_be_read_is_reported_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert StateFile(tmp_path / "file" / "peers").read() == b""
    assert "can't be read: Not a directory" in caplog.text


async def test_a_full_disk_is_reported_once_and_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "peers"
    file = StateFile(path)
    await file.save(b"old")
    disk = FullDisk(monkeypatch)
    for number in range(5):
        await file.save(b"new %d" % number)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text
    assert file.counters.failures == 5
    assert StateFile(path).read() == b"old"
    assert os.listdir(tmp_path) == ["peers"]
    disk.full = False
    await file.save(b"new")
    assert StateFile(path).read() == b"new"
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_a_folder_that_is_not_there_and_a_state_that_is_too_large_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = StateFile(tmp_path / "none" / "peers")
    await file.save(b"a")
    await file.save(b"x" * (STATE_BYTES_MAX + 1))
    assert len(caplog.records) == 1
    assert file.counters.failures == 2
    assert "No such file" in caplog.text


async def test_the_largest_state_is_kept(tmp_path: Path) -> None:
    largest = os.urandom(STATE_BYTES_MAX)
    await StateFile(tmp_path / "peers").save(largest)
    assert StateFile(tmp_path / "peers").read() == largest


async def test_a_disk_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node on a lost network disk must still be able to stop."""
    reached, release = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def hang(path: Path, content: bytes) -> None:
        token.run_sync_soon(reached.set)
        release.wait(20)

    monkeypatch.setattr(gossip_state, "write_whole", hang)
    monkeypatch.setattr(gossip_state, "LAST_WRITE_S", 0.01)
    file = StateFile(tmp_path / "peers")
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(file.run, lambda: b"state")
            nursery.cancel_scope.cancel()
        await reached.wait()
    release.set()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
async def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Opening a pipe waits for a writer: the node would not start, and say nothing."""
    path = tmp_path / "peers"
    make(path)
    kind = stat.S_IFMT(path.stat().st_mode)
    file = StateFile(path)
    with trio.fail_after(5):
        assert await trio.to_thread.run_sync(file.read, abandon_on_cancel=True) == b""
    await file.save(b"peers and epoch")
    assert (file.counters.refused, file.counters.failures) == (1, 1)
    assert stat.S_IFMT(path.stat().st_mode) == kind
