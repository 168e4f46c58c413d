"""Reads the lines of a trace file and the time stamps on them, and reports what is wrong with a line.

Any bytes, gzipped or not, yield lines or a TraceError that says «FILE:LINE: found …, expected …». A time stamp is a
number or an ISO 8601 text. Numbers are seconds, but from 1e11 on (the year 5138) they are taken for milliseconds since
1970, unless the format has a unit of its own. The times of a trace start at 0.

Bound: one line at a time in memory, of at most `LINE_BYTES_MAX`.
"""

from __future__ import annotations

import gzip
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import BufferedReader, RawIOBase
from itertools import count
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any

import orjson

from ranvier_py.replay.traces.trace import TraceError

LINE_BYTES_MAX = 64 << 20  # the size of the largest body that a node accepts; a longer line is an error
FOUND_CHARACTERS_MAX = 60  # characters of a wrong value that a message shows
INTEGER_MAX = 2**62 - 1  # greatest number that a file may contain; leaves room for our own numbers above
GZIP_MAGIC = b"\x1f\x8b"
MILLISECONDS_FROM = 1e11
STAMP_MAX = 1e19  # nanoseconds since 1970, and room
UNREADABLE = (OSError, EOFError, ValueError, zlib.error)  # ValueError: a NUL in the name


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One line that holds a JSON object."""

    file: str
    number: int
    fields: Mapping[str, Any]

    def wrong(self, found: str, expected: str) -> TraceError:
        """Make the error for this line."""
        return TraceError(f"{self.file}:{self.number}: found {found}, expected {expected}")

    def integer(self, name: str, low: int = 0, high: int = INTEGER_MAX) -> int:
        """Return the whole number under `name`, from `low` to `high`. Raises TraceError."""
        value = self.fields.get(name)
        if type(value) is not int or not low <= value <= high:
            limits = f"from {low} on" if high == INTEGER_MAX else f"from {low} to {high}"
            raise self.wrong(f"{name} {shown(value)}", f"a whole number {limits}")
        return value

    def text(self, *names: str) -> str:
        """Return as text the text or whole number under the first of `names` that exists, or "". Raises TraceError."""
        for name in names:
            value = self.fields.get(name)
            if value is None:
                continue
            if type(value) is int:
                return str(value)
            if type(value) is not str:
                raise self.wrong(f"{name} {shown(value)}", "a text or a whole number")
            return value
        return ""

    def stamp_s(self, name: str, unit_s: float | None = None) -> float:
        """Return the time stamp under `name`, in seconds since an unknown moment; `unit_s` is its unit, None: as above.
        Raises TraceError."""
        value: Any = self.fields.get(name)
        try:
            if type(value) is str:
                return datetime.fromisoformat(value).timestamp()
            if type(value) in (int, float) and isfinite(value) and abs(value) <= STAMP_MAX:
                return float(value * (unit_s or (0.001 if value >= MILLISECONDS_FROM else 1.0)))
        except (ValueError, OverflowError, OSError):  # no date, or one before the years that a clock knows
            pass
        raise self.wrong(f"{name} {shown(value)}", "a time stamp: seconds, milliseconds since 1970, or ISO 8601")


def shown(value: object) -> str:
    """Return a wrong value as text, short enough for a message."""
    if value is None:
        return "missing or null"
    try:
        text = repr(value)
    except RecursionError:
        return "brackets in brackets"
    return text if len(text) <= FOUND_CHARACTERS_MAX else text[: FOUND_CHARACTERS_MAX - 1] + "…"


def why(error: Exception) -> str:
    """Return why a file can't be read, without its name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, bytes) of each line that is not blank, numbered from 1 on. Raises TraceError."""
    try:
        with path.open("rb") as file:
            yield from lines_of(str(path), file)
    except UNREADABLE as error:
        raise TraceError(f"{path}: can't be read: {why(error)}") from error


def lines_of(name: str, source: BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of an open file as `raw_lines` does. `name` is for messages. Raises TraceError."""
    number = 0
    try:
        file = gzip.GzipFile(fileobj=source) if source.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC) else source
        for number in count(1):
            data = file.readline(LINE_BYTES_MAX + 1)
            if not data:
                return
            if number == 1:
                data = data.removeprefix(BOM_UTF8)  # some editors begin every file with it
            if len(data) > LINE_BYTES_MAX:
                raise TraceError(f"{name}:{number}: found a line of more than {LINE_BYTES_MAX} bytes")
            if data.strip():
                yield number, data
    except UNREADABLE as error:
        where = f"{name}:{number}" if number else name
        raise TraceError(f"{where}: can't be read: {why(error)}") from error


class BodyFile(RawIOBase):
    """A body that arrives in pieces, as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # of bytes, as BufferedReader's
        while len(self._rest) < len(GZIP_MAGIC) and (piece := next(self._pieces, None)) is not None:
            self._rest += piece
        found, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(found)] = found
        return len(found)


def json_line(path: Path, number: int, data: bytes) -> TraceLine:
    """Parse the JSON object on one line. Raises TraceError."""
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{path}:{number}: found no JSON ({error}), expected one JSON object") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{path}:{number}: found {shown(fields)}, expected one JSON object")
    return TraceLine(str(path), number, fields)


def json_lines(path: Path) -> Iterator[TraceLine]:
    """Yield the objects of a file that has one JSON object on each line. Raises TraceError."""
    for number, data in raw_lines(path):
        yield json_line(path, number, data)


def first_line(path: Path) -> tuple[int, bytes]:
    """Return the first line that is not blank, with its number. Raises TraceError if there is none."""
    for found in raw_lines(path):
        return found
    raise nothing_in(path)


def nothing_in(path: Path) -> TraceError:
    return TraceError(f"{path}: found no line, expected at least one request")


def name_of(path: Path) -> str:
    """Return a trace's name: its file's name without `.gz` and without its last suffix."""
    name = path.name.removesuffix(".gz")
    return name.rpartition(".")[0] or name


def drawn(seed: int, what: str) -> Random:
    """Return the source of random numbers for one purpose."""
    return Random(f"{seed}/{what}")  # noqa: S311  # times of a replay are no secrets


def from_start(stamps: Sequence[float]) -> list[float]:
    """Return the stamps shifted so that the earliest is 0."""
    first = min(stamps, default=0.0)
    return [stamp - first for stamp in stamps]


def spread(times: Sequence[float], step_s: float, seed: int) -> list[float]:
    """Move each time to a random moment of the step that begins at it. Rounded-down stamps would look like bursts."""
    rng = drawn(seed, "arrivals")
    return [at + rng.uniform(0.0, step_s) for at in times]


def repeated(stamps: Sequence[float]) -> bool:
    """Whether at most half of the stamps are distinct, so that they must have been rounded."""
    return 2 * len(set(stamps)) <= len(stamps)
