"""How many answers a body asks for and how long ones, found in bodies however large, dense or oddly spelled."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.access.limits.asked_answers import (
    CHOICES,
    CHOICES_MAX,
    LENGTHS,
    ONE_ANSWER,
    PROMPTS,
    AskedAnswers,
    asked_answers,
    may_ask,
)
from ranvier_py.core.prompts.outer_values import WALKED_BYTES_MAX, finished
from tests.node.turns import OCCUPIED_S_MAX, least_s, longest_step_s

DENSE = b'"q":[%b1]' % (b"[]," * 12_000)
LONG = b'"q":"%b"' % (b"word " * (WALKED_BYTES_MAX // 10 + 1))
TOOL = b'"tools":[{"parameters":{"n":90,"max_tokens":1}}]'
FORMS = {
    "alone": b"{%b}",
    "deep": b'{%b,%%b,"z":[%b1]}' % (DENSE, b"[]," * 12_000),
    "behind a tool": b"{%b,%b,%%b,%b}" % (DENSE, TOOL, DENSE),
    "replacing another": b'{"n":null,"max_tokens":null,"prompt":"","sampling_params":{},%b,%%b,%b}' % (DENSE, DENSE),
    "in a larger body": b"{%b,%%b,%b}" % (LONG, LONG),
}


def asked(body: bytes, api: str) -> AskedAnswers:
    return finished(asked_answers(body, api)) if api in PROMPTS or may_ask(body) else ONE_ANSWER


def escaped(member: bytes) -> bytes:
    return b'"\\u00%x%b' % (member[1], member[2:])


MEMBERS = [
    *[(api, b'"%b":5' % name.encode(), AskedAnswers(1, 5)) for api, names in CHOICES.items() for name in names],
    *[
        (api, b'"%b":4000' % name.encode(), AskedAnswers(1, 1, 4000))
        for api, names in LENGTHS.items()
        for name in names
    ],
    ("completion", b'"prompt":["a","b","c"]', AskedAnswers(3)),
    ("completion", b'"prompt" : [ [1,2],[3] ]', AskedAnswers(2)),
    ("generate", b'"text":["a","b","c"],"sampling_params":{"n":2}', AskedAnswers(3, 2)),
    ("generate", b'"input_ids":[[1],[2]],"sampling_params":[{"n":2},{"max_new_tokens":9}]', AskedAnswers(2, 2, 9)),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("api", "member", "found"), MEMBERS, ids=lambda value: str(value)[:30])
def test_whoever_asks_for_much_is_found_wherever_it_stands(
    api: str, member: bytes, found: AskedAnswers, form: str
) -> None:
    if api == "generate" and b"sampling" not in member:
        member = b'"sampling_params":{%b}' % member
    seen = asked(FORMS[form] % member, api)
    if "larger" in form:
        assert (seen.prompts >= found.prompts, seen.choices, seen.most) == (True, found.choices, found.most)
    else:
        assert seen == found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("member", [b'"n":7', b'"best_of":7', b'"n":"7"', b'"n":7e0', b'"n" : 7.0'])
def test_a_number_counts_however_it_is_spelled(member: bytes, form: str) -> None:
    assert asked(FORMS[form] % member, "chat").choices == 7
    found = asked(FORMS[form] % escaped(member), "chat").choices
    assert found == (CHOICES_MAX if "larger" in form else 7)


@pytest.mark.parametrize("number", ["1000", "16385"])
def test_who_asks_for_more_answers_than_one_api_allows_is_taken_at_his_word(number: str) -> None:
    assert asked(b'{"n":%b}' % number.encode(), "chat").choices == (1000 if number == "1000" else CHOICES_MAX)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-le", "utf-8-sig"])
def test_a_number_counts_in_each_encoding_that_engines_take(encoding: str) -> None:
    assert asked('{"n":7,"max_tokens":50}'.encode(encoding), "chat") == AskedAnswers(1, 7, 50)


@pytest.mark.parametrize("body", [
    b"{}", b'{"n":null,"max_tokens":null}', b'{"n":1,"max_tokens":0}', b'{"n":-4,"max_tokens":-1}', b'{"n":"x"}',
    b'{"n":NaN}', b'{"n":[5]}', b'{"messages":[{"n":5,"max_tokens":5}]}', b'{"m":"{\\"n\\":5,\\"max_tokens\\":5}"}',
    b'{"n', b'{"n":', b'{"n"', b'"n":7', b"", b"\0", b"\xff\xfe\0",
])  # fmt: skip
def test_who_asks_for_one_answer_is_not_taken_for_one_who_asks_for_more(body: bytes) -> None:
    assert asked(body, "chat") == ONE_ANSWER


def test_numbers_of_other_apis_do_not_count() -> None:
    body = b'{"n":5,"max_tokens":5,"max_output_tokens":70,"max_new_tokens":5}'
    assert asked(body, "responses") == AskedAnswers(1, 1, 70)
    assert asked(body, "generate") == ONE_ANSWER


VALUES = st.recursive(
    st.one_of(st.none(), st.integers(-2, 200), st.sampled_from(["n", '"n":3', "5"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["n", "max_tokens", "b"]), inner),
)


@given(st.dictionaries(st.sampled_from(["n", "best_of", "max_tokens", "b"]), VALUES), st.sampled_from([None, 1]))
def test_any_body_is_read_as_a_parser_reads_it(fields: dict[str, Any], indent: int | None) -> None:
    def number(name: str) -> float:
        value = fields.get(name)
        try:
            return float(value) if isinstance(value, int | str) else 0.0
        except ValueError:
            return 0.0

    choices = min(max(1, number("n"), number("best_of")), CHOICES_MAX)
    most = number("max_tokens") if number("max_tokens") > 0 else inf
    assert asked(json.dumps(fields, indent=indent).encode(), "chat") == AskedAnswers(1, int(choices), most)


@pytest.mark.parametrize(("api", "made"), [
    ("chat", lambda: b'{"q":[%b1],"n":5,"z":[%b1]}' % ((b"[]," * 300_000,) * 2)),
    ("chat", lambda: b'{%b"n":5}' % b"".join(b'"%d":1,' % each for each in range(300_000))),
    ("chat", lambda: b'{"q":[%b1],"n":5}' % (b'{"n":1},' * 240_000)),
    ("chat", lambda: b'{"q":"%b","n":5}' % (b"\\u006e" * 690_000)),
    ("completion", lambda: b'{"prompt":[%b1],"n":5,"z":[%b1]}' % (b"[1]," * 300_000, b'{"n":0},' * 100_000)),
    ("completion", lambda: b'{"q":"%b","n":5,"z":[%b1]}' % (b"\\u006e " * 4_000_000, b'{"n":0},' * 1_000_000)),
    ("generate", lambda: b'{"sampling_params":{"q":[%b1],"n":5}}' % (b"[]," * 400_000)),
], ids=["brackets", "names", "objects", "escapes", "prompts", "large", "sampling"])  # fmt: skip
def test_no_body_occupies_the_loop_for_long(api: str, made: Callable[[], bytes]) -> None:
    body = made()
    assert least_s(lambda: longest_step_s(asked_answers(body, api))) <= OCCUPIED_S_MAX
