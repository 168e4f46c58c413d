"""The engine's counts at the ends of an answer, read without parsing it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ranvier_py.core.answers.answer_ends import ENDS_BYTES

INPUT, OUTPUT, CACHE_READ, WRITTEN = b"input", b"output", b"cache_read_input", b"cache_creation_input"
COUNTS = {"messages": (INPUT, CACHE_READ, OUTPUT), "responses": (INPUT, b"cached", OUTPUT)}
USUAL_COUNTS = (b"prompt", b"cached", b"completion")
"""Names of the prompt's, the cached and the answer's tokens, by API; those of all others."""

USAGE = b'"usage"'
COUNT = re.compile(rb'"([a-z_]{1,32})_tokens"\s*:\s*(\d{1,9})[ \n]*[,}]')


class AnswerCounts(NamedTuple):
    """What an engine counted besides the prompt's tokens; None for what it did not count."""

    cached: int | None
    answer: int | None
    written: int | None = None  # of the prompt, to the cache: Anthropic's API alone has it


UNCOUNTED = AnswerCounts(None, None)


def answer_counts(raw: bytes, api: str) -> AnswerCounts:
    """Return the counts of a whole answer."""
    counts, names = counts_in(raw[-ENDS_BYTES:]), COUNTS.get(api, USUAL_COUNTS)
    written = None
    if api == "messages":  # a stream has those of the prompt at its beginning
        counts = {**dict(COUNT.findall(raw[:ENDS_BYTES])), **counts}
        written = int(counts[WRITTEN]) if WRITTEN in counts else None
    cached, answer = counts.get(names[1]), counts.get(names[2])
    return AnswerCounts(None if cached is None else int(cached), None if answer is None else int(answer), written)


def counts_in(data: bytes) -> Mapping[bytes, bytes]:
    """Return the counts that an end of an answer shows, by their names: the last one of each."""
    at = data.rfind(USAGE)
    return dict((at >= 0 and COUNT.findall(data, at)) or COUNT.findall(data))
