"""The paths of responses that engines keep: which one a path names, and whether a path is one of them at all.

    /v1/responses                                     makes one
    /v1/responses/{id}, …/cancel, …/input_items       of one
    /v1/responses/compact, …/input_tokens             of none, but their bodies may name one

A path is judged as any engine, or a proxy in front of it, might read it: decoded to the end, without doubled slashes,
without parameters, in whatever case.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from ranvier_py.core.routing.request_paths import RESPONSES_PATH

RESPONSE = re.compile(rb"/v1/responses/([^/]{1,200})(?:/(?:cancel|input_items))?")
"""Paths of one stored response: GET, DELETE, and what else an engine can do with it."""

STORED = b"/v1/responses/"

OF_NONE = frozenset((RESPONSES_PATH + b"/compact", RESPONSES_PATH + b"/input_tokens"))
"""POSTs that count or shorten what their bodies have, and name."""

KEEPERS = (b"/v1/responses", b"/v1/conversations")
"""What begins the paths of everything that engines keep of conversations."""

DECODINGS_MAX = 4  # a path that needs more is refused before
NOISE = re.compile(rb";[^/]*|(?<=/)/+")


def is_of_responses(path: bytes) -> bool:
    """Whether this is a path of the API of responses."""
    return path == RESPONSES_PATH or RESPONSE.fullmatch(path) is not None


def may_name(method: bytes, path: bytes) -> bool:
    """Whether the body of such a request may name a stored response."""
    return method == b"POST" and (path == RESPONSES_PATH or path in OF_NONE)


def response_of(method: bytes, path: bytes) -> str:
    """Return the id of the stored response that a path names; empty if it names none."""
    if not path.startswith(STORED) or (path in OF_NONE and method == b"POST"):
        return ""
    found = RESPONSE.fullmatch(path)
    return unquote_to_bytes(found[1]).decode("utf-8", "surrogateescape") if found is not None else ""


def is_strange(method: bytes, path: bytes) -> bool:
    """Whether a path may lead to what engines keep, without naming a response that could have an owner."""
    plain = path
    for _ in range(DECODINGS_MAX):
        plain = unquote_to_bytes(plain)
    if not NOISE.sub(b"", plain).lower().startswith(KEEPERS):
        return False
    return path != RESPONSES_PATH and path not in OF_NONE and not response_of(method, path)
