"""Whether a response is computed in the background, found in bodies however large, dense or oddly spelled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.access.limits.background import in_background
from ranvier_py.core.prompts.outer_values import WALKED_BYTES_MAX, finished
from tests.node.turns import OCCUPIED_S_MAX, least_s, longest_step_s

DENSE = b'"input":[%b1]' % (b"[]," * 60_000)
LONG = b'"input":"%b"' % (b"word " * (WALKED_BYTES_MAX // 5 + 1))
TOOL = b'"tools":[{"parameters":{"properties":{"background":{"type":"boolean","default":true}}}}]'

ASKS: dict[str, Callable[[], bytes]] = {
    "plain": lambda: b'{"model":"a","background":true}',
    "in the middle": lambda: b'{"pad":"%b",%b,"background":true,%b}' % (b"x" * 200_000, DENSE, DENSE),
    "escaped": lambda: b'{%b,"\\u0062ackgroun\\u0064":true,%b}' % (DENSE, DENSE),
    "the last of two": lambda: b'{"background":false,%b,"background":true,%b}' % (DENSE, DENSE),
    "a text": lambda: b'{"background":"true"}',
    "a number": lambda: b'{"background":1}',
    "in a larger body": lambda: b'{%b,"background" : true,%b}' % (LONG, LONG),
    "escaped in a larger one": lambda: b'{%b,"\\u0062ackground":true,%b}' % (LONG, LONG),
    "behind blanks": lambda: b'{%b,"background"%b:true,%b}' % (LONG, b" " * 2_000_000, LONG),
    "in UTF-16": lambda: '{"background":true}'.encode("utf-16"),
}
ASKS_NOT: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"{}",
    "no": lambda: b'{"background":false}',
    "nothing said": lambda: b'{"background":null}',
    "the last of two": lambda: b'{"background":true,%b,"background":false}' % DENSE,
    "a tool's": lambda: b'{%b,"model":"a",%b}' % (TOOL, DENSE),
    "a tool's in a larger body": lambda: b"{%b,%b}" % (TOOL, LONG),
    "no in a larger body": lambda: b'{"background": false,%b}' % LONG,
    "in a text": lambda: b'{"input":"{\\"background\\":true}"}',
}  # fmt: skip


@pytest.mark.parametrize("kind", ASKS)
def test_who_asks_for_it_is_found(kind: str) -> None:
    assert finished(in_background(ASKS[kind]()))


@pytest.mark.parametrize("kind", ASKS_NOT)
def test_who_does_not_is_not_taken_for_one_who_does(kind: str) -> None:
    assert not finished(in_background(ASKS_NOT[kind]()))


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(0, 1), st.sampled_from(["background", '"background":true'])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["background", "b"]), inner),
)


@given(st.dictionaries(st.sampled_from(["background", "input", "b"]), VALUES), st.sampled_from([None, 1]))
def test_any_body_is_read_as_a_parser_reads_it(fields: dict[str, Any], indent: int | None) -> None:
    value = fields.get("background")
    assert finished(in_background(json.dumps(fields, indent=indent).encode())) is (
        bool(value) and not isinstance(value, dict | list)
    )


@pytest.mark.parametrize("made", [
    lambda: b'{"q":[%b1],"background":true,"z":[%b1]}' % ((b"[]," * 600_000,) * 2),
    lambda: b'{%b"background":true}' % b"".join(b'"%d":1,' % each for each in range(300_000)),
    lambda: b'{"q":[%b1],"background":true}' % (b'{"background":1},' * 240_000),
    lambda: b'{"q":"%b","background":true}' % (b"\\u0062" * 690_000),
    lambda: b'{"q":"%b","background":true,"z":[%b1]}' % (b"\\u0062 " * 4_000_000, b'{"background":0},' * 1_000_000),
], ids=["brackets", "names", "objects", "escapes", "large"])  # fmt: skip
def test_no_body_occupies_the_loop_for_long(made: Callable[[], bytes]) -> None:
    body = made()
    assert least_s(lambda: longest_step_s(in_background(body))) <= OCCUPIED_S_MAX
