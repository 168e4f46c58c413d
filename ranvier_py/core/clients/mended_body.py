"""What a rule changes in the raw text of a body, place by place: all other bytes stay as they came.

    drop_block     a block of the system prompt that the pattern matches whole is left out of its list
    replace        what the pattern matches in a text becomes `replacement`
    rerole         a message of `role` that the pattern matches whole, behind the first other one, becomes one of `to`
    sort_tools     tools stand in the order of their names
    set            members of `member` that the client left out get `values`

Places are found by walking the JSON with the standard library's own scanner, so nothing is guessed: `Span`s are of the
text, and a value is parsed from just these characters. Of two members of one name the last one counts, as for engines.
Bounds: BODY_BYTES_MAX and MARKS_MAX of what is looked at, of a text its first PATTERN_CHARACTERS_MAX; a rule that would
change more than EDITS_MAX places changes none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple

from ranvier_py.core.prompts.body_json import marks_in
from ranvier_py.core.prompts.request_apis import Api

PATTERN_CHARACTERS_MAX = 65_536
BODY_BYTES_MAX = 4 * 1024 * 1024
MARKS_MAX = 32_768
"""Each is walked in Python. A chat of 2,000 messages and hundreds of tools has fewer."""

EDITS_MAX = 1024
LEADING_ROLES = ("system", "developer")

BLANKS = re.compile(r"[ \t\r\n]*")
ESCAPE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.", re.DOTALL)
"""What stands for one character of a text."""

TEXT_MEMBERS = frozenset(("type", "text", "cache_control"))

value_at = json.JSONDecoder().raw_decode


class Span(NamedTuple):
    """A value, and where it is."""

    start: int
    end: int
    value: Any


class Edit(NamedTuple):
    """What stands there instead. `path`: of what it changes."""

    start: int
    end: int
    text: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyChange:
    """What a rule does. `where`: "system", "first" (the first message of the user's) or "history"."""

    kind: str
    where: str = "system"
    pattern: re.Pattern[str] | None = None
    replacement: str = ""
    role: str = "system"
    to: str = "user"
    member: str = ""
    values: Mapping[str, Any] | None = None

    def matches(self, text: object) -> bool:
        """Whether the pattern matches a text whole."""
        if type(text) is not str or len(text) > PATTERN_CHARACTERS_MAX:
            return False
        return self.pattern is not None and self.pattern.fullmatch(text) is not None


class RawBody:
    """A body as text, with its outermost members."""

    def __init__(self, text: str, api: Api) -> None:
        """Raises ValueError for what is no JSON object."""
        start = skipped(text, 0)
        self.text = text
        self.api = api
        self.members, self.end = walk_object(text, start)
        if skipped(text, self.end) != len(text):
            raise ValueError("something is behind the object")
        self.items = walk_list(text, self.members.get(api.history))

    @property
    def model(self) -> str:
        found = self.members.get("model")
        return found.value if found is not None and type(found.value) is str else ""

    @property
    def fields(self) -> Mapping[str, Any]:
        return {name: span.value for name, span in self.members.items()}

    def opening(self) -> str:
        """What names a conversation whose client does not: the text of the user's first message."""
        for item in self.items:
            if role_of(item.value) == "user":
                return json.dumps(text_of_content(item.value.get("content")))
        return ""

    def edits(self, action: BodyChange) -> Sequence[Edit]:
        """What the action changes, in the order of the text; nothing where it changes nothing."""
        found = sorted(islice(ACTIONS[action.kind](self, action), EDITS_MAX + 1))
        return found if len(found) <= EDITS_MAX else ()

    def edited(self, edits: Sequence[Edit]) -> str:
        """The text with these edits, none of which overlap."""
        pieces: list[str] = []
        at = 0
        for edit in edits:
            pieces += (self.text[at : edit.start], edit.text)
            at = edit.end
        return "".join([*pieces, self.text[at:]])


def raw_body(body: bytes, api: Api) -> RawBody | None:
    """A body that can be read within bounds; None for any other."""
    if len(body) > BODY_BYTES_MAX or marks_in(body) > MARKS_MAX:
        return None
    try:
        return RawBody(body.decode(), api)
    except (ValueError, RecursionError):
        return None


# --- places -----------------------------------------------------------------------------------------------------------


def skipped(text: str, at: int) -> int:
    """Where the next token begins."""
    match = BLANKS.match(text, at)
    return match.end() if match is not None else at


def walk_object(text: str, at: int) -> tuple[dict[str, Span], int]:
    """The members of an object by name, the last one of each; and where the object ends. Raises ValueError."""
    found: dict[str, Span] = {}
    if text[at : at + 1] != "{":
        raise ValueError("no object")
    at = skipped(text, at + 1)
    if text[at : at + 1] == "}":
        return found, at + 1
    while True:
        if text[at : at + 1] != '"':
            raise ValueError("no name")
        name, at = value_at(text, at)
        at = skipped(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("no value")
        start = skipped(text, at + 1)
        value, end = value_at(text, start)
        found[name] = Span(start, end, value)
        at = skipped(text, end)
        if text[at : at + 1] == "}":
            return found, at + 1
        if text[at : at + 1] != ",":
            raise ValueError("no comma")
        at = skipped(text, at + 1)


def walk_list(text: str, span: Span | None) -> list[Span]:
    """The elements of a list that was read; none for anything else."""
    found: list[Span] = []
    if span is None or type(span.value) is not list:
        return found
    at = skipped(text, span.start + 1)
    for value in span.value:
        end = value_at(text, at)[1]
        found.append(Span(at, end, value))
        at = skipped(text, skipped(text, end) + 1)  # behind the comma
    return found


def member(text: str, span: Span, name: str) -> Span | None:
    """A member of an object that was read."""
    return walk_object(text, span.start)[0].get(name) if type(span.value) is dict else None


def role_of(item: object) -> str:
    role = item.get("role") if type(item) is dict else None
    return role if type(role) is str else ""


def text_of_block(block: object) -> str | None:
    """The text of a block that has nothing else."""
    if type(block) is not dict or block.get("type") != "text" or not block.keys() <= TEXT_MEMBERS:
        return None
    text = block.get("text")
    return text if type(text) is str else None


def text_of_content(content: object) -> str | None:
    """Text that is alone, or of blocks that have nothing else."""
    if type(content) is not list:
        return content if type(content) is str else None
    found = [text_of_block(block) for block in content]
    return "".join([text for text in found if text is not None]) if None not in found else None


def leading(items: Sequence[Span]) -> int:
    """How many items are before the first that is not the system's."""
    return next((i for i, item in enumerate(items) if role_of(item.value) not in LEADING_ROLES), len(items))


def contents(raw: RawBody, where: str) -> Iterator[tuple[str, Span]]:
    """Paths and places of the contents that an action looks at, each a text or a list of blocks."""
    api, items, text = raw.api, raw.items, raw.text
    chosen: Sequence[int] = range(len(items))
    if where == "system":
        if api.lead and (lead := raw.members.get(api.lead)) is not None:
            yield f"$.{api.lead}", lead
        chosen = range(leading(items))
    elif where == "first":
        chosen = [place for place in chosen if role_of(items[place].value) == "user"][:1]
    for place in chosen:
        found = member(text, items[place], "content")
        if found is not None:
            yield f"$.{api.history}[{place}].content", found


def texts(raw: RawBody, where: str) -> Iterator[tuple[str, Span]]:
    """Paths and places of the texts of contents."""
    for path, content in contents(raw, where):
        if type(content.value) is str:
            yield path, content
        for place, block in enumerate(walk_list(raw.text, content)):
            if type(block.value) is dict and type(block.value.get("text")) is str:
                found = member(raw.text, block, "text")
                if found is not None:
                    yield f"{path}[{place}]", found


def raw_places(raw: str, places: Sequence[int]) -> list[int]:
    """Where characters of a text are in its raw form, without the quotes. `places` ascend."""
    found: list[int] = []
    shift = 0
    waiting = iter(places)
    place = next(waiting, None)
    for match in ESCAPE.finditer(raw) if "\\" in raw else ():
        while place is not None and place <= match.start() - shift:
            found.append(place + shift)
            place = next(waiting, None)
        if place is None:
            return found
        shift += match.end() - match.start() - 1
    while place is not None:
        found.append(place + shift)
        place = next(waiting, None)
    return found


# --- actions ----------------------------------------------------------------------------------------------------------


def drop_block(raw: RawBody, action: BodyChange) -> Iterator[Edit]:
    """Blocks with the comma that belongs to each. A list of which nothing would be left stays as it is."""
    for path, content in contents(raw, action.where):
        blocks = walk_list(raw.text, content)
        dropped = [action.matches(text_of_block(each.value)) for each in blocks]
        if all(dropped):
            continue
        kept = max(place for place, gone in enumerate(dropped) if not gone)
        for place, gone in enumerate(dropped[:kept]):
            if gone:
                yield Edit(blocks[place].start, blocks[place + 1].start, "", f"{path}[{place}]")
        if kept + 1 < len(blocks):
            yield Edit(blocks[kept].end, blocks[-1].end, "", f"{path}[{kept + 1}]")


def replace(raw: RawBody, action: BodyChange) -> Iterator[Edit]:
    assert action.pattern is not None, "checked when the rule was read"
    for path, span in texts(raw, action.where):
        found = [
            (match.start(), match.end(), match.expand(action.replacement))
            for match in action.pattern.finditer(span.value, 0, PATTERN_CHARACTERS_MAX)
        ]
        changes = [each for each in found if span.value[each[0] : each[1]] != each[2]]
        inside = raw.text[span.start + 1 : span.end - 1]
        places = raw_places(inside, [place for start, end, _ in changes for place in (start, end)])
        for (_, _, new), start, end in zip(changes, places[::2], places[1::2], strict=True):
            at = span.start + 1
            yield Edit(at + start, at + end, json.dumps(new)[1:-1], path)


def rerole(raw: RawBody, action: BodyChange) -> Iterator[Edit]:
    for place in range(leading(raw.items), len(raw.items)):
        item = raw.items[place]
        if role_of(item.value) != action.role or not action.matches(text_of_content(item.value.get("content"))):
            continue
        role = member(raw.text, item, "role")
        if role is not None:
            yield Edit(role.start, role.end, json.dumps(action.to), f"$.{raw.api.history}[{place}]")


def sort_tools(raw: RawBody, action: BodyChange) -> Iterator[Edit]:  # noqa: ARG001  # as all of them
    tools = walk_list(raw.text, raw.members.get("tools"))
    keys = [(name_of_tool(tool.value), raw.text[tool.start : tool.end]) for tool in tools]
    if any(not name for name, _ in keys) or all(one[0] <= other[0] for one, other in pairwise(keys)):
        return
    for tool, (_, text) in zip(tools, sorted(keys), strict=True):
        yield Edit(tool.start, tool.end, text, "$.tools")


def name_of_tool(tool: object) -> str:
    """Its name, or its kind where it has none; empty for what is no tool."""
    if type(tool) is not dict:
        return ""
    function = tool.get("function")
    name = function.get("name") if type(function) is dict else tool.get("name", tool.get("type"))
    return name if type(name) is str else ""


def set_values(raw: RawBody, action: BodyChange) -> Iterator[Edit]:
    """The client's own values stand."""
    values, path = action.values or {}, f"$.{action.member}"
    found = raw.members.get(action.member)
    if found is None:
        comma = "," if raw.members else ""
        text = f"{comma}{json.dumps(action.member)}:{json.dumps(values)}"
        yield Edit(raw.end - 1, raw.end - 1, text, path)
    elif found.value is None:
        yield Edit(found.start, found.end, json.dumps(values), path)
    elif type(found.value) is dict and (new := {key: values[key] for key in values if key not in found.value}):
        comma = "," if found.value else ""
        yield Edit(found.start + 1, found.start + 1, json.dumps(new)[1:-1] + comma, path)


ACTIONS: Mapping[str, Callable[[RawBody, BodyChange], Iterator[Edit]]] = {
    "drop_block": drop_block,
    "replace": replace,
    "rerole": rerole,
    "sort_tools": sort_tools,
    "set": set_values,
}
