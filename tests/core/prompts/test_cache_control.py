"""Bodies of Anthropic's API get a marker on their system prompt, and nothing else of them changes."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.prompts.body_json import spliced
from ranvier_py.core.prompts.cache_control import BLOCKS_MAX, marker_splice

EPHEMERAL = {"type": "ephemeral"}
USER = {"role": "user", "content": "hello"}


def body(system: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "system": system, "messages": [USER], **fields}).encode()


def marked_body(data: bytes) -> bytes | None:
    splice = marker_splice(data)
    return None if splice is None else spliced(data, [splice])


def marked(data: bytes) -> dict[str, Any]:
    found = marked_body(data)
    assert found is not None
    return dict(json.loads(found))


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def test_a_text_becomes_one_block_with_a_marker() -> None:
    assert marked(body("Be brief."))["system"] == [text("Be brief.", cache_control=EPHEMERAL)]


def test_of_several_blocks_the_last_one_is_marked() -> None:
    blocks = marked(body([text("a"), text("b", citations=None)]))["system"]
    assert blocks == [text("a"), text("b", citations=None, cache_control=EPHEMERAL)]


@pytest.mark.parametrize(
    "system",
    ["", "  ", None, 7, [], ["a"], [text("")], [{"type": "image"}], [text("a", cache_control=EPHEMERAL), text("b")]],
)
def test_a_system_prompt_without_text_or_with_a_marker_stays_as_it_is(system: Any) -> None:
    assert marked_body(body(system)) is None


@pytest.mark.parametrize(("markers", "is_marked"), [(0, True), (3, True), (4, False), (5, False)])
def test_there_is_never_a_fifth_marker(markers: int, is_marked: bool) -> None:
    tools = [{"name": f"t{number}", "cache_control": EPHEMERAL} for number in range(markers)]
    assert (marked_body(body("a", tools=tools)) is not None) == is_marked


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"system":"a"', b'{"model":"m"}', b'{"system":"\\ud800"}', b'["system"]']
)
def test_what_is_no_such_body_goes_on_as_it_came(data: bytes) -> None:
    assert marked_body(data) is None


def test_a_conversation_begins_with_the_same_bytes_at_every_turn() -> None:
    turns = [[USER], [USER, {"role": "assistant", "content": "hi"}, USER]]
    first, second = (marked_body(body('Ä system " prompt', messages=messages)) for messages in turns)
    assert first is not None
    assert second is not None
    begun = first.index(b"hello") + len(b'hello"}')
    assert first[:begun] == second[:begun]


def test_of_two_system_members_the_one_that_counts_is_marked() -> None:
    data = b'{"system":"a","messages":[],"system" : "b" }'
    assert (
        marked_body(data)
        == b'{"system":"a","messages":[],"system" : [%b] }'
        % json.dumps(text("b", cache_control=EPHEMERAL), separators=(",", ":")).encode()
    )


def test_no_body_takes_long_however_many_system_members_it_has() -> None:
    lists = b"[]," * 40_000
    data = b'{%b"messages":[%b[]],"system":"x","pad":"%b"}' % (b'"system":"a",' * 4, lists, b"a" * 3_800_000)
    times = [time.thread_time()]
    for _ in range(3):
        assert marked_body(data) is None, "which of them counts is not seen at the ends"
        times.append(time.thread_time())
    assert min(end - began for began, end in pairwise(times)) <= 0.050, "requests wait meanwhile"
    assert marked_body(body([text("a")] * (BLOCKS_MAX + 1))) is None


@given(
    st.text(min_size=1, max_size=30).filter(str.strip),
    st.dictionaries(st.text(max_size=8), st.recursive(st.text() | st.integers(), st.lists, max_leaves=5), max_size=4),
    st.booleans(),
)
def test_nothing_but_the_system_prompt_changes(system: str, fields: dict[str, Any], first: bool) -> None:
    fields = {name: value for name, value in fields.items() if name != "system"}
    ordered = {"system": system, **fields} if first else {**fields, "system": system}
    data = json.dumps(ordered, ensure_ascii=False).encode()
    found = marked_body(data)
    assert found is not None
    block = orjson.dumps([text(system, cache_control=EPHEMERAL)])
    before, _, after = found.partition(block)
    assert before + json.dumps(system, ensure_ascii=False).encode() + after == data
