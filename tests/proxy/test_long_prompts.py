"""Engines of different context lengths: a whole node, and scripted engines."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from tests.node.node_lab import Node, chat, lab
from tests.proxy.test_black_holes import refusing
from tests.proxy.test_overload import QUESTIONS, answered
from tests.proxy.test_pipeline import asked
from tests.proxy.test_poison import question
from tests.proxy.wire import Scripted, Step, answer, post

WORDS = b'{"error":{"message":"This model\'s maximum context length is %d tokens.","code":400}}'


class Sized(Scripted):
    """An engine of a context length that refuses every prompt, or none."""

    def __init__(self, length: int | None, *, refuses: bool, status: int = 400) -> None:
        cards = [{"id": model, "object": "model", "max_model_len": length} for model in ("m", "lab-model")]
        super().__init__(page=json.dumps({"object": "list", "data": cards}).encode())
        self.length, self.refuses, self.status = length, refuses, status

    def script(self) -> Sequence[Step]:
        return [answer(WORDS % (self.length or 0), status=self.status)] if self.refuses else self.good


async def until_listed(node: Node) -> None:
    await node.until("/admin/backends", lambda view: all(each["models"] for each in view["backends"]))


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("lengths", [(100, 1000), (100, 500, 1000), (100, None)])
async def test_a_prompt_that_is_too_long_for_one_goes_to_a_longer_one_and_blames_nobody(
    lengths: tuple[int | None, ...], status: int
) -> None:
    engines = [Sized(length, refuses=length != lengths[-1], status=status) for length in lengths]
    async with lab(*engines, policy="round_robin") as node:
        await until_listed(node)
        for number in range(12):
            for path in QUESTIONS:
                found, _, _ = await answered(node, question(path, number, poison=False, stream=number % 2 == 0))
                assert found == 200, (path, number)
        assert await refusing(node) == [None] * len(engines)
        assert {each["circuit"] for each in await node.backends()} == {"closed"}
    assert len(engines[0].bodies) > 6  # it is a backend like others


async def test_what_is_too_long_for_the_longest_reaches_the_client_and_goes_to_no_shorter_one() -> None:
    engines = [Sized(1000, refuses=True), Sized(100, refuses=False), Sized(1000, refuses=True)]
    async with lab(*engines, policy="round_robin") as node:
        await until_listed(node)
        statuses = [(await answered(node, question(b"/v1/messages", n, poison=False)))[0] for n in range(6)]
        assert await refusing(node) == [None] * 3
    assert sorted(statuses) == [200] * 2 + [400] * 4
    assert asked(engines) == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_of_known_length_is_not_even_sent_to_those_that_are_too_short(stream: bool) -> None:
    short, long = Sized(100, refuses=True), Sized(100_000, refuses=False)
    ids = json.dumps({"model": "m", "prompt": list(range(150)), "stream": stream}).encode()
    async with lab(short, long) as node:
        await until_listed(node)
        for number in range(6):
            assert (await answered(node, post(ids, target=b"/v1/completions")))[0] == 200
            words = [{"role": "user", "content": f"{number} words of some length " * 20}]
            assert (await answered(node, post(chat(words, stream=stream))))[0] == 200
    assert (len(short.bodies), len(long.bodies)) == (0, 12)


async def test_if_none_is_long_enough_one_of_them_refuses() -> None:
    engines = [Sized(100, refuses=True), Sized(100, refuses=True)]
    ids = json.dumps({"model": "m", "prompt": list(range(150))}).encode()
    async with lab(*engines) as node:
        await until_listed(node)
        status, _, body = await answered(node, post(ids, target=b"/v1/completions"))
    assert (status, body) == (400, WORDS % 100)
    assert asked(engines) == 1


async def test_a_text_whose_tokens_are_only_estimated_is_sent_to_the_short_ones_as_well() -> None:
    engines = [Sized(100, refuses=False), Sized(100, refuses=False), Sized(100_000, refuses=False)]
    async with lab(*engines, policy="round_robin", tokenize_deadline_s=0) as node:
        await until_listed(node)
        for number in range(6):
            words = [{"role": "user", "content": f"{number} words of some length " * 20}]
            await answered(node, post(chat(words)))
    assert [len(engine.bodies) for engine in engines] == [2, 2, 2]
