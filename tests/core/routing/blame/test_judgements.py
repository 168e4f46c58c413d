"""What error answers show of the backends that gave them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.routing.blame.judgements import (
    PAUSE_MAX_S,
    PAUSE_S,
    Judgement,
    error_words,
    judgement_of,
    retry_after_of,
    seconds_of,
)
from ranvier_py.core.routing.health import Outcome

NOON_S = 1_793_707_200.0  # Tue, 03 Nov 2026 12:00:00 GMT
FULL_BODIES = (
    b'{"object":"error","message":"The request queue is full.","type":"service_unavailable"}',  # SGLang
    b'{"error":{"message":"The request queue is full.","code":503}}',
    b'{"error":{"type":"queue_full","message":"no"}}',
    b'{"error":"Model is overloaded","error_type":"overloaded"}',  # TGI
    b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}',  # Anthropic
    b'{"error":{"message":"Service temporarily unavailable: All workers are busy, please retry later"}}',  # Dynamo
    b'{"error":"Exceeds maximum queue size"}',  # Triton
    b'{"detail":"Too many concurrent requests"}',
    b"Server overloaded, please try again",
    b'{"error":"server busy, please try again.  maximum pending requests exceeded"}',  # Ollama
    b'{"error":{"code":503,"message":"no slot available","type":"unavailable_error"}}',  # llama.cpp
    b"Request dropped due to backpressure (num_queued_requests=10, max_queued_requests=10).",  # Ray Serve
    b"upstream connect error or disconnect/reset before headers. reset reason: overflow",  # Envoy
    b"pending request queue full\n",  # Knative
    b'{"error":{"message":"Maximum number of concurrent requests reached","type":"server_error"}}',
    b'{"detail":"concurrency limit exceeded"}',
    b'{"error":{"message":"Rejected: the waiting queue has reached its limit","type":"ServiceUnavailableError"}}',
    b'{"error":{"message":"Number of waiting requests exceeds the limit of 100"}}',
    b'{"error":{"type":"QueueFullError","message":""}}',
    b'{"error":{"type":"EngineOverloadedError","message":"x"}}',
    b'{"error":{"code":"server_busy"}}',
    b'{"detail":{"error":{"message":"queue is full"}}}',
    b'{"errors":[{"message":"queue is full"}]}',
    b'{"status":"error","reason":"No capacity, try again later"}',
    b'{"error":{"message":"insufficient capacity"}}',
    b'{"error":{"code":503,"message":"This model is currently experiencing high demand.","status":"UNAVAILABLE"}}',
    b'{"error":{"message":"Slow down"}}',
    b'{"error":{"message":"The server is temporarily unable to handle this. Please try again later."}}',
)


def judged(status: int, body: bytes = b"", retry_after: bytes | None = None) -> Judgement:
    return judgement_of(status, body, retry_after, wall_s=NOON_S)


@pytest.mark.parametrize("body", FULL_BODIES)
def test_a_503_that_speaks_of_a_full_queue_asks_everybody_for_a_pause_and_is_no_fault(body: bytes) -> None:
    assert judged(503, body) == Judgement(Outcome.OVERLOADED, PAUSE_S)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"Service Unavailable",
        b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}',  # llama.cpp
        b'{"object":"error","message":"engine is dead","type":"service_unavailable"}',
        b"upstream connect error or disconnect/reset before headers. reset reason: connection failure",  # Envoy
        b"no healthy upstream",
        b'{"error":{"message":"No available workers (all circuits open or unhealthy)"}}',  # sglang-router
        b'{"error":{"message":"The request timed out after 30 s"}}',
        b'{"error":null}',
        b"[" * 5000,
        b"\xff\xfe",
    ],
)
def test_any_other_503_is_a_fault(body: bytes) -> None:
    assert judged(503, body) == Judgement(Outcome.SERVER_ERROR)


def test_a_503_with_retry_after_pauses_for_that_time() -> None:
    assert judged(503, b"", b"7") == Judgement(Outcome.OVERLOADED, 7.0)


@pytest.mark.parametrize(
    ("headers", "pause_s"),
    [
        ([(b"Retry-After", b"7"), (b"retry-after-ms", b"500")], 0.5),
        ([(b"Retry-After-Ms", b" 1500 ")], 1.5),
        ([(b"retry-after-ms", b"soon"), (b"retry-after", b"3")], 3.0),
        ([(b"retry-after-ms", b"soon")], PAUSE_S),
    ],
)
def test_a_pause_may_be_asked_for_in_milliseconds(headers: list[tuple[bytes, bytes]], pause_s: float) -> None:
    assert judged(503, b"", retry_after_of(headers)) == Judgement(Outcome.OVERLOADED, pause_s)


def test_without_either_field_nothing_is_asked_for() -> None:
    assert retry_after_of([(b"content-type", b"text/plain")]) is None


def test_a_429_pauses_for_its_credential_and_a_529_for_everybody() -> None:
    assert judged(429) == Judgement(Outcome.OVERLOADED, PAUSE_S, personal=True)
    assert judged(529, b"", b"3") == Judgement(Outcome.OVERLOADED, 3.0)


@pytest.mark.parametrize("status", [500, 502, 504, 520, 524])
def test_other_statuses_of_illness_stay_faults_whatever_they_bring(status: int) -> None:
    assert judged(status, FULL_BODIES[0], b"7") == Judgement(Outcome.SERVER_ERROR)


@pytest.mark.parametrize(
    ("value", "pause_s"),
    [
        (b"0", PAUSE_S),
        (b"2.5", 2.5),
        (b" 12 ", 12.0),
        (b"86400", PAUSE_MAX_S),
        (b"9" * 40, PAUSE_S),
        (b"-3", PAUSE_S),
        (b"soon", PAUSE_S),
        (b"", PAUSE_S),
        (b"Tue, 03 Nov 2026 12:00:09 GMT", 9.0),
        (b"Tuesday, 03-Nov-26 12:00:09 GMT", 9.0),
        (b"Tue, 03 Nov 2026 11:00:00 GMT", PAUSE_S),
        (b"Wed, 04 Nov 2026 12:00:00 GMT", PAUSE_MAX_S),
        (b"Tue, 99 Nov 2026 12:00:09 GMT", PAUSE_S),
    ],
)
def test_a_pause_is_as_long_as_retry_after_wants_within_bounds(value: bytes, pause_s: float) -> None:
    assert judged(503, b"", value).pause_s == pause_s


@given(st.binary(max_size=80))
def test_no_retry_after_breaks_anything(value: bytes) -> None:
    seconds = seconds_of(value, NOON_S)
    assert seconds is None or seconds >= 0


@given(st.binary(max_size=200))
def test_no_body_breaks_anything(body: bytes) -> None:
    assert error_words(body) == error_words(body).lower().strip()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 422, 501, 505])
def test_a_refusal_asks_for_no_pause(status: int) -> None:
    judgement = judged(status, FULL_BODIES[0], b"7")
    assert (judgement.outcome, judgement.pause_s) == (Outcome.REFUSED, None)


@pytest.mark.parametrize(
    ("status", "body", "is_own"),
    [
        (302, b"", True),
        (308, b"moved", True),
        (401, b"", True),
        (403, b"", True),
        (404, b'{"error":{"message":"The model `m` does not exist."}}', True),
        (404, b'{"detail":"Not Found"}', True),
        (404, b"", False),
        (400, b'{"object":"error","message":"The model `a/b-7b` does not exist.","code":404}', True),
        (422, b'{"detail":"unknown model: m"}', True),
        (400, b'{"error":{"message":"a/b is not a valid model ID","code":400}}', True),  # OpenRouter
        (400, b'{"error":{"code":"unavailable_model","message":"Unavailable model: m"}}', True),  # Azure
        (400, b'{"message":"The provided model identifier is invalid."}', True),  # Bedrock
        (400, '{"message":"Invocation of model ID m with on-demand throughput isn\u2019t supported."}'.encode(), True),
        (400, b'{"error":"Unknown adapter x","error_type":"validation"}', True),  # LoRAX
        (400, b"could not find suitable handler for m", True),  # llama-swap
        (400, b'{"detail":"Model m is unavailable"}', True),
        (400, b'{"error":{"message":"Modell nicht gefunden","param":"model"}}', True),
        (400, b'{"error":{"message":"at most 4 tools","param":"tools"}}', False),
        (
            400,
            b'{"object":"error","message":"Got LoRA adapter that has never been loaded: x","code":400}',
            True,
        ),  # SGLang
        (400, b'{"error":{"message":"The following requested LoRA adapters are not loaded: {\'x\'}"}}', True),
        (400, b'{"error":{"message":"This model does not support images","code":"bad"}}', False),
        (400, b'{"error":{"message":"max_tokens must be at least 1"}}', False),
        (405, b"", False),
        (413, b"too large", False),
    ],
)
def test_keys_and_models_may_be_the_backends_own_fault(status: int, body: bytes, is_own: bool) -> None:
    assert judged(status, body).is_own is is_own


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b'{"error":{"message":"This model\'s maximum context length is 4096 tokens."}}'),
        (
            400,
            b'{"message":"Too many input tokens. Max input tokens: 8192, request input token count: 9000"}',
        ),  # Bedrock
        (400, b'[{"error":{"message":"The input token count (9) exceeds the maximum number of tokens allowed (8)."}}]'),
        (400, b'{"error":{"message":"the input token count is 40000 but model only supports up to 32768."}}'),  # Vertex
        (400, b'{"message":"too many tokens: total number of tokens in the prompt cannot exceed 4081"}'),  # Cohere
        (422, b'{"detail":"max_prompt_len exceeded"}'),
        (400, b'{"error":{"message":"Range of input length should be [1, 30720]"}}'),  # Qwen
        (400, b'{"error":{"message":"Your request exceeded model token limit: 8192"}}'),  # Moonshot
        (400, b'{"error":{"code":"1261","message":"Prompt exceeds max length"}}'),  # Zhipu
        (400, b'{"message":"The input token length is too long: max session len 4096"}'),  # LMDeploy
        (413, b'{"error":{"message":"Request body too large for m. Max size: 8000 tokens."}}'),  # GitHub
        (422, b'{"error":"Sequence length too long"}'),
    ],
)
def test_a_prompt_that_is_too_long_is_known_by_a_measure_and_that_it_is_exceeded(status: int, body: bytes) -> None:
    assert judged(status, body).is_too_long


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"code":500,"message":"the request exceeds the available context size","type":"server_error"}}',
        b'{"error":"the input length exceeds the context length"}',  # Ollama
        b'{"detail":"This model\'s maximum context length is 4096 tokens."}',
    ],
)
def test_a_500_about_the_context_length_blames_nobody_and_one_about_tokens_alone_is_a_fault(body: bytes) -> None:
    assert judged(500, body) == Judgement(Outcome.REFUSED, is_too_long=True)
    assert judged(500, b'{"error":"the request ran into a limit of 8 tokens"}') == Judgement(Outcome.SERVER_ERROR)


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"max_tokens must be at least 1, got -1"}}',
        b'{"error":{"message":"at most 4 stop sequences are allowed in a request"}}',
        b'{"error":{"message":"temperature must be at most 2"}}',
        b'{"error":{"message":"too many images in the request"}}',
        b'{"error":{"message":"logprobs exceed the limit of 20"}}',
    ],
)
def test_limits_of_anything_else_are_not_those_of_a_prompt(body: bytes) -> None:
    assert not judged(400, body).is_too_long


@pytest.mark.parametrize("status", [400, 404, 405, 411, 413, 444, 505, 530])
def test_a_page_is_what_a_proxy_before_one_backend_refuses_with(status: int) -> None:
    for page in (b"<html>", b"\r\n<!DOCTYPE html>", b"<?xml version='1.0'?>", b"<!-- 1 -->"):
        assert judged(status, page).is_own
    assert not judged(status, b'{"error":"<html>"}' if status != 404 else b"").is_own


@pytest.mark.parametrize("status", [407, 426, 511])
def test_who_wants_to_know_the_node_or_another_protocol_refuses_for_itself(status: int) -> None:
    assert judged(status).is_own
