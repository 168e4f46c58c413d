"""Counts that only we asked for leave no trace in a stream, however it is cut."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ranvier_py.core.answers.answer_reader import HELD_BYTES_MAX
from ranvier_py.core.answers.chunked import unchunked
from tests.core.answers.feeding import (
    COUNTS,
    DONE,
    USAGE,
    chunked,
    cut,
    delta,
    event,
    event_reader,
    removal_of,
    through,
)
from tests.examples import examples

OUTPUT = delta('says "prompt_tokens": 3 and "usage":{} in "choices":[]', usage=None)
EVENTS = [delta("a"), delta("b" * 300), OUTPUT, b": ping\n\n", b'data: not json "prompt_tokens"\n\n', DONE]


streams = st.tuples(
    st.lists(st.sampled_from(EVENTS), max_size=6),
    st.lists(st.sampled_from([delta("z"), DONE]), max_size=2),
    st.lists(st.integers(0, 5000), max_size=12),
    st.lists(st.integers(0, 5000), max_size=12),
)


@settings(max_examples=examples(300))
@given(streams)
@example(([delta("a")], [DONE], [], []))
def test_chunks_and_reads_may_cut_it_anywhere(stream: tuple[list[bytes], list[bytes], list[int], list[int]]) -> None:
    before, after, chunk_cuts, reads = stream
    wire = chunked(cut(b"".join([*before, COUNTS, *after]), chunk_cuts))
    reader = event_reader("chunked")
    out, removal = through(cut(wire, reads), reader), removal_of(reader)
    assert unchunked(b"".join(out)) == b"".join([*before, *after])
    assert removal.removed == 1


@settings(max_examples=examples(200))
@given(streams)
def test_a_body_without_chunks_is_cut_anywhere_too(
    stream: tuple[list[bytes], list[bytes], list[int], list[int]],
) -> None:
    before, after, _, reads = stream
    out = through(cut(b"".join([*before, COUNTS, *after]), reads), event_reader("close"))
    assert b"".join(out) == b"".join([*before, *after])


@settings(max_examples=examples(200))
@given(streams)
def test_what_nobody_asked_for_twice_passes_byte_by_byte_in_its_own_order(
    stream: tuple[list[bytes], list[bytes], list[int], list[int]],
) -> None:
    before, after, chunk_cuts, reads = stream
    wire = chunked(cut(b"".join([b":\n\n", *before, *after]), chunk_cuts))
    reader = event_reader("chunked")
    out, removal = through(cut(wire, reads), reader), removal_of(reader)
    assert unchunked(b"".join(out)) == b"".join([b":\n\n", *before, *after])
    assert removal.removed == 0


def test_pieces_of_whole_events_leave_in_their_own_chunks_at_once() -> None:
    """Else every token would be copied."""
    pieces = [chunked([delta(str(n))])[:-5] for n in range(3)]
    out = through([*pieces, chunked([COUNTS, DONE])], event_reader("chunked"))
    assert all(before is after for before, after in zip(pieces, out, strict=False))
    assert out[3] == chunked([DONE])


def test_a_stream_with_a_length_keeps_it() -> None:
    whole = delta("a") + COUNTS + DONE
    out = through([whole[:50], whole[50:]], event_reader("length"))
    assert len(b"".join(out)) == len(whole)
    assert b"prompt_tokens" not in b"".join(out)
    assert b"".join(out).startswith(delta("a") + b":  ")


def test_lines_may_end_as_the_standard_of_event_streams_allows() -> None:
    for end in (b"\r\n", b"\r"):
        events = [part.replace(b"\n", end) for part in (delta("a"), COUNTS, DONE)]
        for pieces in ([b"".join(events)], [bytes((byte,)) for byte in b"".join(events)]):
            out = through(pieces, event_reader("close"))
            assert b"".join(out) == events[0] + events[2]


OTHER_FORMS = {
    "other fields": b"event: message\nid: 9\nretry: 5\n" + COUNTS,
    "a comment": b": usage\n" + COUNTS,
    "no blank": b"data:" + COUNTS[6:],
    "choices null": COUNTS.replace(b"[]", b"null"),
    "no choices": COUNTS.replace(b'"choices":[],', b""),
    "two lines of data": COUNTS.replace(b'"usage"', b'\ndata: "usage"'),
    "usual members": event({"id": "x", "object": "o", "created": 1, "model": "m", "choices": [], "usage": USAGE}),
    "empty members": event({"choices": [], "usage": USAGE, "kv_transfer_params": None}),
}


@pytest.mark.parametrize("framing", ["chunked", "close", "length"])
@pytest.mark.parametrize("form", OTHER_FORMS)
def test_counts_are_found_by_their_data_alone(form: str, framing: str) -> None:
    before, counts = delta("a"), OTHER_FORMS[form]
    pieces = [before, counts[:-20], counts[-20:], DONE]
    reader = event_reader(framing)
    out, removal = through(pieces if framing != "chunked" else [chunked(pieces)], reader), removal_of(reader)
    left = unchunked(b"".join(out)) if framing == "chunked" else b"".join(out)
    assert left.startswith(before)
    assert b'usage"' not in left
    assert (removal.removed, removal.counts, removal.has_more) == (1, counts, False)
    if framing != "length":
        assert left == before + DONE
    else:
        assert len(left) == sum(map(len, pieces))


@pytest.mark.parametrize("framing", ["chunked", "close", "length"])
def test_what_stands_beside_counts_goes_on_without_them(framing: str) -> None:
    timings = {"prompt_n": 7, "predicted_per_second": 33.3}
    counts = b"id: 9\n" + event({"object": "x", "choices": [], "usage": USAGE, "timings": timings})
    pieces = [delta("a"), counts, DONE]
    reader = event_reader(framing)
    out, removal = through(pieces if framing != "chunked" else [chunked(pieces)], reader), removal_of(reader)
    left = unchunked(b"".join(out)) if framing == "chunked" else b"".join(out)
    rest = b"id: 9\n" + event({"object": "x", "choices": [], "timings": timings})
    if framing == "length":
        rest = rest[:-2].ljust(len(counts) - 2) + b"\n\n"
    assert left == delta("a") + rest + DONE
    assert (removal.removed, removal.counts, removal.has_more) == (1, counts, True)


def test_counts_that_come_with_output_were_not_our_question() -> None:
    """An engine that counts for everybody would lose its last event otherwise."""
    wire = [chunked([delta("a", usage=USAGE)])[:-5], chunked([COUNTS, DONE])]
    reader = event_reader("chunked")
    out, removal = through(wire, reader), removal_of(reader)
    assert b"".join(out) == b"".join(wire)
    assert removal.counts_anyway


def test_an_endless_event_is_not_held() -> None:
    piece = b"data: " + b"x" * HELD_BYTES_MAX + b'"prompt_tokens"'
    reader = event_reader()
    out = reader.feed(piece, complete=False)
    assert out == piece
    assert reader.feed(b"y\n", complete=False) == b"y"
    assert reader.feed(b"\n" + COUNTS + DONE, complete=True) == b"\n\n" + DONE


@pytest.mark.parametrize("piece", [b"\r", b"\n\r", b"\r\n", b"x\r", b'"prompt_tokens"\r'])
def test_an_event_of_nothing_but_line_ends_is_not_held_either(piece: bytes) -> None:
    reader, sent, left = event_reader(), b"data: ", b""
    left += reader.feed(sent, complete=False)
    for _ in range(4):
        sent += piece * HELD_BYTES_MAX
        left += reader.feed(piece * HELD_BYTES_MAX, complete=False)
        assert len(sent) - len(left) <= HELD_BYTES_MAX
    assert left + reader.feed(b"", complete=True) == sent
