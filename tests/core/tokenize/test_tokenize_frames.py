"""Jobs and results survive their way as bytes; whatever else comes back is BadResults."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.answers.answer_stream import NOTHING, Answer
from ranvier_py.core.engine_cache.sources.push_keys import KeyedPrefix
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import MediaState, Segment, TokenState
from ranvier_py.core.tokenize.tokenize_frames import (
    FRAME_BYTES_MAX,
    FRAME_HEAD,
    BadResults,
    decode_jobs,
    decode_results,
    decode_start,
    encode_jobs,
    encode_results,
    encode_start,
    frame_length,
)
from ranvier_py.core.tokenize.tokenize_job import Status, TokenizeJob, TokenizeResult, TokenizerFacts
from ranvier_py.core.tokenize.tokenizer_probe import ProbeTokens

U64 = st.integers(0, 2**64 - 1)
TOKENS = st.integers(0, 2**32 - 1)
DEPTHS = st.integers(0, 2**32)
STATES = st.builds(
    lambda kind, *parts: kind(*parts),
    st.sampled_from((TokenState, MediaState)),
    DEPTHS,
    U64,
    st.lists(TOKENS, max_size=15).map(tuple),
    U64,
)
PAIRS = st.tuples(DEPTHS, U64.map(Fingerprint))
SEGMENTS = st.builds(Segment, st.lists(PAIRS, max_size=5).map(tuple), PAIRS, STATES)
JOBS = st.builds(
    TokenizeJob,
    st.sampled_from(("chat", "completion")),
    DEPTHS,
    st.integers(0, 10_000),
    STATES,
    U64,
    st.none() | st.binary(max_size=50),
    st.binary(max_size=50),
    st.none() | st.binary(max_size=50),
    st.booleans(),
    st.booleans(),
)
COUNTS = st.none() | st.integers(0, 2**40)
MESSAGES = st.none() | st.builds(lambda text: {"role": "assistant", "content": text}, st.text())
RESULTS = st.builds(
    TokenizeResult,
    st.sampled_from(Status),
    st.booleans(),
    st.lists(st.none() | SEGMENTS, max_size=4),
    st.just(NOTHING) | st.builds(Answer, MESSAGES, st.just(""), COUNTS, COUNTS, COUNTS),
)
KEYED = st.builds(KeyedPrefix, U64, st.integers(0, 2**256 - 1), U64.map(Fingerprint), DEPTHS)


def body(frame: bytes) -> bytes:
    """What follows the length, which has to be right."""
    assert frame_length(frame[: FRAME_HEAD.size]) == len(frame) - FRAME_HEAD.size
    return frame[FRAME_HEAD.size :]


@given(st.lists(JOBS, max_size=4), st.lists(st.integers(1, 1000), max_size=8))
def test_jobs_arrive_as_they_left(jobs: list[TokenizeJob], lengths: list[int]) -> None:
    found, wanted = decode_jobs(body(encode_jobs(jobs, lengths)))
    assert (found, wanted) == (jobs, tuple(lengths))
    assert [type(job.state) for job in found] == [type(job.state) for job in jobs]


@given(st.lists(RESULTS, max_size=4), st.lists(KEYED, max_size=4), st.floats(0, 1e6))
def test_results_arrive_as_they_left(results: list[TokenizeResult], keyed: list[KeyedPrefix], busy_s: float) -> None:
    reply = decode_results(body(encode_results(results, keyed, busy_s)), len(results))
    assert (reply.keyed, reply.busy_s) == (keyed, busy_s)
    found = [result.read() for result in reply.results]
    assert found == results
    states = [[segment and type(segment.state) for segment in result.segments] for result in found]
    assert states == [[segment and type(segment.state) for segment in result.segments] for result in results]


def test_facts_or_problems_arrive_as_they_left() -> None:
    facts = TokenizerFacts(
        *("identity", True, False, 4.5, "why", True),
        reasoning_moves=True,
        results=(("<tool_response>", "</tool_response>"),),
        probe=ProbeTokens((1, 2), (3,)),
    )
    assert decode_start(body(encode_start(facts, ["slow hub"]))) == ([], ["slow hub"], facts)
    none = encode_start(None, ["slow hub"], ["no such file"])
    assert decode_start(body(none)) == (["no such file"], ["slow hub"], None)


@given(st.data())
def test_no_bytes_raise_anything_but_bad_reply(data: Any) -> None:
    good = body(encode_results(data.draw(st.lists(RESULTS, max_size=2)), data.draw(st.lists(KEYED, max_size=2)), 1.0))
    place = data.draw(st.integers(0, len(good)))
    bad = good[:place] + data.draw(st.binary(max_size=8)) + good[place + data.draw(st.integers(0, 8)) :]
    with suppress(BadResults):
        decode_start(bad)
    for count in (1, 2):
        with suppress(BadResults):
            for result in decode_results(bad, count).results:
                result.read()


def test_a_frame_too_long_to_be_one_is_refused_by_its_head() -> None:
    with pytest.raises(BadResults):
        frame_length(FRAME_HEAD.pack(FRAME_BYTES_MAX + 1))


def test_as_many_results_come_as_jobs_went() -> None:
    with pytest.raises(BadResults):
        decode_results(body(encode_results([TokenizeResult(Status.DONE)], [], 0.0)), 2)
