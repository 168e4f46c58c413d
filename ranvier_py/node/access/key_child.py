"""Reads a large file of keys in a process of its own, and writes the table to stdout, or what is wrong to stderr."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from ranvier_py.config.key_files import read_key_file
from ranvier_py.core.errors import ConfigError

NICENESS = 5  # requests come first


def main(path: str, kind: str) -> int:
    with suppress(OSError):
        os.nice(NICENESS)
    try:
        table = read_key_file(Path(path), kind)
    except ConfigError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    for number, line in enumerate(table.packed()):
        sys.stdout.buffer.write(b"\n" + line if number else line)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
