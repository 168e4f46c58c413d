"""Determines who asks, since the cache answers before an engine has checked the key: by credential, and by tenant.

Where tenants are told apart by another field, an answer belongs to tenant and credential together. Requests without a
credential are one class. If only a cookie, or a field that a proxy sets, says who asks, the cache takes no part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ranvier_py.core.bounded import FoundOf
from ranvier_py.core.prompts.tenants import CREDENTIAL_FIELDS, HEADS_MAX, Tenants, tokens_in

OTHERWISE_NAMED = re.compile(
    rb"cookie2?|(?:x-)?(?:forwarded|remote|webauth|proxy|authenticated|auth|iap|ssl-client|client-cert|goog)-.*"
    rb"|(?:x-)?(?:amzn-oidc|ms-client|ms-token|cf-access|authentik|openwebui|consumer|tailscale)-.*"
    rb"|(?:.*-)?(?:user|user-?id|user-?name|user-?email|email|principal|token|jwt|assertion|api-?key|access-key)"
    rb"|(?:.*-)?(?:secret|auth|authorization)"
)
"""Names of fields by which proxies and engines know somebody: cookies, forwarded users, their own tokens and keys."""

NOT_A_NAME = frozenset(
    (
        *(b"x-forwarded-" + rest for rest in (b"for", b"host", b"proto", b"port", b"prefix", b"server", b"scheme")),
        *(b"x-forwarded-" + rest for rest in (b"ssl", b"path", b"uri", b"method", b"by")),
        *(b"proxy-connection", b"x-remote-addr", b"x-goog-api-client"),
    )
)
"""Fields that match those names, and say where a request came from, not from whom."""


class Asker(NamedTuple):
    """Who asks. `owner`: of the answers; `credential`: the part of it, or all, that an engine checks.

    `may_share`: False if a cookie or a forwarded user alone says who asks.
    """

    owner: bytes
    credential: bytes
    may_share: bool


class Askers:
    """Finds who asks. `tenants`: how the operator tells tenants apart."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._credentials = tenants.by_credential()
        self._found: FoundOf[Iterable[tuple[bytes, bytes]], Asker] = FoundOf(HEADS_MAX)

    def of(self, headers: list[tuple[bytes, bytes]]) -> Asker:
        """Return who sent a request with these fields. See `Tenants.of`."""
        if (known := self._found.get(headers)) is not None:
            return known
        tenant, credential = self._tenants.of(headers), self._credentials.of(headers)
        owner = credential if self._tenants is self._credentials else tenant + credential
        found = Asker(owner, credential, any(tokens_in(headers)) or not self._is_named_otherwise(headers))
        return self._found.keep(headers, found)

    def _is_named_otherwise(self, headers: list[tuple[bytes, bytes]]) -> bool:
        known = self._tenants.names.union(CREDENTIAL_FIELDS, NOT_A_NAME)
        return any(OTHERWISE_NAMED.fullmatch(name) for name in {name.lower() for name, _ in headers} - known)
