"""What agents send, as shapes: the structure of requests and the lengths of their texts, and none of the words.

A shape is JSON: `texts` are [length, earlier text, characters it begins with of that one, kind], `parts`
the items, tools and blocks that bodies consist of, each once, `requests` the bodies themselves. In both {"#": n} stands
for a text and {"@": [n, …]} for a list of parts. So two prompts of a shape share what the recorded ones shared, to the
character, and nothing else of them is kept: names of tools and of their arguments are texts, too.

Read back, a text is made-up words of its length. The same shape gives the same bytes everywhere.
"""

from __future__ import annotations

import gzip
import re
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import orjson

from cluster.engine.engine_text import WORDS

SHAPES = Path(__file__).parent / "shapes"

PARTED = ("messages", "input", "tools", "system")
"""Members of bodies whose entries come again in the next turn."""

STRUCTURE = ("role", "type", "status", "tool_choice", "effort", "summary", "include", "verbosity", "detail")
"""Members whose value is a word of the API's, where it looks like one."""

WORD = re.compile(r"[a-z_.0-9]{1,40}")
PLAIN_FIELDS = ("user-agent", "originator", "anthropic-version", "content-type", "accept")
HIDDEN_FIELDS = ("authorization", "x-api-key", "cookie", "host", "content-length", "accept-encoding", "connection")
WORDS_ONLY, JSON_TEXT, NAME = 0, 1, 2
"""Kinds of text. Names of tools and of calls have no spaces."""
NAMED = ("name", "id", "call_id", "tool_call_id", "tool_use_id")
JSON_HEAD, JSON_TAIL = '{"x": "', '"}'


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """One request of an agent. `at`: seconds since its first one. `task`: its session. `kind`: main, sub (of a
    sub-agent) or bg (titles, suggestions)."""

    at: float
    task: str
    kind: str
    path: str
    headers: Sequence[tuple[str, str]]
    body: bytes


@dataclass(slots=True)
class ShapeWriter:
    """Collects texts and parts, each once."""

    texts: list[tuple[int, int, int, int]] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)
    _known: dict[str, int] = field(default_factory=dict)
    _sorted: list[str] = field(default_factory=list)
    _parts: dict[bytes, int] = field(default_factory=dict)

    def text(self, value: str, kind: int = WORDS_ONLY) -> dict[str, int]:
        if value not in self._known:
            at = bisect_left(self._sorted, value)
            near = [(shared_length(other, value), other) for other in self._sorted[max(0, at - 1) : at + 1]]
            shared, other = max(near, default=(0, ""))
            self.texts.append((len(value), self._known[other] if shared else -1, shared, kind))
            self._known[value] = len(self._known)
            insort(self._sorted, value)
        return {"#": self._known[value]}

    def value(self, value: Any, key: str = "") -> Any:
        """The structure of a JSON value, the member `key` of something."""
        if isinstance(value, str):
            if key in STRUCTURE and WORD.fullmatch(value):
                return value
            return self.text(value, JSON_TEXT if key == "arguments" else NAME if key in NAMED else WORDS_ONLY)
        if isinstance(value, list):
            return self.list_of(value) if key in PARTED else [self.value(each, key) for each in value]
        if not isinstance(value, dict):
            return value
        if key == "properties":  # names of a tool's arguments
            return {f"p{number}": self.value(each) for number, each in enumerate(value.values())}
        return {name: self.value(each, name) for name, each in value.items()}

    def list_of(self, values: list[Any]) -> dict[str, list[int]]:
        return {"@": [self.part(each) for each in values]}

    def part(self, value: Any) -> int:
        made = self.value(value)
        name = orjson.dumps(made)
        if name not in self._parts:
            self._parts[name] = len(self.parts)
            self.parts.append(made)
        return self._parts[name]

    def request(self, request: AgentRequest) -> dict[str, Any]:
        body = orjson.loads(request.body)
        body.pop("model", None)
        fields = [
            [name, value if name.lower() in PLAIN_FIELDS else self.text(value)]
            for name, value in request.headers
            if name.lower() not in HIDDEN_FIELDS
        ]
        known = {"at": round(request.at, 3), "task": request.task, "kind": request.kind, "path": request.path}
        return {**known, "headers": fields, "body": self.value(body)}


def shared_length(one: str, other: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def shape_of(requests: Sequence[AgentRequest]) -> dict[str, Any]:
    """As `written` takes it. Bodies must be JSON objects."""
    writer = ShapeWriter()
    made = [writer.request(request) for request in requests]
    return {"texts": writer.texts, "parts": writer.parts, "requests": made}


def written(shape: Mapping[str, Any], name: str, folder: Path = SHAPES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json.gz"
    path.write_bytes(gzip.compress(orjson.dumps(shape), mtime=0))
    return path


def names(folder: Path = SHAPES) -> list[str]:
    """Of the shapes that are there."""
    return sorted(path.name.removesuffix(".json.gz") for path in folder.glob("*.json.gz"))


def requests_of(name: str, model: str, folder: Path = SHAPES) -> list[AgentRequest]:
    """A shape as requests for this model, in order of time."""
    shape = orjson.loads(gzip.decompress((folder / f"{name}.json.gz").read_bytes()))
    reader = ShapeReader(shape)
    return [
        AgentRequest(
            at=each["at"],
            task=each["task"],
            kind=each["kind"],
            path=each["path"],
            headers=[(key, reader.header(value)) for key, value in each["headers"]],
            body=orjson.dumps({"model": model, **reader.value(each["body"])}),
        )
        for each in shape["requests"]
    ]


class ShapeReader:
    """Makes requests of a shape."""

    def __init__(self, shape: Mapping[str, Any]) -> None:
        self.texts: list[str] = []
        for number, (length, other, shared, kind) in enumerate(shape["texts"]):
            before = self.texts[other] if other >= 0 else ""
            text = json_words(number, length) if kind == JSON_TEXT else made_up(number, length, before, shared)
            self.texts.append(text.replace(" ", "_").replace("|", "x") if kind == NAME else text)
        self.parts: list[Any] = []
        for part in shape["parts"]:  # one may consist of those before it
            self.parts.append(self.value(part))

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.value(each) for each in value]
        if not isinstance(value, dict):
            return value
        if value.keys() == {"#"}:
            return self.texts[value["#"]]
        if value.keys() == {"@"}:
            return [self.parts[number] for number in value["@"]]
        return {name: self.value(each) for name, each in value.items()}

    def header(self, value: Any) -> str:
        """A text that a header can have."""
        return str(self.value(value)).replace(" ", "-")


def made_up(number: int, length: int, before: str, shared: int) -> str:
    """Words of this length that begin as `before` does, and go on otherwise."""
    fresh = words_of(number, length - shared)
    if fresh and shared < len(before) and before[shared] == fresh[0]:
        fresh = "|" + fresh[1:]
    return before[:shared] + fresh


def json_words(number: int, length: int) -> str:
    return JSON_HEAD + words_of(number, length - len(JSON_HEAD) - len(JSON_TAIL)) + JSON_TAIL


def words_of(number: int, length: int) -> str:
    """So many characters of words, other ones for each number."""
    return "".join(several_words(Random(number), length))[: max(0, length)]


def several_words(rng: Random, length: int) -> Iterator[str]:
    """At least `length` characters."""
    while length > 0:
        word = f"{rng.choice(WORDS)} "
        length -= len(word)
        yield word
