"""Which prompts may share a cache: the namespace of token fingerprints; and Continuum's key of a prompt's opening.

Two prompts of equal tokens share the cache of an engine if they have the same model or adapter, the same salt and, in
SGLang, the same `extra_key`, and for nothing else: tools, templates and documents show in the tokens themselves; what
media are processed with does not, so it is part of the namespace. The engine's own events say no more than that either,
so what they tell of and what requests ask for meet in one namespace. Tokenizer and cluster secret are in it too, for
they decide what a token number means, and who can make fingerprints.

Rules: an adapter is a name like that of a model: who has one is asked for by it alone (vLLM's `model`, SGLang's
`lora_path`). A namespace is a sum of keyed numbers, of the name, the salt and the rest: so a fingerprint under one name
can be carried over to another name of the same engine (`TokenHasher.renamed`), whatever its salt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.body_json import exact_json
from ranvier_py.core.prompts.body_members import CACHE_FIELDS
from ranvier_py.core.prompts.fingerprint import MASK, TextHasher

OPENING_BYTES_MAX = 1024  # Continuum's max_prefix_length
SYSTEM, FIRST_MESSAGE = "system", "first_message"  # what an opening is


class TokenNamespaces:
    """Namespaces of one tokenizer (`identity`) under one key."""

    def __init__(self, texts: TextHasher, identity: str) -> None:
        self._texts = texts
        self._identity = identity

    def of(self, model: str, adapter: str = "", salt: str = "") -> Fingerprint:
        """The namespace of a model, or of an adapter. Raises UnicodeError for texts with lone surrogates."""
        return self.of_fields({"model": adapter or model, "cache_salt": salt})

    def of_fields(self, fields: Mapping[str, Any]) -> Fingerprint:
        """That of a request's body. Raises TypeError for values beyond JSON, UnicodeError as above."""
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
    """SHA-256 of model, zero byte, tag and the first `bytes_max` bytes of the opening; empty where there is no opening.

    The opening is the system prompt (tag S): the first message of that role, or `system` as Anthropic's requests have
    it; without one, or where `source` is FIRST_MESSAGE, the first message (tag M). Contents are text, or lists of parts
    whose texts are joined. Two models share no key, nor do a system prompt and a first message of equal text.
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
    """Text of a message's content, of which no more than so many characters are needed."""
    if isinstance(content, str):
        return content[:characters]
    found = ""
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, Mapping) else None
        if isinstance(text, str):
            found += text[: characters - len(found)]
    return found


def as_bytes(text: str) -> bytes:
    """UTF-8; half of a surrogate pair, which JSON can spell, is no error."""
    return text.encode("utf-8", "surrogatepass")


def cut_text(encoded: bytes, bytes_max: int) -> bytes:
    """The longest beginning of at most so many bytes that splits no character."""
    end = min(bytes_max, len(encoded))
    while 0 < end < len(encoded) and encoded[end] & 0xC0 == 0x80:
        end -= 1
    return encoded[:end]
