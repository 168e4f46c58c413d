"""Answers of our own: the one map from errors to statuses and bodies, and how an answer is written down.

Errors have the shape that the client's library knows: OpenAI's, or Anthropic's under /v1/messages. No detail of the
node leaves it but the error's own words.
"""

from __future__ import annotations

from http import HTTPStatus

import orjson

from ranvier_py.core.errors import MethodNotAllowed, RanvierError, Unavailable
from ranvier_py.proxy.http_values import Fields, Headers, HttpResponseHead

JSON = b"application/json"

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's words by status, docs.anthropic.com/en/api/errors; theirs for 529 stands for our 503."""

REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


def error_response(error: RanvierError, api: str = "openai") -> tuple[int, Headers, bytes]:
    """Status, extra fields and JSON body of an error, as `api` ("openai" or "anthropic") shapes it."""
    message = str(error) or error.code.replace("_", " ")
    if api == "anthropic":
        kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        body = {"type": "error", "error": {"type": kind, "message": message}}
    else:
        body = {"error": {"message": message, "type": error.kind, "param": error.param, "code": error.code}}
    headers: Headers = []
    if isinstance(error, Unavailable):
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", b"POST"))  # RFC 9110 15.5.6; the paths that are particular take nothing else
    return error.status, headers, orjson.dumps(body)


def api_of(path: bytes) -> str:
    """Whose error shape the client of this path expects."""
    return "anthropic" if path.startswith(b"/v1/messages") else "openai"


def own_head(status: int, headers: Fields, content_type: bytes, body_bytes: int | None, *, close: bool) -> bytes:
    """Head of an answer of ours, blank line included. `body_bytes` is None for a body in chunks."""
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, REASONS.get(status, b""))]
    lines += [b"%b: %b\r\n" % field for field in headers]
    if status not in (204, 304):
        length = b"transfer-encoding: chunked" if body_bytes is None else b"content-length: %d" % body_bytes
        lines.append(b"content-type: %b\r\n%b\r\n" % (content_type, length))
    lines.append(b"connection: close\r\n\r\n" if close else b"\r\n")
    return b"".join(lines)


def response_head(head: HttpResponseHead, extra: Fields, *, close: bool) -> bytes:
    """A backend's head as the client gets it: status and fields unaltered but for hop-by-hop ones, then ours.

    `transfer-encoding` stays when the body goes on in chunks; a body that ends with the connection says so.
    """
    lines = [head.fields.lines]
    for name, value in extra:
        lines += (name, b": ", value, b"\r\n")
    lines.append(b"connection: close\r\n\r\n" if close or head.framing == "close" else b"\r\n")
    return b"".join(lines)
