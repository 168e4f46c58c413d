"""`ranvier access`, as an operator reads it."""

from __future__ import annotations

from pathlib import Path

from tests.node.access.key_lab import RED, asked, bearer
from tests.node.access.test_limits_of_requests import counted, limited
from tests.node.node_lab import lab, printed
from tests.proxy.wire import GOOD, Scripted, answer


async def output(control: str) -> str:
    return await printed("access", "--control", control)


async def test_the_command_shows_what_is_left_and_why_the_last_request_was_refused(tmp_path: Path) -> None:
    engine = Scripted(answer(counted(100, 50)))
    async with limited(tmp_path, engine, requests_per_minute=1, tokens_per_minute=100_000) as node:
        assert "refused" not in await output(node.control)
        for _ in range(2):
            await asked(node, bearer(RED))
        shown = await output(node.control)
    assert "\nkey red, 1 refused, last: the limit is reached: 1 request per minute of key red\n" in shown
    (tokens,) = [line.split() for line in shown.splitlines() if line.startswith("  tokens per minute")]
    assert tokens == ["tokens", "per", "minute", "100000", "150", "0", "99850"]


async def test_without_keys_the_command_names_that() -> None:
    async with lab(Scripted(GOOD)) as node:
        assert "nobody needs a key" in await output(node.control)
