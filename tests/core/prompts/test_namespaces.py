"""Prompts share fingerprints of tokens exactly where an engine would share its cache."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.boundaries import TokenIds
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher
from ranvier_py.core.prompts.namespaces import TokenNamespaces
from ranvier_py.core.prompts.prompt import Boundary, PromptMemory
from ranvier_py.core.prompts.request_body import Prompt, PromptReader
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.splitmix import MASK, mix, unmix
from tests.builders.route_tables import route_table
from tests.examples import examples

KEY = b"k" * 32
HASHER = TokenHasher(KEY)
IDS: TokenIds = np.arange(100, dtype=np.uint32)
TOOLS = [{"type": "function", "function": {"name": "search"}}]


def reader() -> PromptReader:
    memory = PromptMemory()
    return PromptReader(TextHasher(KEY), HASHER, memory, identity="t", bytes_per_token=4.0, digest_seed=1)


def chat(texts: PromptReader, messages: int = 1, **fields: object) -> Prompt:
    reported = [{"role": "user", "content": f"message {number}"} for number in range(messages)]
    return texts.chat(json.dumps({"model": "m", "messages": reported, **fields}).encode())


def tokenized(prompt: Prompt) -> Boundary:
    """Its end, as if every message were 50 tokens long and the engine saw 0, 1, 2 …"""
    chain = []
    boundary = prompt.end
    while boundary.parent is not None:
        chain.append(boundary)
        boundary = boundary.parent
    assert boundary.state is not None
    ends = [50 * (number + 1) for number in range(len(chain))]
    for each, segment in zip(reversed(chain), HASHER.extend(boundary.state, IDS, ends), strict=True):
        each.tokenized(segment)
    return prompt.end


def tokens_of(end: Boundary) -> set[int]:
    return {token for _, token, _ in end.chain() if token}


def texts_of(end: Boundary) -> set[int]:
    return {text for _, _, text in end.chain() if text}


def depth_by_text(routes: RouteTable, end: Boundary) -> int:
    return routes.match([(tokens, 0, text) for tokens, _, text in end.chain() if text], [0], 6.0)[0].tokens


NAMES = st.sampled_from(["m", "n", "", "m\x00", "tokens", "salt"])


@given(NAMES, NAMES, NAMES, NAMES)
def test_only_equal_names_and_salts_share_a_namespace(model: str, salt: str, other: str, its_salt: str) -> None:
    namespaces = TokenNamespaces(TextHasher(KEY), "t")
    equal = namespaces.of(model, salt=salt) == namespaces.of(other, salt=its_salt)
    assert equal is ((model, salt) == (other, its_salt))
    assert TokenNamespaces(TextHasher(KEY), "u").of(model, salt=salt) != namespaces.of(model, salt=salt)


def test_tools_templates_and_documents_show_in_tokens_and_not_in_their_namespace() -> None:
    texts = reader()
    bodies = ({}, {"tools": TOOLS}, {"chat_template": "x"}, {"documents": [1]}, {"chat_template_kwargs": {"a": 1}})
    ends = [tokenized(chat(texts, 2, **fields)) for fields in bodies]
    assert all(tokens_of(end) == tokens_of(ends[0]) for end in ends)
    assert all(texts_of(one).isdisjoint(texts_of(other)) for one, other in combinations(ends, 2))


def test_models_adapters_and_salts_keep_tokens_apart() -> None:
    texts = reader()
    bodies = ({}, {"model": "n"}, {"lora_path": "l"}, {"cache_salt": "s"}, {"lora_path": "l", "cache_salt": "s"})
    ends = [tokenized(chat(texts, 2, **fields)) for fields in bodies]
    assert all(tokens_of(one).isdisjoint(tokens_of(other)) for one, other in combinations(ends, 2))


def test_an_engines_own_key_and_the_processing_of_media_keep_tokens_and_texts_apart() -> None:
    """SGLang's `extra_key` names a cache of its own; other `num_crops` make other tokens of the same image."""
    texts = reader()
    bodies = (
        {},
        {"extra_key": "a"},
        {"extra_key": "b"},
        {"cache_salt": "a"},
        {"mm_processor_kwargs": {"num_crops": 4}},
    )
    ends = [tokenized(chat(texts, 2, **fields)) for fields in (*bodies, {"media_io_kwargs": {"num_crops": 4}})]
    for one, other in combinations(ends, 2):
        assert tokens_of(one).isdisjoint(tokens_of(other))
        assert texts_of(one).isdisjoint(texts_of(other))


def test_what_an_engine_reports_of_an_adapter_is_found_by_requests_for_it() -> None:
    """vLLM has the adapter as the model of a request, SGLang as its `lora_path`; events name both."""
    texts = reader()
    reported = HASHER.start(texts.namespace_of("base", "adapter", "s"))
    for fields in ({"model": "adapter"}, {"model": "base", "lora_path": "adapter"}):
        assert chat(texts, 1, cache_salt="s", **fields).end.root().state == reported


@given(st.integers(0, MASK))
def test_mixing_is_undone_by_unmixing(value: int) -> None:
    assert unmix(mix(value)) == value


@settings(max_examples=examples(30))
@given(NAMES, NAMES, NAMES, st.integers(16, 100))
def test_a_fingerprint_is_carried_over_to_another_name_whatever_the_salt(
    model: str, other: str, salt: str, length: int
) -> None:
    namespaces = TokenNamespaces(TextHasher(KEY), "t")
    step = namespaces.of(other) - namespaces.of(model)
    old, new = (
        HASHER.extend(HASHER.start(namespaces.of(name, salt=salt)), IDS, [length])[0].end[1] for name in (model, other)
    )
    assert HASHER.renamed(old, step) == new
    assert HASHER.renamed(new, -step) == old


def test_one_row_stands_for_equal_tokens_of_two_text_namespaces() -> None:
    """Tools in the body of one, and the same tokens from another: what either learns is found by both, and goes for
    both."""
    texts, routes, engine = reader(), route_table(capacity=100), BackendId(0)
    plain, tools = tokenized(chat(texts, 2)), tokenized(chat(texts, 2, tools=TOOLS))
    routes.learn(plain.chain(), engine, 0, Trust.LOCAL, 1.0)
    rows = len(routes)
    assert routes.match(tools.chain(), [0], 2.0)[0].tokens == 96
    routes.learn(tools.chain(), engine, 0, Trust.LOCAL, 3.0)
    assert len(routes) == rows
    assert [depth_by_text(routes, end) for end in (plain, tools)] == [96, 96]
    assert routes.withdraw(Fingerprint(plain.token), engine, 5.0)
    assert [depth_by_text(routes, end) for end in (plain, tools)] == [48, 48]


def test_texts_learned_apart_become_one_row_when_their_tokens_come() -> None:
    texts, routes = reader(), route_table(capacity=100)
    plain, tools = chat(texts, 2), chat(texts, 2, tools=TOOLS)
    routes.learn(plain.end.chain(), BackendId(0), 0, Trust.LOCAL, 1.0)
    routes.learn(tools.end.chain(), BackendId(1), 0, Trust.LOCAL, 1.0)
    routes.learn(tokenized(plain).chain(), BackendId(0), 0, Trust.LOCAL, 2.0)
    routes.learn(tokenized(tools).chain(), BackendId(1), 0, Trust.LOCAL, 2.0)
    assert len(routes) == len(tokens_of(plain.end))
    found = routes.match(plain.end.chain(), [0, 0], 3.0, wanted=2)
    assert sorted((holder.backend, holder.tokens) for holder in found) == [(0, 96), (1, 96)]
