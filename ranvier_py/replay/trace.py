"""One request of a trace, whatever file it came from, and what was wrong with a file.

A trace knows no text here: a loader has turned it into *stops*, as a node turns a prompt into them, and into the names
of the blocks that an engine would cache. Equal stops, and equal blocks, mean an equal prefix up to there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ranvier_py.core.ids import Fingerprint


class Depth(NamedTuple):
    """A place in a prompt that a router would recognise: `tokens` from the start, and the name of that prefix."""

    tokens: int
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """What came when, how long it was, and what it shares with others.

    `chain` are ascending depths of prompt and answer together: every boundary and anchor a node would know, whole
    blocks only. Those up to `prompt_tokens` are known when the request comes, the others when it has been answered.
    `ends` are the indices in `chain` at which a message ends (the first of them is the request's home).
    `blocks` name the whole blocks of prompt and answer, `block_tokens` long, chained: an engine's cache knows them so.
    `opening` is what Continuum's ring hashes where the trace has text (core/routing/placement/chwbl.py), else empty.
    """

    at: float  # seconds since the start of the trace
    session: str  # "" where the trace names none
    model: str
    prompt_tokens: int
    answer_tokens: int  # at least 1
    chain: Sequence[Depth]
    ends: Sequence[int]
    blocks: tuple[int, ...]
    block_tokens: int
    opening: bytes = b""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time. `timed` is False when the times are ours and not the file's."""

    name: str
    requests: Sequence[TraceRequest]
    block_tokens: int
    timed: bool


class TraceError(Exception):
    """A file that is no trace, or a line of it that is none. The message names file, line, and what was expected."""
