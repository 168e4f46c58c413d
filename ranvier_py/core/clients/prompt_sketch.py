"""Sketches a prompt as digests: enough to find where and how the next one departs from it, without keeping its text.

Rule: a sketch has a digest of each section, in the order in which engines render them, and of each line in the first
HEAD_BYTES of what the system and the user say, where clients put what changes; each word that looks volatile has its
own (`Line`). Digests are keyed. What no engine renders (`cache_control`, ids of items) is in none.
Bounds: SECTIONS_MAX sections; LINES_MAX lines and WORDS_MAX volatile words in all, VOLATILE_MAX of these in a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile, islice
from typing import Any, NamedTuple

import orjson
import xxhash

from ranvier_py.core.prompts.boundaries import Message
from ranvier_py.core.prompts.request_apis import Api

HEAD_BYTES = 65_536
SECTIONS_MAX = 1024
LINES_MAX, WORDS_MAX = 2048, 1024
LINE_BYTES_MAX = 512  # of a longer line only the beginning is searched for volatile words
VOLATILE_MAX = 8

DIGIT = re.compile(rb"\d")
DATE = r"\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{4}"
MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
DAY = "(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
VOLATILE = re.compile(
    rf"""
      (?P<uuid>[0-9a-fA-F]{{8}}-(?:[0-9a-fA-F]{{4}}-){{3}}[0-9a-fA-F]{{12}})
    | (?P<time>(?:{DATE})[T ]\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:\.\d+)?)?(?:Z|[+-]\d{{2}}:?\d{{2}})?
        | \b\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:\.\d+)?)?(?:\s?[AaPp][Mm])?\b)
    | (?P<date>{DATE}|\b(?:{DAY},?[ ])?{MONTH}[ ]\d{{1,2}}(?:,?\s\d{{4}})?\b)
    | (?P<nonce>\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{{3,}}\b
            | (?<![\w-])(?=[A-Za-z_-]*\d)(?=[0-9_-]*[A-Za-z])(?=[a-z0-9_-]*[A-Z])[A-Za-z0-9_-]{{16,}}\b)
    | (?P<counter>\d+)
    """.encode(),
    re.VERBOSE,
)
"""Words that change by themselves, by kind. A number is a counter unless it proves to be part of another kind. Each
word has a digit, and at most BLANKS_MAX blanks before the first one."""

BLANKS_MAX = 2  # of "Thu, Nov 26"


class Section(NamedTuple):
    """A part of a prompt: its JSON path, its kind (tool, system, message, thought), `size` in characters."""

    path: str
    kind: str
    role: str
    digest: int
    size: int


class Line(NamedTuple):
    """A line with volatile words: its digest, that without them, and each word's kind and digest."""

    digest: int
    masked: int
    volatile: Sequence[tuple[str, int]]


class PromptSketch:
    """The sketch of one prompt; it grows with its conversation. `lines` has the lines of a section: their digests, or
    Lines where there are volatile words."""

    __slots__ = (
        "_key",
        "_leading",
        "_lines",
        "_room",
        "_words",
        "kept",
        "lines",
        "model",
        "pieces",
        "sections",
        "size",
    )

    def __init__(self, model: str, key: int) -> None:
        """`key` seeds the digests: 64 bits."""
        self.model = model
        self.sections: list[Section] = []
        self.lines: dict[int, Sequence[int | Line]] = {}
        self.size = 0  # characters
        self.pieces = 0  # sections, lines and volatile words: what a sketch keeps of a prompt
        self.kept = False  # set by its keeper, while it is kept
        self._key = key
        self._leading = True  # only system messages were added so far
        self._room, self._lines, self._words = HEAD_BYTES, LINES_MAX, WORDS_MAX

    def add_tools(self, tools: object) -> None:
        for number, tool in enumerate(tools[:SECTIONS_MAX] if type(tools) is list else ()):
            self._add(f"$.tools[{number}]", "tool", "", text_of(tool))

    def add_lead(self, name: str, value: object) -> None:
        """Add the member that comes before the history: `system` or `instructions`."""
        for path, text in parts_of(f"$.{name}", value):
            self._add(path, "system", "system", text)

    def add_message(self, path: str, message: Message) -> None:
        """Add a message in its canonical form."""
        role = message.get("role")
        role = role if type(role) is str else ""
        self._leading = self._leading and role in ("system", "developer")
        kind = "system" if self._leading else "message"
        thoughts = message.get("reasoning_content")
        if type(thoughts) is str and thoughts:
            self._add(f"{path}.reasoning_content", "thought", role, thoughts)
        for place, text in parts_of(f"{path}.content", message.get("content")):
            self._add(place, kind, role, text)
        others = {name: value for name, value in message.items() if name not in ALREADY_ADDED}
        if others:
            self._add(path, kind, role, text_of(others))

    def head(self) -> int:
        """Return a digest of the application: model, tools in any order, and system prompt without volatile words."""
        tools = sorted([f"{section.digest}" for section in self.sections if section.kind == "tool"])
        return digest_of(" ".join([self.model, *tools, *self._system()]), self._key)

    def opening(self) -> int:
        """Return a digest of the system prompt, as in `head`, and of the first part of the history: they stay the same
        if a conversation continues with another model or other tools."""
        first = [f"{section.digest}" for section in self.history()[:1]]
        return digest_of(" ".join([*first, *self._system()]), self._key)

    def history(self) -> Sequence[Section]:
        """Return the sections after tools and system prompt."""
        return list(dropwhile(lambda section: section.kind in ("tool", "system"), self.sections))

    def forget(self) -> None:
        """Free all pieces. Nothing may be added any more."""
        self.kept = False
        self.sections, self.lines = [], {}

    def _system(self) -> list[str]:
        found: list[str] = []
        for number, section in enumerate(self.sections):
            if section.kind == "tool":
                continue
            if section.kind != "system":
                break
            lines = self.lines.get(number, (section.digest,))
            found += [f"{line.masked if isinstance(line, Line) else line}" for line in lines]
        return found

    def _add(self, path: str, kind: str, role: str, text: str) -> None:
        if len(self.sections) >= SECTIONS_MAX:
            return
        if role not in NOT_READ and kind != "tool" and min(self._room, self._lines) > 0:
            self._room -= len(text)
            self._add_lines(len(self.sections), text)
        self.sections.append(Section(path, kind, role, digest_of(f"{kind}\0{role}\0{text}", self._key), len(text)))
        self.size += len(text)
        self.pieces += 1

    def _add_lines(self, number: int, text: str) -> None:
        """Add the lines of a section, as far as there is room."""
        key, has_digit, room = self._key, DIGIT.search, self._words
        lines = text.encode("utf-8", "surrogatepass").split(b"\n", self._lines - 1)
        found: list[int | Line] = [xxhash.xxh3_64_intdigest(line, key) for line in lines]
        for place, line in enumerate(lines):
            if has_digit(line, 0, LINE_BYTES_MAX) and self._words:  # volatile words have one, and few lines do
                found[place] = marked = line_of(line, key, min(self._words, VOLATILE_MAX))
                self._words -= len(marked.volatile)
        self.lines[number] = found
        self._lines -= len(lines)
        self.pieces += len(lines) + room - self._words


ALREADY_ADDED = ("role", "content", "reasoning_content")
NOT_READ = ("assistant", "tool")
"""Roles of what clients repeat as it came, so that nobody need know how two of them differ. Nor for tools."""


def sketch_of(fields: Mapping[str, Any], api: Api, key: int) -> PromptSketch:
    """Return the sketch of a parsed body. Raises nothing for any JSON."""
    sketch = PromptSketch(fields["model"] if type(fields.get("model")) is str else "", key)
    sketch.add_tools(api.members(fields).get("tools"))
    if api.lead:
        sketch.add_lead(api.lead, fields.get(api.lead))
    items = api.items(fields)
    for number, item in enumerate(items if type(items) is list else ()):
        for message in api.messages(item) if type(item) is dict else ():
            sketch.add_message(f"$.{api.history}[{number}]", message)
    return sketch


def line_of(line: bytes, key: int, most: int) -> Line:
    """Return a line that has a digit, with its first volatile words, `most` at most."""
    volatile: list[tuple[str, int]] = []
    rest: list[bytes] = []
    at = 0
    for match in islice(volatile_words(line[:LINE_BYTES_MAX]), most):
        volatile.append((match.lastgroup or "", xxhash.xxh3_64_intdigest(match.group(), key)))
        rest.append(line[at : match.start()])
        at = match.end()
    masked = xxhash.xxh3_64_intdigest(b"\0".join([*rest, line[at:]]), key)
    return Line(xxhash.xxh3_64_intdigest(line, key), masked, volatile)


def volatile_words(line: bytes) -> Iterator[re.Match[bytes]]:
    """Yield the matches of VOLATILE, searched only around digits: most of a text has none."""
    at = 0
    while (digit := DIGIT.search(line, at)) is not None:
        start = digit.start()
        for _ in range(BLANKS_MAX + 1):
            start = line.rfind(b" ", at, start)
            if start < 0:
                break
        match = VOLATILE.search(line, max(start, at))
        assert match is not None, "a digit is a counter at least"
        yield match
        at = match.end()


def parts_of(path: str, content: object) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each part of a content; a text is one part."""
    if content is None:
        return
    if type(content) is not list:
        yield path, content if type(content) is str else text_of(content)
        return
    for number, block in enumerate(content[:SECTIONS_MAX]):
        only = block.get("text") if type(block) is dict and block.get("type") == "text" else None
        yield f"{path}[{number}]", only if type(only) is str else text_of(block)


def text_of(value: object) -> str:
    """Return any value as JSON text."""
    try:
        return orjson.dumps(value, default=str).decode()
    except (TypeError, UnicodeError):
        return repr(value)


def digest_of(text: str, key: int) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"), key)
