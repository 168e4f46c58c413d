"""Files of keys that a part of a node follows: of its clients, and of its control port.

Rule: a file with an error changes nothing; the log names its lines once, and `trouble` for as long as they stand. One
that has lost all its keys is being written. It is read before a port opens, again when it changes, and at each reload.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ranvier_py.config.config_model import KEYS, Config
from ranvier_py.core.access.key_table import KeyTable
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import Sample, counter, gauge, samples
from ranvier_py.io.keys import FollowedFile
from ranvier_py.node.access.key_reader import read_keys
from ranvier_py.node.part import Part

log = logging.getLogger(__name__)

PREFIXES = {"keys_file": "access", "control_keys_file": "control_access"}
"""Of metrics, by the key of the configuration that names the file."""


@dataclass(slots=True)
class KeysFileCounters:
    keys: int = gauge("Keys in the file of keys.")
    tenants: int = gauge("Tenants in the file of keys.")
    file_changes: int = counter("Times that the file of keys was read and taken.")
    file_failures: int = counter("Times that the file of keys could not be used.")


class KeysFile(FollowedFile):
    """A file of keys; `users` take its table. `kind`: the key of the configuration that names it."""

    settles = True

    def __init__(self, path: Path, kind: str, *users: Callable[[KeyTable], object]) -> None:
        super().__init__(path)
        self.counters = KeysFileCounters()
        self.kind, self._users = kind, users

    async def read(self) -> None:
        path = self.path
        table = await self.found(path)
        if path == self.path:  # else there is another one by now, which the next look reads
            self.take(table)

    async def found(self, path: Path) -> KeyTable:
        """Read a file of this kind. Raises ConfigError."""
        table = await read_keys(path, self.kind)
        if self.counters.keys and not table:
            raise ConfigError([f"{self.kind}: {path} has no key any more: is it being written?"])
        return table

    def take(self, table: KeyTable) -> None:
        """Let in who has a key of this table."""
        counters = self.counters
        for use in self._users:
            use(table)
        counters.keys, counters.tenants = len(table), len(table.tenants)
        counters.file_changes += 1
        log.info(event("access.keys_read", file=str(self.path), keys=counters.keys, tenants=counters.tenants))

    def refused(self, error: ConfigError, *, is_new: bool) -> None:
        self.counters.file_failures += 1
        if is_new:
            log.error(event("access.keys_refused", problems=error.problems))


class KeyedPart(Part):
    """A part that lets in who has a key of its file, if it has one. It reads the file as it starts, by `read`."""

    file: KeysFile | None

    def __init__(self, path: Path | None, kind: str, *users: Callable[[KeyTable], object]) -> None:
        self.file = KeysFile(path, kind, *users) if path is not None else None
        self._prepared: tuple[Path, KeyTable] | None = None  # another file, which a reload is about to name

    async def read(self) -> None:
        """Raises ConfigError."""
        if self.file is not None:
            await self.file.read()

    async def loop(self) -> None:
        if self.file is not None:
            await self.file.run()

    async def reread(self, after: Config | None) -> None:
        self._prepared = None
        if self.file is None:
            return
        self.file.look_soon()
        path: Path | None = KEYS[self.file.kind].value_in(after) if after is not None else None
        if path is not None and path != self.file.path:
            self._prepared = path, await self.file.found(path)

    def move(self, path: Path | None) -> None:
        """Follow a file at another path, if there is one: whether keys are needed is decided at the start. What it has
        holds at once."""
        if self.file is None or path is None:
            return
        self.file.path = path
        if self._prepared is not None and self._prepared[0] == path:
            self.file.take(self._prepared[1])
        self._prepared = None
        self.file.look_soon()

    def findings(self, now: float) -> Iterator[Finding]:
        if self.file is not None and (trouble := self.file.trouble):
            kind, path = self.file.kind, str(self.file.path)
            what = f"{kind} can't be used, so the keys before hold: {trouble}"
            remedy, whom = "Mend its lines; it is read again by itself.", "keys that were added or taken out since"
            yield Finding(
                "keys_file",
                Severity.DEGRADED,
                what,
                about=path,
                whom=whom,
                remedy=remedy,
                command=f"ranvier keys check {path}",
            )

    def metrics(self) -> Iterator[Sample]:
        if self.file is not None:
            yield from samples(PREFIXES[self.file.kind], self.file.counters)
