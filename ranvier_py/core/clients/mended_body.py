"""Computes what a rule changes in the raw text of a body, place by place; all other bytes stay as they came.

Rule: places are found by walking the JSON with the standard library's scanner, so nothing is guessed: `Span`s are
places in the text, and a value is parsed from exactly those characters. Of two members of one name the last one
counts, as for engines. A body is parsed once: each rule changes the body as it came. Of two changes to one place the
first is made.
Bounds: BODY_BYTES_MAX, MARKS_MAX, MEMBERS_MAX and ELEMENTS_MAX of what is looked at; of a text its first
PATTERN_CHARACTERS_MAX. A rule that would change more than EDITS_MAX places changes none.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple

from ranvier_py.core.prompts.body_json import marks_in
from ranvier_py.core.prompts.outer_members import skipped
from ranvier_py.core.prompts.request_apis import Api

PATTERN_CHARACTERS_MAX = 65_536
SEEN_BEHIND = 1_024
"""Characters that a pattern sees beyond its own, so that it does not match the beginning of what ends behind them."""

BODY_BYTES_MAX = 1024 * 1024
"""Some 260,000 tokens. All of it is parsed on the event loop, at each turn."""

MARKS_MAX = 32_768
MEMBERS_MAX, ELEMENTS_MAX = 256, 2048
"""Parts of an object, or of a list, that are walked in Python: chats have some 2,000 messages and hundreds of tools."""

EDITS_MAX = 1024
LEADING_ROLES = ("system", "developer")

ESCAPE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.", re.DOTALL)
"""An escape that stands for one character of a text."""

TEXT_MEMBERS = frozenset(("type", "text", "cache_control"))

value_at = json.JSONDecoder().raw_decode
new = tuple.__new__


class Span(NamedTuple):
    """A value, and its place in a text."""

    start: int
    end: int
    value: Any


class Edit(NamedTuple):
    """The text to put in a place. `path` names what that changes."""

    start: int
    end: int
    text: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyChange:
    """What a rule does. `where`: "system", "first" (the user's first message) or "history". By `kind`:

    drop_block     removes blocks that the pattern matches whole from their list
    replace        replaces what the pattern matches in a text with `replacement`
    rerole         changes messages of `role` after the leading system ones, if the pattern matches them whole, to `to`
    sort_tools     sorts the tools by name
    set            adds to `member` those of `values` that the client left out
    """

    kind: str
    where: str = "system"
    pattern: re.Pattern[str] | None = None
    replacement: str = ""
    role: str = "system"
    to: str = "user"
    member: str = ""
    values: Mapping[str, Any] | None = None

    def matches(self, text: object) -> bool:
        """Whether the value is a text that the pattern matches whole."""
        if type(text) is not str or len(text) > PATTERN_CHARACTERS_MAX:
            return False
        return self.pattern is not None and self.pattern.fullmatch(text) is not None


class RawBody:
    """A body as text, with its outermost members, and the items of its history."""

    def __init__(self, text: str, api: Api) -> None:
        """Raises ValueError for what is no JSON object, or one of too many parts."""
        self.text = text
        self.api = api
        self.members, self.end, self.items = walk_object(text, skipped(text, 0), api.history)
        if skipped(text, self.end) != len(text):
            raise ValueError("something is behind the object")

    @property
    def model(self) -> str:
        found = self.members.get("model")
        return found.value if found is not None and type(found.value) is str else ""

    @property
    def fields(self) -> Mapping[str, Any]:
        return {name: span.value for name, span in self.members.items()}

    def opening(self, edits: Sequence[Edit] = ()) -> str:
        """Return the text of the user's first message after edits, which names a conversation whose client does not."""
        starts = [edit.start for edit in edits]
        for item in self.items:
            inside = edits[bisect_left(starts, item.start) : bisect_left(starts, item.end)]
            value = value_at(self.edited(inside, item.start, item.end), 0)[0] if inside else item.value
            if role_of(value) == "user":
                return json.dumps(text_of_content(value.get("content")))
        return ""

    def edits(self, action: BodyChange) -> Sequence[Edit]:
        """Return the action's edits, in the order of the text; empty if it changes nothing. Raises ValueError for lists
        that are too long."""
        found = sorted(islice(ACTIONS[action.kind](self, action), EDITS_MAX + 1))
        return found if len(found) <= EDITS_MAX else ()

    def edited(self, edits: Sequence[Edit], start: int = 0, end: int | None = None) -> str:
        """Return the text, or a part of it, with these edits, none of which overlap."""
        pieces: list[str] = []
        for edit in edits:
            pieces += (self.text[start : edit.start], edit.text)
            start = edit.end
        return "".join([*pieces, self.text[start:end]])


def raw_body(body: bytes, api: Api) -> RawBody | None:
    """Read a body; None if it cannot be read within bounds."""
    if len(body) > BODY_BYTES_MAX or marks_in(body, MARKS_MAX) > MARKS_MAX:
        return None
    try:
        return RawBody(body.decode(), api)
    except (ValueError, RecursionError):
        return None


def with_more(edits: Sequence[Edit], more: Sequence[Edit]) -> list[Edit]:
    """Return ordered edits, and those of `more` that change other places, or add another member."""
    starts, added = [edit.start for edit in edits], {(edit.start, edit.path) for edit in edits}

    def is_free(edit: Edit) -> bool:
        at = bisect_right(starts, edit.start)
        ends_before = at == 0 or edits[at - 1].end <= edit.start
        begins_behind = at == len(edits) or edit.end <= edits[at].start
        return ends_before and begins_behind and (edit.start, edit.path) not in added

    return sorted([*edits, *filter(is_free, more)])


def walk_object(text: str, at: int, listed: str = "") -> tuple[dict[str, Span], int, Sequence[Span]]:
    """Return the members of an object by name, the last one of each; its end; and the elements of member `listed`.

    Raises ValueError.
    """
    found: dict[str, Span] = {}
    elements: Sequence[Span] = ()
    if text[at : at + 1] != "{":
        raise ValueError("no object")
    at = skipped(text, at + 1)
    if text[at : at + 1] == "}":
        return found, at + 1, elements
    for _ in range(MEMBERS_MAX):
        if text[at : at + 1] != '"':
            raise ValueError("no name")
        name, at = value_at(text, at)
        at = skipped(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("no value")
        start = skipped(text, at + 1)
        if name == listed and text[start : start + 1] == "[":
            elements, end = walk_elements(text, start)
            value: Any = [element.value for element in elements]
        else:
            value, end = value_at(text, start)
            elements = () if name == listed else elements
        found[name] = Span(start, end, value)
        at = skipped(text, end)
        if text[at : at + 1] == "}":
            return found, at + 1, elements
        if text[at : at + 1] != ",":
            raise ValueError("no comma")
        at = skipped(text, at + 1)
    raise ValueError("too many members")


def walk_elements(text: str, start: int) -> tuple[list[Span], int]:
    """Return the elements of the list at `start`, and where it ends. Raises ValueError."""
    found: list[Span] = []
    at = skipped(text, start + 1)
    if text[at : at + 1] == "]":
        return found, at + 1
    for _ in range(ELEMENTS_MAX):
        value, end = value_at(text, at)
        found.append(new(Span, (at, end, value)))
        if text[end : end + 1] != ",":  # else no blank precedes the comma, as most libraries write it
            end = skipped(text, end)
        if text[end : end + 1] == "]":
            return found, end + 1
        if text[end : end + 1] != ",":
            raise ValueError("no comma")
        at = skipped(text, end + 1)
    raise ValueError("too many elements")


def walk_list(text: str, span: Span | None) -> list[Span]:
    """Return the elements of a list that was read; none for anything else."""
    return walk_elements(text, span.start)[0] if span is not None and type(span.value) is list else []


def member(text: str, span: Span, name: str) -> Span | None:
    """Return a member of an object that was read."""
    return walk_object(text, span.start)[0].get(name) if type(span.value) is dict else None


def role_of(item: object) -> str:
    role = item.get("role") if type(item) is dict else None
    return role if type(role) is str else ""


def text_of_block(block: object) -> str | None:
    """Return the text of a block that contains nothing else."""
    if type(block) is not dict or block.get("type") != "text" or not block.keys() <= TEXT_MEMBERS:
        return None
    text = block.get("text")
    return text if type(text) is str else None


def text_of_content(content: object) -> str | None:
    """Return a content that is text alone, or the joined texts of blocks that contain nothing else."""
    if type(content) is not list:
        return content if type(content) is str else None
    found = [text_of_block(block) for block in content]
    return "".join([text for text in found if text is not None]) if None not in found else None


def leading(items: Sequence[Span]) -> int:
    """Return how many items come before the first that is not of a system role."""
    return next((i for i, item in enumerate(items) if role_of(item.value) not in LEADING_ROLES), len(items))


def contents(raw: RawBody, where: str) -> Iterator[tuple[str, Span]]:
    """Yield path and place of each content that an action looks at: a text or a list of blocks."""
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
    """Yield path and place of each text in those contents."""
    for path, content in contents(raw, where):
        if type(content.value) is str:
            yield path, content
        for place, block in enumerate(walk_list(raw.text, content)):
            if type(block.value) is dict and type(block.value.get("text")) is str:
                found = member(raw.text, block, "text")
                if found is not None:
                    yield f"{path}[{place}]", found


def raw_places(raw: str, places: Sequence[int]) -> list[int]:
    """Return where characters of a text are in its raw form, without the quotes. `places` ascend."""
    escapes, shifts = [-1], [0]  # escapes: which characters they are; shifts: by how much what follows is moved
    for match in ESCAPE.finditer(raw) if places else ():
        if escapes[-1] >= places[-1]:
            break
        escapes.append(match.start() - shifts[-1])
        shifts.append(shifts[-1] + match.end() - match.start() - 1)
    return [place + shifts[bisect_left(escapes, place) - 1] for place in places]


def drop_block(raw: RawBody, action: BodyChange) -> Iterator[Edit]:
    """Yield edits that remove blocks, each with its comma. A list that would become empty stays as it is."""
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
            for match in action.pattern.finditer(span.value, 0, PATTERN_CHARACTERS_MAX + SEEN_BEHIND)
            if match.end() <= PATTERN_CHARACTERS_MAX
        ]
        changes = [each for each in found if span.value[each[0] : each[1]] != each[2]]
        inside = raw.text[span.start + 1 : span.end - 1]
        places = raw_places(inside, [place for start, end, _ in changes for place in (start, end)])
        for (_, _, new), start, end in zip(changes, places[::2], places[1::2], strict=True):
            at = span.start + 1
            yield Edit(at + start, at + end, json.dumps(new)[1:-1], path)


def rerole(raw: RawBody, action: BodyChange) -> Iterator[Edit]:
    for place in range(leading(raw.items), len(raw.items)):
        value = raw.items[place].value
        if role_of(value) != action.role or not action.matches(text_of_content(value.get("content"))):
            continue
        role = member(raw.text, raw.items[place], "role")
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
    """Return the tool's name, or its kind if it has none; empty for what is no tool."""
    if type(tool) is not dict:
        return ""
    function = tool.get("function")
    name = function.get("name") if type(function) is dict else tool.get("name", tool.get("type"))
    return name if type(name) is str else ""


def set_values(raw: RawBody, action: BodyChange) -> Iterator[Edit]:
    """Yield the edit that adds values; those of the client stay."""
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
