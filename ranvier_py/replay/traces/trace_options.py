"""What a user may say about a trace file. One value for all formats: each loader reads what concerns it.

| option | formats | what it says |
|---|---|---|
| format | all | mooncake, chats, token_ids or recording; empty: told by the first line |
| limit | all | only so many requests, the first in order of time; 0: all |
| seed | all | of every time that is drawn |
| arrivals, arrivals_replace | all | a CSV that lends its times; also to a trace that has its own |
| stamp_unit_s | mooncake, chats, token_ids | what a time stamp of 1 is worth, in seconds |
| spread_s | mooncake, chats, token_ids | stamps are rounded down to steps of this length: spread them again |
| block_tokens | mooncake | tokens behind one hash id |
| engine_block_tokens | chats, token_ids | tokens of an engine's block: the unit of cache reuse |
| tokenizer, chat_template | chats | a directory, a hub id or "embedded"; a template's text or file |
| lines | chats | what a line is: a dialogue, a request, or see for yourself |
| window_s, turn_s | chats | times for chats that have none |
| answer_tokens | chats | length of an answer that the file does not have |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Format = Literal["", "mooncake", "chats", "token_ids", "recording"]
Lines = Literal["auto", "dialogues", "requests"]


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Options of one trace; the defaults fit the files they are named after."""

    format: Format = ""
    limit: int = 0
    seed: int = 1
    arrivals: Path | None = None
    arrivals_replace: bool = False
    stamp_unit_s: float | None = None  # None: the format's own
    spread_s: float | None = None  # None: 3 s for Mooncake files whose stamps repeat, else 0
    block_tokens: int = 512  # Mooncake's
    engine_block_tokens: int = 16  # vLLM's default
    tokenizer: str = "embedded"
    chat_template: str | None = None
    lines: Lines = "auto"
    window_s: float = 600.0  # conversations without times begin at random within this
    turn_s: float = 5.0  # from one turn of a conversation to the next
    answer_tokens: int = 128  # about the median of Azure's conversation trace of 2023
