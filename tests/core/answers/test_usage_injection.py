"""The one member that is put into the body of a stream, and of whom it is remembered."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.answers.usage_injection import MEMBER, Terms, UsageAsker
from ranvier_py.core.answers.usage_removal import UsageRemoval
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.body_json import spliced
from ranvier_py.core.prompts.body_members import ABSENT, stream_options
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.prompts.request_body import Prompt
from tests.examples import examples

ASKED = {"include_usage": True}


def prompt(body: bytes, *, stream: bool = True, kind: str = "chat") -> Prompt:
    root, fields = Boundary(None, Fingerprint(0), 0), json.loads(body)
    options = stream_options(fields) if "stream_options" in fields else ABSENT
    return Prompt(kind, "m", stream, root, root, (), body, stream_options=options)


def asking_body(body: bytes) -> bytes | None:
    """What an engine of which nothing is known gets."""
    splice = UsageAsker().splice(prompt(body), body, BackendId(3), 1)
    return None if splice is None else spliced(body, [splice])


PLAIN = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'


def test_a_body_that_does_not_ask_gets_one_member_and_keeps_every_byte() -> None:
    asking = asking_body(PLAIN)
    assert asking is not None
    assert asking.replace(MEMBER, b"", 1) == PLAIN
    assert json.loads(asking) == {**json.loads(PLAIN), "stream_options": ASKED}


@pytest.mark.parametrize(
    "own",
    [
        b'"stream_options":{"include_usage":true}',
        b'"stream_options": {"include_usage" : true, "x": 1}',
        b'"stream_options":{"continuous_usage_stats":true}',
        b'"stream_options":[]',
    ],
)
def test_who_asks_himself_or_asks_for_something_else_is_left_alone(own: bytes) -> None:
    assert asking_body(PLAIN[:-1] + b"," + own + b"}") is None


@pytest.mark.parametrize(
    ("own", "merged"),
    [
        (b'{"stream":true,"stream_options":{}}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
        (b'{"stream_options" : null,"stream":true}', b'{"stream_options" : {"include_usage":true},"stream":true}'),
        (b'{"stream_options":{"a":1}}', b'{"stream_options":{"a":1,"include_usage":true}}'),
        (b'{"stream_options":{"include_usage":false}}', b'{"stream_options":{"include_usage":true}}'),
        (b'{"stream_options":{"a":1,"include_usage": null}}', b'{"stream_options":{"a":1,"include_usage":true}}'),
        (
            b'{"stream_options": {"include_usage":false},"tools":[{"p":{"stream_options":{"type":"object"}}}]}',
            b'{"stream_options": {"include_usage":true},"tools":[{"p":{"stream_options":{"type":"object"}}}]}',
        ),
        (
            b'{"tools":[{"p":{"stream_options":{"type":"object"}}}],"stream_options":{}}',
            b'{"tools":[{"p":{"stream_options":{"type":"object"}}}],"stream_options":{"include_usage":true}}',
        ),
    ],
)
def test_own_options_are_merged_where_they_are(own: bytes, merged: bytes) -> None:
    assert asking_body(own) == merged


names = st.sampled_from(["stream_options", "include_usage", "a"])
values = st.recursive(
    st.none() | st.booleans() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
bodies = st.dictionaries(st.sampled_from(["stream_options", "messages", "tools"]), values, max_size=3)


@settings(max_examples=examples(300))
@given(bodies, st.sampled_from([None, 1]))
def test_whatever_is_sent_means_the_same_but_for_the_question(fields: dict[str, Any], indent: int | None) -> None:
    body = json.dumps({"stream": True, **fields}, indent=indent).encode()
    asking = asking_body(body)
    if asking is not None:
        sent = json.loads(asking)
        options = sent["stream_options"]
        assert options.pop("include_usage") is True
        before = fields.get("stream_options")
        assert options == {k: v for k, v in (before or {}).items() if k != "include_usage"}
        assert {**sent, "stream_options": before} == {"stream": True, "stream_options": before, **fields}


def test_only_streams_are_asked_and_only_where_it_is_wanted() -> None:
    asking = UsageAsker()
    backend = BackendId(3)
    assert asking.splice(prompt(PLAIN, stream=False), PLAIN, backend, 1) is None
    assert asking.splice(prompt(PLAIN, kind="opaque"), PLAIN, backend, 1) is None
    assert UsageAsker(enabled=False).splice(prompt(PLAIN), PLAIN, backend, 1) is None
    assert asking.splice(prompt(PLAIN, kind="completion"), PLAIN, backend, 1) is not None


def test_a_backend_that_refuses_is_not_asked_again_until_it_is_another_process() -> None:
    asking = UsageAsker()
    backend, other = BackendId(3), BackendId(4)
    asking.refused(backend, 1, 200)
    assert asking.splice(prompt(PLAIN), PLAIN, backend, 1) is None
    assert asking.splice(prompt(PLAIN), PLAIN, other, 1) is not None
    assert asking.splice(prompt(PLAIN), PLAIN, backend, 2) is not None


def test_a_backend_that_refuses_the_body_itself_is_still_unknown() -> None:
    asking = UsageAsker()
    asking.refused(BackendId(3), 1, 400)
    assert asking.terms(BackendId(3), 1) is Terms.UNKNOWN
    assert asking.counters.refused == 1


@pytest.mark.parametrize("shown", ["counts_anyway", "has_more"])
def test_a_backend_that_reports_unasked_or_writes_more_beside_counts_is_not_asked_again(shown: str) -> None:
    asking = UsageAsker()
    removal = UsageRemoval(keeps_length=False)
    setattr(removal, shown, True)
    asking.answered(removal, BackendId(3), 1)
    assert asking.splice(prompt(PLAIN), PLAIN, BackendId(3), 1) is None
    assert asking.splice(prompt(PLAIN), PLAIN, BackendId(3), 2) is not None
