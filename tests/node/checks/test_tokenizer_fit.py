"""A node asks each engine to tokenize what it tokenizes itself, and names those that do so otherwise, as it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cluster.local_tokenizer import LocalTokenizer, embedded
from ranvier_py.config.config_model import Config
from ranvier_py.core.tokenize.tokenizer_probe import (
    CHAT_DIFFERS,
    NO_TOKENS,
    TEXT_DIFFERS,
    ProbeTokens,
    misfit,
    tokens_in,
)
from ranvier_py.io.tokenizer import EMBEDDED
from ranvier_py.io.tokenizer_process import TokenizerProcess
from ranvier_py.node.fingerprints import tokenizer_process
from tests.node.node_lab import DEADLINE_S, Lab, Node, opened, start_engine

OURS = ProbeTokens((1, 2, 3), (4, 5))


def compared(config: Config, key: bytes) -> TokenizerProcess:
    """The embedded tokenizer, with the tokens that are compared."""
    return LocalTokenizer(tokenizer_process(config, key).setup, embedded(), embedded().facts)


async def misfits(node: Node) -> list[Mapping[str, Any]]:
    found = (await node.ask("/admin/status"))["findings"]
    return [each for each in found if each["kind"] == "engine_tokenizer"]


async def test_an_engine_with_another_tokenizer_is_found_before_any_request_and_one_that_fits_is_not() -> None:
    async with opened(Lab, 0, DEADLINE_S) as place:
        place.tokenizer_of = compared
        fits, _ = await start_engine(place.nursery, 1, tokenizer=str(EMBEDDED))
        other, _ = await start_engine(place.nursery, 2)
        node = await place.start(backend=[{"url": fits, "name": "fits"}, {"url": other, "name": "other"}])
        await node.until("/admin/status", lambda view: any(each["about"] == "other" for each in view["findings"]))
        (found,) = await misfits(node)
        assert "tokenizes otherwise than 'embedded'" in found["what"]
        assert found["remedy"].startswith("Set tokenizer to that of its model")
        await node.http.delete(f"{node.control}/admin/backends", params={"name": "other"})
        await node.until("/admin/status", lambda view: not [e for e in view["findings"] if e["about"] == "other"])


@pytest.mark.parametrize(
    ("theirs", "found"),
    [
        (OURS, ""),
        (NO_TOKENS, ""),
        (ProbeTokens((1, 2, 3)), ""),
        (ProbeTokens((1, 2), (4, 5)), TEXT_DIFFERS),
        (ProbeTokens((1, 2, 3), (4, 6)), CHAT_DIFFERS),
        (ProbeTokens((), (4, 6)), CHAT_DIFFERS),
    ],
)
def test_what_differs_is_named_by_the_key_that_mends_it(theirs: ProbeTokens, found: str) -> None:
    assert misfit(OURS, theirs) == found
    assert not misfit(NO_TOKENS, theirs)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"count":2,"tokens":[1,2]}', [1, 2]),
        *((body, ()) for body in (b"", b"[]", b"{}", b'{"tokens":"x"}', b'{"tokens":[1,null]}', b'{"tokens":[true]}')),
    ],
)
def test_only_lists_of_numbers_are_tokens(body: bytes, tokens: Sequence[int]) -> None:
    assert tokens_in(body) == tokens
