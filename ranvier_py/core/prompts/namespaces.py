"""Which prompts may share a cache: the namespace of token fingerprints.

Two prompts of equal tokens share the cache of an engine if they have the same model or adapter and the same salt, and
for nothing else: tools, templates and documents show in the tokens themselves. The engine's own events say no more than
that either, so what they tell of and what requests ask for meet in one namespace. Tokenizer and cluster secret are in
it too, for they decide what a token number means, and who can make fingerprints.

Rules: an adapter is a name like that of a model: who has one is asked for by it alone (vLLM's `model`, SGLang's
`lora_path`). A namespace is a sum of two keyed numbers, of the name and of the salt: so a fingerprint under one name
can be carried over to another name of the same engine (`TokenHasher.renamed`), whatever its salt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import MASK, TextHasher


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
        salt = fields.get("cache_salt")
        return Fingerprint((name + self._number("salt", salt)) & MASK or 1) if salt else name

    def _number(self, what: str, value: object) -> Fingerprint:
        plain = value if type(value) is str else orjson.dumps(value).decode()
        return self._texts.namespace({what: plain, "tokenizer": self._identity})
