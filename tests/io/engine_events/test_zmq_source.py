"""A subscriber against real publishers on loopback."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio
import trio.abc

from cluster.engine.kv_publisher import KvEndpoints
from ranvier_py.core.engine_cache.gap_values import Effect, GapSettings, Level
from ranvier_py.core.errors import NoZmq
from ranvier_py.io.engine_events import zmq_sockets as kv_sockets
from ranvier_py.io.engine_events.zmq_sockets import KvSockets
from tests.core.engine_cache.captured import NAMES, capture
from tests.io.engine_events.kv_fakes import (
    at,
    connected,
    connections_to,
    publisher_of,
    publishing,
    reading,
    until,
    with_replay,
)


def payloads(count: int, start: int = 0) -> list[bytes]:
    return [b"message %d" % number for number in range(start, start + count)]


async def test_events_flow_in_order_and_the_stream_is_exact() -> None:
    async with connected() as (source, received):
        for payload in payloads(100):
            source.publish(payload)
        await until(lambda: len(received.applied) == 100)
        assert received.applied == list(enumerate(payloads(100)))
        assert received.level is Level.EXACT
        assert received.subscriber.state.is_connected
        assert received.counters.messages == 100
        assert received.counters.message_bytes == sum(map(len, payloads(100)))
    assert received.level is Level.DEGRADED, "whoever stops is disconnected"


@pytest.mark.parametrize("replays_topic", [True, False])
async def test_one_who_is_late_gets_what_the_engine_still_has(replays_topic: bool) -> None:
    """Both shapes of answers: vLLM's since 0.26 has the topic, older ones and SGLang's have not."""
    async with publishing(with_replay(replays_topic=replays_topic, topic="kv")) as source:
        for payload in payloads(300):
            source.publish(payload)
        async with reading(publisher_of(source, topic="kv")) as received:
            await until(lambda: received.level is Level.EXACT)
            assert received.applied == list(enumerate(payloads(300)))
            assert received.counters.replay_messages == 300
            source.publish(b"live")
            await until(lambda: received.applied[-1] == (300, b"live"))
            assert not received.counters.malformed


async def test_an_answer_of_which_the_engine_drops_some_is_asked_for_again() -> None:
    """libzmq has room for a thousand answers, and an engine sends what it has at once: its end may be lost, too."""
    async with publishing(with_replay()) as source:
        sent = [b"%d" % number + bytes(1000) for number in range(2500)]
        for payload in sent:
            source.publish(payload)
        async with reading(publisher_of(source), settings=GapSettings(peers=False, replay_timeout_s=0.3)) as received:
            await until(lambda: received.level is Level.EXACT)
            assert received.applied == list(enumerate(sent))


async def test_a_gap_is_filled_while_live_messages_go_on() -> None:
    async with connected() as (source, received):
        sent = payloads(200)
        for number, payload in enumerate(sent):
            source.to_lose += number in (50, 51, 120)
            source.publish(payload)
            await trio.sleep(0.0005)
        await until(lambda: len(received.applied) == 200)
        assert received.applied == list(enumerate(sent))
        assert received.level is Level.EXACT
        assert Level.REPAIRING in received.levels
        assert received.machine.counters.repaired >= 1


async def test_without_a_replay_socket_a_gap_is_passed_over_at_once() -> None:
    """Waiting for a deadline would leave the stream in repair for seconds."""
    async with publishing(KvEndpoints()) as source, reading(publisher_of(source)) as received:
        await until(lambda: received.subscriber.state.is_connected)
        source.publish(b"0")
        await until(lambda: received.seqs == [0])
        source.to_lose = 1
        source.publish(b"1")
        source.publish(b"2")
        await until(lambda: received.seqs == [0, 2])
        assert received.level is Level.ESTIMATED
        assert received.counters.replays_failed == received.counters.replays


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_replay_socket_that_is_not_there_or_sends_nothing_is_given_up_and_the_stream_goes_on(
    is_there: bool,
) -> None:
    async with publishing(KvEndpoints()) as source:
        mute = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
        replay = at(f"tcp://127.0.0.1:{mute.socket.getsockname()[1]}")
        if not is_there:
            await mute.aclose()
        settings = GapSettings(peers=False, replay_timeout_s=0.2 if is_there else 60.0)
        async with reading(publisher_of(source)._replace(replay=replay), settings=settings) as received:
            await until(lambda: Level.REPAIRING in received.levels and received.level is Level.ESTIMATED)
            source.publish(b"0")
            await until(lambda: received.seqs == [0])
        await mute.aclose()


async def test_a_restarted_engine_is_received_from_its_first_message_on() -> None:
    async with connected() as (source, received):
        for payload in payloads(10):
            source.publish(payload)
        await until(lambda: len(received.applied) == 10)
        source.restart()
        source.publish(b"another process")  # which nobody receives yet
        await until(lambda: received.applied == [(0, b"another process")])
        await until(lambda: received.level is Level.EXACT)
        assert received.machine.counters.restarts == 1
        assert received.counters.connects == 2


async def test_an_engine_that_comes_late_is_found() -> None:
    async with publishing(with_replay()) as first:
        place = publisher_of(first)
    async with reading(place) as received:
        await until(lambda: received.counters.failures >= 3)
        assert not received.levels
        assert received.subscriber.state.why == "refused or unreachable"
        assert place.replay is not None
        async with publishing(KvEndpoints(place.events.endpoint, place.replay.endpoint)) as source:
            source.publish(b"0")
            await until(lambda: received.seqs == [0])


async def test_the_addresses_of_a_name_take_turns() -> None:
    """A service's name may stand for an address where nobody listens."""

    class Names(trio.abc.HostnameResolver):
        async def getaddrinfo(self, host, port, *rest):  # type: ignore[no-untyped-def]
            return [(2, 1, 6, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]

        async def getnameinfo(self, sockaddr, flags):  # type: ignore[no-untyped-def]
            raise NotImplementedError

    trio.socket.set_custom_hostname_resolver(Names())
    async with publishing(with_replay()) as source:
        place = publisher_of(source)
        named = place._replace(events=place.events._replace(host="engine.test"))
        async with reading(named) as received:
            await until(lambda: received.subscriber.state.is_connected)
            assert received.counters.failures == 1
            assert received.subscriber.publisher.events.endpoint.startswith("tcp://engine.test:")


async def test_whoever_stops_leaves_the_engine() -> None:
    """A forgotten connection would cost the engine a queue of 100,000 messages."""
    async with publishing(with_replay()) as source:
        async with reading(publisher_of(source)) as received:
            await until(lambda: received.subscriber.state.is_connected)
            source.publish(b"0")
            await until(lambda: received.seqs == [0])
            assert connections_to(source.events) == 1
        await until(lambda: not connections_to(source.events))


async def test_only_the_topic_is_received() -> None:
    async with (
        publishing(with_replay(topic="kv@engine")) as source,
        reading(publisher_of(source, topic="kv@")) as received,
    ):
        await until(lambda: received.level is Level.EXACT)
        source.send(b"other", (0).to_bytes(8, "big"), b"not for us")
        source.publish(b"0")
        await until(lambda: received.applied == [(0, b"0")])
        assert received.counters.messages == 1


LOAD = b"\x96\xa8LoadStat\x01\x02\x03\x04\x00"


@pytest.mark.parametrize("topic", ["", "kv"])
async def test_load_on_the_socket_of_the_events_is_reported_apart(topic: str) -> None:
    """Its numbers are its own: taken for an event it would be a gap."""
    async with (
        publishing(with_replay(topic=topic)) as source,
        reading(publisher_of(source, topic=topic, load_topic="load")) as received,
    ):
        await until(lambda: received.level is Level.EXACT)
        source.send(b"load", (77).to_bytes(8, "big"), LOAD)
        source.publish(b"0")
        await until(lambda: received.seqs == [0] and received.loads)
        assert received.loads == [LOAD]
        assert received.level is Level.EXACT


async def test_load_is_received_on_a_socket_of_its_own() -> None:
    async with publishing(with_replay()) as source, publishing(KvEndpoints(topic="load")) as loads:
        place = publisher_of(source, load=at(loads.events), load_topic="load")
        async with reading(place) as received:
            await until(lambda: received.counters.connects == 2)
            loads.publish(LOAD)
            loads.publish(b"no load")
            await until(lambda: received.loads and received.counters.malformed.get("load"))
            assert received.loads == [LOAD]
            assert received.applied == []


async def test_a_stream_that_raises_costs_its_message_and_nothing_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with publishing(KvEndpoints()) as source, reading(publisher_of(source)) as received:
        await until(lambda: received.subscriber.state.is_connected)
        live = received.machine.live

        def fail_twice(seq: int, payload: bytes, now: float) -> list[Effect]:
            if seq < 2:
                raise RuntimeError("a bug in the core")
            return live(seq, payload, now)

        monkeypatch.setattr(received.machine, "live", fail_twice)
        for payload in payloads(4):
            source.publish(payload)
        await until(lambda: received.seqs == [2, 3])
        assert received.faults == {"event_stream": 2}
        assert sum("unexpected.error in event_stream" in record.message for record in caplog.records) == 1, (
            "logged once, not for each"
        )


@pytest.mark.parametrize("name", NAMES)
async def test_what_engines_were_recorded_to_send_is_received(name: str) -> None:
    """Frame by frame, with the topics and the shape of answers of each engine."""
    reported = capture(name)
    topic = reported.events[0][0].decode()
    replays_topic = len(reported.replay[0]) == 4
    async with publishing(with_replay(topic=topic, replays_topic=replays_topic)) as source:
        for payload in reported.payloads[:7]:
            source.publish(payload)
        async with reading(publisher_of(source, topic=topic, load_topic="load")) as received:
            await until(lambda: received.level is Level.EXACT)
            for frames in (*reported.events[7:], *reported.load):
                source.send(*frames)
            await until(lambda: len(received.applied) == len(reported.events))
            assert received.applied == list(enumerate(reported.payloads))
            await until(lambda: received.loads == [frames[2] for frames in reported.load])
            assert not received.counters.malformed


def test_without_pyzmq_all_but_the_sockets_can_be_imported() -> None:
    """The node runs on without it."""
    lines = ("import sys; sys.modules['zmq'] = None", "from ranvier_py.io.engine_events.zmq_source import KvSubscriber")
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=60)


async def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sockets, "zmq", None)
    with pytest.raises(NoZmq, match=r"ranvier-py\[zmq\]"):
        KvSockets()
