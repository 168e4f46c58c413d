"""`ranvier reporter`: sends an engine's KV events to routers that can't reach them. Runs beside it until a signal.

The engine is asked where its events are (`--engine`), or the operator says so (`--events`, `--replay`, `--ranks`). Each
data-parallel rank is read once, by a GapMachine that has the engine replay what was lost. What the machine applied goes
into an EventLog, and from there to each router unchanged.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import signal
import sys
from contextlib import closing
from functools import partial
from random import Random
from urllib.parse import urlsplit

import trio

from ranvier_py.core.addresses import checked_url
from ranvier_py.core.engine_cache.gap_values import GapSettings, Level, LevelChanged
from ranvier_py.core.engine_cache.gaps import GapMachine
from ranvier_py.core.engine_cache.sources.engine_polls import PollOptions
from ranvier_py.core.engine_cache.sources.publishers import RANKS_MAX, Publisher, endpoint_of, of_operator
from ranvier_py.core.engine_cache.sources.push_credentials import credential
from ranvier_py.core.errors import ConfigError, NoZmq
from ranvier_py.core.ids import BackendId
from ranvier_py.core.log_events import event
from ranvier_py.io.engine_events.zmq_sockets import KvSockets
from ranvier_py.io.engine_events.zmq_source import KvSubscriber
from ranvier_py.io.engine_poller import EnginePoller
from ranvier_py.io.logs import announce, set_up_logs
from ranvier_py.reporter import KEY_VARIABLE
from ranvier_py.reporter.event_relay import EventLog, EventRelay
from ranvier_py.reporter.router_link import RouterLink
from ranvier_py.supervision import Faults

log = logging.getLogger(__name__)

SILENT_S = 5.0  # by then an engine that is up has answered where it publishes


def report(options: argparse.Namespace, key: str) -> int:
    """Run the command with a bearer key, "" for none. Raises ConfigError. Returns the exit code."""
    if options.make_key:
        if not key:
            raise ConfigError([f"--make-key: needs the control key, by --key-file or ${KEY_VARIABLE}"])
        print(credential(key, options.make_key))
        return 0
    problems = problems_of(options)
    if problems:
        raise ConfigError(problems)
    set_up_logs(options.log_level, "text", secrets=[key] if key else [])
    try:
        sockets = KvSockets()
    except NoZmq as error:
        print(f"ranvier: {error}", file=sys.stderr)
        return 1
    with closing(sockets):
        trio.run(run, options, key, sockets)
    return 0


def problems_of(options: argparse.Namespace) -> list[str]:
    problems = []
    if not options.worker_id:
        problems.append("--worker-id: which backend of the routers is it?")
    if not options.router:
        problems.append("--router: at least one control port")
    places = [("engine", options.engine), *(("router", url) for url in options.router or ())]
    for name, value in (*places, ("events", options.events), ("replay", options.replay)):
        try:
            if value:
                endpoint_of(value) if name in ("events", "replay") else checked_url(value, ("http", "https"))
        except ValueError as error:
            problems.append(f"--{name}: {error}")
    if not options.engine and not options.events:
        problems.append("--engine or --events: where are the engine's KV events?")
    if not 1 <= options.ranks <= RANKS_MAX:
        problems.append(f"--ranks: 1 to {RANKS_MAX}")
    for name, given in (("ranks", options.ranks != 1), ("replay", options.replay)):
        if given and not options.events:
            problems.append(f"--{name}: needs --events; an engine that is asked says it itself")
    return problems


async def run(options: argparse.Namespace, key: str, sockets: KvSockets) -> None:
    """Run until SIGTERM or SIGINT."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            reporter = Reporter(options, key, sockets, nursery)
            if options.events:
                host = urlsplit(options.engine).hostname or "127.0.0.1"
                reporter.found(BackendId(0), of_operator(options.events, options.replay, options.ranks, host))
            else:
                poller = EnginePoller(PollOptions(), reporter.rng, found=reporter.found, faults=reporter.faults)
                poller.watch(BackendId(0), options.engine)
                nursery.start_soon(poller.run)
                nursery.start_soon(reporter.warn)
            announce(f"ranvier reporter for {options.worker_id}")
            async for _ in signals:
                break
            nursery.cancel_scope.cancel()


class Reporter:
    """Reads each rank of the engine once, and relays it to each router."""

    def __init__(self, options: argparse.Namespace, key: str, sockets: KvSockets, nursery: trio.Nursery) -> None:
        self.faults = Faults()
        self.rng = Random(secrets.randbits(64))  # noqa: S311  # only for pauses
        self._options, self._key, self._sockets = options, key, sockets
        self._nursery = nursery
        self._scope: trio.CancelScope | None = None  # around the streams that are read now

    async def warn(self) -> None:
        """Log a warning if no events were found within SILENT_S."""
        await trio.sleep(SILENT_S)
        if self._scope is None:
            log.warning(event("reporter.no_events", engine=self._options.engine, doubt="or does not answer; asking on"))

    def found(self, _: BackendId, publishers: tuple[Publisher, ...]) -> None:
        """Read these streams from now on, and no others."""
        if self._scope is not None:
            self._scope.cancel()
        if not publishers:
            log.warning(event("reporter.no_events", engine=self._options.engine, doubt=""))
        self._scope = trio.CancelScope()
        self._nursery.start_soon(self._relay, publishers, self._scope)

    async def _relay(self, publishers: tuple[Publisher, ...], scope: trio.CancelScope) -> None:
        ranks = [publisher.rank for publisher in publishers]
        with scope:
            async with trio.open_nursery() as nursery:
                for publisher in publishers:
                    log.info(event("reporter.reading", endpoint=publisher.events.endpoint))
                    events = EventLog()
                    machine = GapMachine(GapSettings(replay=publisher.replay is not None, peers=False))
                    carry = partial(taken, events)
                    subscriber = KvSubscriber(self._sockets, publisher, machine, self.rng, carry, faults=self.faults)
                    nursery.start_soon(self.faults.keep, "event_subscriber", subscriber.run)
                    options = self._options
                    head = {
                        "worker_id": options.worker_id,
                        "model": options.model,
                        "rank": publisher.rank,
                        "ranks": ranks,
                    }
                    is_connected = partial(is_read, subscriber, machine)
                    for url in dict.fromkeys(options.router):
                        relay = EventRelay(head, events, is_connected)
                        nursery.start_soon(self.faults.keep, "router_link", RouterLink(url, self._key).run, relay)


def taken(events: EventLog, effect: object) -> None:
    events.take(effect)
    if isinstance(effect, LevelChanged):
        log.info(event("reporter.level", cache_level=effect.level.value, why=effect.reason))


def is_read(subscriber: KvSubscriber, machine: GapMachine) -> bool:
    """Whether the log has everything that the engine has published so far and can still send."""
    return subscriber.state.is_connected and machine.level is not Level.REPAIRING
