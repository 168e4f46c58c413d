"""Tenants: whose prompt a request is, and the salt that keeps the caches of tenants apart.

A tenant is a keyed digest of what a request names itself by: its credential, or a field that a proxy in front sets. The
digest is part of every fingerprint of its prompts, so no tenant's request matches what another's taught; and together
with the request's own `cache_salt` it becomes the one that the engine gets, so the engine shares no block either.

Rules: a request without a credential, or without the field, belongs to the tenant of all such requests. What a client
sends as `cache_salt` can only divide its own tenant: no value of it leads into another. A body whose salt can't be seen
shares with no other body that has one out of sight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ranvier_py.core.addresses import OFF
from ranvier_py.core.errors import BadRequest
from ranvier_py.core.prompts.fingerprint import TextHasher

CREDENTIAL, HEADER = "credential", "header:"
FIELD_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")

CREDENTIAL_FIELDS = (b"authorization", b"x-api-key", b"api-key")
"""Those of OpenAI's, Anthropic's and Azure's clients."""

BLANKS = b" \t\r\n"  # JSON's


def checked_isolation(text: str) -> str:
    """`off`, `credential` or `header:NAME`. Raises ValueError."""
    name = text.removeprefix(HEADER)
    if text in (OFF, CREDENTIAL) or (name != text and FIELD_NAME.fullmatch(name)):
        return text
    raise ValueError("must be off, credential or header:NAME")


class Tenants:
    """Tells tenants apart as `isolation` says: `credential` or `header:NAME`."""

    def __init__(self, isolation: str, texts: TextHasher) -> None:
        name = isolation.removeprefix(HEADER)
        self._names = CREDENTIAL_FIELDS if isolation == CREDENTIAL else (name.lower().encode(),)
        self._texts = texts
        # The fields asked of last, and their tenant.
        self._last: tuple[Iterable[tuple[bytes, bytes]], bytes] = ((), b"")

    def of(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The tenant of a request with these fields: 16 bytes. A token counts without its scheme, wherever it is.

        The fields do not change any more: who asks of the same once more gets the same.
        """
        if headers is self._last[0] and headers:
            return self._last[1]
        names = self._names
        found = {value.removeprefix(b"Bearer ").strip() for name, value in headers if name.lower() in names}
        self._last = headers, self.named(*found)
        return self._last[1]

    def named(self, *values: bytes) -> bytes:
        """The tenant of these tokens or values."""
        return self._texts.digest(b"tenant" + b"\n".join(sorted(values)))  # no field has a line end in it


def salted_body(body: bytes, salt: str) -> bytes:
    """The body with this `cache_salt` as its last member, the one that counts. Raises BadRequest for no JSON object.

    Refused is also what some libraries read as one: UTF-16 and the like.
    """
    inside = body.strip(BLANKS)
    if inside[:1] != b"{" or inside[-1:] != b"}":
        raise BadRequest("tenants are kept apart here: the body must be a JSON object in UTF-8")
    members = inside[:-1].rstrip(BLANKS)
    comma = b"" if members == b"{" else b","
    return b'%b%b"cache_salt":"%b"}' % (members, comma, salt.encode())
