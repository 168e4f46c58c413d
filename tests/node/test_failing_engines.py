"""Engines of the lab that fail within a 200, in each form and by each API: a whole node in front of two of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.engine.engine_faults import FailureForm
from tests.node.node_lab import MODEL, Node, lab
from tests.proxy.test_pipeline import at_rest

QUESTIONS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi", "max_output_tokens": 9},
}
OUTCOMES = {500: "server_error", 503: "overloaded", 529: "overloaded", 400: "refused"}
EARLY = [form for form in FailureForm if form is not FailureForm.LATE]
NAMELESS = (FailureForm.EMPTY, FailureForm.DONE)  # of a stream; they say no code


async def answers(node: Node, *, stream: bool) -> list[bytes]:
    found = []
    for path, question in QUESTIONS.items():
        body = {"model": MODEL, "max_tokens": 9, **question, "stream": stream}
        answer = await node.http.post(f"{node.url}{path}", json=body)
        assert answer.status_code == 200, answer.text
        found.append(answer.content)
    return found


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("form", "status"), [*[(form, 500) for form in EARLY], (FailureForm.ANNOUNCED, 503)])
async def test_whoever_fails_within_a_200_is_passed_over_by_every_api(
    form: FailureForm, status: int, stream: bool
) -> None:
    async with lab(engines=2, policy="round_robin") as node:
        await node.fault(node.engines[0], kind="error_inside", form=form.value, status=status)
        for found in await answers(node, stream=stream):
            assert b'"error":{' not in found
            assert len(found) > 100
        outcomes = (await at_rest(node))["outcomes"]
    assert outcomes.pop("success") == len(QUESTIONS)
    assert set(outcomes) == {OUTCOMES[500 if stream and form in NAMELESS else status]}


@pytest.mark.parametrize("status", OUTCOMES)
async def test_whoever_fails_behind_output_has_failed_and_the_client_sees_how(status: int) -> None:
    async with lab(engines=1) as node:
        await node.fault(node.engines[0], kind="error_inside", form="late", status=status)
        for path, found in zip(QUESTIONS, await answers(node, stream=True), strict=True):
            events = [json.loads(line[6:]) for line in found.splitlines() if line.startswith(b"data: {")]
            assert len(events) > 2, path
            assert "error" in str(events[-1]), path
        assert (await at_rest(node))["outcomes"] == {OUTCOMES[status]: len(QUESTIONS)}
