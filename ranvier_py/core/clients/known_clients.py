"""Finds which client sent a request, and in which of its sessions, from header fields.

Clients send these fields unasked. Sources: the clients' own requests, and LiteLLM's documents for the generic fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MARKS = (
    (b"x-claude-code-session-id", "claude-code"),
    (b"x-codex-window-id", "codex"),
    (b"x-codex-turn-metadata", "codex"),
)
"""Fields that only one client sends. Product names are no proof: qwen-code borrows claude-cli's."""

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
"""First products of User-Agent, in lower case, and our names of the clients."""

OTHER = "other"
CLIENTS = tuple(sorted({*PRODUCTS.values(), *(name for _, name in MARKS), "qwen-code", OTHER}))
"""All names there are: the client label of metrics has no other value."""

PARENT_FIELDS = (b"x-parent-session-id", b"x-codex-parent-thread-id", b"x-dynamo-parent-session-id")
SUB_AGENT_FIELDS = frozenset((*PARENT_FIELDS, b"x-claude-code-agent-id", b"x-openai-subagent"))
"""Fields that clients send only for a sub-agent of a session."""

SESSION_FIELDS = (
    *PARENT_FIELDS,
    b"x-dynamo-session-id",
    b"x-claude-code-session-id",
    b"session-id",
    b"session_id",
    b"x-session-affinity",
    b"x-session-id",
    b"x-litellm-session-id",
    b"thread-id",
)
"""Fields in which clients name their session, those that name a parent session first: Claude Code, Codex, OpenCode,
LiteLLM, and clients of Dynamo."""

USER_AGENT, ACCEPT_LANGUAGE = b"user-agent", b"accept-language"
NAMING_FIELDS = SUB_AGENT_FIELDS.union((USER_AGENT, ACCEPT_LANGUAGE, *SESSION_FIELDS), (mark for mark, _ in MARKS))
"""All fields that are read here."""

PRODUCT = re.compile(rb"\s*([A-Za-z][A-Za-z0-9_.-]{0,63})")


def client_of(fields: Mapping[bytes, bytes]) -> str:
    """Return one of CLIENTS, from a request's NAMING_FIELDS, their names in lower case."""
    for mark, name in MARKS:
        if mark in fields:
            return name
    match = PRODUCT.match(fields.get(USER_AGENT, b""))
    product = match[1].decode("ascii").lower() if match else ""
    if product == "claude-cli" and fields.get(ACCEPT_LANGUAGE) == b"*":  # the fetch of Node.js, which Bun's is not
        return "qwen-code"
    return PRODUCTS.get(product, OTHER)


def session_of(fields: Mapping[bytes, bytes]) -> bytes:
    """Return the client's name of its session, or of the session that began it; empty if it names none."""
    return next((fields[name] for name in SESSION_FIELDS if fields.get(name)), b"")
