"""Which client sent a request, and of which of its sessions it is: from the fields of its header and of its body.

Neither is asked for: a client that names no session has the session "". Sources: the clients' own requests (research on
clients, section 1), and for the generic fields the documents of LiteLLM, vLLM and Dynamo.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Headers = Sequence[tuple[bytes, bytes]]

MARKS = (
    (b"x-claude-code-session-id", "claude-code"),
    (b"x-codex-window-id", "codex"),
    (b"x-codex-turn-metadata", "codex"),
)
"""Fields that only one client sends: names of products are borrowed, as qwen-code does with claude-cli."""

PRODUCTS = {
    "claude-cli": "claude-code",
    "codex_cli_rs": "codex",
    "codex_exec": "codex",
    "codex-tui": "codex",
    "opencode": "opencode",
    "qwencode": "qwen-code",
    "cline": "cline",
    "aider": "aider",
    "litellm": "litellm",
    "openai": "openai-sdk",
    "asyncopenai": "openai-sdk",
    "anthropic": "anthropic-sdk",
    "asyncanthropic": "anthropic-sdk",
    "curl": "curl",
}
"""First products of User-Agent, in small letters, and what we call them."""

OTHER = "other"
CLIENTS = tuple(sorted({*PRODUCTS.values(), *(name for _, name in MARKS), "qwen-code", OTHER}))
"""All names there are: a metric has no other label."""

SESSION_FIELDS = (
    *(b"x-claude-code-session-id", b"thread-id", b"session-id", b"session_id"),
    *(b"x-session-affinity", b"x-session-id", b"x-litellm-session-id"),
)
AGENT_FIELDS = (b"x-claude-code-agent-id", b"x-openai-subagent", b"x-codex-parent-thread-id")
"""A session's agents have conversations of their own."""

SESSION_MEMBERS = (("prompt_cache_key",), ("session_params", "session_id"), ("nvext", "agent_context", "session_id"))
SESSION_BYTES_MAX = 256  # a longer one is none

PRODUCT = re.compile(rb"\s*([A-Za-z][A-Za-z0-9_.-]{0,63})")


def client_of(headers: Headers) -> str:
    """One of CLIENTS. Names of fields are in small letters."""
    fields = dict(headers)
    for mark, name in MARKS:
        if mark in fields:
            return name
    match = PRODUCT.match(fields.get(b"user-agent", b""))
    product = match[1].decode("ascii").lower() if match else ""
    if product == "claude-cli" and fields.get(b"accept-language") == b"*":  # the fetch of Node.js, which Bun's is not
        return "qwen-code"
    return PRODUCTS.get(product, OTHER)


def session_of(headers: Headers, members: Mapping[str, Any]) -> bytes:
    """What names the conversation that a request goes on with; empty where nothing does."""
    fields = dict(headers)
    found = next((fields[name] for name in SESSION_FIELDS if fields.get(name)), b"") or session_in(members)
    if not found or len(found) > SESSION_BYTES_MAX:
        return b""
    agent = next((fields[name] for name in AGENT_FIELDS if fields.get(name)), b"")
    return b"%b/%b" % (found, agent[:SESSION_BYTES_MAX]) if agent else found


def session_in(members: Mapping[str, Any]) -> bytes:
    """The same by the members of a body."""
    for path in SESSION_MEMBERS:
        value: Any = members
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if type(value) is str and value:
            return value.encode("utf-8", "replace")
    return b""
