"""What tells one chat from all others, so that it keeps its model from turn to turn: its session, else its beginning.

Rule: a session is named by a field of the head, else in the body. A beginning is the text of the first message that is
no system prompt, which later turns repeat, whatever else they add or mark. Exactness does not matter here, only that
all turns, on all nodes, give the same; so the search for the history is one for its name.
Bounds: WINDOW_BYTES of a beginning; bodies that may not be parsed are searched for a session near their ends.
"""

from __future__ import annotations

import re
from json import JSONDecoder

from ranvier_py.core.prompts.body_json import excess, members_at, object_of
from ranvier_py.core.prompts.body_members import session_name
from ranvier_py.core.prompts.namespaces import as_bytes, opening_text

WINDOW_BYTES = 65_536

HISTORY = re.compile(rb'"(?:messages|input|prompt|text|query)"[ \t\r\n]*:[ \t\r\n]*(?=["\[])')
BETWEEN = re.compile(r"[\[,\s]*")
LEADING = ("system", "developer")
SESSION_NAMES = ("prompt_cache_key", "metadata", "user")

value_at = JSONDecoder(strict=False).raw_decode


def chat_key(session: bytes, body: bytes) -> bytes:
    """Return what tells a chat from others. `session`: as the head names it, or empty."""
    name = session or as_bytes(session_in(body))
    return b"session" + name if name else b"begins" + beginning(body)


def session_in(body: bytes) -> str:
    if not excess(body):
        return session_name(object_of(body) or {})
    for name in SESSION_NAMES:
        for _, members in members_at(body, b'"%b"' % name.encode()):
            if found := session_name({name: members.get(name)}):
                return found
    return ""


def beginning(body: bytes) -> bytes:
    found = HISTORY.search(body)
    if found is None:
        return body[:WINDOW_BYTES]
    text = body[found.end() : found.end() + WINDOW_BYTES].decode("utf-8", "replace")
    at = 0
    while text.startswith("[") and (between := BETWEEN.match(text, at)) is not None:
        at = between.end()
        try:
            item, end = value_at(text, at)
        except (ValueError, RecursionError):  # longer than the window, or no JSON
            break
        if not isinstance(item, dict):
            break
        if item.get("role") in LEADING:
            at = end
            continue
        return as_bytes(opening_text(item.get("content"), WINDOW_BYTES) or text[at:end])
    return as_bytes(text[at:])
