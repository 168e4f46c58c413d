"""What engines really sent: read, applied, and mangled."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.gap_values import AskReplay, GapSettings, Level
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.sources.event_frames import BadBatch
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.engine_cache.sources.events import EventDecoder
from tests.core.engine_cache import model
from tests.core.engine_cache.captured import NAMES, block_table, capture
from tests.core.engine_cache.test_event_streams import World
from tests.examples import examples

ENTRIES_MAX = 500


def fed(payloads: list[bytes], decoder: EventDecoder) -> Residency:
    residency = Residency(model.hasher(), model.namespace_of, entries_max=ENTRIES_MAX, orphaned_max=100)
    for payload in payloads:
        try:
            batch = decoder.decode(payload)
        except BadBatch:
            continue
        for event in batch.events:
            residency.apply(event)
        while not residency.settle().complete:
            pass
    return residency


def test_there_are_captures_of_every_kind() -> None:
    assert {name.split("-")[0] for name in NAMES} == {"dynamo", "sglang", "vllm"}
    assert len(NAMES) == 5


@pytest.mark.parametrize("name", NAMES)
def test_every_message_is_read_and_only_what_is_unknown_is_skipped(name: str) -> None:
    decoder = EventDecoder()
    for payload in capture(name).payloads:
        decoder.decode(payload)
    counts = decoder.counters
    assert (counts.refused, counts.unread) == (0, 0)
    expected = ({"BlockInactive": 1}, 1) if name == "vllm-0.32-map" else ({}, 0)
    assert (decoder.unknown_tags, counts.fields_skipped) == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_block_table_is_the_engines_at_every_message(name: str) -> None:
    """Copies are counted: a block that was stored twice and removed once is still there."""
    payloads = capture(name).payloads
    for end in range(1, len(payloads) + 1):
        residency = fed(payloads[:end], EventDecoder())
        assert residency.copies(Tier.GPU) == block_table(payloads[:end], "GPU"), end
        assert residency.copies(Tier.CPU) == block_table(payloads[:end], "CPU", "CPU_PINNED"), end


def test_sglangs_load_is_read() -> None:
    (frames,) = capture("sglang-0.5.23").load
    load = EventDecoder().decode(frames[2]).load
    assert load is not None
    assert (load.running, load.waiting, load.tokens, load.tokens_max, load.waiting_uncached) == (3, 1, 5120, 65536, 2)


def test_scopes_of_a_capture_are_namespaces() -> None:
    """The same 32 tokens, four times: they are four prefixes."""
    payloads = capture("vllm-0.32-map").payloads
    tiers = fed(payloads, EventDecoder()).tiers()
    scopes = [(None, "pepper"), ("french", None), ("french", "pepper")]
    for lora, salt in scopes:
        assert model.fingerprint(list(range(100, 132)), model.Scope(lora, None, salt)) in tiers


# --- mangled --------------------------------------------------------------------------------------------------------


@st.composite
def mangled(draw: st.DrawFn) -> list[bytes]:
    """A capture of which messages are lost, repeated, exchanged, cut, or have other bytes in them."""
    payloads = capture(draw(st.sampled_from(NAMES))).payloads
    order = draw(st.lists(st.sampled_from(range(len(payloads))), min_size=1, max_size=40))
    found = []
    for place in order:
        payload = bytearray(payloads[place])
        for _ in range(draw(st.integers(0, 3))):
            payload[draw(st.integers(0, len(payload) - 1))] = draw(st.integers(0, 255))
        found.append(bytes(payload[: draw(st.integers(0, len(payload)))] if draw(st.booleans()) else payload))
    return found


@settings(max_examples=examples(150))
@given(mangled())
def test_a_mangled_stream_stays_within_its_bounds(payloads: list[bytes]) -> None:
    decoder = EventDecoder()
    residency = fed(payloads, decoder)
    counts = decoder.counters
    assert counts.batches + counts.refused == len(payloads)
    view = residency.view()
    assert view.entries <= ENTRIES_MAX
    assert view.unsettled == 0
    assert all(count > 0 for tier in (Tier.GPU, Tier.CPU) for count in residency.copies(tier).values())


class Rude(World):
    """An engine that may publish anything."""

    def __init__(self) -> None:
        settings = GapSettings(peers=False, held_messages_max=8)
        super().__init__(settings=settings, entries_max=ENTRIES_MAX, rows_max=200)
        self.asks: list[AskReplay] = []

    def took(self, effects: Iterable[object]) -> None:
        self.asks += [effect for effect in effects if isinstance(effect, AskReplay)]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.took(self.stream.tick(self.now))
        self.engine_caches.sweep(self.now, 50)

    def announce(self, step: tuple[str, int, bytes]) -> None:
        what, number, payload = step
        stream, ask = self.stream, self.asks[-1].ask if self.asks else 0
        if what == "live":
            self.took(stream.live(number, payload, self.now))
        elif what == "replayed":
            self.took(stream.replayed(ask, number, payload, self.now))
        elif what in ("replay_ended", "replay_failed"):
            self.took(getattr(stream, what)(ask, self.now))
        elif what == "wait":
            self.pass_time(number % 7)
        else:
            self.took(getattr(stream, what)(self.now))

    def is_another(self, payloads: list[bytes]) -> None:
        """The engine was started anew, and answers as it should."""
        self.took(self.stream.disconnected(self.now))
        self.asks.clear()
        self.took(self.stream.connected(self.now))
        self.answer(payloads)
        for _ in range(100):
            self.pass_time(0.1)

    def answer(self, payloads: list[bytes]) -> None:
        """Every question, with all that was said so far."""
        for _ in range(10):
            if not self.asks:
                return
            ask = self.asks.pop()
            for number, payload in enumerate(payloads):
                if number >= ask.first:
                    self.took(self.stream.replayed(ask.ask, number, payload, self.now))
            self.took(self.stream.replay_ended(ask.ask, self.now))


def at_another_time(payload: bytes) -> bytes:
    """No two messages of one number are the same: they have their time in them."""
    return payload[:2] + struct.pack(">d", 1.0) + payload[10:]


HYBRIDS = ("vllm-0.32-map",)  # has a sliding window beside its attention
CALLS = ("live", "live", "live", "replayed", "replay_ended", "replay_failed", "connected", "disconnected", "wait")


@settings(max_examples=examples(100))
@given(mangled(), st.data(), st.sampled_from(NAMES))
def test_after_any_nonsense_a_good_engine_is_known_exactly(
    payloads: list[bytes], data: st.DataObject, good: str
) -> None:
    """And whatever was believed of the one before is gone."""
    rude = Rude()
    for place, payload in enumerate(payloads):
        what = data.draw(st.sampled_from(CALLS))
        number = data.draw(st.just(place) | st.integers(0, 12) | st.integers(0, 2**63 - 1))
        rude.announce((what, number, payload))
        assert rude.stream.residency.view().entries <= ENTRIES_MAX
        assert len(rude.routes) <= 200
    clean = [at_another_time(payload) for payload in capture(good).payloads]
    rude.is_another(clean)
    assert rude.stream.machine.level is Level.EXACT
    assert rude.stream.level is (Level.ESTIMATED if good in HYBRIDS else Level.EXACT)
    assert rude.stream.residency.copies(Tier.GPU) == block_table(clean, "GPU")
