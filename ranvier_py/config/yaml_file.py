"""Reads a small YAML file as a tree of values with their lines: the part of YAML that configurations need.

It reads PyYAML's events, so no object of a file's choice is ever constructed. Refused, each with its line: keys that
are written twice, aliases (so nothing is larger in memory than in the file), tags, several documents, keys that are no
plain text. Scalars are what YAML 1.1 takes them for: a number, a switch, nothing or a text.
Bounds: FILE_BYTES_MAX, DEPTH_MAX.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from ranvier_py.core.errors import ConfigError

FILE_BYTES_MAX = 64 * 1024
"""A hundred backends with every option set take a quarter of it; PyYAML reads it within a second."""

DEPTH_MAX = 12  # the deepest key of a configuration is four levels down
NUMBER_CHARACTERS_MAX = 40  # a longer scalar is a text

PLAIN = ("bool", "int", "float", "null")
"""YAML's kinds of scalars that are read as such; any other, such as a date, is its text."""


class YamlValue(NamedTuple):
    """`value` is a scalar, a list of YamlValues or a dict of them by key; `line` counts from 1."""

    value: Any
    line: int


class NotRead(Exception):
    """The file can't be read: what is wrong, and in which line."""


def read_yaml(file: Path) -> YamlValue | None:
    """Return the mapping in a file; None if it is empty. Raises ConfigError, with the line if there is one."""
    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ConfigError([f"{file}: is larger than {FILE_BYTES_MAX} bytes"])
        return parse_yaml(content.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError([f"{file}: can't be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{file}: is not UTF-8"]) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            [f"{file}:{mark.line + 1 if mark else 1}: not YAML: {error.problem or error.context}"]
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{file}: not YAML: it has characters that no text has"]) from error
    except NotRead as error:
        raise ConfigError([f"{file}:{error}"]) from error


def parse_yaml(text: str) -> YamlValue | None:
    """Return the mapping in a text; None if it is empty. Raises NotRead and PyYAML's errors."""
    events = yaml.parse(text, Loader=yaml.SafeLoader)
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
        raise NotRead(f"{tree.line}: must be keys with their values")
    return tree


def value_at(event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> YamlValue:
    """Return the value that begins with this event. Raises NotRead."""
    line = event.start_mark.line + 1
    if isinstance(event, yaml.AliasEvent):
        raise refusal(event, f"an alias, *{event.anchor}: write out what it stands for")
    if depth > DEPTH_MAX:
        raise refusal(event, f"more than {DEPTH_MAX} levels deep")
    if isinstance(event, yaml.ScalarEvent):
        return YamlValue(scalar(event), line)
    if event.tag not in (None, "!"):
        raise refusal(event, f"the tag {event.tag} is not read")
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(value_at(event, events, depth + 1))
        return YamlValue(items, line)
    found: dict[str, YamlValue] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        if not isinstance(event, yaml.ScalarEvent):
            raise refusal(event, "a key must be a text")
        if event.value in found:
            raise refusal(event, f"{event.value[:60]} is written twice, first in line {found[event.value].line}")
        name, key_line = event.value, event.start_mark.line + 1
        found[name] = value_at(next(events), events, depth + 1)._replace(line=key_line)
    return YamlValue(found, line)


def scalar(event: yaml.ScalarEvent) -> Any:
    """Return a text, a number, a switch or None. Raises NotRead for a tag."""
    if event.tag not in (None, "!"):
        raise refusal(event, f"the tag {event.tag} is not read")
    tag = Resolver().resolve(yaml.ScalarNode, event.value, event.implicit)
    kind = tag.rpartition(":")[2]
    if kind not in PLAIN or len(event.value) > NUMBER_CHARACTERS_MAX or ":" in event.value:  # 1:30 is no number here
        return event.value
    try:
        return SafeConstructor().construct_object(yaml.ScalarNode(tag, event.value))
    except ValueError:  # PyYAML takes it for a number, but Python does not
        return event.value


def refusal(event: yaml.Event, what: str) -> NotRead:
    return NotRead(f"{event.start_mark.line + 1}: {what}")
