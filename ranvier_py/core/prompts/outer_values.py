"""Finds single values of outermost members in the raw bytes of a body: near its ends first, else by a walk of it all.

Rule: of several members of one name the last one counts, as in Python's libraries; one that a body has near its start
and once more in its middle is found near the start. A walk reads texts and brackets alone, and pauses after each
PORTION of them, so that nothing a client sends occupies the event loop (test_outer_values.py).
Bounds: WALKED_BYTES_MAX; of a larger body only the ends are searched, as `body_json.members_at` does.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

import orjson

from ranvier_py.core.prompts.body_json import PARSED_BYTES_MAX, UNCOUNTED_BYTES_MAX, members_at, object_of
from ranvier_py.core.prompts.reserved_members import NAME_ESCAPE

WALKED_BYTES_MAX = PARSED_BYTES_MAX  # one text of that length is one step
PORTION = 8_000  # texts and brackets: names of members, which take longest, in 10 to 20 ms
NEAR_BYTES = 1024
SCALAR_BYTES_MAX = 8192  # longer texts are no name of a model

PLAIN = rb'"[^"]*+'  # up to the first quote: if that is not escaped, this is all, found in a tenth of the time
TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+'
TOKEN = re.compile(PLAIN + rb'(?:(?<!\\)"|\Z)|' + TEXT + rb'(?:"|\Z)|[{}\[\]]', re.DOTALL)
COLON = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+")
SCALAR = re.compile(PLAIN + rb'(?<!\\)"|' + TEXT + rb'"|[-+0-9.eE]++|true|false|null', re.DOTALL)

Made = TypeVar("Made")


class Scalar(NamedTuple):
    """A value that is no object and no list, and where it is in the body."""

    value: Any
    start: int
    end: int


class OuterValues:
    """The outermost members of one body, each looked for when it is wanted. The searches yield after each portion."""

    __slots__ = ("_all", "body")

    def __init__(self, body: bytes) -> None:
        self.body = body
        self._all: dict[str, int] | None = None  # where the value of each begins, once all are known

    def find(self, name: str) -> Generator[None, None, Scalar | None]:
        """Return a member's value; None if there is none, if it is no scalar, or if it is not found."""
        return self.scalar((yield from self._place(name)))

    def last(self, name: str) -> Generator[None, None, Scalar | None]:
        """The same, of the last member with this name, by whatever spelling and wherever it stands."""
        return self.scalar((yield from self.last_place(name)))

    def last_place(self, name: str) -> Generator[None, None, int]:
        """Return where the value of that member begins; 0 if there is none, or the body is not walked."""
        if self._all is None and self.is_walked and NAME_ESCAPE.search(self.body) is None:
            number = self.body.count(b'"%b"' % name.encode())
            if number < 2:  # written once, it need not be sought among others
                return (yield from self._place(name)) if number else 0
        return (yield from self._walked(name))

    def scalar(self, place: int) -> Scalar | None:
        """Return the value that begins there; None if it is none, an object, a list, or too long."""
        # a longer text is not looked through, but has no end within these bytes
        found = SCALAR.match(self.body, place, place + SCALAR_BYTES_MAX + 1) if place else None
        if found is None or found.end() - found.start() > SCALAR_BYTES_MAX:
            return None
        try:
            return Scalar(orjson.loads(found[0]), *found.span())
        except orjson.JSONDecodeError:
            return None

    def has(self, name: str) -> Generator[None, None, bool]:
        """Whether there is such a member; of a body that is not walked, whether there might be."""
        return (yield from self._place(name)) > 0 or (b'"%b"' % name.encode() in self.body and not self.is_walked)

    def _place(self, name: str) -> Generator[None, None, int]:
        """Return where the value of a member begins; 0 if it is not found."""
        quoted, body = b'"%b"' % name.encode(), self.body
        if self._all is None and quoted in body:
            first = body.find(quoted, 0, NEAR_BYTES)
            if first > 0 and body.find(quoted, first + 1) < 0 and object_of(body[:first] + b'"":0}') is not None:
                colon = COLON.match(body, first + len(quoted))  # the only one, as clients mostly write it
                return colon.end() if colon is not None else 0
            for place, _ in members_at(body, quoted):
                if (colon := COLON.match(body, place + len(quoted))) is not None:
                    return colon.end()
        # a name may be spelled with escapes; in larger bodies nobody looks for that
        may_be_there = quoted in body or (len(body) <= UNCOUNTED_BYTES_MAX and b"\\u" in body)
        return (yield from self._walked(name)) if may_be_there else 0

    def _walked(self, name: str) -> Generator[None, None, int]:
        if not self.is_walked:
            return 0
        if self._all is None:
            self._all = yield from walked(self.body)
        return self._all.get(name, 0)

    @property
    def is_walked(self) -> bool:
        return len(self.body) <= WALKED_BYTES_MAX


def walked(body: bytes) -> Generator[None, None, dict[str, int]]:
    """Return where the value of each outermost member begins. What is no JSON has none, or some."""
    found, depth = dict[str, int](), 0
    for number, token in enumerate(TOKEN.finditer(body)):
        kind = body[token.start()]
        if kind == 0x22:
            if depth == 1 and (colon := COLON.match(body, token.end())) is not None:
                try:
                    found[orjson.loads(token[0])] = colon.end()
                except orjson.JSONDecodeError:
                    continue
        elif kind in b"{[":
            depth += 1
        else:
            depth -= 1
        if number % PORTION == PORTION - 1:
            yield
    return found


def elements(body: bytes, place: int) -> Generator[None, None, int]:
    """Count the texts, lists and objects in a list that begins here; 1 if it has none, or what begins is no list."""
    found, depth = 0, 0
    for number, token in enumerate(TOKEN.finditer(body, place) if body[place : place + 1] == b"[" else ()):
        kind = body[token.start()]
        found += depth == 1 and kind not in b"}]"
        depth += 0 if kind == 0x22 else 1 if kind in b"{[" else -1
        if not depth:
            break
        if number % PORTION == PORTION - 1:
            yield
    return max(found, 1)


def whole_value(body: bytes, place: int) -> Generator[None, None, bytes]:
    """Return the object or list that begins here."""
    depth = 0
    for number, token in enumerate(TOKEN.finditer(body, place)):
        kind = body[token.start()]
        depth += 0 if kind == 0x22 else 1 if kind in b"{[" else -1
        if depth <= 0:
            return body[place : token.end()]
        if number % PORTION == PORTION - 1:
            yield
    return body[place:]


def scalar_of(body: bytes, name: str) -> Scalar | None:
    """Return a member's value, if it is found in one portion of work."""
    try:
        next(OuterValues(body).find(name))
    except StopIteration as end:
        found: Scalar | None = end.value
        return found
    return None


def finished(steps: Generator[None, None, Made]) -> Made:
    """Return what a search finds, without pauses: for what is known to be small."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        made: Made = end.value
        return made
