"""Errors as answers to clients: the one mapping to statuses, and the bodies.

Errors have the shape that the client's library expects: OpenAI's, or Anthropic's under /v1/messages and for who sends
`anthropic-version`. An answer reveals nothing of the node but the error's own text.
"""

from __future__ import annotations

import orjson

from ranvier_py.core.errors import (
    LimitReached,
    MethodNotAllowed,
    RanvierError,
    Unauthorized,
    Unavailable,
    UpgradeRefused,
)
from ranvier_py.core.routing.request_paths import MESSAGES_PATH, RESPONSES_PATH, meant_path
from ranvier_py.proxy.http_values import Headers, HttpRequest

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's error types by status, docs.anthropic.com/en/api/errors; the one for their 529 serves for our 503."""


def error_response(error: RanvierError, api: str = "openai") -> tuple[int, Headers, bytes]:
    """Return status, extra fields and JSON body of an error, in the shape of `api` ("openai" or "anthropic")."""
    message = str(error) or error.code.replace("_", " ")
    if api == "anthropic":
        kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        body = {"type": "error", "error": {"type": kind, "message": message}}
    else:
        body = {"error": {"message": message, "type": error.kind, "param": error.param, "code": error.code}}
    headers: Headers = []
    if isinstance(error, Unavailable):
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if isinstance(error, LimitReached):
        headers += error.fields
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", b"POST"))  # RFC 9110 15.5.6; all paths that restrict methods take only POST
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))  # RFC 9110 15.5.2
    if isinstance(error, UpgradeRefused):
        headers.append((b"upgrade", b"HTTP/1.1"))  # RFC 9110 15.5.22
    return error.status, headers, orjson.dumps(body)


def error_event(body: bytes, path: bytes) -> bytes:
    """Return an error as the end of a stream of the API that has this path. `body`: as the error would come alone."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        fields = {}
    error = fields.get("error", fields) if type(fields) is dict else {}
    if type(error) is not dict:
        error = {"message": error}
    known = {name: error[name] for name in ("message", "type", "code", "param") if type(error.get(name)) in (str, int)}
    found = {"message": "the engine failed", "type": "api_error", "code": None, "param": None, **known}
    if path.startswith(MESSAGES_PATH):
        claudes = {"type": "error", "error": {"type": found["type"], "message": found["message"]}}
        return b"event: error\ndata: %b\n\n" % orjson.dumps(claudes)
    if path.startswith(RESPONSES_PATH):
        inner = {"code": str(found["code"] or found["type"]), "message": found["message"]}
        failed = {"response": {"object": "response", "status": "failed", "error": inner, "output": []}}
        events = {"error": {**found, "error": found}, "response.failed": failed}
        lines = [
            b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({**fields, "type": kind}))
            for kind, fields in events.items()
        ]
        return b"".join(lines)
    return b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps({"error": found})


def api_of(request: HttpRequest) -> str:
    """Return whose error shape the client expects, also of a path that lacks its /v1."""
    path = meant_path(request.path) or request.path
    return "anthropic" if request.fields.is_anthropic or path.startswith(MESSAGES_PATH) else "openai"
