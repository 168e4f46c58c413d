"""The one log line of a request: all that is ever logged about it.

Of what the client sent it has only the path, without the query, which may hold a key, and the request id. It has no
field for a body or another header, so none can be logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class FailedTry(NamedTuple):
    """One try of a request that did not serve it."""

    engine: str
    reason: str
    ms: float  # from its sending to its end


class RequestSummary(NamedTuple):
    """What became of one request, under the log's names. Times count from the request's last byte; 0 = never."""

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
    prompt_tokens: int = 0  # by the engine's count, as in the recording; else what the node knew at the end
    tries: int = 0
    first_byte_ms: float = 0.0
    total_ms: float = 0.0
    sent_bytes: int = 0
    key_id: str = ""  # of the client's key, never the key
    tenant: str = ""  # whose request it is, where keys or trusted proxies say so
    asked: str = ""  # the model that the client named, where a table is for it
    model: str = ""  # the one that it was sent to
    error: str = ""  # of each attempt that failed, even if another one served: its backend and the reason
    client: str = ""  # its address; where trusted proxies say whom they serve, that one
    stream: bool = False
    cached_tokens: int | None = None  # of the prompt, by the engine's count; None: it did not count
    answer_tokens: int | None = None
    failed_tries: Sequence[FailedTry] = ()
    trace_id: str = ""  # in hex, of a request that is traced
    span_id: str = ""
