"""Engines that refuse requests with some trait, and serve the others well."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import cycle, product
from typing import Any

import pytest

from tests.node.node_lab import lab
from tests.proxy.test_black_holes import refusing
from tests.proxy.test_overload import QUESTIONS, answered
from tests.proxy.test_pipeline import asked
from tests.proxy.wire import Scripted, Step, answer, post

Body = dict[str, Any]
WITHOUT: dict[str, Callable[[Body], bool]] = {
    "streams": lambda body: bool(body["stream"]),
    "whole answers": lambda body: not body["stream"],
    "tools": lambda body: "tools" in body,
    "streams with tools": lambda body: bool(body["stream"]) and "tools" in body,
    "long answers": lambda body: body.get("max_tokens", 0) > 4000,
    "chats": lambda body: "messages" in body,
}
REFUSALS = {
    "400": answer(b'{"error":{"message":"this is not supported here"}}', status=400),
    "400, empty": answer(b"", status=400),
    "422": answer(b'{"detail":[{"loc":["body"],"msg":"extra fields not permitted"}]}', status=422),
    "501": answer(b"", status=501),
}


class Partial(Scripted):
    """Refuses what has the trait, and numbers its errors as those do that name a length or a request."""

    def __init__(self, trait: str, refusal: bytes) -> None:
        super().__init__()
        self.lacks, self.refusal = WITHOUT[trait], refusal

    def script(self) -> Sequence[Step]:
        return [self.refusal] if self.lacks(json.loads(self.bodies[-1])) else self.good


class Well(Scripted):
    def script(self) -> Sequence[Step]:
        return self.good


def requests(rounds: int) -> list[bytes]:
    """Requests by all APIs with and without each trait, no two of them equal."""
    made = []
    for number in range(rounds):
        for path, stream, tools, most in product(QUESTIONS, (True, False), (True, False), (9, 4001 + number)):
            extra = {"tools": [{"name": "f"}]} if tools else {}
            text = json.dumps({**QUESTIONS[path], **extra, "stream": stream, "store": False, "max_tokens": most})
            made.append(post(text.replace('"hi"', f'"hi {number}"').encode(), target=path))
    return made


CASES = list(zip(cycle(REFUSALS), cycle((2, 3, 5)), WITHOUT, strict=False))


@pytest.mark.parametrize(("refusal", "engines", "trait"), CASES)
async def test_hardly_a_client_sees_a_refusal_of_one_that_lacks_what_others_have(
    refusal: str, engines: int, trait: str
) -> None:
    partial = Partial(trait, REFUSALS[refusal])
    others = [Well() for _ in range(engines - 1)]
    async with lab(partial, *others, policy="round_robin", ask_usage=False) as node:
        statuses = [(await answered(node, request))[0] for request in requests(2)]
        assert len([status for status in statuses if status != 200]) <= 1
        assert {each["circuit"] for each in await node.backends()} == {"closed"}


async def test_nor_where_only_one_of_several_has_it() -> None:
    lacking = [Partial("tools", REFUSALS["400"]) for _ in range(3)]
    async with lab(*lacking, Well(), policy="round_robin", ask_usage=False) as node:
        statuses = [(await answered(node, request))[0] for request in requests(4)]
    assert len([status for status in statuses if status != 200]) <= 2 * len(lacking)


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("trait", ["streams", "tools"])
async def test_what_all_lack_is_tried_twice_at_most_and_blames_nobody(trait: str, refusal: str) -> None:
    engines = [Partial(trait, REFUSALS[refusal]) for _ in range(3)]
    async with lab(*engines, policy="round_robin", ask_usage=False) as node:
        for request in requests(2):
            before = asked(engines)
            await answered(node, request)
            assert asked(engines) - before <= 2
        assert await refusing(node) == [None] * 3
