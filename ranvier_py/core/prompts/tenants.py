"""Tells tenants apart: whose prompt a request is, and the salt that keeps the caches of tenants apart.

A tenant is a keyed digest of what identifies the sender: the request's credential, or a field that a proxy in front
sets. The digest is part of every fingerprint of the tenant's prompts. With the request's own `cache_salt` it becomes
the engine's salt, so engines share no block either.

Rules: all requests without a credential, or without the field, belong to one tenant. Invariant: two tenants share no
fingerprint and no salt, whatever their clients send (test_tenants.py). Bodies whose salt can't be read share nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import orjson

from ranvier_py.core.addresses import OFF
from ranvier_py.core.bounded import FoundOf
from ranvier_py.core.errors import BadRequest
from ranvier_py.core.prompts.body_json import Splice
from ranvier_py.core.prompts.body_members import is_short
from ranvier_py.core.prompts.fingerprint import TextHasher

CREDENTIAL, HEADER = "credential", "header:"
FIELD_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")

CREDENTIAL_FIELDS = (b"authorization", b"x-api-key", b"api-key")
"""The fields that OpenAI's, Anthropic's and Azure's clients use."""

HEADS_MAX = 1024  # whose tenants are remembered: those of the busiest connections, 2 MB

SCHEME = re.compile(rb"\A *bearer +", re.IGNORECASE)  # of a token; its case does not count (RFC 9110 11.1)
BLANKS = b" \t\r\n"  # those of JSON
OBJECT = re.compile(rb"[ \t\r\n]*\{(?!\0)")
NO_OBJECT = "tenants are kept apart here: the body must be a JSON object in UTF-8"


def checked_isolation(text: str) -> str:
    """Return `text` if it is `off`, `credential` or `header:NAME`. Raises ValueError otherwise."""
    name = text.removeprefix(HEADER)
    if text in (OFF, CREDENTIAL) or (name != text and FIELD_NAME.fullmatch(name)):
        return text
    raise ValueError("must be off, credential or header:NAME")


class Tenants:
    """Finds the tenant of a request by `isolation`: `credential` or `header:NAME`, in the fields `names`."""

    def __init__(self, isolation: str, texts: TextHasher) -> None:
        name = isolation.removeprefix(HEADER)
        self.names = frozenset(CREDENTIAL_FIELDS if isolation == CREDENTIAL else (name.lower().encode(),))
        self._texts = texts
        self._found: FoundOf[Iterable[tuple[bytes, bytes]], bytes] = FoundOf(HEADS_MAX)

    def of(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Return the tenant of a request with these fields: 16 bytes. A token counts without its scheme, in any field.

        `headers` must not change afterwards but for a length: for the same object the same result is returned.
        """
        found = self._found.get(headers)
        return found if found is not None else self._found.keep(headers, self.named(*tokens_in(headers, self.names)))

    def by_credential(self) -> Tenants:
        """Return what tells credentials apart: this itself, if it does."""
        return self if self.names == frozenset(CREDENTIAL_FIELDS) else Tenants(CREDENTIAL, self._texts)

    def named(self, *values: bytes) -> bytes:
        """Return the tenant that these tokens or values identify."""
        return self._texts.digest(b"tenant" + b"\n".join(sorted(values)))  # no field has a line end in it


def tokens_in(headers: Iterable[tuple[bytes, bytes]], names: Collection[bytes] = CREDENTIAL_FIELDS) -> set[bytes]:
    """Return the tokens in the fields of these names, each without its scheme; by default a request's credentials."""
    return {SCHEME.sub(b"", value, 1).strip() for name, value in headers if name.lower() in names}


def salt_of(texts: TextHasher, fields: Mapping[str, Any], tenant: bytes) -> str:
    """Return the `cache_salt` for a tenant's prompt; a client's own only divides it. "" without a tenant."""
    if not tenant:
        return ""
    own = fields.get("cache_salt") or ""
    if type(own) is not bytes:
        try:
            own = own.encode() if is_short(own) else texts.digest(orjson.dumps(own))
        except (TypeError, UnicodeError):  # lone surrogates
            own = json.dumps(own).encode()
    return texts.digest(b"salt" + tenant + own).hex()


def demand_object(body: bytes) -> None:
    """Raise BadRequest for what begins no JSON object in UTF-8: an engine might read it, and another prompt than we."""
    if OBJECT.match(body) is None:
        raise BadRequest(NO_OBJECT)


def salt_splices(body: bytes, salt: str) -> Sequence[Splice]:
    """Put `cache_salt` into a body as its last member, the one that counts. Raises BadRequest for no JSON object.

    This also refuses encodings that some libraries accept, such as UTF-16.
    """
    blanks = len(body) - len(body.lstrip(BLANKS))
    inside = body.strip(BLANKS)
    if inside[:1] != b"{" or inside[-1:] != b"}":
        raise BadRequest(NO_OBJECT)
    members = inside[:-1].rstrip(BLANKS)
    comma = b"" if members == b"{" else b","
    return (0, blanks, b""), (blanks + len(members), len(body), b'%b"cache_salt":"%b"}' % (comma, salt.encode()))
