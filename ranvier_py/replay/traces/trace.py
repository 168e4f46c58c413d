"""A trace, whatever file it came from; what a user may say about that file; and what was wrong with one.

A trace knows no text: only the *chains* that a node makes of prompts, and the names of the blocks that an engine would
cache. Equal prefix keys, and equal blocks, mean an equal prefix up to there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from ranvier_py.core.ids import Fingerprint

Format = Literal["", "mooncake", "chats", "token_ids", "recording", "sessions"]
Lines = Literal["auto", "dialogues", "requests"]


class Depth(NamedTuple):
    """A prefix key as a trace has it: `tokens` from the start, and the one name of that prefix."""

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


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What a user may say about a file; each loader reads what concerns it, and the defaults fit the files they are
    named after."""

    format: Format = ""  # empty: recognized by the first line
    limit: int = 0  # only so many requests, the first in order of time; 0: all
    seed: int = 1  # of every time that is drawn
    arrivals: Path | None = None  # a CSV that lends its times
    arrivals_replace: bool = False  # also to a trace that has its own
    stamp_unit_s: float | None = None  # what a time stamp of 1 is worth; None: the format's own
    spread_s: float | None = (
        None  # stamps were rounded down to such steps; None: 3 s for Mooncake's that repeat, else 0
    )
    block_tokens: int = 512  # mooncake: tokens behind one hash id
    engine_block_tokens: int = 16  # chats, token_ids: of an engine's block, the unit of cache reuse (vLLM's default)
    tokenizer: str = "embedded"  # chats: a directory, a hub id or "embedded"
    chat_template: str | None = None  # chats: a template's text or file
    lines: Lines = "auto"  # chats: what a line is
    window_s: float = 600.0  # chats, sessions: conversations without times begin at random within this
    turn_s: float = 5.0  # from one turn of a conversation without times to the next
    answer_tokens: int = 128  # of an answer that the file does not have: the median of Azure's conversations of 2023
