"""Files of keys for whole nodes, and what a client with a key sees."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

from tests.node.node_lab import Node, chat

RED, BLUE = "rk-red-key-of-a-client", "rk-blue-key-of-a-client"
OWN = "the-key-of-the-engines"
CHAT = "/v1/chat/completions"


def key_lines(key: str, **members: Any) -> str:
    """One key in TOML; its id is the key's second word unless it has another one."""
    found = {"id": key.split("-")[1], "sha256": sha256(key.encode()).hexdigest(), **members}
    return "\n".join(["[[key]]", *(f"{name} = {value_of(value)}" for name, value in found.items())]) + "\n\n"


def value_of(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(value_of, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def keys_file(folder: Path, *lines: str) -> Path:
    """Two keys with a tenant of their own each, unless there are other lines."""
    path = folder / "keys.toml"
    path.write_text("".join(lines) or key_lines(RED) + key_lines(BLUE))
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def asked(
    node: Node, headers: Mapping[str, str], path: str = CHAT, body: bytes | None = None, **fields: Any
) -> httpx.Response:
    content = chat(**fields) if body is None else body
    return await node.http.post(node.url + path, content=content, headers=dict(headers))
