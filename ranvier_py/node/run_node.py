"""The composition root: makes the parts of one node, opens the one nursery, stops them in reverse.

Parts start in the order of lines in `run` and `run_parts`; the public port opens last and closes first.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from random import Random

import trio

from ranvier_py.config.config_endpoints import gossip_endpoints
from ranvier_py.config.config_model import Config
from ranvier_py.core.addresses import host_port
from ranvier_py.core.errors import listening_on
from ranvier_py.io.descriptors import raise_descriptor_limit
from ranvier_py.io.logs import announce
from ranvier_py.io.tokenizer_process import TokenizerProcess
from ranvier_py.node.answer_parts import share_answers
from ranvier_py.node.calibration_parts import looked_at_by
from ranvier_py.node.client_parts import share_verdicts
from ranvier_py.node.cluster_parts import load_keys, open_cluster
from ranvier_py.node.garbage import collected_in_waits
from ranvier_py.node.node import Node, log_transitions
from ranvier_py.node.parts import fingerprint_key, tokenizer_process, within_descriptors
from ranvier_py.node.reload import ConfigSource, Reloads

log = logging.getLogger(__name__)

ServeControl = Callable[..., Awaitable[None]]
"""Called with the node, its Reloads (or None) and `shutdown`; reports its URL as it starts."""

SWITCH_INTERVAL_S = 0.00005
"""The event loop gives up the interpreter lock at each system call, and gets it back from another thread after this
time at the latest. CPython's default would be added to a request's time several times over."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
KEEP_BYTES = 256 * 1024 * 1024  # four bodies of the largest size at once
MAP_BYTES_MIN = 32 * 1024 * 1024  # glibc's own upper limit (DEFAULT_MMAP_THRESHOLD_MAX)
"""From this size on each buffer has a mapping of its own."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a running node listens: (host, port) pairs of the public port, URL of the control port."""

    public: Sequence[tuple[str, int]]
    control: str

    def __str__(self) -> str:
        public = " ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.public)
        return f"{public} control {self.control}"


async def run(
    config: Config,
    serve_control: ServeControl,
    *,
    tokenizer_of: Callable[[Config, bytes], TokenizerProcess] = tokenizer_process,
    source: ConfigSource | None = None,
    task_status: trio.TaskStatus[Addresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one node until a signal ends it. Raises ConfigError or ListenError at the start.

    `serve_control` serves its control port (`control.control_port`), which is above the node and knows all of it.
    `source` reloads the configuration, and adapts it for this node; without it the node keeps `config`.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    loaded, descriptors = config, raise_descriptor_limit()
    config = within_descriptors(config if source is None else source.own(config), descriptors)
    keys, key_file = await load_keys(config) if gossip_endpoints(config) is not None else (None, None)
    key = fingerprint_key(config, keys.fingerprint_secret if keys is not None else None)
    tokenizer = tokenizer_of(config, key)
    await tokenizer.start()
    try:
        facts = tokenizer.facts
        log.log(logging.INFO if facts.incremental else logging.WARNING, "node.tokenizer %s", facts.probe_report)
        node = Node(config, tokenizer, Random(secrets.randbits(64)), key)  # noqa: S311  # placement draws no secrets
        reloads = Reloads(node, loaded, source, descriptors) if source is not None else None
        with node.resolver.installed(), closing(node.upstream), collected_in_waits():
            if keys is not None:
                node.clustering = await open_cluster(config, keys, key_file, node.router, node.scheme, node.faults)
                node.engine_events.share(node.clustering.peer.streams)
                node.poller.owns = looked_at_by(node.clustering.peer)
                share_verdicts(node.clients, node.clustering)
                if node.pipeline.responses is not None:
                    share_answers(node.pipeline.responses, node.clustering)
            await run_parts(node, reloads, serve_control, task_status)
    finally:
        await tokenizer.close()
    log.info("node.stopped")


async def run_parts(
    node: Node, reloads: Reloads | None, serve_control: ServeControl, task_status: trio.TaskStatus[Addresses]
) -> None:
    """Start the parts in order, serve until drained, stop them in reverse.

    A fault in one part never ends the others: the part is restarted here, or restarts its own loops if it has several.
    """
    config, faults = node.config, node.faults
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(node.resolver.run)
        nursery.start_soon(faults.keep, "tokenizer", node.tokenizer.run)
        nursery.start_soon(faults.keep, "tokenizer_worker", node.tokenizer_worker.run)
        nursery.start_soon(faults.keep, "sweep", node.sweep)
        nursery.start_soon(faults.keep, "clients", node.clients.run)
        if node.recorder is not None:
            nursery.start_soon(faults.keep, "recorder", node.recorder.run)
        if node.clustering is not None:
            await nursery.start(node.clustering.run)
            nursery.start_soon(faults.keep, "follow", node.follow, node.clustering)
        nursery.start_soon(node.index_parts.run)
        if (responses := node.pipeline.responses) is not None and responses.elsewhere is not None:
            nursery.start_soon(faults.keep, "response_cache", responses.elsewhere.run)
        await nursery.start(node.poller.run)
        nursery.start_soon(node.names.run, faults, log_transitions)
        await nursery.start(node.engine_events.run)
        nursery.start_soon(faults.keep, "hangs", node.hang_watch.run)
        nursery.start_soon(faults.keep, "calibration", node.calibration_parts.run)
        await nursery.start(node.worker_reports.run)
        with listening_on(config.control):
            url = await nursery.start(partial(serve_control, node, reloads, shutdown=shutdown))
        await nursery.start(node.stop_on_signal)
        if reloads is not None and signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:  # else it ends a process
            nursery.start_soon(faults.keep, "reload", reloads.run)
        node.first_round.deadline = trio.current_time() + config.polls.probe_timeout_s
        with node.first_round:  # who serves which model, before the first request asks
            await node.poller.wait_first_round()
        async with trio.open_nursery() as serving:
            host, port = host_port(config.listen)
            with listening_on(config.listen):
                bound = await serving.start(partial(node.server.serve, host, port, reuse_port=config.workers > 1))
            addresses = Addresses(bound, url)
            if not config.backend:
                log.warning("node.no_backends every request gets a 503 until one is added: POST /admin/backends")
            if not node.draining:  # by a signal that came meanwhile
                log.info("node.ready on %s", addresses)
                announce(f"ranvier listening on {addresses}")
            task_status.started(addresses)
        await node.drained.wait()
        shutdown.set()
        nursery.cancel_scope.cancel()


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory. Returns False if that is not possible.

    By default glibc returns what is freed at the top of its heap, so every large body is received into pages that the
    kernel must first find and clear. After a peak, a process keeps up to `KEEP_BYTES`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAP_BYTES_MIN)) and bool(mallopt(M_TRIM_THRESHOLD, KEEP_BYTES))
