"""Finds the token depths at which rendered messages end.

Rule: three functions are tried, the exact ones first: `ends_by_offsets` (a prefix that ends inside a token has no
clean cut), `ends_by_markers` (exact even where prefixes do not render alone), `ends_by_estimate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Message = Mapping[str, Any]
TokenIds = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Chat:
    """The parts of a chat request that decide its rendered text. `template` holds the template's extra arguments."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenizedChat:
    """Tokens of consecutive messages, without a generation prompt.

    `ends[i]` is the number of tokens up to the end of the i-th of these messages, or -1 if that is not a clean cut.
    `how` names the method that found the ends: "rendered", "markers", "estimate".
    """

    ids: TokenIds
    ends: Sequence[int]
    how: str


class TailJob(NamedTuple):
    """The messages to tokenize: those after the first `known` ones of `context()`, which parses the whole chat."""

    tail: Sequence[Message]
    context: Callable[[], Chat]
    known: int


def ends_by_offsets(offsets: Sequence[tuple[int, int]], text_ends: Sequence[int]) -> list[int]:
    """Return the token depths of character positions.

    Args:
        offsets: (start, end) character position of each token, ascending.
        text_ends: ascending positions where messages end, or -1.

    Returns:
        For each position the number of tokens that end at or before it, or -1 where it lies inside a token.
    """
    spans = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    depths = np.searchsorted(spans[:, 1], np.array(text_ends, dtype=np.int64), side="right").tolist()
    starts = [*spans[:, 0].tolist(), max(text_ends, default=0)]
    return [depth if end >= 0 and starts[depth] >= end else -1 for depth, end in zip(depths, text_ends, strict=True)]


def ends_by_markers(ids: TokenIds, marker: int, messages: int) -> list[int] | None:
    """Return the depths where messages end if each begins with its only `marker`; None if their number is wrong, for
    example because a message quotes the marker.

    One marker more than messages is allowed: a default system text stands in front.
    """
    starts: list[int] = np.flatnonzero(ids == marker).tolist()
    extra = len(starts) - messages
    if messages == 0 or extra not in (0, 1):
        return None
    return [*starts[extra + 1 :], len(ids)]


def ends_by_estimate(sizes: Sequence[int], tokens: int) -> list[int]:
    """Return the depths where messages of `sizes` characters end if tokens are spread evenly. The last is `tokens`. Off
    by 2 to 5 tokens for running text (Ranvier), more where a template adds much text or moves messages: rounding down
    to a block absorbs most of it; the rest costs a cache miss."""
    total = sum(sizes)
    if total == 0:
        return [-1] * (len(sizes) - 1) + [tokens] * bool(sizes)
    return [tokens * size // total for size in accumulate(sizes)]


def ends_by_pieces(lengths: Sequence[int]) -> list[int]:
    """Return the depths where messages end, given their pieces' tokens; -1: the next piece includes the message."""
    ends = []
    depth = 0
    for length in lengths:
        depth += max(length, 0)
        ends.append(depth if length >= 0 else -1)
    return ends
