"""From real chats through a real node to a trace: what was recorded is what the chats would have been loaded as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import trio

from ranvier_py.cli import make_parser
from ranvier_py.config.config_endpoints import config_of_worker
from ranvier_py.config.config_loader import config_of, load
from ranvier_py.io.tokenizer import EMBEDDED
from ranvier_py.replay.traces.open_trace import open_trace
from tests.node.node_lab import MODEL, Lab, Node, opened, start_engine
from tests.replay.traces.given import all_are_sound, leading, written

DEADLINE_S = 30
SYSTEM = "You are the help desk of a small library. Answer briefly, name the shelf, and never guess. " * 8
SECRETS = (
    *("help desk of a small library", "atlases are many", "shelf seven"),
    *("bearer-of-news", "hidden-user", "nameless-session"),
)


def streamed_text(body: str) -> str:
    events = [orjson.loads(line[5:]) for line in body.splitlines() if line.startswith("data:") and "[DONE]" not in line]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def recorded_chats(path: Path) -> list[list[dict[str, Any]]]:
    """Two conversations through a node that records; returns what each request said and was answered."""
    sent: list[list[dict[str, Any]]] = []
    async with opened(Lab, 0, DEADLINE_S) as place:
        engine, _ = await start_engine(place.nursery, tokenizer=str(EMBEDDED))
        node = await place.start(backend=[engine], record_file=path)
        for number in range(2):
            messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
            for turn in range(3):
                question = f"The atlases are many, visitor {number}. Are they on shelf seven? " * 6
                messages = [*messages, {"role": "user", "content": f"{question} Part {turn}."}]
                text = await ask(node, messages, f"{SECRETS[5]}-{number}", stream=turn == 1)
                messages = [*messages, {"role": "assistant", "content": text}]
                sent.append(messages)
                view = await node.until_routes(lambda view: view["recorder"]["lines"] >= len(sent))
                assert [view["recorder"][name] for name in ("dropped", "unlearned", "failures")] == [0, 0, 0]
    return sent


async def ask(node: Node, messages: list[dict[str, Any]], session: str, *, stream: bool) -> str:
    """One turn. Returns the answer's text."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 40, "stream": stream, "user": SECRETS[4]}
    if stream:
        body["stream_options"] = {"include_usage": True}
    headers = {"authorization": f"Bearer {SECRETS[3]}", "x-session-id": session}
    answer = await node.http.post(f"{node.url}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return streamed_text(answer.text) if stream else str(answer.json()["choices"][0]["message"]["content"])


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
    options = make_parser("serve").parse_args(["serve", "--record", str(tmp_path / "a"), "--record-files-max", "3"])
    config, origins, _ = load({name: vars(options)[name] for name in ("record_file", "record_files_max")})
    assert (config.record_file, config.record_files_max) == (tmp_path / "a", 3)
    assert "record_file" in origins


def test_each_worker_records_to_a_file_of_its_own(tmp_path: Path) -> None:
    """Two processes that rotate one file would lose each other's lines."""
    config = config_of(record_file=tmp_path / "a", workers=2)
    found = [config_of_worker(config, index, b"k" * 32).record_file for index in range(2)]
    assert found == [tmp_path / "a.0", tmp_path / "a.1"]
    assert config_of_worker(config_of(workers=2), 1, b"k" * 32).record_file is None
