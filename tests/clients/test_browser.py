"""A page in a real browser: what it may send to a node of another origin, and read of it.

The browser is CHROMIUM, or one that PATH has: without either this is skipped, and `tests/node/test_browsers.py` sends
the same requests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.builders.engines import AnsweringEngine, Request
from tests.node.node_lab import lab
from tests.node.test_browsers import RULES, Engine, none_at_all
from tests.proxy.wire import answer

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
PAGE = """<script type="module">
const chat = {model: "m", temperature: 0, messages: [{role: "user", content: "hi"}]};
const key = {authorization: "Bearer k", "x-stainless-lang": "js"};
const sent = (path, body) => [path, {method: "POST", body, headers: {...key, "content-type": "application/json"}}];
const asked = [
  ["/v1/models", {}], ["/v1/models", {headers: key}], ["/else", {}], ["/health", {headers: key}],
  sent("/v1/chat/completions", JSON.stringify(chat)), sent("/v1/chat/completions", JSON.stringify(chat)),
  sent("/v1/chat/completions", JSON.stringify({...chat, model: "none"})), sent("/v1/messages", "{"),
  sent("/v1/embeddings", " ".repeat(300000)), sent("/chat/completions", "{}"), ["/v1/responses/r", {headers: key}],
];
const found = [];
for (const [path, how] of asked) {
  try {
    const answer = await fetch("NODE" + path, how);
    found.push([path, answer.status, answer.headers.get("x-cache") == "HIT", (await answer.text()).length > 0]);
  } catch (error) { found.push([path, 0, false, false]); }
}
await fetch("/found", {method: "POST", body: JSON.stringify(found)});
</script>"""
READ = [
    ["/v1/models", 200, False, True],
    ["/v1/models", 200, False, True],
    ["/else", 404, False, True],
    ["/health", 200, False, True],
    ["/v1/chat/completions", 200, False, True],
    ["/v1/chat/completions", 200, True, True],
    ["/v1/chat/completions", 404, False, True],
    ["/v1/messages", 400, False, True],
    ["/v1/embeddings", 413, False, True],
    ["/chat/completions", 404, False, True],
    ["/v1/responses/r", 200, False, True],
]


class Site(AnsweringEngine):
    """Serves the page, and takes what it found."""

    def __init__(self, page: str) -> None:
        self.page, self.came = page.encode(), trio.Event()
        self.found: Any = None

    async def answer(self, asked: Request) -> bytes:
        if asked.line == "POST /found":
            self.found = json.loads(asked.body)
            self.came.set()
        return answer(self.page if asked.line == "GET /" else b"", b"content-type: text/html")


@pytest.mark.skipif("TEST_CLIENTS" not in os.environ, reason="make test-clients runs it")
@pytest.mark.skipif(BROWSER is None, reason="no browser: install chromium, or name one in CHROMIUM")
@pytest.mark.parametrize("setting", [*RULES, none_at_all, "operator"])
async def test_a_page_reads_of_the_node_what_it_could_read_of_its_engines(setting: Any, tmp_path: Path) -> None:
    rule = none_at_all if setting == "operator" else setting
    settings = {"cors_origins": ("*",)} if setting == "operator" else {}
    async with lab(Engine(rule), response_cache=True, body_bytes_max=200_000, **settings) as node:
        site = Site(PAGE.replace("NODE", node.url))
        url = await node.lab.listen(site.serve)
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path}")
        start = partial(trio.run_process, (BROWSER, *options, url), stderr=subprocess.DEVNULL, check=False)
        node.nursery.start_soon(start)
        await site.came.wait()
    allowed = setting in RULES[:2] or setting == "operator"  # the third allows another page
    assert site.found == (READ if allowed else [[path, 0, False, False] for path, *_ in READ])
