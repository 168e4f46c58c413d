"""One request in one line: all that is ever logged about it.

Of what the client sent there are the path, without its query, which may hold a key, and the request id; no field for a
body or another header, and so no way to log one.
"""

from __future__ import annotations

from typing import NamedTuple


class RequestSummary(NamedTuple):
    """What became of one request, by the names that the log has. Times count from its last byte; 0 = never."""

    id: str
    method: str
    path: str  # without its query
    status: int  # as sent to the client; 0 = nothing was sent
    outcome: str  # "success", or the code of the error
    backend: str = ""  # name of the one that answered
    policy: str = ""
    reason: str = ""  # of the decision
    source: str = ""  # which chain found it: text, tokens, none
    matched_tokens: int = 0
    prompt_tokens: int = 0
    tries: int = 0
    first_byte_ms: float = 0.0
    total_ms: float = 0.0
    sent_bytes: int = 0
    error: str = ""  # of the last attempt that failed, also where another one served: backend and words
