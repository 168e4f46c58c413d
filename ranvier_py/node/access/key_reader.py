"""Reads files of keys without holding up the node: small ones in a thread, large ones in a child process.

Bounds: SMALL_BYTES, READ_LIMIT_S. The child has none of the configuration's variables, since keys are among them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from subprocess import DEVNULL

import trio

from ranvier_py.config.key_files import read_key_file
from ranvier_py.core.access.key_table import KeyTable, unpacked
from ranvier_py.core.errors import ConfigError

COMMAND = (sys.executable, "-P", "-m", "ranvier_py.node.access.key_child")
SMALL_BYTES = 64 * 1024
"""Some 300 keys: a thread of this process reads them within some tens of milliseconds."""

READ_LIMIT_S = 120.0  # ten times what the largest file takes beside full cores


async def read_keys(path: Path, kind: str) -> KeyTable:
    """Read a file of keys. Raises ConfigError with all that is wrong."""
    if await trio.to_thread.run_sync(size_of, path, kind) <= SMALL_BYTES:
        return await trio.to_thread.run_sync(read_key_file, path, kind, abandon_on_cancel=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RANVIER_")}
    with trio.move_on_after(READ_LIMIT_S):
        found = await trio.run_process(
            [*COMMAND, str(path), kind],
            stdin=DEVNULL,
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            env=variables,
        )
        if found.returncode == 0:
            return await table_of(found.stdout)
        raise ConfigError(found.stderr.decode(errors="replace").splitlines() or [f"{kind}: {path} could not be read"])
    raise ConfigError([f"{kind}: {path} could not be read within {READ_LIMIT_S:g} s"])


def size_of(path: Path, kind: str) -> int:
    """Return the size of a file; 0 if there is none, which its reader says. Raises ConfigError for a pipe or a device,
    which might never end."""
    try:
        found = path.stat()
    except OSError:
        return 0
    if not (S_ISREG(found.st_mode) or S_ISDIR(found.st_mode)):
        raise ConfigError([f"{kind}: {path} is no regular file"])
    return found.st_size


async def table_of(packed: bytes) -> KeyTable:
    for table in unpacked(packed.split(b"\n")):
        await trio.lowlevel.checkpoint()
        if table is not None:
            return table
    raise AssertionError("it has yielded no table")
