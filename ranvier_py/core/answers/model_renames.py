"""Writes another name into the `model` of an answer, by every API: of a whole answer, and of each event of a stream.

Rule: it stands in the outermost object, in Anthropic's first event in its `message`, in events of /v1/responses in
their `response`; a text, or the input of a tool, that has such a member is left alone, and so are all other bytes. What
is too long to be read, or no JSON, passes as it came.
Invariant: the result does not depend on the cuts (test_model_renames.py).
Bounds: HELD_BYTES_MAX, READ_BYTES_MAX; of a whole answer, one portion of a search (`outer_values`).
"""

from __future__ import annotations

import re

import orjson

from ranvier_py.core.answers.answer_events import end_of_events
from ranvier_py.core.prompts.body_json import Splice, excess, spliced
from ranvier_py.core.prompts.outer_members import OuterMember, members_of, text_of
from ranvier_py.core.prompts.outer_values import scalar_of

HELD_BYTES_MAX = 4 << 20  # the last event of /v1/responses has the whole answer

READ_BYTES_MAX = 1 << 20  # of an event

MODEL, AROUND = "model", ("message", "response")
MARK = b'"model"'  # quotes in texts are escaped
DATA = re.compile(rb"(?m)^data:[ \t]*(?=\{)")
EVENTS = re.compile(rb"(?s).*?(?:\n\r?\n|\r\r)")


class ModelRenames:
    """Follows one answer. `name`: the model as the client is to read it."""

    __slots__ = ("_held", "_name")

    def __init__(self, name: str) -> None:
        self._name, self._held = orjson.dumps(name), b""

    def feed(self, payload: bytes, *, is_last: bool) -> bytes:
        """Return what goes on of a stream's next piece, and of what was held."""
        data = self._held + payload if self._held else payload
        end = len(data) if is_last or len(data) > HELD_BYTES_MAX else end_of_events(data, 0, len(data))
        events, self._held = data[:end], data[end:]
        if MARK not in events:
            return events
        return b"".join(map(self._event, events_in(events)))

    def whole(self, body: bytes) -> bytes:
        """Return a whole answer."""
        found = scalar_of(body, MODEL)
        if found is None or not isinstance(found.value, str):
            return body
        return spliced(body, [(found.start, found.end, self._name)])

    def _event(self, event: bytes) -> bytes:
        is_read = MARK in event and len(event) <= READ_BYTES_MAX and not excess(event)
        data = DATA.search(event) if is_read else None
        if data is None:
            return event
        try:
            text = text_of(event[data.end() :])
            outer = members_of(text)
            inner = [
                each
                for one in outer
                if one.name in AROUND and text[one.value] == "{"
                for each in members_of(text, one.value)
            ]
        except (ValueError, RecursionError):
            return event
        splices = [self._splice(text, each, data.end()) for each in (*outer, *inner) if is_named(text, each)]
        return spliced(event, splices) if splices else event

    def _splice(self, text: str, member: OuterMember, at: int) -> Splice:
        start, end = (at + len(text[:place].encode("utf-8", "surrogatepass")) for place in (member.value, member.end))
        return start, end, self._name


def is_named(text: str, member: OuterMember) -> bool:
    return member.name == MODEL and text[member.value] == '"'


def events_in(events: bytes) -> list[bytes]:
    """Return these events, each with its end, and what stands behind the last one."""
    found = EVENTS.findall(events)
    return [*found, events[sum(map(len, found)) :]]
