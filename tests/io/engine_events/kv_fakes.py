"""A stream as small as can be around a real gap machine, and publishers and subscribers on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import trio

from cluster.engine.kv_publisher import KvEndpoints, KvPublisher
from ranvier_py.core.engine_cache.gap_values import Apply, Effect, GapSettings, Level, LevelChanged, StreamReset
from ranvier_py.core.engine_cache.gaps import GapMachine
from ranvier_py.core.engine_cache.sources.publishers import Endpoint, Publisher, SocketOptions, parse_endpoint
from ranvier_py.io.engine_events.zmq_sockets import KvSockets
from ranvier_py.io.engine_events.zmq_source import KvSubscriber, LoadReceived

QUICK = SocketOptions(retry_s=0.02, retry_s_max=0.1, steady_s=0.05)
DEADLINE_S = 20.0


class GapStream:
    """Keeps what a gap machine wants applied; other effects go out."""

    def __init__(self, settings: GapSettings | None = None) -> None:
        self.machine = GapMachine(settings or GapSettings(peers=False))
        self.applied: list[tuple[int, bytes]] = []
        self.calls: list[str] = []
        self.resets = 0
        self.raises = 0  # calls of `live` that are to fail

    def connected(self, now: float) -> Sequence[object]:
        self.calls.append("connected")
        return self._took(self.machine.connected(now))

    def disconnected(self, now: float) -> Sequence[object]:
        self.calls.append("disconnected")
        return self._took(self.machine.disconnected(now))

    def live(self, seq: int, payload: bytes, now: float) -> Sequence[object]:
        if self.raises:
            self.raises -= 1
            raise RuntimeError("a bug in the core")
        return self._took(self.machine.live(seq, payload, now))

    def replayed(self, ask: int, seq: int, payload: bytes, now: float) -> Sequence[object]:
        return self._took(self.machine.replayed(ask, seq, payload, now))

    def replay_ended(self, ask: int, now: float) -> Sequence[object]:
        self.calls.append("ended")
        return self._took(self.machine.replay_ended(ask, now))

    def replay_failed(self, ask: int, now: float) -> Sequence[object]:
        self.calls.append("failed")
        return self._took(self.machine.replay_failed(ask, now))

    def tick(self, now: float) -> Sequence[object]:
        return self._took(self.machine.tick(now))

    def wake_at(self) -> float | None:
        return self.machine.wake_at()

    def _took(self, effects: list[Effect]) -> list[object]:
        left: list[object] = []
        for effect in effects:
            if isinstance(effect, Apply):
                self.applied.append((effect.seq, effect.payload))
            elif isinstance(effect, StreamReset):
                self.resets += 1
                self.applied.clear()
            else:
                left.append(effect)
        return left

    @property
    def seqs(self) -> list[int]:
        return [seq for seq, _ in self.applied]


class Received:
    """One subscriber, its stream, and what it told."""

    def __init__(
        self, sockets: KvSockets, publisher: Publisher, options: SocketOptions, settings: GapSettings | None
    ) -> None:
        self.stream = GapStream(settings)
        self.levels: list[Level] = []
        self.loads: list[bytes] = []
        self.subscriber = KvSubscriber(sockets, publisher, self.stream, Random(1), self.reported, options=options)

    def reported(self, effect: object) -> None:
        if isinstance(effect, LevelChanged):
            self.levels.append(effect.level)
        elif isinstance(effect, LoadReceived):
            self.loads.append(effect.payload)

    @property
    def level(self) -> Level:
        return self.stream.machine.level


@asynccontextmanager
async def reading(
    publisher: Publisher, options: SocketOptions = QUICK, settings: GapSettings | None = None
) -> AsyncIterator[Received]:
    with KvSockets() as sockets:
        received = Received(sockets, publisher, options, settings)
        async with trio.open_nursery() as nursery:
            await nursery.start(received.subscriber.run)
            yield received
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def publishing(endpoints: KvEndpoints) -> AsyncIterator[KvPublisher]:
    publisher = KvPublisher(endpoints)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publisher.run)
            yield publisher
            nursery.cancel_scope.cancel()
    finally:
        publisher.close()


def with_replay(**options: object) -> KvEndpoints:
    return KvEndpoints("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", **options)  # type: ignore[arg-type]


def publisher_of(source: KvPublisher, **more: object) -> Publisher:
    """Where to hear it."""
    return Publisher(0, at(source.events), at(source.replay) if source.replay else None, **more)  # type: ignore[arg-type]


def at(endpoint: str) -> Endpoint:
    found = parse_endpoint(endpoint)
    assert found is not None
    return found


def connections_to(endpoint: str) -> int:
    """Established ones, as the kernel sees them on the engine's side."""
    port = f":{at(endpoint).port:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return sum(field[1].endswith(port) and field[3] == "01" for field in fields)


async def until(condition: Callable[[], object]) -> None:
    """Wait for it, with a deadline."""
    with trio.fail_after(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  # sockets tell nobody
            await trio.sleep(0.002)
