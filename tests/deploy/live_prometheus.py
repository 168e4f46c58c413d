"""A real Prometheus that scrapes nodes of a test twice a second, and answers expressions."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import trio

from tests.node.node_lab import BETWEEN_LOOKS_S

SCRAPE = "500ms"


class LivePrometheus:
    """What it answers."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self._url, self._http = url, http

    async def ask(self, path: str, **query: str) -> Any:
        answer = await self._http.get(f"{self._url}/api/v1/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    async def numbers(self, expression: str) -> list[float]:
        """The values of an expression now, without those that are none."""
        found = [float(each["value"][1]) for each in (await self.ask("query", query=expression))["result"]]
        return [number for number in found if number == number]  # noqa: PLR0124  # NaN is no number

    async def firing(self) -> set[str]:
        return {
            each["labels"]["alertname"] for each in (await self.ask("alerts"))["alerts"] if each["state"] == "firing"
        }


@asynccontextmanager
async def prometheus(
    folder: Path, http: httpx.AsyncClient, controls: Sequence[str], rules: Sequence[Path] = (), scrape: str = SCRAPE
) -> AsyncIterator[LivePrometheus]:
    """One that knows these nodes by their control ports. `rules`: files with alerts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    targets = [urlsplit(control).netloc for control in controls]
    config = {
        "global": {"scrape_interval": scrape, "scrape_timeout": scrape, "evaluation_interval": scrape},
        "rule_files": [str(each) for each in rules],
        "scrape_configs": [{"job_name": "ranvier", "static_configs": [{"targets": targets}]}],
    }
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    listen, data = f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={folder / 'data'}"
    command = ["prometheus", f"--config.file={path}", data, listen, "--log.level=error"]
    url = f"http://127.0.0.1:{port}"
    async with trio.open_nursery() as nursery:
        start = partial(trio.run_process, command, stderr=subprocess.DEVNULL, check=False)
        process: trio.Process = await nursery.start(start)
        try:
            while True:
                try:
                    if (await http.get(f"{url}/-/ready")).status_code == 200:
                        break
                except httpx.TransportError:
                    assert process.poll() is None, "it ended"
                await trio.sleep(BETWEEN_LOOKS_S)
            yield LivePrometheus(url, http)
        finally:
            process.terminate()
