"""NVIDIA Dynamo's mocker, an engine that nobody here wrote, behind a node: its events, its replay, its evictions.

It has a cache, tells of it as vLLM does, and times answers as if it computed them. The ids of generated tokens are not
those that its text is cut into, so nothing of an answer is ever found again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.engines.environments import python_of
from tests.engines.real import Process, RanvierNode, free_port, model_directory
from tests.engines.talks import Entry, Talks, share_of

pytestmark = pytest.mark.engines("dynamo", "vllm")  # of vLLM the model directory, nothing else

BLOCKS = 1024
BLOCK_TOKENS = 16


class Mocker:
    """A front end that speaks HTTP, and one engine behind it."""

    def __init__(self, folder: Path) -> None:
        self.port, self.events, self.replay = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        python, state = python_of("dynamo"), folder / "discovery"
        planes = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
        environment = {"DYN_FILE_KV": str(state), "DYN_LOG": "error"}
        front = (python, "-m", "dynamo.frontend", "--http-port", self.port, "--router-mode", "round-robin", *planes)
        engine = (
            *(python, "-m", "dynamo.mocker", "--model-path", model_directory(), "--model-name", "mid"),
            *("--block-size", BLOCK_TOKENS, "--num-gpu-blocks-override", BLOCKS, "--speedup-ratio", 5),
            *("--zmq-kv-events-ports", self.events, "--zmq-replay-ports", self.replay, *planes),
        )
        self.processes = [
            Process(front, folder / "front.log", environment),
            Process(engine, folder / "mocker.log", environment),
        ]

    def ready(self) -> None:
        self.processes[0].answers(f"{self.url}/v1/models", lambda answer: '"mid"' in answer.text)


@pytest.fixture(scope="module")
def mocker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mocker]:
    engine = Mocker(tmp_path_factory.mktemp("mocker"))
    try:
        engine.ready()
        yield engine
    finally:
        for process in engine.processes:
            process.end()


@pytest.fixture
def node(mocker: Mocker, tmp_path: Path) -> Iterator[RanvierNode]:
    places = f",kv_events=tcp://127.0.0.1:{mocker.events},kv_replay=tcp://127.0.0.1:{mocker.replay}"
    found = RanvierNode("one", {f"mocker{places}": mocker.url}, tmp_path, "affinity", [])
    try:
        found.ready(1)
        yield found
    finally:
        found.process.end()


def stream_of(node: RanvierNode) -> dict[str, object]:
    (source,) = node.until(
        "/admin/engine-cache", lambda view: [each["level"] for each in view["sources"]] == ["exact"]
    )["sources"]
    return dict(source["stream"])


def test_what_the_mocker_finds_was_predicted(node: RanvierNode) -> None:
    """Talks of more tokens than it holds; nearly every prompt was there before but for its last turn."""
    talks = Talks(5, 16)
    for talk in talks.talks:
        talk.append(Entry("user", "to begin with", 1))
    served = trio.run(partial(talks.run, [node.url], 5, users=2, pause_s=0.3))
    share = share_of(served, BLOCK_TOKENS)
    counts = stream_of(node)["counts"]
    print(share.row("mocker"), counts)
    assert counts["blocks_removed"] > 0
    assert counts["decoder_unread"] == counts["decoder_tags_skipped"] == counts["blocks_removed_unknown"] == 0
    assert share.cached > share.prompt_tokens // 3
    assert share.precision >= 0.95
    assert share.recall >= 0.95


def test_a_node_that_comes_late_learns_by_replay_what_the_mocker_holds(node: RanvierNode) -> None:
    """It was not there when the blocks were stored."""
    stream = stream_of(node)
    assert stream["counts"]["messages_applied"] > 0
    assert BLOCKS * 0.5 < stream["blocks"] <= BLOCKS
