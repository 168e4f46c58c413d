"""Nodes and an engine are killed under traffic, for real: no client loses what was not streaming on the dead."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgpack
import pytest
import trio

from cluster.engine.engine_process import DEFAULT_TOKENIZER
from cluster.engine.engine_text import load_tokenizer
from cluster.processes import chaos
from cluster.processes import chaos_run as processes
from cluster.processes.chaos_clients import conversations, rates_of
from cluster.processes.chaos_plan import CLUSTER_NAME, key_line
from cluster.processes.chaos_run import FIRST_KEY, Options, Outcome
from cluster.processes.commands import Engines
from cluster.processes.link_control import LinkMode
from cluster.processes.packet_record import Recorder
from cluster.scenario import read_scenario, settle, settled
from ranvier_py.core.mesh.mesh_values import Plane
from ranvier_py.core.mesh.wire.frame import BadFrame
from ranvier_py.core.mesh.wire.keyring import parse_key_ring
from ranvier_py.core.mesh.wire.seal import Sealer

DEADLINE_S = 90
"""A loaded machine starts six processes in ten seconds; the run itself takes as long as the scenario says."""

SHORT = """
about = "One node and one engine die under traffic, the node comes back."
for_s = 8.0

[cluster]
nodes = 3
engines = 2

[load]
chats_per_s = 3.0
turns = 3
think_s = 0.3
prefixes = 3

[[step]]
at_s = 3.0
do = "kill"
nodes = "one"

[[step]]
at_s = 4.5
do = "engine_stop"
engines = "one"

[[step]]
at_s = 5.0
do = "start"
nodes = "all"

[expect]
failed_requests_max = 0
hit_share_min = 0.3
"""

SLOW_STREAMS = Engines(decode_ms=20.0, max_tokens=40, prefill_tokens_per_s=30_000.0)
"""0.8 s for an answer: some stream wherever something is killed."""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The one run that the tests of this file look at."""
    scenario = settle(read_scenario(SHORT, "short"), seed=1)
    options = Options(seed=1, engines=SLOW_STREAMS, recorder=Recorder())

    async def run() -> Outcome:
        with trio.fail_after(DEADLINE_S):
            folder = tmp_path_factory.mktemp("short")
            return await processes.run_scenario(
                scenario, LinkMode("relay", "to record"), options, folder, lambda _: None
            )

    return trio.run(run)


@pytest.mark.slow
def test_no_request_fails_but_those_that_streamed_on_the_dead(outcome: Outcome) -> None:
    log = outcome.log
    counts = log.counts()
    report = json.dumps(outcome.as_json(), indent=1)
    assert log.failed == [], report
    assert outcome.good, report
    assert [death.who for death in log.deaths if death.who.startswith("127.")], "a node was killed"
    assert [death.who for death in log.deaths if death.who.startswith("engine-")], "an engine was killed"
    assert counts["sent"] == counts["ok"] + counts["was_streaming_on_a_killed_process"] > 30, report
    assert counts["ok_after_retry"] > 0, "clients met the dead node and went on to the next"
    assert sum("started" in event.text for event in log.diary) == 3 + 2 + 1, "the node came back"
    killed = {death.who: death.at_s for death in log.deaths}
    assert all(entry.began_s < killed.get(entry.engine, DEADLINE_S) for entry in log.entries if entry.ok), report


@pytest.mark.slow
def test_no_word_of_a_prompt_and_no_token_of_it_is_ever_on_the_wire(outcome: Outcome) -> None:
    """Neither sealed nor inside: every packet between the nodes is opened with the cluster's key and looked through."""
    recorder = outcome.options.recorder
    assert recorder is not None
    assert recorder.complete
    sealer = Sealer(1, parse_key_ring(key_line(FIRST_KEY, outcome.options.seed)), CLUSTER_NAME)

    def opened(packet: bytes) -> bytes | None:
        for plane in Plane:
            with suppress(BadFrame):
                return bytes(sealer.open(packet, plane).body)
        return None

    assert {packet.plane for packet in recorder.packets} == {"udp", "tcp"}
    assert all(opened(packet.data) for packet in recorder.packets), "a packet that is not the cluster's"
    load = outcome.scenario.load
    assert load is not None
    talks = list(conversations(load, rates_of(load, ()), 3.0, outcome.options.seed))
    sent = [str(message["content"]) for talk in talks for turn in talk.turns for message in turn.messages]
    tokenizer = load_tokenizer(str(DEFAULT_TOKENIZER))
    tokens = [[int(token) for token in tokenizer.encode(text[:400], special=False)] for text in sent[:12]]
    needles = text_needles(text[:200] for text in sent) + [needle for run in tokens for needle in token_needles(run)]
    assert len(needles) > 500
    passed = [data for packet in recorder.packets for data in (packet.data, opened(packet.data) or b"")]
    assert [needle for needle in needles for data in passed if needle in data] == []


def text_needles(texts: Iterable[str]) -> list[bytes]:
    """The texts in pieces of twelve bytes: these never stand in random bytes by chance."""
    pieces = {data[at : at + 12] for data in map(str.encode, texts) for at in range(0, len(data) - 11, 12)}
    return sorted(pieces)


def token_needles(tokens: Sequence[int]) -> list[bytes]:
    """Runs of five token ids as they could be written: fixed 2, 4 and 8 bytes either way round, msgpack, and digits."""
    needles: set[bytes] = set()
    for start in range(0, len(tokens) - 4, 5):
        run = tokens[start : start + 5]
        for code in ("<5H", ">5H", "<5I", ">5I", "<5Q", ">5Q"):
            with suppress(struct.error):  # an id too large for two bytes
                needles.add(struct.pack(code, *run))
        needles.add(b"".join(map(msgpack.packb, run)))
        needles |= {separator.join(map(str, run)).encode() for separator in (", ", ",")}
    return sorted(needles)


def test_needles_find_text_and_token_ids_however_they_are_written() -> None:
    tokens = [17, 300, 70_000, 5, 128, 9]
    written = (
        b"xx" + b"".join(token.to_bytes(4, "little") for token in tokens),
        b"yy" + ", ".join(map(str, tokens)).encode(),
        b"zz" + bytes.fromhex("11 cd012c ce00011170 05 cc80 09"),
    )
    assert all(any(needle in data for needle in token_needles(tokens)) for data in written)
    assert any(
        needle in b"-- the quick brown fox jumps --" for needle in text_needles(["the quick brown fox jumps over"])
    )


def test_an_outcome_reports_how_to_have_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    options = chaos.make_parser().parse_args(["--seed", "9", "--nodes", "2", "--links", "direct", "--no-gossip"])
    scenario = settled("steady", "processes", options.seed, options.nodes, None, None)
    assert chaos.again(scenario, options) == (
        "python -m cluster chaos --scenario steady --seed 9 --nodes 2 --links direct --no-gossip"
    )
