"""`ranvier reporter`: tells routers what one engine holds, by the engine's KV events. Runs beside it until a signal.

Where the events are is asked of the engine (`--engine`), or said (`--events`, `--replay`, `--ranks`); so is the name of
its model. All data-parallel ranks of an engine are reported as one worker: what one of them holds, it holds.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import sys
from collections import deque
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import trio

from ranvier_py.core.engine_cache.block_namespaces import base_names
from ranvier_py.core.engine_cache.gap_values import Level, LevelChanged
from ranvier_py.core.engine_cache.sources.engine_polls import PollOptions
from ranvier_py.core.engine_cache.sources.publishers import RANKS_MAX, Publisher, of_operator, parse_endpoint
from ranvier_py.core.engine_cache.sources.push_credentials import credential
from ranvier_py.core.engine_cache.sources.push_sender import SenderSettings
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import BackendId
from ranvier_py.io.engine_events.zmq_source import KvSockets, KvSubscriber, NoZmq
from ranvier_py.io.engine_poller import EnginePoller
from ranvier_py.io.logs import set_up_logs
from ranvier_py.reporter.event_input import ReportedStream
from ranvier_py.reporter.intake import Call, Cleared, Intake
from ranvier_py.reporter.report_loop import Hashes, Reporting, ReportingSettings
from ranvier_py.reporter.reporter_flags import KEY_VARIABLE
from ranvier_py.reporter.routers import models_of

log = logging.getLogger(__name__)

DEAF_S = 5.0  # an engine that is up has said by then where it publishes
RETRY_S = 1.0  # between two questions to an engine that is not up yet


def report(options: argparse.Namespace) -> int:
    """Runs the command. Raises ConfigError."""
    key = secret_in(options.key_file) or os.environ.get(KEY_VARIABLE, "")
    if options.make_key:
        if not key:
            raise ConfigError([f"--make-key: needs the control key, by --key-file or ${KEY_VARIABLE}"])
        print(credential(key, options.make_key))
        return 0
    problems = list(problems_of(options))
    if problems:
        raise ConfigError(problems)
    cluster_secret = secret_in(options.cluster_secret_file)
    set_up_logs(options.log_level, "text", secrets=[each for each in (key, cluster_secret) if each])
    settings = ReportingSettings(
        sender=SenderSettings(sync_s=options.sync_s),
        prefix_tokens=options.prefix_tokens,
        plain=options.plain,
        tells_again=True,
        cluster_secret=cluster_secret.encode(),
    )
    try:
        sockets = KvSockets()
    except NoZmq as error:
        print(f"ranvier: {error}", file=sys.stderr)
        return 1
    with sockets:
        trio.run(run, options, key, settings, sockets)
    return 0


def problems_of(options: argparse.Namespace) -> list[str]:
    problems = []
    if not options.worker_id:
        problems.append("--worker-id: which backend of the routers is it?")
    if not options.router:
        problems.append("--router: at least one control port")
    for name in ("events", "replay"):
        value = getattr(options, name)
        if value and parse_endpoint(value) is None:
            problems.append(f"--{name}: must be like tcp://127.0.0.1:5557")
    if not options.engine and not options.events:
        problems.append("--engine or --events: where are the engine's KV events?")
    fingerprints = options.hashes == Hashes.FINGERPRINT.value
    if fingerprints and not (options.model or options.engine):
        problems.append("--model or --engine: fingerprints need the name of the model")
    if fingerprints and options.plain:
        problems.append("--plain: is for prefix hashes")
    if not 16 <= options.prefix_tokens <= 65_536:
        problems.append("--prefix-tokens: 16 to 65536")
    if not 1 <= options.ranks <= RANKS_MAX:
        problems.append(f"--ranks: 1 to {RANKS_MAX}")
    if options.ranks != 1 and not options.events:
        problems.append("--ranks: needs --events; an engine that is asked says how many it has")
    if not 0.1 <= options.sync_s <= 3600:
        problems.append("--sync-s: 0.1 to 3600")
    return problems


def secret_in(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError([f"{file}: can't be read: {error.strerror}"]) from error


async def run(options: argparse.Namespace, key: str, settings: ReportingSettings, sockets: KvSockets) -> None:
    """Until SIGTERM or SIGINT."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, options, key, settings, sockets)
            async for _ in signals:
                break
            nursery.cancel_scope.cancel()


async def follow(options: argparse.Namespace, key: str, settings: ReportingSettings, sockets: KvSockets) -> None:
    model = options.model or (await first_model(options.engine) if options.engine else "")
    waiting: deque[Call] = deque()
    reporting = Reporting(
        options.worker_id, options.router, Intake(waiting), key, Hashes(options.hashes), model, settings
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reporting.run)
        listening = Listening(nursery, sockets, waiting)
        reporting.certain = listening.certain
        if options.events:
            host = host_of(options.engine)
            listening.found(BackendId(0), of_operator(options.events, options.replay, options.ranks, host))
        else:
            poller = EnginePoller(PollOptions(), listening.rng, found=listening.found)
            poller.watch(BackendId(0), options.engine)
            nursery.start_soon(poller.run)
            nursery.start_soon(listening.tell_deaf, options.engine)
        print(f"ranvier reporter for {options.worker_id}: {model or 'prefixes'} as {options.hashes}", flush=True)


class Listening:
    """One subscription for each rank."""

    def __init__(self, nursery: trio.Nursery, sockets: KvSockets, waiting: deque[Call]) -> None:
        self.rng = Random(secrets.randbits(64))  # noqa: S311  # only for pauses
        self._nursery = nursery
        self._sockets = sockets
        self._waiting = waiting
        self._scopes: list[trio.CancelScope] = []
        self._streams: list[ReportedStream] = []

    def certain(self) -> bool:
        """Whether the engine is known exactly: every rank of it."""
        streams = self._streams
        return bool(streams) and all(each.level is Level.EXACT and each.is_understood for each in streams)

    async def tell_deaf(self, engine: str) -> None:
        """Say so, if nothing is found to listen to."""
        await trio.sleep(DEAF_S)
        if not self._streams:
            log.warning("reporter.deaf %s publishes no KV events, or does not answer; looking on", engine)

    def found(self, _: BackendId, publishers: tuple[Publisher, ...]) -> None:
        """The engine's streams are here now, and nowhere else."""
        for stream, scope in zip(self._streams, self._scopes, strict=True):
            stream.close()
            scope.cancel()
        if self._streams:
            self._waiting.append(Cleared())  # all of it is told anew
        self._streams, self._scopes = [], []
        if not publishers:
            log.warning("reporter.deaf the engine publishes no KV events")
        several = len(publishers) > 1
        for publisher in publishers:
            rank = publisher.rank if several else None
            stream = ReportedStream(self._waiting, replay=publisher.replay is not None, rank=rank)
            scope = trio.CancelScope()
            self._streams.append(stream)
            self._scopes.append(scope)
            self._nursery.start_soon(self._hear, publisher, stream, scope)

    async def _hear(self, publisher: Publisher, stream: ReportedStream, scope: trio.CancelScope) -> None:
        log.info("reporter.listening %s", publisher.events.endpoint)
        with scope:
            await KvSubscriber(self._sockets, publisher, stream, self.rng, self._told).run()

    def _told(self, effect: object) -> None:
        if isinstance(effect, LevelChanged):
            log.info("reporter.level %s (%s)", effect.level.value, effect.reason)


async def first_model(engine: str) -> str:
    """The engine's base model, as soon as it tells one."""
    told = False
    while True:
        cards = (await models_of(engine)).get("data")
        names = base_names([card for card in cards if isinstance(card, dict)]) if isinstance(cards, list) else ()
        if names:
            return names[0]
        if not told:
            told = True
            log.warning("reporter.waiting for %s to say which base model it serves (or --model)", engine)
        await trio.sleep(RETRY_S)


def host_of(engine: str) -> str:
    return urlsplit(engine).hostname or "127.0.0.1"
