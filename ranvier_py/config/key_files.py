"""Reads files of keys: TOML, or YAML if its name says so.

Bounds: TOML_BYTES_MAX is 60,000 keys with everything set, which a child process reads within seconds; YAML_BYTES_MAX,
since PyYAML takes far longer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ranvier_py.config.toml_file import YAML_SUFFIXES, NotToml, parse_toml, read_text, values_of
from ranvier_py.core.access.key_table import KeyTable
from ranvier_py.core.access.keys_file import KeyTables
from ranvier_py.core.errors import ConfigError

TOML_BYTES_MAX = 16 * 1024 * 1024
YAML_BYTES_MAX = 1024 * 1024

PIECE_TABLES = 1000
TABLE = re.compile(r"^\[\[\w+\]\]", re.MULTILINE)  # the head of one, unless it is within a text of several lines
LONG_QUOTES = ('"""', "'''")


def read_key_file(path: Path, kind: str) -> KeyTable:
    """Read a file of this kind, the key of the configuration that names it. Raises ConfigError with all problems, each
    with its line."""
    if path.suffix.lower() in YAML_SUFFIXES:
        from ranvier_py.config.yaml_file import plain, read_yaml  # noqa: PLC0415  # PyYAML, which few files need

        written, lines = read_yaml(path, YAML_BYTES_MAX), dict[str, int]()
        values = plain(written.tree, "", lines) if written.tree is not None else {}
        return checked(kind, path, [values], lines.get, written.problems)
    try:
        text = read_text(path, TOML_BYTES_MAX)
    except ConfigError as error:
        raise ConfigError([f"{kind}: {problem}" for problem in error.problems]) from error
    try:
        return checked(kind, path, map(values_of, pieces_of(text)), HeadLines(text).line_of, [])
    except (NotToml, ConfigError):  # only now its lines are worth the time
        found = parse_toml(text, str(path))
        return checked(kind, path, [found.values], found.lines.get, found.problems)


def pieces_of(text: str) -> Iterator[str]:
    """Cut a text before some of its tables, so that not all of its values are in memory at once."""
    heads = [found.start() for found in heads_of(text)]
    cuts = [0, *heads[PIECE_TABLES::PIECE_TABLES], len(text)]
    return (text[start:end] for start, end in pairwise(cuts))


def heads_of(text: str) -> Iterator[re.Match[str]]:
    """Find the heads of tables; none where a text of several lines may look like one."""
    return iter(()) if any(quotes in text for quotes in LONG_QUOTES) else TABLE.finditer(text)


class HeadLines:
    """The lines of the heads of tables, for a text of which no other lines are known."""

    def __init__(self, text: str) -> None:
        self._text, self._heads = text, dict[str, list[int]]()

    def line_of(self, at: str) -> int | None:
        """Return the line of a table: `key[3]`."""
        if not self._heads:
            for found in heads_of(self._text):
                self._heads.setdefault(found[0].strip("[]"), []).append(found.start())
        kind, _, number = at.rstrip("]").partition("[")
        heads = self._heads.get(kind, ())
        if not number.isdecimal() or int(number) >= len(heads):
            return None
        return self._text.count("\n", 0, heads[int(number)]) + 1


def checked(
    kind: str,
    path: Path,
    values: Iterable[Mapping[str, Any]],
    line_of: Callable[[str], int | None],
    problems: Sequence[str],
) -> KeyTable:
    """Return the table of these values. Raises ConfigError."""

    def place(at: str) -> str:
        line = line_of(at) or line_of(at.partition(".")[0]) or line_of(at.partition("[")[0])
        return f"{path}:{line}" if line else str(path)

    tables = KeyTables(kind, place)
    for each in values:
        tables.take(each)
    found = tables.table()
    if problems or tables.problems:
        raise ConfigError([f"{kind}: {problem}" for problem in (*problems, *tables.problems)])
    return found
