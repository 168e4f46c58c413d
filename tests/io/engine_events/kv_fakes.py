"""Publishers and subscribers on loopback, with a real gap machine behind each subscriber."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from random import Random
from typing import Any

import trio

from cluster.engine.kv_publisher import KvEndpoints, KvPublisher
from ranvier_py.core.engine_cache.gap_values import Apply, GapSettings, Level, LevelChanged, StreamReset
from ranvier_py.core.engine_cache.gaps import GapMachine
from ranvier_py.core.engine_cache.sources.publishers import Endpoint, Publisher, SocketOptions, parse_endpoint
from ranvier_py.io.engine_events.zmq_sockets import KvSockets
from ranvier_py.io.engine_events.zmq_source import KvSubscriber, LoadReceived
from ranvier_py.supervision import Faults

QUICK = SocketOptions(retry_s=0.02, retry_s_max=0.1, steady_s=0.05)
DEADLINE_S = 20.0


class Received:
    """One subscriber, the gap machine that decides for it, and what that wants applied or reports."""

    def __init__(
        self,
        sockets: KvSockets,
        publisher: Publisher,
        options: SocketOptions = QUICK,
        settings: GapSettings | None = None,
    ) -> None:
        self.machine = GapMachine(settings or GapSettings(peers=False))
        self.applied: list[tuple[int, bytes]] = []
        self.levels: list[Level] = []
        self.loads: list[bytes] = []
        noted = Faults()
        self.subscriber = KvSubscriber(
            sockets, publisher, self.machine, Random(1), self.carry, options=options, faults=noted
        )
        self.counters, self.faults = self.subscriber.counters, noted.counters.unexpected_errors

    def carry(self, effect: object) -> None:
        if isinstance(effect, Apply):
            self.applied.append((effect.seq, effect.payload))
        elif isinstance(effect, StreamReset):
            self.applied.clear()
        elif isinstance(effect, LevelChanged):
            self.levels.append(effect.level)
        elif isinstance(effect, LoadReceived):
            self.loads.append(effect.payload)

    @property
    def seqs(self) -> list[int]:
        return [seq for seq, _ in self.applied]

    @property
    def level(self) -> Level:
        return self.machine.level


@asynccontextmanager
async def reading(
    publisher: Publisher, options: SocketOptions = QUICK, settings: GapSettings | None = None
) -> AsyncIterator[Received]:
    with closing(KvSockets()) as sockets:
        received = Received(sockets, publisher, options, settings)
        async with trio.open_nursery() as nursery:
            await nursery.start(received.subscriber.run)
            yield received
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def connected(**more: Any) -> AsyncIterator[tuple[KvPublisher, Received]]:
    """A publisher with replay, and a subscriber that knows all that it published: nothing yet."""
    async with publishing(with_replay()) as source, reading(publisher_of(source, **more)) as received:
        await until(lambda: received.level is Level.EXACT)
        yield source, received


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
    """Where it is."""
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
        while not condition():  # noqa: ASYNC110  # sockets announce nothing
            await trio.sleep(0.002)
