"""W3C Trace Context: what continues a trace, what begins a new one, and what goes on to engines."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.tracing.trace_context import STATE_CHARACTERS_MAX, parent_in, state_of, trace_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01".encode()


def parent_of(*values: bytes, state: bytes = b""):  # type: ignore[no-untyped-def]
    fields = [(b"traceparent", value) for value in values]
    return parent_in([*fields, (b"tracestate", state)] if state else fields)


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("03", True), ("fe", False), ("ff", True)])
def test_a_parent_is_read_with_its_decision(flags: str, sampled: bool) -> None:
    found = parent_of(f"00-{TRACE}-{SPAN}-{flags}".encode())
    assert found == (TRACE, SPAN, sampled, b"")


@pytest.mark.parametrize("value", [f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like"])
def test_a_later_version_is_read_as_ours(value: str) -> None:
    assert parent_of(value.encode()) == (TRACE, SPAN, True, b"")


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01-",
        f"cc-{TRACE}-{SPAN}-01.what",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0",
        f"00-{TRACE}-{SPAN}-1x",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01",
    ],
)
def test_what_breaks_a_rule_begins_a_new_trace(value: str) -> None:
    assert parent_of(value.encode(), state=b"a=1") is None


def test_two_parents_are_none() -> None:
    assert parent_of(GOOD, GOOD) is None
    assert parent_of(state=b"a=1") is None


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (b"rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", b"rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        (b"a=1 ,\t b=2", b"a=1,b=2"),
        (b"a=1,,b=2", b"a=1,b=2"),
        (b"fw529a3039@dt=FfD,0a@b=x", b"fw529a3039@dt=FfD,0a@b=x"),
        (b"a=1,a=2", b""),
        (b"A=1", b""),
        (b"a", b""),
        (b"a=", b""),
        (b"a=b=c", b""),
        (b"a=\x07", b""),
        (b",".join(b"k%d=1" % each for each in range(33)), b""),
    ],
)
def test_a_state_that_breaks_a_rule_goes_alone(text: bytes, kept: bytes) -> None:
    assert state_of(text) == kept
    found = parent_of(GOOD, state=text)
    assert found is not None
    assert found.state == kept


def test_a_long_state_loses_its_end() -> None:
    members = [b"k%d=%b" % (each, b"x" * 100) for each in range(10)]
    kept = state_of(b",".join(members))
    assert kept == b",".join(members[:4])
    assert len(kept) <= STATE_CHARACTERS_MAX


@given(st.binary(max_size=80), st.binary(max_size=600))
def test_nothing_that_comes_raises(parent: bytes, state: bytes) -> None:
    found = parent_of(parent, state=state)
    assert found is None or (len(found.trace_id), len(found.span_id)) == (32, 16)
    assert len(state_of(state)) <= STATE_CHARACTERS_MAX


def test_a_trace_is_continued_with_the_decision_of_its_parent() -> None:
    for flags, sampled in (("01", True), ("00", False)):
        trace = trace_of(parent_of(f"00-{TRACE}-{SPAN}-{flags}".encode()), 1.0 - sampled, Random(1))
        assert (trace.trace_id, trace.parent_id, trace.is_sampled) == (TRACE, SPAN, sampled)
        assert parent_of(trace.traceparent(1)) == (TRACE, trace.asking(1), sampled, b"")


def test_new_traces_are_sampled_by_their_share_and_their_ids_differ() -> None:
    rng = Random(7)
    traces = [trace_of(None, 0.1, rng) for _ in range(4_000)]
    assert 320 < sum(trace.is_sampled for trace in traces) < 480
    assert len({trace.trace_id for trace in traces} | {trace.span_id for trace in traces}) == 8_000
    one = traces[0]
    assert len({one.span_id, *(each(n) for n in range(1, 20) for each in (one.placing, one.asking))}) == 39
    assert all(len(trace.asking(300)) == 16 for trace in traces)
