"""What a request is expected to take, and what its answer shows that it took."""

from __future__ import annotations

from random import Random

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.access.limit_values import ModelCost
from ranvier_py.core.access.limits.asked_answers import LENGTHS, ONE_ANSWER, SAMPLING, AskedAnswers, asked_answers
from ranvier_py.core.access.limits.estimates import ANSWER_TOKENS, Estimates, Percentile, Took, took_of, usual_need
from ranvier_py.core.access.limits.meters import Amounts
from ranvier_py.core.answers.answer_ends import ENDS_BYTES, AnswerEnds
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.outer_values import finished
from ranvier_py.core.prompts.prompt import Boundary, Prompt

COST = ModelCost(input=1.0, cached_input=0.1, cache_write=1.25, output=4.0, reasoning=5.0)


def prompt(body: bytes, tokens: int, kind: str = "chat") -> Prompt:
    end = Boundary(None, Fingerprint(0), tokens)
    return Prompt(kind=kind, model="m", stream=False, end=end, base=end, tail=(), body=body)


def estimated(body: dict, tokens: int = 100, kind: str = "chat", **more: float) -> Amounts:
    raw = orjson.dumps(body)
    asked = finished(asked_answers(raw, kind))
    made = Estimates()
    return made.of(prompt(raw, tokens, kind), raw, made.tenant("acme"), more.get("cached", 0), COST, asked).need


def ends_of(*pieces: bytes) -> AnswerEnds:
    ends = AnswerEnds()
    for piece in pieces:
        ends.add(piece)
    return ends


@pytest.mark.parametrize(("name", "kind"), [(name, api) for api, names in LENGTHS.items() for name in names])
def test_an_answer_counts_no_more_than_its_request_allows(name: str, kind: str) -> None:
    def asks(most: int) -> dict:
        return {SAMPLING: {name: most}} if kind == "generate" else {name: most}

    assert estimated(asks(20), kind=kind).tokens == 120
    assert estimated(asks(10_000), kind=kind).tokens == 100 + ANSWER_TOKENS
    assert estimated({}).tokens == 100 + ANSWER_TOKENS


def test_each_choice_and_each_prompt_has_an_answer() -> None:
    assert estimated({"n": 3, "max_tokens": 20}).tokens == 160
    body = {"prompt": ["abcd" * 10, "abcd" * 10], "n": 2, "max_tokens": 20}
    assert estimated(body, kind="completion").tokens == len(orjson.dumps(body)) / 4 + 80
    assert estimated({"prompt": [1, 2, 3], "max_tokens": 20}, 3, kind="completion").tokens == 23


def test_a_member_within_a_tool_is_no_number_of_choices() -> None:
    tools = [{"function": {"parameters": {"n": 90}}}]
    assert estimated({"tools": tools, "max_tokens": 20}).tokens == 120


def test_cached_tokens_cost_less_and_do_not_count_as_uncached() -> None:
    assert estimated({"max_tokens": 10}, cached=60) == Amounts(110, 50, 40 * 1.0 + 60 * 0.1 + 10 * 4.0)


def test_each_kind_of_token_costs_its_own() -> None:
    estimates = Estimates()
    estimate = estimates.of(prompt(b"{}", 100), b"{}", estimates.tenant("acme"), 0, COST, ONE_ANSWER)
    took = estimates.took(estimate, Took(prompt=45, cached=30, written=5, output=12, reasoning=7), "m")
    assert took == Amounts(57, 27, 10 * 1.0 + 30 * 0.1 + 5 * 1.25 + 5 * 4.0 + 7 * 5.0)


def test_answers_count_what_their_tenants_have_on_average_and_how_much_those_vary() -> None:
    estimates, rng = Estimates(), Random(1)
    first = estimates.of(prompt(b"{}", 100), b"{}", estimates.tenant("acme"), 0, None, ONE_ANSWER)
    for _ in range(500):
        estimates.took(first, Took(100, 0, 0, rng.randint(1, 1000), 0), "m")
    found = estimates.of(prompt(b"{}", 100), b"{}", estimates.tenant("acme"), 0, None, ONE_ANSWER)
    assert 100 + 450 <= found.need.tokens <= 100 + 550
    assert 250**2 <= found.excess.variance <= 330**2  # of 289
    short = b'{"max_tokens":600}'
    bounded = estimates.of(prompt(short, 100), short, estimates.tenant("acme"), 0, None, AskedAnswers(most=600))
    assert bounded.excess.most < 150
    several = b'{"n":4}'
    four = estimates.of(prompt(several, 100), several, estimates.tenant("acme"), 0, None, AskedAnswers(1, 4))
    assert four.need.tokens - 100 == 4 * (found.need.tokens - 100)
    assert four.excess.variance == 4 * found.excess.variance
    others = estimates.of(prompt(b"{}", 100), b"{}", estimates.tenant("others"), 0, None, ONE_ANSWER)
    assert others.need.tokens == 100 + ANSWER_TOKENS


@pytest.mark.parametrize(("kind", "body"), [("chat", b"{}"), ("opaque", b"{}"), ("chat", b'{"image_url":""}')])
def test_what_most_requests_need_equals_the_need_of_their_estimates(kind: str, body: bytes) -> None:
    estimates, lengths, one = Estimates(), Estimates().tenant("acme"), prompt(body, 100, kind)
    need = usual_need(one, body, lengths)
    assert need == (None if kind == "opaque" or b"image" in body else Amounts(1124.0, 1124.0))
    assert need in (None, estimates.of(one, body, lengths, 0, None, ONE_ANSWER).need)


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=200))
def test_the_ninetieth_percentile_is_above_nine_in_ten_and_at_most_a_quarter_too_high(lengths: list[int]) -> None:
    percentile = Percentile(1.0)
    for length in lengths:
        percentile.add(length)
    exact = sorted(lengths)[-1 - len(lengths) // 10]
    assert exact < percentile.p90 <= max(1.25 * exact, exact + 1)


def test_media_count_what_those_of_their_model_took_and_not_their_bytes() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 90_000}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, image]}], "max_tokens": 10}
    raw, estimates, asked = orjson.dumps(body), Estimates(), AskedAnswers(most=10)
    found = estimates.of(prompt(raw, 250_000), raw, estimates.tenant("acme"), 0, None, asked)
    assert found.need.tokens < 1200
    for _ in range(40):
        found = estimates.of(prompt(raw, 250_000), raw, estimates.tenant("acme"), 0, None, asked)
        estimates.took(found, Took(330, 0, 0, 5, 0), "m")
    assert 280 < found.prompt < 380


def test_media_that_are_named_count_as_well() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    body = {"messages": [{"role": "user", "content": [image, image]}], "max_tokens": 10}
    assert 2 * 1024 < estimated(body, 40).tokens < 2 * 1024 + 100


def test_a_body_that_is_not_read_counts_what_nine_in_ten_of_its_tenant_took() -> None:
    estimates, body = Estimates(), b"\x1f\x8b" + bytes(9000)
    tenant = estimates.tenant("acme")
    for _ in range(50):
        found = estimates.of(prompt(body, 0, "opaque"), body, tenant, 0, None, ONE_ANSWER, is_text=False)
        estimates.took(found, Took(500, 0, 0, 5, 0), "m")
    found = estimates.of(prompt(body, 0, "opaque"), body, tenant, 0, None, ONE_ANSWER, is_text=False)
    assert 500 <= found.prompt <= 610


def test_a_text_that_is_not_read_counts_by_its_bytes_whatever_its_tenant_sent_before() -> None:
    """Else who sends many small ones first may send as many large ones at once as he likes."""
    estimates, small = Estimates(), orjson.dumps({"input": "hi"})
    tenant = estimates.tenant("acme")
    for _ in range(50):
        found = estimates.of(prompt(small, 0, "opaque"), small, tenant, 0, None, None)
        estimates.took(found, Took(1, 0, 0, 0, 0), "m")
    large = orjson.dumps({"input": ["word " * 4000] * 10})
    found = estimates.of(prompt(large, 0, "opaque"), large, tenant, 0, None, None)
    assert found.need.tokens == len(large) / 4


OPENAI = (
    b'{"choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens":50,"total_tokens":62,"completion_tokens":12,'
    b'"prompt_tokens_details":{"cached_tokens":32},"completion_tokens_details":{"reasoning_tokens":7}}}'
)
CLAUDE_USAGE = b'{"input_tokens":10,"cache_creation_input_tokens":5,"cache_read_input_tokens":30,"output_tokens":1}'
CLAUDE = (
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":%b}}\n\n' % CLAUDE_USAGE,
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}\n\n'
    * 9,
    b'event: message_delta\ndata: {"type":"message_delta","delta":{},"usage":{"output_tokens":12}}\n\n',
)


@pytest.mark.parametrize(
    ("api", "pieces", "took"),
    [
        ("chat", [OPENAI], Took(50, 32, 0, 12, 7)),
        ("chat", [b"data: {}\n\n"] * 3 + [b"data: " + OPENAI + b"\n\n", b"data: [DONE]\n\n"], Took(50, 32, 0, 12, 7)),
        ("completion", [OPENAI[:99], OPENAI[99:]], Took(50, 32, 0, 12, 7)),
        ("messages", CLAUDE, Took(45, 30, 5, 12, 0)),
        ("messages", CLAUDE[:2], Took(45, 30, 5, 10, 0)),
        (
            "responses",
            [b'{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},"output_tokens":3}}'],
            Took(9, 4, 0, 3, 0),
        ),
        ("", [b'{"data":[{"embedding":[0.1]}],"usage":{"prompt_tokens":8,"total_tokens":8}}'], Took(8, 0, 0, 0, 0)),
        ("chat", [b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'] * 5, Took(None, 0, 0, 5, 0)),
        ("chat", [b'{"choices":[{"message":{"content":"' + b"abcd" * 10 + b'"}}]}'], Took(None, 0, 0, 20, 0)),
    ],
)
def test_an_answer_shows_what_it_took_by_the_engines_counts_or_else_by_its_events(
    api: str, pieces: list[bytes], took: Took
) -> None:
    assert took_of(ends_of(*pieces), api) == took


@given(st.lists(st.binary(max_size=3 * ENDS_BYTES), max_size=6))
def test_the_ends_of_an_answer_do_not_depend_on_how_it_is_cut(pieces: list[bytes]) -> None:
    ends, whole = ends_of(*pieces), b"".join(pieces)
    assert (ends.begin, ends.end, ends.size) == (whole[:ENDS_BYTES], whole[-ENDS_BYTES:], len(whole))


@given(
    st.lists(st.binary(max_size=3 * ENDS_BYTES), max_size=4), st.lists(st.binary(max_size=3 * ENDS_BYTES), max_size=6)
)
def test_the_ends_are_the_same_where_others_keep_the_first_part(first: list[bytes], then: list[bytes]) -> None:
    captured = bytearray()
    ends, whole = AnswerEnds(captured), b"".join((*first, *then))
    for piece in first:
        captured += piece
    for piece in then:
        ends.add(piece)
    assert (ends.begin, ends.end, ends.size) == (whole[:ENDS_BYTES], whole[-ENDS_BYTES:], len(whole))
