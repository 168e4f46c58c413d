"""docs/access.md leads from nothing to three tenants with limits: its commands are run as they stand there."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.node.node_lab import ANNOUNCED, MODEL, Lab, first_lines, opened
from tests.page_commands import commands, environment, shell

COMMANDS = commands("docs/access.md", "From nothing to three tenants")


@pytest.mark.slow
async def test_its_commands_lead_to_three_tenants_with_limits(tmp_path: Path) -> None:
    makes, rest = COMMANDS[:3], COMMANDS[3:]
    serve = next(each for each in rest if each.startswith("ranvier serve"))
    asks = [each for each in rest if each.startswith("curl")]
    assert all(each.startswith("ranvier keys make") for each in makes)
    async with opened(Lab, 1, 60) as place:
        for command in [*makes, *rest[: rest.index(serve)]]:
            printed = await shell(command, tmp_path)
        assert printed == "good: 3 keys, 3 tenants\n"
        words = serve.replace("http://localhost:8000", place.engines[0]).split()[1:]
        command = [sys.executable, "-m", "ranvier_py", *words, "--listen=127.0.0.1:0", "--control=127.0.0.1:0"]
        silent: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "env": environment(), "check": False}
        process = await place.nursery.start(partial(trio.run_process, command, cwd=tmp_path, **silent))
        ((public, _),) = ANNOUNCED.findall(await first_lines(process))
        answers = [json.loads(await shell(each, tmp_path, {"localhost:8080": public})) for each in asks]
        assert [[card["id"] for card in each["data"]] for each in answers] == [[MODEL], [MODEL]]
        body = {"model": MODEL, "prompt": "a", "max_tokens": 4}
        for name, status, limit in (("ann", 200, "600"), ("bob", 200, "600"), ("eve", 404, "600"), ("", 401, None)):
            headers = {"x-api-key": (tmp_path / f"{name}.key").read_text().strip()} if name else {}
            found = await place.http.post(f"http://{public}/v1/completions", headers=headers, json=body)
            assert (found.status_code, found.headers.get("x-ratelimit-limit-requests")) == (status, limit)
