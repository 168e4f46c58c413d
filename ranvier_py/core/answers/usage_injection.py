"""Whether a stream is asked for its token counts, and how: one member of the body, put in as bytes.

An engine counts in every whole answer, but in a stream only for `"stream_options":{"include_usage":true}` (OpenAI's API
reference). A body that has no `stream_options` gets the member right after its first brace; one that has them without
`include_usage` gets it in there. Nothing is parsed or written anew: all other bytes stay. What is put in comes first,
so a member of the client's own that we overlooked would win where the last one wins, and is refused elsewhere.

Rules: who asks himself is left alone, and so is who wants counts in every chunk (vLLM's `continuous_usage_stats`, which
works only together with `include_usage`). An edit of `stream_options` is proved by parsing its result. A backend that
refuses (400, 422) and takes the same body as it came does not take the question, until it is another process; one that
took it once is believed when it refuses a body. One that sends counts in chunks with output does so by order of its
operator (vLLM's `--enable-force-include-usage`) and is not asked.
Bound: one entry for each backend id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson

from ranvier_py.core.answers.usage_removal import UsageRemover
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter
from ranvier_py.core.prompts.request_body import Prompt

MEMBER = b'"stream_options":{"include_usage":true},'
OPTIONS = b'"stream_options"'
OWN_OPTIONS = re.compile(rb'"stream_options"\s*:\s*(?:(null)|\{\s*(\})?)')
OWN_REFUSAL = re.compile(rb'"include_usage"\s*:\s*(?:false|null)\s*(,?)')

REFUSALS = frozenset((400, 422))
"""What servers answer to a member they do not know: vLLM and most others 400, FastAPI's own validation 422."""

EDITS_MAX = 4
"""Places in one body that are tried as its `stream_options`: others are in schemas of tools."""


class Terms(Enum):
    """What is known of how one process of a backend takes the question."""

    UNKNOWN = "unknown"
    TAKES = "takes"
    REFUSES = "refuses"
    UNASKED = "unasked"  # it counts in chunks with output, whoever asks


@dataclass(slots=True)
class UsageCounters:
    """Since the start."""

    asked: int = counter("Streams whose engine was asked for token counts.")
    own: int = counter("Streams whose client asked himself, or wants what the question would change.")
    refused: int = counter("Requests sent again as they came, because the engine refused the question.")
    removed: int = counter("Streams whose counts were taken out again.")


class UsageAsking:
    """Asks for counts, and remembers of each backend how it takes that."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._terms: dict[int, tuple[int, Terms]] = {}
        self.counters = UsageCounters()

    def terms(self, backend: BackendId, generation: int) -> Terms:
        known = self._terms.get(backend)
        return known[1] if known is not None and known[0] == generation else Terms.UNKNOWN

    def body(self, prompt: Prompt, backend: BackendId, generation: int) -> bytes | None:
        """The body that asks for counts; None where it is not to be changed."""
        if not self._enabled or not prompt.stream or prompt.kind == "opaque":
            return None
        if self.terms(backend, generation) in (Terms.REFUSES, Terms.UNASKED):
            return None
        asking = asking_body(prompt.body)
        if asking is None:
            self.counters.own += 1
            return None
        self.counters.asked += 1
        return asking

    def taken(self, backend: BackendId, generation: int) -> None:
        """It answered a question."""
        self._terms[backend] = (generation, Terms.TAKES)

    def refused(self, backend: BackendId, generation: int, status: int) -> None:
        """It refused the question, and answered `status` to the same body without."""
        self.counters.refused += 1
        if status not in REFUSALS:
            self._terms[backend] = (generation, Terms.REFUSES)

    def unreadable(self, backend: BackendId, generation: int) -> None:
        """It answered in a coding of its own, out of which nothing can be taken: one client has got an event more."""
        self._terms[backend] = (generation, Terms.REFUSES)

    def answered(self, remover: UsageRemover, backend: BackendId, generation: int) -> None:
        """The stream it was asked for has ended."""
        self.counters.removed += remover.removed
        if remover.counts_anyway:
            self._terms[backend] = (generation, Terms.UNASKED)


def asking_body(body: bytes) -> bytes | None:
    """The body of a stream, with the question for counts in it; None where it stays as it is."""
    if OPTIONS not in body:
        return with_member(body)
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if "stream_options" not in fields:  # somewhere else in it
        return with_member(body)
    options = fields["stream_options"]
    if options is not None and type(options) is not dict:
        return None
    options = options or {}
    if options.get("include_usage") or options.get("continuous_usage_stats"):
        return None
    return merged(body, {**fields, "stream_options": {**options, "include_usage": True}})


def with_member(body: bytes) -> bytes | None:
    place = body.find(b"{") + 1
    return b"%b%b%b" % (body[:place], MEMBER, body[place:]) if place else None


def merged(body: bytes, wanted: dict[str, Any]) -> bytes | None:
    """The body with `include_usage` in its own `stream_options`; None if that can't be done by bytes alone."""
    for tried, found in enumerate(OWN_OPTIONS.finditer(body)):
        if tried >= EDITS_MAX:
            break
        if found[1] is not None:
            edited = b'%b{"include_usage":true}%b' % (body[: found.start(1)], body[found.end(1) :])
        else:
            start = found.start(2) if found[2] is not None else found.end()
            refusal = OWN_REFUSAL.search(body, start)
            comma = b"" if found[2] is not None else b","
            edited = b'%b"include_usage":true%b%b' % (body[:start], comma, body[start:])
            if refusal is not None and not is_edit(edited, wanted):
                after = refusal.end() - len(refusal[1])
                edited = b'%b"include_usage":true%b' % (body[: refusal.start()], body[after:])
        if is_edit(edited, wanted):
            return edited
    return None


def is_edit(edited: bytes, wanted: dict[str, Any]) -> bool:
    try:
        return bool(orjson.loads(edited) == wanted)
    except orjson.JSONDecodeError:
        return False
