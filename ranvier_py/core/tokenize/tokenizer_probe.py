"""A text and a chat that a node and its engines tokenize each for itself, to see whether they do so alike.

Rule: where the text has other tokens, the tokenizer is another one; where only the chat has, its template is. An engine
that does not tokenize for others shows nothing. The engine's answer has the form of vLLM's and SGLang's `/tokenize`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

TOKENIZE_PATH = "/tokenize"
PROBE_TEXT = (
    "The router reads each conversation once: 249.90 for two seats on the 14th?\n\n\tdef longest(tree):\n"
    "        return [each for each in tree if each != 'größer' and 東京 not in each]  # naïve 🙂 <|end|>\n"
)
"""Prose, numbers, code, blanks and other scripts: where vocabularies differ."""

PROBE_CHAT: Sequence[Mapping[str, Any]] = (
    {"role": "user", "content": "What is 17 times 3?"},
    {"role": "assistant", "content": "51."},
    {"role": "user", "content": "And 18 times 3, in words?"},
)

TEXT_DIFFERS, CHAT_DIFFERS = "tokenizer", "chat_template"
"""What does not fit; each is the name of the key of the configuration that mends it."""


class ProbeTokens(NamedTuple):
    """The tokens of both; empty: not known, as where there is no template."""

    text: Sequence[int] = ()
    chat: Sequence[int] = ()


NO_TOKENS = ProbeTokens()


def probe_bodies(model: str) -> tuple[bytes, bytes]:
    """Return what an engine is to be sent."""
    text = {"model": model, "prompt": PROBE_TEXT, "add_special_tokens": False}
    chat = {"model": model, "messages": PROBE_CHAT, "add_generation_prompt": True}
    return orjson.dumps(text), orjson.dumps(chat)


def tokens_in(body: bytes) -> Sequence[int]:
    """Return the tokens in an engine's answer; empty if it has none."""
    try:
        found = orjson.loads(body)
        tokens = found["tokens"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ()
    is_list = type(tokens) is list and all(type(each) is int for each in tokens)
    return tokens if is_list else ()


def misfit(ours: ProbeTokens, theirs: ProbeTokens) -> str:
    """Return what does not fit, "" if nothing does not as far as is known."""
    if ours.text and theirs.text and list(ours.text) != list(theirs.text):
        return TEXT_DIFFERS
    if ours.chat and theirs.chat and list(ours.chat) != list(theirs.chat):
        return CHAT_DIFFERS
    return ""
