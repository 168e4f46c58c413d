"""Rendered messages -> token depths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Message = Mapping[str, Any]
TokenIds = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Chat:
    """What of a chat request decides its rendered text. `template` holds the extra arguments of the template."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenizedChat:
    """Tokens of some consecutive messages, without a generation prompt.

    `ends[i]` is the number of tokens up to the end of message i of those, or -1 where that end is not a clean cut.
    `how` says how the ends were found: "rendered", "markers", "estimate".
    """

    ids: TokenIds
    ends: Sequence[int]
    how: str
