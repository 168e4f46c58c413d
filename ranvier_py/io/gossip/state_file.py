"""The small file that remembers peers and epoch across a restart. It is a convenience: a node can do without it.

It is written in a thread, every half minute if its content changed and once more at the end: to a new file, synced to
the disk, then renamed, so that a reader finds the old or the new content and never half of it.

Rules: an error of the file is logged once until the file works again, and the node goes on without it. It has at most
STATE_BYTES_MAX. Only its owner may read it: it names our peers, though it has no key.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import trio

from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import counter

log = logging.getLogger(__name__)

STATE_BYTES_MAX = 128 * 1024  # 256 peers, the clocks of 1024 commands and 256 revocations fit; a larger file is another
MARK = b"ranvier peers 1\n"
DIGEST_BYTES = 16  # finds cut or damaged files; not against forgers, who would need the cluster's key anyway

NO_FILE = "is no regular file"

WRITE_INTERVAL_S = 30.0  # a crash loses as much; peers send it again
LAST_WRITE_S = 1.0  # a hanging disk must not delay the end of the process


@dataclass(slots=True)
class StateFileCounters:
    writes: int = counter("Times that the state file was written.")
    failures: int = counter("Times that the state file could not be written.")
    refused: int = counter("State files that were not used at the start.")


class StateFile:
    """Reads the state of an earlier run, and writes that of this one."""

    def __init__(self, path: Path, *, interval_s: float = WRITE_INTERVAL_S) -> None:
        self.path, self.interval_s = path, interval_s
        self._written: bytes | None = None
        self._trouble = ""
        self.counters = StateFileCounters()

    def read(self) -> bytes:
        """Return what an earlier run left; b"" if there is no usable file. Blocks for one small read."""
        try:
            if is_something_else(self.path):
                return self._refuse(NO_FILE)
            with self.path.open("rb") as stream:
                content = stream.read(len(MARK) + DIGEST_BYTES + STATE_BYTES_MAX + 1)
        except FileNotFoundError:
            return b""
        except OSError as error:
            return self._refuse(f"can't be read: {error.strerror}")
        digest_at, state_at = len(MARK), len(MARK) + DIGEST_BYTES
        state = content[state_at:]
        if not content.startswith(MARK):
            return self._refuse("is of another version, or no such file at all")
        if len(state) > STATE_BYTES_MAX or content[digest_at:state_at] != digest(state):
            return self._refuse("is damaged")
        self._written = state
        return state

    def _refuse(self, why: str) -> bytes:
        self.counters.refused += 1
        log.warning(event("gossip.state_refused", file=str(self.path), why=str(why)))
        return b""

    async def run(
        self, state: Callable[[], bytes], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Write what `state` returns whenever it changed, until cancelled. File errors are logged, not raised."""
        task_status.started()
        try:
            while True:
                await trio.sleep(self.interval_s)
                await self.save(state())
        finally:
            with trio.move_on_after(LAST_WRITE_S, shield=True):
                await self.save(state())

    async def save(self, state: bytes) -> None:
        if state == self._written:
            return
        try:
            if len(state) > STATE_BYTES_MAX:
                raise OSError(None, f"{len(state)} bytes are too many")
            await trio.to_thread.run_sync(write_whole, self.path, MARK + digest(state) + state, abandon_on_cancel=True)
        except OSError as error:
            self.counters.failures += 1
            if not self._trouble:
                log.warning(event("gossip.state_not_written", file=str(self.path), why=error.strerror or str(error)))
            self._trouble = str(error)
            return
        self._written = state
        self.counters.writes += 1
        if self._trouble:
            log.info(event("gossip.state_written", file=str(self.path)))
        self._trouble = ""


def digest(state: bytes) -> bytes:
    return blake2b(state, digest_size=DIGEST_BYTES, person=b"gossip state").digest()


def is_something_else(path: Path) -> bool:
    """Whether something other than a file is there: a pipe would block, a device must stay. Raises OSError."""
    return path.exists() and not path.is_file()


def set_aside(path: Path) -> str:
    """Keep a file that this release can't use from being replaced: it is of a later one, or damaged. Returns its new
    name; "" if it stays where it is."""
    aside = path.with_name(f"unused-{path.name}")
    try:
        path.replace(aside)
    except OSError:
        return ""
    return aside.name


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file as a whole or not at all. Raises OSError."""
    if is_something_else(path):
        raise OSError(None, NO_FILE)
    new = path.with_name(f".{path.name}.new")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the rename is on the disk, too
    finally:
        os.close(folder)
