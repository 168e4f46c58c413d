"""Tenants share nothing: neither fingerprints, nor what is remembered of bodies, nor the salt that engines get."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.errors import BadRequest
from ranvier_py.core.prompts.body_json import PARSED_BYTES_MAX, spliced
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher
from ranvier_py.core.prompts.prompt import PrefixKey, PromptMemory
from ranvier_py.core.prompts.request_body import Prompt, PromptReader
from ranvier_py.core.prompts.tenants import Tenants, checked_isolation, salt_splices

TEXTS, HASHER = TextHasher(b"k" * 32), TokenHasher(b"k" * 32)
ALICE, BOB = (Tenants("credential", TEXTS).of([(b"Authorization", b"Bearer " + name)]) for name in (b"alice", b"bob"))
MESSAGES = [{"role": "user", "content": "hello " * 40}, {"role": "assistant", "content": "Hello."}]


def reader() -> PromptReader:
    return PromptReader(TEXTS, HASHER, PromptMemory(), identity="t", bytes_per_token=4.0, digest_seed=1)


def body(*more: str, **fields: Any) -> bytes:
    messages = [*MESSAGES, *({"role": "user", "content": text} for text in more)]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def keys(prompt: Prompt) -> set[PrefixKey]:
    return set(prompt.end.chain())


@pytest.mark.parametrize("fields", [{}, {"cache_salt": "own"}, {"cache_salt": "own" * 300}], ids=["", "salt", "long"])
def test_equal_chats_of_two_tenants_have_no_key_in_common_at_any_turn(fields: dict[str, Any]) -> None:
    texts = reader()
    for more in [(), ("and now?",), ("and now?", "And then?")]:
        prompts = [texts.chat(body(*more, **fields), tenant) for tenant in (ALICE, BOB, b"")]
        for prompt in prompts:
            texts.remember(prompt)
        assert len(set.union(*map(keys, prompts))) == sum(len(keys(prompt)) for prompt in prompts)
        assert [prompt.end.root().state for prompt in prompts if prompt.salt] == [
            HASHER.start(texts.namespace_of("m", salt=prompt.salt)) for prompt in prompts if prompt.salt
        ], "as the engine's events will name it"
        assert len({prompt.salt for prompt in prompts}) == 3
    assert texts.memory.counters.found == 6, "each finds its own history again"


def test_a_completion_of_another_tenant_is_another_prompt() -> None:
    texts = reader()
    data = json.dumps({"model": "m", "prompt": list(range(64))}).encode()
    assert not keys(texts.completion(data, ALICE)) & keys(texts.completion(data, BOB))
    assert keys(texts.completion(data, ALICE)) == keys(reader().completion(data, ALICE)), "on every node"


def test_no_salt_of_a_client_leads_into_another_tenant_but_each_divides_its_own() -> None:
    texts = reader()
    alice = texts.chat(body(), ALICE)
    forged = texts.chat(body(cache_salt=alice.salt), BOB)
    assert forged.salt != alice.salt
    assert not keys(forged) & keys(alice)
    salts = {texts.chat(body(cache_salt=salt), ALICE).salt for salt in ("", "a", "b", "a" * 600, {"a": 1}, "\ud800")}
    assert len(salts) == 6


@pytest.mark.parametrize("at_start", [True, False])
def test_a_salt_of_a_continuing_chat_is_its_own_wherever_it_stands(at_start: bool) -> None:
    def data(salt: str, *more: str) -> bytes:
        fields = json.loads(body(*more))
        ordered = {"cache_salt": salt, **fields} if at_start else {**fields, "cache_salt": salt}
        return json.dumps(ordered).encode()

    texts = reader()
    for salt in ("a", "b"):
        first = texts.chat(data(salt), ALICE)
        texts.remember(first)
        assert keys(first) <= keys(texts.chat(data(salt, "go on"), ALICE))
    later = [texts.chat(data(salt, "go on"), ALICE) for salt in ("a", "b")]
    assert later[0].salt != later[1].salt
    assert not keys(later[0]) & keys(later[1])


def test_a_body_with_a_salt_out_of_sight_shares_with_no_other() -> None:
    texts = reader()
    large = "x" * PARSED_BYTES_MAX
    plain = [texts.chat(body(text, n=1), ALICE).salt for text in (large, large + "x")]
    hidden = [texts.chat(body(text, cache_salt="a"), ALICE).salt for text in (large, large + "x")]
    assert plain[0] == plain[1]
    assert len({plain[0], *hidden}) == 3


def test_a_tenant_is_a_token_wherever_it_stands_or_a_field() -> None:
    by_token, by_field = Tenants("credential", TEXTS), Tenants("header:X-Tenant", TEXTS)
    assert ALICE == by_token.of([(b"x-api-key", b"alice")]) == by_token.of([(b"API-Key", b" alice")])
    assert all(by_token.of([(b"Authorization", scheme + b"alice")]) == ALICE for scheme in (b"Bearer ", b"bearer  "))
    assert by_token.of([]) == by_token.of([(b"x-tenant", b"a")]) != ALICE, "those without one are a tenant as well"
    assert by_field.of([(b"x-tenant", b"a"), (b"authorization", b"b")]) == by_field.of([(b"X-TENANT", b"a")])
    assert by_field.of([(b"x-tenant", b"a"), (b"x-tenant", b"b")]) != by_field.of([(b"x-tenant", b"a")])
    assert len(ALICE) == 16
    assert b"alice" not in ALICE


@pytest.mark.parametrize("text", ["", "on", "header:", "header:a b", "header:a\n", "credential:x", "OFF"])
def test_isolation_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="header:NAME"):
        checked_isolation(text)


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5)), st.sampled_from(["", " ", "\r\n\t"]))
def test_the_salt_of_a_body_is_the_one_that_counts_and_nothing_else_changes(fields: dict[str, Any], blank: str) -> None:
    data = (blank + json.dumps({**fields, "cache_salt": "theirs"}) + blank).encode()
    assert json.loads(spliced(data, salt_splices(data, "ours"))) == {**fields, "cache_salt": "ours"}
    data = f"{blank}{{{blank}}}".encode()
    assert json.loads(spliced(data, salt_splices(data, "ours"))) == {"cache_salt": "ours"}


@pytest.mark.parametrize("data", [b"[]", b"{", b"", b"null", '{"a":1}'.encode("utf-16"), '{"a":1}'.encode("utf-32-le")])
def test_what_could_be_read_as_an_object_without_a_salt_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        salt_splices(data, "ours")


def test_a_tenant_asked_for_again_with_the_same_fields_is_the_same_and_with_others_its_own() -> None:
    tenants = Tenants("credential", TEXTS)
    alice, bob = [(b"authorization", b"Bearer alice")], [(b"authorization", b"Bearer bob")]
    assert [tenants.of(alice), tenants.of(alice), tenants.of(bob), tenants.of(alice)] == [ALICE, ALICE, BOB, ALICE]
    assert tenants.of([]) == tenants.of(()) == tenants.named() != b""
    assert tenants.of(list(bob)) == BOB
