"""The commands of docs/tuning.md and docs/control-api.md, run as they stand there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.node.node_lab import MODEL, Lab, opened
from tests.page_commands import commands, shell


@pytest.mark.slow
async def test_its_commands_show_what_to_change(tmp_path: Path) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Who was first?"}], "max_tokens": 4}
    (tmp_path / "request.json").write_text(json.dumps(body))
    serve, replay = commands("docs/tuning.md", "Which policy")
    recorded = tmp_path / serve.partition("--record ")[2].split()[0]
    async with opened(Lab, 1, 90) as place:
        node = await place.start(record_file=str(recorded))
        for _ in range(3):
            answer = await place.http.post(f"{node.url}/v1/chat/completions", json=body)
            assert answer.status_code == 200
        for command in commands("docs/tuning.md", "What to look at"):
            assert await shell(f"{command} --control {node.control} || true", tmp_path)
        (ask,) = commands("docs/control-api.md", "The control port's API")
        assert json.loads(await shell(ask, tmp_path, {"http://127.0.0.1:9180": node.control}))["openapi"] == "3.1.0"
    printed = await shell(replay, tmp_path)
    assert all(policy in printed for policy in ("affinity", "ttft", "least_loaded"))
