"""One attempt as a line, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.prompts.fingerprint import TokenHasher
from ranvier_py.core.prompts.request_body import PromptReader
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backends import Outcome
from ranvier_py.core.routing.placement import Decision
from ranvier_py.core.routing.request_paths import CHAT_PATH
from ranvier_py.core.routing.request_record import (
    BadRecord,
    Header,
    RequestRecord,
    read_header,
    read_record,
    record_of,
    scheme_mark,
)
from tests.core.routing.recorded import a_record
from tests.core.routing.test_router import make_router
from tests.examples import examples

KEY = b"k" * 32
SECRET = "my darkest secret"
RECORD = a_record(chain=((16, 0xFEDCBA9876543210), (32, 1), (160, 2)), ends=(0, 2), prompt_tokens=170)


def sent_attempt(messages: list[dict[str, str]], tokens: int | None) -> tuple[Attempt, PromptReader, TokenHasher]:
    """An attempt of this chat, each of whose messages has so many tokens; None: nobody has tokenized them."""
    router = make_router(1)
    prompt = router.read(CHAT_PATH, json.dumps({"messages": messages, "model": "m", "user": SECRET}).encode())
    if tokens is not None:
        root = prompt.end.root()
        assert root.state is not None
        ids = np.arange(tokens * len(messages), dtype=np.uint32)
        ends = [tokens * (at + 1) for at in range(len(messages))]
        router.absorb(prompt, root, router.hasher.extend(root.state, ids, ends))
    (target,) = router.registry
    decision = Decision(target.id, "a", "warm", "affinity", 16, prompt.tokens, "text", (), (target.id,), (0,))
    attempt = Attempt(prompt, decision, target, 0, 0, (), 10.0)
    attempt.first_at, attempt.reply.status = 10.5, 200
    return attempt, router.reader, router.hasher


CHAT = [{"role": "system", "content": SECRET}, {"role": "user", "content": SECRET}]


def test_an_attempt_is_its_prefix_keys_sizes_decision_and_outcome() -> None:
    attempt, _, _ = sent_attempt(CHAT, 100)
    record = record_of(attempt, Outcome.SUCCESS, 12.0, 4.0, None, Answer(prompt_tokens=203, cached_tokens=96))
    assert [tokens for tokens, _ in record.chain] == [16, 32, 64, 96, 128, 192]
    assert record.ends == (3, 5)
    assert (record.at, record.first_token_s, record.total_s) == (6.0, 0.5, 2.0)
    assert (record.prompt_tokens, record.cached_tokens, record.answer_tokens) == (203, 96, 0)
    assert (record.backend, record.policy, record.reason, record.model) == ("a", "affinity", "warm", "m")
    assert record.served


def test_a_record_names_the_client_and_the_digest_of_the_session_and_older_lines_have_neither() -> None:
    attempt, _, _ = sent_attempt(CHAT, 100)
    attempt.prompt.client, attempt.prompt.session = "codex", 0xABC
    record = record_of(attempt, Outcome.SUCCESS, 12.0, 4.0)
    assert (record.client, record.session) == ("codex", "0000000000000abc")
    fields = orjson.loads(record.line())
    assert read_record(fields) == record
    del fields["client"], fields["session"]
    assert read_record(fields) == replace(record, client="", session="")


def test_an_answer_extends_the_prefix_keys_of_its_prompt() -> None:
    attempt, reader, hasher = sent_attempt(CHAT, 100)
    before = record_of(attempt, Outcome.SUCCESS, 12.0, 4.0)
    end = reader.extend(attempt.prompt.end, {"role": "assistant", "content": SECRET})
    assert attempt.prompt.end.state is not None
    end.tokenized(hasher.extend(attempt.prompt.end.state, np.arange(60, dtype=np.uint32), [60])[0])
    record = record_of(attempt, Outcome.SUCCESS, 12.0, 4.0, end)
    assert record.chain[: len(before.chain)] == before.chain
    assert record.chain[-1][0] == 256
    assert record.answer_tokens == 60


def test_what_was_never_tokenized_has_no_chain() -> None:
    attempt, _, _ = sent_attempt(CHAT, None)
    record = record_of(attempt, Outcome.SUCCESS, 12.0, 4.0)
    assert (record.chain, record.ends) == ((), ())
    assert record.prompt_tokens == attempt.prompt.end.length > 0


def test_a_line_holds_no_text_no_field_and_no_key() -> None:
    attempt, reader, _ = sent_attempt(CHAT, 100)
    end = reader.extend(attempt.prompt.end, {"role": "assistant", "content": SECRET})
    answer = Answer({"role": "assistant", "content": SECRET}, SECRET, 203, 0, 9)
    line = record_of(attempt, Outcome.SUCCESS, 12.0, 4.0, end, answer).line()
    assert SECRET.encode() not in line
    assert KEY not in line
    assert str(attempt.prompt.end.text).encode() not in line
    assert set(orjson.loads(line)) == set(RequestRecord.__slots__)


@pytest.mark.parametrize("model", ["x" * 9999, "half \ud800 a pair"])
def test_whatever_a_client_calls_a_model_becomes_a_line(model: str) -> None:
    attempt, _, _ = sent_attempt(CHAT, 100)
    attempt.prompt.model = model
    record = record_of(attempt, Outcome.SUCCESS, 12.0, 4.0)
    assert len(record.line()) < 2000
    assert read_record(orjson.loads(record.line())) == record


def test_only_what_an_engine_worked_for_counts_as_served() -> None:
    assert RECORD.served
    assert not replace(RECORD, first_token_s=None, outcome="connect_error", status=0).served
    assert not replace(RECORD, first_token_s=None, status=404).served
    assert replace(RECORD, outcome="cancelled").served


def test_a_scheme_has_a_name_that_depends_on_key_and_identity() -> None:
    marks = {scheme_mark(identity, key) for identity in ("a", "b") for key in (KEY, b"l" * 32)}
    assert len(marks) == 4


CHAIN = st.lists(
    st.tuples(st.integers(1, 1 << 30), st.integers(1, (1 << 64) - 1)), max_size=8, unique_by=lambda key: key[0]
).map(lambda chain: tuple(sorted(chain)))


@settings(max_examples=examples(100))
@given(CHAIN, st.data())
def test_a_line_reads_back(chain: tuple[tuple[int, int], ...], data: st.DataObject) -> None:
    ends = data.draw(st.sets(st.integers(0, max(0, len(chain) - 1)))) if chain else set()
    record = replace(RECORD, chain=chain, ends=tuple(sorted(ends)), cached_tokens=data.draw(st.none() | st.integers(0)))
    if record.cached_tokens is not None and record.cached_tokens > 1 << 53:
        record = replace(record, cached_tokens=5)
    assert read_record(orjson.loads(record.line())) == record


def test_a_header_reads_back() -> None:
    header = Header(1795240216.5, 16, "00ff")
    assert read_header(orjson.loads(header.line())) == header


@pytest.mark.parametrize(
    ("change", "states"),
    [
        ({"chain": None}, "found no chain"),
        ({"chain": [[16, "zz"]]}, "found the prefix key"),
        ({"chain": [[16, "00ff00ff00ff00ff"], [16, "00ff00ff00ff00ff"]]}, "ascending"),
        ({"chain": [[16, "0000000000000000"]], "ends": []}, "found the prefix key"),
        ({"chain": [[16]]}, "found the prefix key"),
        ({"chain": [[True, "00ff00ff00ff00ff"]]}, "found the prefix key"),
        ({"ends": [7]}, "found ends that are no places"),
        ({"ends": [2, 0]}, "found ends out of order"),
        ({"outcome": "fine"}, "found outcome 'fine'"),
        ({"kind": []}, "and kind '[]'"),
        ({"model": None}, "found model None, expected a text"),
        ({"prompt_tokens": -1}, "found prompt_tokens -1, expected a whole number"),
        ({"prompt_tokens": 1.5}, "found prompt_tokens 1.5"),
        ({"at": "soon"}, "found at 'soon', expected seconds"),
        ({"total_s": -1}, "found total_s -1"),
        ({"cached_tokens": "all"}, "found cached_tokens 'all'"),
        ({"client": 5}, "found client 5"),
        ({"session": "mine"}, "found session 'mine'"),
    ],
)
def test_what_is_no_record_is_refused(change: dict[str, Any], states: str) -> None:
    with pytest.raises(BadRecord) as caught:
        read_record({**orjson.loads(RECORD.line()), **change})
    assert states in str(caught.value)


@pytest.mark.parametrize("change", [{"ranvier_recording": 2}, {"scheme": 5}, {"started": None}, {"block_tokens": 0}])
def test_what_is_no_header_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadRecord):
        read_header({**orjson.loads(Header(1.0, 16, "a").line()), **change})
