"""The trace that a request belongs to: W3C Trace Context, version 00, read from clients and written for engines.

Rules: a `traceparent` that breaks a rule, or comes twice, begins a new trace, and its `tracestate` goes with it; a bad
`tracestate` goes alone. A version above ours is read as ours. A parent's decision about sampling is obeyed.
Bounds: STATE_MEMBERS_MAX and STATE_CHARACTERS_MAX of a `tracestate`: what is over is cut off at its end.
Source: https://www.w3.org/TR/trace-context/ sections 3.2 and 3.3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
TRACE_FIELDS = frozenset((TRACEPARENT, TRACESTATE))

PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
KEY = r"(?:[a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})"
MEMBER = re.compile((KEY + r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]").encode())
STATE_MEMBERS_MAX, STATE_CHARACTERS_MAX = 32, 512
SAMPLED = 1  # of the flags

SPAN_BITS, TRACE_BITS = 62, 128
"""Of random ids. A request's span has one whose highest bits are 0, so that the numbers after it are its children's."""


class Parent(NamedTuple):
    """What a request's fields show of the trace it belongs to."""

    trace_id: str
    span_id: str
    is_sampled: bool
    state: bytes = b""


class Generator(Protocol):
    def getrandbits(self, count: int, /) -> int: ...
    def random(self) -> float: ...


class RequestTrace:
    """The trace of one request: who began it, and the ids of its spans. `trace_id` is in hex."""

    __slots__ = ("is_sampled", "parent_id", "root", "state", "trace_id")

    def __init__(self, trace_id: str, parent_id: str, root: int, *, is_sampled: bool, state: bytes) -> None:
        self.trace_id, self.parent_id, self.root = trace_id, parent_id, root
        self.is_sampled, self.state = is_sampled, state

    @property
    def span_id(self) -> str:
        return f"{self.root:016x}"

    def placing(self, attempt: int) -> str:
        """Return the id of the span of this placement; the first one is 1."""
        return f"{self.root + 2 * attempt - 1:016x}"

    def asking(self, attempt: int) -> str:
        """Return the id of the span of this attempt, which is the parent of the engine's own."""
        return f"{self.root + 2 * attempt:016x}"

    def traceparent(self, attempt: int) -> bytes:
        return f"00-{self.trace_id}-{self.root + 2 * attempt:016x}-{self.is_sampled:02x}".encode()


def parent_in(fields: Iterable[tuple[bytes, bytes]]) -> Parent | None:
    """Return the parent that these trace fields name; None if there is none, or it breaks a rule."""
    named, states = list[bytes](), list[bytes]()
    for name, value in fields:
        (named if name.lower() == TRACEPARENT else states).append(value.strip())
    found = PARENT.fullmatch(named[0]) if len(named) == 1 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None) or not (int(trace_id, 16) and int(span_id, 16)):
        return None
    state = state_of(b",".join(states)) if states else b""
    return Parent(trace_id.decode(), span_id.decode(), bool(int(flags, 16) & SAMPLED), state)


def state_of(text: bytes) -> bytes:
    """Return a tracestate as it goes on; empty if it breaks a rule."""
    members = [member.strip(b" \t") for member in text.split(b",") if member.strip(b" \t")]
    keys = [member.partition(b"=")[0] for member in members]
    if len(members) > STATE_MEMBERS_MAX or len({*keys}) < len(keys) or not all(map(MEMBER.fullmatch, members)):
        return b""
    kept, size = list[bytes](), -1
    for member in members:
        size += len(member) + 1
        if size > STATE_CHARACTERS_MAX:
            break
        kept.append(member)
    return b",".join(kept)


def trace_of(parent: Parent | None, ratio: float, rng: Generator) -> RequestTrace:
    """Return the trace of a request: its parent's, or a new one, of which this share is sampled."""
    root = rng.getrandbits(SPAN_BITS) + 1
    if parent is None:
        trace_id = rng.getrandbits(TRACE_BITS) or 1
        return RequestTrace(f"{trace_id:032x}", "", root, is_sampled=rng.random() < ratio, state=b"")
    return RequestTrace(parent.trace_id, parent.span_id, root, is_sampled=parent.is_sampled, state=parent.state)
