"""docs/quickstart.md leads from nothing to a chat and its explanation: its commands are run as they stand there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.node.node_lab import ANNOUNCED, first_lines
from tests.page_commands import commands, environment, shell

PAGE = "docs/quickstart.md"
ENGINE = re.compile(r"listening on http://(\S+)")


@pytest.mark.slow
async def test_its_commands_lead_to_a_chat_and_its_explanation(tmp_path: Path) -> None:
    assert commands(PAGE, "Quick start")[0] == "pip install ."
    ((engine,), (node,)) = commands(PAGE, "An engine"), commands(PAGE, "A node")
    silent: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "env": environment(), "check": False}
    async with trio.open_nursery() as nursery:
        with trio.fail_after(60):

            async def started(words: list[str]) -> str:
                command = [sys.executable, "-m", *words]
                return await first_lines(
                    await nursery.start(partial(trio.run_process, command, cwd=tmp_path, **silent))
                )

            words = engine.replace("127.0.0.1:9001", "127.0.0.1:0").split()
            (place,) = ENGINE.findall(await started(words[2:]))
            words = node.replace("127.0.0.1:9001", place).replace("127.0.0.1:8080", "127.0.0.1:0").split()
            ((public, control),) = ANNOUNCED.findall(await started(["ranvier_py", *words[1:], "--control=127.0.0.1:0"]))
            write, ask = commands(PAGE, "A chat")
            await shell(write, tmp_path)
            answer = json.loads(await shell(ask, tmp_path, {"127.0.0.1:8080": public}))
            assert answer["choices"][0]["message"]["content"]
            for command in commands(PAGE, "What the node knows now"):
                assert place in await shell(f"{command} --control {control} || true", tmp_path)
        nursery.cancel_scope.cancel()
