"""Reads a TOML file as values by key, with the line of each key and of everything that is wrong.

tomllib stops at the first error. So a file with one is read statement by statement: those that can't be read are left
out, named with their lines, and the rest is checked all the same.
Bounds: FILE_BYTES_MAX, DEPTH_MAX, PROBLEMS_MAX.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranvier_py.core.errors import ConfigError

FILE_BYTES_MAX = 4 * 1024 * 1024
"""4096 backends with every option set take a quarter of it."""

YAML_SUFFIXES = (".yaml", ".yml")
"""Of files that are YAML; others are TOML."""

DEPTH_MAX = 12  # as of a YAML file; tomllib recurses, and would reach the interpreter's limit at some hundreds
PROBLEMS_MAX = 20  # of syntax: with more of them the file is another one

TOKEN = re.compile(
    r"""
    \"{3} (?: \\. | [^\\] )*? \"{3} | '{3} .*? '{3}
    | " (?: \\. | [^"\\\n] )* " | ' [^'\n]* '
    | \# [^\n]*
    | [\[{] | [\]}]
    """,
    re.DOTALL | re.VERBOSE,
)
"""What may contain brackets that open nothing, and brackets."""

KEY = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
STATEMENT = re.compile(rf"^(?:[ \t]*{KEY}[ \t]*[=.]|[A-Za-z_]|\[\[?[\w.\"' -]+\]\]?[ \t]*(?:#.*)?$)", re.MULTILINE)
"""Beginnings of lines with which a statement begins, unless the line is one of a text of several lines."""

HEAD = re.compile(rf"(?P<table>\[\[?)?[ \t]*(?P<name>{KEY})")
BLANK = re.compile(r"(?:[ \t]*(?:#.*)?\n)*[ \t]*")
PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


class NotToml(Exception):
    """A text that is no TOML: in which line, and why. Line 0: what is wrong shows at its end."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"{line}: {why}")
        self.line, self.why = line, why


@dataclass(slots=True)
class TomlFile:
    """What a file has. Lines count from 1; `lines` has keys, tables, and each of an array of tables as `backend[0]`,
    with its members as `backend[0].url`."""

    values: Mapping[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    bad: dict[str, None] = field(default_factory=dict)  # keys of which some of the file could not be read


def read_toml(file: Path) -> TomlFile:
    """Read a file, with everything that is wrong as `problems`."""
    try:
        return parse_toml(read_text(file, FILE_BYTES_MAX), str(file))
    except ConfigError as error:
        return TomlFile(problems=error.problems)


def read_text(file: Path, bytes_max: int) -> str:
    """Return what a file has. Raises ConfigError."""
    try:
        with file.open("rb") as stream:
            content = stream.read(bytes_max + 1)
        if len(content) > bytes_max:
            raise ConfigError([f"{file}: is larger than {bytes_max} bytes"])
        return content.decode("utf-8-sig")  # some editors write a byte order mark first
    except OSError as error:
        raise ConfigError([f"{file}: can't be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{file}:{line}: not TOML: it is not UTF-8"]) from error


def parse_toml(text: str, name: str) -> TomlFile:
    """Parse a text, which problems call `name`."""
    text = text.replace("\r\n", "\n")
    parts = list(statements(text))
    found = TomlFile()
    try:
        found.values = values_of(text)
    except NotToml:
        leave_out_bad(parts, found, name)
        while len(found.problems) < PROBLEMS_MAX:
            try:
                found.values = values_of("".join(part.text for part in parts))
                break
            except NotToml as error:  # statements that are each good alone, such as a key that is written twice
                above = [each for each in parts if each.name and (not error.line or each.line <= error.line)]
                last = (above or parts)[-1]
                last.leave_out(found, name, error, error.line or last.name_line)
    found.lines = lines_of(parts)
    return found


def values_of(text: str) -> dict[str, Any]:
    """Parse a whole text. Raises NotToml."""
    check_depth(text)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        why = str(error)
        place = PLACE.search(why)
        raise NotToml(int(place[1]) if place and place[1] else 0, PLACE.sub("", why)) from error
    except ValueError as error:  # such as a number of thousands of digits
        why, _, _ = str(error).partition("; ")
        line = next((each.line for each in statements(text) if not is_value(each.text)), 1)
        raise NotToml(line, f"{why[:1].lower()}{why[1:]}") from error


def is_value(text: str) -> bool:
    """Whether the parser can convert all values of a text. What is no TOML at all has none."""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return True
    except ValueError:
        return False
    return True


def check_depth(text: str) -> None:
    """Raise NotToml if brackets are nested too deep."""
    depth = 0
    for token in TOKEN.finditer(text):
        if token[0] in "[{":
            depth += 1
        elif token[0] in "]}":
            depth = max(0, depth - 1)
        if depth > DEPTH_MAX:
            raise NotToml(text.count("\n", 0, token.start()) + 1, f"more than {DEPTH_MAX} levels deep")


@dataclass(slots=True)
class Statement:
    """A key with its value, or the head of a table. `table` is the one that it is in or opens; empty: the root."""

    line: int
    text: str
    table: str
    name: str = ""
    name_line: int = 0
    opens: str = ""  # the brackets of a head

    def leave_out(self, found: TomlFile, name: str, error: NotToml, line: int) -> None:
        """Blank the text, so that other lines keep their numbers."""
        found.problems.append(f"{name}:{line}: not TOML: {error.why}")
        found.bad[self.table or self.name] = None
        self.blank()

    def blank(self) -> None:
        self.text, self.name, self.opens = "\n" * self.text.count("\n"), "", ""


def statements(text: str) -> Iterator[Statement]:
    """Yield the statements of a text; together they are the text."""
    texts = [token.span() for token in TOKEN.finditer(text) if "\n" in token[0]]
    ends = [end for _, end in texts]
    starts = [0]
    for found in STATEMENT.finditer(text):
        above = bisect_right(ends, found.start())
        if found.start() and not (above < len(texts) and texts[above][0] < found.start()):
            starts.append(found.start())
    line, table = 1, ""
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        blank = BLANK.match(text, start, end)
        head = HEAD.match(text, blank.end() if blank else start, end)
        part = Statement(line, text[start:end], table)
        if head is not None:
            part.name, part.opens = head["name"].strip("\"'"), head["table"] or ""
            part.name_line = line + text.count("\n", start, head.start())
            if part.opens and part.name == table and text[head.end() : head.end() + 1] == ".":  # of the table above
                part.name, part.opens = text[head.end() + 1 : end].partition("]")[0].strip(), "."
            elif part.opens:
                part.table = table = part.name
        yield part
        line += text.count("\n", start, end)


def lines_of(parts: Sequence[Statement]) -> dict[str, int]:
    """Return where the keys of the root, tables and members of arrays of tables begin."""
    lines: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for part in parts:
        if part.opens == "[[":
            lines[f"{part.name}[{counts[part.name]}]"] = part.name_line
            counts[part.name] += 1
        elif part.name and counts[part.table]:
            lines.setdefault(f"{part.table}[{counts[part.table] - 1}].{part.name}", part.name_line)
        if part.opens in ("[", "[[") or (part.name and not part.table):
            lines.setdefault(part.name, part.name_line)
    return lines


def leave_out_bad(parts: Sequence[Statement], found: TomlFile, name: str) -> None:
    """Leave out what can't be read, and with the head of a table what stands below it."""
    is_headless = False
    for part in parts:
        opens, is_headless = part.opens, is_headless and not part.opens
        try:
            values_of(part.text)
        except NotToml as error:
            if len(found.problems) < PROBLEMS_MAX:
                part.leave_out(found, name, error, part.line + max(error.line, 1) - 1)
            is_headless = is_headless or bool(opens)
        if is_headless:
            part.blank()
