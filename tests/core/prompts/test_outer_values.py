"""Single values of outermost members, found in raw bytes as a parser finds them, without occupying the event loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.prompts.body_json import ENDS_BYTES_MAX
from ranvier_py.core.prompts.outer_values import SCALAR_BYTES_MAX, WALKED_BYTES_MAX, OuterValues, finished
from tests.node.turns import OCCUPIED_S_MAX, least_s, longest_step_s

PAD = b"x" * (ENDS_BYTES_MAX + 1000)
NAMES = ("model", "seed", "x", "é")
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-10, 10**6), st.text(max_size=20), st.floats(0, 1e9))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6), st.booleans(), st.booleans(), st.booleans())
def test_members_are_found_as_a_parser_finds_them(
    fields: dict[str, Any], ascii_only: bool, padded: bool, indented: bool
) -> None:
    """Near the ends of a body, and far from both."""
    found = {"pad": PAD.decode(), **fields, "last": PAD.decode()} if padded else fields
    body = json.dumps(found, ensure_ascii=ascii_only, indent=2 if indented else None).encode()
    values = OuterValues(body)
    for name in NAMES:
        value = finished(values.find(name))
        if padded and ascii_only and name == "é":  # an escaped name in a larger body
            continue
        assert finished(values.has(name)) is (name in fields)
        if value is None:
            assert isinstance(fields.get(name, {}), dict | list)
        else:
            assert value.value == fields[name]
            assert json.loads(body[value.start : value.end]) == fields[name]


@pytest.mark.parametrize("where", range(3))
def test_the_last_of_two_counts_unless_one_is_near_the_start_and_the_other_in_the_middle(where: int) -> None:
    parts = [b'"pad":"%b"' % PAD, b'"end":"%b"' % PAD]
    parts.insert(where, b'"model":"a","o":{"model":"x"},"model":"b"')
    found = finished(OuterValues(b"{%b}" % b",".join(parts)).find("model"))
    assert found is not None
    assert found.value == ("a" if where == 0 else "b")


BARE = [b"", b"[]", b'"model":"a"', b'[{"model":"a"}]', b'{"a":{"model":"b"}}', b'{"model"', b'{"model":']


@pytest.mark.parametrize("body", BARE)
def test_what_has_no_such_member_has_none(body: bytes) -> None:
    for data in (body, body + b" " * 200_000, b'{"pad":"' + PAD + b'","q":[' + body):
        assert finished(OuterValues(data).find("model")) is None


HOSTILE: Mapping[str, Callable[[], bytes]] = {
    "brackets": lambda: b'{"p":"%b","model":"a","q":[%b1],"z":"%b"}' % (PAD, b"[]," * 1_200_000, PAD),
    "objects": lambda: b'{"p":"%b","q":[%b1],"model":"a","z":"%b"}' % (PAD, b'{"model":1},' * 300_000, PAD),
    "escapes": lambda: b'{"p":"%b","model":"a","q":"%b"}' % (b"\\u00e9" * 600_000, PAD),
    "prose": lambda: b'{"p":"%b","model":"a","q":"%b"}' % (b"word " * 400_000, b"word " * 400_000),
    "quotes": lambda: b'{"p":%b,"model":"a","q":"%b"}' % (b'\\"' * 1_500_000, PAD),
    "open": lambda: b'{"model":"' + b"a" * 4_000_000,
    "long": lambda: b'{"model":"%b"}' % (b"a" * 4_000_000),
    "deep": lambda: b'{"p":"%b","q":%b,"model":"a","z":"%b"}' % (PAD, b"[" * 1_500_000 + b"]" * 1_500_000, PAD),
    "names": lambda: (
        b'{"p":"%b",%b"model":"a","z":"%b"}' % (PAD, b"".join(b'"%d":1,' % each for each in range(300_000)), PAD)
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_body_occupies_the_loop_for_long_nor_all_in_all(kind: str) -> None:
    body = HOSTILE[kind]()

    def longest_s() -> float:
        values, begun = OuterValues(body), time.thread_time()
        searches = (values.find("model"), values.find("max_tokens"), values.has("seed"))
        longest = max(map(longest_step_s, searches))
        assert time.thread_time() - begun < 4.0
        return longest

    assert least_s(longest_s) <= OCCUPIED_S_MAX


def test_of_a_larger_body_only_the_ends_are_searched() -> None:
    long = b"w " * (WALKED_BYTES_MAX // 2)
    for body, is_found in (
        (b'{"model":"a","p":"%b"}' % long, True), (b'{"p":"%b","model":"a"}' % long, True),
        (b'{"p":"%b","model":"a","q":"%b"}' % (long, long), False),
    ):  # fmt: skip
        values = OuterValues(body)
        assert (finished(values.find("model")) is not None) is is_found
        assert finished(values.has("model"))
        assert not finished(values.has("seed"))


def test_a_long_text_is_no_name() -> None:
    for length, is_found in ((SCALAR_BYTES_MAX - 2, True), (SCALAR_BYTES_MAX, False)):
        assert (finished(OuterValues(b'{"model":"%b"}' % (b"a" * length)).find("model")) is not None) is is_found
