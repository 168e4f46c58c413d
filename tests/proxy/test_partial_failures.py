"""Engines that fail requests of one kind, and serve the others well: their circuits stay closed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from ranvier_py.core.answers.chunked import payload_of
from ranvier_py.core.routing.blame.refusals import PROBE_REQUESTS
from ranvier_py.proxy.stages import relay
from tests.node.node_lab import lab
from tests.proxy.test_black_holes import refusing
from tests.proxy.test_overload import answered
from tests.proxy.test_partial_refusals import Well, requests
from tests.proxy.wire import CLOSE, END, HANG, ROLE, TOKEN, Scripted, Step, answer

DONE = b"data: [DONE]\n\n"
EVENTS = payload_of(ROLE) + payload_of(TOKEN) + payload_of(END) + DONE
SHORT_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % (len(EVENTS) + 9)


class Failure(NamedTuple):
    """What is failed: by the body, and by the path; how; and the status that is shown."""

    is_failed: Callable[[bytes, bool], bool]
    steps: Sequence[Step]
    status: int


FAILURES = {
    "streams shorter than announced": Failure(lambda _, stream: stream, [SHORT_STREAM + EVENTS, CLOSE], 502),
    "streams of which the end does not come": Failure(lambda _, stream: stream, [SHORT_STREAM + EVENTS, HANG], 502),
    "500 of embeddings": Failure(lambda path, _: path == b"/v1/embeddings", [answer(b"{}", status=500)], 500),
    "504 of whole answers": Failure(lambda _, stream: not stream, [answer(b"", status=504)], 500),
    "no answers to messages": Failure(lambda path, _: path == b"/v1/messages", [CLOSE], 502),
}


class PartlyIll(Scripted):
    def __init__(self, failure: str) -> None:
        super().__init__()
        self.failure, self.failed = FAILURES[failure], 0

    def script(self) -> Sequence[Step]:
        path, stream = self.heads[-1].split(b" ")[1], bool(json.loads(self.bodies[-1])["stream"])
        if not self.failure.is_failed(path, stream):
            return self.good
        self.failed += 1
        return self.failure.steps


@pytest.mark.parametrize("failure", FAILURES)
async def test_no_client_sees_what_one_engine_alone_fails_and_such_requests_soon_avoid_it(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "ERROR_WAIT_S", 0.02)
    ill, counts = PartlyIll(failure), []
    async with lab(ill, Well(), policy="round_robin", ask_usage=False) as node:
        sent = requests(2)
        for _ in range(3):
            for request in sent:
                assert (await answered(node, request))[0] == 200
            counts.append(ill.failed)
        assert [each["circuit"] for each in await node.backends()] == ["closed", "closed"]
        assert await refusing(node) == [FAILURES[failure].status, None]
        served = len(ill.bodies) - ill.failed
        share = len(sent) * 3 / 2
    assert counts[2] - counts[1] <= 1 + len(sent) // PROBE_REQUESTS
    assert served > 0.3 * share
