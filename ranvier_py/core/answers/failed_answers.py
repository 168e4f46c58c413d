"""Finds failures behind a status of 200: an error where an answer should begin, or a stream without any event.

Engines that send the head of a stream before the prefill can say only so that they failed: an object with an `error`,
an event of the type `error` or `response.failed`. Only the beginning counts: what comes behind output, or beside it,
belongs to an answer that began. Invariant: such an error counts as the status that it names, and teaches nothing
(test_errors_inside.py).

Pure. Cost: one search of the first piece of a stream, or of a whole answer up to WHOLE_BYTES_MAX.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from ranvier_py.core.answers.answer_stream import has_token

WHOLE_BYTES_MAX = 16 * 1024
"""Of a whole answer: errors have some hundred bytes."""

ERROR = re.compile(rb'"error"\s*:\s*[{"]|"type"\s*:\s*"(?:error|response\.failed)"|"object"\s*:\s*"error"')
EVENT_ENDS = (b"\n\n", b"\n\r\n")  # also before the end of a chunk
IN_ERRORS = (b'"error"', b'"response.failed"')  # one of them is in all that ERROR finds
OUTPUT = ("choices", "output", "content", "data", "text")
"""Members of answers by all APIs: an error beside them is about a part of what was asked for."""

STATUSES: Mapping[str, int] = {
    "overloaded": 529,
    "rate_limit": 429,
    "ratelimit": 429,
    "invalid_request": 400,
    "badrequest": 400,
    "bad_request": 400,
    "authentication": 401,
    "permission": 403,
    "notfound": 404,
    "not_found": 404,
    "unavailable": 503,
}
"""Parts of an error's type or code, in lower case, and the status that goes with it; any other is a 500."""


class Failure(NamedTuple):
    """The status that the error would have had, and the error itself, as a body."""

    status: int
    body: bytes


EMPTY = Failure(500, b"a stream without an event")


def is_undecided(data: bytes, *, streamed: bool) -> bool:
    """Whether more must come before an answer that is not complete may be judged: what has begun otherwise goes on at
    once, also the blanks by which an engine keeps a line open."""
    if any(name in data for name in IN_ERRORS):
        is_cut = not streamed or not data.rstrip(b"\r").endswith(EVENT_ENDS)
        return is_cut and len(data) < WHOLE_BYTES_MAX
    return not data or (streamed and b"[DONE]" in data and b"{" not in data)


def may_fail(data: bytes, *, streamed: bool, complete: bool) -> bool:
    """Whether `failure_in` has to look at these bytes, as they came: nearly never."""
    if streamed and b"{" not in data:
        return complete
    if not any(name in data for name in IN_ERRORS):
        return False
    return (streamed or complete) and ERROR.search(data) is not None


def failure_in(payload: bytes, api: str, *, streamed: bool) -> Failure | None:
    """Return what is wrong with an answer that begins so, or is so; None if nothing is. `payload`: without frames."""
    if not streamed:
        return failure_of(payload, is_whole=True)
    if b"{" not in payload:
        return EMPTY
    if has_token(payload, api):
        return None
    data = [line[5:] for line in payload.splitlines() if line.startswith(b"data:")]
    return next((failure for line in data if (failure := failure_of(line, is_whole=False)) is not None), None)


def failure_of(text: bytes, *, is_whole: bool) -> Failure | None:
    """Return the failure that an object is, if it is one."""
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if type(fields) is not dict:
        return None
    inner = fields.get("response")
    if fields.get("type") == "response.failed" and type(inner) is dict:
        fields = {"error": inner.get("error") or {}}
    error = fields if fields.get("object") == "error" or fields.get("type") == "error" else fields.get("error")
    if type(fields.get("error")) in (dict, str):
        error = fields["error"]
    if type(error) not in (dict, str) or (is_whole and any(fields.get(name) for name in OUTPUT)):
        return None
    return Failure(status_of(error) if type(error) is dict else 500, orjson.dumps({"error": error}))


def status_of(error: Mapping[str, Any]) -> int:
    """Return the status that an error names, or that its type or code stands for."""
    for name in ("code", "status", "status_code"):
        number = error.get(name)
        if type(number) is str and number.isascii() and number.isdigit() and len(number) == len("500"):
            number = int(number)
        if type(number) is int and 400 <= number <= 599:
            return number
    words = " ".join(str(error.get(name)) for name in ("type", "code")).lower()
    return next((status for part, status in STATUSES.items() if part in words), 500)
