"""Asks engines for the token counts of a stream, by inserting one member into the request body.

An engine counts in every whole answer, but in a stream only for `"stream_options":{"include_usage":true}` (OpenAI's
API reference). Rule: a client that asks for counts itself is left alone, and so is one that wants them in every chunk
(vLLM's `continuous_usage_stats`). A body that cannot be edited is sent as it came. A backend that refuses an edited
body and takes the same unedited is not asked again in this generation; one that accepted an edited body once is
believed if it refuses a later one. Nothing but an end of a body is parsed again. Bound: one entry for each backend id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

import orjson

from ranvier_py.core.answers.usage_removal import UsageRemoval
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter
from ranvier_py.core.prompts.body_json import Splice, members_at, object_of
from ranvier_py.core.prompts.body_members import ABSENT, OWN
from ranvier_py.core.prompts.request_body import Prompt

MEMBER = b'"stream_options":{"include_usage":true},'
OWN_OPTIONS = re.compile(rb'"stream_options"\s*:\s*(null|\{[^{}\\]{0,512}\})')

REFUSALS = frozenset((400, 422))
"""Statuses for an unknown member: 400 of vLLM and most others, 422 of FastAPI's own validation."""

COUNTED_ANYWAY = ("messages", "responses", "generate")
"""APIs whose streams always have counts."""

ASKING_BYTES_MAX = 4 * 1024 * 1024
"""Larger bodies are sent as they came: no client should make us copy a whole body for 40 bytes more."""


class Terms(Enum):
    """How one generation of a backend responds to being asked for counts."""

    UNKNOWN = "unknown"
    TAKES = "takes"
    REFUSES = "refuses"
    UNASKED = "unasked"  # it sends counts in chunks with output even if not asked (`--enable-force-include-usage`), or
    # counts with something else (llama.cpp's `timings`), which then comes with output


@dataclass(slots=True)
class UsageCounters:
    """Counts since the start."""

    asked: int = counter("Streams whose engine was asked for token counts.")
    own: int = counter("Streams whose client asked for token counts itself, or wants what our asking would change.")
    unasked: int = counter("Streams not asked for token counts: their body is too large or too tangled to be changed.")
    refused: int = counter("Requests sent again unchanged, because the engine refused one that asked for token counts.")
    removed: int = counter("Streams from which token counts that only this node had asked for were removed.")


class UsageAsker:
    """Asks for counts, and remembers how each backend responds."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._terms: dict[int, tuple[int, Terms]] = {}
        self.counters = UsageCounters()

    def terms(self, backend: BackendId, generation: int) -> Terms:
        known = self._terms.get(backend)
        return known[1] if known is not None and known[0] == generation else Terms.UNKNOWN

    def splice(self, prompt: Prompt, body: bytes, backend: BackendId, generation: int) -> Splice | None:
        """Put the question for counts into a body; None: leave it unchanged."""
        if not self.enabled or not prompt.stream or prompt.kind == "opaque" or prompt.api in COUNTED_ANYWAY:
            return None
        if self.terms(backend, generation) in (Terms.REFUSES, Terms.UNASKED):
            return None
        if prompt.stream_options == OWN:
            self.counters.own += 1
            return None
        asking = asking_splice(body, prompt.stream_options)
        if asking is None:
            self.counters.unasked += 1
            return None
        self.counters.asked += 1
        return asking

    def taken(self, backend: BackendId, generation: int) -> None:
        """Note that the backend answered a body that asks."""
        self._terms[backend] = (generation, Terms.TAKES)

    def refused(self, backend: BackendId, generation: int, status: int) -> None:
        """Note that it refused a body that asks, and answered `status` to the same body unedited."""
        self.counters.refused += 1
        if status not in REFUSALS:
            self._terms[backend] = (generation, Terms.REFUSES)

    def unreadable(self, backend: BackendId, generation: int) -> None:
        """Note that it answered in a coding from which counts cannot be removed: one client got one more event."""
        self._terms[backend] = (generation, Terms.REFUSES)

    def answered(self, removal: UsageRemoval, backend: BackendId, generation: int) -> None:
        """Note that a stream whose backend was asked has ended."""
        self.counters.removed += removal.removed
        if removal.counts_anyway or removal.has_more:
            self._terms[backend] = (generation, Terms.UNASKED)


def asking_splice(body: bytes, options: str) -> Splice | None:
    """Put the question for counts into the body of a stream; None if that takes too much. `options` is ABSENT or OPEN,
    as noted when the body was read."""
    if len(body) > ASKING_BYTES_MAX:
        return None
    if options == ABSENT:
        place = body.find(b"{") + 1
        # first, so that of a member that we overlooked, the client's own, engines that take the last of two take that
        return (place, place, MEMBER) if place else None
    for place, _ in members_at(body, b'"stream_options"'):  # rewritten if near an end, flat and free of escapes
        own = OWN_OPTIONS.match(body, place)
        found = object_of(b'{"own":%b}' % own[1]) if own is not None else None
        if own is not None and found is not None:
            asking = orjson.dumps({**(found["own"] or {}), "include_usage": True})
            return own.start(1), own.end(1), asking
    return None
