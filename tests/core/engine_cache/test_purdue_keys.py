"""PU1 to PU3: the key of the Purdue report, and how it meets our fingerprints."""

from __future__ import annotations

import hashlib
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.sources.push_keys import (
    HEAD_IDS_MAX,
    KeyedPrefix,
    KeyHasher,
    Link,
    Links,
    key_of,
    prefix_hash,
)
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher, anchor_at
from ranvier_py.core.prompts.prompt import PromptMemory
from ranvier_py.core.prompts.request_body import PromptReader
from tests.examples import examples

KEY = b"k" * 32
GOLDEN_64 = 0x5F3006CAB71F62DE6D308E4FCE785CAF2A1CB0739E863BA7812739A91C930E5A
GOLDEN_5 = 0x666AA17826AD39129D061F3C3467D1B7139904B3448383EC9861B51C7522E553


@pytest.mark.parametrize(
    ("ids", "length", "key"),
    [
        (range(64), 0, "5f3006cab71f62de6d308e4fce785caf2a1cb0739e863ba7812739a91c930e5a"),
        (range(900), 64, "5f3006cab71f62de6d308e4fce785caf2a1cb0739e863ba7812739a91c930e5a"),
        ([5], 64, "666aa17826ad39129d061f3c3467d1b7139904b3448383ec9861b51c7522e553"),
    ],
)
def test_the_key_is_that_of_the_reports_listing(ids: range, length: int, key: str) -> None:
    assert prefix_hash(ids, length) == key


def test_the_key_ends_with_the_64th_token() -> None:
    ids = list(range(100))
    assert prefix_hash([*ids[:64], 7, 7], 64) == prefix_hash(ids, 64)
    assert prefix_hash([*ids[:63], 7, *ids[64:]], 64) != prefix_hash(ids, 64)


def noted_of(*turns: list[int], lengths: tuple[int, ...] = (64,), short: int = 0) -> list[KeyedPrefix]:
    """What is noted while a prompt grows by these turns."""
    noted: list[KeyedPrefix] = []
    hasher = KeyHasher(KEY, notify=noted.append, lengths=lengths, short=short)
    state = hasher.start(Fingerprint(7))
    for ids in turns:
        state = hasher.extend(state, np.array(ids, dtype=np.uint32), [len(ids)])[0].state
    return noted


def test_pu1_the_key_is_the_sha256_of_the_ids_as_python_writes_their_tuple() -> None:
    """The golden values of the report's listing, which it gives as source and not as numbers."""
    assert key_of(list(range(64))) == GOLDEN_64
    assert key_of([5]) == GOLDEN_5
    assert key_of([1, 2, 3]) == int(hashlib.sha256(b"(1, 2, 3)").hexdigest(), 16)


def test_pu1_a_node_finds_the_golden_key_where_it_hashes_a_prompt() -> None:
    [keyed] = noted_of(list(range(900)))
    assert keyed.key == GOLDEN_64
    assert keyed.tokens == 64
    plain = TokenHasher(KEY)
    [segment] = plain.extend(plain.start(Fingerprint(7)), np.arange(64, dtype=np.uint32), [64])
    assert (64, keyed.fingerprint) == segment.end
    assert keyed.root == plain.start(Fingerprint(7)).total


def test_pu2_prompts_that_share_64_tokens_share_a_key_and_others_do_not() -> None:
    ids = list(range(200))
    assert noted_of(ids)[0].key == noted_of([*ids[:64], 7, 7, 7])[0].key
    assert noted_of(ids)[0].key != noted_of([*ids[:63], 7, *ids[64:]])[0].key


@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.sampled_from([0, 3]))
@settings(max_examples=examples(80))
@example([64, 1, 1, 1, 50], 3)
@example([1, 63, 1], 3)
def test_pu2_a_chat_read_turn_by_turn_has_the_key_of_the_chat_read_at_once(lengths: list[int], short: int) -> None:
    ids = list(range(1000, 1000 + sum(lengths)))
    ends = list(accumulate(lengths))
    noted: list[KeyedPrefix] = []
    at_once = KeyHasher(KEY, notify=noted.append, short=short)
    at_once.extend(at_once.start(Fingerprint(7)), np.array(ids, dtype=np.uint32), ends)
    by_turns = noted_of(*(ids[end - length : end] for length, end in zip(lengths, ends, strict=True)), short=short)
    whole, found = (
        [keyed for keyed in keys if keyed.tokens == 64 and keyed.key == key_of(ids, 64)] for keys in (noted, by_turns)
    )
    assert found == whole
    assert whole or len(ids) < 64 + short


def test_pu2_other_lengths_stand_at_the_anchor_above_them() -> None:
    keys = {keyed.key: keyed.tokens for keyed in noted_of(list(range(300)), lengths=(16, 100, 256))}
    ids = list(range(300))
    assert keys == {key_of(ids, 16): 16, key_of(ids, 100): 64, key_of(ids, 256): 256}


def test_pu2_a_prompt_shorter_than_the_key_has_that_of_all_its_tokens() -> None:
    """As the report has it; it is never the key of what continues it (PX10)."""
    [keyed] = noted_of(list(range(50)))
    assert (keyed.key, keyed.tokens) == (key_of(list(range(50))), 48)
    assert noted_of(list(range(5))) == [], "less than a block has no fingerprint"


def test_beginnings_of_prompts_are_kept_within_a_bound_of_tokens_however_long_a_length_a_request_names() -> None:
    hasher = KeyHasher(KEY, notify=lambda _: None)
    hasher.keep((64, 65_536))
    ids = np.arange(60_000, dtype=np.uint32)
    hasher.extend(hasher.start(Fingerprint(7)), ids, range(100, len(ids) + 1, 100))
    assert 0 < sum(len(head.ids) for head in hasher.heads.values()) <= HEAD_IDS_MAX


def test_pu2_the_length_is_that_of_the_request_and_64_where_it_has_none_or_0() -> None:
    texts, tokens = TextHasher(KEY), TokenHasher(KEY)
    reader = PromptReader(texts, tokens, PromptMemory(), identity="t", bytes_per_token=4.0, digest_seed=1)
    hello = b'"messages":[{"role":"user","content":"{\\"prefix_len\\":9}","prefix_len":8}]'
    for own in (b'"prefix_len":128,%b', b'%b,"prefix_len":128', b'"prefix_len":128,%b,"stream":true'):
        body = b"{%b}" % own % hello
        first = reader.chat(body)
        reader.remember(first)
        assert first.prefix_len == reader.chat(body).prefix_len == 128, "read at once, and as what is known"
    for other in (b"", b',"prefix_len":0', b',"prefix_len":-4', b',"prefix_len":"9"', b',"prefix_len":1000000'):
        assert reader.chat(b"{%b%b}" % (hello, other)).prefix_len == 0, "a member of the request, not of a message"


@given(st.lists(st.integers(0, 200_000), max_size=80), st.lists(st.integers(0, 200_000), max_size=80))
@settings(max_examples=examples(60))
def test_pu3_keys_are_equal_only_if_the_token_ids_are(one: list[int], other: list[int]) -> None:
    assert (key_of(one, 64) == key_of(other, 64)) == (one[:64] == other[:64])


def test_pu3_two_models_share_a_key_and_no_fingerprint() -> None:
    """PX11, PU12: the report's key knows no model, ours does."""
    links = Links()
    links.add(Link(GOLDEN_64, Fingerprint(1), 64, "a"))
    links.add(Link(GOLDEN_64, Fingerprint(2), 64, "b"))
    assert [link.fingerprint for link in links.of_key(GOLDEN_64, "b")] == [2]
    assert [link.fingerprint for link in links.of_key(GOLDEN_64)] == [1, 2]


def test_links_are_bounded_and_the_oldest_goes_first() -> None:
    links = Links(links_max=2)
    for number in (1, 2, 1, 3):
        links.add(Link(10 + number, Fingerprint(number), 64, ""))
    assert (len(links), links.forgotten) == (2, 1)
    assert links.of_key(12) == []
    assert links.of_key(11) == [Link(11, Fingerprint(1), 64, "")]
    assert [link.key for link in links.part(0, 9)] == [11, 13]
    assert links.part(2, 9) == []


@pytest.mark.parametrize(("tokens", "anchor"), [(64, 64), (100, 64), (15, 0), (16, 16), (300, 256), (520, 512)])
def test_the_anchor_of_a_length(tokens: int, anchor: int) -> None:
    assert anchor_at(tokens, 16) == anchor
