"""The paths of what engines keep: which response a path names, and whether a path leads to anything kept at all.

Rule: a path is judged as any engine, or a proxy in front of it, might read it: decoded to the end, without doubled
slashes, without parameters, in whatever case. Whose anything but responses is (files, batches, conversations, …)
nobody knows: what begins like KEEPERS or BELOW, or is read or deleted, may lead to it. What no engine keeps is asked
for by POST. Bound: DECODINGS_MAX.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from ranvier_py.core.routing.request_paths import PATHS, RESPONSES_PATH

RESPONSE = re.compile(rb"/v1/responses/([^/]{1,200})(?:/(?:cancel|input_items))?")
"""Paths of one stored response: GET, DELETE, and what else an engine can do with it."""

STORED = b"/v1/responses/"

OF_NONE = frozenset((RESPONSES_PATH + b"/compact", RESPONSES_PATH + b"/input_tokens"))
"""POSTs that count or shorten what their bodies have, and name."""

KEEPERS = tuple(
    b"/v1/" + name
    for name in (
        b"responses", b"conversations", b"files", b"uploads", b"batches", b"vector_stores", b"containers",
        b"assistants", b"threads", b"fine_tuning", b"evals", b"videos", b"skills",
    )
)  # fmt: skip
"""What begins the paths of everything that engines keep for clients, here or at hosted providers."""

BELOW = tuple(path + b"/" for path in PATHS if path.startswith(b"/v1/"))
"""What begins the paths of stored completions, and of batches of messages: they hang below the path that makes one."""

MODEL = re.compile(rb"/v1/models(?:/.*)?")
ASKING = (b"GET", b"HEAD")

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
    """Whether a request may lead to what engines keep, without naming a response that could have an owner."""
    plain = path
    for _ in range(DECODINGS_MAX):
        plain = unquote_to_bytes(plain)
    plain = NOISE.sub(b"", plain).lower()
    if path in PATHS or (path in OF_NONE and method == b"POST") or response_of(method, path):
        return False
    if plain.startswith(KEEPERS) or plain.startswith(BELOW):
        return True
    if not plain.startswith(b"/v1/") or method in (b"POST", b"OPTIONS"):
        return False
    return method not in ASKING or MODEL.fullmatch(plain) is None
