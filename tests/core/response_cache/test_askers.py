"""Whose answers the cache keeps and gives, since no engine checks the credential of a hit."""

from __future__ import annotations

from itertools import product

import pytest

from ranvier_py.core.prompts.fingerprint import TextHasher
from ranvier_py.core.prompts.tenants import Tenants
from ranvier_py.core.response_cache.askers import Asker, Askers
from ranvier_py.core.response_cache.invalidations import Invalidations, VoidScope
from ranvier_py.core.response_cache.refused_credentials import PAUSE_S, SPREAD_MAX, UNKNOWN_MAX, RefusedCredentials

KEY = b"secret"
ISOLATIONS = ["credential", "header:X-Tenant"]


def asker(*fields: tuple[bytes, bytes], isolation: str = "credential") -> Asker:
    return Askers(Tenants(isolation, TextHasher(b"s" * 32))).of([(b"host", b"h"), *fields])


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_credential_is_the_same_in_whatever_field_and_scheme_it_comes(isolation: str) -> None:
    spelled = [
        *((b"Authorization", scheme + KEY) for scheme in (b"Bearer ", b"bearer ", b"BEARER  ", b"")),
        (b"X-Api-Key", KEY),
        (b"api-key", KEY),
    ]
    assert len({asker(each, isolation=isolation) for each in spelled}) == 1


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_answers_belong_to_the_credential_and_the_tenant_together(isolation: str) -> None:
    found = {
        asker((b"x-tenant", tenant), *((b"authorization", b"Bearer " + key) for key in keys), isolation=isolation).owner
        for tenant, keys in product((b"a", b"b"), ([b"k"], [b"l"], []))
    }
    assert len(found) == (3 if isolation == "credential" else 6)


def test_no_credential_is_one_class() -> None:
    found = {asker(*fields) for fields in ([], [(b"authorization", b"Bearer ")], [(b"user-agent", b"x")])}
    assert len(found) == 1
    assert found.pop().may_share


BY_OTHERS = [
    *(b"Cookie", b"X-Forwarded-User", b"X-Forwarded-Email", b"x-auth-request-user", b"X-Auth-Request-Access-Token"),
    *(b"remote-user", b"x-goog-authenticated-user-email", b"x-amzn-oidc-data", b"cf-access-jwt-assertion"),
    *(b"x-goog-api-key", b"x-auth-token", b"x-user-id", b"x-openwebui-user-id"),
]


@pytest.mark.parametrize("name", BY_OTHERS)
def test_whom_only_a_cookie_or_a_proxys_field_names_has_no_part_in_the_cache(name: bytes) -> None:
    assert not asker((name, b"u")).may_share
    assert not asker((name, b"u"), (b"authorization", b"Bearer "), (b"x-tenant", b"t")).may_share
    assert asker((name, b"u"), (b"x-api-key", KEY)).may_share
    assert asker((name, b"u"), isolation=f"header:{name.decode()}").may_share, "the operator tells tenants apart by it"


@pytest.mark.parametrize("name", [b"x-forwarded-for", b"x-real-ip", b"user-agent", b"x-session-id", b"x-request-id"])
def test_where_a_request_comes_from_names_nobody(name: bytes) -> None:
    assert asker((name, b"u")).may_share


def test_an_invalidation_covers_tenant_or_credential() -> None:
    tenant, credential = b"t" * 16, b"c" * 16
    known = Invalidations(60.0)
    for owner, each in ((tenant + credential, tenant), (tenant + credential, credential), (credential, credential)):
        assert VoidScope("", each).covers("m", owner)
        known.give(VoidScope("", each), 1.0, 1.0, 1)
        assert known.void("m", owner, 1.0)
    assert not VoidScope("", b"x" * 16).covers("m", tenant + credential)
    assert not known.void("m", b"x" * 16, 1.0)


def test_wrong_keys_of_strangers_leave_room_for_the_refusal_of_a_known_one() -> None:
    refused = RefusedCredentials()
    refused.answered(b"known")
    spread = [refused.spreads(b"%d" % number, 0.0, 60.0, is_known=False) for number in range(SPREAD_MAX)]
    assert sum(spread) == UNKNOWN_MAX
    assert refused.spreads(b"known", 0.0, 60.0, is_known=False)
    assert (
        sum(refused.spreads(b"k%d" % n, 0.0, 60.0, is_known=True) for n in range(100))
        == SPREAD_MAX - len([True for each in spread if each]) - 1
    )
    assert refused.spreads(b"0", 61.0, 60.0, is_known=False)
    assert not refused.spreads(b"0", 61.0 + PAUSE_S / 2, 60.0, is_known=True), "just spread"
    assert refused.spreads(b"0", 61.0 + PAUSE_S, 60.0, is_known=True)
