"""Whether a stream is asked for its token counts, and how: one member of the body, put in as bytes.

An engine counts in every whole answer, but in a stream only for `"stream_options":{"include_usage":true}` (OpenAI's API
reference). A body that has no `stream_options` gets the member right after its first brace; one that has them without
`include_usage` gets it in there, where they are near an end of the body, flat and free of escapes: the few bytes of the
options are written anew, and all others stay. Whether it has any was seen when it was read; nothing but an end of the
body is parsed again. What is put in comes first, so a member of the client's own that we overlooked would win where the
last one wins, and is refused elsewhere.

Rules: who asks himself is left alone, and so is who wants counts in every chunk (vLLM's `continuous_usage_stats`, which
works only together with `include_usage`). A body that can't be edited goes out as it came. A backend that
refuses (400, 422) and takes the same body as it came does not take the question, until it is another process; one that
took it once is believed when it refuses a body. One that sends counts in chunks with output does so by order of its
operator (vLLM's `--enable-force-include-usage`) and is not asked.
Bound: one entry for each backend id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

import orjson

from ranvier_py.core.answers.usage_removal import UsageRemover
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter
from ranvier_py.core.prompts.body_json import members_at, object_of
from ranvier_py.core.prompts.body_members import ABSENT, OWN
from ranvier_py.core.prompts.request_body import Prompt

MEMBER = b'"stream_options":{"include_usage":true},'
OWN_OPTIONS = re.compile(rb'"stream_options"\s*:\s*(null|\{[^{}\\]{0,512}\})')

REFUSALS = frozenset((400, 422))
"""What servers answer to a member they do not know: vLLM and most others 400, FastAPI's own validation 422."""

COUNTED_ANYWAY = ("messages", "responses", "generate")
"""APIs whose streams have their counts whoever asks."""

ASKING_BYTES_MAX = 4 * 1024 * 1024
"""Larger bodies go out as they came: no client should cause a copy of all of it for 40 bytes more."""


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
    unasked: int = counter("Streams whose body is too large or too tangled to put the question in.")
    refused: int = counter("Requests sent again as they came, because the engine refused the question.")
    removed: int = counter("Streams whose counts were taken out again.")


class UsageAsking:
    """Asks for counts, and remembers of each backend how it takes that."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._terms: dict[int, tuple[int, Terms]] = {}
        self.counters = UsageCounters()

    def terms(self, backend: BackendId, generation: int) -> Terms:
        known = self._terms.get(backend)
        return known[1] if known is not None and known[0] == generation else Terms.UNKNOWN

    def body(self, prompt: Prompt, backend: BackendId, generation: int, sent: bytes = b"") -> bytes | None:
        """The body that asks for counts; None where it is not to be changed. `sent`: the body, if not the prompt's."""
        if not self.enabled or not prompt.stream or prompt.kind == "opaque" or prompt.api in COUNTED_ANYWAY:
            return None
        if self.terms(backend, generation) in (Terms.REFUSES, Terms.UNASKED):
            return None
        if prompt.stream_options == OWN:
            self.counters.own += 1
            return None
        asking = asking_body(sent or prompt.body, prompt.stream_options)
        if asking is None:
            self.counters.unasked += 1
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


def asking_body(body: bytes, options: str) -> bytes | None:
    """The body of a stream, with the question for counts in it; None where that takes too much.

    `options` is ABSENT or OPEN, as the body was read.
    """
    if len(body) > ASKING_BYTES_MAX:
        return None
    if options == ABSENT:
        place = body.find(b"{") + 1
        return b"%b%b%b" % (body[:place], MEMBER, body[place:]) if place else None
    for place, _ in members_at(body, b'"stream_options"'):
        own = OWN_OPTIONS.match(body, place)
        found = object_of(b'{"own":%b}' % own[1]) if own is not None else None
        if own is not None and found is not None:
            asking = orjson.dumps({**(found["own"] or {}), "include_usage": True})
            return b"%b%b%b" % (body[: own.start(1)], asking, body[own.end(1) :])
    return None
