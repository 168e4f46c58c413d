"""The load generator against a small engine on real sockets: what it sends, what it counts, what it says."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import trio
from rich.console import Console

from cluster.demo import up
from cluster.dns.addresses import Address
from cluster.dns.resolvers import RoundRobinResolver
from cluster.load import load_command as load
from cluster.load.http_client import Connection, ExchangeFailed
from cluster.load.load_report import LoadLog, Report
from cluster.load.runner import Runner, Target, first_model
from cluster.load.workload import Conversation, Turn
from cluster.processes import chaos_clients
from cluster.scenario import Load
from tests.proxy.wire import CHUNKED_HEAD, Wire, answer, chunk
from tests.waiting import until

DEADLINE_S = 10


class Engine:
    """Answers every chat with «answer K» and keeps what it was asked. `misbehave` may take over a request."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0
        self.hosts: list[str] = []
        self.port = 0
        self.misbehave: Callable[[trio.SocketStream, dict[str, Any]], Any] | None = None
        self.close_after_each = False
        self.arrived = trio.Event()

    async def serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        self.hosts.append(stream.socket.getsockname()[0])
        wire = Wire(stream)
        while request := await wire.next_request():
            await self.answer(stream, json.loads(request[1] or b"{}"))
            if self.close_after_each:
                return

    async def answer(self, stream: trio.SocketStream, request: dict[str, Any]) -> None:
        if not request:
            await stream.send_all(plain({"data": [{"id": "tiny"}]}))
            return
        self.bodies.append(request)
        self.arrived.set()
        if self.misbehave is not None:
            await self.misbehave(stream, request)
            return
        text = f"answer {len(request['messages'])}"
        usage = {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 75}}
        if not request["stream"]:
            await stream.send_all(plain({"choices": [{"message": {"content": text}}], "usage": usage}))
            return
        events = [{"choices": [{"delta": {"content": word}}]} for word in ("", text[:7], text[7:])]
        events += [{"choices": [], "usage": usage}]
        await stream.send_all(CHUNKED_HEAD[:-2] + b"x-engine: e1\r\n\r\n")
        for event in [json.dumps(event).encode() for event in events] + [b"[DONE]"]:
            await stream.send_all(chunk(b"data: " + event + b"\n\n"))
        await stream.send_all(b"0\r\n\r\n")


ROUTED = (b"x-ranvier-backend: b1", b"x-ranvier-matched-tokens: 64", b"x-ranvier-reason: deepest")


def plain(body: dict[str, Any], status: bytes = b"200 OK") -> bytes:
    return answer(json.dumps(body).encode(), *ROUTED, status=status)


@asynccontextmanager
async def running_engine(*hosts: str) -> AsyncIterator[Engine]:
    engine = Engine()
    listeners: list[trio.SocketListener] = []
    for host in hosts or ("127.0.0.1",):
        listeners += await trio.open_tcp_listeners(engine.port, host=host)
        engine.port = listeners[0].socket.getsockname()[1]
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, engine.serve, listeners)
            yield engine
            nursery.cancel_scope.cancel()


def chat(name: str, *asked: str, **rest: Any) -> Conversation:
    return Conversation(name, tuple(Turn(({"role": "user", "content": text},)) for text in asked), **rest)


async def closed(engine: Engine, *conversations: Conversation, users: int = 1, **target: Any) -> LoadLog:
    log = LoadLog()
    host = target.pop("host", "127.0.0.1")
    runner = Runner(Target(host, engine.port, **target), log)
    await runner.run_closed(conversations, [0.0] * users)
    assert log.sent == log.ok + log.failed + log.cancelled
    return log


async def test_the_real_answer_is_part_of_the_next_turn() -> None:
    """Without it no engine could reuse what it has generated."""
    async with running_engine() as engine:
        await closed(engine, chat("a", "one", "two"))
    assert [message["content"] for message in engine.bodies[1]["messages"]] == ["one", "answer 1", "two"]


async def test_a_recorded_tool_call_stands_instead_of_the_real_answer() -> None:
    """The tool message that follows refers to its id."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "t1"}]}
    result = {"role": "tool", "tool_call_id": "t1", "content": "42"}
    turns = (Turn(({"role": "user", "content": "one"},), recorded=call), Turn((result,)))
    async with running_engine() as engine:
        await closed(engine, Conversation("a", turns))
    assert engine.bodies[1]["messages"][1:] == [call, result]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_report_holds_what_the_engine_stated(stream: bool) -> None:
    """Hit rate by engine truth, and times only where they were measured."""
    async with running_engine() as engine:
        log = await closed(engine, chat("a", "one", "two"), stream=stream)
    outcome = Report(log, 1.0)
    assert outcome.hit_rate == 0.75
    assert (outcome.log.sent, outcome.log.ok, outcome.completion_tokens, outcome.without_usage) == (2, 2, 4, 0)
    assert (outcome.ttft_s["p50"] is not None) is stream
    assert [share.name for share in outcome.engines] == ["e1" if stream else "b1"]
    assert [share.name for share in outcome.nodes] == [f"127.0.0.1:{engine.port}"]
    if not stream:
        assert outcome.predicted_tokens == 128
        assert outcome.routes == {"deepest": 2}


async def test_a_conversation_keeps_one_connection() -> None:
    """Else DNS would spread its turns over nodes that do not know it."""
    async with running_engine() as engine:
        await closed(engine, chat("a", "one", "two", "three"))
    assert engine.connections == 1


async def test_conversations_spread_over_the_nodes_of_a_name() -> None:
    """One client per conversation: DNS round-robin is honoured."""
    hosts = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
    resolver = RoundRobinResolver({"router.lab": [Address(host) for host in hosts]})
    trio.socket.set_custom_hostname_resolver(resolver)
    async with running_engine(*hosts) as engine:
        talks = [chat(f"c{number}", "one", "two") for number in range(9)]
        log = await closed(engine, *talks, users=3, host="router.lab")
    assert sorted(engine.hosts) == sorted(hosts * 3)
    assert [share.requests for share in Report(log, 1.0).nodes] == [6, 6, 6]


async def test_a_dead_node_is_passed_over() -> None:
    """The other addresses of the name are spares, as for any client."""
    trio.socket.set_custom_hostname_resolver(
        RoundRobinResolver({"router.lab": [Address("127.0.0.9"), Address("127.0.0.2")]})
    )
    async with running_engine("127.0.0.2") as engine:
        log = await closed(engine, chat("a", "one"), host="router.lab")
    assert (log.ok, log.failed) == (1, 0)


async def test_a_connection_the_server_closed_while_idle_is_replaced() -> None:
    """That is no failure: nothing had been sent."""
    async with running_engine() as engine:
        engine.close_after_each = True
        log = LoadLog()
        runner = Runner(Target("127.0.0.1", engine.port), log)
        pause = tuple(Turn(({"role": "user", "content": text},), think_s=0.05) for text in ("one", "two"))
        await runner.run_closed([Conversation("a", pause)], [0.0])
    assert (log.ok, log.failed, engine.connections) == (2, 0, 2)


async def reset(stream: trio.SocketStream, _: dict[str, Any]) -> None:
    stream.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    await stream.aclose()


async def send(stream: trio.SocketStream, _: dict[str, Any], *, data: bytes) -> None:
    await stream.send_all(data)
    await stream.aclose()


async def stall(_stream: trio.SocketStream, _request: dict[str, Any]) -> None:
    await trio.sleep_forever()


EVENT = CHUNKED_HEAD + chunk(b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n')
OOM = CHUNKED_HEAD + chunk(b'data: {"error": {"code": "oom"}}\n\n')
LAST = b"0\r\n\r\n"
BUSY = plain({"error": {"code": "no_backend", "message": "nobody"}}, b"503 Service Unavailable")


@pytest.mark.parametrize(
    ("misbehave", "reason"),
    [
        (partial(send, data=b""), "connection closed before an answer"),
        (reset, "connection lost before an answer"),
        (partial(send, data=EVENT), "connection closed in mid-answer"),
        (partial(send, data=EVENT + LAST), "stream ended without [DONE]"),
        (partial(send, data=CHUNKED_HEAD + chunk(b"data: {nonsense\n\n") + LAST), "answer is not JSON"),
        (partial(send, data=OOM), "connection closed in mid-answer"),
        (partial(send, data=OOM + LAST), "error in the answer: oom"),
        (partial(send, data=BUSY), "HTTP 503 no_backend"),
        (partial(send, data=b"HTTP/1.1 500 Oops\r\ncontent-length: 3\r\n\r\nbad"), "HTTP 500"),
        (partial(send, data=b"SSH-2.0-OpenSSH\r\n"), "answer is not HTTP"),
    ],
)
async def test_every_failure_is_counted_under_its_reason(misbehave: Any, reason: str) -> None:
    """And the rest of its conversation as not sent, so that nothing is lost."""
    async with running_engine() as engine:
        engine.misbehave = misbehave
        log = await closed(engine, chat("a", "one", "two", "three"))
    assert list(log.failures) == [reason]
    assert (log.sent, log.failed, log.not_sent, log.planned) == (1, 1, 2, 3)


async def test_a_server_that_is_not_there_is_named_in_the_reason() -> None:
    log = LoadLog()
    async with running_engine() as engine:
        port = engine.port
    await Runner(Target("127.0.0.1", port), log).run_closed([chat("a", "one")], [0.0])
    assert list(log.failures) == ["connect: connection refused"]


async def test_a_name_that_does_not_exist_is_a_failure_too() -> None:
    trio.socket.set_custom_hostname_resolver(RoundRobinResolver({"v6.lab": [Address("::1")]}))
    with pytest.raises(ExchangeFailed) as caught:
        async with Connection("", 80) as connection:
            await connection.exchange(b"", lambda _data, _status: None)
    assert caught.value.failure.reason in ("name not found", "connect: connection refused")


async def test_an_answer_that_takes_too_long_fails() -> None:
    async with running_engine() as engine:
        engine.misbehave = stall
        log = await closed(engine, chat("a", "one"), timeout_s=0.05)
    assert list(log.failures) == ["no complete answer within 0.05 s"]


async def test_a_cancelled_run_counts_what_was_in_flight() -> None:
    """Sent = ok + failed + cancelled, also after Ctrl-C."""
    log = LoadLog()
    async with running_engine() as engine, trio.open_nursery() as nursery:
        engine.misbehave = stall
        nursery.start_soon(Runner(Target("127.0.0.1", engine.port), log).run_closed, [chat("a", "one", "two")], [0.0])
        await engine.arrived.wait()
        nursery.cancel_scope.cancel()
    assert (log.sent, log.cancelled, log.in_flight, log.not_sent) == (1, 1, 0, 1)


async def test_a_branch_goes_on_from_its_parents_history() -> None:
    """Including the real answers, and waiting for them when it comes early."""
    parent = chat("parent", "one", "two")
    branch = chat("branch", "other", parent="parent", parent_turns=1)
    async with running_engine() as engine:
        await closed(engine, parent, branch, users=2)
    sent = [[message["content"] for message in body["messages"]] for body in engine.bodies]
    assert ["one", "answer 1", "other"] in sent


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Arrivals come when they are due, however slow the target is."""
    log = LoadLog()
    async with running_engine() as engine, trio.open_nursery() as nursery:
        engine.misbehave = stall
        talks = [chat(f"c{number}", "one", start_s=number * 0.01) for number in range(3)]
        nursery.start_soon(Runner(Target("127.0.0.1", engine.port), log).run_open, talks)
        await until(lambda: len(engine.bodies) == 3)
        nursery.cancel_scope.cancel()
    assert (log.sent, log.cancelled, len(log.lags_s)) == (3, 3, 3)


async def test_nothing_new_begins_when_the_time_is_up(autojump_clock: trio.testing.MockClock) -> None:
    """A user who thinks past the end of the run does not send."""
    log = LoadLog()
    runner = Runner(Target("127.0.0.1", 1), log)
    late = Conversation("a", (Turn(({"role": "user", "content": "x"},), think_s=11.0),))
    await runner.run_closed([late], [0.0], duration_s=10.0)
    assert (log.sent, log.not_sent) == (0, 1)


async def test_the_first_model_is_asked_for() -> None:
    async with running_engine() as engine:
        assert await first_model(Target("127.0.0.1", engine.port)) == "tiny"


async def test_a_whole_run_from_its_options(tmp_path: Path) -> None:
    """From the command line's words to the report, with branches, pauses and the model's name asked for."""
    words = ["--users=4", "--turns=3", "--branch=0.5", "--conversations=12", "--think=0.01", "--seed=7"]
    async with running_engine() as engine:
        options = load.make_parser().parse_args(["--target", f"http://127.0.0.1:{engine.port}/v1", *words])
        load.check(options)
        outcome, interrupted = await load.run(
            load.make_plan(options), load.make_target(options), LoadLog(), {}, Console(file=io.StringIO())
        )
    assert not interrupted
    assert (outcome.log.conversations, outcome.log.ok, outcome.log.failed, outcome.log.not_sent) == (
        12,
        outcome.log.planned,
        0,
        0,
    )
    assert {body["model"] for body in engine.bodies} == {"tiny"}
    load.write_json(tmp_path / "out.json", options, outcome)
    assert json.loads((tmp_path / "out.json").read_text())["requests"]["ok"] == outcome.log.ok


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--users 3 --rate 2", "only one of"),
        ("--rate 2", "needs an end"),
        ("--branch 2", "--branch"),
        ("--users 0", "--users"),
        ("--arrivals", "needs a --trace"),
        ("--trace /nowhere.jsonl", "/nowhere.jsonl"),
        ("--resolve router.lab", "NAME=IP"),
        ("--extra 3", "JSON object"),
        ("--target http://[::1", "Invalid IPv6 URL"),
        ("--json /proc/none/out.json", "--json /proc/none/out.json: No such file or directory"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_is_sent(
    words: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load.main(["--target", "http://127.0.0.1:1", *words.split()]) == load.MISUSED
    assert problem in capsys.readouterr().err


def test_failures_make_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """Unless they are allowed."""
    words = ["--target", "http://127.0.0.1:1", "--users", "1", "--turns", "1", "--model", "m"]
    assert load.main(words) == load.FAILED
    assert "connection refused" in capsys.readouterr().out
    assert load.main([*words, "--allow-failures"]) == load.OK
    assert load.main(words[:-2]) == load.FAILED, "nobody says what models there are"
    assert "connection refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"), [([], {True, False}), (["--stream"], {True}), (["--no-stream"], {False})]
)
async def test_the_load_mixes_streams_and_whole_answers_unless_asked_otherwise(
    flags: list[str], expected: set[bool]
) -> None:
    async with running_engine() as engine:
        target = ["--target", f"http://127.0.0.1:{engine.port}", "--users", "4"]
        options = load.make_parser().parse_args([*target, *flags])
        await load.run(load.make_plan(options), load.make_target(options), LoadLog(), {}, Console(file=io.StringIO()))
    assert {body["stream"] for body in engine.bodies} == expected


def test_make_up_and_chaos_mix_streams_and_whole_answers() -> None:
    demo = up.conversations(up.Settings())
    chaos = list(islice(chaos_clients.conversations(Load(), [(0.0, 5.0)], 20.0, 1), 20))
    for talks in (demo, chaos):
        asked = [turn.stream for talk in talks for turn in talk.turns]
        assert 0.3 < asked.count(True) / len(asked) < 0.7
