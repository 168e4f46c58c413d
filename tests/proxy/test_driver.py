"""Steps go on without a task while they wait for sockets alone, and get all that comes up meanwhile."""

import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from ranvier_py.core.routing.router import Router
from ranvier_py.proxy.driver import Driver, Readiness, Steps
from ranvier_py.proxy.edits import LegEdits
from ranvier_py.proxy.transport import PlainTransport, received
from tests.node.node_lab import QUESTION, Node, chat, lab
from tests.proxy.test_pipeline import at_rest, sharing
from tests.proxy.wire import END, GOOD, STREAM_HEAD, TOKEN, Wire, post

REPLY = {"role": "assistant", "content": "hi"}


def later(number: int, **fields: Any) -> bytes:
    """A chat that goes on: its first turn, its second …"""
    more = [message for past in range(1, number) for message in (REPLY, {"role": "user", "content": f"And {past}?"})]
    return post(chat([*QUESTION, *more], **fields))


@asynccontextmanager
async def talk_with(node: Node) -> AsyncIterator[Wire]:
    """One connection of a client; its first turn, for which the node connects to a backend, is over."""
    async with await node.wire() as talk:
        await talk.send(later(1))
        assert (await talk.response())[0] == 200
        await trio.testing.wait_all_tasks_blocked()  # the node waits for the next turn
        yield talk


class ConnectionTasks(trio.abc.Instrument):
    """Counts how often tasks of connections are run."""

    def __init__(self) -> None:
        self.steps = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += task.name.endswith("DataServer._run")


BODY = GOOD.partition(b"\r\n\r\n")[2]


async def test_a_chat_that_goes_on_is_served_without_its_task_and_is_learned() -> None:
    tasks = ConnectionTasks()
    async with lab(*sharing(2)) as node, talk_with(node) as talk:
        trio.lowlevel.add_instrument(tasks)
        for number in range(2, 6):
            await talk.send(later(number))
            _, headers, body = await talk.response()
            assert body == BODY
            assert headers["x-ranvier-reason"] == "affinity"
        trio.lowlevel.remove_instrument(tasks)
        routes = await at_rest(node)
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
    async with lab(*sharing(1, [GOOD], script)) as node, talk_with(node) as talk:
        await talk.send(later(2))
        await trio.testing.wait_all_tasks_blocked(0.02)
        gate.set()
        assert (await talk.response())[2] == BODY
        assert (await at_rest(node))["outcomes"] == {"success": 2}


async def test_a_drain_lets_a_request_without_a_task_finish() -> None:
    gate = trio.Event()
    (backend,) = sharing(1, [GOOD], [gate, GOOD])
    async with lab(backend) as node, talk_with(node) as talk:
        backend.asked = trio.Event()
        await talk.send(later(2))
        await backend.asked.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await trio.sleep(0.05)
        gate.set()
        assert (await talk.response())[2] == BODY
        assert await talk.ended()


async def test_a_stream_is_relayed_without_its_task_piece_by_piece() -> None:
    gates = [trio.Event() for _ in range(3)]
    script = [STREAM_HEAD, TOKEN, gates[0], TOKEN, gates[1], TOKEN, gates[2], END]
    tasks = ConnectionTasks()
    async with lab(*sharing(1, [GOOD], script)) as node, talk_with(node) as talk:
        trio.lowlevel.add_instrument(tasks)
        await talk.send(later(2, stream=True))
        for gate in gates:
            assert (await talk.until(TOKEN)).endswith(TOKEN)
            gate.set()
        assert await talk.until(b"\r\n0\r\n\r\n") == END
        trio.lowlevel.remove_instrument(tasks)
        assert (await at_rest(node))["outcomes"] == {"success": 2}
    assert tasks.steps == 0


@pytest.mark.parametrize(("part", "call"), [(LegEdits, "made"), (Router, "announce")], ids=["unsent", "sent"])
async def test_a_bug_is_a_500_and_leaves_nothing_in_flight(
    part: type, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError

    async with lab(*sharing(1)) as node, talk_with(node) as talk:
        monkeypatch.setattr(part, call, broken)
        await talk.send(later(2))
        assert (await talk.response())[0] == 500
        assert (await at_rest(node))["outcomes"] == {"success": 1, "cancelled": 1}


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


class Turns(trio.abc.Instrument):
    count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


async def test_what_arrives_while_another_is_served_is_served_in_the_same_turn() -> None:
    turns, seen, (ours, backend) = Turns(), list[int](), socket.socketpair()
    async with pipe() as (transport, client):
        assert transport.watch is not None
        second = transport.watch.readiness.watch(ours.fileno())
        await trio.testing.wait_all_tasks_blocked()
        transport.watch.call = lambda: (seen.append(turns.count), backend.send(b"x"))
        second.call = lambda: seen.append(turns.count)
        trio.lowlevel.add_instrument(turns)
        client.send(b"x")
        while len(seen) < 2:
            await trio.lowlevel.checkpoint()
        second.close()
    ours.close()
    backend.close()
    assert seen[0] == seen[1]


async def test_what_is_closed_twice_leaves_the_set_once_and_not_the_socket_that_has_its_number_now() -> None:
    async with pipe() as (transport, _):
        assert transport.watch is not None
        transport.close()
        ours, far = socket.socketpair()  # the lowest free number, as a rule the closed one's
        watch = transport.watch.readiness.watch(ours.fileno())
        for close in (transport.close, transport.abort, transport.watch.close):
            close()
        watch.ready = False
        far.send(b"x")
        await watch.wait()
        for end in (watch, ours, far):
            end.close()
