"""Finds out who asks, from the head alone: by a key, or by the field in which a trusted proxy names a tenant.

Rules: a key is found in any of the fields in which clients send one, and goes no further in any: what follows sees the
tenant as the credential, so that isolation, response cache and pauses know one identity. What claims another tenant, or
a priority above the key's, is removed and counted. Preflights and liveness need no key. Invariant: who has no valid key
is refused before a body is read (test_keys_at_the_door.py). Bound: TOKENS_MAX of a head are looked up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address
from itertools import islice

from ranvier_py.core.access.identity import Identity
from ranvier_py.core.access.key_table import KeyTable, digest_of
from ranvier_py.core.errors import InvalidKey
from ranvier_py.core.metrics import counter
from ranvier_py.core.prompts.tenants import CREDENTIAL_FIELDS, SCHEME
from ranvier_py.proxy.admission.seen_head import SeenHead
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import NO_REQUEST, Fields, Headers, HttpRequest, RequestFields
from ranvier_py.proxy.stages.browsers import asked_method
from ranvier_py.proxy.stages.own_answer import ALIVE

Network = IPv4Network | IPv6Network

SUBPROTOCOL, EXTENSIONS = b"sec-websocket-protocol", b"sec-websocket-extensions"
KEY_SUBPROTOCOL = b"openai-insecure-api-key."
"""Begins what browsers, which can set no other field, send as a subprotocol of a WebSocket: OpenAI's convention."""

TENANT_CLAIMS = frozenset((b"x-tenant", b"x-tenant-id", b"x-ranvier-tenant", b"x-gateway-inference-fairness-id"))
PRIORITY, PRIORITY_DIGITS = b"x-priority", 10
SECRET_FIELDS = frozenset((*CREDENTIAL_FIELDS, SUBPROTOCOL))
TOKENS_MAX = 8

FORWARDED = b"x-forwarded-for"
PROXIES_MAX = 8  # trusted ones in a row that are believed

WORDS = {
    "none": "this node needs a key: Authorization: Bearer KEY, x-api-key or api-key",
    "unknown": "the key is not known here",
    "disabled": "the key is disabled",
    "early": "the key is not valid yet",
    "expired": "the key has expired",
    "revoked": "the key was revoked",
}
"""What a client gets to read, by reason."""


@dataclass(slots=True)
class AccessCounters:
    """Who was let in, and what was not believed."""

    refused: dict[str, int] = counter("Requests refused because of their key, by reason.", label="reason")
    claims: dict[str, int] = counter(
        "Fields of clients that claim a tenant or a priority which is not theirs; nobody saw them.", label="field"
    )


class Gate:
    """Lets requests in. `table` and `trusted` may be replaced. `needs_key`: whether there are keys; without them only
    who may name tenants is checked. `tenant_field`: the field that names them, if there is one. `is_revoked`: whether
    the key with this id is revoked at this time of day, in milliseconds; None where nobody may revoke one. `known`:
    called with a head once it is found out whose it is, or that it is now somebody else's."""

    def __init__(
        self,
        *,
        needs_key: bool,
        trusted: Sequence[Network],
        tenant_field: bytes,
        is_revoked: Callable[[str, float], bool] | None,
        known: Callable[[SeenHead, HttpRequest], object] | None,
    ) -> None:
        self.table, self.needs_key, self.trusted = KeyTable(), needs_key, trusted
        self._is_revoked, self._known = is_revoked, known
        self.counters = AccessCounters()
        self._tenant_field = tenant_field if trusted or needs_key else b""
        self._claims = frozenset((*(TENANT_CLAIMS if needs_key else ()), self._tenant_field))

    def take(self, table: KeyTable) -> None:
        self.table = table

    def check(self, request: HttpRequest, client: Client) -> SeenHead:
        """Find out who sends this head, and return what is known of it. Raises InvalidKey."""
        seen = client.seen_head
        if seen is None or seen.fields is not request.fields:
            seen = client.seen_head = self._look(request, client)
        identity = None if seen.is_open else self._identity(seen)
        if seen.request is NO_REQUEST or seen.identity is not identity:
            self._pass(seen, request, identity)
        for name in seen.claims:
            self.counters.claims[name] += 1
        return seen

    def tenant_headers(self, headers: Fields) -> Headers:
        """Return the fields of a request to be explained as others get them. An unknown key names nobody."""
        found = filter(None, [self.table.find(digest_of(token)) for token in islice(tokens_of(headers), TOKENS_MAX)])
        return self._passed(headers, next(found, None), [])

    def _look(self, request: HttpRequest, client: Client) -> SeenHead:
        tokens = islice(tokens_of(request.headers), TOKENS_MAX) if self.needs_key else ()
        values = [value for name, value in request.headers if name.lower() == self._tenant_field]
        trusted = bool(self.trusted) and self._trusts(client.peer)
        named = values[0].strip().decode("latin-1") if len(values) == 1 and trusted else ""
        served = self._served(request.headers) if trusted else ""
        return SeenHead(request.fields, [digest_of(token) for token in tokens], named, served, is_open(request))

    def _served(self, headers: Fields) -> str:
        """Return whom a trusted proxy serves: of the addresses that it lists the last one that is no such proxy."""
        listed = b",".join([value for name, value in headers if name.lower() == FORWARDED])
        for text in islice(reversed(listed.decode("latin-1").split(",")), PROXIES_MAX):
            try:
                if not self._trusts(f"{ip_address(text.strip())}:0"):
                    return text.strip()
            except ValueError:  # whoever wrote it, nothing before it can be believed
                return ""
        return ""

    def _trusts(self, peer: str) -> bool:
        address = ip_address(peer.rpartition(":")[0].partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self.trusted)

    def _identity(self, seen: SeenHead) -> Identity | None:
        """Return whose head this is; None for nobody's, where no key is needed. Raises InvalidKey."""
        found, why = self._holder(seen)
        if found is not None:
            return found
        if seen.named and not why:  # a key that is not valid is no reason to believe less than it claims
            return self.table.named(seen.named)
        if not self.needs_key:
            return None
        seen.identity, seen.request, why = None, NO_REQUEST, why or "none"
        self.counters.refused[why] += 1
        raise InvalidKey(WORDS[why])

    def _holder(self, seen: SeenHead) -> tuple[Identity | None, str]:
        """Return whose valid key is among those of a head; else why none is, "" if there is none."""
        why, now = "", time.time()
        for digest in seen.digests:
            found = self.table.find(digest)
            if found is None or found.key is None:
                why = why or "unknown"
            elif not (why := found.key.refusal(now)):
                if self._is_revoked is None or not self._is_revoked(found.key.id, 1000 * now):
                    return found, ""
                why = "revoked"
        return None, why

    def still(self, seen: SeenHead) -> tuple[Identity | None, str]:
        """Return who would be let in now of those who were let in with a key; else None, and why not, as clients read
        it."""
        assert seen.identity is not None
        found, why = self._holder(seen)
        if found is not None and found.key_id == seen.identity.key_id:
            return found, ""
        return None, WORDS[why or "unknown"]

    def _pass(self, seen: SeenHead, request: HttpRequest, identity: Identity | None) -> None:
        seen.identity, seen.claims = identity, []
        headers = self._passed(request.headers, identity, seen.claims)
        fields = RequestFields.of(headers[: len(headers) - (self.needs_key and identity is not None)])
        known = request.http_minor, request.keep_alive, fields, request.path
        seen.request = HttpRequest(request.method, request.target, headers, b"", *known)
        if self._known is not None:
            self._known(seen, request)

    def _passed(self, headers: Fields, identity: Identity | None, claims: list[str]) -> Headers:
        """Return what others get of the fields of a head; the tenant stands last, as the credential. What is not
        believed is added to `claims`."""
        passed = Headers()
        for name, value in headers:
            key = name.lower()
            if key in self._claims or (key == PRIORITY and self.needs_key):
                if not is_due(key, value, identity):
                    claims.append(key.decode())
                    continue
            elif key == EXTENSIONS and identity is not None and identity.is_limited_to_models:
                continue  # its messages are to be read
            elif key in SECRET_FIELDS and self.needs_key:
                value = subprotocols(value) if key == SUBPROTOCOL else b""  # noqa: PLW2901
                if not value:
                    continue
            passed.append((name, value))
        if identity is not None and self.needs_key:
            passed.append((b"authorization", identity.tenant.name.encode("latin-1", "replace")))
        return passed


def is_open(request: HttpRequest) -> bool:
    """Whether no key is needed: it is answered here, and shows no more than that the node lives and what pages may."""
    if request.method == b"OPTIONS":  # one that is no preflight goes to an engine, like any other request
        return bool(request.fields.origin and asked_method(request))
    return request.method in (b"GET", b"HEAD") and request.path in ALIVE


def tokens_of(headers: Fields) -> Iterator[bytes]:
    """Yield what may be keys, as they stand in the fields of a head."""
    for name, value in headers:
        key = name.lower()
        if key in CREDENTIAL_FIELDS:
            token = SCHEME.sub(b"", value, 1).strip()
            if token and token.lower() != b"bearer":  # what a client sends that was given no key
                yield token
        elif key == SUBPROTOCOL:
            offered = map(bytes.strip, value.split(b","))
            yield from (each[len(KEY_SUBPROTOCOL) :] for each in offered if each.startswith(KEY_SUBPROTOCOL))


def subprotocols(value: bytes) -> bytes:
    """Return the subprotocols that a client offers, but for its key."""
    return b", ".join([each for each in map(bytes.strip, value.split(b",")) if not each.startswith(KEY_SUBPROTOCOL)])


def is_due(key: bytes, value: bytes, identity: Identity | None) -> bool:
    """Whether a field claims no more than is true: a trusted proxy's does not, nor does one's own tenant."""
    if identity is None or identity.key is None:
        return identity is not None
    if key != PRIORITY:
        return value.strip() == identity.tenant.name.encode("latin-1", "replace")
    digits = value.strip()
    return digits.removeprefix(b"-").isdigit() and len(digits) < PRIORITY_DIGITS and int(digits) <= identity.priority
