"""Reads a small YAML file as a tree of values with their lines: the part of YAML that configurations need.

Rule: it reads PyYAML's events, so no object of a file's choice is ever constructed. Refused, each with its line: keys
that are written twice, aliases (so nothing is larger in memory than in the file), tags, several documents, keys that
are no plain text. PyYAML stops at the first error, so the entry that has it is left out (`leave_out`), and the rest is
read again, until all of it can be read.
Bounds: FILE_BYTES_MAX, DEPTH_MAX, PROBLEMS_MAX.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

FILE_BYTES_MAX = 64 * 1024
"""A hundred backends with every option set take a quarter of it; PyYAML reads it within a second."""

PROBLEMS_MAX = 20  # with more of them the file is another one; each costs one more reading
DEPTH_MAX = 12  # the deepest key of a configuration is four levels down
NUMBER_CHARACTERS_MAX = 40  # a longer scalar is a text

BESIDE = (" ", "#", "\n", "-", "\t", "]", "}", "")
"""First characters of lines with which no key of the root begins."""

PLAIN = ("bool", "int", "float", "null")
"""YAML's kinds of scalars that are read as such; any other, such as a date, is its text."""


class YamlValue(NamedTuple):
    """`value` is a scalar, a list of YamlValues or a dict of them by key; `line` counts from 1."""

    value: Any
    line: int


class NotRead(Exception):
    """A text can't be read: what is wrong in which line, and in which line the entry begins that is to be left out."""

    def __init__(self, line: int, why: str, entry: int = 0) -> None:
        super().__init__(f"{line}: {why}")
        self.entry = entry or line


@dataclass(slots=True)
class YamlFile:
    """What a file has: a mapping, or None if it is empty. `bad`: keys of which some could not be read."""

    tree: YamlValue | None = None
    problems: list[str] = field(default_factory=list)
    bad: dict[str, None] = field(default_factory=dict)


def read_yaml(file: Path, bytes_max: int = FILE_BYTES_MAX) -> YamlFile:
    """Read a file, with everything that is wrong as `problems`."""
    try:
        with file.open("rb") as stream:
            content = stream.read(bytes_max + 1)
        if len(content) > bytes_max:
            return YamlFile(problems=[f"{file}: is larger than {bytes_max} bytes"])
        lines = content.decode("utf-8-sig").splitlines(keepends=True)
    except OSError as error:
        return YamlFile(problems=[f"{file}: can't be read: {error.strerror}"])
    except UnicodeDecodeError:
        return YamlFile(problems=[f"{file}: is not UTF-8"])
    found = YamlFile()
    while len(found.problems) < PROBLEMS_MAX:
        try:
            found.tree = parse_yaml("".join(lines))
            break
        except NotRead as error:
            found.problems.append(f"{file}:{error}")
            found.bad[leave_out(lines, error.entry - 1)] = None
        except yaml.YAMLError:
            found.problems.append(f"{file}: not YAML: it has characters that no text has")
            break
    return found


def leave_out(lines: list[str], at: int) -> str:
    """Blank the entry that begins in this line, or above it. Returns the key of the root that it belongs to."""
    at = min(at, len(lines) - 1)
    while at and not lines[at].strip():
        at -= 1
    above = next((line for line in reversed(lines[: at + 1]) if line[:1] not in BESIDE), "")
    key, depth = above.partition(":")[0].strip("\"' \n"), indent(lines[at])
    more = (":",) if lines[at].lstrip().startswith("-") else (":", "- ", "-\n")  # items, values of keys that are none
    lines[at] = "\n"
    for below in range(at + 1, len(lines)):
        text, beside = lines[below].lstrip(" "), indent(lines[below]) - depth
        if text.strip() and (beside < 0 or (beside == 0 and not text.startswith(more))):
            break
        lines[below] = "\n"
    return key


def indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def parse_yaml(text: str) -> YamlValue | None:
    """Return the mapping in a text; None if it is empty. Raises NotRead, and yaml.YAMLError for impossible bytes."""
    try:
        return document_of(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark, begins = error.problem_mark or error.context_mark, error.context_mark
        line = mark.line + 1 if mark else 1
        is_inside = begins is not None and not str(error.context).startswith("while parsing a block")
        entry = begins.line + 1 if is_inside and begins is not None else line
        raise NotRead(line, f"not YAML: {error.problem or error.context}", entry) from error


def document_of(events: Iterator[yaml.Event]) -> YamlValue | None:
    """Return the only document. Raises NotRead and PyYAML's errors."""
    tree, documents = None, 0
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise refusal(event, "a second document begins; one is read")
            tree = value_at(next(events), events, 0)
    if tree is None or tree.value is None:
        return None
    if not isinstance(tree.value, dict):
        raise NotRead(tree.line, "must be keys with their values")
    return tree


def value_at(event: yaml.Event, events: Iterator[yaml.Event], depth: int, flow: int = 0) -> YamlValue:
    """Return the value that begins with this event. `flow`: where brackets begin that it is in. Raises NotRead."""
    line = event.start_mark.line + 1
    flow = flow or (line if getattr(event, "flow_style", False) else 0)
    if isinstance(event, yaml.AliasEvent):
        raise refusal(event, f"an alias, *{event.anchor}: write out what it stands for", flow)
    if depth > DEPTH_MAX:
        raise refusal(event, f"more than {DEPTH_MAX} levels deep", flow)
    if isinstance(event, yaml.ScalarEvent):
        return YamlValue(scalar(event, flow), line)
    if event.tag not in (None, "!"):
        raise refusal(event, f"the tag {event.tag} is not read", flow)
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(value_at(event, events, depth + 1, flow))
        return YamlValue(items, line)
    found: dict[str, YamlValue] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        if not isinstance(event, yaml.ScalarEvent):
            raise refusal(event, "a key must be a text", flow)
        if event.value in found:
            why = f"{event.value[:60]} is written twice, first in line {found[event.value].line}"
            raise refusal(event, why, flow)
        name, key_line = event.value, event.start_mark.line + 1
        found[name] = value_at(next(events), events, depth + 1, flow)._replace(line=key_line)
    return YamlValue(found, line)


def scalar(event: yaml.ScalarEvent, flow: int = 0) -> Any:
    """Return a text, a number, a switch or None, as YAML 1.1 takes it. Raises NotRead for a tag."""
    if event.tag not in (None, "!"):
        raise refusal(event, f"the tag {event.tag} is not read", flow)
    tag = Resolver().resolve(yaml.ScalarNode, event.value, event.implicit)
    kind = tag.rpartition(":")[2]
    if kind not in PLAIN or len(event.value) > NUMBER_CHARACTERS_MAX or ":" in event.value:  # 1:30 is no number here
        return event.value
    try:
        return SafeConstructor().construct_object(yaml.ScalarNode(tag, event.value))
    except ValueError:  # PyYAML takes it for a number, but Python does not
        return event.value


def refusal(event: yaml.Event, what: str, entry: int = 0) -> NotRead:
    return NotRead(event.start_mark.line + 1, what, entry)


def plain(found: YamlValue, at: str, lines: dict[str, int]) -> Any:
    """Return a value without its lines, which are noted by place as those of TOML are."""
    lines[at] = found.line
    if isinstance(found.value, dict):
        return {name: plain(inner, f"{at}.{name}" if at else name, lines) for name, inner in found.value.items()}
    if isinstance(found.value, list):
        return [plain(inner, f"{at}[{number}]", lines) for number, inner in enumerate(found.value)]
    return found.value
