"""Request targets: each has one canonical form, which is judged here and sent to engines.

    GET http://host//v1/%72esponses/ID/?after=%78     as it came
    /v1/responses/ID?after=%78                        as it is judged and sent

Rules: escaped unreserved characters are decoded, and other escapes are in upper case (RFC 3986 6.2.2); doubled slashes
are one; a slash behind a path that is known without it goes. Invariant: what is judged is what engines get
(test_pipeline.py). What then stands for a slash or for dot segments is refused (`misleads`).
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from ranvier_py.core.errors import BadRequest
from ranvier_py.core.routing.request_paths import PATHS
from ranvier_py.core.routing.stored_paths import is_of_responses

ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
SLASHES = re.compile(rb"//+")
OWN_PATHS = (b"/v1/models", b"/health", b"/api/hello")

SUSPECT = re.compile(rb"[%\\#]|/\.")
FORBIDDEN = re.compile(rb"[\x00-\x1f\x7f\\\xc0\xc1]")
"""Bytes that no path may have, in any encoding: control characters, the backslash, and the bytes that begin overlong
forms of ASCII in what claims to be UTF-8."""

DECODINGS_MAX = 4
"""A path that is still encoded after so many decodings is meant to deceive."""


def canonical_target(target: bytes) -> bytes:
    """Return the canonical form of a target in origin-form."""
    path, mark, query = target.partition(b"?")
    if b"%" in path:
        path = ESCAPE.sub(_plain, path)
    if b"//" in path:
        path = SLASHES.sub(b"/", path)
    if path[-1:] == b"/" and ((bare := path[:-1]) in PATHS or bare.startswith(OWN_PATHS) or is_of_responses(bare)):
        path = bare
    return path + mark + query


def _plain(escape: re.Match[bytes]) -> bytes:
    code = int(escape[1], 16)
    return bytes((code,)) if code in UNRESERVED else escape[0].upper()


def origin_form(target: bytes, method: bytes) -> bytes:
    """Return the origin-form of an absolute target; its host is ignored. Raises BadRequest if it names none."""
    authority, slash, rest = target[7:].partition(b"/")
    if not authority:
        raise BadRequest("the request target names no host")
    if slash:
        return slash + rest
    host, mark, query = authority.partition(b"?")
    if not host:
        raise BadRequest("the request target names no host")
    return b"*" if method == b"OPTIONS" and not mark else b"/" + mark + query


def misleads(path: bytes) -> bool:
    """Whether an engine that decodes a path, resolves its dots or cuts its parameters may read another path. It could
    then serve its own administration under a path that looks harmless. What ids may need does not mislead: other
    escapes, dots within a segment, semicolons."""
    if SUSPECT.search(path) is None:
        return False
    if b"#" in path:
        return True
    for _ in range(DECODINGS_MAX):
        if FORBIDDEN.search(path) or any(part.partition(b";")[0] in (b".", b"..") for part in path.split(b"/")):
            return True
        decoded = unquote_to_bytes(path)
        if decoded == path:
            return False
        if decoded.count(b"/") != path.count(b"/"):
            return True
        path = decoded
    return True
