"""The engine's counts at the ends of an answer, read without parsing it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from ranvier_py.core.answers.answer_ends import ENDS_BYTES

INPUT, OUTPUT, CACHE_READ, WRITTEN = b"input", b"output", b"cache_read_input", b"cache_creation_input"
COUNTS = {"messages": (INPUT, CACHE_READ, OUTPUT), "responses": (INPUT, b"cached", OUTPUT)}
USUAL_COUNTS = (b"prompt", b"cached", b"completion")
"""Names of the prompt's, the cached and the answer's tokens, by API; those of all others."""

USAGE = b'"usage"'
COUNT = re.compile(rb'"([a-z_]{1,32}?)_tokens"\s*:\s*(\d{1,9})[ \n]*[,}]')


class AnswerCounts(NamedTuple):
    """What an engine counted in an answer; None for what it did not count. `cached` and `written` are of the prompt."""

    prompt: int | None
    cached: int | None
    answer: int | None
    written: int | None = None  # to the cache: Anthropic's API alone has it


AnswerCountsFields = tuple[int | None, int | None, int | None, int | None]
answer_counts_of: Callable[[AnswerCountsFields], AnswerCounts] = partial(tuple.__new__, AnswerCounts)
"""As `placement.match_of`."""

UNCOUNTED = AnswerCounts(None, None, None)


def answer_counts(raw: bytes, api: str) -> AnswerCounts:
    """Return the counts of a whole answer, from its ends alone; of the prompt as `read_answer` finds it. A count that
    the frames of the transfer cut is none."""
    counts, (prompt_name, cached_name, answer_name) = counts_in(raw[-ENDS_BYTES:]), COUNTS.get(api, USUAL_COUNTS)
    if prompt_name not in counts or api == "messages":  # a stream of Anthropic's has those of the prompt at its begin
        counts = {**dict(COUNT.findall(raw[:ENDS_BYTES])), **counts}
    prompt, cached, answer = counts.get(prompt_name), counts.get(cached_name), counts.get(answer_name)
    found = answer_counts_of(
        (
            None if prompt is None else int(prompt),
            None if cached is None else int(cached),
            None if answer is None else int(answer),
            None,
        )
    )
    return of_message(found, counts) if api == "messages" else found


def of_message(found: AnswerCounts, counts: Mapping[bytes, bytes]) -> AnswerCounts:
    """Return the counts of a message of Anthropic's API, whose `input_tokens` are those that were not cached."""
    written = int(counts[WRITTEN]) if WRITTEN in counts else None
    prompt = None if found.prompt is None else found.prompt + (found.cached or 0) + (written or 0)
    return found._replace(prompt=prompt, written=written)


def counts_in(data: bytes) -> Mapping[bytes, bytes]:
    """Return the counts that an end of an answer shows, by their names: the last one of each."""
    at = data.rfind(USAGE)
    return dict((at >= 0 and COUNT.findall(data, at)) or COUNT.findall(data))
