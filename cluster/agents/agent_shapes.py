"""Shapes of agents' requests: the structure of the requests and the lengths of their texts, without their words.

A shape is JSON. `texts` has [length, number of an earlier text, characters that both begin with, kind]; `parts` has
each item, tool and block of bodies once; `requests` has the bodies. In parts and requests {"#": n} stands for a text,
{"@": [n, …]} for a list of parts. So two prompts of a shape share as many characters as the recorded prompts did, and
nothing else of those is kept: names of tools and of their arguments become texts, too.

A reader makes each text of invented words with the recorded length. The same shape gives the same bytes everywhere.
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
"""Members of bodies whose entries are repeated in the next turn."""

STRUCTURE = ("role", "type", "status", "tool_choice", "effort", "display", "summary", "include", "verbosity", "detail")
"""Members whose value is kept if it looks like a word of the API (`WORD`)."""

WORD = re.compile(r"[a-z_.0-9]{1,40}")
PLAIN_FIELDS = ("user-agent", "originator", "anthropic-version", "content-type", "accept")
HIDDEN_FIELDS = ("authorization", "x-api-key", "cookie", "host", "content-length", "accept-encoding", "connection")
WORDS_ONLY, JSON_TEXT, NAME = 0, 1, 2
"""Kinds of text. Names of tools and calls have no spaces."""
NAMED = ("name", "id", "call_id", "tool_call_id", "tool_use_id")
JSON_HEAD, JSON_TAIL = '{"x": "', '"}'


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """One request of an agent. `at`: seconds since the agent's first request. `task`: its session. `kind`: main, sub
    (of a sub-agent) or bg (titles, suggestions)."""

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
        """Return the structure of a JSON value, which is the member `key` of an object."""
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
    """Return how many characters both texts begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def shape_of(requests: Sequence[AgentRequest]) -> dict[str, Any]:
    """Return the shape of requests, for `written`. Bodies must be JSON objects."""
    writer = ShapeWriter()
    made = [writer.request(request) for request in requests]
    return {"texts": writer.texts, "parts": writer.parts, "requests": made}


def written(shape: Mapping[str, Any], name: str, folder: Path = SHAPES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json.gz"
    path.write_bytes(gzip.compress(orjson.dumps(shape), mtime=0))
    return path


def names(folder: Path = SHAPES) -> list[str]:
    """Return the names of the shapes in a folder."""
    return sorted(path.name.removesuffix(".json.gz") for path in folder.glob("*.json.gz"))


def requests_of(name: str, model: str, folder: Path = SHAPES) -> list[AgentRequest]:
    """Read a shape as requests for this model, in order of time."""
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
    """Makes requests from a shape."""

    def __init__(self, shape: Mapping[str, Any]) -> None:
        self.texts: list[str] = []
        for number, (length, other, shared, kind) in enumerate(shape["texts"]):
            before = self.texts[other] if other >= 0 else ""
            text = json_words(number, length) if kind == JSON_TEXT else made_up(number, length, before, shared)
            self.texts.append(text.replace(" ", "_").replace("|", "x") if kind == NAME else text)
        self.parts: list[Any] = []
        for part in shape["parts"]:  # a part may contain earlier parts
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
        """Return a text as the value of a header."""
        return str(self.value(value)).replace(" ", "-")


def made_up(number: int, length: int, before: str, shared: int) -> str:
    """Return words of this length that share exactly `shared` first characters with `before`."""
    fresh = words_of(number, length - shared)
    if fresh and shared < len(before) and before[shared] == fresh[0]:
        fresh = "|" + fresh[1:]
    return before[:shared] + fresh


def json_words(number: int, length: int) -> str:
    return JSON_HEAD + words_of(number, length - len(JSON_HEAD) - len(JSON_TAIL)) + JSON_TAIL


def words_of(number: int, length: int) -> str:
    """Return `length` characters of words, different for each number."""
    return "".join(several_words(Random(number), length))[: max(0, length)]


def several_words(rng: Random, length: int) -> Iterator[str]:
    """Yield words that together have at least `length` characters."""
    while length > 0:
        word = f"{rng.choice(WORDS)} "
        length -= len(word)
        yield word
