"""The clients benchmark: recorded requests that ask for whole answers."""

from __future__ import annotations

import json

from benchmarks.clients import unstreamed
from benchmarks.harness.report import clients
from cluster.agents.agent_shapes import AgentRequest


def test_a_request_for_a_whole_answer_differs_in_nothing_else() -> None:
    body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "messages": [1]}
    request = AgentRequest(1.0, "t", "main", "/v1/chat/completions", [("a", "b")], json.dumps(body).encode())
    found = unstreamed(request)
    assert json.loads(found.body) == {"model": "m", "stream": False, "messages": [1]}
    assert (found.at, found.task, found.path, found.headers) == (request.at, "t", request.path, request.headers)


def test_the_page_names_what_was_measured_with_whole_answers() -> None:
    shares = {"reached": 1.0, "lost": 0.0, "reused": 0.9, "possible": 0.9}
    row = {"shape": "codex", "router": "ranvier_py", "nodes": 1, "shares": shares}
    rows = [row, {**row, "streamed": True}, {**row, "streamed": False}]
    found = list(clients({"goals": {"reached": 0.99, "lost": 0.01}, "rows": rows}))
    assert ["whole answers" in each.question for each in found] == [False, False, True]
