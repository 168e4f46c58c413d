"""Adds `cache_control` to bodies of Anthropic's Messages API that have none on their system prompt.

A `system` that is text becomes one block of text with `{"type": "ephemeral"}`; of several blocks the last one gets it.
All other bytes stay as they came, so an engine sees the same from turn to turn.

Rules: at most one marker is added; none if the system prompt already has one, and never a fifth, since the API takes
four. A body that can't be read within bounds, or whose last block of `system` has no text, is sent on unchanged.
Source: Continuum Router, `anthropic_cache_control_injection`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from ranvier_py.core.prompts.body_json import Splice, excess, members_at, object_of

MARKERS_MAX = 4
BLOCKS_MAX = 256  # of a system prompt: clients send a handful
MARKER = b'"cache_control"'  # quotes in texts are escaped, so a text never matches
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
SYSTEM = b'"system"'
BEFORE_VALUE = re.compile(rb'"system"[ \t\r\n]*:[ \t\r\n]*')


def marker_splice(body: bytes) -> Splice | None:
    """Mark a body's system prompt; None if the body is to be sent on unchanged."""
    if SYSTEM not in body or body.count(MARKER) >= MARKERS_MAX or excess(body):
        return None
    system = (object_of(body) or {}).get("system")
    blocks = marked_blocks(system)
    if blocks is None:
        return None
    place = next((place for place, _ in members_at(body, SYSTEM)), len(body))
    name = BEFORE_VALUE.match(body, place)
    if name is None:
        return None
    text = body[name.end() :].decode()
    value, end = json.JSONDecoder().raw_decode(text)
    if value != system:  # of two such members the last one counts
        return None
    return name.end(), name.end() + len(text[:end].encode()), orjson.dumps(blocks)


def marked_blocks(system: object) -> list[Any] | None:
    """Return the blocks of a system prompt the last one marked; None if one has a marker or the last has no text."""
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    if not isinstance(blocks, list) or not 0 < len(blocks) <= BLOCKS_MAX:
        return None
    if not all(isinstance(block, dict) for block in blocks):
        return None
    text = blocks[-1].get("text")
    if any("cache_control" in block for block in blocks) or not isinstance(text, str) or not text.strip():
        return None
    return [*blocks[:-1], {**blocks[-1], **EPHEMERAL}]
