"""A node, and several workers, as `ranvier serve` runs them: a configuration copied from the document, and hang-ups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from cluster.dns.addresses import free_port
from tests.examples import some
from tests.node.node_lab import ANNOUNCED, BETWEEN_LOOKS_S, MODEL, Lab, chat, first_lines, opened, turn
from tests.proxy.wire import END, ROLE, STREAM_HEAD, TOKEN, Scripted

CONTINUUM = """\
prefix_routing:
  enabled: true
  load_factor_epsilon: 0.20

response_cache:
  enabled: true
  backend: memory
  capacity: 5000
  ttl: "10m"

kv_cache_index:
  enabled: true
  max_entries: 500000
  entry_ttl_seconds: 900
  scoring:
    overlap_weight: 0.6
    load_weight: 0.3
    health_weight: 0.1
    min_overlap_threshold: 0.25
  storage_offloading:
    enabled: true              # Track GPU hot vs. storage warm tiers
    treat_eviction_as_offload: true
  event_sources:
    - backend_name: vllm-1
      endpoint: "{first}/v1/kv_events"
    - backend_name: vllm-2
      endpoint: "{second}/v1/kv_events"
"""
ROOT = Path(__file__).parents[2]
DEADLINE_S = 150.0  # a process of a node loads its libraries first


class Served:
    """A process of `ranvier serve`. `control` are the control ports of its workers."""

    def __init__(self, process: trio.Process, public: str, control: list[str], http: httpx.AsyncClient) -> None:
        self.process, self.url, self.control, self.http = process, f"http://{public}", control, http

    async def config(self, worker: int = 0) -> dict[str, Any]:
        return dict((await self.http.get(f"{self.control[worker]}/admin/config")).json())

    async def until(self, worker: int = 0, **values: Any) -> None:
        while True:
            config = await self.config(worker)
            if all(config[name] == value for name, value in values.items()):
                return
            await trio.sleep(BETWEEN_LOOKS_S)


@asynccontextmanager
async def served(place: Lab, file: Path, *flags: str, workers: int = 1, code: int = 0) -> AsyncIterator[Served]:
    """`code` is what it ends with."""
    command = [sys.executable, "-m", "ranvier_py", "serve", "--config", str(file), *flags]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, cwd=ROOT)
    place.nursery.start_soon(drained, process.stderr, process)
    found = ANNOUNCED.findall(await first_lines(process, workers))
    try:
        yield Served(process, found[0][0], sorted(control for _, control in found), place.http)
    finally:
        process.terminate()
        assert await process.wait() == code


async def drained(stream: Any, process: trio.Process) -> None:
    """What it logs is there to be looked at, and shown where a test fails."""
    process.logged = b""  # type: ignore[attr-defined]
    async for piece in stream:
        process.logged += piece  # type: ignore[attr-defined]
    print(process.logged.decode())  # type: ignore[attr-defined]


PLACES = ("--listen", "127.0.0.1:0", "--control", "127.0.0.1:0")


TIER_3 = """\
  backend: redis
  redis:
    url: "redis://127.0.0.1:1"
    pool_size: 16
    key_prefix: "cr:resp:"
    fallback_to_memory: true
    fallback_capacity: 2000
"""


@pytest.mark.parametrize("tier_3", some([True, False]), ids=["redis", "memory"])
async def test_cr34_a_configuration_copied_from_the_document_starts_a_node(tmp_path: Path, *, tier_3: bool) -> None:
    """A Redis that is away is no reason not to start (CR13)."""
    async with opened(Lab, 2, DEADLINE_S) as place:
        file = tmp_path / "continuum.yaml"
        text = CONTINUUM.format(first=place.engines[0], second=place.engines[1])
        file.write_text(text.replace("  backend: memory\n", TIER_3) if tier_3 else text)
        async with served(place, file, *PLACES, "--metric-names", "continuum") as node:
            for _ in range(2):
                body = {"model": MODEL, "messages": turn("hello"), "max_tokens": 4, "temperature": 0}
                answer = await place.http.post(f"{node.url}/v1/chat/completions", json=body)
                assert answer.status_code == 200
            assert answer.headers["x-cache"] == "HIT"
            backends = (await place.http.get(f"{node.control[0]}/admin/backends")).json()["backends"]
            assert [(each["name"], each["url"]) for each in backends] == [
                ("vllm-1", place.engines[0]),
                ("vllm-2", place.engines[1]),
            ]
            stats = (await place.http.get(f"{node.control[0]}/admin/kv-index/stats")).json()
            assert stats["config"]["max_entries"] == 500_000
            assert stats["config"]["scoring"]["min_overlap_threshold"] == 0.25
            assert [each["backend_name"] for each in stats["event_sources"]] == ["vllm-1", "vllm-2"]
            cached = (await place.http.get(f"{node.control[0]}/admin/response-cache/stats")).json()
            assert (cached["capacity"], cached["config"]["ttl"], cached["hit_rate"]) == (5000, "10m", "0.5000")
            ring = (await place.http.get(f"{node.control[0]}/admin/prefix-routing/stats")).json()
            assert ring["config"]["load_factor_epsilon"] == 0.2
            page = (await place.http.get(f"{node.control[0]}/metrics")).text
            assert 'continuum_response_cache_requests_total{result="hit"} 1.0' in page
            assert ("continuum_cache_fallback_active 1.0" in page) is tier_3
            assert ('continuum_cache_backend_type{backend="redis"} 1.0' in page) is tier_3
            assert b"config.note" in node.process.logged  # type: ignore[attr-defined]


async def stream(node: Served, ended: list[str]) -> None:
    """A stream that goes on for a while; what it ended with."""
    body = {"model": MODEL, "messages": turn("hello"), "max_tokens": 200, "stream": True, "ignore_eos": True}
    async with node.http.stream("POST", f"{node.url}/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line]
    ended.append(lines[-1])


@pytest.mark.slow
async def test_hang_ups_during_traffic_break_no_stream_and_a_broken_or_missing_file_changes_nothing(
    tmp_path: Path,
) -> None:
    async with opened(Lab, 2, DEADLINE_S) as place:
        file = tmp_path / "ranvier.yaml"
        backends = "".join(f"\n  - {url}" for url in place.engines)
        file.write_text(f"policy: affinity\nbackend:{backends}\n")
        async with served(place, file, *PLACES) as node:
            ended: list[str] = []
            async with trio.open_nursery() as streams:
                for _ in range(8):
                    streams.start_soon(stream, node, ended)
                for policy in ("ttft", "chwbl", "random"):
                    file.write_text(f"policy: {policy}\nbackend: ['{place.engines[0]}']\nbody_bytes_max: 9000\n")
                    node.process.send_signal(signal.SIGHUP)
                    await node.until(policy=policy)
                    streams.start_soon(stream, node, ended)
                file.write_text(
                    f"policy: random\nbackend: ['{place.engines[0]}']\nlog_format: json\nlog_level: warning\n"
                )
                node.process.send_signal(signal.SIGHUP)
                await node.until(log_format="json", log_level="warning")
                file.write_text("policy: [")
                node.process.send_signal(signal.SIGHUP)
                await logged(node, b'"event":"config.refused', 1)
                file.unlink()
                node.process.send_signal(signal.SIGHUP)
                await logged(node, b'"event":"config.refused', 2)
            assert ended == ["data: [DONE]"] * 11
            assert (await node.config())["policy"] == "random"
            assert len((await place.http.get(f"{node.control[0]}/admin/backends")).json()["backends"]) == 1


async def logged(node: Served, event: bytes, times: int) -> None:
    while node.process.logged.count(event) < times:  # type: ignore[attr-defined]  # noqa: ASYNC110
        await trio.sleep(0.02)  # only the other process can change it


def taken_by(*ports: int) -> frozenset[int]:
    """First ports of two that can't be these nor those after them."""
    return frozenset(port + step for port in ports for step in (-1, 0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["signal", "port"])
@pytest.mark.parametrize("peers", [True, False], ids=["peers", "no peers"])
async def test_all_workers_read_the_configuration_again_those_that_are_restarted_too(
    tmp_path: Path, by: str, *, peers: bool
) -> None:
    async with opened(Lab, 1, DEADLINE_S) as place:
        rng = Random()
        public = free_port(["127.0.0.1"], rng)
        control = free_port(["127.0.0.1"], rng, taken_by(public))
        file = tmp_path / "ranvier.toml"
        file.write_text(f'backend = ["{place.engines[0]}"]\npolicy = "random"\n')
        gossip = f"127.0.0.1:{free_port(['127.0.0.1'], rng, taken_by(public, control))}" if peers else "off"
        places = ("--listen", f"127.0.0.1:{public}", "--control", f"127.0.0.1:{control}", "--workers", "2")
        places += ("--gossip", gossip)
        async with served(place, file, *places, workers=2) as node:
            file.write_text(f'backend = ["{place.engines[0]}"]\npolicy = "ttft"\n')
            if by == "signal":
                node.process.send_signal(signal.SIGHUP)
            else:
                answer = await place.http.post(f"{node.control[1]}/admin/reload")
                assert answer.json()["applied"] == ["policy"]
            for worker in (0, 1):
                await node.until(worker, policy="ttft")
            if by == "port":
                return
            children = await trio.run_process(["pgrep", "-P", str(node.process.pid)], capture_stdout=True)
            os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
            await logged(node, b"worker.started", 3)
            for worker in (0, 1):
                await until_back(node, worker)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
async def test_workers_whose_parent_is_killed_finish_what_they_answer(tmp_path: Path) -> None:
    """The kernel may tell them once for each thread of the parent."""
    ends, received = trio.Event(), [b""] * 8
    async with opened(Lab, 0, DEADLINE_S) as place:
        url = await place.listen(Scripted(STREAM_HEAD + ROLE + TOKEN, ends, END).serve)
        file = tmp_path / "ranvier.toml"
        file.write_text(f'backend = ["{url}"]\ngossip = "off"\ndrain_timeout_s = 60\n')
        public = f"127.0.0.1:{free_port(['127.0.0.1'], Random())}"
        places = ("--listen", public, "--control", "127.0.0.1:0", "--workers", "2")
        async with served(place, file, *places, workers=2, code=-signal.SIGKILL) as node:

            async def follow(number: int) -> None:
                async with place.http.stream("POST", f"{node.url}/v1/chat/completions", content=chat()) as answer:
                    async for piece in answer.aiter_bytes():
                        received[number] += piece

            async with trio.open_nursery() as nursery:
                for number in range(len(received)):
                    nursery.start_soon(follow, number)
                while not all(received):  # noqa: ASYNC110
                    await trio.sleep(BETWEEN_LOOKS_S)
                node.process.kill()
                await logged(node, b"node.draining", 2)
                await trio.testing.wait_all_tasks_blocked(BETWEEN_LOOKS_S)
                ends.set()
            await logged(node, b"node.stopped", 2)
            assert b"node.cut" not in node.process.logged  # type: ignore[attr-defined]
    assert all(each.endswith(b"data: [DONE]\n\n") for each in received)


async def until_back(node: Served, worker: int) -> None:
    while True:
        try:
            await node.until(worker, policy="ttft")
        except httpx.HTTPError:  # it is being started
            await trio.sleep(0.05)
        else:
            return


def held_by(process: int) -> tuple[int, int]:
    """Descriptors, and bytes in memory."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return len(os.listdir(f"/proc/{process}/fd")), pages * 4096


@pytest.mark.slow
async def test_fifty_hang_ups_in_a_row_leave_descriptors_and_memory_as_they_were(tmp_path: Path) -> None:
    async with opened(Lab, 2, DEADLINE_S) as place:
        file = tmp_path / "ranvier.toml"

        def write(number: int) -> None:
            ttl = 100.0 + number
            file.write_text(
                f'backend = ["{place.engines[number % 2]}"]\nresponse_cache = true\nresponse_cache_ttl_s = {ttl}\n'
                f'policy = "{("chwbl", "ttft")[number % 2]}"\nshadow = ["{("random", "chwbl")[number % 2]}"]\n'
            )

        write(0)
        async with served(place, file, *PLACES) as node:
            first_files = first_bytes = 0
            for number in range(1, 51):
                write(number)
                node.process.send_signal(signal.SIGHUP)
                await node.until(response_cache_ttl_s=100.0 + number)
                if number == 10:
                    first_files, first_bytes = held_by(node.process.pid)
            while held_by(node.process.pid)[0] > first_files + 3:  # noqa: ASYNC110  # connections to engines that went
                await trio.sleep(BETWEEN_LOOKS_S)
            assert held_by(node.process.pid)[1] <= first_bytes + (8 << 20)
            answer = await place.http.post(f"{node.url}/v1/chat/completions", json={"messages": turn("hello")})
            assert answer.status_code == 200
