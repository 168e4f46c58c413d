"""Steps go on without a task while they wait for sockets alone; whatever comes up, a request ends as it should."""

import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import pytest
import trio
import trio.testing

from ranvier_py.core.answers.usage_injection import UsageAsking
from ranvier_py.core.routing.router import Router
from ranvier_py.proxy import pipeline
from ranvier_py.proxy.driver import Driver, Steps
from ranvier_py.proxy.readiness import Readiness
from ranvier_py.proxy.transport import PlainTransport, received
from tests.proxy.test_pipeline import (
    CLOSE,
    GOOD,
    HANG,
    RESET,
    STREAM_HEAD,
    Lab,
    Scripted,
    Step,
    answer,
    chunk,
    lab,
    request_of,
)

FIRST = {"role": "user", "content": "How many words are there in this question? " * 20}
REPLY = {"role": "assistant", "content": "hi"}
LARGE = 8 << 20
"""More than the sockets on loopback hold."""


class Turns(Scripted):
    """Backends that share a list of scripts, one for each request that comes to any of them; the last one repeats."""

    def __init__(self, scripts: Iterator[list[Step | trio.Event]]) -> None:
        super().__init__()
        self.scripts = scripts
        self.left = trio.Event()

    async def serve(self, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):  # a node that gives up leaves an answer unread
            await super().serve(stream)

    async def play(self, stream: trio.SocketStream) -> bool:
        for step in next(self.scripts):
            if isinstance(step, trio.Event):
                await step.wait()
                continue
            self.script = (step,)
            if not await super().play(stream):
                if step == HANG:
                    self.left.set()
                return False
        return True


def backends(count: int, *scripts: list[Any]) -> list[Turns]:
    """The first request of all is answered well, the others as told, then well again."""

    def turns() -> Iterator[list[Any]]:
        yield [GOOD]
        yield from scripts
        while True:
            yield [GOOD]

    shared = turns()
    return [Turns(shared) for _ in range(count)]


def turn(number: int, **fields: Any) -> bytes:
    """A chat that goes on: its first turn, its second …"""
    more = [message for past in range(1, number) for message in (REPLY, {"role": "user", "content": f"And {past}?"})]
    return json.dumps({"model": "m", "messages": [FIRST, *more], **fields}).encode()


class Talk:
    """One connection of a client; its first turn, for which the node connects to a backend, is over."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.buffer = b""

    @classmethod
    @asynccontextmanager
    async def begin(cls, node: Lab) -> AsyncIterator[Self]:
        async with await trio.open_tcp_stream(*node.address) as stream:
            talk = cls(stream)
            await talk.ask(turn(1))
            assert (await talk.answer())[0].startswith(b"HTTP/1.1 200")
            await trio.testing.wait_all_tasks_blocked()  # the node waits for the next turn
            yield talk

    async def ask(self, body: bytes) -> None:
        await self.stream.send_all(request_of(body))

    async def answer(self) -> tuple[bytes, bytes]:
        """Head and body of an answer with a length."""
        head = await self.until(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(self.buffer) < length:
            await self._more()
        body, self.buffer = self.buffer[:length], self.buffer[length:]
        return head, body

    async def until(self, token: bytes) -> bytes:
        while token not in self.buffer:
            await self._more()
        head, _, self.buffer = self.buffer.partition(token)
        return head + token

    async def _more(self) -> None:
        more = await self.stream.receive_some()
        assert more, f"ended after {self.buffer[:200]!r}"
        self.buffer += more


class ConnectionTasks(trio.abc.Instrument):
    """Counts how often tasks of connections are run."""

    def __init__(self) -> None:
        self.steps = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += task.name.endswith("DataServer._run")


BODY = GOOD.partition(b"\r\n\r\n")[2]
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_a_chat_that_goes_on_is_served_without_its_task_and_is_learned() -> None:
    tasks = ConnectionTasks()
    async with lab(*backends(2)) as node, Talk.begin(node) as talk:
        trio.lowlevel.add_instrument(tasks)
        for number in range(2, 6):
            await talk.ask(turn(number))
            head, body = await talk.answer()
            assert body == BODY
            assert b"x-ranvier-reason: affinity" in head
        trio.lowlevel.remove_instrument(tasks)
        routes = await node.at_rest()
    assert tasks.steps == 0
    assert routes["outcomes"] == {"success": 5}


@pytest.mark.parametrize(
    "pieces",
    [
        [GOOD[:9], GOOD[9:]],
        [GOOD[:-5], GOOD[-5:]],
        [b"HTTP/1.1 103 Early Hints\r\n\r\n", GOOD],
        [b"HTTP/1.1 103 Early Hints\r\n\r\n" + GOOD],
    ],
)
async def test_an_answer_in_pieces_arrives_whole(pieces: list[bytes]) -> None:
    gate = trio.Event()
    script: list[Any] = [pieces[0], *(each for piece in pieces[1:] for each in (gate, piece))]
    async with lab(*backends(1, script)) as node, Talk.begin(node) as talk:
        await talk.ask(turn(2))
        await trio.testing.wait_all_tasks_blocked(0.02)
        gate.set()
        assert (await talk.answer())[1] == BODY
        await talk.ask(turn(3))
        assert (await talk.answer())[1] == BODY
        assert (await node.at_rest())["outcomes"] == {"success": 3}


async def test_a_chunked_answer_goes_on_in_its_chunks() -> None:
    whole = CHUNKED + chunk(BODY) + b"0\r\n\r\n"
    async with lab(*backends(1, [whole], [whole])) as node, Talk.begin(node) as talk:
        for number in (2, 3):
            await talk.ask(turn(number))
            assert b"chunked" in await talk.until(b"\r\n\r\n")
            assert await talk.until(b"\r\n0\r\n\r\n") == chunk(BODY) + b"0\r\n\r\n"


@pytest.mark.parametrize("step", [CLOSE, RESET, b"nonsense\r\n\r\n", answer(503), CHUNKED + b"zz\r\n"])
async def test_what_fails_before_the_first_byte_is_asked_elsewhere(step: Step) -> None:
    again = step in (CLOSE, RESET)  # a pooled connection that was closed is replaced, silently
    async with lab(*backends(2, *[[step, CLOSE]] * (1 + again))) as node, Talk.begin(node) as talk:
        await talk.ask(turn(2))
        head, body = await talk.answer()
        assert head.startswith(b"HTTP/1.1 200")
        assert body == BODY
        routes = await node.at_rest()
    assert routes["outcomes"]["success"] == 2
    assert routes["speculation"]["attempts"] == 0


async def test_a_client_that_leaves_ends_the_engine_s_work() -> None:
    (backend,) = backends(1, [HANG])
    async with lab(backend) as node, Talk.begin(node) as talk:
        backend.asked = trio.Event()
        await talk.ask(turn(2))
        await backend.asked.wait()
        with trio.fail_after(1):
            await talk.stream.aclose()
            await backend.left.wait()
        routes = await node.at_rest()
    assert routes["outcomes"] == {"success": 1, "cancelled": 1}


async def test_a_backend_too_slow_to_begin_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "FIRST_BYTE_TOTAL_S", 0.15)
    (backend,) = backends(1, [HANG])
    async with lab(backend, first_byte_timeout_s=0.1) as node, Talk.begin(node) as talk:
        await talk.ask(turn(2))
        assert (await talk.answer())[0].startswith(b"HTTP/1.1 504")
        await backend.left.wait()
        routes = await node.at_rest()
    assert routes["outcomes"] == {"success": 1, "timeout": 1}


async def test_a_client_that_reads_late_gets_all_of_it() -> None:
    large = answer(200, b'{"x":"%b"}' % (b"y" * LARGE))
    async with lab(*backends(1, [large])) as node, Talk.begin(node) as talk:
        await talk.ask(turn(2))
        await trio.sleep(0.1)
        assert (await talk.answer())[1] == large.partition(b"\r\n\r\n")[2]
        await talk.ask(turn(3))
        assert (await talk.answer())[1] == BODY


async def test_requests_that_come_early_are_answered_in_turn() -> None:
    gate = trio.Event()
    (backend,) = backends(1, [gate, answer(200, b"second")], [answer(200, b"third")])
    async with lab(backend) as node, Talk.begin(node) as talk:
        backend.asked = trio.Event()
        await talk.ask(turn(2))
        await backend.asked.wait()
        await talk.ask(turn(3))
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert len(backend.bodies) == 2
        gate.set()
        assert (await talk.answer())[1] == b"second"
        assert (await talk.answer())[1] == b"third"
        assert (await node.at_rest())["outcomes"] == {"success": 3}


async def test_a_connection_that_is_to_end_ends_after_its_answer() -> None:
    async with lab(*backends(1)) as node, Talk.begin(node) as talk:
        closing = request_of(turn(2)).replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\n")
        await talk.stream.send_all(closing)
        assert (await talk.answer())[1] == BODY
        assert await talk.stream.receive_some() == b""


async def test_a_drain_lets_a_request_without_a_task_finish() -> None:
    gate = trio.Event()
    (backend,) = backends(1, [gate, GOOD])
    async with lab(backend) as node, Talk.begin(node) as talk:
        backend.asked = trio.Event()
        await talk.ask(turn(2))
        await backend.asked.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await trio.sleep(0.05)
        gate.set()
        assert (await talk.answer())[1] == BODY
        assert await talk.stream.receive_some() == b""


async def test_a_stream_is_relayed_without_its_task_piece_by_piece() -> None:
    event = chunk(b'data: {"choices":[{"index":0,"delta":{"content":"word"},"finish_reason":"stop"}]}\n\n')
    end = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    gates = [trio.Event() for _ in range(3)]
    script = [STREAM_HEAD, event, gates[0], event, gates[1], event, gates[2], end]
    tasks = ConnectionTasks()
    async with lab(*backends(1, script)) as node, Talk.begin(node) as talk:
        trio.lowlevel.add_instrument(tasks)
        await talk.ask(turn(2, stream=True))
        for gate in gates:
            assert (await talk.until(event)).endswith(event)
            gate.set()
        assert await talk.until(b"\r\n0\r\n\r\n") == end
        trio.lowlevel.remove_instrument(tasks)
        assert (await node.at_rest())["outcomes"] == {"success": 2}
    assert tasks.steps == 0


@pytest.mark.parametrize(("part", "call"), [(UsageAsking, "body"), (Router, "announce")], ids=["unsent", "sent"])
async def test_a_bug_is_a_500_and_leaves_nothing_in_flight(
    part: type, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError

    async with lab(*backends(1)) as node, Talk.begin(node) as talk:
        monkeypatch.setattr(part, call, broken)
        await talk.ask(turn(2))
        assert (await talk.answer())[0].startswith(b"HTTP/1.1 500")
        assert (await node.at_rest())["outcomes"] == {"success": 1, "cancelled": 1}


# --- the driver alone -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def pipe() -> AsyncIterator[tuple[PlainTransport, socket.socket]]:
    """A socket that steps may wait for, and its other end."""
    readiness = Readiness()
    ours, other = socket.socketpair()
    transport = PlainTransport(ours, readiness.watch(ours.fileno()))
    with other, trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(readiness.run)
            yield transport, other
            nursery.cancel_scope.cancel()
    transport.close()
    readiness.close()


async def test_steps_get_what_they_wait_for_and_their_result_is_returned() -> None:
    async def answer() -> int:
        await trio.lowlevel.checkpoint()
        return 7

    def steps() -> Steps[tuple[bytes, int]]:
        return (yield from received(transport)), (yield answer)

    async with pipe() as (transport, other):
        other.send(b"x")
        assert await Driver(steps()).run() == (b"x", 7)


async def test_what_a_wait_raises_is_raised_in_the_steps_and_what_they_raise_by_the_driver() -> None:
    async def fail() -> None:
        raise OSError("broken")

    def steps() -> Steps[None]:
        try:
            yield fail
        except OSError as error:
            raise ValueError("reported") from error

    with pytest.raises(ValueError, match="reported"):
        await Driver(steps()).run()


@pytest.mark.parametrize("at_socket", [True, False])
async def test_an_interrupt_is_raised_where_the_steps_wait_and_they_may_go_on(at_socket: bool) -> None:
    def steps() -> Steps[tuple[str, bytes]]:
        try:
            yield transport.readable if at_socket else trio.sleep_forever
        except ValueError as error:
            return str(error), (yield from received(transport))
        raise AssertionError("nothing interrupted it")

    async with pipe() as (transport, other):
        assert transport.receive_now() is None
        driver = Driver(steps())

        async def interrupt() -> None:
            await trio.testing.wait_all_tasks_blocked()
            driver.interrupt(ValueError("first"))
            driver.interrupt(ValueError("second"))
            other.send(b"x")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(interrupt)
            assert await driver.run() == ("first", b"x")


@pytest.mark.parametrize("at_socket", [True, False])
async def test_a_task_that_is_cancelled_closes_its_steps(at_socket: bool) -> None:
    closed = []

    def steps() -> Steps[None]:
        try:
            yield transport.readable if at_socket else trio.sleep_forever
        finally:
            closed.append(True)

    async with pipe() as (transport, _):
        assert transport.receive_now() is None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Driver(steps()).run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert closed == [True]
