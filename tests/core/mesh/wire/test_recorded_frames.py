"""What earlier versions sent is read today, and what is sent to their nodes is written as they wrote it."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.peers.snapshot_transfer import PART_FIELDS, SNAPSHOTS
from ranvier_py.core.mesh.transfer import TransferPart
from ranvier_py.core.mesh.wire import messages as m
from ranvier_py.core.mesh.wire.columns import packed, unpacked
from ranvier_py.core.mesh.wire.frame import SPOKEN, BadFrame, pack
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.routing.peers.route_messages import ROWS_FIELDS, TABLES
from tests.core.mesh.wire.recorded_frames import Frame, frames_of, opener
from tests.core.mesh.wire.wire_samples import STRATEGIES, messages
from tests.examples import examples

PREVIOUS = SPOKEN[0]
FRAMES = frames_of(PREVIOUS)
CONTACT = ("Hello", "Echo")  # which say what their senders speak, whoever reads it
KIND_OF = {kind.make.__name__: kind for kind in CODEC.kinds}
OLD = [kind for kind in CODEC.kinds if kind.since <= PREVIOUS]


def fields(body: bytes) -> list[Any]:
    return list(msgpack.unpackb(body))


def body_of(frame: Frame) -> tuple[int, bytes]:
    opened = opener().open(frame.packet, frame.plane)
    assert opened.version == PREVIOUS
    return opened.kind, opened.body


def test_frames_of_every_kind_of_the_previous_version_are_kept() -> None:
    assert {frame.message for frame in FRAMES} == {kind.make.__name__ for kind in OLD}


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.message)
def test_a_frame_of_the_previous_version_is_read_and_would_be_written_so_again(frame: Frame) -> None:
    number, body = body_of(frame)
    message = CODEC.decode(number, body, PREVIOUS)
    assert type(message).__name__ == frame.message
    again, written = CODEC.encode(message, PREVIOUS)
    assert again == number
    if frame.message in CONTACT:
        required = sum(not field.since for field in KIND_OF[frame.message].fields)
        assert fields(written)[:required] == fields(body)[:required]
        assert len(fields(written)) >= len(fields(body)) - 1, "the padding is no field"
    else:
        assert written == body


def test_what_a_transfer_carried_is_read_and_would_be_written_so_again() -> None:
    """A part has a layout of its own: of a table's rows, or of a snapshot's blocks."""
    layouts = {TABLES.what: ROWS_FIELDS, SNAPSHOTS.what: PART_FIELDS}
    parts = [CODEC.decode(*body_of(frame), PREVIOUS) for frame in FRAMES if frame.message == TransferPart.__name__]
    read = [(layouts[part.what], part.data) for part in parts if part.data[0] & 0xF0 == 0x90]
    assert {id(layout) for layout, _ in read} == {id(layout) for layout in layouts.values()}
    for layout, data in read:
        values = unpacked(layout, data)
        assert packed(layout, values) == data
        assert unpacked(layout, pack(*fields(data), 5, "more")) == values, "a later version may add to it"


@settings(max_examples=examples(300))
@given(messages)
def test_what_is_sent_to_a_node_of_the_previous_version_has_the_fields_that_it_reads(message: m.Message) -> None:
    """As many as it needs, each of the type that it checks; it passes over what stands behind them."""
    if not CODEC.speaks(message, PREVIOUS):
        return
    kind = KIND_OF[type(message).__name__]
    number, body = CODEC.encode(message, PREVIOUS)
    kept = next(fields(body_of(frame)[1]) for frame in FRAMES if frame.message == kind.make.__name__)
    written = fields(body)
    required = sum(not field.since for field in kind.fields)
    assert number == kind.number
    assert [type(field) for field in written[:required]] == [type(field) for field in kept[:required]]


@pytest.mark.parametrize("make", STRATEGIES, ids=lambda make: make.__name__)
def test_the_two_versions_of_a_message_mean_the_same_but_for_what_the_later_added(make: type) -> None:
    kind = KIND_OF[make.__name__]
    if kind.since > PREVIOUS:
        pytest.skip("the previous version has no such message")

    @settings(max_examples=examples(20))
    @given(STRATEGIES[make])
    def same(message: m.Message) -> None:
        for version in SPOKEN:
            written = [member for member, field in zip(message, kind.fields, strict=True) if field.since <= version]
            assert CODEC.decode(*CODEC.encode(message, version), version) == make(*written)

    same()


@settings(max_examples=examples(200))
@given(messages, st.lists(st.integers(0, 2**64 - 1) | st.text(max_size=9) | st.binary(max_size=40), max_size=3))
def test_a_message_that_a_later_version_has_lengthened_is_read_as_before(message: m.Message, more: list[Any]) -> None:
    number, body = CODEC.encode(message)
    known = len(KIND_OF[type(message).__name__].fields)
    longer = fields(body)[:known] + more
    if len(longer) > 15:
        return
    assert CODEC.decode(number, msgpack.packb(longer)) == message


@settings(max_examples=examples(200))
@given(messages, st.data())
def test_a_message_without_what_a_version_added_has_the_defaults_and_a_shorter_one_is_refused(
    message: m.Message, data: st.DataObject
) -> None:
    number, body = CODEC.encode(message)
    kind = KIND_OF[type(message).__name__]
    required = sum(not field.since for field in kind.fields)
    length = data.draw(st.integers(0, len(kind.fields)))
    shorter = msgpack.packb(fields(body)[:length])
    if length < required:
        with pytest.raises(BadFrame):
            CODEC.decode(number, shorter)
    else:
        read = CODEC.decode(number, shorter)
        assert read == kind.make(*message[:length])


@settings(max_examples=examples(100))
@given(st.integers(0, 255).filter(lambda number: number not in CODEC.topic_of), st.binary(max_size=60))
def test_an_unknown_kind_is_refused_in_every_version_whatever_it_holds(number: int, body: bytes) -> None:
    for version in SPOKEN:
        with pytest.raises(BadFrame):
            CODEC.decode(number, body, version)


def test_the_previous_version_knows_no_kind_that_was_added_since() -> None:
    for kind in CODEC.kinds:
        if kind.since > PREVIOUS:
            with pytest.raises(BadFrame):
                CODEC.decode(kind.number, b"\x90" + bytes(10), PREVIOUS)
            assert kind not in OLD
