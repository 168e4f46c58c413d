"""The file in which counts of running budgets outlive the processes that made them.

What is new is appended every few seconds and synced to the disk; once the file has grown to several times of what it
is worth, it is written anew as a whole. All of that happens in a thread. Rule: an error of the file is logged once
until it works again, and the node goes on without it. Bound: FILE_BYTES_MAX are read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import counter

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 256 * 1024 * 1024
GROWTH = 4  # times of what it was when it was written anew
SMALL_BYTES = 64 * 1024  # below which it never is


@dataclass(slots=True)
class LimitFileCounters:
    writes: int = counter("Times that counts of budgets were appended to their file.")
    failures: int = counter("Times that the file of budgets' counts could not be written.")


class LimitFile:
    """One file. `write_whole` replaces a file as a whole."""

    def __init__(self, path: Path, write_whole: Callable[[Path, bytes], None]) -> None:
        self.path, self.counters = path, LimitFileCounters()
        self._write_whole = write_whole
        self._size = self._least = 0
        self._trouble = False

    def read(self) -> bytes:
        """Return what earlier processes left; b"" if there is no usable file."""
        try:
            if not self.path.is_file():
                return b""
            with self.path.open("rb") as stream:
                content = stream.read(FILE_BYTES_MAX)
        except OSError as error:
            log.warning(event("limits.state_refused", file=str(self.path), why=error.strerror))
            return b""
        return content

    def refuse(self, end: int, aside: str) -> None:
        """Log that all behind so many bytes is not used. `aside`: the name that the file has now, if it has another."""
        why = f"from byte {end} on, it is cut off or damaged" if end else "it is damaged, or not ours"
        why += f", and is {aside} now" if aside else ""
        log.warning(event("limits.state_refused", file=str(self.path), why=why))

    @property
    def is_due(self) -> bool:
        """Whether it is to be written anew."""
        return self._trouble or self._size > max(SMALL_BYTES, GROWTH * self._least)

    async def append(self, data: bytes) -> None:
        if data:
            await self._in_thread(self._append, data)
            self._size += len(data)

    async def replace(self, data: bytes) -> None:
        if await self._in_thread(lambda content: self._write_whole(self.path, content), data):
            self._size = self._least = len(data)

    async def _in_thread(self, write: Callable[[bytes], None], data: bytes) -> bool:
        try:
            await trio.to_thread.run_sync(write, data, abandon_on_cancel=True)
        except OSError as error:
            self.counters.failures += 1
            if not self._trouble:
                log.warning(event("limits.state_not_written", file=str(self.path), why=error.strerror or str(error)))
            self._trouble = True
            return False
        self.counters.writes += 1
        if self._trouble:
            log.info(event("limits.state_written", file=str(self.path)))
        self._trouble = False
        return True

    def _append(self, data: bytes) -> None:
        with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
