"""Defines which prompts may share a cache: the namespace of token fingerprints. Also Continuum's key of an opening.

Rule: two prompts of equal tokens share an engine's cache if they have the same model or adapter, the same salt and, in
SGLang, the same `extra_key`; an engine's own events name no more. Tools, templates and documents show in the tokens;
how media are processed does not, so it counts too. So do tokenizer and cluster secret. Invariant: two namespaces share
no fingerprint (test_namespaces.py). A namespace is a sum of keyed numbers for the name, the salt and the rest, so that
a fingerprint under one name can be converted to another name of the same engine (`TokenHasher.renamed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.body_json import exact_json
from ranvier_py.core.prompts.body_members import CACHE_FIELDS
from ranvier_py.core.prompts.fingerprint import TextHasher
from ranvier_py.core.splitmix import MASK

OPENING_BYTES_MAX = 1024  # Continuum's max_prefix_length
SYSTEM, FIRST_MESSAGE = "system", "first_message"  # what an opening may be


class TokenNamespaces:
    """Namespaces of one tokenizer (`identity`) under one key."""

    def __init__(self, texts: TextHasher, identity: str) -> None:
        self._texts = texts
        self._identity = identity

    def of(self, model: str, adapter: str = "", salt: str = "") -> Fingerprint:
        """Return the namespace of a model, or of an adapter, whose name alone a request has (vLLM's `model`, SGLang's
        `lora_path`). Raises UnicodeError for texts with lone surrogates."""
        return self.of_fields({"model": adapter or model, "cache_salt": salt})

    def of_fields(self, fields: Mapping[str, Any]) -> Fingerprint:
        """Return the namespace of a request's body. Raises TypeError for values beyond JSON, UnicodeError as `of`."""
        name = self._number("tokens", fields.get("lora_path") or fields.get("model") or "")
        apart = [("salt", salt)] if (salt := fields.get("cache_salt")) else []
        apart += [(field, value) for field in CACHE_FIELDS if (value := fields.get(field))]
        if not apart:
            return name
        return Fingerprint((name + sum(self._number(*each) for each in apart)) & MASK or 1)

    def _number(self, what: str, value: object) -> Fingerprint:
        plain = value if type(value) is str else exact_json(value).decode()
        return self._texts.namespace({what: plain, "tokenizer": self._identity})


def opening_key(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    system: Any = None,
    bytes_max: int = OPENING_BYTES_MAX,
    source: str = SYSTEM,
) -> bytes:
    """Return SHA-256 of model, zero byte, tag and the opening's first `bytes_max` bytes; empty if there is no opening.

    The opening is the system prompt (tag S): the first message of that role, or Anthropic's `system`. If there is none,
    or `source` is FIRST_MESSAGE, it is the first message of another role (tag M). Contents are text, or lists of
    parts whose texts are joined. Two models share no key, nor do a system prompt and a first message of equal text.
    """
    tag, opening = b"S", opening_text(system, bytes_max) if source == SYSTEM else ""
    if not opening and source == SYSTEM:
        systems = (opening_text(one.get("content"), bytes_max) for one in messages if one.get("role") == "system")
        opening = next(filter(None, systems), "")
    if not opening:
        first = next((one for one in messages if one.get("role") != "system"), {})
        tag, opening = b"M", opening_text(first.get("content"), bytes_max)
    if not opening or "\0" in model:
        return b""
    return sha256(b"%b\0%b%b" % (as_bytes(model), tag, cut_text(as_bytes(opening), bytes_max))).digest()


def opening_text(content: Any, characters: int) -> str:
    """Return the text of a message's content, cut to so many characters."""
    if isinstance(content, str):
        return content[:characters]
    found = ""
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, Mapping) else None
        if isinstance(text, str):
            found += text[: characters - len(found)]
    return found


def as_bytes(text: str) -> bytes:
    """Encode as UTF-8; half of a surrogate pair, which JSON can spell, is no error."""
    return text.encode("utf-8", "surrogatepass")


def cut_text(encoded: bytes, bytes_max: int) -> bytes:
    """Return the longest beginning of at most so many bytes that splits no character."""
    end = min(bytes_max, len(encoded))
    while 0 < end < len(encoded) and encoded[end] & 0xC0 == 0x80:
        end -= 1
    return encoded[:end]
