"""From real chats through a real node to a trace: what was recorded is what the chats would have been loaded as."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson
import trio

from cluster.engine.engine_process import serve as serve_engine
from cluster.engine.engine_routes import Engine, EngineConfig
from cluster.engine.engine_text import load_tokenizer
from ranvier_py.cli import make_parser
from ranvier_py.config.config_endpoints import config_of_worker
from ranvier_py.config.config_loader import config_of, load
from ranvier_py.control.control_port import serve_node
from ranvier_py.io.tokenizer import EMBEDDED
from ranvier_py.node.run_node import Addresses, run
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.traces.open_trace import open_trace
from tests.proxy.wire import NO_TLS
from tests.replay.traces.given import all_are_sound, leading, written

DEADLINE_S = 30
MODEL = "lab-model"
SYSTEM = "You are the help desk of a small library. Answer briefly, name the shelf, and never guess. " * 8
SECRETS = (
    *("help desk of a small library", "atlases are many", "shelf seven"),
    *("bearer-of-news", "hidden-user", "nameless-session"),
)


class Library:
    """A node that records, an engine with the node's own tokenizer, and a client that talks."""

    def __init__(self, url: str, control: str, http: httpx.AsyncClient) -> None:
        self.url = url
        self.control = control
        self.http = http
        self.sent: list[list[dict[str, Any]]] = []

    async def ask(
        self, messages: list[dict[str, Any]], session: str = "", *, stream: bool = False
    ) -> list[dict[str, Any]]:
        """One turn. Returns the messages with the answer."""
        body = {"model": MODEL, "messages": messages, "max_tokens": 40, "stream": stream, "user": SECRETS[4]}
        if stream:
            body["stream_options"] = {"include_usage": True}
        headers = {"authorization": f"Bearer {SECRETS[3]}", "x-session-id": session}
        answer = await self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"] if not stream else streamed_text(answer.text)
        self.sent.append([*messages, {"role": "assistant", "content": text}])
        return self.sent[-1]

    async def recorded(self, lines: int) -> None:
        """Wait until so many lines have been written."""
        while True:
            statistics = (await self.http.get(f"{self.control}/admin/routes")).json()["recorder"]
            if statistics["lines"] >= lines:
                assert statistics["dropped"] == statistics["unlearned"] == statistics["failures"] == 0
                return
            await trio.sleep(0.01)


def streamed_text(body: str) -> str:
    events = [orjson.loads(line[5:]) for line in body.splitlines() if line.startswith("data:") and "[DONE]" not in line]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def start_engine(nursery: trio.Nursery) -> str:
    limits = EngineLimits(prefill_tokens_per_s=math.inf, decode_s=0.001)
    config = EngineConfig(name="engine", models=(MODEL,), limits=limits, tokens_max=100_000)
    engine = Engine(config, load_tokenizer(str(EMBEDDED)))
    host, port = await nursery.start(partial(serve_engine, engine, "127.0.0.1", 0))
    return f"http://{host}:{port}"


async def recorded_chats(path: Path) -> list[list[dict[str, Any]]]:
    """Two conversations through a node that records; returns what each request said and was answered."""
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            engine = await start_engine(nursery)
            settings: dict[str, Any] = {"backend": [engine], "record_file": path}
            config = config_of(listen="127.0.0.1:0", control="127.0.0.1:0", **settings)
            addresses: Addresses = await nursery.start(partial(run, config, serve_node))
            host, port = addresses.public[0]
            async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False, verify=NO_TLS) as http:
                library = Library(f"http://{host}:{port}", addresses.control, http)
                for number in range(2):
                    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
                    for turn in range(3):
                        question = f"The atlases are many, visitor {number}. Are they on shelf seven? " * 6
                        messages = [*messages, {"role": "user", "content": f"{question} Part {turn}."}]
                        messages = await library.ask(messages, f"{SECRETS[5]}-{number}", stream=turn == 1)
                        await library.recorded(len(library.sent))
            nursery.cancel_scope.cancel()
    return library.sent


async def test_what_a_node_recorded_is_a_trace(tmp_path: Path) -> None:
    """Depths, message ends and lengths are those of the same chats as text; sharing is the same; no text is there."""
    path = tmp_path / "node.jsonl"
    sent = await recorded_chats(path)
    data = path.read_bytes()
    for secret in SECRETS:
        assert secret.encode() not in data
    trace = await trio.to_thread.run_sync(open_trace, path)
    log = [{"messages": messages[:-1], "answer": messages[-1], "model": MODEL} for messages in sent]
    chats = await trio.to_thread.run_sync(open_trace, written(tmp_path / "chats.jsonl", log))
    assert trace.timed
    assert len(trace.requests) == len(chats.requests) == 6
    prompts = {request.prompt_tokens: request for request in chats.requests}
    all_are_sound(trace)
    for request in trace.requests:
        other = prompts[request.prompt_tokens]
        known = [key.tokens for key in other.chain if key.tokens <= request.chain[-1].tokens]
        assert [key.tokens for key in request.chain] == known
        assert [end for end in other.ends if end < len(known)] == list(request.ends)
        assert request.model == MODEL
    for first, second in ((0, 1), (1, 2), (3, 4), (4, 5)):
        one, two = trace.requests[first], trace.requests[second]
        assert list(two.chain[: len(one.chain)]) == list(one.chain)
        assert leading(set(one.blocks), two.blocks) * 16 >= one.prompt_tokens
    sessions = [request.session for request in trace.requests]
    assert sessions == [sessions[0]] * 3 + [sessions[3]] * 3
    assert sessions[0] != sessions[3]
    system = trace.requests[0].chain[trace.requests[0].ends[0]]
    assert leading(set(trace.requests[0].blocks), trace.requests[3].blocks) * 16 >= system.tokens


def test_record_is_a_flag_of_serve(tmp_path: Path) -> None:
    options = make_parser().parse_args(["serve", "--record", str(tmp_path / "a"), "--record-files-max", "3"])
    config, origins, _ = load({name: vars(options)[name] for name in ("record_file", "record_files_max")})
    assert (config.record_file, config.record_files_max) == (tmp_path / "a", 3)
    assert "record_file" in origins


def test_each_worker_records_to_a_file_of_its_own(tmp_path: Path) -> None:
    """Two processes that rotate one file would lose each other's lines."""
    config = config_of(record_file=tmp_path / "a", workers=2)
    found = [config_of_worker(config, index, b"k" * 32).record_file for index in range(2)]
    assert found == [tmp_path / "a.0", tmp_path / "a.1"]
    assert config_of_worker(config_of(workers=2), 1, b"k" * 32).record_file is None
