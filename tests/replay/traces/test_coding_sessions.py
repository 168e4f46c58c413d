"""Sessions of coding agents: ranges of block hashes, agents within agents, and files that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranvier_py.replay.traces.open_trace import open_trace
from ranvier_py.replay.traces.trace import TraceError, TraceOptions
from tests.replay.traces.given import all_are_sound, leading, loaded, shared


def entry(at: float, prompt: int, *ranges: int, **more: Any) -> dict[str, Any]:
    return {"t": at, "type": "n", "in": prompt, "out": 10, "h": list(ranges), **more}


def session(*requests: Any, name: str = "a", size: int = 64) -> dict[str, Any]:
    return {"id": name, "block_size": size, "requests": list(requests)}


def test_ranges_of_hashes_are_blocks_and_the_next_turn_shares_them(tmp_path: Path) -> None:
    trace = loaded(tmp_path, "", session(entry(0, 200, 1, 3), entry(5, 330, 1, 3, 9, 2)))
    one, two = trace.requests
    assert (trace.block_tokens, trace.timed) == (64, False)
    assert (one.prompt_tokens, two.prompt_tokens, two.at) == (200, 330, 5.0)
    assert one.blocks[:3] == two.blocks[:3]
    assert (len(one.blocks), len(two.blocks)) == (3, 5)


def test_equal_hashes_of_two_sessions_are_different_blocks(tmp_path: Path) -> None:
    one, two = loaded(tmp_path, "", session(entry(0, 64, 1, 1)), session(entry(0, 64, 1, 1), name="b")).requests
    assert not set(one.blocks) & set(two.blocks)


def test_a_name_does_not_depend_on_what_was_asked_before(tmp_path: Path) -> None:
    ranges = ((1, 4), (1, 2, 7, 3), (1, 2, 7, 1, 20, 2), (5, 1, 1, 4))
    entries = [entry(at, 64 * sum(each[1::2]), *each) for at, each in enumerate(ranges)]
    apart = [{"t": 50 + at, "agent_id": str(at), "requests": [each | {"t": 0}]} for at, each in enumerate(entries)]
    requests = loaded(tmp_path, "", session(*entries, *apart)).requests
    assert [request.blocks for request in requests[:4]] == [request.blocks for request in requests[4:]]


def test_an_agent_within_an_agent_asks_on_its_own_and_shares_the_sessions_hashes(tmp_path: Path) -> None:
    agent = {
        "t": 100.0,
        "type": "subagent",
        "agent_id": "x",
        "requests": [entry(1, 130, 1, 2), entry(2, 130, 1, 1, 7, 1)],
    }
    trace = loaded(tmp_path, "", session(entry(0, 130, 1, 2), agent))
    assert [request.session for request in trace.requests] == ["a", "a/x", "a/x"]
    assert [request.at for request in trace.requests] == pytest.approx([0.0, 101.0, 102.0])
    first, second, third = (request.blocks for request in trace.requests)
    assert first[:2] == second[:2]
    assert leading(set(first), third) == 1


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (session(entry(0, 200, 1, 2)), "found 2 hashes for in 200, expected 3 of them"),
        (session(entry(0, 200, 1)), "found h \\[1\\], expected a list of starts and lengths"),
        (session(entry(0, 200, 1, -3)), "found h \\[1, -3\\], expected a list"),
        (session(entry(-1, 200, 1, 3)), "found t -1, expected seconds"),
        (session(entry(0, 0)), "found in 0, expected a whole number from 1"),
        (session("x"), "found a request 'x', expected an object"),
        ({"id": "a", "block_size": 0, "requests": []}, "found block_size 0"),
        ({"id": "a", "block_size": 64, "requests": 1}, "found requests 1, expected a list"),
        (session(), "found no line"),
    ],
)
def test_a_session_that_is_none_is_refused_with_its_line(tmp_path: Path, line: Any, error: str) -> None:
    with pytest.raises(TraceError, match=error):
        loaded(tmp_path, "", line)


def test_sessions_with_blocks_of_other_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace.jsonl:2: found block_size 32, expected 64, as on the lines before"):
        loaded(tmp_path, "", session(entry(0, 64, 1, 1)), session(entry(0, 64, 1, 2), size=32))


def test_the_shared_sessions_are_read_and_their_turns_go_on_from_one_another() -> None:
    trace = open_trace(shared("traces/claude_code_sessions_dev.jsonl.gz"), TraceOptions(limit=200))
    all_are_sound(trace)
    assert len(trace.requests) == 200
    known: dict[str, set[int]] = {}
    found = asked = 0
    for request in trace.requests:
        before = known.setdefault(request.session, set())
        asked += request.prompt_tokens
        found += 64 * leading(before, request.blocks)
        before.update(request.blocks)
    assert 0.5 < found / asked < 1.0
