"""The ZeroMQ sockets of an engine's KV events, a publisher and its replay, as vLLM and SGLang have them.

Live messages are [topic, number, payload], with numbers from 0. The replay socket answers [empty, first] with all kept
messages from there on, as [empty, topic, number, payload] (vLLM from 0.26) or without the topic, then with number -1.

Bounds, both vLLM's defaults: `buffer_messages` are kept; a listener that lags by more than HWM messages loses some.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import trio
import zmq

HWM = 100_000
REPLAY_HWM = 1000  # libzmq's own, which vLLM and SGLang keep: a replay that is sent faster than read loses a part
END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class KvEndpoints:
    """Where and how an engine publishes its events; port 0 takes a free one. Without `replay` nothing is replayed."""

    events: str = "tcp://127.0.0.1:0"
    replay: str = ""
    topic: str = ""
    encoding: str = "map"  # see `kv_events`
    replays_topic: bool = True
    buffer_messages: int = 10_000


class KvPublisher:
    """Binds its sockets at once. Close it, or use it as a context manager; `run` answers requests for a replay."""

    def __init__(self, endpoints: KvEndpoints) -> None:
        """Raises OSError."""
        self.endpoints = endpoints
        self.published = 0
        self.asked = 0
        self.to_lose = 0  # how many of the next messages are kept but not sent
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=endpoints.buffer_messages)
        self.next_number = 0
        self.events, self.replay = endpoints.events, endpoints.replay
        self._bind()

    def _bind(self) -> None:
        """Bind the sockets; after a restart to the addresses of the first time."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._sender = self._socket(zmq.PUB, self.events, HWM)
            self._answerer = self._socket(zmq.ROUTER, self.replay, REPLAY_HWM) if self.replay else None
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from error
        self.events = bound_endpoint(self.endpoints.events, self._sender)
        if self._answerer is not None:
            self.replay = bound_endpoint(self.endpoints.replay, self._answerer)

    def _socket(self, kind: int, endpoint: str, messages_max: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, messages_max)
        socket.bind(endpoint)
        return socket

    def publish(self, payload: bytes) -> int:
        """Send and keep one message; returns its number."""
        number, self.next_number = self.next_number, self.next_number + 1
        self._kept.append((number, payload))
        self.published += 1
        if self.to_lose:
            self.to_lose -= 1
        else:
            self.send(self.endpoints.topic.encode(), number.to_bytes(8, "big"), payload)
        return number

    def send(self, *frames: bytes) -> None:
        """Send any frames to all listeners."""
        self._sender.send_multipart(frames, zmq.NOBLOCK)

    def restart(self) -> None:
        """Become another process: connections are cut, numbers begin with 0, no message is kept."""
        self.close()
        self._kept.clear()
        self.next_number = 0
        self._bind()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the addresses at once: libzmq does so when its context ends, but not when a socket is closed."""
        if self._answerer is not None and not self._answerer.closed:
            trio.lowlevel.notify_closing(self._answerer.fileno())
        self._context.destroy(linger=0)

    async def run(self) -> None:
        """Answer requests for a replay until cancelled."""
        while self._answerer is not None and not self._answerer.closed:
            with suppress(zmq.ContextTerminated, trio.ClosedResourceError):  # restarted
                await self._answer(self._answerer)
            await trio.lowlevel.checkpoint()

    async def _answer(self, answerer: zmq.Socket[bytes]) -> None:
        while not answerer.closed:
            try:
                who, *_, first = answerer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                if not answerer.poll(0):
                    await trio.lowlevel.wait_readable(answerer.fileno())
                continue
            self.asked += 1
            self._replay(answerer, who, int.from_bytes(first, "big"))
            await trio.lowlevel.checkpoint()

    def _replay(self, answerer: zmq.Socket[bytes], who: bytes, first: int) -> None:
        topic = (self.endpoints.topic.encode(),) if self.endpoints.replays_topic else ()
        end_topic = (b"",) if self.endpoints.replays_topic else ()
        for number, payload in self._kept:
            if number >= first:
                answerer.send_multipart((who, b"", *topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        answerer.send_multipart((who, b"", *end_topic, END, b""), zmq.NOBLOCK)


def bound_endpoint(asked: str, socket: zmq.Socket[bytes]) -> str:
    """Return the endpoint as vLLM gives it: the one asked for, with the port that was bound."""
    port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"{asked.rpartition(':')[0]}:{port}"
