"""The cluster's keys, read at the start and again whenever the key file changes or the configuration is reloaded.

Invariant: a change of the key parts no nodes, though they restart meanwhile (test_key_rotation.py). The file has the
format of `keyring`, plus a line `fingerprint: <key>`, from which, or else from the first key, the secret of
fingerprints is derived unless one is configured. A running node keeps the secret that it began with.
Rule: a file that can't be read or used is logged once and changes nothing. It is checked every LOOK_INTERVAL_S by time,
size and inode, which notices another symlink, too. No key is ever logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import trio

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.log_events import event
from ranvier_py.core.mesh.wire.keyring import KEY_BYTES, KeyRing, insecure_ring, key_of, parse_key_ring
from ranvier_py.core.metrics import counter, gauge

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 64 * 1024  # four keys and many comments fit; a larger file is another one, named by mistake
LOOK_INTERVAL_S = 3.0  # a rotation waits for the slowest node
FINGERPRINT = "fingerprint"


class Keys(NamedTuple):
    """The keys that seal gossip, and the secret of fingerprints for when the operator configures none.

    `is_own`: the secret comes from a key of its own, so that it stays when other keys come and go.
    """

    ring: KeyRing
    fingerprint_secret: bytes
    is_own: bool = False

    def __repr__(self) -> str:
        return f"Keys({self.ring!r})"


@dataclass(slots=True)
class KeyFileCounters:
    changes: int = counter("New cluster keys read from their file.")
    failures: int = counter("Times that the file of cluster keys could not be used.")
    keys: int = gauge("Cluster keys that this node has now.")


def fingerprint_secret(key: bytes) -> bytes:
    """Derive 32 bytes that reveal nothing about the key, nor about anything sealed with it."""
    return blake2b(key=key, digest_size=32, person=b"of fingerprints").digest()


def keys_of(key: bytes) -> Keys:
    """Return keys made of one key, for workers whose only peers are each other."""
    return Keys(parse_key_ring(key.hex()), fingerprint_secret(key))


def insecure_keys(cluster_name: str) -> Keys:
    """Return keys that anybody can derive. The name only keeps the fingerprints of two clusters apart."""
    return Keys(insecure_ring(), fingerprint_secret(blake2b(cluster_name.encode(), digest_size=KEY_BYTES).digest()))


def parse_keys(text: str) -> Keys:
    """Parse a key file's text. Raises ConfigError with one line for each problem, without the keys."""
    lines = text.splitlines()
    problems: list[str] = []
    kept: bytes | None = None
    for index, line in enumerate(lines):
        name, colon, written = line.partition(":")
        if not colon or name.strip() != FINGERPRINT:
            continue
        if kept is not None:
            problems.append(f"cluster key file: line {index + 1} is a second fingerprint line")
        kept = key_of(written.strip())
        if kept is None:
            problems.append(f"cluster key file: line {index + 1} must have a key after «{FINGERPRINT}:»")
            kept = b""
        lines[index] = ""  # keeps the numbers of the other lines
    try:
        ring = parse_key_ring("\n".join(lines))
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return Keys(ring, fingerprint_secret(kept or ring.keys[ring.primary]), kept is not None)


def rotation_advice(keys: Keys, path: Path) -> str:
    """Return what an operator should do before the keys are rotated further; mostly empty."""
    if keys.is_own or len(keys.ring.keys) == 1:
        return ""
    return (
        f"{path} has several keys and no fingerprint line: fingerprints follow from the first key, so that a node that "
        "restarts after another one came first shares no routes; write «fingerprint: OLD-FIRST-KEY», which stays"
    )


def read_keys(path: Path) -> Keys:
    """Read the keys of a file. Raises ConfigError. Blocks for one small read."""
    try:
        with path.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ConfigError([f"cluster_key_file: {path} is too large to hold keys"])
        return parse_keys(content.decode())
    except OSError as error:
        raise ConfigError([f"cluster_key_file: {path} can't be read: {error.strerror}"]) from error
    except UnicodeDecodeError:
        raise ConfigError([f"cluster_key_file: {path} is not text"]) from None


Signature = tuple[int, int, int]
UNREAD: Signature = (0, 0, 0)
"""Of a file that can't be read or used: it is read again at each look, since a change of its mode does not show."""


class FollowedFile:
    """A file that is read again when it changes. `trouble`: why it could not be, if so. `settles`: only once two looks
    have found the same change, since a part of it would be a good file, too."""

    settles = False

    def __init__(self, path: Path, *, interval_s: float = LOOK_INTERVAL_S) -> None:
        self.path, self.interval_s, self.trouble = path, interval_s, ""
        self._signature = self._seen = signature_of(path)  # before reading: a change in between is seen later
        self._asked = trio.Event()

    async def read(self) -> None:
        """Read it, and take what it has. Raises ConfigError, with nothing changed."""
        raise NotImplementedError

    def refused(self, error: ConfigError, *, is_new: bool) -> None:
        """Note that it can't be used. `is_new`: for another reason than at the last look."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled."""
        task_status.started()
        while True:
            with trio.move_on_after(self.interval_s):
                await self._asked.wait()
            asked, self._asked = self._asked.is_set(), trio.Event()
            await self.look(asked=asked)

    def look_soon(self) -> None:
        """Read the file again soon, even if it looks unchanged."""
        self._asked.set()

    async def look(self, *, asked: bool = False) -> None:
        """Read the file again if it changed, or if `asked` to."""
        signature = await trio.to_thread.run_sync(signature_of, self.path, abandon_on_cancel=True)
        before, self._seen = self._seen, signature
        if not asked and (signature == self._signature or (self.settles and signature != before)):
            return
        is_large = signature is not None and signature[1] > FILE_BYTES_MAX  # to be read in vain again and again
        self._signature = signature if is_large else signature and UNREAD
        try:
            await self.read()
        except ConfigError as error:
            is_new, self.trouble = self.trouble != str(error), str(error)
            self.refused(error, is_new=is_new)
            return
        self._signature, self.trouble = signature, ""


class KeyFile(FollowedFile):
    """Rereads the key file, and gives `changed` each new ring once. Raises ConfigError if it has no keys at first."""

    def __init__(
        self, path: Path, changed: Callable[[KeyRing], object], *, interval_s: float = LOOK_INTERVAL_S
    ) -> None:
        super().__init__(path, interval_s=interval_s)
        self.changed = changed
        self.keys = read_keys(path)
        self._in_use = self.keys.fingerprint_secret
        self._advise()
        self.counters = KeyFileCounters(keys=len(self.keys.ring.keys))

    async def read(self) -> None:
        self._take(await trio.to_thread.run_sync(read_keys, self.path, abandon_on_cancel=True))

    def refused(self, error: ConfigError, *, is_new: bool) -> None:
        self.counters.failures += 1
        if is_new:
            log.error(event("gossip.keys_refused", problems=error.problems))

    def _take(self, keys: Keys) -> None:
        before, self.keys = self.keys, keys
        if keys.fingerprint_secret not in (before.fingerprint_secret, self._in_use):
            log.warning(event("gossip.fingerprints_differ", file=str(self.path)))
        else:
            self._advise()
        if (keys.ring.keys, keys.ring.primary) != (before.ring.keys, before.ring.primary):
            self.counters.changes += 1
            self.counters.keys = len(keys.ring.keys)
            log.info(event("gossip.keys_changed", ids=list(keys.ring.keys), first=keys.ring.primary))
            self.changed(keys.ring)

    def _advise(self) -> None:
        if advice := rotation_advice(self.keys, self.path):
            log.warning(event("gossip.fingerprint_line_missing", advice=advice))


def signature_of(path: Path) -> Signature | None:
    """Return what differs between two versions of a file; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
