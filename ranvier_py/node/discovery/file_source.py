"""Backends from a file that somebody else writes.

Rule: it is taken whole once two looks have found the same change, or not at all: then the log names what is wrong once.
"""

from __future__ import annotations

from pathlib import Path

import trio

from ranvier_py.config.backend_files import read_backend_file
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.routing.wanted.found_backend import SourceName
from ranvier_py.io.keys import FollowedFile
from ranvier_py.io.logs import mask_in_logs
from ranvier_py.node.discovery.followers import Sink, SourceFollower

FILE = SourceName("file")
LOOK_S = 1.0  # a change is taken with the second look


class BackendsFile(FollowedFile):
    """The file, as its looks find it."""

    settles = True

    def __init__(self, path: Path, sink: Sink) -> None:
        super().__init__(path, interval_s=LOOK_S)
        self._sink = sink

    async def read(self) -> None:
        found = await trio.to_thread.run_sync(read_backend_file, self.path, abandon_on_cancel=True)
        mask_in_logs(each.key.content for each in found.found if each.key is not None)
        self._sink.take(found.found, found.left_out)

    def refused(self, error: ConfigError, *, is_new: bool) -> None:
        self._sink.fail("; ".join(error.problems))


class FileSource(SourceFollower):
    """See the module."""

    def __init__(self, path: Path) -> None:
        super().__init__(FILE, path)
        self._path = path
        self._file: BackendsFile | None = None

    async def run(self, sink: Sink) -> None:
        self._file = BackendsFile(self._path, sink)
        await self._file.look(asked=True)
        await self._file.run()

    def look_soon(self) -> None:
        if self._file is not None:
            self._file.look_soon()
