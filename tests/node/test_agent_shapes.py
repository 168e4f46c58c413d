"""What real agents sent, replayed from its recorded shapes through nodes: each turn finds what was computed before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from cluster.agents.agent_shapes import AgentRequest, names, requests_of, shape_of, written
from cluster.agents.agent_traffic import replayed
from cluster.agents.engine_fleet import MODEL, EngineFleet
from ranvier_py.io.tokenizer import EMBEDDED
from tests.node.node_lab import cluster_lab

ENGINES = 3
REACHED = 0.99  # of consecutive turns
LOST = 0.01  # of all prompt tokens, beside what the client's own prompts allow
LOST_OF_RESUMED = 0.02
"""Of agents whose resumed session repeats less than a third of its prompt: that little goes where it is soonest."""
PREFILL_TOKENS_PER_S = 20_000  # that computing again is not free, or where it is done would not matter

QUICK = ("codex-tui", "qwen-tui")
OTHERS = tuple(name for name in names() if name not in QUICK)


async def replay(name: str, nodes: int, folder: Path, asked: str = MODEL, **settings: Any) -> EngineFleet:
    requests = requests_of(name, asked)
    async with cluster_lab(folder, engines=0, deadline_s=120) as place:
        fleet = EngineFleet(ENGINES, tokenizer=str(EMBEDDED), prefill_tokens_per_s=PREFILL_TOKENS_PER_S)
        await fleet.start(place.nursery)
        place.engines += fleet.urls
        running = await place.cluster(nodes, **settings)
        reuse = await replayed(fleet, requests, [node.url for node in running])
    assert reuse.prompts == len(requests)
    assert reuse.turns >= len(requests) // 2, "most of what an agent asks goes on from what it asked before"
    assert reuse.reached >= REACHED, [(each.engine, each.held) for each in fleet.asked]
    resumed = name in ("qwen", "qwen-anthropic")
    assert reuse.lost <= (LOST_OF_RESUMED if resumed else LOST), [
        (each.engine, each.held, each.reused) for each in fleet.asked
    ]
    assert reuse.reused > 0.3 * reuse.tokens
    return fleet


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [4, 1])
@pytest.mark.parametrize("model", ["claude-opus-4-1-20250805"])
async def test_claude_code_works_with_its_own_models_names_by_one_table(model: str, nodes: int, tmp_path: Path) -> None:
    """What it sent, with tools and sub-agents, reaches engines whose model has another name."""
    fleet = await replay("claude-code", nodes, tmp_path, model, model=[{"name": "claude-*", "to": MODEL}])
    assert {orjson.loads(request.body)["model"] for request in fleet.requests} == {MODEL}


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [4, 1])
@pytest.mark.parametrize("name", QUICK)
async def test_turns_of_an_agent_reach_the_engine_that_holds_their_history(
    name: str, nodes: int, tmp_path: Path
) -> None:
    await replay(name, nodes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("name", OTHERS)
async def test_turns_of_agents_with_sub_agents_and_titles_reach_the_engine_that_holds_their_history(
    name: str, nodes: int, tmp_path: Path
) -> None:
    await replay(name, nodes, tmp_path)


def test_shapes_are_of_all_agents_and_apis() -> None:
    paths = {name: {request.path for request in requests_of(name, MODEL)} for name in names()}
    agents = {name.partition("-")[0] for name in paths}
    assert agents == {"aider", "claude", "codex", "opencode", "qwen"}
    assert set.union(*paths.values()) == {"/v1/chat/completions", "/v1/messages", "/v1/responses"}
    kinds = {request.kind for name in names() for request in requests_of(name, MODEL)}
    assert kinds == {"main", "sub", "bg"}


SECRET = "The plan that nobody may read: meet at nine by the old bridge."
TOOL = {
    "type": "function",
    "name": "read_secret_file",
    "parameters": {"properties": {"secret_path": {"type": "string"}}},
}


def recorded(*turns: str) -> list[AgentRequest]:
    """A session in which each turn goes on from the one before."""
    found = []
    for number in range(len(turns)):
        items = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": turn}]}
            for turn in turns[: number + 1]
        ]
        call = {"type": "function_call", "name": TOOL["name"], "arguments": '{"secret_path": "/a"}', "call_id": "c1"}
        body = {"model": "any", "stream": False, "store": False, "tools": [TOOL], "input": [*items, call]}
        headers = [("user-agent", "agent/1.0"), ("authorization", "Bearer key"), ("session-id", "s-1")]
        found.append(AgentRequest(number / 2, "S1", "main", "/v1/responses", headers, orjson.dumps(body)))
    return found


def back(requests: list[AgentRequest], folder: Path) -> list[AgentRequest]:
    written(shape_of(requests), "made", folder)
    return requests_of("made", MODEL, folder)


def test_a_shape_keeps_structure_and_lengths_and_none_of_the_words(tmp_path: Path) -> None:
    requests = recorded(SECRET, SECRET[:40] + " another end")
    text = orjson.dumps(shape_of(requests)).decode()
    for word in ("plan", "bridge", "secret", "/a", "Bearer", "key", "s-1", "any"):
        assert word not in text.replace('"texts"', "")
    for before, after in zip(requests, back(requests, tmp_path), strict=True):
        assert (after.at, after.task, after.kind, after.path) == (before.at, "S1", "main", "/v1/responses")
        assert [name for name, _ in after.headers] == ["user-agent", "session-id"]
        old, new = orjson.loads(before.body), orjson.loads(after.body)
        assert new["model"] == MODEL
        assert (new["stream"], new["store"]) == (False, False)
        for one, other in zip(old["input"][:-1], new["input"][:-1], strict=True):
            assert (other["type"], other["role"]) == ("message", "user")
            assert len(other["content"][0]["text"]) == len(one["content"][0]["text"])
        assert isinstance(orjson.loads(new["input"][-1]["arguments"]), dict), "what is JSON stays JSON"


def test_texts_of_a_shape_share_what_the_recorded_ones_shared(tmp_path: Path) -> None:
    first, second = back(recorded(SECRET, SECRET[:40] + "x" * 30), tmp_path)
    one, other = (orjson.loads(each.body)["input"] for each in (first, second))
    assert one[0] == other[0], "equal items are equal"
    texts = [item["content"][0]["text"] for item in other[:2]]
    assert texts[0][:40] == texts[1][:40]
    assert texts[0][40] != texts[1][40]
    assert first.headers == second.headers


def test_a_shape_is_read_alike_every_time(tmp_path: Path) -> None:
    requests = recorded(SECRET, "more")
    assert back(requests, tmp_path) == back(requests, tmp_path)
