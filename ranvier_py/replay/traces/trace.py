"""The values of traces of every format: a trace and its requests, the options for reading a file, and TraceError.

A trace has no text, only the prefix chains that a node would make of its prompts, and the names of the blocks that an
engine would cache. Two equal prefix keys, or two equal block names, mean an equal prefix up to there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from ranvier_py.core.ids import Fingerprint

Format = Literal["", "mooncake", "chats", "token_ids", "recording", "sessions"]


class Depth(NamedTuple):
    """A prefix key of a trace: `tokens` from the start, and the one name of that prefix."""

    tokens: int
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request: when it arrives, how long it is, and which prefixes it shares with others.

    `chain` has the ascending prefix keys of prompt and answer together: every boundary and anchor that a node would
    know, at ends of whole blocks only. Those up to `prompt_tokens` are known on arrival, the others after the answer.
    `ends` are the indices in `chain` at which a message ends; the first of them determines the request's home.
    `blocks` are the chained names, as in an engine's cache, of the whole blocks of prompt and answer together.
    `opening` is what Continuum's ring hashes (core/routing/placement/chwbl.py); empty if the trace has no text.
    """

    at: float  # seconds since the start of the trace
    session: str  # "" where the trace names none
    model: str
    prompt_tokens: int
    answer_tokens: int  # at least 1
    chain: Sequence[Depth]
    ends: Sequence[int]
    blocks: tuple[int, ...]
    opening: bytes = b""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time. `timed` is False if the times were made up and are not the file's."""

    name: str
    requests: Sequence[TraceRequest]
    block_tokens: int
    timed: bool


class TraceError(Exception):
    """A file or a line of it is not a trace. The message names the file, the line, and what was expected."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Options for reading a file. Each loader reads those that concern it; defaults fit the formats that the comments
    name."""

    format: Format = ""  # empty: recognized by the first line
    limit: int = 0  # read only so many requests, the first in order of time; 0: all
    seed: int = 1  # for all drawn times
    arrivals: Path | None = None  # a CSV file whose times the trace gets
    arrivals_replace: bool = False  # give them also to a trace with times of its own
    block_tokens: int = 512  # mooncake: tokens per hash id
    engine_block_tokens: int = 16  # chats, token_ids: tokens of an engine's block (vLLM's default)
    tokenizer: str = "embedded"  # chats: a directory, a hub id or "embedded"
    chat_template: str | None = None  # chats: a template's text or file
    window_s: float = 600.0  # chats, sessions: conversations without times begin at random within this time
    turn_s: float = 5.0  # from one turn of a conversation without times to the next
    answer_tokens: int = 128  # length of answers that the file does not have: the median of Azure's 2023 conversations
