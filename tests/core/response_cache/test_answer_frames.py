"""Stored answers as bytes: they come back as they were, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.response_cache.answer_frames import DIGEST_BYTES, VERSION, decoded, digest_of, encoded
from ranvier_py.core.response_cache.stored_answers import StoredAnswer

KEY, MOST = b"k" * 32, 1 << 20
WHOLE = StoredAnswer("chat", "m", b"tenant", b"application/json", b'{"a":1}', b"", False, 100.0, (7, 3))
STREAM = WHOLE._replace(stream=True, content_type=b"text/event-stream; charset=utf-8", body=b"1\r\nx\r\n", counts=b"y")


@pytest.mark.parametrize("answer", [WHOLE, STREAM, WHOLE._replace(model="\ud800", tokens=(1 << 80, 0))])
def test_an_answer_comes_back_from_its_bytes_with_its_age(answer: StoredAnswer) -> None:
    found = decoded(KEY, encoded(KEY, answer, now=130.0), now=1000.0, bytes_max=MOST)
    assert found == answer._replace(stored_at=970.0, tokens=(min(answer.tokens[0], 1 << 53), answer.tokens[1]))


def test_bytes_that_were_cut_changed_moved_or_are_too_many_are_no_answer() -> None:
    data = encoded(KEY, STREAM, 100.0)
    for place in range(len(data)):
        assert decoded(KEY, data[:place], 0.0, MOST) is None
        assert decoded(KEY, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], 0.0, MOST) is None
    assert decoded(b"j" * 32, data, 0.0, MOST) is None
    assert decoded(KEY, data, 0.0, len(data)) is not None
    assert decoded(KEY, data, 0.0, len(data) - 1) is None


@given(st.binary(max_size=200))
def test_no_garbage_is_taken_for_an_answer_however_well_it_is_sealed(payload: bytes) -> None:
    assert decoded(KEY, payload, 0.0, MOST) is None
    sealed = VERSION + digest_of(KEY, payload) + payload
    assert len(sealed) == 1 + DIGEST_BYTES + len(payload)
    assert decoded(KEY, sealed, 0.0, MOST) is None


@pytest.mark.parametrize(
    "bad",
    [
        {"content_type": b"application/json\r\nset-cookie: a=b"},
        {"content_type": b"text/html"},
        {"stream": True},
        {"api": "other"},
        {"tokens": (-1, 0)},
        {"tokens": (1.5, 0)},
        {"body": "text"},
        {"stored_at": float("-inf")},
    ],
)
def test_fields_of_another_kind_make_no_answer(bad: dict[str, object]) -> None:
    assert decoded(KEY, encoded(KEY, WHOLE._replace(**bad), 100.0), 0.0, MOST) is None  # type: ignore[arg-type]
