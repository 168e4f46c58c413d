"""Removes from a stream the event of counts that only we asked for.

Rule: the counts are one event of their own, with a `usage` and no `choices`. An event with output is never changed, and
what else stands beside counts goes on without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from ranvier_py.core.answers.answer_events import AnswerEvent

MARK = b'"prompt_tokens"'  # quotes in generated text are escaped, so text cannot contain it

USUAL = frozenset(
    ("id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier", "obfuscation")
)
"""Members of an event of counts by OpenAI's API, which is all there is to know of them."""


class UsageRemoval:
    """Judges the events of one answer that have MARK. `keeps_length`: the answer has a content-length."""

    __slots__ = ("_keeps_length", "counts", "counts_anyway", "has_more", "removed")

    def __init__(self, *, keeps_length: bool) -> None:
        self._keeps_length = keeps_length
        self.removed, self.counts = 0, b""  # events that were removed, and the last of them
        self.counts_anyway = False  # an event with output had counts, for which we did not ask
        self.has_more = False  # an event with counts has something else, which clients would not get were it removed

    def left_of(self, event: bytes) -> bytes:
        """Return what goes on of an event that may have counts."""
        fields = AnswerEvent.of(event).fields
        if self.counts_anyway or fields is None or type(fields.get("usage")) is not dict:
            return event
        # `"usage":null` there stays: vLLM's completions and older SGLang write it asked or not, and it harms no client
        if fields.get("choices"):
            self.counts_anyway = True
            return event
        # vLLM since 2026 has `system_fingerprint` in this event, not in the last one with output: that is lost
        self.removed += 1
        self.counts = event
        body, left = event.rstrip(b"\r\n"), b""
        if any(value is not None and name not in USUAL for name, value in fields.items()):
            self.has_more = True
            left = without_counts(body, fields)
        if self._keeps_length:  # a comment of the same length takes the place
            left = left.ljust(len(body)) if 0 < len(left) <= len(body) else b":".ljust(len(body))
        return left + event[len(body) :] if left else b""


def without_counts(event: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return an event with the other lines that it has, and all of its object but `usage`."""
    lines = [line for line in event.splitlines() if not line.startswith(b"data:")]
    rest = orjson.dumps({name: value for name, value in fields.items() if name != "usage"})
    return b"\n".join((*lines, b"data: " + rest))
