"""What a node's log has of requests and orders: fields that can be read alone, and nothing secret or private."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import IO, Any

import pytest
import trio
import trio.lowlevel

from ranvier_py.core.log_limit import LOG_INTERVAL_S
from ranvier_py.core.routing.request_paths import PATHS, REALTIME_PATH
from ranvier_py.io.logs import line_handlers, set_up_logs
from tests.node.access.key_lab import CHAT, RED, asked, bearer, keys_file
from tests.node.node_lab import MODEL, chat, lab
from tests.proxy.wire import GOOD, Scripted, answer

USAGE = '"usage":{"prompt_tokens":120,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":96}}'
WHOLE = f'{{"choices":[{{"message":{{"role":"assistant","content":"hi"}},"finish_reason":"stop"}}],{USAGE}}}'.encode()
MARK = "m4rk3r-s3cr3t"
PATHS_OF_BODIES = [path.decode() for path in PATHS if path != REALTIME_PATH]


class Lines:
    """What was logged so far, each line an object."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    @property
    def text(self) -> str:
        for handler in line_handlers():
            handler.flush()
        self._file.seek(0)
        return self._file.read().decode()

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in map(json.loads, self.text.splitlines()) if line["event"] == event]


@pytest.fixture
def lines(restored_logging: None) -> Iterator[Lines]:
    with tempfile.TemporaryFile() as file:
        set_up_logs("debug", "json", descriptor=file.fileno())
        yield Lines(file)


async def test_a_request_has_its_client_model_and_tokens_in_its_line(lines: Lines, tmp_path: Path) -> None:
    settings = {"keys_file": keys_file(tmp_path), "node_name": "router-7"}
    async with lab(Scripted(answer(WHOLE)), **settings) as node:
        response = await asked(node, bearer(RED))
        assert response.status_code == 200, response.text
        (line,) = lines.of("request")
    known = {name: line[name] for name in ("node", "worker", "key_id", "tenant", "model", "stream")}
    assert known == {
        "node": "router-7",
        "worker": 0,
        "key_id": "red",
        "tenant": line["tenant"],
        "model": MODEL,
        "stream": False,
    }
    assert line["client"].startswith("127.0.0.1:")
    assert (line["prompt_tokens"], line["cached_tokens"], line["answer_tokens"]) == (120, 96, 7)
    assert line["failed_tries"] == []


async def test_each_try_that_failed_is_named_with_its_engine_its_reason_and_its_time(lines: Lines) -> None:
    numbers = count()
    async with lab(Scripted(answer(b"{}", status=500)), Scripted(GOOD)) as node:
        while not (found := [each for each in lines.of("request") if each["failed_tries"]]):
            prompt = [{"role": "user", "content": f"{next(numbers)} " * 50}]
            assert (await node.chat(prompt)).status_code == 200
    (failed,) = found[0]["failed_tries"]
    assert (failed["engine"], failed["reason"]) == (node.engines[0].removeprefix("http://"), "it answered 500")
    assert failed["ms"] > 0


@pytest.mark.parametrize(
    ("forwarded", "shown"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("6.6.6.6, 203.0.113.9, 127.0.0.5", "203.0.113.9"),  # what stands before it anybody may have written
        ("203.0.113.9, nonsense", None),
        ("2001:db8::7", "2001:db8::7"),
        (None, None),
    ],
)
async def test_a_trusted_proxy_names_whom_it_serves(lines: Lines, forwarded: str | None, shown: str | None) -> None:
    fields = {"x-forwarded-for": forwarded} if forwarded else {}
    async with lab(Scripted(GOOD), trusted_proxies=["127.0.0.0/8"]) as node:
        await asked(node, fields)
    async with lab(Scripted(GOOD)) as node:
        await asked(node, fields)
    believed, unbelieved = lines.of("request")
    assert believed["client"] == shown or (shown is None and believed["client"].startswith("127.0.0.1:"))
    assert unbelieved["client"].startswith("127.0.0.1:")


async def test_who_is_refused_is_logged_once_in_a_while_with_how_often(
    lines: Lines, tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    del autojump_clock
    now = [1000.0]
    monkeypatch.setattr("ranvier_py.node.access.access_parts.time.monotonic", lambda: now[0])
    async with lab(Scripted(GOOD), keys_file=keys_file(tmp_path)) as node:
        for _ in range(5):
            assert (await asked(node, bearer("rk-wrong"))).status_code == 401
        now[0] += LOG_INTERVAL_S
        await asked(node, bearer("rk-wrong"))
    first, second = lines.of("access.refused")
    assert (first["status"], first["code"], first["path"], first["level"]) == (401, "invalid_api_key", CHAT, "warning")
    assert ("more" in first, second["more"]) == (False, 4)


async def test_an_order_is_logged_with_who_gave_it_what_it_was_and_what_was_before(lines: Lines) -> None:
    async with lab(Scripted(GOOD), control_key="the-control-key") as node:
        order = {"url": node.engines[0], "weight": 3}
        await node.http.post(f"{node.control}/admin/backends/weight", json=order, headers=bearer("the-control-key"))
        for _ in range(3):
            await node.http.get(f"{node.control}/admin/backends", headers=bearer("not-the-key"))
    (changed,) = lines.of("backend.set")
    assert {name: changed[name] for name in ("engine", "field", "before", "after", "by")} == {
        "engine": node.engines[0].removeprefix("http://"),
        "field": "weight",
        "before": 1.0,
        "after": 3.0,
        "by": "control_key",
    }
    assert [line["status"] for line in lines.of("control.ordered")] == [200]
    (refused,) = lines.of("control.refused")
    assert (refused["status"], refused["client"], refused["level"]) == (401, "127.0.0.1", "warning")


@pytest.mark.parametrize("seed", range(2))
async def test_no_key_prompt_header_or_userinfo_is_in_any_line(lines: Lines, tmp_path: Path, seed: int) -> None:
    """Nothing is masked here: no secret is configured, and no marker looks like a bearer key to the log."""
    rng = Random(seed)
    engines = [Scripted(answer(WHOLE)), Scripted(answer(f'{{"error":"{MARK}"}}'.encode(), status=500))]
    async with lab(*engines, keys_file=keys_file(tmp_path), trusted_proxies=["127.0.0.0/8"]) as node:
        for _ in range(40):
            headers = {**bearer(RED), rng.choice(["x-api-key", "cookie", "x-tenant", "x-priority", "x-own"]): MARK}
            headers |= {rng.choice(["traceparent", "user-agent", "authorization", "x-forwarded-for"]): MARK}
            bodies = [
                chat([{"role": "user", "content": MARK}]),
                json.dumps({"model": MODEL, "prompt": MARK, "input": MARK, "user": MARK}).encode(),
                MARK.encode(),
            ]
            path = f"{rng.choice([*PATHS_OF_BODIES, '/v1/else'])}?key={MARK}"
            await asked(node, headers, path, rng.choice(bodies))
            bad = f"http://{MARK}:{MARK}@127.0.0.1:1/{MARK}"
            await node.http.post(f"{node.control}/admin/backends", json={"url": bad, "name": MARK * 40})
            await node.http.get(f"{node.control}/admin/backends?key={MARK}", headers=bearer(MARK))
        await trio.lowlevel.checkpoint()
        assert len(lines.of("request")) == 40
    assert MARK not in lines.text
