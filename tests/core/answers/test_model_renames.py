"""Another name in the `model` of answers, and nothing else changed, however an answer is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.answers.model_renames import HELD_BYTES_MAX, ModelRenames

ASKED = 'gpt-4o "ü"'
NAMED = [
    b'data: {"id":"1","model":"main","choices":[{"delta":{"content":"\\"model\\":\\"main\\""}}]}\n\n',
    b'data: {"choices":[{"text":"x"}], "model" : "other/name"}\r\n\r\n',
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","model":"main","content":[]}}\n\n',
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"r","model":"main","output":[]}}\n\n',
]
UNNAMED = [
    b": ping\n\n", b"data: [DONE]\n\n", b'data: {broken "model":"main"\n\n', b'data: {"model":null}\n\n',
    b'event: x\ndata: {"type":"content_block_delta","delta":{"json":"{\\"model\\":\\"main\\"}"}}\n\n',
    b'data: {"type":"content_block_start","content_block":{"type":"tool_use","input":{"model":"main"}}}\n\n',
    b'data: {"type":"response.output_item.done","item":{"metadata":{"model":"main"}}}\n\n',
]  # fmt: skip


def of(event: bytes) -> bytes:
    """What becomes of an event."""
    spelled = json.dumps(ASKED, ensure_ascii=False).encode()
    for name in (b'"main"', b'"other/name"'):
        for before in (b'"model":', b'"model" : '):
            event = event.replace(before + name, before + spelled)
    return event


@pytest.mark.parametrize("event", NAMED)
def test_each_apis_event_gets_the_name_that_was_asked_for(event: bytes) -> None:
    found = ModelRenames(ASKED).feed(event, is_last=True)
    assert found == of(event) != event


@pytest.mark.parametrize("event", UNNAMED)
def test_what_names_no_model_of_the_answer_is_left_alone(event: bytes) -> None:
    assert ModelRenames(ASKED).feed(event, is_last=True) == event


@given(
    st.lists(st.sampled_from([*NAMED, *UNNAMED]), max_size=8),
    st.lists(st.integers(0, 2000), max_size=12),
    st.booleans(),
)
def test_the_result_does_not_depend_on_the_cuts(events: list[bytes], cuts: list[int], ends: bool) -> None:
    data = b"".join(events)
    if not ends:
        data = data.rstrip(b"\r\n")
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    renames, found = ModelRenames(ASKED), b""
    for start, end in pairwise(places):
        found += renames.feed(data[start:end], is_last=False)
    found += renames.feed(b"", is_last=True)
    assert found == ModelRenames(ASKED).feed(data, is_last=True)
    assert found.count(ASKED[:6].encode()) == sum(event in NAMED for event in events)


@pytest.mark.parametrize(
    "fields", [{"id": "x", "model": "main", "choices": [{"model": "main"}]}, {"data": [1.5], "model": "é"}]
)
def test_a_whole_answer_gets_the_name_in_its_outermost_member_alone(fields: dict[str, Any]) -> None:
    for indent in (None, 2):
        body = json.dumps(fields, indent=indent).encode()
        assert json.loads(ModelRenames(ASKED).whole(body)) == {**fields, "model": ASKED}
    for body in (b"", b"[]", b'{"a":1}', b'{"model":7}', b'no json "model":"main"'):
        assert ModelRenames(ASKED).whole(body) == body


def test_an_event_without_end_is_held_up_to_a_bound() -> None:
    renames, sent, got = ModelRenames(ASKED), 0, 0
    while not got:
        got += len(renames.feed(b'data: "' + b"x" * 100_000, is_last=False))
        sent += 100_007
        assert sent < HELD_BYTES_MAX + 200_000
    assert got == sent
