"""Where the frames of a WebSocket end, however their bytes are cut."""

from __future__ import annotations

from struct import pack

from hypothesis import given
from hypothesis import strategies as st
from wsproto.frame_protocol import CloseReason, FrameProtocol

from ranvier_py.core.answers.websocket_frames import POLICY_VIOLATION, REASON_BYTES_MAX, WebSocketFrames, close_frame

SIZES = st.sampled_from([0, 1, 2, 125, 126, 127, 300, 65_535, 65_536, 70_000])
FRAMES = st.lists(st.tuples(st.sampled_from([0x1, 0x2, 0x81, 0x80, 0x89, 0x8A]), SIZES, st.booleans()), max_size=6)


def frame(first: int, size: int, masked: bool) -> bytes:
    mask = 0x80 * masked
    short = size if size < 126 else 126 if size < 1 << 16 else 127
    more = b"" if size < 126 else pack("!H", size) if size < 1 << 16 else pack("!Q", size)
    return bytes((first, mask | short)) + more + b"mask" * masked + b"\x88" * size


@given(FRAMES, st.lists(st.integers(1, 90_000), min_size=1), st.data())
def test_frames_end_where_they_do_however_they_are_cut(
    parts: list[tuple[int, int, bool]], cuts: list[int], data: st.DataObject
) -> None:
    made, at, frames = [frame(*part) for part in parts], 0, WebSocketFrames()
    whole = b"".join(made)
    ends = {sum(map(len, made[:count])) for count in range(len(made) + 1)}
    while at < len(whole):
        piece = whole[at : at + data.draw(st.sampled_from(cuts))]
        is_mid, end = not frames.is_between, min((each for each in ends if each > at), default=at)
        if is_mid and data.draw(st.booleans()):
            taken = frames.feed(piece, to_the_end=True)
            assert taken == min(len(piece), end - at)
        else:
            taken = frames.feed(piece)
            assert taken == len(piece)
        at += taken
        assert frames.is_between is (at in ends)
    assert not frames.has_closed


@given(SIZES, st.booleans())
def test_a_close_frame_is_seen_behind_others(size: int, masked: bool) -> None:
    frames = WebSocketFrames()
    frames.feed(frame(0x81, size, masked))
    assert not frames.has_closed
    frames.feed(frame(0x88, 2, masked)[:1])
    frames.feed(frame(0x88, 2, masked)[1:])
    assert frames.has_closed


@given(st.text())
def test_our_own_close_frame_is_one(reason: str) -> None:
    protocol = FrameProtocol(client=True, extensions=[])
    protocol.receive_bytes(close_frame(POLICY_VIOLATION, reason))
    if len(reason.encode()) > REASON_BYTES_MAX:
        return
    (found,) = protocol.received_frames()
    assert found.payload == (CloseReason.POLICY_VIOLATION, reason)
